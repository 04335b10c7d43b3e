"""The vectorised step description equals a plain loop over requests, for random histories."""

from __future__ import annotations

from itertools import accumulate

import torch
from fake_device import FakeDevice
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.executor.graphs import Graphs
from isthmus_runtime.executor.input_batch import InputBatch, StepInputs
from isthmus_runtime.executor.staging import StagingSlot
from isthmus_runtime.interfaces.steps import Chunk, RowBlocks, RowStart, StepPlan
from isthmus_runtime.kv.groups import GroupPlan
from isthmus_runtime.layers.batch import ForwardBatch
from isthmus_runtime.request import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
MAX_ROWS, MAX_LEN, MAX_TOKENS = 5, 40, 64
GROUPS = (GroupPlan(block_size=4), GroupPlan(block_size=8, window=5, tokens_in_flight=64))


class Naive:
    """Rows as Python lists."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[dict[int, int]]] = {}


class Batch:
    """An input batch on a device, its steps taken there at once."""

    def __init__(self, sizes: tuple[int, ...] = (), token_sizes: tuple[int, ...] = (), met_tokens: int = 0) -> None:
        self.device = FakeDevice(sizes, token_sizes, met_tokens)
        graphs = Graphs(self.device, max_rows=MAX_ROWS, max_tokens=MAX_TOKENS, max_len=MAX_LEN)
        self.rows = InputBatch(
            self.device,
            graphs,
            max_rows=MAX_ROWS,
            max_tokens=MAX_TOKENS,
            max_len=MAX_LEN,
            groups=GROUPS,
            slots=2,
        )
        self.flat = self.rows.tokens.view(-1)

    def describe(self, plan: StepPlan, slot: int = 0) -> StepInputs:
        """Build a step and take it to the device."""
        inputs = self.rows.build(plan, self.rows.slots[slot])
        self.upload(inputs, slot)
        return inputs

    def upload(self, inputs: StepInputs, slot: int = 0) -> None:
        """What the runner does before the model runs."""
        for row, tokens in inputs.starts:
            row.copy_(tokens)
        self.rows.uploaded.fill_(-(2**62))
        self.rows.uploaded[: inputs.words] = self.rows.slots[slot].inputs[: inputs.words]
        for table, uploaded in inputs.tables:
            table.copy_(uploaded)
        if inputs.sources is not None:
            torch.index_select(self.flat, 0, inputs.sources, out=forward_of(inputs).token_ids)

    def store(self, inputs: StepInputs, tokens: list[int]) -> None:
        """Keep `tokens` as what the rows drew."""
        assert inputs.draws is not None
        ids = torch.tensor(tokens + [7] * (len(inputs.draws.targets) - len(tokens)), dtype=torch.int32)
        self.flat.index_copy_(0, inputs.draws.targets, ids)


def forward_of(inputs: StepInputs) -> ForwardBatch:
    assert inputs.forward is not None
    return inputs.forward


@given(st.data())
def test_steps_match_a_plain_loop(data: st.DataObject) -> None:
    """With captured sizes, dummy rows and tokens follow the real ones and disturb nothing."""
    sizes = st.sampled_from([(), ((1, 4, 6),), ((1, 4, 6), (8, 32)), ((), (), 20)])
    batch, naive = Batch(*data.draw(sizes, label="sizes")), Naive()
    computed, scored_until = dict[int, int](), dict[int, int]()
    blocks = st.integers(0, 1000)
    for step in range(data.draw(st.integers(1, 6), label="steps")):
        starts, grown, chunks = list[RowStart](), list[RowBlocks](), list[Chunk]()
        rows = data.draw(st.permutations(range(MAX_ROWS)), label="rows")
        for row in rows[: data.draw(st.integers(1, MAX_ROWS), label="count")]:
            known = len(naive.tokens.get(row, ()))
            if computed.get(row, 0) >= known or data.draw(st.booleans(), label="restart"):
                length = data.draw(st.integers(1, MAX_LEN), label="length")
                tokens = [step * 1000 + row * 100 + i for i in range(length)]
                tables = [
                    data.draw(st.lists(blocks, max_size=-(-MAX_LEN // g.block_size)), label="table") for g in GROUPS
                ]
                wanted = data.draw(st.sampled_from([-1, 0]), label="scores")
                starts.append(
                    RowStart(row, "r", tokens, length, tuple(map(tuple, tables)), GREEDY, prompt_logprobs=wanted)
                )
                scored_until[row] = 0 if wanted < 0 else length - 1
                naive.tokens[row] = list(tokens)
                naive.tables[row] = [dict(enumerate(table)) for table in tables]
                computed[row] = 0
            number = data.draw(st.integers(0, len(GROUPS) - 1), label="group")
            index = data.draw(st.integers(0, 4), label="index")
            ids = tuple(data.draw(st.lists(blocks, max_size=1), label="ids"))
            grown.append(RowBlocks(row, number, index, ids))
            naive.tables[row][number].update({index + i: block for i, block in enumerate(ids)})
            left = MAX_TOKENS - sum(chunk.num_tokens for chunk in chunks)
            todo = min(len(naive.tokens[row]) - computed[row], left)
            if todo < 1:
                continue
            count = data.draw(st.integers(1, todo), label="tokens")
            draws = int(computed[row] + count == len(naive.tokens[row]))
            chunks.append(Chunk(row, computed[row], count, draws))
        if not chunks:
            batch.describe(StepPlan(step, tuple(starts), tuple(grown), (), 0))
            continue
        total = sum(chunk.num_tokens for chunk in chunks)
        inputs = batch.describe(StepPlan(step, tuple(starts), tuple(grown), tuple(chunks), total), step % 2)

        forward, draws = forward_of(inputs), inputs.draws
        spans = [(c.row, p) for c in chunks for p in range(c.start, c.start + c.num_tokens)]
        graphs = batch.rows._graphs
        decode = all(c.num_tokens == 1 for c in chunks)
        if decode:
            size = graphs.padded(len(chunks))
            graph, rows, extra = ("decode", size), size, size - len(chunks)
        elif graphs.token_sizes and len(spans) <= 32:
            size = 8 if len(spans) <= 8 else 32
            graph, rows, extra = ("prompts", size), 6, size - len(spans)
        elif len(spans) <= batch.device.met_tokens:
            graph, rows, extra = ("prompts", len(spans)), MAX_ROWS, 0
        else:
            graph, rows, extra = None, len(chunks), 0
        dummies = rows - len(chunks)
        assert forward.token_ids.tolist()[: len(spans)] == [naive.tokens[row][p] for row, p in spans]
        assert forward.positions.tolist() == [p for _, p in spans] + [0] * extra
        assert forward.seq_lens.tolist() == [c.start + c.num_tokens for c in chunks] + [int(decode)] * dummies
        bounds = [*accumulate((c.num_tokens for c in chunks), initial=0)]
        assert forward.query_start_loc.tolist() == bounds + [bounds[-1] + decode * (1 + i) for i in range(dummies)]
        longest = max(c.start + c.num_tokens for c in chunks)
        assert forward.max_seq_len == (MAX_LEN if graphs.sizes and graph else longest)
        assert forward.max_query_len == (graph[1] if graph and not decode else max(c.num_tokens for c in chunks))
        for number, group in enumerate(GROUPS):
            size, got = group.block_size, forward.groups[number]
            slots = []
            for row, p in spans:
                block = naive.tables[row][number].get(p // size, 0)
                slots.append(block * size + p % size if block else -1)
            assert got.slot_mapping.tolist() == slots + [-1] * extra
            for c, table in zip(chunks, got.block_tables.tolist(), strict=False):
                used = -(-(c.start + c.num_tokens) // size)
                assert table[:used] == [naive.tables[c.row][number].get(i, 0) for i in range(used)]
            # Rows without tokens are not looked at, and taken to the device only where others are padded as well.
            if decode or graphs.sizes:
                assert all(table[0] == 0 for table in got.block_tables.tolist()[len(chunks) :])
        scored = [c.start < min(c.start + c.num_tokens, scored_until[c.row]) for c in chunks]
        reads = [c.num_tokens if told else c.draws for c, told in zip(chunks, scored, strict=True)]
        whole = 2 * sum(reads) > len(spans) and not (graph and graphs.sizes)
        if graph is not None and whole and not decode:
            graph = ("prompts whose tokens are all read", graph[1])
        assert inputs.graph == graph
        if whole or decode:
            assert inputs.read is None
            reads = [c.num_tokens for c in chunks]
        else:
            assert inputs.read is not None
            tokens = [t for end, n in zip(bounds[1:], reads, strict=True) for t in range(end - n, end)]
            assert inputs.read.tokens.tolist() == tokens
            assert inputs.read.positions.tolist() == [spans[token][1] for token in tokens]
            parts = [*accumulate(reads, initial=0)]
            assert inputs.read.query_start_loc.tolist() == parts + [parts[-1]] * dummies
            assert inputs.read.seq_lens is forward.seq_lens and inputs.read.max_query_len == max(reads)
            for own, all_of in zip(inputs.read.groups, forward.groups, strict=True):
                assert own.block_tables is all_of.block_tables and own.slot_mapping.tolist() == [-1] * len(tokens)
        ends = [*accumulate(reads)]
        firsts = [end - n for end, n, told in zip(ends, reads, scored, strict=True) if told]
        assert [part.first for part in inputs.scored] == firsts
        drawing = [(c, ends[i] - 1) for i, c in enumerate(chunks) if c.draws]
        if not drawing:
            assert draws is None
        else:
            assert draws is not None and draws.count == len(drawing) and not draws.parameters
            assert draws.logit_rows.tolist()[: draws.count] == [last for _, last in drawing]
            assert len(draws.logit_rows) == (rows if len(drawing) == len(chunks) and decode else draws.count)
            tokens_drawn = [500 + i for i in range(len(drawing))]
            batch.store(inputs, tokens_drawn)
            for (chunk, _), token in zip(drawing, tokens_drawn, strict=True):
                if len(naive.tokens[chunk.row]) < MAX_LEN:
                    naive.tokens[chunk.row].append(token)
        for chunk in chunks:
            computed[chunk.row] += chunk.num_tokens


def sampling_plan(step: int, *rows: SamplingParams) -> StepPlan:
    """A step that starts `rows` and draws for all of them."""
    starts = tuple(RowStart(row, "r", [1], 1, ((), ()), sampling) for row, sampling in enumerate(rows))
    return StepPlan(step, starts, (), tuple(Chunk(row, 0, 1, 1) for row in range(len(rows))), len(rows))


def test_any_whole_number_is_a_seed() -> None:
    batch = Batch()
    for seed, stored in ((0, 0), (-1, -1), (2**63, -(2**63)), (2**64 + 5, 5), (2**64 - 1, -1)):
        draws = batch.describe(sampling_plan(0, SamplingParams(max_tokens=1, temperature=1.0, seed=seed))).draws
        assert draws is not None and draws.parameters["seeds"].tolist() == [stored]


def test_only_filters_in_use_reach_the_sampler() -> None:
    def used(*rows: SamplingParams) -> set[str]:
        draws = Batch().describe(sampling_plan(0, *rows)).draws
        assert draws is not None
        return set(draws.parameters)

    greedy = SamplingParams(max_tokens=1, temperature=0.0, top_k=4)
    assert used(greedy) == set()
    plain = SamplingParams(max_tokens=1, temperature=1.0)
    always = {"temperature", "seeds", "positions"}
    assert used(plain) == always
    assert used(plain, SamplingParams(max_tokens=1, temperature=1.0, top_p=0.5)) == always | {"top_p"}
    assert used(plain, greedy) == always | {"top_k"}


def test_draws_with_parameters_or_logprobs_are_not_left_to_a_graph() -> None:
    for sampling, graph in (
        (SamplingParams(max_tokens=1, temperature=0.0), 4),
        (SamplingParams(max_tokens=1, temperature=0.5), 0),
        (SamplingParams(max_tokens=1, temperature=0.0, logprobs=2), 0),
    ):
        draws = Batch((1, 4, 8)).describe(sampling_plan(0, *[sampling] * 3)).draws
        assert draws is not None and (draws.count, draws.graph) == (3, graph)
        assert len(draws.logit_rows) == (graph or 3)


def test_steps_of_one_size_lie_at_the_same_addresses() -> None:
    """What a captured graph reads does not depend on the slot, the rows or the lengths."""
    batch = Batch((1, 4, 8))

    def addresses(inputs: StepInputs) -> list[int]:
        forward, draws = forward_of(inputs), inputs.draws
        assert draws is not None
        tensors = [forward.token_ids, forward.positions, forward.query_start_loc, forward.seq_lens]
        tensors += [t for group in forward.groups for t in (group.block_tables, group.slot_mapping)]
        return [t.data_ptr() for t in (*tensors, draws.logit_rows, draws.targets)]

    first = addresses(batch.describe(sampling_plan(0, *[GREEDY] * 3)))
    long = StepPlan(1, (RowStart(4, "r", [1] * 30, 30, ((1,) * 8, (2,) * 4), GREEDY),), (), (), 0)
    batch.describe(long)
    later = StepPlan(2, (), (), (Chunk(4, 29, 1, 1), Chunk(0, 0, 1, 1)), 2)
    assert addresses(batch.describe(later, slot=1)) == first
    assert addresses(batch.rows.dummies(4, batch.rows.slots[0])) == first


def test_steps_with_prompts_of_one_size_lie_at_the_same_addresses() -> None:
    batch = Batch((8,), (16, 32))

    def addresses(inputs: StepInputs) -> list[int]:
        forward = forward_of(inputs)
        assert inputs.graph == ("prompts", 16)
        tensors = [forward.token_ids, forward.positions, forward.query_start_loc, forward.seq_lens]
        tensors += [t for group in forward.groups for t in (group.block_tables, group.slot_mapping)]
        return [t.data_ptr() for t in tensors]

    first = addresses(batch.rows.dummies(16, batch.rows.slots[0], prompts=True))
    start = RowStart(4, "r", [1] * 30, 30, ((1,) * 8, (2,) * 4), GREEDY)
    other = RowStart(1, "r", [1] * 3, 3, ((1,), (2,)), GREEDY)
    plan = StepPlan(1, (start, other), (), (Chunk(4, 5, 10, 0), Chunk(1, 2, 1, 1)), 11)
    assert addresses(batch.describe(plan, slot=1)) == first


def test_steps_with_prompts_met_before_lie_at_the_same_addresses() -> None:
    """Whatever their rows and lengths: nothing but the number of tokens, and whether all are read, tells two apart."""
    batch = Batch(met_tokens=20)

    def addresses(chunks: tuple[Chunk, ...], slot: int, name: str = "prompts") -> list[int]:
        tokens = sum(chunk.num_tokens for chunk in chunks)
        inputs = batch.describe(StepPlan(1, (), (), chunks, tokens), slot)
        forward = forward_of(inputs)
        assert inputs.graph == (None if tokens > 20 else (name, tokens))
        if inputs.graph is None:
            return []
        assert forward.token_ids.shape == (tokens,) and forward.seq_lens.shape == (MAX_ROWS,)
        assert forward.seq_lens.tolist()[len(chunks) :] == [0] * (MAX_ROWS - len(chunks))
        tensors = [forward.token_ids, forward.positions, forward.query_start_loc, forward.seq_lens]
        tensors += [t for group in forward.groups for t in (group.block_tables, group.slot_mapping)]
        return [t.data_ptr() for t in tensors]

    starts = tuple(RowStart(row, "r", [1] * 30, 30, ((1,) * 8, (2,) * 4), GREEDY) for row in range(4))
    batch.describe(StepPlan(0, starts, (), (), 0))
    first = addresses((Chunk(0, 0, 12, 0),), 0)
    assert addresses((Chunk(3, 8, 10, 0), Chunk(1, 29, 1, 1), Chunk(2, 12, 1, 1)), 1) == first
    whole = addresses((Chunk(3, 26, 4, 4), Chunk(1, 22, 8, 8)), 1, "prompts whose tokens are all read")
    assert whole == first
    assert not addresses((Chunk(3, 0, 21, 0),), 0)


def test_a_new_request_sees_nothing_of_the_row_before() -> None:
    batch = Batch()
    sampling = SamplingParams(max_tokens=1)
    old = RowStart(1, "old", [7] * 30, 30, (tuple(range(1, 9)), (1, 2, 3, 4)), sampling)
    new = RowStart(1, "new", [9], 1, ((5,), (6,)), sampling)
    forward = forward_of(batch.describe(StepPlan(0, (old, new), (), (Chunk(1, 0, 1, 1),), 1)))
    assert forward.token_ids.tolist() == [9]
    assert [group.block_tables[:, 0].tolist() for group in forward.groups] == [[5], [6]]
    assert (batch.rows._tables[0]._rows[1, 1:] == 0).all()


def test_a_step_is_built_before_the_last_one_ran() -> None:
    """The second step continues a row with a token that nobody has seen, and leaves the first one's inputs alone."""
    batch = Batch((4, 8))
    slots = batch.rows.slots
    start = RowStart(2, "r", [5, 6, 7], 3, ((1,), (1,)), GREEDY)
    first = batch.rows.build(StepPlan(0, (start,), (), (Chunk(2, 0, 3, 1),), 3), slots[0])
    second = batch.rows.build(StepPlan(1, (), (), (Chunk(2, 3, 1, 1),), 1), slots[1])
    batch.upload(first, 0)
    assert forward_of(first).token_ids.tolist() == [5, 6, 7] and forward_of(first).seq_lens.tolist() == [3]
    batch.store(first, [77])
    batch.upload(second, 1)
    assert forward_of(second).token_ids.tolist()[0] == 77 and forward_of(second).seq_lens.tolist() == [4, 1, 1, 1]


