"""Pure: what to do next for one service, from its spec, what exists, and the time.

`rollout` decides how many pods each revision has. Here are the decisions around it: which revision is the goal, what
holds a rollout up, when it has failed, and in which order store, engines and routers change (`routers`).

- The master of a store is ready before the first engine that uses it starts, and goes after the last.
- A workload of an old revision stays, at zero, until the rollout is over: it is what a rollback goes back to.
- A pod to which routers give nothing for its tokenizer does not count (`refusals`).
- A pod that has crashed counts for a rollout once it has been ready for a while: one that crashes and is ready for a
  moment again and again would take the old ones away.
- A rollback goes back in time: to what was there before the revision that failed was made. A revert that fails stays.
- Whatever holds a rollout up, roles keep the number of pods they should have, of the revision that serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ..api.choices import PrefillUnavailable, RolloutFailure, RolloutStrategy, ScalingMode
from ..api.reasons import Reason
from ..api.v1alpha1 import InferenceService
from ..render import mooncake
from ..render.engine import own_replicas, role_of
from ..render.names import Component, is_engine
from ..render.revision import pairing, role_revision, service_revision
from ..render.service import components
from . import routers
from .observed import UNSCHEDULABLE, Observed, Workload
from .progress import (
    changed,
    changing,
    crashing,
    current,
    engines_ready,
    is_pending,
    is_rolling,
    next_deadline,
    others,
    overdue,
    present,
    remaining,
    store_ready,
)
from .refusals import next_look, without_refused, without_unseen, without_young
from .rollout import Goal, Move, lingering, next_move, places, recreate_move, reduced, settles

Key = tuple[Component, str]
"""One engine workload: its component and revision."""


class Rollout(StrEnum):
    """Where a service stands. COMPLETE: nothing of an older revision is left, and all pods are ready or were before."""

    COMPLETE = "Complete"
    ROLLING = "RollingOut"
    PAUSED = "Paused"
    FAILED = "ProgressDeadlineExceeded"
    ROLLED_BACK = "RolledBack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What should be true next.

    counts:    replicas of every engine workload; one that does not exist yet is to be made
    routers:   revision -> replicas, likewise
    delete:    names of workloads of engines and routers that are not needed any more
    store:     whether the managed master should exist
    router:    the revision that routers come to
    alone:     the only router is about to be replaced, without surge
    goals:     component -> revision and number of pods to come to
    had:       component -> pods of a role that leaves, with its mode, as there were when that began
    failed:    revision to remember as failed
    waits:     what holds the rollout up
    wake:      when to plan again even if nothing happens
    """

    counts: dict[Key, int]
    routers: dict[str, int] = field(default_factory=dict)
    delete: tuple[str, ...] = ()
    store: bool = False
    router: str = ""
    alone: bool = False
    goals: dict[Component, Goal] = field(default_factory=dict)
    had: dict[Component, int] = field(default_factory=dict)
    state: Rollout = Rollout.ROLLING
    failed: str = ""
    waits: tuple[str, ...] = ()
    gap: bool = False
    wake: float | None = None


