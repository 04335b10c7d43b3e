"""Pure: how many routers of each revision there are. They roll as engines do, a workload for each revision.

- Routers change when half of the engines that serve are of the goal, so that a new mode or tokenizer never meets only
  old engines, nor few new ones alone. Once some have changed, the rest do.
- One at a time: a new one is ready before an old one goes, or, where rollouts have no surge, an old one goes before.
- Engines of the old revision stay, one of each role at least, until no old router is asked for (`old_routers`): they
  may give new engines nothing.
- The old workload stays, at zero, until the rollout is over: a rollback takes routers back with the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..api.choices import Mode
from ..api.v1alpha1 import InferenceService
from ..render.names import Component
from ..render.revision import pairing, role_revision
from .observed import Observed, Workload
from .progress import current
from .rollout import Goal


def goal_of(service: InferenceService, goals: Sequence[Goal], seen: Observed, *, failed: bool) -> str:
    """The revision that routers should come to: of the present spec, or where that has failed the one that goes with
    the engines of `goals`, if there is one."""
    wanted = role_revision(service, Component.ROUTER)
    former = [w for w in seen.routers if w.revision != wanted] if failed else []
    pairings = {goal.pairing for goal in goals if goal.count > 0}
    fitting = [w for w in former if w.pairing in pairings] or former
    return max(fitting, key=lambda w: (w.ready, w.created)).revision if fitting else wanted


def may_change(goal: str, goals: Sequence[Goal], seen: Observed, *, rolling: bool) -> bool:
    """Whether routers may come to a revision now. `rolling`: engines of other revisions are there."""
    if not rolling:
        return True
    new = seen.router_of(goal)
    begun = new is not None and new.replicas > 0
    for role in (role for role in goals if role.count > 0):
        engines = current(role, seen)
        fresh = 0 if engines is None else engines.ready
        others = sum(w.ready for w in seen.of(role.component)) - fresh
        if fresh == 0 or (fresh < others and not begun):
            return False
    return True


def serving(seen: Observed) -> Workload | None:
    """The routers that requests go to until others come: those that most are ready of."""
    asked = [w for w in seen.routers if w.replicas > 0]
    return max(asked, key=lambda w: (w.ready, w.replicas, -w.created), default=None)


def next_counts(service: InferenceService, to: str, seen: Observed) -> dict[str, int]:
    """Replicas of each revision, on the way to one."""
    count = service.spec.router.replicas
    counts = {w.revision: w.replicas for w in seen.routers}
    old = sorted((w for w in seen.routers if w.revision != to), key=lambda w: (w.ready, w.created))
    if not any(w.replicas for w in old):
        return counts | {to: count}
    new = seen.router_of(to)
    begun, ready = (0, 0) if new is None else (new.replicas, new.ready)
    counts[to] = target = min(count, max(begun, ready + 1))
    surplus = sum(w.replicas for w in old) - max(0, count - (ready if _surges(service) else target))
    for workload in old:
        taken = min(max(0, surplus), workload.replicas)
        counts[workload.revision] -= taken
        surplus -= taken
    return counts


def held_counts(service: InferenceService, seen: Observed, stay: Workload) -> dict[str, int]:
    """The same where no revision gives way to another: as many as there should be, by those that `stay`."""
    counts = {w.revision: w.replicas for w in seen.routers}
    least = service.spec.router.replicas - (sum(counts.values()) - stay.replicas)
    most = least + (_surges(service) and len(counts) > 1)
    return counts | {stay.revision: max(0, least, min(stay.replicas, most))}


def old_routers(service: InferenceService, goal: str, seen: Observed) -> Workload | None:
    """Routers of another revision, those that serve: it is not sure that they give new engines anything."""
    if service.spec.router.replicas == 0:
        return None
    return serving(replace(seen, routers=tuple(w for w in seen.routers if w.revision != goal)))


def replaces_the_only_one(service: InferenceService, goal: str, seen: Observed, counts: dict[str, int]) -> bool:
    """Whether the only router is about to go before there is another."""
    going = any(w.ready and not counts[w.revision] for w in seen.routers if w.revision != goal)
    return going and not _ready(goal, seen) and service.spec.router.replicas == 1


def fit(service: InferenceService, routers: Workload) -> bool:
    """Whether it is not known that routers are of other engines, or another mode, than the present spec's."""
    same_mode = routers.pairs == (service.spec.mode is Mode.DISAGGREGATED)
    return same_mode and routers.pairing in ("", pairing(service))


def arrived(service: InferenceService, goal: str, seen: Observed) -> bool:
    """Whether all routers are of a revision, and ready."""
    rest = any(w.replicas for w in seen.routers if w.revision != goal)
    return _ready(goal, seen) >= service.spec.router.replicas and not rest


def _ready(revision: str, seen: Observed) -> int:
    found = seen.router_of(revision)
    return 0 if found is None else found.fresh.ready


def _surges(service: InferenceService) -> bool:
    return not service.spec.rollout.max_surge.is_zero
