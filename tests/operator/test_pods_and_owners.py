"""What a pod's status says, and whose an object is."""

from typing import Any

import pytest
from rollout_world import service

from isthmus_operator.plan.observe import observe, pod, seconds
from isthmus_operator.plan.observed import Facts
from isthmus_operator.plan.ownership import may_write
from isthmus_operator.plan.planner import plan
from isthmus_operator.plan.status import status_of
from isthmus_operator.render.names import REVISION_LABEL, ROLE_LABEL, Component

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


def test_a_pod_says_how_often_its_containers_were_restarted() -> None:
    found = a_pod("True", 40, RUNNING)
    assert pod(found, Component.DECODE).restarts == 0
    found["status"]["containerStatuses"] = [{"name": name, "state": RUNNING, "restartCount": 2} for name in "ab"]
    ran = [{"terminated": {"startedAt": at(10), "finishedAt": at(second)}} for second in (30, 17)]
    found["status"]["containerStatuses"][0]["lastState"] = ran[0]
    found["status"]["containerStatuses"][1] |= {"state": ran[1], "lastState": {"terminated": {"exitCode": 1}}}
    restarted = pod(found, Component.DECODE)
    assert (restarted.restarts, restarted.ran) == (4, 20)
    assert restarted.settles(restarted.changed + 29)
    assert not restarted.settles(restarted.changed + 30)


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


def workload(kind: str, name: str, uid: str, service_uid: str | None) -> Object:
    selector = {ROLE_LABEL: "store" if kind == "StatefulSet" else "decode", REVISION_LABEL: "r"}
    owners = {"ownerReferences": [owner(service_uid)]} if service_uid else {}
    return {
        "kind": kind,
        "metadata": {"name": name, "uid": uid, "labels": selector} | owners,
        "spec": {"selector": {"matchLabels": selector}, "template": {"spec": {}}},
    }


def made_by(kind: str, name: str, uid: str, *, role: str = "decode", controller: bool = True, **meta: Any) -> Object:
    labels = {ROLE_LABEL: role, REVISION_LABEL: "r", "pod-template-hash": "abc"}
    reference = {"kind": kind, "name": name, "uid": uid, "controller": controller}
    conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": at(9)}]
    return {
        "kind": "Pod",
        "metadata": {"name": f"{name}-1", "labels": labels, "ownerReferences": [reference]} | meta,
        "status": {"conditions": conditions},
    }


OF_OURS = made_by("ReplicaSet", "svc-decode-r-abc", "rs")
STORE = workload("StatefulSet", "svc-store", "s1", "u")


@pytest.mark.parametrize(
    ("pod", "counted", "stranger"),
    [
        (OF_OURS, 1, False),
        # A Deployment that was copied with all its labels, and pods that nobody made.
        (made_by("ReplicaSet", "web-abc", "x"), 0, True),
        (made_by("ReplicaSet", "svc-decode-r-def", "x"), 0, True),
        (made_by("ReplicaSet", "svc-decode-r", "x"), 0, True),
        (made_by("ReplicaSet", "svc-decode-r-abc", "x", controller=False), 0, True),
        (made_by("Job", "svc-decode-r-abc", "x"), 0, True),
        (OF_OURS | {"metadata": OF_OURS["metadata"] | {"ownerReferences": []}}, 0, True),
        (made_by("StatefulSet", "svc-store", "s1", role="store"), 1, False),
        # Of a former one of that name.
        (made_by("StatefulSet", "svc-store", "s0", role="store"), 0, True),
        (made_by("ReplicaSet", "web-abc", "x", deletionTimestamp=at(10)), 0, False),
    ],
)
def test_a_pod_is_whose_workload_made_it_whatever_its_labels(pod: Object, counted: int, stranger: bool) -> None:
    target = service(1, store={})
    ours = workload("Deployment", "svc-decode-r", "d1", "u")
    foreign = workload("Deployment", "web", "d2", None)
    seen = observe(target, [ours, foreign, STORE, pod], Facts(), {})
    assert [w.name for w in seen.engines] == ["svc-decode-r"]
    assert seen.store is not None
    assert seen.engines[0].ready + seen.store.ready == counted
    assert seen.strangers == ((pod["metadata"]["name"],) if stranger else ())
    status = status_of(target, seen, plan(target, seen, 100.0), {}, at(50))
    compatible = next(c for c in status["conditions"] if c["type"] == "Compatible")
    assert (compatible["reason"] == "ForeignPods") is stranger
    assert not stranger or pod["metadata"]["name"] in compatible["message"]


def test_a_workload_is_known_by_its_selector_whatever_labels_it_is_left() -> None:
    bare = workload("Deployment", "svc-decode-r", "d1", "u")
    bare["metadata"]["labels"] = {}
    (found,) = observe(service(1), [bare, OF_OURS], Facts(), {}).engines
    assert (found.component, found.revision, found.ready) == (Component.DECODE, "r", 1)


def test_a_workload_without_labels_to_select_by_is_none_of_a_services() -> None:
    odd = workload("Deployment", "svc-decode-r", "d1", "u")
    odd["spec"]["selector"] = {"matchExpressions": [{"key": "a", "operator": "Exists"}]}
    assert observe(service(1), [odd, OF_OURS], Facts(), {}).engines == ()


@pytest.mark.parametrize(
    "stamp", ["0000-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "2026-01-01T00:00:60Z", "soon", ""]
)
def test_a_time_that_no_clock_has_had_is_none(stamp: str) -> None:
    """The API server takes the first two."""
    assert seconds(stamp) == 0.0


def test_revisions_that_the_status_remembers_are_seen() -> None:
    seen = observe(service(), [], Facts(), {"revision": {"current": "a", "updated": "b", "failed": "c"}})
    assert (seen.current, seen.updated, seen.failed) == ("a", "b", "c")
    seen = observe(service(), [], Facts(), {})
    assert (seen.current, seen.updated, seen.failed) == ("", "", "")
