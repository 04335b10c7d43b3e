"""Pure: what to do next for one service, from its spec, what exists, and the time.

`rollout` decides how many pods each revision has. Here are the decisions around it: which revision is the goal, what
holds a rollout up, when it has failed, and in which order store, engines and router change.

- The master of a store is ready before the first engine that uses it starts, and goes after the last.
- Routers change when the new engines serve, so that a new mode or tokenizer never meets only old engines.
- A workload of an old revision stays, at zero, until the rollout is over: it is what a rollback goes back to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from .api.choices import RolloutFailure, RolloutStrategy, ScalingMode
from .api.v1alpha1 import InferenceService
from .observed import Observed, Pod, Workload
from .render import mooncake
from .render.engine import own_replicas, role_of
from .render.names import Component, is_engine
from .render.revision import pairing, role_revision, service_revision
from .render.service import components
from .rollout import Goal, Move, next_move, recreate_move

Key = tuple[Component, str]
"""One engine workload: its component and revision."""


class Rollout(StrEnum):
    """Where a service stands. COMPLETE: nothing of an older revision is left, and all pods are ready."""

    COMPLETE = "Complete"
    ROLLING = "RollingOut"
    PAUSED = "Paused"
    FAILED = "ProgressDeadlineExceeded"
    ROLLED_BACK = "RolledBack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What should be true next.

    counts:    replicas of every engine workload; one that does not exist yet is to be made
    delete:    names of engine workloads that are not needed any more
    store:     whether the managed master should exist
    router:    whether the router may be brought to the present spec
    goals:     component -> revision and number of pods to come to
    failed:    revision to remember as failed
    waits:     what holds the rollout up
    wake:      when to plan again even if nothing happens
    """

    counts: dict[Key, int]
    delete: tuple[str, ...] = ()
    store: bool = False
    router: bool = True
    goals: dict[Component, Goal] = field(default_factory=dict)
    state: Rollout = Rollout.ROLLING
    failed: str = ""
    waits: tuple[str, ...] = ()
    gap: bool = False
    wake: float | None = None


def plan(service: InferenceService, seen: Observed, now: float) -> Plan:
    """The next step. With the cluster as it wants it, it equals what exists."""
    wanted = goals_of(service, seen)
    revision = service_revision(service)
    failed = seen.failed if seen.failed == revision else ""
    stuck = "" if failed else overdue(service, wanted, seen, now)
    if stuck and service.spec.rollout.on_failure is RolloutFailure.ROLLBACK and _fallback(wanted, seen):
        failed = revision
    goals = (_fallback(wanted, seen) or wanted) if failed else wanted
    rolling = is_rolling(goals, seen)
    hold = _hold(service, wanted, seen, rolling, stuck if not failed else "")
    move = _held(seen) if hold else _move(service, goals, seen, now)
    complete = not hold and not rolling and _all_ready(goals, seen)
    state = _state(service, failed, stuck, complete, rolling)
    return Plan(
        counts=move.counts,
        delete=_unneeded(goals, seen, complete, move),
        store=mooncake.is_managed(service) or any(w.pooled and (w.replicas or w.pods) for w in seen.engines),
        router=_router_may_change(service, wanted, seen, rolling),
        goals={goal.component: goal for goal in goals},
        state=state,
        failed=failed,
        waits=((stuck,) if stuck else ()) + ((hold,) if hold and hold != stuck else ()) + move.waits,
        gap=move.gap,
        wake=_earliest(move.wake, _deadline(service, goals, seen, now)),
    )


def desired(service: InferenceService, component: Component, seen: Observed) -> int:
    """How many pods a role should have: the spec's number, or that of whoever owns it, or as many as there are."""
    role = role_of(service, component)
    own = own_replicas(role)
    if own is not None:
        return own
    count = seen.scales.get(component)
    if count is None:
        count = sum(w.replicas for w in seen.of(component)) or 1
    if role.scaling.mode is ScalingMode.AUTO:
        assert role.scaling.min is not None and role.scaling.max is not None, "validated"
        count = min(max(count, role.scaling.min), role.scaling.max)
    return count


def goals_of(service: InferenceService, seen: Observed) -> tuple[Goal, ...]:
    """What the present spec asks of each engine role."""
    rollout = service.spec.rollout
    out = []
    for component in components(service):
        if is_engine(component):
            count = desired(service, component, seen)
            unavailable = rollout.max_unavailable.of(count, round_up=True)
            surge = rollout.max_surge.of(count, round_up=True)
            out.append(
                Goal(
                    component=component,
                    revision=role_revision(service, component),
                    pairing=pairing(service),
                    count=count,
                    max_unavailable=unavailable if unavailable + surge else 1,
                    max_surge=surge,
                )
            )
    return tuple(out)


def is_rolling(goals: Sequence[Goal], seen: Observed) -> bool:
    """Whether pods of another revision, or of a role that is gone, are there or are asked for."""
    return any(w.replicas > 0 or w.pods for w in _others(goals, seen))