def plan(service: InferenceService, seen: Observed, now: float) -> Plan:
    """The next step. With the cluster as it wants it, it equals what exists."""
    wanted = goals_of(service, seen)
    router = role_revision(service, Component.ROUTER)
    there = without_refused(seen, wanted, router)
    seen = there.settled(now)
    revision = service_revision(service)
    failed = seen.failed if seen.failed == revision else ""
    at_stake = changing(service, wanted, router, there)
    stuck = "" if failed else overdue(service, at_stake, now) or crashing(service, at_stake, now)
    if (
        stuck
        and service.spec.rollout.on_failure is RolloutFailure.ROLLBACK
        and _can_go_back(service, wanted, seen, now)
    ):
        failed = revision
    goals = (_fallback(wanted, seen, now) or wanted) if failed else wanted
    router = routers.goal_of(service, goals, seen, failed=bool(failed))
    rolling = is_rolling(goals, seen, now)
    ready, least = seen, service.spec.rollout.min_ready
    if rolling:
        seen = without_young(without_unseen(seen, goals, router, now), goals, least, now)
    had = _had(goals, seen, begun=seen.failed == failed and seen.updated == revision)
    seen = replace(seen, wanted=seen.wanted | had)
    hold = _hold(service, goals, seen, rolling, "" if failed else stuck)
    stands = bool(hold) or not rolling
    every = present(service, goals, router, there)
    stuck = "" if failed else stuck or (overdue(service, every, now) if stands else "")
    routing = routers.next_step(service, goals, router, seen, now, rolling=rolling)
    move = _held(goals, seen, now) if hold else _move(service, goals, router, seen, now, failed=bool(failed))
    over = not hold and not rolling and routers.arrived(service, router, seen)
    over = over and (bool(failed) or store_ready(service, seen))
    complete = (over and engines_ready(goals, seen)) or (not stuck and not rolling and _was_complete(revision, seen))
    over = over and engines_ready(changed(goals, seen), seen)
    return Plan(
        counts=move.counts,
        routers=routing,
        delete=(*_unneeded(goals, seen, over, move, now), *routers.unneeded(router, seen, routing, over, now)),
        store=mooncake.is_managed(service) or any(w.pooled and (w.replicas or places(w, now)) for w in seen.engines),
        router=router,
        alone=routers.replaces_the_only_one(service, router, seen, routing),
        goals={goal.component: goal for goal in goals},
        had=had,
        state=_state(service, failed, stuck, complete, is_pending(service, goals, seen, now)),
        failed=failed,
        waits=tuple(dict.fromkeys(wait for wait in (stuck, hold, *move.waits) if wait)),
        gap=move.gap,
        wake=_earliest(move.wake, next_deadline(service, every, there, now), next_look(ready, seen, least, now)),
    )


def desired(service: InferenceService, component: Component, seen: Observed) -> int:
    """How many pods a role should have: the spec's number, or that of whoever owns it, or as many as it should have had
    until now. What there are is no measure: in the middle of a rollout it is any number."""
    role = role_of(service, component)
    own = own_replicas(role)
    if own is not None:
        return own
    count = seen.scales.get(component, seen.wanted.get(component))
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


def _fallback(goals: Sequence[Goal], seen: Observed, now: float) -> tuple[Goal, ...] | None:
    """The goals with every changed role sent back to the revision that served before; None when one has none."""
    back = _former(goals, seen, now)
    gone = _former_roles(goals, seen, now)
    # A mode that was gone through has engines, and routers only if it has served.
    lacking = all(goal.component is Component.PREFILL for goal in gone)
    if gone and (not back or not (lacking or routers.known(back.values(), seen))):
        return (*gone, *(replace(goal, count=0, leaves=True) for goal in goals))
    if not back or any(goal.component not in back and current(goal, seen) is None for goal in goals):
        return None
    return tuple(_at(goal, back[goal.component]) if goal.component in back else goal for goal in goals)


def _had(goals: Sequence[Goal], seen: Observed, *, begun: bool) -> dict[Component, int]:
    """How many pods roles that leave had places for when that began: what had none has none to give. `begun`: it was so
    at the last look."""
    found = {}
    for part in sorted({w.component for w in seen.engines} - {goal.component for goal in goals if not goal.leaves}):
        live = [pod for w in seen.of(part) for pod in w.live]
        held = sum(pod.reason != UNSCHEDULABLE for pod in live)
        known = seen.wanted.get(part, sum(w.replicas for w in seen.of(part)))
        gone = not live and any(goal.leaves for goal in goals)
        # Of what is not rolled back it is also what would come back.
        found[part] = 0 if gone else known if begun else held or known
    return found


def _former(goals: Sequence[Goal], seen: Observed, now: float) -> dict[Component, Workload]:
    """What each changed role would go back to: the workload with most pods that are well, of those that were there
    before its present revision, and of a pairing that all roles have, so that they fit together."""
    older: dict[Component, list[Workload]] = {}
    roles: list[list[Workload]] = []
    for goal in goals:
        new = current(goal, seen)
        found = [w for w in seen.of(goal.component) if w is not new and (new is None or _precedes(w, new, now))]
        if found:
            older[goal.component] = found
        roles.append(found or [w for w in (new,) if w is not None])

    def rank(pairing: str) -> tuple[int, int, float]:
        well = [max(w.well(now) for w in role if w.pairing == pairing) for role in roles]
        return min(well), sum(well), -min(w.created for role in roles for w in role if w.pairing == pairing)

    shared = set.intersection(*({w.pairing for w in role} for role in roles)) if roles else set()
    if not older or not shared:
        return {}
    best = max(sorted(shared), key=rank)
    found_back = {part: keeper([w for w in found if w.pairing == best], now) for part, found in older.items()}
    return {part: back for part, back in found_back.items() if back is not None}


