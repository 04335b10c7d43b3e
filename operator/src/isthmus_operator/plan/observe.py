"""Children of one service, as Kubernetes objects, to an immutable `Observed`. The only reader of their fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from ..api.v1alpha1 import InferenceService
from ..render.engine import master_address
from ..render.names import PAIRING_LABEL, REVISION_LABEL, ROLE_LABEL, Component, is_engine
from .observed import UNSCHEDULABLE, Condition, Facts, Observed, Pod, Workload

Object = Mapping[str, Any]

_STARTING = ("ContainerCreating", "PodInitializing")


def observe(service: InferenceService, children: Iterable[Object], facts: Facts, status: Object) -> Observed:
    """`children`: objects labelled as the service's, of any kind; those of another owner are left out.
    `status`: of the InferenceService, as it is now."""
    mine = [child for child in children if is_child(service, child)]
    pods: dict[tuple[Component, str], list[Pod]] = {}
    for child in mine:
        if child["kind"] == "Pod" and (component := component_of(child)) is not None:
            found = pod(child, component)
            pods.setdefault((component, found.revision), []).append(found)
    workloads = [_workload(service, child, pods) for child in mine if child["kind"] in ("Deployment", "StatefulSet")]
    known = [w for w in workloads if w is not None]
    return Observed(
        engines=tuple(sorted((w for w in known if is_engine(w.component)), key=lambda w: w.name)),
        router=next((w for w in known if w.component is Component.ROUTER), None),
        store=next((w for w in known if w.component is Component.STORE), None),
        scales=_scales(mine),
        facts=facts,
        failed=str((status.get("revision") or {}).get("failed") or ""),
        conditions=conditions(status),
    )


def is_child(service: InferenceService, child: Object) -> bool:
    """Whether we made it for this very object: a pod through its workload, anything else by its owner reference.

    An object that was left by a deleted service of the same name waits for the garbage collector and is not ours.
    """
    owners = child["metadata"].get("ownerReferences") or []
    if child["kind"] == "Pod":
        return any(owner["kind"] in ("ReplicaSet", "StatefulSet") and owner.get("controller") for owner in owners)
    return any(owner["uid"] == service.uid for owner in owners)


def component_of(child: Object) -> Component | None:
    """The component a child belongs to, by its label."""
    value = str((child["metadata"].get("labels") or {}).get(ROLE_LABEL, ""))
    return next((component for component in Component if component.value == value), None)


def conditions(status: Object) -> tuple[Condition, ...]:
    """The conditions of a status."""
    return tuple(
        Condition(
            type=c["type"],
            status=c["status"],
            reason=c.get("reason", ""),
            message=c.get("message", ""),
            changed=c.get("lastTransitionTime", ""),
        )
        for c in status.get("conditions") or ()
    )


def seconds(stamp: str | None) -> float:
    """An API time in seconds since the epoch; 0 for none."""
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0


def pod(child: Object, component: Component) -> Pod:
    """One pod."""
    meta, status = child["metadata"], child.get("status") or {}
    found = {c["type"]: c for c in status.get("conditions") or ()}
    ready = found.get("Ready", {})
    created = seconds(meta.get("creationTimestamp"))
    reason, problem = _trouble(child)
    is_ready = ready.get("status") == "True"
    containers = status.get("containerStatuses") or ()
    was_ready = bool(ready) and _was_ready(ready, containers)
    return Pod(
        name=meta["name"],
        component=component,
        revision=(meta.get("labels") or {}).get(REVISION_LABEL, ""),
        created=created,
        changed=seconds(ready.get("lastTransitionTime")) or created,
        ip=status.get("podIP") or "",
        uid=meta.get("uid", ""),
        ready=is_ready,
        # A kubelet that was restarted reports containers as not started until its probes have run again.
        started=is_ready or (bool(containers) and all(c.get("started") for c in containers)) or was_ready,
        set_up=found.get("PodReadyToStartContainers", {}).get("status") != "False" or not _waits(containers),
        ends=seconds(meta["deletionTimestamp"]) if meta.get("deletionTimestamp") else None,
        reason="" if is_ready else reason,
        problem="" if is_ready else problem,
        failed=status.get("phase") in ("Failed", "Succeeded"),
    )


def _trouble(child: Object) -> tuple[str, str]:
    """(reason, message) of what keeps a pod from being ready, the most telling first; empty while it just starts."""
    status = child.get("status") or {}
    if status.get("phase") == "Failed":
        return str(status.get("reason") or "Failed"), str(status.get("message") or status.get("reason") or "it failed")
    for field in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(field) or ():
            if trouble := _container_trouble(container):
                return trouble
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return UNSCHEDULABLE, f"no node can take it: {condition.get('message') or condition.get('reason', '')}"
        if condition["type"] == "Ready" and _was_ready(condition, status.get("containerStatuses") or ()):
            return "NotReady", f"it was ready until {condition['lastTransitionTime']}"
    return "", ""


def _was_ready(ready: Object, containers: Sequence[Object]) -> bool:
    """Whether a pod with this condition Ready was ready before. Of a pod that never was, the condition dates from
    before its containers began."""
    begun = [(c.get("state") or {}).get("running", {}).get("startedAt") for c in containers]
    changed = seconds(ready.get("lastTransitionTime"))
    return ready["status"] != "True" and bool(begun) and all(at and seconds(at) < changed for at in begun)


def _waits(containers: Iterable[Object]) -> bool:
    return any(((c.get("state") or {}).get("waiting") or {}).get("reason") in _STARTING for c in containers)


def _container_trouble(container: Object) -> tuple[str, str] | None:
    name = container["name"]
    state = container.get("state") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or {}
    before = (container.get("lastState") or {}).get("terminated") or {}
    if waiting.get("reason") and waiting["reason"] not in _STARTING:
        text = f"container {name} is waiting: {waiting['reason']}"
        if waiting.get("message"):
            text += f": {waiting['message']}"
        return str(waiting["reason"]), text + _exit(before)
    if ended and ended.get("exitCode", 0) != 0:
        return str(ended.get("reason") or "Error"), f"container {name} has ended{_exit(ended)}"
    if before and before.get("exitCode", 0) != 0 and not container.get("ready"):
        return str(before.get("reason") or "Error"), f"container {name} was restarted{_exit(before)}"
    return None


def _exit(ended: Object) -> str:
    if not ended:
        return ""
    text = f" (exit code {ended.get('exitCode')}"
    if ended.get("reason") and ended["reason"] != "Error":
        text += f", {ended['reason']}"
    if ended.get("message"):
        text += f", {str(ended['message']).strip()[-300:]}"
    return text + ")"


def _workload(
    service: InferenceService, child: Object, pods: Mapping[tuple[Component, str], list[Pod]]
) -> Workload | None:
    component = component_of(child)
    if component is None:
        return None
    meta, spec, status = child["metadata"], child["spec"], child.get("status") or {}
    labels = meta.get("labels") or {}
    # By the selector, which cannot be changed: a label edited by hand does not make pods disappear.
    revision = spec["selector"]["matchLabels"].get(REVISION_LABEL) or labels.get(REVISION_LABEL, "")
    single = not is_engine(component)
    mine = [
        pod for (part, r), found in pods.items() if part is component and (single or r == revision) for pod in found
    ]
    problem, since = _cannot_make_pods(status)
    return Workload(
        name=meta["name"],
        component=component,
        revision=revision,
        replicas=spec.get("replicas", 1),
        created=seconds(meta.get("creationTimestamp")),
        pairing=labels.get(PAIRING_LABEL, ""),
        pooled=_uses(child, master_address(service, managed=True)),
        problem=problem,
        problem_since=since,
        image=next((str(c.get("image", "")) for c in spec["template"]["spec"].get("containers") or ()), ""),
        pods=tuple(sorted(mine, key=lambda pod: pod.name)),
    )


def _uses(child: Object, address: str) -> bool:
    containers = child["spec"]["template"]["spec"].get("containers") or ()
    return any(address in (container.get("args") or ()) for container in containers)


def _cannot_make_pods(status: Object) -> tuple[str, float]:
    """(why, since when); empty and 0 when nothing is in the way."""
    for condition in status.get("conditions") or ():
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            text = f"pods cannot be made: {condition.get('message') or condition.get('reason')}"
            return text, seconds(condition.get("lastTransitionTime"))
    return "", 0.0


def _scales(children: Iterable[Object]) -> dict[Component, int]:
    return {
        component: int(child["spec"]["replicas"])
        for child in children
        if child["kind"] == "RoleScaler" and (component := component_of(child)) is not None
    }