def test_prompts_longer_than_the_staging_still_arrive() -> None:
    batch = Batch()
    slot = batch.rows.slots[0]
    parts = [slot.tokens(range(n)) for n in (1000, 900, 5000)]
    assert [part.tolist() for part in parts] == [list(range(n)) for n in (1000, 900, 5000)]


def test_answers_longer_than_the_staging_still_arrive_and_grow_it_once() -> None:
    device = FakeDevice()
    slot = StagingSlot(device, capacity=8, max_draws=2, prompts=8, answers=30)
    shapes = [((5,), torch.float32), ((3, 7), torch.int64), ((2, 0), torch.float32), ((3, 3), torch.float64)]
    made = device.allocations
    for step in range(3):
        slot.reset()
        parts = [slot.answer(*shape, dtype=dtype).fill_(step + number) for number, (shape, dtype) in enumerate(shapes)]
        assert [tuple(part.shape) for part in parts] == [shape for shape, _ in shapes]
        assert all((part == step + number).all() for number, part in enumerate(parts)), "answers overlap"
        assert device.allocations == made + 1


def test_prompts_of_a_full_step_need_no_new_staging() -> None:
    """On a GPU that is pinned memory, which the driver takes its time to make."""
    device, longest = FakeDevice(), 900
    graphs = Graphs(device, max_rows=4, max_tokens=1000, max_len=longest)
    groups = (GroupPlan(block_size=16),)
    batch = InputBatch(device, graphs, max_rows=4, max_tokens=1000, max_len=longest, groups=groups, slots=2)
    made, lengths = device.allocations, [longest, 99, longest]
    counts = [longest, 99, 1]  # the step has room for the first token of the last prompt
    starts = tuple(
        RowStart(row, f"r{row}", tuple(range(length)), length, ((),), GREEDY) for row, length in enumerate(lengths)
    )
    chunks = tuple(Chunk(row, 0, count, 0) for row, count in enumerate(counts))
    plan = StepPlan(step=1, starts=starts, grown=(), chunks=chunks, num_tokens=sum(counts))
    for slot in batch.slots:
        staged = batch.build(plan, slot).starts
        assert [tokens.tolist() for _, tokens in staged] == [list(range(length)) for length in lengths]
    assert device.allocations == made
