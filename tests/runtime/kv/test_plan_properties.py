"""Properties of the KV arithmetic for any layers, any memory, any length."""

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from isthmus_runtime.errors import PlanError
from isthmus_runtime.kv.groups import GroupPlan, LayerSpec, blocks_needed, group_layers, max_len_that_fits
from isthmus_runtime.kv.plan import KvPlanInput, kv_shape, plan

sizes = st.sampled_from([1, 8, 16, 64])


@st.composite
def specs(draw: st.DrawFn) -> LayerSpec:
    kind = draw(st.sampled_from(["full", "sliding", "mla"]))
    layers, block_size = draw(st.integers(1, 20)), draw(sizes)
    dtype = draw(st.sampled_from(["bf16", "fp8", "fp8_per_token_head"]))
    if kind == "mla":
        return LayerSpec(kind=kind, layers=layers, block_size=block_size, dtype=dtype, width=draw(st.integers(1, 640)))
    return LayerSpec(
        kind=kind,
        layers=layers,
        block_size=block_size,
        dtype=dtype,
        kv_heads=draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from([64, 128])),
        window=draw(st.integers(1, 5000)) if kind == "sliding" else None,
    )


workers = st.lists(st.lists(specs(), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple)


@st.composite
def inputs(draw: st.DrawFn) -> KvPlanInput:
    layers = draw(workers)
    return KvPlanInput(
        ranks=layers,
        available_bytes=tuple(draw(st.integers(0, 2**31)) for _ in layers),
        max_model_len=draw(st.integers(1, 200_000)),
        max_num_batched_tokens=draw(st.integers(1, 8192)),
        batches_in_flight=draw(st.integers(1, 3)),
        auto_fit=draw(st.booleans()),
    )


groups = st.lists(
    st.builds(
        GroupPlan,
        block_size=sizes,
        window=st.none() | st.integers(1, 5000),
        tokens_in_flight=st.integers(1, 9000),
    ),
    min_size=1,
    max_size=4,
)


def granted(inp: KvPlanInput) -> int:
    try:
        return plan(inp).max_model_len
    except PlanError:
        return 0


@given(groups, st.integers(0, 20_000), st.integers(0, 300))
def test_demand_grows_with_length(some: list[GroupPlan], length: int, more: int) -> None:
    assert blocks_needed(some, length) <= blocks_needed(some, length + more)


@given(groups, st.integers(0, 3000), st.integers(0, 20_000))
def test_the_longest_length_fits_and_the_next_does_not(some: list[GroupPlan], usable: int, limit: int) -> None:
    longest = max_len_that_fits(some, usable, limit)
    assert 0 <= longest <= limit
    assert blocks_needed(some, longest) <= usable
    assert longest == limit or blocks_needed(some, longest + 1) > usable


@given(groups, st.integers(1, 20_000), st.data())
def test_demand_covers_the_blocks_really_held(some: list[GroupPlan], length: int, data: st.DataObject) -> None:
    """At any moment a group holds the blocks from the oldest position still needed to the newest one written."""
    for group in some:
        written = data.draw(st.integers(1, length))
        fresh = data.draw(st.integers(1, min(max(1, group.tokens_in_flight), written)))
        oldest = 0 if group.window is None else max(0, written - fresh - (group.window - 1))
        held = (written - 1) // group.block_size - oldest // group.block_size + 1
        assert held <= group.blocks_needed(length)


@given(inputs(), st.integers(0, 2**30))
def test_more_memory_never_hurts(inp: KvPlanInput, more: int) -> None:
    richer = replace(inp, available_bytes=tuple(size + more for size in inp.available_bytes))
    assert granted(inp) <= granted(richer)


@given(inputs())
def test_a_plan_keeps_its_promises(inp: KvPlanInput) -> None:
    shape = kv_shape(inp)
    try:
        result = plan(inp)
    except PlanError as error:
        assert error.code in {"no_memory", "max_model_len_does_not_fit"}
        fewest = min(a // w.bytes_per_block for a, w in zip(inp.available_bytes, shape.ranks, strict=True))
        asked = 1 if inp.auto_fit else inp.max_model_len
        assert blocks_needed(shape.groups, asked) > fewest - 1
        return
    assert result.usable_blocks == result.num_blocks - 1
    assert result.blocks_needed(result.max_model_len) <= result.usable_blocks
    assert result.max_model_len == inp.max_model_len or inp.auto_fit
    for size, worker in zip(inp.available_bytes, result.ranks, strict=True):
        assert result.num_blocks * worker.bytes_per_block <= size


@given(inputs())
def test_an_override_of_the_measured_number_changes_nothing(inp: KvPlanInput) -> None:
    # Enough memory and auto-fit: there is always a plan to compare with.
    inp = replace(inp, auto_fit=True, available_bytes=tuple(size + 2**40 for size in inp.available_bytes))
    measured = plan(inp)
    assert plan(replace(inp, num_blocks_override=measured.num_blocks)) == measured
    try:
        plan(replace(inp, num_blocks_override=measured.num_blocks + 1))
    except PlanError as error:
        assert error.code == "override_exceeds_memory"
    else:
        raise AssertionError("an override of one block more than the memory holds was accepted")


@given(st.lists(specs(), min_size=1, max_size=4))
def test_a_block_holds_the_largest_group_and_every_layer_has_a_page(layers: list[LayerSpec]) -> None:
    grouped = group_layers(layers)
    sums = [0] * len(grouped.demands)
    for place in grouped.placements:
        sums[place.group] += place.page_bytes
    assert grouped.bytes_per_block == max(sums)
    assert min(sums) > 0
    assert sum(sums) == sum(spec.layers * spec.page_bytes for spec in layers)


@given(st.integers(1, 60), st.integers(1, 60))
@example(fulls=4, slidings=6)  # exactly 1.5 times: the smaller count decides
@example(fulls=13, slidings=12)
def test_one_page_size_means_groups_of_equal_layer_count(fulls: int, slidings: int) -> None:
    shared = {"kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": "bf16"}
    full = LayerSpec(kind="full", layers=fulls, **shared)  # type: ignore[arg-type]
    sliding = LayerSpec(kind="sliding", layers=slidings, window=128, **shared)  # type: ignore[arg-type]
    small, large = sorted((fulls, slidings))
    size = large if large < 1.5 * small else small
    grouped = group_layers([full, sliding])
    assert grouped.bytes_per_block == size * full.page_bytes
    assert len(grouped.demands) == -(-fulls // size) + -(-slidings // size)
