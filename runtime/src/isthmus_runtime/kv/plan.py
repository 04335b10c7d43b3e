"""The KV cache arithmetic: memory in, number of blocks and longest length out. The only place that knows it.

Sizing, the override, auto-fit, the start-up check, admission and metrics all call this module, so that a length
that is admitted is a length that finishes.

    bytes_per_block = max over groups of the sum of its layers' pages          (per rank)
    num_blocks      = floor(available / bytes_per_block), minimum over ranks
    usable          = num_blocks - 1                                           (block 0 is the null block)
    fits(L)         = blocks_needed(L) <= usable, blocks_needed summed over groups
"""

import json
import sys
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path

from ..errors import PlanError
from .groups import GroupPlan, RankGroups, blocks_needed, group_layers, max_len_that_fits
from .plan_input import KvPlanInput as KvPlanInput
from .plan_input import as_json, input_problems, parse_input


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What follows from the layers alone, before memory is looked at.

    Fields:
        groups: the logical groups: one block table each, the same on every rank. A rank with fewer groups of a
            kind (a shorter pipeline stage) ignores the tables it has no layers for.
        ranks: per rank its own layout; ``placements[].group`` indexes ``groups``.
        bytes_per_block: of the rank with the largest blocks.
        block_size: tokens at which every group's blocks end together (the groups' least common multiple).
    """

    groups: tuple[GroupPlan, ...]
    ranks: tuple[RankGroups, ...]
    bytes_per_block: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """The answer. ``num_blocks`` counts the null block, ``usable_blocks`` does not.

    Every length up to ``max_model_len`` fits ``usable_blocks``. See ``KvShape`` for the other fields.
    """

    num_blocks: int
    usable_blocks: int
    max_model_len: int
    bytes_per_block: int
    block_size: int
    groups: tuple[GroupPlan, ...]
    ranks: tuple[RankGroups, ...]

    def blocks_needed(self, length: int) -> int:
        """Most blocks that one request of ``length`` tokens ever holds, all groups together."""
        return blocks_needed(self.groups, length)


def kv_shape(inp: KvPlanInput) -> KvShape:
    """Group the layers of every rank and line the ranks' groups up with one another."""
    own = [group_layers(specs) for specs in inp.ranks]
    # The k-th group of a demand is one logical group on all ranks, so that one block table serves them all.
    order: dict[tuple[tuple[int, int | None], int], int] = {}
    aligned: list[RankGroups] = []
    for rank in own:
        seen: dict[tuple[int, int | None], int] = {}
        number_of: list[int] = []
        for demand in rank.demands:
            kth = seen.get(demand, 0)
            seen[demand] = kth + 1
            number_of.append(order.setdefault((demand, kth), len(order)))
        placements = tuple(replace(place, group=number_of[place.group]) for place in rank.placements)
        aligned.append(replace(rank, placements=placements))
    in_flight = inp.max_num_batched_tokens * inp.batches_in_flight
    groups = tuple(
        GroupPlan(block_size=block_size, window=window, tokens_in_flight=0 if window is None else in_flight)
        for (block_size, window), _kth in order
    )
    return KvShape(
        groups=groups,
        ranks=tuple(aligned),
        bytes_per_block=max(rank.bytes_per_block for rank in aligned),
        block_size=lcm(*(group.block_size for group in groups)),
    )


def plan(inp: KvPlanInput) -> KvPlan:
    """Number of blocks and longest length for this input.

    Raises:
        PlanError: with ``code``
            ``invalid_input`` (every wrong field at once),
            ``override_exceeds_memory`` (``num_blocks_override`` needs more than a rank has),
            ``no_memory`` (not one usable block), or
            ``max_model_len_does_not_fit`` (one request of that length would never finish; with ``auto_fit``: not
            even one token fits).
    """
    problems = input_problems(as_json(inp))
    if problems:
        raise PlanError("invalid_input", problems)
    return _plan(inp, kv_shape(inp))


def _plan(inp: KvPlanInput, shape: KvShape) -> KvPlan:
    num_blocks = _num_blocks(inp, shape)
    usable = max(0, num_blocks - 1)
    if usable == 0 and not inp.auto_fit:
        raise PlanError("no_memory", _no_memory(inp, shape, num_blocks))
    longest = max_len_that_fits(shape.groups, usable, inp.max_model_len)
    if longest == 0 or (longest < inp.max_model_len and not inp.auto_fit):
        raise PlanError("max_model_len_does_not_fit", _does_not_fit(inp, shape, num_blocks, longest))
    return KvPlan(
        num_blocks=num_blocks,
        usable_blocks=usable,
        max_model_len=longest,
        bytes_per_block=shape.bytes_per_block,
        block_size=shape.block_size,
        groups=shape.groups,
        ranks=shape.ranks,
    )


def _num_blocks(inp: KvPlanInput, shape: KvShape) -> int:
    per_rank = [
        available // rank.bytes_per_block for available, rank in zip(inp.available_bytes, shape.ranks, strict=True)
    ]
    smallest = min(per_rank)
    if inp.num_blocks_override is None:
        return smallest
    if inp.num_blocks_override > smallest:
        rank = per_rank.index(smallest)
        size = shape.ranks[rank].bytes_per_block
        raise PlanError(
            "override_exceeds_memory",
            f"num_blocks_override {inp.num_blocks_override} needs {inp.num_blocks_override * size} bytes on rank "
            f"{rank} ({size} per block), {inp.available_bytes[rank]} are available: at most {smallest} blocks. "
            f"Lower num_blocks_override to {smallest} or less, remove it, or give the KV cache more memory.",
        )
    return inp.num_blocks_override


