"""Pure: engines that are ready and that take no old one's place: routers give them nothing, or it is too early to say.

A router gives nothing to an engine with another tokenizer than its own. Engines of one spec have another where a branch
has moved, or files were changed in place, and routers that started before know the former one. Each router says so of
each engine (`Word`); what those of another model or mode say of it means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from ..api.fields import Duration
from .observed import REFUSED, Observed, Pod, Word, Workload
from .rollout import Goal
from .routers import suits

LOOK_S = 10.0
"""By then a router has looked at an engine that is ready: it does so each second."""
_PROBLEM = (
    "routers give it nothing, as its model has another tokenizer than theirs: name another revision or place in"
    " spec.model.source, which replaces both, or restart the routers"
)
_UNSEEN = f"routers have not taken it yet, and it counts when they do, or after {LOOK_S:.0f} s"


def without_refused(seen: Observed, goals: Iterable[Goal], router: str) -> Observed:
    """With engines that are ready, and that routers of their model refuse for their tokenizer, as unready ones.
    `router`: the revision that routers should come to. Before one of these is ready nothing follows for engines of
    `goals`: former ones need not know their tokenizer."""
    if not any(word is Word.OTHER for words in seen.facts.routers.values() for word in words.values()):
        return seen
    news = _keys(goals)

    def refused(workload: Workload) -> Workload:
        said = _said(seen, workload)
        if not said or ((workload.component, workload.revision) in news and router not in said):
            return workload
        return _unready(
            workload,
            lambda pod: all(words.get(pod.ip) is Word.OTHER for words in said.values()),
            reason=REFUSED,
            problem=_PROBLEM,
        )

    return replace(seen, engines=tuple(map(refused, seen.engines)))


def without_unseen(seen: Observed, goals: Iterable[Goal], router: str, now: float) -> Observed:
    """With engines of `goals` that became ready just now, and that routers have not looked at yet, as unready ones:
    what they say then may be that they give them nothing. `router`: as of `without_refused`."""
    news = _keys(goals)

    def unseen(workload: Workload) -> Workload:
        said = _said(seen, workload)
        if (workload.component, workload.revision) not in news or router not in said:
            return workload
        started = _started(seen, said)

        def waits(pod: Pod) -> bool:
            taken = any(words.get(pod.ip) is Word.TAKEN for words in said.values())
            return not taken and now - max(started, pod.changed) < LOOK_S

        return _unready(workload, waits, problem=_UNSEEN)

    return replace(seen, engines=tuple(map(unseen, seen.engines)))


def without_young(seen: Observed, goals: Iterable[Goal], least: Duration | None, now: float) -> Observed:
    """With engines of `goals` that have been ready for less than `least` as such that flicker: they serve, and nothing
    follows from it yet."""
    if least is None:
        return seen
    news = _keys(goals)
    problem = f"it counts once it has been ready for {least} (minReady)"

    def young(workload: Workload) -> Workload:
        if (workload.component, workload.revision) not in news:
            return workload
        # As of now, or it would be sick where `least` is longer than a pod may flicker.
        return _unready(workload, lambda pod: now - pod.changed < least.seconds, problem=problem, changed=now)

    return replace(seen, engines=tuple(map(young, seen.engines)))


def next_look(seen: Observed, unseen: Observed, least: Duration | None, now: float) -> float | None:
    """When to ask again about those that are ready in the one and not in the other, of which nobody tells when routers
    have looked at them, or that they have been ready for `least`. None: there are none."""
    times: list[float] = []
    for workload, without in zip(seen.engines, unseen.engines, strict=True):
        started = _started(seen, _said(seen, workload))
        for pod, other in zip(workload.pods, without.pods, strict=True):
            if pod.ready and not other.ready:
                times += [max(pod.changed, started) + wait for wait in (1.0, 2.0, 4.0, LOOK_S)]
                times += [pod.changed + least.seconds] if least is not None else []
    return min((at for at in times if at > now), default=None)


def _keys(goals: Iterable[Goal]) -> set[tuple[str, str]]:
    return {(goal.component, goal.revision) for goal in goals}


def _said(seen: Observed, engines: Workload) -> dict[str, Mapping[str, Word]]:
    """What routers that are of the mode and model of these engines say, by the revision of the routers."""
    return {w.revision: seen.facts.routers[w.revision] for w in seen.routers
            if w.revision in seen.facts.routers and suits(w, engines)}  # fmt: skip


def _started(seen: Observed, revisions: Collection[str]) -> float:
    """When the last of the routers of these revisions became ready. Such a one may have looked at nothing yet."""
    return max((pod.changed for w in seen.routers if w.revision in revisions for pod in w.live if pod.ready), default=0)


def _unready(
    workload: Workload, which: Callable[[Pod], bool], *, problem: str, reason: str = "", changed: float | None = None
) -> Workload:
    if not any(pod.ready and which(pod) for pod in workload.live):
        return workload
    pods = (
        replace(pod, ready=False, reason=reason, problem=problem, changed=pod.changed if changed is None else changed)
        if pod.ready and which(pod)
        else pod
        for pod in workload.pods
    )
    return replace(workload, pods=tuple(pods))
