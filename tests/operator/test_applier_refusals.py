"""What one refused write or delete keeps from being done, and what it does not. The API server is a stand-in."""

import asyncio
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from isthmus_operator.api.v1alpha1 import parse
from isthmus_operator.errors import ApiError
from isthmus_operator.plan.contests import Contests
from isthmus_operator.plan.desired import Desired, Name, name_of
from isthmus_operator.plan.events import overridden
from isthmus_operator.plan.ownership import FIELD_MANAGER
from isthmus_operator.shell.apply import Applier, Changes

Object = dict[str, Any]
EXAMPLE = Path(__file__).parents[2] / "examples" / "direct.yaml"
OWNER = {"apiVersion": "serving.isthmus.dev/v1alpha1", "kind": "InferenceService", "name": "svc", "uid": "u"}


def body(kind: str, name: str, *, owned: bool = True, **more: Any) -> Object:
    owners = {"ownerReferences": [OWNER]} if owned else {}
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "ns", **owners}, **more}


class Server:
    """Refuses what `refuses` says of (verb, kind)."""

    def __init__(self, refuses: Callable[[str, str], bool], there: list[Object]) -> None:
        self._refuses = refuses
        self._there = {name_of(one): one for one in there}
        self.done: list[tuple[str, str, str]] = []

    def _do(self, verb: str, manifest: Object) -> Object:
        if self._refuses(verb, manifest["kind"]):
            raise ApiError(403, f"{verb} {manifest['kind']}: a policy forbids it")
        self.done.append((verb, *name_of(manifest)))
        return manifest

    async def serves(self, version: str, kind: str) -> bool:
        return True

    async def find(self, path: str) -> Object | None:
        return next((one for one in self._there.values() if path.endswith(f"/{one['metadata']['name']}")), None)

    async def named(self, version: str, kind: str, namespace: str, name: str) -> Object | None:
        return self._there.get((kind, name))

    async def apply(self, manifest: Object, *, over: Object | None = None, subresource: str = "") -> Object:
        return self._do("apply", manifest)

    async def create(self, manifest: Object) -> Object:
        return self._do("create", manifest)

    async def delete(self, there: Object) -> bool:
        return bool(self._do("delete", there))


def run(server: Server, wanted: Desired, live: list[Object]) -> Changes:
    known: dict[Name, Object] = {name_of(one): one for one in live}
    applier = Applier(server, lambda verb, written: None)  # type: ignore[arg-type]
    return asyncio.run(applier.run(wanted, known, settled=True, complete=True))


def test_a_delete_that_is_refused_takes_nothing_with_it() -> None:
    live = [body("NetworkPolicy", "a"), body("Service", "b")]
    server = Server(lambda verb, kind: (verb, kind) == ("delete", "NetworkPolicy"), live)
    changes = run(server, Desired(apply=(body("Deployment", "d"),), delete=tuple(live)), live)
    assert server.done == [("apply", "Deployment", "d"), ("delete", "Service", "b")]
    assert [str(error) for error in changes.left_out] == ["delete NetworkPolicy: a policy forbids it"]
    assert not changes.refused


def test_what_is_to_be_made_anew_is_not_deleted_while_nothing_new_is_made() -> None:
    live = [body("StatefulSet", "store")]
    server = Server(lambda verb, kind: kind == "Service", live)
    wanted = Desired(apply=(body("Service", "s"), body("Deployment", "d")), delete=tuple(live))
    changes = run(server, wanted, live)
    assert len(changes.refused) == 1
    assert server.done == []


def test_no_engine_waits_for_a_budget() -> None:
    server = Server(lambda verb, kind: kind == "PodDisruptionBudget", [])
    changes = run(server, Desired(apply=(body("PodDisruptionBudget", "p"), body("Deployment", "d"))), [])
    assert server.done == [("apply", "Deployment", "d")]
    assert len(changes.left_out) == 1 and not changes.refused


def test_a_scaler_left_by_a_former_service_is_taken_up_with_its_number() -> None:
    """Scalers are created, and only their status is applied: they carry no Apply record of ours."""
    record = {"manager": FIELD_MANAGER, "operation": "Update", "fieldsV1": {"f:spec": {}}}
    left = body("RoleScaler", "svc-decode", owned=False, spec={"replicas": 7})
    left["metadata"]["managedFields"] = [record]
    server = Server(lambda verb, kind: False, [left])
    wanted = Desired(apply=(), create=(body("RoleScaler", "svc-decode", spec={"replicas": 1}),))
    changes = run(server, wanted, [])
    assert not changes.refused
    assert server.done == [("apply", "RoleScaler", "svc-decode")]
    foreign = body("RoleScaler", "svc-decode", owned=False, spec={"replicas": 7})
    foreign["metadata"]["managedFields"] = [{**record, "manager": "kubectl"}]
    changes = run(Server(lambda verb, kind: False, [foreign]), wanted, [])
    assert len(changes.refused) == 1


