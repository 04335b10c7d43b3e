"""Pure: how many pods a role with scaling mode Auto should have, from what its engines report and the other role has.

First each role by itself, by its target. Then `spec.scalingPolicy.ratio`, which moves both numbers into its bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..api.choices import ScalingMetric, ScalingMode
from ..api.ratio import Band, Span
from ..api.scaling_rules import ratio_band
from ..api.spec import Role
from ..api.v1alpha1 import InferenceService
from ..render.engine import role_of
from ..render.names import Component, is_engine
from ..render.service import components
from .observed import Observed
from .planner import Plan, Rollout
from .progress import is_rolling

TOLERANCE = 0.1
"""A measure this near the target, as a share of it, changes nothing: the same as HPA's."""

STEADY_S = 300.0
"""Pods are removed only when no pod of the role has been made, or become ready or unready, for this long. Starting a
model is dear, so what was just added stays for a while; with it, a role never goes up and down within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The number of pods of one role.

    why:  what decided it, for an Event
    held: what keeps the number from being what the role's own target asks for; empty when nothing does. It holds no
          measure, so that it stays the same while the same holds.
    """

    count: int
    why: str = ""
    held: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """One role by itself. span: what it may have; asked: what its target asks for, at last; why: from which measure;
    unknown: that there is none."""

    current: int
    asked: int
    span: Span
    why: str = ""
    unknown: str = ""

    def paced(self, step: int) -> int:
        """Up at once, down by `step`: a queue that is empty says nothing about what the remaining pods can take."""
        return max(self.asked, self.current - step)


def decide(service: InferenceService, seen: Observed, wanted: Plan, now: float) -> dict[Component, Decision]:
    """The number of pods of every role with mode Auto. While a rollout moves nothing is changed: how many pods are
    ready is then its own doing. One that is held up may last for days, and pods that are not ready are no rollout."""
    parts = [part for part in components(service) if is_engine(part)]
    auto = [part for part in parts if role_of(service, part).scaling.mode is ScalingMode.AUTO]
    held_up = wanted.state in (Rollout.PAUSED, Rollout.FAILED)
    if is_rolling(tuple(wanted.goals.values()), seen, now) and not held_up:
        return {part: Decision(count=wanted.goals[part].count) for part in auto}
    wishes = {part: _wish(role_of(service, part), part, seen, wanted, now) for part in parts}
    band = ratio_band(service.spec)
    prefill, decode = wishes.get(Component.PREFILL), wishes.get(Component.DECODE)
    if band is None or prefill is None or decode is None or prefill.current == 0 or decode.current == 0:
        alone = ((part, wishes[part]) for part in auto)
        return {part: Decision(count=wish.paced(1), why=wish.why, held=wish.unknown) for part, wish in alone}
    pair = _fitted(band, prefill, decode)
    counts = {Component.PREFILL: pair[0], Component.DECODE: pair[1]}
    met = band.miss(*pair) == 0
    return {part: _held(counts[part], wishes[part], met) for part in auto}


def _wish(role: Role, component: Component, seen: Observed, wanted: Plan, now: float) -> _Wish:
    current, scaling = wanted.goals[component].count, role.scaling
    if scaling.mode is not ScalingMode.AUTO:
        return _Wish(current=current, asked=current, span=(current, current))
    target, least, most = scaling.target, scaling.min, scaling.max
    assert target is not None and least is not None and most is not None, "validated"
    live = [pod for w in seen.of(component) for pod in w.live]
    pods = [pod for pod in live if pod.ready]
    heard = [seen.facts.engines[pod.name] for pod in pods if pod.name in seen.facts.engines]
    facts = [one for one in heard if not one.stale]
    keep = _Wish(current=current, asked=current, span=(least, most), why="min and max of its scaling")
    if not facts or len(facts) != len(pods):
        return keep
    queued = target.metric is ScalingMetric.QUEUED_REQUESTS
    told = [load for f in facts if (load := f.queued if queued else f.kv_usage) is not None]
    if len(told) != len(facts):
        return replace(keep, unknown=f"an engine does not say its {target.metric.value}, so the number of pods stays")
    measure = sum(told) / len(told)
    share = measure / float(target.value.value)
    if abs(share - 1) <= TOLERANCE:
        return keep
    asked = min(max(math.ceil(len(facts) * share - 1e-9), least), most)
    # Pods that load have not had their say, however long that takes. One with a problem may never have.
    starting = any(not pod.ready and not pod.problem for pod in live)
    if asked < current and (starting or now - max(pod.changed for pod in live) < STEADY_S):
        return keep
    why = f"{target.metric.value} is {measure:.2f} a pod, the target {target.value}"
    return _Wish(current=current, asked=asked, span=(least, most), why=why)


def _fitted(band: Band, prefill: _Wish, decode: _Wish) -> tuple[int, int]:
    """Both numbers inside the band. A step down that the band undoes is made greater until one is left: where one
    prefill pod goes with two decode pods, three go together."""
    current = (prefill.current, decode.current)
    most = max(1, prefill.current - prefill.asked, decode.current - decode.asked)
    step = 1
    while True:
        pair = band.fit((prefill.paced(step), decode.paced(step)), prefill.span, decode.span)
        if pair != current or step >= most:
            return pair
        step *= 2


def _held(count: int, wish: _Wish, met: bool) -> Decision:
    alone = wish.paced(1)
    if count == alone:
        return Decision(
            count=count, why=wish.why, held=wish.unknown if met else "scalingPolicy.ratio is not met: see min and max"
        )
    more = "more" if count > alone else "fewer"
    return Decision(
        count=count,
        why=f"scalingPolicy.ratio asks for {more} pods than its target",
        held=f"scalingPolicy.ratio asks for {more} pods than its target",
    )
