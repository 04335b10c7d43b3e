"""The key function: pinned vectors, incremental = at once, and no two different inputs under one key."""

import re
import struct
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.kv import keys
from isthmus_runtime.kv.keys import (
    NO_EXTRA,
    ExtraKeys,
    MultimodalItem,
    block_hashes,
    extend,
    full_block_keys,
    keys_digest,
    layout_digest,
    pack_tokens,
    pool_name,
    pool_secret,
    record_key,
    root_hash,
    tail_hash,
    tail_key,
)

tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)
# Small alphabets make equal concatenations likely: the point of length prefixes.
short = st.text("ab:\x00\ud800", max_size=4)
LAYOUT = {
    "model_revision": "sha256:1f2e",
    "dtype": "bf16",
    "block_size": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "num_layers": 32,
    "layout": "block-major",
}


@st.composite
def extras(draw: st.DrawFn) -> ExtraKeys:
    items = draw(st.lists(st.tuples(short, st.integers(0, 20), st.integers(1, 20)), max_size=3))
    return ExtraKeys(
        lora_digest=draw(st.none() | short),
        cache_salt=draw(st.none() | short),
        multimodal=tuple(MultimodalItem(identifier=i, offset=o, length=n) for i, o, n in items),
    )


def test_pinned_vectors() -> None:
    """Stored keys outlive a process: a change here orphans every pool and must be meant."""
    rich = ExtraKeys(
        lora_digest="d1",
        cache_salt="tenant-7",
        multimodal=(MultimodalItem(identifier="img", offset=3, length=4),),
    )
    assert root_hash().hex() == "b101b20e4157d390239dcc93130a06abffff5cad4146b240e5ee60e73f4c9908"
    assert [h.hex() for h in block_hashes(range(9), 4)] == [
        "09ee125dfa1143a0e1b72d2d97795c6acb93468046af3042d97204e931418227",
        "065a6fb9de374fbfa14d2924bc5073596b0194f5a5a0bec0d3f7ee8879c44c4b",
    ]
    assert [h.hex() for h in block_hashes(range(8), 4, extra=rich, seed=b"s")] == [
        "fcbdf7b97987097cf0efe14a1e312cb777ab8dcaeac547f2ea01fb140972b2c9",
        "d26e2872ff8cc538600593a3ad89acd93c3fd9f458eb3d5a535135bf400fcb53",
    ]
    assert layout_digest(**LAYOUT) == "f509c8209538f3aac6fe7cd060e51b4c"  # type: ignore[arg-type]
    parent = block_hashes(range(8), 4)[-1]
    assert tail_hash(parent, [8]).hex() == "b0dc49aadeefff51dbc105cf3e00c9d60812063bf1289f46094d9702ff0d6a6b"
    assert full_block_keys("lay", [parent], (0, 8)) == [f"lay:{parent.hex()}:g0:lall:h0-8"]
    assert (
        tail_key("lay", parent, 1, [8], "req/1:x", "a2", (0, 8), group=1, layer_range=(0, 16))
        == f"lay:{tail_hash(parent, [8]).hex()}:g1:l0-16:h0-8:partial:1:req%2F1%3Ax:a2"
    )
    assert record_key("req-1", 3) == "record:req-1:3"


def test_a_pool_s_names_change_with_what_its_bytes_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    before = layout_digest(**LAYOUT)  # type: ignore[arg-type]
    monkeypatch.setattr(keys, "KV_ABI", keys.KV_ABI + 1)
    assert layout_digest(**LAYOUT) != before  # type: ignore[arg-type]


def test_the_encoding_is_the_documented_one() -> None:
    """Independent of the implementation's helpers, so that another language can write the same keys."""

    def length(n: int) -> bytes:
        return struct.pack("<Q", n)

    root = sha256(b"isthmus-kv-2" + b"\x01" + length(1) + length(0)).digest()
    first = sha256(root + length(8) + struct.pack("<2i", 5, -1)).digest()
    second = sha256(first + length(8) + struct.pack("<2i", 7, 8)).digest()
    assert block_hashes([5, -1, 7, 8, 9], 2) == [first, second]


