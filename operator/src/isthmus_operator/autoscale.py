"""Pure: how many pods a role with scaling mode Auto should have, from what its engines report."""

from __future__ import annotations

import math

from .api.choices import ScalingMetric, ScalingMode
from .api.spec import Role
from .api.v1alpha1 import InferenceService
from .observed import EngineFacts, Observed, Pod
from .plan import Plan, Rollout
from .render.engine import role_of
from .render.names import Component, is_engine
from .render.service import components

TOLERANCE = 0.1
"""A measure this near the target, as a share of it, changes nothing: the same as HPA's."""

STEADY_S = 300.0
"""Pods are removed only when the youngest pod of the role has been ready this long. Starting a model is dear, so what
was just added stays for a while; with it, a role never goes up and down within this time."""


def counts(service: InferenceService, seen: Observed, wanted: Plan, now: float) -> dict[Component, int]:
    """The number of pods for every role with mode Auto. While a rollout is under way nothing is changed."""
    out = {}
    for component in components(service):
        if not is_engine(component):
            continue
        role = role_of(service, component)
        if role.scaling.mode is not ScalingMode.AUTO:
            continue
        current = wanted.goals[component].count
        out[component] = current
        pods = [pod for w in seen.of(component) for pod in w.live if pod.ready]
        facts = [seen.facts.engines[pod.name] for pod in pods if pod.name in seen.facts.engines]
        if wanted.state is Rollout.COMPLETE and facts and len(facts) == len(pods):
            out[component] = _count(role, current, facts, pods, now)
    return out


def _count(role: Role, current: int, facts: list[EngineFacts], pods: list[Pod], now: float) -> int:
    target, least, most = role.scaling.target, role.scaling.min, role.scaling.max
    assert target is not None and least is not None and most is not None, "validated"
    queued = target.metric is ScalingMetric.QUEUED_REQUESTS
    measure = sum(f.queued if queued else f.kv_usage for f in facts) / len(facts)
    ratio = measure / float(target.value.value)
    if abs(ratio - 1) <= TOLERANCE:
        return current
    count = min(max(math.ceil(len(facts) * ratio - 1e-9), least), most)
    if count < current and now - max(pod.changed for pod in pods) < STEADY_S:
        return current
    # One at a time on the way down: a queue that is empty says nothing about what the remaining pods can take.
    return max(count, current - 1) if count < current else count
