"""The KV arithmetic against 109 recorded cases and hand-checked examples (numbers fixed before the code)."""

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus_runtime.errors import ConfigError, PlanError
from isthmus_runtime.kv.groups import GroupPlan, LayerSpec
from isthmus_runtime.kv.plan import KvPlanInput, kv_shape, plan, plan_from_json

CASES = json.loads((Path(__file__).parent / "kv_plan_cases.json").read_text())
G = 2**30


@pytest.mark.parametrize("case", CASES, ids=[case["input"]["name"] for case in CASES])
def test_recorded_case(case: dict[str, Any]) -> None:
    assert plan_from_json(case["input"]) == case["expect"]


def full(layers: int, heads: int = 8, dim: int = 128, bs: int = 16, dtype: str = "bf16") -> LayerSpec:
    return LayerSpec(kind="full", layers=layers, kv_heads=heads, head_dim=dim, block_size=bs, dtype=dtype)


def sliding(layers: int, window: int, heads: int, dim: int, bs: int = 16) -> LayerSpec:
    return LayerSpec(
        kind="sliding", layers=layers, kv_heads=heads, head_dim=dim, block_size=bs, dtype="bf16", window=window
    )


def mla(layers: int, width: int, dtype: str = "bf16") -> LayerSpec:
    return LayerSpec(kind="mla", layers=layers, width=width, block_size=64, dtype=dtype)


LLAMA = ((full(32),),)
HYBRID = ((full(8, 4, 256), sliding(40, 1024, 4, 256)),)
SLIDING_ONLY = ((sliding(4, 4096, 8, 128),),)
MLA_INDEXER = ((mla(61, 576), mla(61, 132, "fp8")),)
AUTO = {"auto_fit": True}

# (name, workers, bytes per worker, max_model_len, other inputs, bytes_per_block, groups, need, num_blocks, granted len)
FITS: list[tuple[str, Any, Any, int, dict[str, Any], int, int, int, int, int]] = [
    ("1", LLAMA, [8 * G], 8192, {}, 2097152, 1, 512, 4096, 8192),
    ("1b", ((full(32, dtype="fp8"),),), [8 * G], 8192, {}, 1048576, 1, 512, 8192, 8192),
    ("2b", LLAMA, [8 * G], 131072, {"num_blocks_override": 50, **AUTO}, 2097152, 1, 8192, 50, 784),
    ("2d", LLAMA, [8 * G], 1024, {"num_blocks_override": 65}, 2097152, 1, 64, 65, 1024),
    ("3", LLAMA, [4 * G], 131072, AUTO, 2097152, 1, 8192, 2048, 32752),
    ("4", HYBRID, [10 * G], 32768, {}, 524288, 6, 4933, 20480, 32768),
    ("4 async", HYBRID, [10 * G], 32768, {"batches_in_flight": 2}, 524288, 6, 7493, 20480, 32768),
    ("4c", HYBRID, [G], 131072, {"max_num_batched_tokens": 2048, **AUTO}, 524288, 6, 9157, 2048, 17312),
    ("4d", ((full(48, 4, 256),),), [10 * G], 32768, {}, 3145728, 1, 2048, 3413, 32768),
    (
        "5",
        ((full(13, 8, 64), sliding(12, 128, 8, 64)),),
        [4 * G],
        16384,
        {"max_num_batched_tokens": 2048},
        425984,
        2,
        1161,
        10082,
        16384,
    ),
    ("6", ((mla(61, 576),),), [20 * G], 131072, {}, 4497408, 1, 2048, 4774, 131072),
    ("6 fp8 656 B", ((mla(61, 656, "fp8"),),), [20 * G], 131072, {}, 2561024, 1, 2048, 8385, 131072),
    ("7", MLA_INDEXER, [20 * G], 131072, {}, 5012736, 1, 2048, 4284, 131072),
    ("7 auto", MLA_INDEXER, [20 * G], 131072, {"num_blocks_override": 100, **AUTO}, 5012736, 1, 2048, 100, 6336),
    ("8", ((full(32), full(2, 4)),), [8 * G], 8192, {}, 2162688, 1, 512, 3971, 8192),
    ("9", ((full(17),), (full(15),)), [4 * G, 4 * G], 8192, {}, 1114112, 1, 512, 3855, 8192),
    (
        "9 auto",
        ((full(17),), (full(15),)),
        [4 * G, 4 * G],
        131072,
        {"num_blocks_override": 100, **AUTO},
        1114112,
        1,
        8192,
        100,
        1584,
    ),
    (
        "10",
        ((full(4), sliding(8, 512, 4, 128)),),
        [G],
        4096,
        {"max_num_batched_tokens": 512},
        262144,
        2,
        321,
        4096,
        4096,
    ),
    ("11", SLIDING_ONLY, [G], 32768, {}, 262144, 1, 769, 4096, 32768),
    ("11 override 770", SLIDING_ONLY, [G], 32768, {"num_blocks_override": 770}, 262144, 1, 769, 770, 32768),
    ("65 blocks", LLAMA, [65 * 2097152], 1024, {}, 2097152, 1, 64, 65, 1024),
    ("override 64 len 1000", LLAMA, [8 * G], 1000, {"num_blocks_override": 64}, 2097152, 1, 63, 64, 1000),
    ("override 2 auto", LLAMA, [8 * G], 8192, {"num_blocks_override": 2, **AUTO}, 2097152, 1, 512, 2, 16),
    ("ample auto", LLAMA, [80 * G], 8192, AUTO, 2097152, 1, 512, 40960, 8192),
    ("tp 4G and 3G", (LLAMA[0], LLAMA[0]), [4 * G, 3 * G], 131072, AUTO, 2097152, 1, 8192, 1536, 24560),
    ("pp 4G and 2G", ((full(17),), (full(15),)), [4 * G, 2 * G], 8192, {}, 1114112, 1, 512, 2184, 8192),
    ("4 override 4934", HYBRID, [10 * G], 32768, {"num_blocks_override": 4934}, 524288, 6, 4933, 4934, 32768),
    (
        "4 override 1000",
        HYBRID,
        [10 * G],
        131072,
        {"num_blocks_override": 1000, "max_num_batched_tokens": 2048, **AUTO},
        524288,
        6,
        9157,
        1000,
        2640,
    ),
    ("no cap", ((full(1, 1, 64),),), [16384 * G], 8192, {}, 4096, 1, 512, 2**32, 8192),
]


