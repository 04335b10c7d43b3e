"""Pure: how many pods each revision of each engine role should have next.

Computed from what is there alone; no progress is stored, so a revert, a further edit or a restart of the operator at
any moment is just another starting point. The rules, in the order they are used:

1. A role's pods, stopping ones included, never exceed its count plus maxSurge. With maxSurge 0 a rollout therefore
   works when every GPU is taken.
2. Old pods that have not started go at once: they serve nobody and hold what the new ones need. Those that ran and are
   not ready for SICK_AFTER_S go before ready ones, but no more of them than new ones need places: a network that is
   cut makes pods unready which serve all the while, and they come back. One that is unready for less counts as one
   that serves wherever something would be taken, and as one that does not wherever that would let something be taken.
   While there is one, no pod goes for being unready: Kubernetes removes unready pods first, and might take that one.
   A role that is scaled down waits for it likewise, where too few would be left.
3. Ready pods of a role never fall below its count minus maxUnavailable by our doing.
4. Roles move in step, those of a new mode too, as one would take the places that the other needs: none begins step k+1
   of S before all have the ready new pods of step k (the interpolation of
   Kubernetes KEP-766 of LeaderWorkerSet's DisaggregatedSet, with its waiting for old pods left out). Of a new mode
   decode comes first where it answers alone: two engines of which one has to make room become a pair without a gap.
5. One prefill and one decode pod of equal pairing stay ready at every moment, where the counts leave room for it.
   A role of one pod without surge leaves none: it waits until the other role has new pods, and then has a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..render.names import Component
from .observed import SICK_AFTER_S, UNSCHEDULABLE, Pod, Workload

OVERDUE_S = 60.0
"""A stopping pod this much past its end is on a node that does not answer; it holds no place any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What one engine role should come to: `count` pods of `revision`. max_unavailable + max_surge is above 0.
    `leaves`: the role is of a mode that is rolled back, and goes as one that the spec no longer has; count is 0."""

    component: Component
    revision: str
    pairing: str
    count: int
    max_unavailable: int
    max_surge: int
    leaves: bool = False

    def __post_init__(self) -> None:
        assert self.max_unavailable + self.max_surge > 0, "validation refuses a rollout in which no pod may change"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """counts: (component, revision) -> replicas, for every workload that exists or should.

    waits:  what holds the rollout up now, for people
    gap:    this move takes the last pod of a role that leaves no room for old and new side by side
    wake:   when to look again even if nothing happens; None: no need
    """

    counts: dict[tuple[Component, str], int]
    waits: tuple[str, ...] = ()
    gap: bool = False
    wake: float | None = None


@dataclass(slots=True)
class _Role:
    """One goal, with the workloads of its role told apart and counted."""

    goal: Goal
    new: Workload | None
    old: list[Workload]
    now: float
    arrives: bool = False
    """Roles that the service no longer has give it their places."""

    @property
    def ready_new(self) -> int:
        return self.new.ready if self.new else 0

    @property
    def wanted_new(self) -> int:
        return self.new.replicas if self.new else 0

    @property
    def rolling(self) -> bool:
        return self.arrives or any(w.replicas > 0 for w in self.old)

    @property
    def ready(self) -> int:
        return self.ready_new + sum(w.ready for w in self.old)

    @property
    def held(self) -> int:
        """Places taken by old pods, and by stopping pods of any revision."""
        stopping = lingering(self.new.pods, self.now) if self.new else 0
        return stopping + sum(max(w.replicas, len(w.live)) + lingering(w.pods, self.now) for w in self.old)

    @property
    def tight(self) -> bool:
        """Old and new cannot be there together."""
        return self.goal.count + self.goal.max_surge <= 1


def lingering(pods: Iterable[Pod], now: float) -> int:
    """Stopping pods that still hold their place."""
    return sum(pod.ends is not None and not pod.failed and now < pod.ends + OVERDUE_S for pod in pods)


def places(workload: Workload, now: float) -> int:
    """Places that the pods of a workload hold, stopping ones included."""
    return len(workload.live) + lingering(workload.pods, now)


def next_move(
    goals: Sequence[Goal],
    workloads: Sequence[Workload],
    now: float,
    *,
    in_step: bool = True,
    routed: frozenset[str] | None = None,
    known: frozenset[str] = frozenset(),
    lone: bool = False,
    wanted: Mapping[Component, int] | None = None,
) -> Move:
    """The next counts. `in_step` False: each role by itself (rules 4 and 5 are left out).

    `routed`: routers of another revision serve, of which it is not sure that they give new pods anything: one old pod
    of each role stays, where the counts leave room for it, of these pairings if there is one, and so do roles that the
    service no longer has. `known`: pairings that the routers that serve give something: of old pods, others go first.
    `lone`: decode pods answer without prefill ones. `wanted`: pods that such roles had.
    """
    present = {goal.component for goal in goals}
    leaving = [w for w in workloads if w.component not in present]
    roles = [_role(goal, workloads, now, arrives=bool(leaving)) for goal in goals]
    counts = {(w.component, w.revision): w.replicas for w in workloads}
    waits: list[str] = []
    wakes: list[float] = []
    step = _step(roles) if in_step else None
    alone = lone and bool(leaving)
    first = {role.goal.component for role in roles if alone and role.goal.count > 0 and role.ready_new == 0}
    keep = (
        _kept_pairing(roles, now, routed, known, lone) if routed is not None or (in_step and len(roles) > 1) else None
    )
    gap = False
    for role in roles:
        cap, total = _cap(role, step)
        if role.goal.component is Component.PREFILL and Component.DECODE in first:
            cap = 0
        target = _new_count(role, cap, now)
        counts[role.goal.component, role.goal.revision] = target
        old, forced = _old_counts(role, roles, cap, keep, known, now)
        counts |= old
        gap = gap or forced
        wakes += _wake_times(role, now)
        if role.rolling or role.ready_new < role.goal.count:
            waits += _wait(role, cap, target, total, now)
    wakes += [at for w in leaving for at in settles(w, now)]
    counts |= _leaving(roles, leaving, routed is None, lone, wanted or {}, now)
    return Move(counts=counts, waits=tuple(waits), gap=gap, wake=min(wakes, default=None))


def recreate_move(goals: Sequence[Goal], workloads: Sequence[Workload], now: float) -> Move:
    """Strategy Recreate: all old pods stop, and when none is left the new ones start."""
    current = {(goal.component, goal.revision) for goal in goals}
    old = [w for w in workloads if (w.component, w.revision) not in current]
    held = sum(places(w, now) + w.replicas for w in old)
    counts = {(w.component, w.revision): 0 for w in old}
    waits: tuple[str, ...] = ()
    for goal in goals:
        key = (goal.component, goal.revision)
        there = next((w.replicas for w in workloads if (w.component, w.revision) == key), 0)
        counts[key] = goal.count if held == 0 else min(there, goal.count)
    if held:
        waits = (f"{held} old pods have to stop before new ones start (strategy Recreate)",)
    ends = [pod.ends + OVERDUE_S for w in old for pod in w.pods if pod.ends is not None and now < pod.ends + OVERDUE_S]
    return Move(counts=counts, waits=waits, gap=any(w.ready for w in old), wake=min(ends, default=None))


def _role(goal: Goal, workloads: Sequence[Workload], now: float, *, arrives: bool) -> _Role:
    mine = [w for w in workloads if w.component is goal.component]
    new = next((w for w in mine if w.revision == goal.revision), None)
    return _Role(goal=goal, new=new, old=[w for w in mine if w is not new], now=now, arrives=arrives)


def _batch(goal: Goal) -> int:
    return goal.max_surge or goal.max_unavailable


def _step(roles: Sequence[_Role]) -> tuple[int, int]:
    """(steps that every rolling role has behind it, steps in all)."""
    rolling = [role for role in roles if role.rolling]
    total = max((math.ceil(role.goal.count / _batch(role.goal)) for role in rolling), default=1) or 1
    return min((_done(role.goal, role.ready_new, total) for role in rolling), default=total), total


def _done(goal: Goal, ready: int, total: int) -> int:
    """The last step whose share is ready."""
    return min(total, ready * total // goal.count) if goal.count else total


def _share(goal: Goal, step: int, total: int) -> int:
    return -(-goal.count * step // total)


def _cap(role: _Role, step: tuple[int, int] | None) -> tuple[int, int]:
    """(new pods the role may have in the present step, or all of them when it does not roll; steps in all)."""
    if not role.rolling:
        return role.goal.count, 1
    done, total = step if step is not None else _step([role])
    return _share(role.goal, min(done + 1, total), total), total


def _new_count(role: _Role, cap: int, now: float) -> int:
    room = role.goal.count + role.goal.max_surge - role.held if role.rolling or role.held else role.goal.count
    target = min(role.goal.count, max(role.wanted_new, min(cap, room)))
    return target if role.new is None else reduced(role.new, target, now)


def reduced(workload: Workload, target: int, now: float) -> int:
    """`target`, or the replicas that it has where fewer might take one that serves: of unready pods nobody can say
    which goes."""
    fewer = target < workload.replicas
    if fewer and replace(workload, replicas=target).well(now) < min(target, workload.well(now)):
        return workload.replicas
    return target


def settles(workload: Workload, now: float) -> list[float]:
    """When those of its pods that flicker will not be taken for well any more."""
    settled = [pod.changed + SICK_AFTER_S for pod in workload.live if pod.started and not pod.ready]
    return [at for at in settled if at > now]


def _kept_pairing(
    roles: Sequence[_Role], now: float, routed: frozenset[str] | None, known: frozenset[str], lone: bool
) -> str | None:
    """Pairing of the old pods of which each role keeps one; None when new pods serve, or nothing does. `routed`,
    `known`, `lone`: as of `next_move`; where routers are of others new ones do not count.

    Pods that flicker count, and less than those that are ready.
    """
    needed = [role for role in roles if role.goal.count > 0]
    if not needed or (routed is None and all(role.ready_new > 0 for role in needed)):
        return None
    every = [[*role.old, *([role.new] if role.new and routed is None else [])] for role in needed]

    def pairs(pairing: str) -> tuple[int, int]:
        mine = [[w for w in role if w.pairing == pairing] for role in every]
        return min(sum(w.ready for w in role) for role in mine), min(sum(w.well(now) for w in role) for role in mine)

    found = [one for one in sorted({w.pairing for role in every for w in role}) if pairs(one)[1] > 0]
    if lone and routed is not None and routed.isdisjoint(found):
        decode = [role for role in roles if role.goal.component is not Component.PREFILL]
        alone = _kept_pairing(decode, now, routed, known, False) if len(decode) < len(roles) else None
        if alone in routed or not found:
            return alone
    return max(found, key=lambda one: (one in known, one in (routed or ()), pairs(one), one), default=None)


def _old_counts(
    role: _Role, roles: Sequence[_Role], cap: int, keep: str | None, known: frozenset[str], now: float
) -> tuple[dict[tuple[Component, str], int], bool]:
    """Counts of the old workloads, and whether the last pod of a pair goes for want of room."""
    left = {w.revision: _started(w, now) for w in role.old}
    goal = role.goal
    finished = role.ready_new >= goal.count
    allowed = 0 if finished else max(0, goal.count + goal.max_surge - cap)
    surplus = max(0, sum(left.values()) - allowed)
    spare = max(0, role.ready - max(0, goal.count - goal.max_unavailable))
    # The youngest go first: after several edits the oldest revision is the one that serves, in every role.
    order = sorted(role.old, key=lambda w: (w.pairing == keep, w.pairing in known, -w.created, w.name))
    last = {w.revision for w in role.old if keep is not None and w.pairing == keep}
    others_ready = all(r.tight or not r.rolling or r.ready_new > 0 for r in roles if r is not role)
    forced = False
    for workload in order:
        take = min(surplus, _sick(workload, now))
        left[workload.revision] -= take
        surplus -= take
    drain = min(surplus, spare)
    for workload in order:
        floor = 0
        if workload.revision in last and not _kept_elsewhere(role, workload, left, keep):
            forced = role.tight and others_ready
            # Of unready ones nobody can say which goes.
            floor = 0 if forced else 1 if workload.ready else left[workload.revision]
        take = min(drain, max(0, left[workload.revision] - floor))
        left[workload.revision] -= take
        drain -= take
        forced = forced and take > 0 and left[workload.revision] == 0
    return {(goal.component, revision): count for revision, count in left.items()}, forced


def _kept_elsewhere(role: _Role, workload: Workload, left: dict[str, int], keep: str | None) -> bool:
    """Whether another workload of the role still holds a ready pod of the kept pairing."""
    if role.new is not None and role.new.pairing == keep and role.new.ready > 0:
        return True
    return any(w is not workload and w.pairing == keep and min(w.ready, left[w.revision]) > 0 for w in role.old)


def _flickers(workload: Workload, now: float) -> bool:
    return any(pod.flickers(now) for pod in workload.live)


def _started(workload: Workload, now: float) -> int:
    """Replicas of an old workload without those not yet made, and without the pods that have not started, unless it
    might be another that goes."""
    stay = [pod for pod in workload.live if pod.ready or pod.started or _flickers(workload, now)]
    return min(workload.replicas, len(stay))


def _sick(workload: Workload, now: float) -> int:
    """How many of those serve nobody, and can go without another going instead."""
    if _flickers(workload, now):
        return 0
    return max(0, _started(workload, now) - sum(pod.ready for pod in workload.live))


def _leaving(
    roles: Sequence[_Role],
    leaving: Sequence[Workload],
    may_leave: bool,
    lone: bool,
    wanted: Mapping[Component, int],
    now: float,
) -> dict[tuple[Component, str], int]:
    """Roles the service no longer has: kept while the new ones do not serve, unless those need their place. As many
    give way as new pods are ready, and one more, or one for each role that has no place for any: what cannot run on the
    places that it has got gets no others."""
    if not leaving:
        return {}
    serving = all(
        role.ready_new >= min(role.goal.count, max(1, role.goal.count - role.goal.max_unavailable)) for role in roles
    )
    if serving and may_leave:
        return {(w.component, w.revision): 0 for w in leaving}
    waiting = sum(pod.reason == UNSCHEDULABLE for role in roles if role.new is not None for pod in role.new.live) - sum(
        lingering(w.pods, now) for w in leaving
    )
    news = [role.new for role in roles if role.new is not None]
    unplaced = sum(bool(new.live) and all(pod.reason == UNSCHEDULABLE for pod in new.live) for new in news)
    gone = sum(
        max(0, wanted.get(part, 0) - sum(_started(w, now) for w in leaving if w.component is part))
        for part in {w.component for w in leaving}
    )
    waiting = min(waiting, sum(role.ready_new for role in roles) + max(1, unplaced) - gone)
    needed = [role for role in roles if role.goal.count > 0 and not (lone and role.goal.component is Component.PREFILL)]
    answer = all(role.ready_new > 0 for role in needed)
    no_room = unplaced and not all(role.goal.max_surge for role in roles)
    least = 0 if (may_leave if answer else no_room) else 1
    counts: dict[tuple[Component, str], int] = {}
    for workload in sorted(leaving, key=lambda w: (-_started(w, now), w.name)):
        started = _started(workload, now)
        taken = max(0, min(waiting, started - min(least, workload.well(now))))
        left = reduced(workload, started - taken, now) if taken else started
        waiting -= max(0, started - left)
        counts[workload.component, workload.revision] = left
    return counts


def _wake_times(role: _Role, now: float) -> list[float]:
    shrinking = [role.new] if role.new is not None and role.new.replicas > role.goal.count else []
    settled = [at for w in (*role.old, *shrinking) for at in settles(w, now)]
    stopping = [pod.ends + OVERDUE_S for w in (*role.old, role.new) if w for pod in w.pods if pod.ends is not None]
    return [at for at in (*settled, *stopping) if at > now]


def _wait(role: _Role, cap: int, target: int, total: int, now: float) -> list[str]:
    name = role.goal.component.value
    stuck = [pod for pod in (role.new.live if role.new else ()) if not pod.ready]
    if stuck:
        worst = max(stuck, key=lambda pod: (bool(pod.problem), -pod.changed))
        return [f"{name}: {worst.name} is not ready: {worst.problem or 'starting'}"]
    if role.new is not None and role.new.problem:
        return [f"{name}: {role.new.problem}"]
    stopping = sum(lingering(w.pods, now) for w in (*role.old, *([role.new] if role.new else [])))
    if stopping and target < cap:
        return [f"{name}: {stopping} stopping pods finish their work before new ones take their place"]
    if role.rolling and target >= cap and target == role.ready_new:
        return [f"{name}: {role.ready_new} of {role.goal.count} changed, waits for the other role"]
    return []