@given(tokens, st.integers(1, 7), extras(), st.binary(max_size=3))
def test_growing_a_sequence_gives_the_hashes_of_the_whole(
    ids: list[int], block_size: int, extra: ExtraKeys, seed: bytes
) -> None:
    whole = block_hashes(ids, block_size, extra=extra, seed=seed)
    assert len(whole) == len(ids) // block_size
    assert block_hashes(pack_tokens(ids), block_size, extra=extra, seed=seed) == whole
    grown: list[bytes] = []
    for stop in range(len(ids) + 1):
        extend(grown, ids[:stop] if stop % 2 else pack_tokens(ids[:stop]), block_size, extra=extra, seed=seed)
        assert grown == whole[: stop // block_size]


@given(tokens, tokens, st.integers(1, 4), st.integers(1, 4), extras(), extras())
def test_hashes_are_equal_only_for_equal_prefixes(
    a: list[int], b: list[int], size_a: int, size_b: int, extra_a: ExtraKeys, extra_b: ExtraKeys
) -> None:
    def seen(ids: list[int], size: int, extra: ExtraKeys, stop: int) -> tuple[object, ...]:
        """What a hash after `stop` blocks must stand for: items matter from the first block that holds them."""
        items = tuple(
            tuple((i.identifier, i.offset, i.length) for i in extra.multimodal if overlaps(i, index * size, size))
            for index in range(stop)
        )
        return (tuple(ids[: stop * size]), size, extra.lora_digest, extra.cache_salt, items)

    def overlaps(item: MultimodalItem, start: int, size: int) -> bool:
        return bool(set(range(item.offset, item.offset + item.length)) & set(range(start, start + size)))

    hashes_a = block_hashes(a, size_a, extra=extra_a)
    hashes_b = block_hashes(b, size_b, extra=extra_b)
    for i, hash_a in enumerate(hashes_a, 1):
        for j, hash_b in enumerate(hashes_b, 1):
            assert (hash_a == hash_b) == (seen(a, size_a, extra_a, i) == seen(b, size_b, extra_b, j))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ExtraKeys(lora_digest="v1"), ExtraKeys(lora_digest="v2")),
        (ExtraKeys(lora_digest=""), ExtraKeys()),
        (ExtraKeys(cache_salt=""), ExtraKeys()),
        (ExtraKeys(cache_salt="a"), ExtraKeys(lora_digest="a")),
        (
            ExtraKeys(multimodal=(MultimodalItem(identifier="i", offset=0, length=2),)),
            ExtraKeys(multimodal=(MultimodalItem(identifier="i", offset=1, length=2),)),
        ),
        (
            ExtraKeys(multimodal=(MultimodalItem(identifier="i", offset=0, length=2),)),
            ExtraKeys(cache_salt="i"),
        ),
    ],
)
def test_neighbouring_extra_keys_differ(one: ExtraKeys, other: ExtraKeys) -> None:
    assert block_hashes(range(4), 4, extra=one) != block_hashes(range(4), 4, extra=other)


def test_an_item_changes_its_blocks_and_all_later_ones_only() -> None:
    image = ExtraKeys(multimodal=(MultimodalItem(identifier="i", offset=5, length=2),))
    plain, marked = block_hashes(range(16), 4), block_hashes(range(16), 4, extra=image)
    assert [x == y for x, y in zip(plain, marked, strict=True)] == [True, False, False, False]


def test_seed_separates_deployments() -> None:
    assert block_hashes(range(4), 4, seed=b"a") != block_hashes(range(4), 4, seed=b"b")


def test_a_tail_is_never_a_full_block() -> None:
    assert tail_hash(root_hash(), list(range(4))) != block_hashes(range(4), 4)[0]
    assert tail_hash(root_hash(), [1, 2]) != tail_hash(root_hash(), [1, 2, 0])


def test_a_tail_sees_its_multimodal_items() -> None:
    image = ExtraKeys(multimodal=(MultimodalItem(identifier="i", offset=5, length=2),))
    plain = tail_hash(root_hash(), [1, 2], start=4)
    assert tail_hash(root_hash(), [1, 2], extra=image, start=4) != plain
    assert tail_hash(root_hash(), [1, 2], extra=image, start=8) == plain
    # Packed ids cover as many positions as a list: position 6 is inside the item, 7 is not.
    assert tail_hash(root_hash(), pack_tokens([1, 2]), extra=image, start=3) == plain
    assert tail_hash(root_hash(), pack_tokens([1, 2]), extra=image, start=4) == tail_hash(
        root_hash(), [1, 2], extra=image, start=4
    )


