"""Pure: how many routers of each revision there are. They roll as engines do, a workload for each revision.

- Routers change when half of the engines that serve are of the goal, so that a new mode or tokenizer never meets only
  old engines, nor few new ones alone. Once some have changed, the rest do.
- Routers are where engines of their own are well. Where those fail, routers go back to the revision whose engines are
  well; where new routers fail, old ones come back beside them.
- One at a time: a new one is ready before an old one goes, or, where rollouts have no surge, an old one goes before,
  unless it is the only one.
- Engines of the old revision stay, one of each role at least, until no old router is asked for (`old_pairings`): they
  may give new engines nothing.
- The old workload stays, at zero, until the rollout is over: a rollback takes routers back with the engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..api.choices import Mode, PrefillUnavailable
from ..api.v1alpha1 import InferenceService
from ..render.names import Component
from ..render.revision import model_digest, pairing, role_revision
from ..render.router import surges
from .observed import Observed, Workload
from .progress import current
from .rollout import Goal, places


def goal_of(service: InferenceService, goals: Sequence[Goal], seen: Observed, *, failed: bool) -> str:
    """The revision that routers should come to: of the present spec, or where that has failed the one that goes with
    the engines of `goals`, if there is one."""
    wanted = role_revision(service, Component.ROUTER)
    former = [w for w in seen.routers if w.revision != wanted] if failed else []
    engines = [new for goal in goals if goal.count > 0 and (new := current(goal, seen)) is not None]
    found = [w for w in former if engines and all(suits(w, engine) for engine in engines)]
    pairs, known_model = service.spec.mode is Mode.DISAGGREGATED, model_digest(service)
    if (
        not found
        and engines
        and all(pairs is not (w.component is Component.WORKER) and w.model == known_model for w in engines)
    ):
        return wanted
    found = found or former
    return max(found, key=_standing).revision if found else wanted


def may_change(
    service: InferenceService, goal: str, goals: Sequence[Goal], seen: Observed, now: float, *, rolling: bool
) -> bool:
    """Whether routers may come to a revision now. `rolling`: engines of other revisions are there. Once some have, the
    rest do also while new engines flicker. Of a new mode decode pods are enough that answer alone, where a last pod of
    the former one may be in the way of prefill."""
    if not rolling:
        return True
    new = seen.router_of(goal)
    begun = new is not None and new.replicas > 0
    parts = {role.component for role in goals if not role.leaves}
    leaving = [w.replicas for w in seen.engines if w.component not in parts]
    lone = bool(leaving) and sum(leaving) <= 1 and _decodes_alone(service)
    for role in (role for role in goals if role.count > 0 and not (lone and role.component is Component.PREFILL)):
        engines = current(role, seen)
        fresh = 0 if engines is None else engines.well(now) if begun else engines.ready
        others = sum(w.ready for w in seen.of(role.component)) - fresh
        if fresh == 0 or (fresh < others and not begun):
            return False
    return True


def next_step(
    service: InferenceService, goals: Sequence[Goal], goal: str, seen: Observed, now: float, *, rolling: bool
) -> dict[str, int]:
    """Replicas of each revision next, on the way to `goal` as far as engines let it come. `rolling`: as of
    `may_change`."""
    best = serving(service, seen, now)
    if best is None:
        return next_counts(service, goal, seen, now)
    new = [engines for role in goals if (engines := current(role, seen)) is not None and role.count > 0]
    pairs = all(engines.component is not Component.WORKER for engines in new)
    # New engines answer, of few roles or few as they are, and those that routers are of do not.
    alone = not has_engines(service, best, seen, now) and _answer(service, pairs, new, now)
    # Engines that have all changed leave others nothing to do: the step is over when routers of theirs serve. Where
    # there are none, not even that is so.
    if service.spec.rollout.paused and (rolling or fit(service, best) or not new):
        lost = has_engines(service, best, seen, now) and any(
            w.replicas and not has_engines(service, w, seen, now) for w in seen.routers
        )
        if alone:
            return next_counts(service, goal, seen, now)
        if lost or _stand_in(service, best.revision, seen, now) is not None:
            return next_counts(service, best.revision, seen, now)
        return held_counts(service, seen, best)
    may = may_change(service, goal, goals, seen, now, rolling=rolling) or alone
    return next_counts(service, goal if may else best.revision, seen, now)


def has_engines(service: InferenceService, routers: Workload, seen: Observed, now: float) -> bool:
    """Whether an engine that routers can give requests to is well; with prefill and decode, one of each, unless decode
    answers alone."""
    return _answer(service, routers.pairs, [w for w in seen.engines if suits(routers, w)], now)


def _answer(service: InferenceService, pairs: bool, engines: Sequence[Workload], now: float) -> bool:
    """Whether such of these as an answer needs are well. `pairs`: the mode."""
    parts = [Component.DECODE] if pairs else [Component.WORKER]
    if pairs and not _decodes_alone(service):
        parts.append(Component.PREFILL)
    return all(any(w.well(now) for w in engines if w.component is part) for part in parts)


def _decodes_alone(service: InferenceService) -> bool:
    return service.spec.router.on_prefill_unavailable is PrefillUnavailable.LOCAL


def suits(routers: Workload, engines: Workload) -> bool:
    """Whether it is not known that routers are of another mode or model than engines."""
    if routers.pairs is (engines.component is Component.WORKER):
        return False
    return routers.pairing in ("", engines.pairing) or (routers.model != "" and routers.model == engines.model)


def known(engines: Iterable[Workload], seen: Observed) -> bool:
    """Whether there are, or were, routers of all these engines."""
    return all(any(suits(w, one) for w in seen.routers) for one in engines)


def serving(service: InferenceService, seen: Observed, now: float) -> Workload | None:
    """The routers that requests go to until others come: those that have engines, of these those that are well, and of
    these those that most are ready of. Of equals the oldest: what is asked for next does not change that."""
    able = {w.revision: has_engines(service, w, seen, now) for w in seen.routers}
    return max(
        (w for w in seen.routers if w.replicas > 0 or able[w.revision]),
        key=lambda w: (able[w.revision], w.well(now) > 0, w.ready, w.well(now), -w.created),
        default=None,
    )


def next_counts(service: InferenceService, to: str, seen: Observed, now: float) -> dict[str, int]:
    """Replicas of each revision, on the way to one."""
    count = service.spec.router.replicas
    counts = {w.revision: w.replicas for w in seen.routers}
    # Those that have engines go last.
    old = sorted(
        (w for w in seen.routers if w.revision != to),
        key=lambda w: (has_engines(service, w, seen, now), w.ready, w.created),
    )
    helper = _stand_in(service, to, seen, now)
    if helper is None and not any(w.replicas for w in old):
        return counts | {to: count}
    new = seen.router_of(to)
    begun, ready = (0, 0) if new is None else (new.replicas, new.ready)
    counts[to] = target = min(count, max(0 if helper else begun, ready + 1))
    surplus = sum(w.replicas for w in old) - max(0, count - (ready if _stays(service, old, seen, now) else target))
    if helper is not None:
        counts[helper.revision] += max(0, -surplus)
    for workload in old:
        taken = min(max(0, surplus), workload.replicas)
        counts[workload.revision] -= taken
        surplus -= taken
    if helper is not None and not helper.well(now):
        # Nobody answers, and which of them can start is not known: each is tried.
        counts |= {
            w.revision: max(counts[w.revision], min(count, 1)) for w in old if has_engines(service, w, seen, now)
        }
    return counts


def _stays(service: InferenceService, old: Iterable[Workload], seen: Observed, now: float) -> bool:
    """Whether an old router waits for a new one: the only one, which is to wait although rollouts have no surge, while
    it has engines. Without, it would be in the way of the new one where a quota has room for one."""
    if not service.spec.rollout.max_surge.is_zero:
        return True
    return surges(service) and any(w.replicas and has_engines(service, w, seen, now) for w in old)


def _stand_in(service: InferenceService, revision: str, seen: Observed, now: float) -> Workload | None:
    """Routers of another revision that have engines, where none of a revision is well."""
    mine = seen.router_of(revision)
    if mine is not None and mine.well(now):
        return None
    rest = replace(seen, routers=tuple(w for w in seen.routers if w is not mine))
    found = serving(service, rest, now)
    return found if found is not None and has_engines(service, found, seen, now) else None


def held_counts(service: InferenceService, seen: Observed, stay: Workload) -> dict[str, int]:
    """The same where no revision gives way to another: as many as there should be, by those that `stay`."""
    counts = {w.revision: w.replicas for w in seen.routers}
    least = service.spec.router.replicas - (sum(counts.values()) - stay.replicas)
    most = least + (surges(service) and len(counts) > 1)
    # Others that are not ready serve nobody, so the last one that does stays whatever the sum.
    alone = service.spec.router.replicas > 0 and not any(w.ready for w in seen.routers if w is not stay)
    return counts | {stay.revision: max(min(stay.replicas, int(alone)), least, min(stay.replicas, most))}


def old_pairings(service: InferenceService, goal: str, seen: Observed, now: float) -> frozenset[str] | None:
    """Pairings of the engines of routers of another revision, those that serve, or would come back: it is not sure
    that they give new engines anything. None: there are no such routers."""
    if service.spec.router.replicas == 0:
        return None
    asked = tuple(w for w in seen.routers if w.revision != goal and w.replicas > 0)
    old = serving(service, replace(seen, routers=asked), now) or _stand_in(service, goal, seen, now)
    return None if old is None else frozenset(w.pairing for w in seen.engines if suits(old, w))


def known_pairings(service: InferenceService, seen: Observed, now: float) -> frozenset[str]:
    """Pairings of the engines that the routers that serve can give requests to, whatever revision these are of."""
    best = serving(service, seen, now)
    return frozenset(w.pairing for w in seen.engines if best is not None and suits(best, w))


def replaces_the_only_one(service: InferenceService, goal: str, seen: Observed, counts: dict[str, int]) -> bool:
    """Whether the only router is about to go before there is another."""
    going = any(w.ready and not counts[w.revision] for w in seen.routers if w.revision != goal)
    return going and not _ready(goal, seen) and service.spec.router.replicas == 1


def fit(service: InferenceService, routers: Workload) -> bool:
    """Whether it is not known that routers are of other engines, or another mode, than the present spec's."""
    same_mode = routers.pairs == (service.spec.mode is Mode.DISAGGREGATED)
    return same_mode and (routers.pairing in ("", pairing(service)) or routers.model == model_digest(service))


