"""Pure: why pods are not ready, as the state of a condition."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..api.reasons import Reason
from ..render.names import Component
from .observed import REFUSED, UNSCHEDULABLE, Pod, Workload

_POD_REASONS = {
    UNSCHEDULABLE: Reason.UNSCHEDULABLE,
    "ErrImagePull": Reason.IMAGE_PULL_FAILED,
    "ImagePullBackOff": Reason.IMAGE_PULL_FAILED,
    "InvalidImageName": Reason.IMAGE_PULL_FAILED,
    "CrashLoopBackOff": Reason.CRASH_LOOPING,
    "Error": Reason.CRASH_LOOPING,
    "CreateContainerConfigError": Reason.CONFIG_ERROR,
    "CreateContainerError": Reason.CONFIG_ERROR,
    "OOMKilled": Reason.OUT_OF_MEMORY,
    REFUSED: Reason.ANOTHER_TOKENIZER,
}
FETCH_CONTAINER = "model-fetch"
SET_UP_S = 60.0
"""By then the volumes and the network of a pod are there, or something is in the way."""


@dataclass(frozen=True, slots=True)
class State:
    """Half a condition: what holds, before it is compared with what held."""

    status: str
    reason: str
    message: str


def workload_state(workload: Workload, count: int, now: float) -> State:
    """Whether `count` pods of a workload are ready; if not, the trouble of the one that says most.

    now: seconds since the epoch
    """
    name = workload.component.value
    if workload.ready >= count:
        return State("True", Reason.ALL_READY, f"{name}: {count} of {count} pods are ready")
    head = f"{name}: {workload.ready} of {count} pods are ready"
    overdue = workload.problem_since > 0 and now - workload.problem_since > SET_UP_S
    if (workload.problem or overdue) and len(workload.live) < workload.replicas:
        text = f"{head}; {workload.name}: {workload.problem or not_made(workload)}"
        return State("False", Reason.PODS_NOT_CREATED, text)
    pod = worst(workload.live)
    if pod is None:
        more = f"; {not_made(workload)}" if workload.component is Component.STORE else ""
        return State("False", Reason.STARTING, head + more)
    if not pod.problem and not pod.set_up and now - pod.changed > SET_UP_S:
        text = f"pod {pod.name} waits for its volumes or its network: kubectl describe pod {pod.name}"
        return State("False", Reason.POD_NOT_SET_UP, f"{head}; {text}")
    return State("False", reason_of(pod), f"{head}; pod {pod.name}: {pod.problem or 'starting'}")


def not_made(workload: Workload) -> str:
    """What is known of pods that are missing where the status of their workload does not say why."""
    kind = "statefulset" if workload.component is Component.STORE else "deployment"
    return f"a pod is not created; kubectl describe {kind} {workload.name} says why"


def worst(pods: Iterable[Pod]) -> Pod | None:
    """The pod whose trouble says most: one with a named problem, and of those the one that has it longest."""
    waiting = [pod for pod in pods if not pod.ready]
    return min(waiting, key=lambda pod: (not pod.problem, pod.changed, pod.name), default=None)


def reason_of(pod: Pod) -> Reason:
    """The fixed reason for a pod's own."""
    if not pod.reason:
        return Reason.STARTING
    if f"container {FETCH_CONTAINER} " in pod.problem and _POD_REASONS.get(pod.reason) is Reason.CRASH_LOOPING:
        return Reason.MODEL_FETCH_FAILED
    return _POD_REASONS.get(pod.reason, Reason.PODS_NOT_READY)
