"""The rules on numbers of pods, of a role and between two: called by `rules`; `autoscale` keeps the bounds."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from ..errors import Problem
from .choices import Mode, ScalingMode
from .problems import show
from .ratio import Band, Span
from .spec import Scaling, Spec, engine_roles

_MOST_PODS = 10000


def ratio_band(spec: Spec) -> Band | None:
    """Bounds on prefill pods per decode pod; None where the resource sets none."""
    policy = spec.scaling_policy
    if policy is None or policy.ratio is None:
        return None
    bounds = policy.ratio.prefill_per_decode
    most = Fraction(bounds.max.value) if bounds.max is not None else None
    return Band(least=Fraction(bounds.min.value) if bounds.min is not None else Fraction(0), most=most)


def scaling(spec: Spec) -> Iterator[Problem]:
    """Rule on `scaling` of each role."""
    for name, role in engine_roles(spec):
        own, path = role.scaling, f"spec.roles.{name}.scaling"
        mode = own.mode
        owner = {
            ScalingMode.STATIC: ("replicas",),
            ScalingMode.EXTERNAL: (),
            ScalingMode.AUTO: ("min", "max", "target"),
        }[mode]
        values = {"replicas": own.replicas, "min": own.min, "max": own.max, "target": own.target}
        for field, value in values.items():
            if value is not None and field not in owner:
                allowed = ", ".join(owner) or "no further field: the number belongs to the autoscaler"
                yield Problem(
                    f"{path}.{field}", f"does not go with mode {mode.value}", allowed, "remove it, or change mode"
                )
            if value is None and field in owner and mode is ScalingMode.AUTO:
                yield Problem(
                    f"{path}.{field}", "is missing with mode Auto", "min, max and target", f"set {path}.{field}"
                )
        if own.target is not None and own.target.value.value == 0:
            yield Problem(f"{path}.target.value", f"{show(own.target.value)} is out of range", "above 0", "raise it")
        if own.min is not None and own.max is not None and own.min > own.max:
            yield Problem(f"{path}.min", f"{own.min} is above max", f"{own.max} or less", "lower min or raise max")


def _span(scaling: Scaling) -> Span | None:
    """Numbers of pods a role may have; None where another rule has found its bounds to be wrong."""
    if scaling.mode is ScalingMode.EXTERNAL:
        return (1, _MOST_PODS)
    if scaling.mode is ScalingMode.STATIC:
        count = 1 if scaling.replicas is None else scaling.replicas
        return (count, count)
    if scaling.min is None or scaling.max is None or scaling.min > scaling.max:
        return None
    return (scaling.min, scaling.max)


def ratio(spec: Spec) -> Iterator[Problem]:
    """Rule on `spec.scalingPolicy.ratio`."""
    if spec.mode is not Mode.DISAGGREGATED and spec.scaling_policy is not None:
        yield Problem("spec.scalingPolicy", "does not go with mode Unified", "mode Disaggregated", "remove it")
        return
    policy = spec.scaling_policy
    prefill, decode = spec.roles.prefill, spec.roles.decode
    if policy is None or policy.ratio is None or prefill is None or decode is None:
        return
    bounds, path = policy.ratio.prefill_per_decode, "spec.scalingPolicy.ratio.prefillPerDecode"
    given = [(name, value) for name, value in (("min", bounds.min), ("max", bounds.max)) if value is not None]
    if not given:
        yield Problem(path, "sets no bound", "min, max or both", "set one of them, or remove spec.scalingPolicy.ratio")
        return
    wrong = [(name, value) for name, value in given if value.value <= 0]
    for name, value in wrong:
        yield Problem(f"{path}.{name}", f"{show(value)} is out of range", "above 0", "raise it, or remove it")
    if wrong:
        return
    if bounds.min is not None and bounds.max is not None and bounds.min.value > bounds.max.value:
        yield Problem(
            f"{path}.min", f"{show(bounds.min)} is above max", f"{bounds.max} or less", "lower min or raise max"
        )
        return
    modes = {prefill.scaling.mode, decode.scaling.mode}
    if ScalingMode.AUTO not in modes:
        yield Problem(
            "spec.scalingPolicy.ratio",
            "is kept by roles with scaling mode Auto, and there is none",
            "prefill, decode or both with mode Auto",
            "set mode: Auto with min, max and target, or remove it",
        )
        return
    yield from _ratio_can_be_met(spec, path, _span(prefill.scaling), _span(decode.scaling))


def _ratio_can_be_met(spec: Spec, path: str, prefill: Span | None, decode: Span | None) -> Iterator[Problem]:
    band = ratio_band(spec)
    if band is None or prefill is None or decode is None or band.satisfiable(prefill, decode):
        return

    def pods(span: Span) -> str:
        return f"{span[0]} to {span[1]}" if span[0] != span[1] else str(span[0])

    yield Problem(
        path,
        f"cannot be met with {pods(prefill)} prefill pods and {pods(decode)} decode pods",
        "bounds that some numbers of pods within the roles' own bounds meet",
        "widen it, or change scaling of spec.roles.prefill or spec.roles.decode",
    )