class Overriding(Server):
    """An admission policy that gives every object its own value of a label of ours."""

    value = "theirs"

    async def apply(self, manifest: Object, *, over: Object | None = None, subresource: str = "") -> Object:
        self._do("apply", manifest)
        meta = manifest["metadata"]
        record = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": {"f:metadata": {"f:labels": {"f:a": {}}}}}
        live = manifest | {"metadata": meta | {"labels": {"a": self.value}, "managedFields": [record]}}
        self._there[name_of(manifest)] = live
        return live


def test_what_a_policy_changes_is_written_once_and_told_once() -> None:
    def wanted(label: str) -> Object:
        one = body("Service", "s", owned=False)
        one["metadata"]["labels"] = {"a": label}
        return one

    server, contests = Overriding(lambda verb, kind: False, []), Contests()
    told: list[Name] = []

    def again(label: str = "ours") -> int:
        before = len(server.done)
        known = dict(server._there)
        applier = Applier(server, lambda verb, written: None)  # type: ignore[arg-type]
        run = applier.run(
            Desired(apply=(wanted(label),)), known, settled=True, complete=False, futile=contests.futile(("ns", "svc"))
        )
        changes = asyncio.run(run)
        told.extend(contests.left(("ns", "svc"), changes.futile))
        return len(server.done) - before

    assert [again() for _ in range(9)] == [1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert told == [("Service", "s")]
    (event,) = overridden(told)
    assert event.warning and "an admission policy changes it" in event.message
    # Either side wants another thing.
    assert [again("other") for _ in range(3)] == [1, 0, 0]
    server._there["Service", "s"]["metadata"]["labels"]["a"] = "third"
    assert [again("other") for _ in range(3)] == [1, 0, 0]
    server.value = "other"
    server._there["Service", "s"]["metadata"]["labels"]["a"] = "x"
    assert [again("other") for _ in range(2)] == [1, 0]
    assert contests.futile(("ns", "svc")) == {}
    assert len(told) == 1


def test_what_is_read_by_its_name_in_one_run_is_bounded() -> None:
    """Sixteen Deployments of somebody's, each as heavy as one may be, took 30 MB in each of eight runs."""
    service = parse(yaml.safe_load(EXAMPLE.read_text()))
    ours = {**OWNER, "name": service.name, "uid": service.uid}
    heavy = {"data": {f"{number:05x}": "ab" for number in range(9_000)}}
    there = [body("ConfigMap", f"theirs-{number}", owned=False, **heavy) for number in range(9)]
    there += [body("ConfigMap", f"ours-{number}", **heavy) for number in range(9)]
    there += [body("ConfigMap", "small", owned=False, data={"a": "b"})]
    for one in there:
        if one["metadata"]["name"].startswith("ours"):
            one["metadata"]["ownerReferences"] = [ours]
    makers = [{**body("Deployment", f"big-{number}", owned=False), "spec": {"x": ["y"] * 9_000}} for number in range(9)]
    server = Server(lambda verb, kind: False, there + makers)
    applier = Applier(server, lambda verb, written: None)  # type: ignore[arg-type]
    wanted = [{**body(one["kind"], one["metadata"]["name"])} for one in there]
    for one in wanted:
        one["metadata"]["ownerReferences"] = [ours]
    wanted += [body("Deployment", one["metadata"]["name"], owned=False) for one in makers]
    found = asyncio.run(applier.standing(wanted, {}, service))
    assert len(found) == len(wanted) and all(found.values())
    whole = {name for (_, name), one in found.items() if one and ("data" in one or "x" in one.get("spec", {}))}
    assert "small" in whole and 1 < len(whole) < 8
    assert all(name == "small" or name.startswith("ours") for name in whole)
    assert sum(len(json.dumps(one)) for one in found.values()) < 4 * 1024 * 1024
    # Small ones count, too, and so does what was read in the calls before.
    several = [
        {**body("ConfigMap", f"some-{number}", owned=False), "data": {"a": "b" * 100_000}} for number in range(99)
    ]
    server = Server(lambda verb, kind: False, several)
    applier = Applier(server, lambda verb, written: None)  # type: ignore[arg-type]
    parts = (several[:33], several[33:66], several[66:])
    reads = [asyncio.run(applier.standing(part, {}, service)) for part in parts]
    whole = {name for (_, name), one in (item for read in reads for item in read.items()) if one and "data" in one}
    assert len(whole) == 41 and whole.isdisjoint(one["metadata"]["name"] for one in parts[2])


def test_of_a_full_optional_object_of_somebody_elses_nothing_is_held_but_whose_it_is() -> None:
    """What was refused is told of at the end of a run, and until then its frames held the object: 33 MB."""
    wanted = {**body("PodMonitor", "m"), "apiVersion": "monitoring.coreos.com/v1"}
    full = {**body("PodMonitor", "m", owned=False), "spec": {"podMetricsEndpoints": [{}] * 60_000}}
    full["metadata"]["ownerReferences"] = [{**OWNER, "name": "other", "uid": "another"}]
    changes = run(Server(lambda verb, kind: False, [full]), Desired(apply=(), optional=(wanted,)), [])
    (error,) = changes.left_out
    held = [frame.f_locals.get("there") for frame, _ in traceback.walk_tb(error.__traceback__)]
    weights = [len(json.dumps(one)) for one in held if one is not None]
    assert weights and max(weights) < 4096
