"""Check of block ids that come in pairs, a source and a destination: every bad index is named."""

from collections.abc import Sequence

_NAMED = 20


def check_pairs(
    op: str,
    names: tuple[str, str],
    src: Sequence[int],
    dst: Sequence[int],
    src_blocks: int,
    dst_blocks: int,
) -> None:
    """Raise one ValueError that names the bad indices of two id lists (the first 20 of them).

    Bad are: lists of unequal length, an id that is negative or >= its number of blocks, and a destination that
    occurs twice. The same source may be read any number of times. `names` are the caller's names of the lists.
    """
    problems = []
    if len(src) != len(dst):
        problems.append(f"{names[0]} has {len(src)} ids but {names[1]} has {len(dst)}")
    for name, ids, blocks in ((names[0], src, src_blocks), (names[1], dst, dst_blocks)):
        for index, block in enumerate(ids):
            if block < 0:
                problems.append(f"{name}[{index}] = {block} is negative")
            elif block >= blocks:
                problems.append(f"{name}[{index}] = {block} is >= num_blocks {blocks}")
    seen: dict[int, int] = {}
    for index, block in enumerate(dst):
        if block in seen:
            problems.append(f"{names[1]}[{index}] = {block} repeats {names[1]}[{seen[block]}]")
        seen.setdefault(block, index)
    if problems:
        more = [f"and {len(problems) - _NAMED} more"] if len(problems) > _NAMED else []
        raise ValueError(f"{op}: nothing was copied: " + "; ".join(problems[:_NAMED] + more))
