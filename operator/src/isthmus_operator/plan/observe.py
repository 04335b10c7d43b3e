"""Children of one service, as Kubernetes objects, to an immutable `Observed`. The only reader of their fields."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from ..api.v1alpha1 import InferenceService
from ..render.engine import managed_addresses
from ..render.names import (
    GUARDED_LABEL,
    MODEL_LABEL,
    PAIRING_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
    UID_LABEL,
    Component,
    is_engine,
)
from .observed import UNSCHEDULABLE, Condition, Facts, Observed, Pod, Workload

Object = Mapping[str, Any]

Maker = tuple[str, str]
"""What makes pods: the kind of a workload, and its name or uid."""
MOST_MAKERS = 16
TEMPLATE_HASH = "pod-template-hash"

_STARTING = ("ContainerCreating", "PodInitializing")


def observe(service: InferenceService, children: Iterable[Object], facts: Facts, status: Object) -> Observed:
    """`children`: objects labelled as the service's, of any kind; those of another owner are left out.
    `status`: of the InferenceService, as it is now."""
    children = list(children)
    mine = [child for child in children if is_child(service, child)]
    makers = {_maker(child): child for child in mine if child["kind"] in ("Deployment", "StatefulSet")}
    made: dict[Maker, list[Object]] = {maker: [] for maker in makers}
    strangers: list[Object] = []
    for child in children:
        if child["kind"] == "Pod":
            maker = _maker_of(child)
            if maker in made:
                made[maker].append(child)
            elif _stays(child):
                strangers.append(child)
    workloads = [_workload(service, child, made[maker]) for maker, child in makers.items()]
    said = conditions(status)
    known = [_with_missing(w, said) for w in workloads if w is not None]
    seen = Observed(
        engines=tuple(sorted((w for w in known if is_engine(w.component)), key=lambda w: w.name)),
        routers=_one_of_each(w for w in known if w.component is Component.ROUTER),
        store=next((w for w in known if w.component is Component.STORE), None),
        scales=_scales(mine),
        wanted=_wanted(status),
        facts=facts,
        current=str((status.get("revision") or {}).get("current") or ""),
        updated=str((status.get("revision") or {}).get("updated") or ""),
        failed=str((status.get("revision") or {}).get("failed") or ""),
        conditions=said,
    )
    selected = sorted(str(one["metadata"]["name"]) for one in strangers if _selected(service, one, seen))
    return replace(seen, strangers=tuple(selected))


def _one_of_each(routers: Iterable[Workload]) -> tuple[Workload, ...]:
    """Of two workloads of one revision, as a rollback to an earlier operator leaves them, the one that goes on."""
    found: dict[str, Workload] = {}
    for one in sorted(routers, key=lambda w: (w.ready > 0, -w.created, w.name)):
        found[one.revision] = one
    return tuple(sorted(found.values(), key=lambda w: w.name))


def _selected(service: InferenceService, pod: Object, seen: Observed) -> bool:
    """Whether a Service of ours selects a pod that is not ours."""
    component = component_of(pod)
    exact = component is not None and seen.exact(component)
    return component is not None and (not exact or _uid_label(pod) == service.uid)


def _uid_label(labelled: Object) -> str:
    return str(((labelled.get("metadata") or {}).get("labels") or {}).get(UID_LABEL, ""))


def is_child(service: InferenceService, child: Object) -> bool:
    """Whether we made it for this very object, by its owner reference. A pod is its workload's.

    An object that was left by a deleted service of the same name waits for the garbage collector and is not ours.
    """
    return any(owner["uid"] == service.uid for owner in child["metadata"].get("ownerReferences") or ())


def unknown_makers(service: InferenceService, children: Iterable[Object]) -> list[dict[str, Any]]:
    """Deployments that have made pods with the service's labels and are not among `children`, as far as their names
    say: kind, name and namespace. At most MOST_MAKERS, as each is asked for, and anybody may make pods."""
    children = list(children)
    known = {_maker(child) for child in children if child["kind"] in ("Deployment", "StatefulSet")}
    found = {_maker_of(child) for child in children if child["kind"] == "Pod"} - known
    return [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": maker[1], "namespace": service.namespace}}
        for maker in sorted(maker for maker in found if maker is not None and maker[0] == "Deployment")[:MOST_MAKERS]
    ]


def _maker(workload: Object) -> Maker:
    meta = workload["metadata"]
    return workload["kind"], meta["uid"] if workload["kind"] == "StatefulSet" else meta["name"]


def _maker_of(pod: Object) -> Maker | None:
    """Whose controller made a pod. Of a Deployment it is a ReplicaSet, which is not watched: it has the name of its
    Deployment and the hash of its template, and of one name there is one."""
    meta = pod["metadata"]
    for owner in meta.get("ownerReferences") or ():
        if owner.get("controller") and owner["kind"] == "StatefulSet":
            return "StatefulSet", owner["uid"]
        suffix = f"-{(meta.get('labels') or {}).get(TEMPLATE_HASH, '')}"
        if owner.get("controller") and owner["kind"] == "ReplicaSet" and len(suffix) > 1:
            return ("Deployment", owner["name"].removesuffix(suffix)) if owner["name"].endswith(suffix) else None
    return None


def _stays(pod: Object) -> bool:
    ended = (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")
    return not ended and not pod["metadata"].get("deletionTimestamp")


def component_of(child: Object) -> Component | None:
    """The component a child belongs to: of a workload by its selector, which cannot be changed, else by its label."""
    selector = (child.get("spec") or {}).get("selector") or {}
    is_workload = child["kind"] in ("Deployment", "StatefulSet")
    labels = selector.get("matchLabels") if is_workload else child["metadata"].get("labels")
    value = str((labels or {}).get(ROLE_LABEL, ""))
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
    """An API time in seconds since the epoch; 0 for none, and for one that the API server takes and no clock has had:
    a status may be written by others."""
    try:
        return max(0.0, datetime.fromisoformat(stamp).timestamp()) if stamp else 0.0
    except (ValueError, OverflowError):
        return 0.0


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
        restarts=sum(int(c.get("restartCount") or 0) for c in containers),
        ran=max((_ran(c) for c in containers), default=0.0),
        guarded=(meta.get("labels") or {}).get(GUARDED_LABEL) == "true",
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
            return UNSCHEDULABLE, f"no node has room for it: {condition.get('message') or condition.get('reason', '')}"
        if condition["type"] == "Ready" and _was_ready(condition, status.get("containerStatuses") or ()):
            return "NotReady", f"it was ready until {condition['lastTransitionTime']}"
    return "", ""


def _was_ready(ready: Object, containers: Sequence[Object]) -> bool:
    """Whether a pod with this condition Ready was ready before. Of a pod that never was, the condition dates from
    before its containers began."""
    begun = [(c.get("state") or {}).get("running", {}).get("startedAt") for c in containers]
    changed = seconds(ready.get("lastTransitionTime"))
    return ready["status"] != "True" and bool(begun) and all(at and seconds(at) < changed for at in begun)


def _ran(container: Object) -> float:
    for state in ("state", "lastState"):
        ended = (container.get(state) or {}).get("terminated") or {}
        if ended:
            return max(0.0, seconds(ended.get("finishedAt")) - seconds(ended.get("startedAt")))
    return 0.0


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


def _workload(service: InferenceService, child: Object, pods: Sequence[Object]) -> Workload | None:
    component = component_of(child)
    if component is None:
        return None
    meta, spec, status = child["metadata"], child["spec"], child.get("status") or {}
    labels = meta.get("labels") or {}
    # By the selector, which cannot be changed: a label edited by hand does not make pods disappear.
    revision = spec["selector"]["matchLabels"].get(REVISION_LABEL) or labels.get(REVISION_LABEL, "")
    problem, since = _cannot_make_pods(status)
    return Workload(
        name=meta["name"],
        component=component,
        revision=revision,
        replicas=spec.get("replicas", 1),
        created=seconds(meta.get("creationTimestamp")),
        pairing=labels.get(PAIRING_LABEL, ""),
        model=labels.get(MODEL_LABEL, ""),
        pooled=_uses(child, managed_addresses(service)),
        pairs=component is Component.ROUTER and _uses(child, ("--prefill",)),
        problem=problem,
        problem_since=since,
        image=next((str(c.get("image", "")) for c in spec["template"]["spec"].get("containers") or ()), ""),
        exact=all(_uid_label(one) == service.uid for one in (spec["template"], *pods)),
        pods=tuple(sorted((pod(one, component) for one in pods), key=lambda one: one.name)),
    )


def _with_missing(workload: Workload, said: Iterable[Condition]) -> Workload:
    """With `problem_since` where nobody says that pods cannot be made, as a StatefulSet never does: since when its role
    has not been ready, or something has last happened to it."""
    if workload.problem or len(workload.live) >= workload.replicas:
        return workload
    name = f"{workload.component.value.capitalize()}Ready"
    role = next((condition for condition in said if condition.type == name), None)
    if role is not None and role.status == "True":
        return workload
    times = [workload.created, seconds(role.changed) if role is not None else 0.0]
    times += [at for one in workload.pods for at in (one.created, one.changed, one.ends or 0.0)]
    return replace(workload, problem_since=max(times))


def _uses(child: Object, words: Collection[str]) -> bool:
    containers = child["spec"]["template"]["spec"].get("containers") or ()
    return any(one in words for container in containers for one in container.get("args") or ())


def _cannot_make_pods(status: Object) -> tuple[str, float]:
    """(why, since when); empty and 0 when nothing is in the way."""
    for condition in status.get("conditions") or ():
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            text = f"pods cannot be created: {condition.get('message') or condition.get('reason')}"
            return text, seconds(condition.get("lastTransitionTime"))
    return "", 0.0


def _wanted(status: Object) -> dict[Component, int]:
    roles = status.get("roles") or {}
    found = {part: (roles.get(part.value) or {}).get("desired") for part in Component if is_engine(part)}
    return {part: int(count) for part, count in found.items() if count is not None}


def _scales(children: Iterable[Object]) -> dict[Component, int]:
    return {
        component: int(child["spec"]["replicas"])
        for child in children
        if child["kind"] == "RoleScaler" and (component := component_of(child)) is not None
    }
