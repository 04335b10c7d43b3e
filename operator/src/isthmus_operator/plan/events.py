"""Pure: what is worth an Event. Events tell transitions: nothing that goes on holding is told twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..api.reasons import EVENTS, Reason
from ..render.names import Component
from .autoscale import Decision
from .planner import Plan
from .status import Status

_ON_THE_WAY = {("Progressing", Reason.ROLLING_OUT.value), ("Progressing", Reason.PAUSED.value)}


@dataclass(frozen=True, slots=True)
class Event:
    """One Event to write."""

    warning: bool
    reason: Reason
    message: str


def events(before: Status, after: Status, wanted: Plan | None = None) -> list[Event]:
    """What has begun to hold between two statuses."""
    old = {(c["type"], c["reason"]) for c in before.get("conditions") or ()}
    found: dict[Reason, Event] = {}
    skipped = []
    for condition in after.get("conditions") or ():
        began = (condition["type"], condition["reason"]) not in old
        if condition["reason"] == Reason.COMPLETE:
            began = began and (_arrived(before, after) or bool(old & _ON_THE_WAY))
        reason = next((one for one in EVENTS if one == condition["reason"]), None)
        if began and reason is not None and reason not in found:
            found[reason] = Event(condition["status"] == "False", reason, condition["message"])
    updated = (after.get("revision") or {}).get("updated")
    if updated and updated != (before.get("revision") or {}).get("updated"):
        found[Reason.ROLLOUT_STARTED] = Event(False, Reason.ROLLOUT_STARTED, f"rolling out revision {updated}")
    for kind in after.get("skipped") or ():
        if kind not in (before.get("skipped") or ()):
            message = f"{kind} is left out because its API is not installed; it is created once the API is"
            skipped.append(Event(False, Reason.OPTIONAL_API_MISSING, message))
    if wanted is not None and (wanted.gap or wanted.alone):
        role = "the only router" if wanted.alone else "a role of one pod"
        message = f"{role} is replaced without a surge; it has no pod until the new one is ready"
        found[Reason.CAPACITY_GAP] = Event(True, Reason.CAPACITY_GAP, message)
    return [*found.values(), *skipped]


def _arrived(before: Status, after: Status) -> bool:
    """Whether another revision has become the current one."""
    current = (after.get("revision") or {}).get("current")
    return bool(current != (before.get("revision") or {}).get("current"))


def scaled(component: Component, before: int, decision: Decision) -> Event:
    """Auto scaling has changed the number of pods of a role."""
    message = f"{component.value}: {before} to {decision.count} pods: {decision.why}"
    return Event(False, Reason.SCALED, message)


def healed(objects: Iterable[tuple[str, str]]) -> list[Event]:
    """Objects, by kind and name, that somebody else had changed or deleted."""
    return [
        Event(True, Reason.CHILD_HEALED, f"{kind} {name} was changed or deleted by somebody else and has been restored")
        for kind, name in objects
    ]


def overridden(objects: Iterable[tuple[str, str]]) -> list[Event]:
    """Objects, by kind and name, that do not become what is written of them."""
    why = "is not as it was written: an admission policy changes it; it is left so until one of the two changes"
    return [Event(True, Reason.CHILD_OVERRIDDEN, f"{kind} {name} {why}") for kind, name in objects]


def contested(objects: Iterable[tuple[str, str]]) -> list[Event]:
    """Objects, by kind and name, that somebody else changes again and again."""
    why = "is changed by somebody else again and again; from now on it is put right after growing pauses"
    return [Event(True, Reason.CHILD_CONTESTED, f"{kind} {name} {why}") for kind, name in objects]
