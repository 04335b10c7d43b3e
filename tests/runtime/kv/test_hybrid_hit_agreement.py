"""One prefix-hit length for all groups, against brute force."""

from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.kv.groups import GroupPlan, agree_hit_length
from isthmus_runtime.kv.keys import block_hashes
from isthmus_runtime.kv.pool import BlockPool


def full(bs: int = 4) -> GroupPlan:
    return GroupPlan(block_size=bs)


def sliding(window: int, bs: int = 4) -> GroupPlan:
    return GroupPlan(block_size=bs, window=window, tokens_in_flight=64)


def agree(groups: list[GroupPlan], cached: list[str], num_tokens: int) -> int:
    def is_cached(group: int, index: int) -> bool:
        return index < len(cached[group]) and cached[group][index] == "x"

    return agree_hit_length(groups, is_cached, num_tokens)


def brute_force(groups: list[GroupPlan], cached: list[str], num_tokens: int) -> int:
    def serves(group: GroupPlan, have: str, length: int) -> bool:
        """Every position that the token at `length` attends to lies in a cached block, and blocks are full."""
        if length % group.block_size:
            return False
        first = 0 if group.window is None else max(0, length - (group.window - 1))
        needed = {position // group.block_size for position in range(first, length)}
        return all(index < len(have) and have[index] == "x" for index in needed)

    lengths = range(max(0, num_tokens - 1), 0, -1)
    fits = (n for n in lengths if all(serves(g, have, n) for g, have in zip(groups, cached, strict=True)))
    return next(fits, 0)


def test_one_token_is_always_computed() -> None:
    assert agree([full()], ["xx"], 8) == 4
    assert agree([full()], ["xx"], 9) == 8
    assert agree([full()], ["xx"], 0) == 0


def test_a_window_needs_only_its_last_blocks() -> None:
    # A window of 6 looks back at 5 tokens: two blocks of 4.
    assert agree([full(), sliding(6)], ["xxxx", "..xx"], 17) == 16
    assert agree([full(), sliding(6)], ["xxxx", ".x.x"], 17) == 0
    assert agree([full(), sliding(6)], ["xxxx", "xx.x"], 17) == 8
    # The run may be shorter when it reaches the start.
    assert agree([full(), sliding(6)], ["xxxx", "x..."], 17) == 4


def test_a_window_of_one_token_needs_no_block() -> None:
    assert agree([full(), sliding(1)], ["xx", ".."], 9) == 8


def test_groups_shrink_each_other_to_a_fixed_point() -> None:
    # Full allows 5 blocks. Alone, the first window would take 5 and the second 4, which the first cannot serve.
    assert agree([full(), sliding(5), sliding(6)], ["xxxxx", "xx..x", "xxxx."], 21) == 8


def test_groups_with_different_block_sizes_meet_at_a_common_boundary() -> None:
    assert agree([full(4), sliding(9, bs=8)], ["xxx", "xx"], 17) == 8


@given(
    st.lists(
        st.tuples(
            st.builds(
                GroupPlan,
                block_size=st.sampled_from([1, 2, 3, 4]),
                window=st.none() | st.integers(1, 12),
                tokens_in_flight=st.just(8),
            ),
            st.text("xxx.", max_size=12),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 40),
)
def test_agreement_is_the_longest_length_that_serves_everyone(
    drawn: list[tuple[GroupPlan, str]], num_tokens: int
) -> None:
    groups, cached = [group for group, _ in drawn], [have for _, have in drawn]
    assert agree(groups, cached, num_tokens) == brute_force(groups, cached, num_tokens)


def test_pool_returns_one_table_per_group_with_null_blocks_before_the_window() -> None:
    pool = BlockPool(64, num_groups=2)
    groups = [full(), sliding(5)]
    tokens = list(range(40))
    hashes = block_hashes(tokens, 4)
    tables = [pool.allocate(4).blocks, pool.allocate(4).blocks]
    for group, table in enumerate(tables):
        for index, block in enumerate(table):
            pool.publish(block, hashes[index], group, token_ids=tokens[index * 4 : index * 4 + 4])
    length, found = pool.lookup_groups(groups, [hashes, hashes], 40, tokens)
    assert length == 16
    assert found == [tables[0], [0, 0, 0, tables[1][3]]]
    other = [7, *tokens[1:]]
    assert pool.lookup_groups(groups, [hashes, hashes], 40, other) == (0, [[], []])
