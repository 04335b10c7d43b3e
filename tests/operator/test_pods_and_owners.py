"""What a pod's status says, and whose an object is."""

from typing import Any

import pytest

from isthmus_operator.plan.observe import pod
from isthmus_operator.plan.ownership import may_write
from isthmus_operator.render.names import Component

Object = dict[str, Any]


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02}Z"


def a_pod(ready: str, changed: int, state: Object, **conditions: str) -> Object:
    found = [{"type": "Ready", "status": ready, "lastTransitionTime": at(changed)}]
    found += [{"type": name, "status": value} for name, value in conditions.items()]
    return {
        "kind": "Pod",
        "metadata": {"name": "p", "creationTimestamp": at(0)},
        "status": {"phase": "Running", "conditions": found, "containerStatuses": [{"name": "engine", "state": state}]},
    }


RUNNING = {"running": {"startedAt": at(5)}}


def test_a_pod_that_was_ready_is_not_taken_for_one_that_starts() -> None:
    starting = pod(a_pod("False", 1, RUNNING), Component.DECODE)
    assert (starting.reason, starting.problem) == ("", "")
    lost = pod(a_pod("False", 40, RUNNING), Component.DECODE)
    assert lost.problem == "it was ready until 2026-01-01T00:00:40Z"
    assert lost.reason == "NotReady"
    assert pod(a_pod("Unknown", 40, RUNNING), Component.DECODE).problem == lost.problem
    assert pod(a_pod("True", 40, RUNNING), Component.DECODE).problem == ""
    crashing = a_pod("False", 40, {"waiting": {"reason": "CrashLoopBackOff"}})
    assert pod(crashing, Component.DECODE).reason == "CrashLoopBackOff"


def test_a_pod_that_was_ready_has_started_whatever_a_restarted_kubelet_says() -> None:
    """It reports containers with a startup probe as not started until that probe has run again."""
    flickers = pod(a_pod("False", 40, RUNNING), Component.DECODE)
    assert flickers.started
    assert flickers.flickers(flickers.changed + 29)
    assert not flickers.flickers(flickers.changed + 30)
    again = {"running": {"startedAt": at(41)}}
    assert not pod(a_pod("False", 40, again), Component.DECODE).started, "its container has crashed"
    assert not pod(a_pod("False", 1, RUNNING), Component.DECODE).started, "it never was ready"


@pytest.mark.parametrize("waiting", ["ContainerCreating", "PodInitializing"])
def test_a_pod_without_its_volumes_is_told_from_one_whose_image_is_pulled(waiting: str) -> None:
    state = {"waiting": {"reason": waiting}}
    assert not pod(a_pod("False", 1, state, PodReadyToStartContainers="False"), Component.DECODE).set_up
    assert pod(a_pod("False", 1, state, PodReadyToStartContainers="True"), Component.DECODE).set_up
    assert pod(a_pod("False", 1, state), Component.DECODE).set_up, "an older Kubernetes does not say"
    assert pod(a_pod("False", 1, RUNNING, PodReadyToStartContainers="False"), Component.DECODE).set_up


def owner(uid: str, kind: str = "InferenceService", name: str = "svc", group: str = "serving.isthmus.dev") -> Object:
    return {"apiVersion": f"{group}/v1alpha1", "kind": kind, "name": name, "uid": uid, "controller": True}


OURS = {"kind": "Service", "metadata": {"name": "svc", "ownerReferences": [owner("now")]}}
APPLIED = {
    "manager": "isthmus-operator",
    "operation": "Apply",
    "fieldsV1": {"f:spec": {"f:selector": {}}},
}


@pytest.mark.parametrize(
    ("owners", "managers", "expected"),
    [
        ([], [], False),
        ([], [APPLIED | {"manager": "kubectl"}], False),
        ([], [APPLIED | {"operation": "Update"}], False),
        # Orphaned by `kubectl delete --cascade=orphan`.
        ([], [APPLIED], True),
        ([owner("now")], [], True),
        ([owner("now"), owner("x", "Deployment", "web", "apps")], [], True),
        # Of a deleted service of the same name, before the garbage collector has come.
        ([owner("former")], [APPLIED], True),
        ([owner("other", name="other")], [APPLIED], False),
        ([owner("x", "InferenceService", "svc", "serving.kserve.io")], [], False),
        ([owner("former"), owner("x", "Deployment", "web", "apps")], [APPLIED], False),
    ],
)
def test_an_object_is_ours_by_its_owner_and_not_by_its_name_or_labels(
    owners: list[Object], managers: list[Object], expected: bool
) -> None:
    meta = {"name": "svc", "labels": {"serving.isthmus.dev/service": "svc"}, "managedFields": managers}
    there = {"metadata": meta | ({"ownerReferences": owners} if owners else {}), "spec": {"selector": {"app": "x"}}}
    assert may_write(OURS, there) is expected