def overdue(service: InferenceService, goals: Sequence[Goal], seen: Observed, now: float) -> str:
    """What has failed to become ready within progressDeadline; empty when nothing has."""
    limit = service.spec.rollout.progress_deadline.seconds
    for goal in goals:
        new = _new(goal, seen)
        if new is None:
            continue
        if new.problem and now - new.created > limit and len(new.live) < new.replicas:
            return f"{new.name}: {new.problem}"
        for pod in _not_ready(new):
            if now - pod.changed > limit:
                return f"pod {pod.name} is not ready after {service.spec.rollout.progress_deadline}: " + (
                    pod.problem or "it is still starting"
                )
    return ""


def _fallback(goals: Sequence[Goal], seen: Observed) -> tuple[Goal, ...] | None:
    """The goals with every changed role sent back to the revision that served before; None when one has none."""
    out = []
    for goal in goals:
        back = keeper([w for w in seen.of(goal.component) if w.revision != goal.revision])
        if back is not None:
            out.append(_at(goal, back))
        elif _new(goal, seen) is not None:
            out.append(goal)
        else:
            return None
    return tuple(out) if tuple(out) != tuple(goals) else None


def _at(goal: Goal, workload: Workload) -> Goal:
    return Goal(
        component=goal.component,
        revision=workload.revision,
        pairing=workload.pairing,
        count=goal.count,
        max_unavailable=goal.max_unavailable,
        max_surge=goal.max_surge,
    )


def keeper(old: Sequence[Workload]) -> Workload | None:
    """The old workload a role would go back to: the one with most ready pods, and of equals the oldest."""
    return max(old, key=lambda w: (w.ready, -w.created), default=None)


def _hold(service: InferenceService, wanted: Sequence[Goal], seen: Observed, rolling: bool, stuck: str) -> str:
    """Why no engine workload may change now; empty when they may."""
    changes = rolling or any(_new(goal, seen) is None for goal in wanted)
    if service.spec.rollout.paused and changes:
        return "spec.rollout.paused is true"
    if stuck and rolling:
        return stuck
    if mooncake.is_managed(service) and (seen.store is None or seen.store.ready == 0):
        return "store: the Mooncake master is not ready; engines that use it start after it"
    return ""


def _held(seen: Observed) -> Move:
    return Move(counts={(w.component, w.revision): w.replicas for w in seen.engines})


def _move(service: InferenceService, goals: Sequence[Goal], seen: Observed, now: float) -> Move:
    strategy = service.spec.rollout.strategy
    if strategy is RolloutStrategy.RECREATE and is_rolling(goals, seen):
        return recreate_move(goals, seen.engines, now)
    router = seen.router
    may_leave = router is not None and router.revision == role_revision(service, Component.ROUTER) and router.ready > 0
    in_step = strategy is RolloutStrategy.COORDINATED
    return next_move(goals, seen.engines, now, in_step=in_step, may_leave=may_leave)


def _all_ready(goals: Sequence[Goal], seen: Observed) -> bool:
    found = [(goal, _new(goal, seen)) for goal in goals]
    return all(new is not None and new.replicas == goal.count == new.ready for goal, new in found)


def _state(service: InferenceService, failed: str, stuck: str, complete: bool, rolling: bool) -> Rollout:
    if failed:
        return Rollout.ROLLED_BACK
    if complete:
        return Rollout.COMPLETE
    if service.spec.rollout.paused and rolling:
        return Rollout.PAUSED
    return Rollout.FAILED if stuck else Rollout.ROLLING


def _unneeded(goals: Sequence[Goal], seen: Observed, complete: bool, move: Move) -> tuple[str, ...]:
    """Workloads of other revisions that have no pods, less those that a rollback would need."""
    kept: set[str] = set()
    if not complete:
        for goal in goals:
            back = keeper([w for w in seen.of(goal.component) if w.revision != goal.revision])
            kept |= {back.name} if back else set()
    return tuple(
        w.name
        for w in _others(goals, seen)
        if w.name not in kept and w.replicas == 0 and not w.pods and move.counts.get((w.component, w.revision)) == 0
    )


def _router_may_change(service: InferenceService, wanted: Sequence[Goal], seen: Observed, rolling: bool) -> bool:
    if seen.router is None or seen.router.revision == role_revision(service, Component.ROUTER):
        return True
    if service.spec.rollout.paused:
        return False
    served = [_new(goal, seen) for goal in wanted if goal.count > 0]
    return not rolling or all(new is not None and new.ready > 0 for new in served)


def _deadline(service: InferenceService, goals: Sequence[Goal], seen: Observed, now: float) -> float | None:
    limit = service.spec.rollout.progress_deadline.seconds
    waiting = [pod.changed for goal in goals if (new := _new(goal, seen)) for pod in _not_ready(new)]
    return _earliest(*(at + limit + 1 for at in waiting if at + limit + 1 > now))


def _earliest(*times: float | None) -> float | None:
    return min((at for at in times if at is not None), default=None)


def _new(goal: Goal, seen: Observed) -> Workload | None:
    return next((w for w in seen.of(goal.component) if w.revision == goal.revision), None)


def _others(goals: Sequence[Goal], seen: Observed) -> list[Workload]:
    current = {(goal.component, goal.revision) for goal in goals}
    return [w for w in seen.engines if (w.component, w.revision) not in current]


def _not_ready(workload: Workload) -> list[Pod]:
    return [pod for pod in workload.live if not pod.ready]