def _where(inp: KvPlanInput, shape: KvShape, num_blocks: int) -> str:
    if inp.num_blocks_override is not None:
        return f"num_blocks_override is {inp.num_blocks_override}"
    rank = min(
        range(len(shape.ranks)),
        key=lambda number: inp.available_bytes[number] // shape.ranks[number].bytes_per_block,
    )
    return (
        f"rank {rank} has {inp.available_bytes[rank]} bytes for the KV cache, {num_blocks} blocks of "
        f"{shape.ranks[rank].bytes_per_block}"
    )


def _no_memory(inp: KvPlanInput, shape: KvShape, num_blocks: int) -> str:
    enough = blocks_needed(shape.groups, inp.max_model_len) + 1
    return (
        f"no usable KV block: {_where(inp, shape, num_blocks)}, and block 0 is reserved as the null block. "
        f"max_model_len {inp.max_model_len} needs {enough} blocks, {enough * shape.bytes_per_block} bytes: "
        + ("raise num_blocks_override." if inp.num_blocks_override is not None else "give the KV cache more memory.")
    )


def _does_not_fit(inp: KvPlanInput, shape: KvShape, num_blocks: int, longest: int) -> str:
    asked = 1 if inp.auto_fit else inp.max_model_len
    needed = blocks_needed(shape.groups, asked)
    what = "not even one token fits" if longest == 0 else f"max_model_len {asked} does not fit"
    fixes = [f"lower max_model_len to {longest} or less", "set it to auto"] if longest else []
    if inp.num_blocks_override is not None:
        fixes.append(f"raise num_blocks_override to {needed + 1} or more")
    else:
        fixes.append(f"give the KV cache {(needed + 1) * shape.bytes_per_block} bytes or more")
    return (
        f"{what}: a request of {asked} tokens needs {needed} KV blocks, {max(0, num_blocks - 1)} are usable "
        f"({_where(inp, shape, num_blocks)}; one is the null block). The longest length that fits is {longest}: "
        f"{', or '.join(fixes)}."
    )


# ---- JSON form, for the `kv-plan` command ----------------------------------------------------------------------------


def plan_from_json(obj: object, path: str = "") -> dict[str, object]:
    """Plan one JSON input.

    Returns:
        On success ``num_groups, bytes_per_block, blocks_needed_at_max_model_len`` (at the length asked for),
        ``num_blocks, usable_blocks, max_model_len`` (granted) and ``ok: true``; else ``ok: false`` with ``error``
        (a ``PlanError`` code) and the numbers known by then.

    Raises:
        PlanError: only with code ``invalid_input``.
    """
    return _answer(parse_input(obj, path))[0]


def _answer(inp: KvPlanInput) -> tuple[dict[str, object], str]:
    """The JSON answer, and the message when it is a refusal."""
    shape = kv_shape(inp)
    answer: dict[str, object] = {"num_groups": len(shape.groups), "bytes_per_block": shape.bytes_per_block}
    needed = {"blocks_needed_at_max_model_len": blocks_needed(shape.groups, inp.max_model_len)}
    try:
        result = _plan(inp, shape)
    except PlanError as error:
        # An override that is refused by size never gets as far as the demand.
        known = {} if error.code == "override_exceeds_memory" else needed
        return {**answer, **known, "ok": False, "error": error.code}, str(error)
    return {
        **answer,
        **needed,
        "num_blocks": result.num_blocks,
        "usable_blocks": result.usable_blocks,
        "max_model_len": result.max_model_len,
        "ok": True,
    }, ""


def kv_plan_main(path: str) -> int:
    """``isthmus-runtime kv-plan FILE``: one input or a list, bare or as objects with an ``input``.

    Prints the answers as JSON on stdout (a list for a list) and, for a refusal, its reason on stderr.

    Returns:
        0, or 2 when the file cannot be read or an input is wrong; then nothing is printed on stdout.
    """
    try:
        obj = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        print(f"kv-plan: cannot read {path}: {error or type(error).__name__}", file=sys.stderr)
        return 2
    cases = [(f"[{i}]", case) for i, case in enumerate(obj)] if isinstance(obj, list) else [("", obj)]
    inputs: list[tuple[str, KvPlanInput]] = []
    problems: list[str] = []
    for where, case in cases:
        inner, obj_path = case, where
        if isinstance(case, dict) and "input" in case:
            inner, obj_path = case["input"], f"{where}.input".lstrip(".")
        try:
            inputs.append((where, parse_input(inner, obj_path)))
        except PlanError as error:
            problems.extend(error.problems)
    if problems:
        for problem in problems:
            print(f"kv-plan: {path}: {problem}", file=sys.stderr)
        return 2
    answers: list[dict[str, object]] = []
    for where, inp in inputs:
        answer, reason = _answer(inp)
        answers.append(answer)
        if reason:
            print(f"kv-plan: {' '.join(filter(None, (where, inp.name)))}: {reason}", file=sys.stderr)
    print(json.dumps(answers if isinstance(obj, list) else answers[0], indent=2))
    return 0
