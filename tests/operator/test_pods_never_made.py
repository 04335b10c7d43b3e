"""Pods that are asked for and never made: a quota, a LimitRange, a policy, a controller that does not run. A Deployment
says why in its status, and a StatefulSet nothing."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rollout_world import service

from isthmus_operator.api.v1alpha1 import InferenceService
from isthmus_operator.plan.observe import observe
from isthmus_operator.plan.observed import Facts
from isthmus_operator.plan.planner import Rollout, plan
from isthmus_operator.plan.status import status_of
from isthmus_operator.render import engine, mooncake, router
from isthmus_operator.render.names import Component, Defaults

Object = dict[str, Any]
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
EVERY = (Component.PREFILL, Component.DECODE, Component.ROUTER, Component.STORE)


def stamp(after_s: float) -> str:
    return (BEGIN + timedelta(seconds=after_s)).isoformat().replace("+00:00", "Z")


def children(target: InferenceService, empty: Component) -> list[Object]:
    """All workloads of a service with a ready pod each, but for one."""
    found = []
    for part in EVERY:
        if part is Component.STORE:
            made = mooncake.stateful_set(target, Defaults())
        elif part is Component.ROUTER:
            made = router.deployment(target, Defaults())
        else:
            made = engine.deployment(target, part, Defaults(), replicas=1)
        made["spec"]["replicas"] = 1
        name = made["metadata"]["name"]
        owner = {"kind": "InferenceService", "name": "svc", "uid": "u", "controller": True}
        made["metadata"] |= {"uid": name, "creationTimestamp": stamp(0), "ownerReferences": [owner]}
        found.append(made)
        if part is not empty:
            kind = made["kind"].replace("Deployment", "ReplicaSet")
            reference = {"kind": kind, "name": f"{name}-h", "uid": name, "controller": True}
            labels = made["spec"]["template"]["metadata"]["labels"] | {"pod-template-hash": "h"}
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": stamp(1)}
            meta = {
                "name": f"{name}-0",
                "labels": labels,
                "ownerReferences": [reference],
                "creationTimestamp": stamp(0),
            }
            found.append({"kind": "Pod", "metadata": meta, "status": {"conditions": [ready]}})
    return found


def look(target: InferenceService, objects: list[Object], after_s: float, before: Object) -> tuple[Rollout, Object]:
    seen = observe(target, objects, Facts(), before)
    now = (BEGIN + timedelta(seconds=after_s)).timestamp()
    wanted = plan(target, seen, now)
    return wanted.state, status_of(target, seen, wanted, before, stamp(after_s))


def condition(status: Object, name: str) -> Object:
    return next(c for c in status["conditions"] if c["type"] == name)


@pytest.mark.parametrize("empty", EVERY)
def test_a_pod_that_is_never_made_is_told_in_a_minute_and_fails_by_the_deadline(empty: Component) -> None:
    roles = {"prefill": {}, "decode": {}}
    target = service(1, roles=roles, router={"replicas": 1}, store={}, rollout={"progressDeadline": "10m"})
    objects = children(target, empty)
    name = f"{empty.value.capitalize()}Ready"
    _, status = look(target, objects, 2, {})
    assert condition(status, name)["reason"] == "Starting"
    _, status = look(target, objects, 70, status)
    assert condition(status, name)["reason"] == "PodsNotCreated"
    assert "kubectl describe" in condition(status, name)["message"]
    assert condition(status, "Ready")["reason"] == "PodsNotCreated"
    assert condition(status, "Progressing")["reason"] == "RollingOut"
    state, status = look(target, objects, 605, status)
    assert state is Rollout.FAILED
    assert condition(status, "Progressing")["reason"] == "ProgressDeadlineExceeded"
    assert "kubectl describe" in condition(status, "Progressing")["message"]


def test_a_master_that_was_there_has_the_deadline_anew() -> None:
    target = service(1, roles={"prefill": {}, "decode": {}}, router={"replicas": 1}, store={})
    _, status = look(target, children(target, Component.WORKER), 5, {})
    assert condition(status, "Ready")["status"] == "True"
    # Its pod is evicted after a day, and a quota that came meanwhile keeps another from being made.
    objects = children(target, Component.STORE)
    state, status = look(target, objects, 86_400, status)
    assert state is not Rollout.FAILED
    assert condition(status, "StoreReady")["reason"] == "Starting"
    state, status = look(target, objects, 86_400 + 1000, status)
    assert state is not Rollout.FAILED
    assert condition(status, "StoreReady")["reason"] == "PodsNotCreated"
    state, status = look(target, objects, 86_400 + 1805, status)
    assert state is Rollout.FAILED