@pytest.mark.parametrize("case", FITS, ids=[case[0] for case in FITS])
def test_fits(case: tuple[str, Any, Any, int, dict[str, Any], int, int, int, int, int]) -> None:
    _name, workers, available, length, other, bytes_per_block, num_groups, need, num_blocks, granted = case
    inp = KvPlanInput(
        ranks=workers,
        available_bytes=tuple(available),
        max_model_len=length,
        **{"max_num_batched_tokens": 8192, **other},
    )
    result = plan(inp)
    assert result.bytes_per_block == bytes_per_block
    assert len(result.groups) == num_groups
    assert result.blocks_needed(length) == need
    assert result.num_blocks == num_blocks
    assert result.usable_blocks == num_blocks - 1
    assert result.max_model_len == granted


# (name, workers, bytes per worker, max_model_len, other inputs, code, words that the message must contain)
REFUSED: list[tuple[str, Any, Any, int, dict[str, Any], str, list[str]]] = [
    ("2", LLAMA, [8 * G], 1024, {"num_blocks_override": 50}, "max_model_len_does_not_fit", ["64", "49", "784"]),
    (
        "2c exact boundary",
        LLAMA,
        [8 * G],
        1024,
        {"num_blocks_override": 64},
        "max_model_len_does_not_fit",
        ["1024", "64", "63", "1008", "num_blocks_override to 65"],
    ),
    ("2e", LLAMA, [8 * G], 8192, {"num_blocks_override": 1, **AUTO}, "max_model_len_does_not_fit", ["one token"]),
    ("override 1", LLAMA, [8 * G], 8192, {"num_blocks_override": 1}, "no_memory", ["null block", "513"]),
    ("64 blocks", LLAMA, [64 * 2097152], 1024, {}, "max_model_len_does_not_fit", ["1008", "136314880"]),
    ("65 blocks less a byte", LLAMA, [65 * 2097152 - 1], 1024, {}, "max_model_len_does_not_fit", ["1008"]),
    ("override 64 len 1009", LLAMA, [8 * G], 1009, {"num_blocks_override": 64}, "max_model_len_does_not_fit", ["1008"]),
    ("4 override 4933", HYBRID, [10 * G], 32768, {"num_blocks_override": 4933}, "max_model_len_does_not_fit", ["4933"]),
    ("11 override 769", SLIDING_ONLY, [G], 32768, {"num_blocks_override": 769}, "max_model_len_does_not_fit", ["769"]),
    ("no memory", LLAMA, [0], 1024, {}, "no_memory", ["rank 0", "0 bytes", "more memory"]),
    ("second rank empty", (LLAMA[0], LLAMA[0]), [G, 0], 1024, {}, "no_memory", ["rank 1"]),
    (
        "override over memory",
        LLAMA,
        [8 * G],
        1024,
        {"num_blocks_override": 100000},
        "override_exceeds_memory",
        ["100000", "4096", "rank 0", "Lower num_blocks_override"],
    ),
    (
        "override over one stage's memory",
        ((full(17),), (full(15),)),
        [G, G],
        1024,
        # 1000 blocks of stage 1 (983,040 bytes) fit its GiB; 1000 of stage 0 (1,114,112 bytes) do not.
        {"num_blocks_override": 1000},
        "override_exceeds_memory",
        ["rank 0", "963"],
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=[case[0] for case in REFUSED])
def test_refused(case: tuple[str, Any, Any, int, dict[str, Any], str, list[str]]) -> None:
    _name, workers, available, length, other, code, words = case
    with pytest.raises(PlanError) as caught:
        plan(
            KvPlanInput(
                ranks=workers,
                available_bytes=tuple(available),
                max_model_len=length,
                **{"max_num_batched_tokens": 8192, **other},
            )
        )
    assert caught.value.code == code
    assert isinstance(caught.value, ConfigError)
    for word in words:
        assert word in str(caught.value)


def test_override_is_measured_on_each_workers_own_blocks() -> None:
    """N blocks of the smaller stage would not hold N blocks of the larger one, so each is checked with its own size."""
    stages = ((full(17),), (full(15),))
    exact = (1000 * 17 * 65536, 1000 * 15 * 65536)
    inp = KvPlanInput(
        ranks=stages,
        available_bytes=exact,
        max_model_len=1024,
        max_num_batched_tokens=512,
        num_blocks_override=1000,
    )
    assert plan(inp).num_blocks == 1000


def test_scales_are_counted_per_token_and_head() -> None:
    assert full(1, dtype="fp8_per_token_head").page_bytes == full(1, dtype="fp8").page_bytes + 16 * 8 * 2 * 4


def test_value_heads_may_be_narrower_than_key_heads() -> None:
    spec = LayerSpec(kind="full", layers=1, kv_heads=2, head_dim=192, head_dim_v=128, block_size=16, dtype="bf16")
    assert spec.page_bytes == 16 * 2 * (192 + 128) * 2


@pytest.mark.parametrize(
    ("length", "blocks"),
    [(0, 0), (1, 2), (16, 2), (17, 3), (32, 3), (33, 3), (10**6, 3)],
)
def test_a_window_looks_back_at_one_token_less_than_its_width(length: int, blocks: int) -> None:
    """w - 1 + F = 16 + 16 tokens are exactly two blocks, and one more for a window that starts inside a block."""
    assert GroupPlan(block_size=16, window=17, tokens_in_flight=16).blocks_needed(length) == blocks


def test_every_page_has_its_own_place_in_the_block() -> None:
    workers = ((full(4), sliding(8, 512, 4, 128), full(1, 2)), (full(3), sliding(2, 512, 4, 128)))
    inp = KvPlanInput(ranks=workers, available_bytes=(G, G), max_model_len=4096, max_num_batched_tokens=512)
    shape = kv_shape(inp)
    for specs, worker in zip(workers, shape.ranks, strict=True):
        assert {(p.spec, p.index) for p in worker.placements} == {
            (number, index) for number, spec in enumerate(specs) for index in range(spec.layers)
        }
        for group in range(len(shape.groups)):
            places = [p for p in worker.placements if p.group == group]
            assert [p.slot for p in places] == list(range(len(places)))
            end = 0
            for place in places:
                assert place.offset == end
                end = place.offset + place.page_bytes
                spec = specs[place.spec]
                assert (spec.block_size, spec.window) == (shape.groups[group].block_size, shape.groups[group].window)
            assert end <= worker.bytes_per_block


def test_stages_with_different_groups_share_one_set_of_tables() -> None:
    """Stage 0: 1 full and 5 sliding groups; stage 1: 1 full and 2. One request needs a table for all six."""
    workers = ((full(8, 4, 256), sliding(40, 1024, 4, 256)), (full(8, 4, 256), sliding(16, 1024, 4, 256)))
    inp = KvPlanInput(ranks=workers, available_bytes=(G, G), max_model_len=4096, max_num_batched_tokens=2048)
    result = plan(inp)
    assert [group.kind for group in result.groups] == ["full"] + ["sliding"] * 5
    assert {place.group for place in result.ranks[1].placements} == {0, 1, 2}


def test_block_size_is_where_all_groups_blocks_end() -> None:
    workers = ((full(4, bs=16), sliding(4, 512, 4, 128, bs=32)),)
    inp = KvPlanInput(ranks=workers, available_bytes=(G,), max_model_len=4096, max_num_batched_tokens=512)
    assert plan(inp).block_size == 32