def _former_roles(goals: Sequence[Goal], seen: Observed, now: float) -> tuple[Goal, ...]:
    """What a change of mode would go back to: the roles that the service had, each at its number of pods. None where
    the roles that it has are not all new, or what was there has no routers."""
    new = [current(goal, seen) for goal in goals]
    parts = {w.component for w in seen.engines} - {goal.component for goal in goals}
    roles = [[w for w in seen.of(part) if all(one and _precedes(w, one, now) for one in new)] for part in sorted(parts)]
    shared = set.intersection(*({w.pairing for w in role} for role in roles)) if roles else set()
    if not shared:
        return ()
    kept = {one: [keeper([w for w in role if w.pairing == one], now) for role in roles] for one in sorted(shared)}
    # Engines that never had routers would answer nobody: a rollback makes none.
    routed = [one for one, found in kept.items() if routers.known(filter(None, found), seen)]
    if not routed:
        return ()
    best = max(routed, key=lambda one: min(max(w.well(now) for w in r if w.pairing == one) for r in roles))
    return tuple(
        replace(
            _at(goals[0], back),
            component=back.component,
            count=seen.wanted.get(back.component, sum(w.replicas for w in seen.of(back.component))),
        )
        for back in kept[best]
        if back is not None
    )


def _precedes(one: Workload, other: Workload, now: float) -> bool:
    """Whether it was made first. The API's times are whole seconds: within one, what serves was there before."""
    return (one.created, -one.well(now)) < (other.created, -other.well(now))


def _at(goal: Goal, workload: Workload) -> Goal:
    return Goal(
        component=goal.component,
        revision=workload.revision,
        pairing=workload.pairing,
        count=goal.count,
        max_unavailable=goal.max_unavailable,
        max_surge=goal.max_surge,
    )


def keeper(old: Sequence[Workload], now: float) -> Workload | None:
    """The workload a role would keep: the one with most pods that are well, and of equals the oldest."""
    return max(old, key=lambda w: (w.well(now), -w.created), default=None)


def _hold(service: InferenceService, goals: Sequence[Goal], seen: Observed, rolling: bool, stuck: str) -> str:
    """Why no engine workload may change now but for its number of pods; empty when they may."""
    found = [(goal, current(goal, seen)) for goal in goals]
    if service.spec.rollout.paused and (rolling or any(new is None for _, new in found)):
        return "spec.rollout.paused is true"
    if stuck and rolling:
        return stuck
    starts = any(goal.count > 0 and (new is None or new.replicas == 0) for goal, new in found)
    if starts and mooncake.is_managed(service) and not _has_store(seen):
        return "store: the Mooncake master is not ready; engines that use it start after it"
    return ""


def _can_go_back(service: InferenceService, goals: Sequence[Goal], seen: Observed, now: float) -> bool:
    """Whether there is a revision to go back to, and what its engines need."""
    if not changed(goals, seen):
        new = seen.router_of(role_revision(service, Component.ROUTER))
        return new is not None and any(_precedes(w, new, now) for w in seen.routers if w is not new)
    return _fallback(goals, seen, now) is not None and (not mooncake.is_managed(service) or _has_store(seen))


def _has_store(seen: Observed) -> bool:
    return seen.store is not None and seen.store.ready > 0


