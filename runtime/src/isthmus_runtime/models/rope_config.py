"""A rotary embedding out of `rope_scaling` or `rope_parameters` of a `config.json`. Torch-free.

As everywhere, what is not known is refused by name: each kind has its keys.
"""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt

from ..layers.rope_spec import ROPE_KINDS, RopeSpec
from .json_reader import JsonReader

# Names that a kind had in older files.
_OLD_NAMES = {"su": "longrope"}


def kind_of(scaling: JsonReader) -> str:
    """The kind that an object of `rope_scaling` names."""
    kind = scaling.text("rope_type", "") or scaling.text("type", "default")
    # Exporters write both keys.
    scaling.get("type")
    return _OLD_NAMES.get(kind, kind)


def reach(scaling: JsonReader, max_position: int) -> int:
    """Tokens that a model is good for whose `max_position_embeddings` is `max_position`.

    dynamic stretches past it; yarn's files say the length before or after the stretching.
    """
    kind = kind_of(scaling)
    if kind == "dynamic":
        return int(max_position * scaling.number("factor"))
    if kind == "yarn":
        original = scaling.integer("original_max_position_embeddings", max_position)
        return max(max_position, int(original * scaling.number("factor")))
    return max_position


def read_rope(
    scaling: JsonReader, *, theta: float, partial: float, head_dim: int, max_position: int, original: int | None
) -> RopeSpec:
    """The rotary embedding that `scaling` describes.

    Args:
        theta, partial: where it names none.
        max_position: the model's `max_position_embeddings`.
        original: the model's own `original_max_position_embeddings`, beside `scaling`.
    """
    kind = kind_of(scaling)
    theta = scaling.number("rope_theta", theta)
    partial = scaling.number("partial_rotary_factor", partial)
    rotated = int(head_dim * partial)
    if rotated % 2 or not 0 < rotated <= head_dim:
        scaling.problem(
            "partial_rotary_factor", f"{partial} turns {rotated} of {head_dim} channels, not an even number"
        )
        rotated = 2
    if kind not in ROPE_KINDS:
        scaling.problem("rope_type", f"{kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
        return RopeSpec(theta=theta, partial=partial)
    plain = RopeSpec(theta=theta, partial=partial, kind=kind)
    if kind == "linear":
        spec = replace(plain, factor=scaling.number("factor"))
    elif kind == "dynamic":
        scaling.only("original_max_position_embeddings", max_position)
        spec = replace(plain, factor=scaling.number("factor"), original_max_position=max_position)
    elif kind == "llama3":
        spec = replace(
            plain,
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_max_position=scaling.integer("original_max_position_embeddings"),
        )
    elif kind == "yarn":
        spec = _yarn(scaling, plain, max_position)
    elif kind == "longrope":
        before = original or scaling.optional_integer("original_max_position_embeddings")
        spec = _longrope(scaling, plain, rotated // 2, max_position, before)
    else:
        spec = plain
    scaling.refuse_unread(f"rotary embeddings of kind {kind}")
    return spec


def _yarn(scaling: JsonReader, plain: RopeSpec, max_position: int) -> RopeSpec:
    factor = scaling.number("factor")
    attention = scaling.optional_number("attention_factor")
    if attention is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        shallow, deep = scaling.number("mscale"), scaling.number("mscale_all_dim")
        attention = yarn_mscale(factor, shallow) / yarn_mscale(factor, deep)
    # One of the two alone changes nothing.
    scaling.get("mscale_all_dim")
    return replace(
        plain,
        factor=factor,
        attention_factor=yarn_mscale(factor) if attention is None else attention,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.boolean("truncate", True),
        original_max_position=scaling.integer("original_max_position_embeddings", max_position),
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much longer contexts sharpen attention (Peng et al. 2023, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


def _longrope(scaling: JsonReader, plain: RopeSpec, pairs: int, max_position: int, original: int | None) -> RopeSpec:
    factor = scaling.optional_number("factor")
    if original is not None:
        factor = max_position / original
    elif factor is None:
        scaling.problem("factor", "is missing, and there is no original_max_position_embeddings to divide by")
        factor = 1.0
    before = original or max_position
    attention = scaling.optional_number("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(before))
    return replace(
        plain,
        factor=factor,
        attention_factor=attention,
        original_max_position=before,
        short_factors=scaling.numbers("short_factor", pairs),
        long_factors=scaling.numbers("long_factor", pairs),
    )
