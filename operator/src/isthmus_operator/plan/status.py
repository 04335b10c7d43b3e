"""Pure: what a plan and the cluster amount to, as the status of the InferenceService, and what is worth an Event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..api.choices import Mode, PrefillUnavailable, TransferMode, Transport
from ..api.reasons import Reason
from ..api.v1alpha1 import InferenceService
from ..errors import ApiError, InvalidSpec, NameTaken
from ..render import mooncake
from ..render.names import Component, is_engine, url
from ..render.revision import role_revision, service_revision
from ..render.service import components
from .adapters import adapters_state
from .causes import State, reason_of, workload_state, worst
from .observe import seconds
from .observed import EngineFacts, Observed, Word, Workload, printable
from .planner import Plan, Rollout
from .refusals import without_refused
from .rollout import Goal

Status = dict[str, Any]

_TRANSPORTS = {"tcp": Transport.TCP, "rdma": Transport.RDMA, "nvlink": Transport.NVLINK}


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
    states = _states(service, seen, wanted, seconds(now))
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


def _states(service: InferenceService, seen: Observed, wanted: Plan, now: float) -> dict[str, State]:
    states: dict[str, State] = {}
    taken = without_refused(seen, wanted.goals.values(), wanted.router)
    for component in components(service):
        if is_engine(component):
            states[f"{component.value.capitalize()}Ready"] = _engine_state(wanted.goals[component], taken, now)
    states["RouterReady"] = _router_state(service, seen, wanted, now)
    if service.spec.store is not None:
        states["StoreReady"] = _store_state(service, seen, wanted, now)
    states["ModelReady"] = _model_state(seen, wanted)
    if service.spec.model.adapters:
        states["AdaptersReady"] = adapters_state(service, _answered(seen, wanted))
    if service.spec.mode is Mode.DISAGGREGATED:
        states["TransferReady"] = _transfer_state(service, seen, wanted)
    states["Compatible"] = _compatible_state(seen, wanted)
    progressing = _progressing(service, seen, wanted)
    available = _available(service, seen, wanted)
    first = {
        "Ready": _ready(states, available, progressing),
        "Available": available,
        "Progressing": progressing,
    }
    return first | states


def _ready(states: dict[str, State], available: State, progressing: State) -> State:
    if progressing.status == "False":
        return State("False", progressing.reason, progressing.message)
    # Engines wait for a store that is not ready, and it for them while it is of an older spec.
    first = [state for name, state in states.items() if name == "StoreReady" and state.reason != Reason.ROLLING_OUT]
    for state in (*first, *states.values(), available):
        if state.status == "False":
            return State("False", state.reason, state.message)
    if progressing.reason is not Reason.COMPLETE:
        return State("False", progressing.reason, progressing.message)
    return State("True", Reason.ALL_READY, "all pods run the current spec and are ready")


def _progressing(service: InferenceService, seen: Observed, wanted: Plan) -> State:
    revision = service_revision(service)
    waits = "; ".join(wanted.waits)
    if wanted.state is Rollout.COMPLETE:
        return State("True", Reason.COMPLETE, f"revision {revision} is rolled out")
    if wanted.state is Rollout.PAUSED:
        return State("Unknown", Reason.PAUSED, "spec.rollout.paused is true; set it to false to continue")
    if wanted.state is Rollout.FAILED:
        return State("False", Reason.DEADLINE_EXCEEDED, waits)
    if wanted.state is Rollout.ROLLED_BACK:
        return State("False", Reason.ROLLED_BACK, f"revision {wanted.failed} failed; the one before it serves")
    counts = ", ".join(
        f"{component.value} {_updated(goal, seen)}/{goal.count}" for component, goal in wanted.goals.items()
    )
    return State("True", Reason.ROLLING_OUT, f"ready pods of revision {revision}: {counts}. {waits}".strip())


def _updated(goal: Goal, seen: Observed) -> int:
    return sum(w.ready for w in seen.of(goal.component) if w.revision == goal.revision)


def _available(service: InferenceService, seen: Observed, wanted: Plan) -> State:
    state = _serving(service, seen, wanted)
    said = seen.said("Available")
    if state.status == "True" or seen.current or (said is not None and said.reason != Reason.STARTING):
        return state
    # "Not yet" is not a failure to warn about.
    return replace(state, reason=Reason.STARTING) if state.reason != Reason.SCALED_TO_ZERO else state


def _serving(service: InferenceService, seen: Observed, wanted: Plan) -> State:
    if not any(w.ready for w in seen.routers):
        if service.spec.router.replicas == 0:
            return State("False", Reason.SCALED_TO_ZERO, "router is scaled to 0, so clients get no answer")
        return State("False", Reason.NO_ROUTER, f"no router of {service.name} is ready")
    ready = {part: sum(w.ready for w in seen.of(part)) for part in Component if is_engine(part)}
    if _none_routable(seen):
        some = sum(ready.values())
        return State("False", Reason.NO_ENGINE, f"routers can give requests to none of {some} engines that are ready")
    if ready[Component.WORKER] > 0:
        return State("True", Reason.SERVING, f"{ready[Component.WORKER]} workers are ready")
    if ready[Component.DECODE] == 0:
        part = Component.WORKER if service.spec.mode is Mode.UNIFIED else Component.DECODE
        if wanted.goals[part].count == 0:
            return State("False", Reason.SCALED_TO_ZERO, f"{part} is scaled to 0, so prompts get no answer")
        return State("False", Reason.NO_ENGINE, f"no {part} pod of {service.name} is ready")
    if service.spec.router.on_prefill_unavailable is PrefillUnavailable.REJECT and not _may_pair(seen):
        missing = "and of the KV layout of a decode pod " if ready[Component.PREFILL] else ""
        text = f"no prefill pod of {service.name} is ready {missing}(onPrefillUnavailable: Reject)"
        return State("False", Reason.NO_ENGINE, text)
    return State(
        "True",
        Reason.SERVING,
        f"{ready[Component.PREFILL]} prefill and {ready[Component.DECODE]} decode pods are ready",
    )


def _none_routable(seen: Observed) -> bool:
    """Whether no engine that is ready is one that routers choose from, as those of each revision say."""
    ready = [pod for w in seen.engines for pod in w.live if pod.ready]
    said = [seen.facts.routers.get(w.revision) for w in seen.routers if w.ready]
    if not ready or None in said:
        return False
    return not any(words.get(pod.ip) is Word.TAKEN for words in said if words for pod in ready)


def _may_pair(seen: Observed) -> bool:
    """Whether a prefill and a decode pod that are ready have one KV layout, as far as is known."""
    prefill, decode = (
        [(w.pairing, seen.facts.engines.get(pod.name)) for w in seen.of(part) for pod in w.live if pod.ready]
        for part in (Component.PREFILL, Component.DECODE)
    )
    return any(
        one == other or not mine or not theirs or mine.fingerprint == theirs.fingerprint
        for one, mine in prefill
        for other, theirs in decode
    )


def _engine_state(goal: Goal, seen: Observed, now: float) -> State:
    new = next((w for w in seen.of(goal.component) if w.revision == goal.revision), None)
    name = goal.component.value
    if goal.count == 0:
        return State("True", Reason.SCALED_TO_ZERO, f"{name} is scaled to 0")
    if new is None:
        return State("False", Reason.STARTING, f"{name}: no pod of revision {goal.revision} exists yet")
    return workload_state(new, goal.count, now)


def _router_state(service: InferenceService, seen: Observed, wanted: Plan, now: float) -> State:
    count = service.spec.router.replicas
    if count == 0:
        return State("True", Reason.SCALED_TO_ZERO, "router is scaled to 0")
    if not seen.routers:
        return State("False", Reason.STARTING, "router: not made yet")
    # What is come to: after a rollback, the one before.
    goal = seen.router_of(wanted.router)
    if goal is None or (wanted.router != role_revision(service, Component.ROUTER) and not wanted.failed):
        return State("False", Reason.ROLLING_OUT, "router: waits for new engines to serve")
    return workload_state(goal.fresh, count, now)


def _stays(wanted: Plan) -> str:
    return f"revision {wanted.failed} failed; the router stays as it was" if wanted.failed else ""


def _store_state(service: InferenceService, seen: Observed, wanted: Plan, now: float) -> State:
    if not mooncake.is_managed(service):
        return State("True", Reason.EXTERNAL, "the master is run outside this service")
    if seen.store is None:
        return State("False", Reason.STARTING, "store: not made yet")
    if seen.store.ready > 0 and seen.store.revision != role_revision(service, Component.STORE):
        text = _stays(wanted) or "waits for engines of an older spec to go"
        return State("False", Reason.ROLLING_OUT, f"store: {text}")
    # A pod of an older revision that is not ready is what the new one waits for.
    return workload_state(seen.store.fresh if seen.store.ready else seen.store, 1, now)


def _model_state(seen: Observed, wanted: Plan) -> State:
    new = _present(seen, wanted)
    if any(w.ready for w in new):
        return State("True", Reason.MODEL_LOADED, "loaded")
    pod = worst(pod for w in new for pod in w.live)
    if pod is None:
        return State("Unknown", Reason.STARTING, "no engine has started yet")
    if pod.problem:
        return State("False", reason_of(pod), f"pod {pod.name}: {pod.problem}")
    return State("False", Reason.STARTING, f"pod {pod.name} fetches or loads the model")


def _present(seen: Observed, wanted: Plan) -> list[Workload]:
    goals = {(goal.component, goal.revision) for goal in wanted.goals.values()}
    return [w for w in seen.engines if (w.component, w.revision) in goals]


def _answered(seen: Observed, wanted: Plan) -> dict[str, EngineFacts]:
    names = [pod.name for w in _present(seen, wanted) for pod in w.live]
    return {name: seen.facts.engines[name] for name in names if name in seen.facts.engines}


def _facts(seen: Observed, wanted: Plan) -> list[EngineFacts]:
    return list(_answered(seen, wanted).values())


def _model_revision(facts: Sequence[EngineFacts]) -> str:
    return ", ".join(sorted({one.model_revision for one in facts if one.model_revision}))[:512]


def _transfer_state(service: InferenceService, seen: Observed, wanted: Plan) -> State:
    asked = service.spec.transfer.transport
    answered = _answered(seen, wanted)
    if not answered:
        return State("Unknown", Reason.NOT_REPORTED, "no engine has reported its transport yet")
    for name, facts in answered.items():
        if not facts.transfer_ready:
            return State("False", Reason.TRANSFER_NOT_READY, f"pod {name}: {facts.transfer_reason or 'not ready'}")
    used = {_TRANSPORTS.get(facts.transport.lower()) for facts in answered.values()}
    if asked is not Transport.AUTO and used != {asked}:
        names = ", ".join(sorted({facts.transport or "none" for facts in answered.values()}))
        return State("False", Reason.TRANSPORT_REPLACED, f"{asked.value} is asked for, engines use {names}")
    slowest = min(facts.probed_gbps for facts in answered.values())
    over = ", ".join(sorted({facts.transport for facts in answered.values()}))
    speed = f" at {slowest:.1f} GB/s" if slowest else ""
    return State("True", Reason.PROBED, f"{service.spec.transfer.mode.value} over {over}{speed}")


def _compatible_state(seen: Observed, wanted: Plan) -> State:
    if seen.strangers:
        some = ", ".join(seen.strangers[:3]) + (", ..." if len(seen.strangers) > 3 else "")
        text = f"pods that are not this service's have its labels, so that requests may go to them: {some}"
        return State("False", Reason.FOREIGN_PODS, text)
    found: dict[Component, set[str]] = {}
    for workload in _present(seen, wanted):
        for pod in workload.live:
            if pod.name in seen.facts.engines:
                found.setdefault(workload.component, set()).add(seen.facts.engines[pod.name].fingerprint)
    every = set().union(*found.values()) if found else set()
    if not every:
        return State("Unknown", Reason.NOT_REPORTED, "no engine has reported its KV layout yet")
    if len(every) > 1:
        each = "; ".join(f"{part.value} {', '.join(sorted(prints))}" for part, prints in found.items())
        return State(
            "False", Reason.FINGERPRINT_MISMATCH, f"engines of one revision report different KV layouts: {each}"
        )
    return State("True", Reason.SAME_FINGERPRINT, f"all engines report {next(iter(every))}")


def _roles(service: InferenceService, seen: Observed, wanted: Plan) -> Status:
    out: Status = {}
    for component, goal in wanted.goals.items():
        count = wanted.had.get(component, goal.count)
        out[component.value] = _role(seen.of(component), count, goal.revision, seen)
    for component in sorted({w.component for w in seen.engines} - wanted.goals.keys()):
        # A role that is leaving, or would come back: as many as it had.
        workloads = seen.of(component)
        count = seen.wanted.get(component, sum(w.replicas for w in workloads))
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
    used = {_TRANSPORTS.get(f.transport.lower()) for f in facts} - {None}
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