def _held(goals: Sequence[Goal], seen: Observed, now: float) -> Move:
    """No revision gives way to another. The one that serves in a role, or did last, makes up the role's count."""
    counts = {(w.component, w.revision): w.replicas for w in seen.engines}
    wakes: list[float] = []
    for goal in (goal for goal in goals if not goal.leaves):
        serving = keeper(seen.of(goal.component), now)
        if serving is None or (serving.replicas == 0 and serving.pooled and not _has_store(seen)):
            continue
        rest = [w for w in seen.of(goal.component) if w is not serving]
        counts |= {(w.component, w.revision): reduced(w, min(w.replicas, goal.count), now) for w in rest}
        beside = sum(counts[w.component, w.revision] for w in rest)
        most = min(goal.count, goal.count + goal.max_surge - beside)
        stopping = sum(lingering(w.pods, now) for w in seen.of(goal.component))
        least = min(goal.count - beside, most - stopping)
        # Pods beside it that are not ready serve nobody, so the last one that does stays whatever the sum.
        needed = max(min(goal.count, 1), goal.count - goal.max_unavailable - sum(w.ready for w in rest))
        kept = min(needed, serving.replicas)
        target = reduced(serving, max(kept, least, min(serving.replicas, most)), now)
        counts[serving.component, serving.revision] = target
        wakes += [at for w in (serving, *rest) if w.replicas > goal.count for at in settles(w, now)]
    return Move(counts=counts, wake=min(wakes, default=None))


def _move(
    service: InferenceService, goals: Sequence[Goal], router: str, seen: Observed, now: float, *, failed: bool
) -> Move:
    strategy = service.spec.rollout.strategy
    rolling = is_rolling(goals, seen, now)
    goals = [goal for goal in goals if not goal.leaves]
    if strategy is RolloutStrategy.RECREATE and rolling:
        return recreate_move(goals, seen.engines, now)
    layouts = {goal.pairing for goal in goals} | {w.pairing for w in remaining(goals, seen, now)}
    alone = strategy is RolloutStrategy.INDEPENDENT and len(layouts) == 1
    routed = routers.old_pairings(service, router, seen, now)
    # What is kept of a mode that was rolled back, at zero, is in nobody's way.
    parts = {goal.component for goal in goals}
    there = [w for w in seen.engines if w.component in parts or not failed or w.replicas or places(w, now)]
    move = next_move(
        goals,
        there,
        now,
        in_step=not alone,
        routed=routed,
        known=routers.known_pairings(service, seen, now),
        lone=service.spec.router.on_prefill_unavailable is PrefillUnavailable.LOCAL,
        wanted=seen.wanted,
    )
    move = replace(move, counts={(w.component, w.revision): w.replicas for w in seen.engines} | move.counts)
    if strategy is RolloutStrategy.INDEPENDENT and not alone and rolling:
        text = "roles change in step although strategy is Independent: old and new may differ in KV layout"
        return replace(move, waits=(*move.waits, text))
    return move


def _state(service: InferenceService, failed: str, stuck: str, complete: bool, pending: bool) -> Rollout:
    if failed:
        return Rollout.ROLLED_BACK
    if complete:
        return Rollout.COMPLETE
    if service.spec.rollout.paused and pending:
        return Rollout.PAUSED
    return Rollout.FAILED if stuck else Rollout.ROLLING


def _unneeded(goals: Sequence[Goal], seen: Observed, over: bool, move: Move, now: float) -> tuple[str, ...]:
    """Workloads of other revisions that have no pods, less those that a rollback would need."""
    back = {*_former(goals, seen, now).values()}
    roles = _former_roles(goals, seen, now)
    back |= {w for goal in roles for w in seen.of(goal.component) if w.revision == goal.revision}
    # What failed is known by what is there of it, until another spec is asked for.
    gone = {w.name for goal in goals if goal.leaves and (w := current(goal, seen)) is not None}
    kept = gone if over else gone | {one.name for one in back}
    return tuple(
        w.name
        for w in others(goals, seen)
        if w.name not in kept
        and w.replicas == 0
        and not places(w, now)
        and move.counts.get((w.component, w.revision)) == 0
    )


def _was_complete(revision: str, seen: Observed) -> bool:
    """Whether the revision was rolled out and has been since. A pod that is unready later starts no rollout."""
    said = seen.said("Progressing")
    return seen.current == revision and said is not None and said.reason == Reason.COMPLETE


def _earliest(*times: float | None) -> float | None:
    return min((at for at in times if at is not None), default=None)
