"""Status and conditions as a table: what exists -> what is said about it, and what becomes an Event."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isthmus_operator.api import reasons
from isthmus_operator.api.reasons import EVENTS, TEXTS, Reason
from isthmus_operator.api.status import Status as StatusModel
from isthmus_operator.api.v1alpha1 import InferenceService, parse
from isthmus_operator.commands import cluster
from isthmus_operator.commands.cluster import blocking, explain_text, plan_steps, status_text
from isthmus_operator.errors import InvalidSpec
from isthmus_operator.plan.events import events
from isthmus_operator.plan.observed import EngineFacts, Facts, Observed, Word
from isthmus_operator.plan.planner import plan
from isthmus_operator.plan.rehearse import World, rehearse
from isthmus_operator.plan.status import invalid_status, status_of
from isthmus_operator.render import adapters
from isthmus_operator.render.names import Component
from isthmus_operator.shell import rbac

ROOT = Path(__file__).parents[2]
P, D = Component.PREFILL, Component.DECODE
NOW = "2026-01-01T00:00:00Z"


def manifest(**spec: Any) -> dict[str, Any]:
    base = {"model": {"source": {"hostPath": {"path": "/m"}}}, "engine": {"image": "engine:1"}}
    roles = {"prefill": {"scaling": {"replicas": 2}}, "decode": {"scaling": {"replicas": 2}}}
    return {
        "apiVersion": "serving.isthmus.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "svc", "namespace": "ns", "uid": "u", "generation": 3},
        "spec": base | {"roles": roles} | spec,
    }


def service(**spec: Any) -> InferenceService:
    return parse(manifest(**spec))


def settled(target: InferenceService) -> World:
    world = World()
    for _ in rehearse(target, world):
        pass
    return world


def status(
    target: InferenceService, seen: Observed, before: dict[str, Any] | None = None, now: str = NOW
) -> dict[str, Any]:
    found = status_of(target, seen, plan(target, seen, 2000.0), before or {}, now)
    StatusModel.model_validate_json(json.dumps(found))
    return found


def condition(found: dict[str, Any], name: str) -> tuple[str, str]:
    return next((c["status"], c["reason"]) for c in found["conditions"] if c["type"] == name)


def message(found: dict[str, Any], name: str) -> str:
    return next(str(c["message"]) for c in found["conditions"] if c["type"] == name)


def with_pods(seen: Observed, component: Component, **changes: Any) -> Observed:
    engines = tuple(
        replace(w, pods=tuple(replace(p, **changes) for p in w.pods)) if w.component is component else w
        for w in seen.engines
    )
    return replace(seen, engines=engines)


def test_ready_service() -> None:
    found = status(service(), settled(service()).seen)
    for name in ("Ready", "Available", "Progressing", "PrefillReady", "DecodeReady", "RouterReady", "ModelReady"):
        assert condition(found, name)[0] == "True", name
    assert condition(found, "Progressing") == ("True", "Complete")
    assert condition(found, "TransferReady") == ("Unknown", "NotReported")
    assert found["observedGeneration"] == 3
    assert found["roles"]["prefill"] == {"desired": 2, "ready": 2, "updated": 2, "summary": "2/2"}
    assert found["revision"]["current"] == found["revision"]["updated"]
    assert "StoreReady" not in {c["type"] for c in found["conditions"]}


@pytest.mark.parametrize(
    ("reason", "problem", "expected"),
    [
        ("CrashLoopBackOff", "container engine is waiting: CrashLoopBackOff", "CrashLooping"),
        ("CrashLoopBackOff", "container model-fetch is waiting: CrashLoopBackOff", "ModelFetchFailed"),
        ("ErrImagePull", "container engine is waiting: ErrImagePull", "ImagePullFailed"),
        ("OOMKilled", "container engine was restarted (exit code 137)", "OutOfMemory"),
        ("CreateContainerConfigError", "secret not found", "ContainerConfigError"),
        ("Unschedulable", "no node has room for it: 0/1 nodes", "Unschedulable"),
        ("SomethingNew", "a kubelet says so", "PodsNotReady"),
        ("", "", "Starting"),
    ],
)
def test_what_keeps_a_pod_from_being_ready(reason: str, problem: str, expected: str) -> None:
    seen = with_pods(settled(service()).seen, D, ready=False, reason=reason, problem=problem)
    found = status(service(), seen)
    assert condition(found, "DecodeReady") == ("False", expected)
    assert condition(found, "Ready") == ("False", expected)
    assert condition(found, "Available") == ("False", "NoEngine")
    assert condition(found, "PrefillReady")[0] == "True"
    assert problem in message(found, "Ready")
    assert seen.of(D)[0].pods[0].name in message(found, "DecodeReady")


def test_old_pods_that_serve_make_available_but_not_ready() -> None:
    world = settled(service())
    found = status(service(engine={"image": "engine:2"}), world.seen)
    assert condition(found, "Available") == ("True", "Serving")
    assert condition(found, "Ready") == ("False", "Starting")
    assert condition(found, "Progressing") == ("True", "RollingOut")
    assert found["roles"]["decode"]["updated"] == 0


def test_no_pods_can_be_made() -> None:
    seen = settled(service()).seen
    engines = tuple(replace(w, pods=(), problem="pods cannot be created: exceeded quota") for w in seen.engines)
    found = status(service(), replace(seen, engines=engines))
    assert condition(found, "PrefillReady") == ("False", "PodsNotCreated")
    assert "exceeded quota" in message(found, "Ready")


def test_store_and_external_master() -> None:
    managed = service(store={}, transfer={"mode": "Store"})
    assert condition(status(managed, settled(managed).seen), "StoreReady") == ("True", "AllReady")
    assert condition(status(managed, Observed()), "StoreReady") == ("False", "Starting")
    external = service(store={"master": {"external": {"address": "h:1"}}})
    assert condition(status(external, settled(external).seen), "StoreReady") == ("True", "External")


def facts(seen: Observed, **changes: Any) -> Observed:
    one = EngineFacts(
        fingerprint="f1", transfer_mode="direct", transport="tcp", probed_gbps=2.25, usable_blocks=99,
        physical_blocks=100, bytes_per_block=4096, max_model_len=2048,
    )  # fmt: skip
    per_role = {P: changes.pop("prefill", {}), D: changes.pop("decode", {})}
    names = {pod.name: replace(one, **changes, **per_role[w.component]) for w in seen.engines for pod in w.pods}
    return replace(seen, facts=Facts(engines=names))


def test_transport_kv_and_fingerprint_are_what_engines_report() -> None:
    seen = facts(settled(service()).seen)
    found = status(service(), seen)
    assert found["transfer"] == {"mode": "Direct", "effective": "TCP", "probedGBps": "2.2", "lastProbe": NOW}
    assert found["kvCache"] == {"physicalBlocks": 100, "usableBlocks": 99, "bytesPerBlock": 4096, "maxModelLen": 2048}
    assert found["fingerprint"] == "f1"
    assert condition(found, "TransferReady") == ("True", "Probed")
    assert condition(found, "Compatible") == ("True", "SameFingerprint")


@pytest.mark.parametrize(
    ("spec", "changes", "name", "expected"),
    [
        ({"transfer": {"transport": "RDMA"}}, {}, "TransferReady", "TransportReplaced"),
        ({}, {"transfer_ready": False, "transfer_reason": "no device"}, "TransferReady", "TransferNotReady"),
        ({}, {"decode": {"fingerprint": "f2"}}, "Compatible", "FingerprintMismatch"),
    ],
)
def test_what_engines_report_can_be_wrong(
    spec: dict[str, Any], changes: dict[str, Any], name: str, expected: str
) -> None:
    target = service(**spec)
    found = status(target, facts(settled(target).seen, **changes))
    assert condition(found, name) == ("False", expected)
    assert condition(found, "Ready") == ("False", expected)


ADAPTERS = {
    "source": {"hostPath": {"path": "/m"}},
    "adapters": [{"name": name, "source": {"pvc": {"claimName": "c", "path": name}}} for name in ("sql", "chat")],
}


def test_adapters_are_ready_where_every_engine_has_them() -> None:
    target = service(model=ADAPTERS)
    seen, digest = settled(target).seen, adapters.digest(target)

    def found(**changes: Any) -> tuple[dict[str, Any], tuple[str, str]]:
        told = status(target, facts(seen, **changes))
        return told, condition(told, "AdaptersReady")

    told, state = found(adapter_list=digest)
    assert state == ("True", "AdaptersLoaded") and condition(told, "Ready")[0] == "True"
    told, state = found(prefill={"adapter_list": digest}, decode={"adapter_list": "of before"})
    assert state == ("False", "AdaptersPending") == condition(told, "Ready")
    assert "pod svc-decode" in message(told, "AdaptersReady") and "prefill" not in message(told, "AdaptersReady")
    broken = {"adapter_problems": (("sql", "rank 64 is above --max-lora-rank 16"),)}
    told, state = found(adapter_list=digest, decode=broken)
    assert state == ("False", "AdaptersMissing") == condition(told, "Ready")
    text = message(told, "AdaptersReady")
    assert "sql fails on 2 of 4 engines (pod svc-decode" in text and "rank 64" in text and "chat" not in text
    assert [event.reason for event in events({}, told) if event.warning] == [Reason.ADAPTERS_MISSING]
    told, state = found(adapter_list=digest, adapter_problems=(("gone", "of a list that was"), ("", "cannot be read")))
    assert "the list fails on 4 of 4" in message(told, "AdaptersReady") and "gone" not in message(told, "AdaptersReady")
    assert condition(status(target, seen), "AdaptersReady") == ("Unknown", "NotReported")
    assert not any(c["type"] == "AdaptersReady" for c in status(service(), settled(service()).seen)["conditions"])


def test_routable_is_the_routers_word() -> None:
    seen = settled(service()).seen
    seen = with_pods(seen, D, ip="10.0.0.1")
    found = status(service(), replace(seen, facts=Facts(routers={"any": {"10.0.0.1": Word.TAKEN}})))
    assert found["roles"]["decode"]["routable"] == 2
    assert found["roles"]["prefill"]["routable"] == 0


def test_the_same_state_is_the_same_status_and_no_event() -> None:
    seen = settled(service()).seen
    first = status(service(), seen)
    again = status(service(), seen, first, now="2026-02-02T00:00:00Z")
    assert again == first
    assert events(first, again) == []


def test_times_change_with_the_status_of_a_condition_only() -> None:
    seen = settled(service()).seen
    first = status(service(), with_pods(seen, D, ready=False))
    second = status(service(), with_pods(seen, D, ready=False, reason="OOMKilled"), first, now="2026-02-02T00:00:00Z")
    third = status(service(), seen, second, now="2026-03-03T00:00:00Z")
    times = [
        next(c["lastTransitionTime"] for c in s["conditions"] if c["type"] == "DecodeReady")
        for s in (first, second, third)
    ]
    assert times == [NOW, NOW, "2026-03-03T00:00:00Z"]


def test_events_tell_transitions_once() -> None:
    seen = settled(service()).seen
    empty = status(service(), Observed())
    # A start that goes as it should warns of nothing.
    assert {e.reason for e in events({}, empty)} == {Reason.ROLLOUT_STARTED}
    assert not any(event.warning for event in events({}, empty))
    assert condition(empty, "Available") == ("False", "Starting")
    ready = status(service(), seen, empty)
    assert {e.reason for e in events(empty, ready)} == {Reason.SERVING, Reason.COMPLETE}
    changed = service(engine={"image": "engine:2"})
    assert {e.reason for e in events(ready, status(changed, seen, ready))} == {Reason.ROLLOUT_STARTED}


def test_what_is_scaled_to_zero_is_called_so() -> None:
    none = {"scaling": {"replicas": 0}}
    target = service(roles={"prefill": none, "decode": none})
    found = status(target, settled(target).seen)
    assert condition(found, "Available") == ("False", "ScaledToZero")
    assert condition(found, "Ready") == ("False", "ScaledToZero")
    assert "decode is scaled to 0" in message(found, "Ready")
    alone = service(router={"replicas": 0})
    assert condition(status(alone, settled(alone).seen), "Available") == ("False", "ScaledToZero")


def test_an_invalid_spec_keeps_what_serves() -> None:
    before = status(service(), settled(service()).seen)
    with pytest.raises(InvalidSpec) as caught:
        service(rollout={"drainTimeout": "1s"})
    after = invalid_status(caught.value, before, 4, NOW)
    StatusModel.model_validate_json(json.dumps(after))
    assert condition(after, "Compatible") == ("False", "InvalidSpec")
    assert condition(after, "Ready") == ("False", "InvalidSpec")
    assert condition(after, "Available") == ("True", "Serving")
    assert after["observedGeneration"] == 4
    looked = {c["type"]: c["observedGeneration"] for c in after["conditions"]}
    assert (looked["Ready"], looked["Available"]) == (4, 3), "nobody has looked at the pods for this generation"
    assert after["roles"] == before["roles"]
    assert Reason.INVALID_SPEC in {e.reason for e in events(before, after)}
    assert events(after, invalid_status(caught.value, after, 4, NOW)) == []


def test_every_reason_is_documented_with_its_remedy() -> None:
    assert set(TEXTS) == set(Reason)
    assert set(EVENTS) <= set(Reason)
    assert (ROOT / "operator" / "docs" / "conditions.md").read_text() == reasons.document()
    assert (ROOT / "operator" / "docs" / "rbac.md").read_text() == rbac.document()
    assert "secrets" not in {resource for rule in rbac.RULES for resource in rule.resources}


def test_explain_names_one_cause_and_its_remedy() -> None:
    body = manifest() | {
        "status": status(
            service(),
            with_pods(settled(service()).seen, D, ready=False, reason="OOMKilled", problem="container engine"),
        )
    }
    text = explain_text(body, blocking(body))
    assert text.startswith("svc is not ready: OutOfMemory\n")
    assert "Raise the memory limit" in text
    stale = body | {"metadata": body["metadata"] | {"generation": 9}}
    assert blocking(stale)["reason"] == "NotObserved"
    ready = manifest() | {"status": status(service(), settled(service()).seen)}
    assert explain_text(ready, blocking(ready)) == "svc is ready: http://svc.ns.svc/v1\n"
    assert "prefill      2/2 ready" in status_text(ready)


def test_plan_prints_the_steps_of_a_rollout() -> None:
    world = settled(service())
    steps = plan_steps(service(engine={"image": "engine:2"}), world)
    texts = [step["text"] for step in steps]
    assert len([t for t in texts if "start 1" in t]) == 4
    assert texts[0].endswith("stop 1 (2 -> 1)")
    assert not any(step.get("gap") for step in steps)
    assert plan_steps(service(engine={"image": "engine:2"}), world) == []


def test_plan_says_where_it_stopped_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world, target = settled(service()), service(engine={"image": "engine:2"})
    monkeypatch.setattr(cluster, "rehearse", partial(rehearse, limit=3))
    *steps, last = plan_steps(target, world)
    assert steps and last["unfinished"] and "not complete after 3 steps" in last["text"]
    monkeypatch.undo()
    assert not any("unfinished" in step for step in plan_steps(target, world)), "from there on it comes to its end"


@pytest.mark.parametrize("forged", ["0000-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
def test_a_condition_has_no_time_that_cannot_be_right(forged: str) -> None:
    """Whoever may write statuses may write any."""
    target = service()
    world = settled(target)
    before = status(target, world.seen)
    for one in before["conditions"]:
        one["lastTransitionTime"] = forged
    later = "2026-01-01T00:01:00Z"
    after = status(target, world.seen, before, later)
    assert {one["lastTransitionTime"] for one in after["conditions"]} == {later}
    assert status(target, world.seen, after, "2026-01-01T00:02:00Z") == after
