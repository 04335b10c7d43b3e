"""Pure: what a plan and the cluster amount to, as the status of the InferenceService, and what is worth an Event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..api.choices import Mode, TransferMode, Transport
from ..api.reasons import Reason
from ..api.v1alpha1 import InferenceService
from ..errors import ApiError, InvalidSpec, NameTaken
from ..render import mooncake
from ..render.names import Component, url
from ..render.revision import role_revision, service_revision
from .causes import State
from .observe import seconds
from .observed import EngineFacts, Observed, Workload, printable
from .planner import Plan, Rollout
from .states import TRANSPORTS, answered, states_of

Status = dict[str, Any]


def status_of(
    service: InferenceService,
    seen: Observed,
    wanted: Plan,
    before: Status,
    now: str,
    *,
    held: Mapping[Component, str] | None = None,
    skipped: Sequence[str] = (),
    refused: Sequence[ApiError] = (),
    left_out: Sequence[ApiError] = (),
) -> Status:
    """The status as it should be. Equal inputs but for `now` give an equal status, unless a condition flips.

    `held`: what keeps roles from the number of pods that their targets ask for; `skipped`: kinds of optional objects
    that are left out because their API is not installed; `refused`: why objects could not be written; `left_out`: the
    same of optional ones, without which a rollout goes on.
    """
    states = states_of(service, seen, wanted, seconds(now))
    if refused:
        states |= {"Ready": _refusal([*refused, *left_out]), "Progressing": _refusal(refused)}
    elif left_out and states["Ready"].status == "True":
        states["Ready"] = _refusal(left_out)
    for component, reason in (held or {}).items():
        if reason:
            name = f"{component.value.capitalize()}Ready"
            states[name] = replace(states[name], message=f"{states[name].message}; {reason}")
    revision = service_revision(service)
    current = revision if wanted.state is Rollout.COMPLETE else (before.get("revision") or {}).get("current", "")
    transfer = _transfer(service, seen, before, now)
    out: Status = {
        "observedGeneration": service.generation,
        "url": url(service),
        "revision": _without_empty({"current": current, "updated": revision, "failed": wanted.failed}),
        "fingerprint": ", ".join(sorted({facts.fingerprint for facts in _facts(seen, wanted)}))[:4096],
        "model": _without_empty({"revision": _model_revision(_facts(seen, wanted))}),
        "roles": _roles(service, seen, wanted),
        "transfer": transfer,
        "kvCache": _kv(_facts(seen, wanted)),
        "pinned": _pinned(before, seen),
        "skipped": sorted(skipped),
        "conditions": conditions(states, before, service.generation, now),
    }
    return _without_empty(out)


def invalid_status(error: InvalidSpec, before: Status, generation: int, now: str) -> Status:
    """The status of a spec that breaks rules: what serves goes on, and the conditions say what is wrong."""
    bad = State("False", Reason.INVALID_SPEC, str(error)[:4000])
    return _unmoved({"Ready": bad, "Progressing": bad, "Compatible": bad}, before, generation, now)


def failed_status(reason: Reason, message: str, before: Status, generation: int, now: str) -> Status:
    """The status of a service about which nothing could be decided: what is known of it stays, but it is not ready."""
    bad = State("False", reason, message[:4000])
    return _unmoved({"Ready": bad, "Progressing": bad}, before, generation, now)


def _unmoved(states: dict[str, State], before: Status, generation: int, now: str) -> Status:
    # Ready first, as it always is. The others are of the generation that was looked at.
    kept = [c for c in before.get("conditions") or () if c["type"] not in states]
    found = conditions(states, before, generation, now) + kept
    return {**before, "observedGeneration": generation, "conditions": found}


def _refusal(errors: Sequence[ApiError]) -> State:
    taken = any(isinstance(error, NameTaken) for error in errors)
    return State("False", Reason.NAME_TAKEN if taken else Reason.RECONCILE_FAILED, "; ".join(map(str, errors)))


def conditions(states: dict[str, State], before: Status, generation: int, now: str) -> list[dict[str, Any]]:
    """States as conditions; the time changes only when the status does, or where it cannot be right."""
    known = {c["type"]: c for c in before.get("conditions") or ()}
    out = []
    for name, state in states.items():
        old = known.get(name)
        since = old["lastTransitionTime"] if old is not None and old["status"] == state.status else ""
        out.append(
            {
                "type": name,
                "status": state.status,
                "reason": str(state.reason),
                "message": printable(state.message[:32768]),
                "lastTransitionTime": since if 0 < seconds(since) <= seconds(now) else now,
                "observedGeneration": generation,
            }
        )
    return out


def _facts(seen: Observed, wanted: Plan) -> list[EngineFacts]:
    return list(answered(seen, wanted).values())


def _model_revision(facts: Sequence[EngineFacts]) -> str:
    return ", ".join(sorted({one.model_revision for one in facts if one.model_revision}))[:512]


def _roles(service: InferenceService, seen: Observed, wanted: Plan) -> Status:
    out: Status = {}
    for component, goal in wanted.goals.items():
        count = wanted.had.get(component, goal.count)
        out[component.value] = _role(seen.of(component), count, goal.revision, seen)
    for component in sorted({w.component for w in seen.engines} - wanted.goals.keys()):
        # A role that is leaving, or would come back: as many as it had.
        workloads = seen.of(component)
        count = wanted.had.get(component, sum(w.replicas for w in workloads))
        out[component.value] = _role(workloads, count, "", seen)
    count, revision = service.spec.router.replicas, role_revision(service, Component.ROUTER)
    out["router"] = _role(seen.routers, count, revision, None)
    if mooncake.is_managed(service):
        out["store"] = _role([seen.store] if seen.store else [], 1, role_revision(service, Component.STORE), None)
    return out


def _role(workloads: Sequence[Workload], count: int, revision: str, seen: Observed | None) -> Status:
    pods = [pod for w in workloads for pod in w.live]
    ready = sum(pod.ready for pod in pods)
    out: Status = {
        "desired": count,
        "ready": ready,
        "updated": sum(pod.ready and pod.revision == revision for pod in pods),
        "summary": f"{ready}/{count}",
    }
    if seen is not None and seen.facts.routers:
        out["routable"] = sum(seen.facts.taken(pod.ip) for pod in pods)
    return out


def _transfer(service: InferenceService, seen: Observed, before: Status, now: str) -> Status:
    if service.spec.mode is not Mode.DISAGGREGATED:
        return {}
    old = before.get("transfer") or {}
    facts = [f for f in seen.facts.engines.values() if f.transfer_mode not in ("", "none")]
    if not facts:
        return _without_empty({**old, "mode": service.spec.transfer.mode.value})
    # Of the pods that serve, of whatever revision: what is in use, not what is asked for.
    modes = {TransferMode.STORE if f.transfer_mode == "store" else TransferMode.DIRECT for f in facts}
    mode = service.spec.transfer.mode if len(modes) > 1 else next(iter(modes))
    used = {TRANSPORTS.get(f.transport.lower()) for f in facts} - {None}
    out = {
        "mode": mode.value,
        "effective": Transport.TCP.value if Transport.TCP in used else next((t.value for t in used if t), ""),
        "probedGBps": f"{min(f.probed_gbps for f in facts):.1f}" if all(f.probed_gbps for f in facts) else "",
    }
    same = all(old.get(key, "") == value for key, value in out.items())
    return _without_empty(out | {"lastProbe": old.get("lastProbe") if same and old.get("lastProbe") else now})


def _kv(facts: Sequence[EngineFacts]) -> Status:
    found = [f for f in facts if f.usable_blocks]
    if not found:
        return {}
    smallest = min(found, key=lambda f: f.usable_blocks)
    return {
        "physicalBlocks": smallest.physical_blocks,
        "usableBlocks": smallest.usable_blocks,
        "bytesPerBlock": smallest.bytes_per_block,
        "maxModelLen": min(f.max_model_len for f in found),
    }


def _pinned(before: Status, seen: Observed) -> Status:
    images = {}
    for field, workloads in (("engineImage", seen.engines), ("routerImage", seen.routers)):
        newest = max(workloads, key=lambda w: w.created, default=None)
        if newest is not None and newest.image:
            images[field] = newest.image
    return images or (before.get("pinned") or {})


def _without_empty(value: Status) -> Status:
    return {key: item for key, item in value.items() if item not in ("", None, {}, [])}
