"""Pure: where a rollout stands, from what exists: which workloads it is about, whether it is over, what is overdue.

Problems of a workload that is not part of the rollout neither stop the rollout nor undo it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..api.v1alpha1 import InferenceService
from ..render import mooncake
from ..render.names import Component
from ..render.revision import role_revision
from .causes import not_made
from .observed import SICK_AFTER_S, Observed, Pod, Workload
from .rollout import OVERDUE_S, Goal, places

AGAIN = 3
"""Restarts after which a pod that is down crashes again and again."""


def current(goal: Goal, seen: Observed) -> Workload | None:
    """The workload that a goal is about."""
    return next((w for w in seen.of(goal.component) if w.revision == goal.revision), None)


def others(goals: Sequence[Goal], seen: Observed) -> list[Workload]:
    """Engine workloads of another revision, or of a role that is gone."""
    wanted = {(goal.component, goal.revision) for goal in goals if not goal.leaves}
    return [w for w in seen.engines if (w.component, w.revision) not in wanted]


def is_rolling(goals: Sequence[Goal], seen: Observed, now: float) -> bool:
    """Whether pods of another revision, or of a role that is gone, are there or are asked for."""
    return bool(remaining(goals, seen, now))


def remaining(goals: Sequence[Goal], seen: Observed, now: float) -> list[Workload]:
    """Those of `others` that have pods or ask for some."""
    return [w for w in others(goals, seen) if w.replicas > 0 or places(w, now)]


def is_pending(service: InferenceService, goals: Sequence[Goal], seen: Observed, now: float) -> bool:
    """Whether anything is not of the present spec, or is not made yet."""
    return (
        is_rolling(goals, seen, now)
        or any(current(goal, seen) is None for goal in goals)
        or seen.router_of(role_revision(service, Component.ROUTER)) is None
        or any(w.replicas for w in seen.routers if w.revision != role_revision(service, Component.ROUTER))
        or (mooncake.is_managed(service) and (seen.store is None or not _is_present(service, seen.store)))
    )


def engines_ready(goals: Sequence[Goal], seen: Observed) -> bool:
    """Whether every role has just the pods it should have, all ready."""
    found = [(goal, current(goal, seen)) for goal in goals]
    return all(new is not None and new.replicas == goal.count == new.ready for goal, new in found)


def store_ready(service: InferenceService, seen: Observed) -> bool:
    """Whether the store is of the present spec and ready, if there should be one."""
    store = seen.store
    if not mooncake.is_managed(service):
        return True
    return store is not None and _is_present(service, store) and store.fresh.ready > 0


def present(service: InferenceService, goals: Sequence[Goal], router: str, seen: Observed) -> list[Workload]:
    """All workloads that should be ready, each without pods that are about to go. `router`: the revision of routers
    that is come to."""
    out = [new for goal in goals if (new := current(goal, seen)) is not None]
    if (routers := seen.router_of(router)) is not None:
        out.append(_from_engines_on(routers.fresh, goals, seen))
    # With every pod it has: one of an older revision that is not ready is in the way of the new one.
    if seen.store is not None and mooncake.is_managed(service):
        out.append(seen.store)
    return out


def _from_engines_on(routers: Workload, goals: Sequence[Goal], seen: Observed) -> Workload:
    """Routers as of when there was an engine: a router is ready only once it knows one. Until then none counts as late,
    and from then on each has as long as any pod."""
    engines = [new for goal in goals if goal.component is not Component.PREFILL and (new := current(goal, seen))]
    since = min((pod.changed for new in engines for pod in new.live if pod.ready), default=None)
    if since is None:
        return replace(routers, pods=tuple(replace(pod, ready=True) for pod in routers.pods))
    late = (replace(pod, changed=max(pod.changed, since)) for pod in routers.pods)
    return replace(routers, pods=tuple(late))


def changed(goals: Sequence[Goal], seen: Observed) -> list[Goal]:
    """The goals of which a rollout is not over: workloads of another revision are kept, at zero, until it is."""
    roles = {w.component for w in others(goals, seen)}
    gone = roles - {goal.component for goal in goals if not goal.leaves}
    return [goal for goal in goals if gone or goal.component in roles]


def changing(service: InferenceService, goals: Sequence[Goal], router: str, seen: Observed) -> list[Workload]:
    """Those of `present` that the rollout under way is about. A master that does not run is not a reason to send
    engines back: theirs is not another."""
    roles = {goal.component for goal in changed(goals, seen)}
    if any(w.revision != router for w in seen.routers):
        roles.add(Component.ROUTER)
    return [w for w in present(service, goals, router, seen) if w.component in roles]


def overdue(service: InferenceService, workloads: Iterable[Workload], now: float) -> str:
    """What has failed to become ready within progressDeadline; empty when nothing has."""
    deadline = service.spec.rollout.progress_deadline
    for workload in workloads:
        if _lacks_pods(workload) and now - workload.problem_since > deadline.seconds:
            return f"{workload.name}: {workload.problem or not_made(workload)}"
        for pod in _not_ready(workload):
            if now - pod.changed > deadline.seconds:
                return f"pod {pod.name} is not ready after {deadline}: " + (pod.problem or "it is still starting")
    return ""


def crashing(service: InferenceService, workloads: Iterable[Workload], now: float) -> str:
    """What has failed to stay up for as long as progressDeadline: it crashes again and again, and may be ready between,
    from which `overdue` counts anew. Empty when nothing has; in a pause nothing is waited for."""
    deadline = service.spec.rollout.progress_deadline
    if service.spec.rollout.paused:
        return ""
    for pod in (pod for workload in workloads for pod in workload.live):
        down = not pod.ready and not pod.started and pod.ran < deadline.seconds
        if down and pod.restarts >= AGAIN and now - pod.created > deadline.seconds:
            return f"pod {pod.name} has crashed again and again for {deadline}"
    return ""


def next_deadline(service: InferenceService, workloads: Iterable[Workload], seen: Observed, now: float) -> float | None:
    """When something becomes overdue, or a stopping pod counts as gone, should nothing happen before."""
    limit = service.spec.rollout.progress_deadline.seconds + 1
    times = [pod.ends + OVERDUE_S for w in seen.engines for pod in w.pods if pod.ends is not None]
    times += [pod.changed + SICK_AFTER_S for pod in (seen.store.live if seen.store else ()) if not pod.ready]
    times += [pod.changed + SICK_AFTER_S for w in (*seen.engines, *seen.routers) for pod in w.live if pod.settles(now)]
    for workload in workloads:
        times += [pod.changed + limit for pod in _not_ready(workload)]
        times += [workload.problem_since + limit] if _lacks_pods(workload) else []
    return min((at for at in times if at > now), default=None)


def _is_present(service: InferenceService, store: Workload) -> bool:
    return store.revision == role_revision(service, Component.STORE)


def _lacks_pods(workload: Workload) -> bool:
    return workload.problem_since > 0 and len(workload.live) < workload.replicas


def _not_ready(workload: Workload) -> list[Pod]:
    return [pod for pod in workload.live if not pod.ready]