@given(st.lists(st.tuples(short, short), min_size=2, max_size=2, unique=True))
def test_request_scoped_keys_are_unique_per_attempt(pairs: list[tuple[str, str]]) -> None:
    assert len({record_key(request, attempt) for request, attempt in pairs}) == 2
    assert len({tail_key("l", b"p" * 32, 1, [1], *pair, (0, 1)) for pair in pairs}) == 2


def test_long_request_ids_stay_short_and_distinct() -> None:
    keys = {record_key("r" * 5000, 1), record_key("r" * 5001, 1)}
    assert len(keys) == 2
    assert max(map(len, keys)) < 100
    digest = record_key("r" * 5000, 1).split(":")[1]
    assert record_key(digest, 1) not in keys


@pytest.mark.parametrize("field", sorted(LAYOUT))
def test_layout_digest_depends_on_every_field(field: str) -> None:
    value = LAYOUT[field]
    changed = {**LAYOUT, field: value + 1 if isinstance(value, int) else f"{value}x"}
    assert layout_digest(**changed) != layout_digest(**LAYOUT)  # type: ignore[arg-type]


def test_layout_digest_keeps_its_parts_apart() -> None:
    base = {**LAYOUT, "model_revision": "ab", "dtype": "c"}
    moved = {**LAYOUT, "model_revision": "a", "dtype": "bc"}
    assert layout_digest(**base) != layout_digest(**moved)  # type: ignore[arg-type]
    split = layout_digest(**LAYOUT, details=["a", "b"])  # type: ignore[arg-type]
    assert split != layout_digest(**LAYOUT, details=["ab"])  # type: ignore[arg-type]


def test_keys_of_other_heads_layers_and_groups_differ() -> None:
    block = block_hashes(range(4), 4)[0]
    keys = {
        *full_block_keys("l", [block], (0, 4)),
        *full_block_keys("l", [block], (4, 8)),
        *full_block_keys("l", [block], (0, 4), group=1),
        *full_block_keys("l", [block], (0, 4), layer_range=(0, 16)),
        *full_block_keys("l", [block], (0, 4), layer_range=(16, 32)),
        *full_block_keys("m", [block], (0, 4)),
    }
    assert len(keys) == 6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pack_tokens([1, 2**31]), "2147483648"),
        (lambda: block_hashes([1], 0), "block_size"),
        (lambda: ExtraKeys(multimodal=(MultimodalItem(identifier="i", offset=0, length=0),)), r"multimodal\[0\]"),
        (lambda: tail_key("l", b"", 3, [1, 2], "r", 0, (0, 1)), "n must be"),
        (lambda: tail_key("l", b"", 0, [], "r", 0, (0, 1)), "n must be"),
        (lambda: full_block_keys("l", [b""], (4, 4)), "head_range"),
        (lambda: full_block_keys("l", [b""], (0, 4), layer_range=(-1, 4)), "layer_range"),
    ],
)
def test_wrong_arguments_are_named(call: object, words: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=words):
        call()


def test_no_extra_means_nothing_set() -> None:
    assert ExtraKeys() == NO_EXTRA


def test_the_digest_of_a_key_list_depends_on_order_and_boundaries() -> None:
    lists = [[], [""], ["ab"], ["a", "b"], ["b", "a"], ["a", "b", ""]]
    assert len({keys_digest(keys) for keys in lists}) == len(lists)
    assert keys_digest(["a"]) == sha256(struct.pack("<Q", 1) + b"a").hexdigest()


@given(st.text(max_size=60), st.binary(min_size=1, max_size=8), st.binary(min_size=1, max_size=8))
def test_names_in_the_pool_hide_the_key_from_other_services(key: str, one: bytes, other: bytes) -> None:
    name = pool_name(pool_secret(one), key)
    assert re.fullmatch("[0-9a-f]{64}", name)
    assert name == pool_name(pool_secret(one), key), "the same for every process of the service"
    assert (name == pool_name(pool_secret(other), key)) == (one == other)
    assert name != sha256(key.encode()).hexdigest(), "it cannot be had from the key alone"


def test_without_a_credential_names_are_the_keys() -> None:
    assert pool_secret(b"") == b"" and pool_name(b"", "L:00:g0") == "L:00:g0"
    assert pool_secret(b"credential") != b"credential"
