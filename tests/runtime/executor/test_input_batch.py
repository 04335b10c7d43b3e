"""The vectorised step description equals a plain loop over requests, for random histories."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.executor.input_batch import InputBatch
from isthmus_runtime.interfaces.steps import Chunk, RowBlocks, RowStart, StepPlan
from isthmus_runtime.kv.groups import GroupPlan
from isthmus_runtime.request import SamplingParams

MAX_ROWS, MAX_LEN, MAX_TOKENS = 5, 40, 64
GROUPS = (GroupPlan(block_size=4), GroupPlan(block_size=8, window=5, tokens_in_flight=64))


class Naive:
    """Rows as Python lists."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[dict[int, int]]] = {}


def new_batch() -> InputBatch:
    return InputBatch(max_rows=MAX_ROWS, max_tokens=MAX_TOKENS, max_len=MAX_LEN, groups=GROUPS)


@given(st.data())
def test_steps_match_a_plain_loop(data: st.DataObject) -> None:
    batch, naive = new_batch(), Naive()
    computed: dict[int, int] = {}
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
                starts.append(
                    RowStart(row, "r", tokens, length, tuple(map(tuple, tables)), SamplingParams(max_tokens=1))
                )
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
            batch.update(StepPlan(step, tuple(starts), tuple(grown), (), 0))
            continue
        total = sum(chunk.num_tokens for chunk in chunks)
        forward, drawn = batch.apply(StepPlan(step, tuple(starts), tuple(grown), tuple(chunks), total))

        spans = [(c.row, p) for c in chunks for p in range(c.start, c.start + c.num_tokens)]
        assert forward.token_ids.tolist() == [naive.tokens[row][p] for row, p in spans]
        assert forward.positions.tolist() == [p for _, p in spans]
        assert forward.seq_lens.tolist() == [c.start + c.num_tokens for c in chunks]
        assert forward.query_start_loc.tolist() == [
            sum(c.num_tokens for c in chunks[:i]) for i in range(len(chunks) + 1)
        ]
        assert forward.max_seq_len == max(c.start + c.num_tokens for c in chunks)
        assert forward.max_query_len == max(c.num_tokens for c in chunks)
        for number, group in enumerate(GROUPS):
            size, got = group.block_size, forward.groups[number]
            slots = []
            for row, p in spans:
                block = naive.tables[row][number].get(p // size, 0)
                slots.append(block * size + p % size if block else -1)
            assert got.slot_mapping.tolist() == slots
            for c, table in zip(chunks, got.block_tables.tolist(), strict=True):
                used = -(-(c.start + c.num_tokens) // size)
                assert table[:used] == [naive.tables[c.row][number].get(i, 0) for i in range(used)]
        last = np.cumsum([c.num_tokens for c in chunks]) - 1
        assert forward.logit_rows.tolist() == [int(last[i]) for i, c in enumerate(chunks) if c.draws]
        assert drawn.rows.tolist() == [c.row for c in chunks if c.draws]
        assert drawn.positions.tolist() == [c.start + c.num_tokens for c in chunks if c.draws]
        tokens_drawn = np.arange(len(drawn.rows)) + 500
        batch.store(drawn, tokens_drawn)
        for row, token in zip(drawn.rows.tolist(), tokens_drawn.tolist(), strict=True):
            if len(naive.tokens[row]) < MAX_LEN:
                naive.tokens[row].append(token)
        for chunk in chunks:
            computed[chunk.row] += chunk.num_tokens


def test_any_whole_number_is_a_seed() -> None:
    batch = new_batch()
    for seed, stored in ((0, 0), (-1, -1), (2**63, -(2**63)), (2**64 + 5, 5), (2**64 - 1, -1)):
        sampling = SamplingParams(max_tokens=1, seed=seed)
        batch.start(RowStart(0, "r", [1], 1, ((), ()), sampling))
        assert batch.seed[0] == stored


def test_a_new_request_sees_nothing_of_the_row_before() -> None:
    batch = new_batch()
    sampling = SamplingParams(max_tokens=1)
    batch.start(RowStart(1, "old", [7] * 30, 30, (tuple(range(1, 9)), (1, 2, 3, 4)), sampling))
    batch.start(RowStart(1, "new", [9], 1, ((5,), (6,)), sampling))
    forward, _ = batch.apply(StepPlan(0, (), (), (Chunk(1, 0, 1, 1),), 1))
    assert forward.token_ids.tolist() == [9]
    assert [group.block_tables.tolist() for group in forward.groups] == [[[5]], [[6]]]
    assert (batch._tables[0][1, 1:] == 0).all()
