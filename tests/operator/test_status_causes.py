"""Which cause a status names first, and how a refused write appears in it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from isthmus_operator.api.reasons import Reason
from isthmus_operator.api.status import Status as StatusModel
from isthmus_operator.api.v1alpha1 import InferenceService, parse
from isthmus_operator.commands.cluster import blocking
from isthmus_operator.errors import ApiError, NameTaken
from isthmus_operator.plan.causes import SET_UP_S
from isthmus_operator.plan.events import events
from isthmus_operator.plan.observed import Observed, Pod
from isthmus_operator.plan.planner import plan
from isthmus_operator.plan.rehearse import World, rehearse
from isthmus_operator.plan.status import status_of
from isthmus_operator.render.names import Component

D, STORE = Component.DECODE, Component.STORE
NOW, STAMP = 1767225600.0, "2026-01-01T00:00:00Z"
TAKEN = NameTaken(409, "Service svc exists and does not belong to InferenceService svc; it is left as it is")
PATCH = ApiError(500, "PATCH /deployments/svc-decode-1: HTTP 500: .spec.template.spec.dnsPolcy: not declared")


def manifest(**spec: Any) -> dict[str, Any]:
    base = {"model": {"source": {"hostPath": {"path": "/m"}}}, "engine": {"image": "engine:1"}}
    return {
        "apiVersion": "serving.isthmus.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "svc", "namespace": "ns", "uid": "u", "generation": 3},
        "spec": base | {"roles": {"prefill": {}, "decode": {}}} | spec,
    }


def service(**spec: Any) -> InferenceService:
    return parse(manifest(**spec))


def settled(target: InferenceService) -> Observed:
    world = World(now=NOW - 1000)
    for _ in rehearse(target, world):
        pass
    return world.seen


def status(
    target: InferenceService, seen: Observed, before: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    found = status_of(target, seen, plan(target, seen, NOW), before or {}, STAMP, **more)
    StatusModel.model_validate_json(json.dumps(found))
    return found


def said(found: dict[str, Any], name: str) -> tuple[str, str, str]:
    return next((c["status"], c["reason"], c["message"]) for c in found["conditions"] if c["type"] == name)


@pytest.mark.parametrize(("error", "reason"), [(TAKEN, "NameTaken"), (PATCH, "ReconcileFailed")])
def test_a_refused_write_is_a_condition_of_this_generation_and_one_event(error: ApiError, reason: str) -> None:
    before = status(service(), settled(service()))
    after = status(service(), settled(service()), before, refused=[error])
    for name in ("Ready", "Progressing"):
        assert said(after, name) == ("False", reason, str(error))
    assert said(after, "Available")[0] == "True"
    assert {c["observedGeneration"] for c in after["conditions"]} == {3} == {after["observedGeneration"]}
    cause = blocking(manifest() | {"status": after})
    assert cause["reason"] == reason and cause["message"] == str(error) and cause["remedy"]
    assert [e.reason for e in events(before, after)] == [reason]
    assert not events(after, status(service(), settled(service()), after, refused=[error]))


def test_all_refusals_are_said_at_once() -> None:
    found = status(service(), settled(service()), refused=[PATCH, TAKEN])
    assert said(found, "Ready") == ("False", "NameTaken", f"{PATCH}; {TAKEN}")


def test_an_optional_object_that_is_refused_is_said_only_where_nothing_worse_is() -> None:
    good, target = settled(service()), service()
    found = status(target, good, left_out=[PATCH])
    assert said(found, "Ready")[1] == "ReconcileFailed"
    assert said(found, "Progressing")[:2] == ("True", "Complete")
    assert found["revision"]["current"] == found["revision"]["updated"]
    worse = replace(good, routers=())
    assert said(status(target, worse, left_out=[PATCH]), "Ready")[1] != "ReconcileFailed"


def bad_store(seen: Observed, **pod: Any) -> Observed:
    assert seen.store is not None
    (one,) = seen.store.pods
    return replace(seen, store=replace(seen.store, pods=(replace(one, ready=False, changed=NOW, **pod),)))


@pytest.mark.parametrize("mode", ["Store", "Direct"])
def test_what_engines_wait_for_is_the_cause(mode: str) -> None:
    target = service(store={}, transfer={"mode": mode})
    seen = bad_store(settled(target), reason="ImagePullBackOff", problem="container master is waiting")
    seen = replace(seen, engines=())
    reason, message = said(status(target, seen), "Ready")[1:]
    assert reason == "ImagePullFailed" and "container master" in message


def test_a_master_that_waits_for_engines_is_not_the_cause() -> None:
    target = service(store={}, transfer={"mode": "Store"})
    changed = service(store={}, transfer={"mode": "Store"}, engine={"image": "engine:2"})
    found = status(changed, settled(target))
    assert said(found, "StoreReady") == ("False", "RollingOut", "store: waits for engines of an older spec to go")
    assert said(found, "Ready")[2].startswith("prefill")


def test_a_statefulset_without_a_pod_says_where_to_look() -> None:
    target = service(store={}, transfer={"mode": "Store"})
    seen = settled(target)
    assert seen.store is not None
    found = status(target, replace(seen, store=replace(seen.store, pods=())))
    assert "kubectl describe statefulset svc-store" in said(found, "Ready")[2]


def with_pod(seen: Observed, **changes: Any) -> Observed:
    def changed(pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        return (replace(pods[0], ready=False, **changes), *pods[1:])

    engines = tuple(replace(w, pods=changed(w.pods)) if w.component is D else w for w in seen.engines)
    return replace(seen, engines=engines)


def test_a_pod_whose_volumes_do_not_come_is_given_a_minute() -> None:
    target = service()
    young = with_pod(settled(target), set_up=False, changed=NOW - SET_UP_S + 1)
    assert said(status(target, young), "DecodeReady")[1] == Reason.STARTING
    old = with_pod(settled(target), set_up=False, changed=NOW - SET_UP_S - 1)
    reason, message = said(status(target, old), "DecodeReady")[1:]
    assert reason == Reason.POD_NOT_SET_UP and "kubectl describe pod svc-decode" in message
    pulling = with_pod(settled(target), changed=NOW - SET_UP_S - 1)
    assert said(status(target, pulling), "DecodeReady")[1] == Reason.STARTING


def test_a_pod_that_was_ready_has_a_reason_of_its_own() -> None:
    target = service()
    lost = with_pod(settled(target), reason="NotReady", problem=f"it was ready until {STAMP}", changed=NOW)
    reason, message = said(status(target, lost), "Ready")[1:]
    assert reason == Reason.PODS_NOT_READY and f"was ready until {STAMP}" in message
