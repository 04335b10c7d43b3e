"""Pure: what holds of a service, by what is seen of it and a plan: half of each condition of its status."""

from __future__ import annotations

from dataclasses import replace

from ..api.choices import Mode, PrefillUnavailable, Transport
from ..api.reasons import Reason
from ..api.v1alpha1 import InferenceService
from ..render import mooncake
from ..render.names import Component, is_engine
from ..render.revision import role_revision, service_revision
from ..render.service import components
from .adapters import adapters_state
from .causes import State, reason_of, workload_state, worst
from .observed import EngineFacts, Observed, Word, Workload
from .planner import Plan, Rollout
from .refusals import without_refused
from .rollout import Goal

TRANSPORTS = {"tcp": Transport.TCP, "rdma": Transport.RDMA, "nvlink": Transport.NVLINK}
"""What engines call them."""


def states_of(service: InferenceService, seen: Observed, wanted: Plan, now: float) -> dict[str, State]:
    """By the type of the condition, Ready first. `now`: seconds since the epoch."""
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
        states["AdaptersReady"] = adapters_state(service, answered(seen, wanted))
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


def answered(seen: Observed, wanted: Plan) -> dict[str, EngineFacts]:
    """What engines of the revisions that are come to say, by the names of their pods."""
    names = [pod.name for w in _present(seen, wanted) for pod in w.live]
    return {name: seen.facts.engines[name] for name in names if name in seen.facts.engines}


def _transfer_state(service: InferenceService, seen: Observed, wanted: Plan) -> State:
    asked = service.spec.transfer.transport
    told = answered(seen, wanted)
    if not told:
        return State("Unknown", Reason.NOT_REPORTED, "no engine has reported its transport yet")
    for name, facts in told.items():
        if not facts.transfer_ready:
            return State("False", Reason.TRANSFER_NOT_READY, f"pod {name}: {facts.transfer_reason or 'not ready'}")
    used = {TRANSPORTS.get(facts.transport.lower()) for facts in told.values()}
    if asked is not Transport.AUTO and used != {asked}:
        names = ", ".join(sorted({facts.transport or "none" for facts in told.values()}))
        return State("False", Reason.TRANSPORT_REPLACED, f"{asked.value} is asked for, engines use {names}")
    slowest = min(facts.probed_gbps for facts in told.values())
    over = ", ".join(sorted({facts.transport for facts in told.values()}))
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