def arrived(service: InferenceService, goal: str, seen: Observed) -> bool:
    """Whether all routers are of a revision, and ready."""
    rest = any(w.replicas for w in seen.routers if w.revision != goal)
    return _ready(goal, seen) >= service.spec.router.replicas and not rest


def _ready(revision: str, seen: Observed) -> int:
    found = seen.router_of(revision)
    return 0 if found is None else found.fresh.ready


def unneeded(goal: str, seen: Observed, counts: dict[str, int], over: bool, now: float) -> tuple[str, ...]:
    """Names of workloads of other revisions that have no pods; until a rollout is `over`, less those that would come
    back, one for each workload of engines."""
    rest = [w for w in seen.routers if w.revision != goal]
    kept: set[str] = set()
    for engines in () if over else seen.engines:
        fitting = [w for w in rest if suits(w, engines)]
        if not fitting and not engines.model:  # an earlier operator made them, and did not say of which model
            fitting = [w for w in rest if w.pairs is not (engines.component is Component.WORKER)]
        kept |= {w.name for w in fitting if w is max(fitting, key=_standing)}
    return tuple(w.name for w in rest if w.name not in kept and not counts[w.revision] and not places(w, now))


def _standing(routers: Workload) -> tuple[bool, int, float]:
    """Which of several that know the same engines serve, or did last: the oldest."""
    return routers.replicas > 0, routers.ready, -routers.created
