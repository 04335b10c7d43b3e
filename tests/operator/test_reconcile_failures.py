"""Whatever a reconcile fails on is a condition, an Event and a raised error; what is there is left as it was."""

import asyncio
import copy
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from isthmus_operator.api.profile import PERMISSIVE, Profile
from isthmus_operator.api.reasons import Reason
from isthmus_operator.api.v1alpha1 import InferenceService, parse
from isthmus_operator.errors import ApiError, OverBudget, Refused
from isthmus_operator.plan import contests
from isthmus_operator.plan.autoscale import Decision
from isthmus_operator.plan.observe import MOST_MAKERS
from isthmus_operator.plan.observed import Facts, Observed
from isthmus_operator.plan.planner import Plan
from isthmus_operator.render import scaler
from isthmus_operator.render.names import Component, Defaults
from isthmus_operator.shell import controller
from isthmus_operator.shell.budget import Workbench
from isthmus_operator.shell.cache import Cache, Children, Key
from isthmus_operator.shell.client import Api
from isthmus_operator.shell.controller import Controller
from isthmus_operator.shell.known_facts import KnownFacts
from isthmus_operator.shell.telemetry import Metrics
from isthmus_operator.shell.workqueue import WorkQueue

EXAMPLE = Path(__file__).parents[2] / "examples" / "direct.yaml"
KEY = ("default", "smollm2")
READY = [
    {"type": name, "status": "True", "reason": "AllReady", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    for name in ("Ready", "DecodeReady")
]
Object = dict[str, Any]


class Server:
    """Takes everything but what a test has it refuse. `read`: what it says to a read of an object by name."""

    def __init__(self, read: ApiError | None = None) -> None:
        self.read = read
        self.statuses: list[Object] = []
        self.events: list[Object] = []
        self.written: list[str] = []

    async def named(self, version: str, kind: str, namespace: str, name: str) -> Object | None:
        if self.read is not None:
            raise self.read
        return None

    async def find(self, path: str) -> Object | None:
        return None

    async def serves(self, version: str, kind: str) -> bool:
        return False

    async def apply(self, body: Object, *, over: Object | None, subresource: str = "") -> Object:
        if subresource:
            self.statuses.append(body["status"])
        else:
            self.written.append(body["kind"])
        return copy.deepcopy(body)

    async def create(self, body: Object) -> Object:
        (self.events if body["kind"] == "Event" else self.written).append(body)
        return body


class NoFacts:
    async def read(self, *_: object, **__: object) -> Facts:
        return Facts()


def reconcile(
    server: Server,
    *,
    times: int = 1,
    status: Object | None = None,
    spec: Object | None = None,
    profile: Profile = PERMISSIVE,
) -> list[Any]:
    """What each of some runs came to, on an InferenceService that was ready before its last edit."""

    async def main() -> list[Any]:
        cache = Cache(lambda key: None, lambda key: None, lambda key: None)
        body = yaml.safe_load(EXAMPLE.read_text())
        body["metadata"] |= {"namespace": "default", "uid": "u", "generation": 2, "resourceVersion": "1"}
        body["spec"] |= spec or {}
        body["status"] = status if status is not None else {"observedGeneration": 1, "conditions": READY}
        one = Controller(
            api=cast(Api, server),
            cache=cache,
            facts=cast(KnownFacts, NoFacts()),
            defaults=Defaults(),
            metrics=Metrics(),
            profile=profile,
            bench=controller.Workbench(),
        )
        ends: list[Any] = []
        for number in range(times):
            body["metadata"]["resourceVersion"] = str(number + 1)
            cache.changed(copy.deepcopy(body))
            try:
                ends.append(await one.reconcile(KEY))
            except Exception as error:
                ends.append(error)
            body["status"] = server.statuses[-1] if server.statuses else body["status"]
        return ends

    return asyncio.run(main())


def test_engines_that_lack_adapters_are_looked_at_again() -> None:
    """No object changes when they have them."""
    body = yaml.safe_load(EXAMPLE.read_text())
    one = Controller(
        api=cast(Api, Server()),
        cache=Cache(lambda key: None, lambda key: None, lambda key: None),
        facts=cast(KnownFacts, NoFacts()),
        defaults=Defaults(),
        metrics=Metrics(),
    )
    for status, expected in (("True", None), ("Unknown", None), ("False", controller.ADAPTERS_PERIOD_S)):
        after = {"conditions": [{"type": "AdaptersReady", "status": status}, {"type": "Ready", "status": "False"}]}
        assert one._again(KEY, parse(body), Plan(counts={}), after) == expected


def test_a_number_that_somebody_else_sets_against_auto_scaling_is_a_contest_and_no_clock_prolongs_it() -> None:
    body = yaml.safe_load(EXAMPLE.read_text())
    body["metadata"] |= {"namespace": "default", "uid": "u"}
    target = {"metric": "QueuedRequests", "value": 4}
    body["spec"]["roles"]["decode"]["scaling"] = {"mode": "Auto", "min": 1, "max": 2, "target": target}
    service, steady, today = parse(body), [1000.0], [1e9]

    class Scales(Server):
        scaled = 0

        async def scale(self, there: Object, manifest: Object) -> None:
            self.scaled += 1

        async def scaler_status(self, there: Object, manifest: Object) -> None:
            pass

    async def main() -> None:
        server = Scales()
        one = Controller(
            api=cast(Api, server),
            cache=Cache(lambda key: None, lambda key: None, lambda key: None),
            facts=cast(KnownFacts, NoFacts()),
            defaults=Defaults(),
            metrics=Metrics(),
            clock=lambda: today[0],
            steady=lambda: steady[0],
        )
        there = scaler.role_scaler(service, Component.DECODE, replicas=5000)
        seen = Observed(wanted={Component.DECODE: 2})
        decisions = {Component.DECODE: Decision(count=2)}
        told = []
        for _ in range(6):
            news = await one._scales(KEY, cast(Any, server), service, seen, decisions, [there])
            told += [event.reason for event in news]
        assert server.scaled == contests.MANY
        assert told == [Reason.CHILD_HEALED, Reason.CHILD_HEALED, Reason.CHILD_CONTESTED]
        today[0] -= 86_400
        after = {"conditions": [{"type": "Ready", "status": "True"}]}
        again = one._again(KEY, service, Plan(counts={}), after)
        assert again is not None
        assert again <= contests.FIRST_S
        steady[0] += contests.FIRST_S + 1
        await one._scales(KEY, cast(Any, server), service, seen, decisions, [there])
        assert server.scaled == contests.MANY + 1

    asyncio.run(main())


def condition(status: Object, name: str) -> tuple[str, str]:
    return next((c["status"], c["reason"]) for c in status["conditions"] if c["type"] == name)


def test_a_defect_is_a_condition_and_one_event_and_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise AttributeError("'str' object has no attribute 'get'")

    monkeypatch.setattr(controller, "decide", fails)
    server = Server()
    ends = reconcile(server, times=3)
    assert [type(end) for end in ends] == [AttributeError] * 3
    assert not server.written
    (status,) = server.statuses
    assert status["observedGeneration"] == 2
    assert condition(status, "Ready") == ("False", "InternalError")
    assert condition(status, "Progressing") == ("False", "InternalError")
    assert condition(status, "DecodeReady") == ("True", "AllReady"), "what was known stays"
    assert "AttributeError: 'str' object" in status["conditions"][0]["message"]
    assert [event["reason"] for event in server.events] == ["InternalError"]


@pytest.mark.parametrize("before", [None, {}])
def test_a_read_that_is_refused_is_a_condition_and_one_event(before: Object | None) -> None:
    server = Server(ApiError(403, "GET /apis/apps/v1/deployments/x: HTTP 403: forbidden"))
    ends = reconcile(server, times=2, status=before)
    assert all(isinstance(end, Refused) for end in ends)
    status = server.statuses[-1]
    assert status["observedGeneration"] == 2
    assert condition(status, "Ready") == ("False", "ReconcileFailed")
    assert "HTTP 403" in status["conditions"][0]["message"]
    assert [event["reason"] for event in server.events] == ["ReconcileFailed"]


@pytest.mark.parametrize("code", [0, 429, 503, 504])
def test_an_api_server_that_answers_nobody_says_nothing_of_the_service(code: int) -> None:
    server = Server(ApiError(code, "no answer"))
    (end,) = reconcile(server)
    assert isinstance(end, ApiError) and end.status == code
    assert not server.statuses


def test_a_spec_that_got_past_the_webhook_is_named() -> None:
    server = Server()
    patch = {"spec": {"containers": [{"name": "router", "env": ["A=b"]}]}}
    assert reconcile(server, spec={"router": {"podPatch": patch}}) == [None]
    (status,) = server.statuses
    assert condition(status, "Ready") == ("False", "InvalidSpec")
    assert "spec.router.podPatch.spec.containers[0].env[0]: has the wrong type" in status["conditions"][0]["message"]
    assert not server.written


def test_a_service_over_its_budget_is_told_so_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(controller, "decide", lambda *_: release.wait(60))
    monkeypatch.setattr(controller, "Workbench", lambda: Workbench(0.05))
    server = Server()
    ends = reconcile(server, times=2)
    release.set()
    assert [type(end) for end in ends] == [OverBudget] * 2
    assert not server.written
    assert condition(server.statuses[-1], "Ready") == ("False", "OverBudget")
    assert "takes longer than 0.05 s" in server.statuses[0]["conditions"][0]["message"]
    assert [event["reason"] for event in server.events] == ["OverBudget"]


def test_a_service_for_which_its_namespace_has_no_room_is_told_so_and_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("isthmus_operator.shell.cache.MOST_OF_SERVICES", 100)

    class Named(Server):
        async def named(self, version: str, kind: str, namespace: str, name: str) -> Object | None:
            status = self.statuses[-1] if self.statuses else {"revision": {"current": "r"}, "conditions": READY}
            meta = {"name": name, "namespace": namespace, "uid": "u", "generation": 2, "resourceVersion": "1"}
            return {"apiVersion": version, "kind": kind, "metadata": meta, "spec": {}, "status": status}

    server = Named()
    assert reconcile(server, times=2) == [None, None]
    (status,) = server.statuses
    assert condition(status, "Ready") == ("False", "OverBudget")
    assert "the services of namespace default take more than" in status["conditions"][0]["message"]
    assert status["revision"] == {"current": "r"}, "what is known of it stays"
    assert [event["reason"] for event in server.events] == ["OverBudget"] and not server.written


def test_what_the_profile_refuses_is_not_carried_out_though_the_webhook_has_let_it_pass() -> None:
    server = Server()
    assert reconcile(server, profile=Profile()) == [None]
    assert not server.written
    assert condition(server.statuses[-1], "Compatible") == ("False", "InvalidSpec")
    assert "spec.model.source.hostPath.path" in server.statuses[-1]["conditions"][0]["message"]
    allowed = Server()
    reconcile(allowed, profile=Profile(host_paths=("/var/lib/isthmus/models",)))
    assert "Deployment" in allowed.written


def child(namespace: str, service: str, uid: str, values: int) -> Object:
    """A ConfigMap that a service has made, of so many values."""
    owner = {"apiVersion": "serving.isthmus.dev/v1alpha1", "kind": "InferenceService", "name": service, "uid": uid}
    meta: Object = {"name": f"x-{service}", "namespace": namespace, "uid": f"x-{uid}", "resourceVersion": "1"}
    meta |= {"labels": {"serving.isthmus.dev/service": service}, "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {str(n): "v" for n in range(values)}}


def test_of_services_whose_objects_are_heavy_one_is_looked_at_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of them side by side were 538 MiB; and they held all workers, or tried again each half second, which the
    namespace with most of them won."""
    monkeypatch.setattr(controller, "LIGHT", 10_000)
    heavy = [("many", f"m{number}") for number in range(3)] + [("few", "a")]
    light = ("many", "light")

    async def main() -> None:
        cache = Cache(lambda key: None, lambda key: None, lambda key: None)
        body = yaml.safe_load(EXAMPLE.read_text())
        for number, (namespace, name) in enumerate((*heavy, light)):
            meta = {"namespace": namespace, "uid": f"u{number}", "name": name, "generation": 1}
            cache.changed({**copy.deepcopy(body), "metadata": {**meta, "resourceVersion": "1"}, "status": {}})
            cache.changed(child(namespace, name, f"u{number}", 500 if name != "light" else 1))
        begun: list[Key] = []
        running: set[Key] = set()
        go, heavy_begun, light_done, all_done = (asyncio.Event() for _ in range(4))

        class Slow:
            async def read(self, key: Key, *_: object, **__: object) -> Facts:
                begun.append(key)
                if key != light:
                    assert not running, "one at a time"
                    running.add(key)
                    heavy_begun.set()
                    await go.wait()
                return Facts()

        one = Controller(
            api=cast(Api, Server()), cache=cache, facts=cast(KnownFacts, Slow()), defaults=Defaults(), metrics=Metrics()
        )
        assert [key for key in (*heavy, light) if one.is_heavy(key)] == heavy

        failed: list[Exception] = []

        async def work(key: Key) -> float | None:
            try:
                return await one.reconcile(key)
            finally:
                running.discard(key)
                if key == light:
                    light_done.set()
                if len(begun) == 5 and not running:
                    all_done.set()

        queue = WorkQueue(work, failed=lambda key, error: failed.append(error), heavy=one.is_heavy)
        for key in (*heavy, light):
            queue._now(key)
        working = asyncio.create_task(queue.run(1))
        await light_done.wait()
        await heavy_begun.wait()
        assert set(begun) == {heavy[0], light}, "those that wait hold no worker"
        go.set()
        await all_done.wait()
        working.cancel()
        await asyncio.wait((working,))
        assert not failed
        assert [key for key in begun if key != light] == [heavy[0], ("few", "a"), *heavy[1:3]], "namespaces have turns"

    asyncio.run(asyncio.wait_for(main(), 60))


class Unlabelled(Server):
    """Has Deployments of the service without its labels, under many names. asked: for which of them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def named(self, version: str, kind: str, namespace: str, name: str) -> Object | None:
        if not name.startswith("maker-"):
            return None
        self.asked.append(name)
        owner = {"apiVersion": "serving.isthmus.dev/v1alpha1", "kind": "InferenceService", "name": KEY[1], "uid": "u"}
        meta = {"name": name, "namespace": namespace, "uid": name, "resourceVersion": "1", "ownerReferences": [owner]}
        template = {"metadata": {"labels": {"x": "y"}}, "spec": {"containers": []}}
        spec = {"replicas": 0, "selector": {"matchLabels": {"x": "y"}}, "template": template}
        return {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}

    async def delete(self, body: Object) -> bool:
        return True


def made_by(maker: str) -> Object:
    """A pod of the service's labels, and of a Deployment of that name as it says."""
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": f"{maker}-h", "uid": "r", "controller": True}
    labels = {"serving.isthmus.dev/service": KEY[1], "serving.isthmus.dev/role": "decode", "pod-template-hash": "h"}
    meta = {"name": f"of-{maker}", "namespace": KEY[0], "uid": f"of-{maker}", "resourceVersion": "1", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**meta, "ownerReferences": [owner]}, "status": {}}


def test_what_makes_pods_is_asked_for_once_in_a_run_and_no_more_of_it_than_a_service_has() -> None:
    """A hundred and fifty Deployments without labels, and pods that named them, sixteen in each of ten rounds, took
    70 MiB; in eight runs side by side 600."""

    async def main() -> None:
        cache = Cache(lambda key: None, lambda key: None, lambda key: None)
        body = yaml.safe_load(EXAMPLE.read_text())
        body["metadata"] |= {"namespace": "default", "uid": "u", "generation": 1, "resourceVersion": "1"}
        cache.changed(body)
        for number in range(3 * MOST_MAKERS):
            cache.changed(made_by(f"maker-{number:03}"))
        server = Unlabelled()
        one = Controller(
            api=cast(Api, server),
            cache=cache,
            facts=cast(KnownFacts, NoFacts()),
            defaults=Defaults(),
            metrics=Metrics(),
        )
        await one.reconcile(KEY)
        assert sorted(server.asked) == [f"maker-{number:03}" for number in range(MOST_MAKERS)]

    asyncio.run(main())


def test_a_run_with_heavy_objects_ends_when_it_has_had_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server takes seconds for some objects; others wait for their turn meanwhile."""
    monkeypatch.setattr(controller, "LIGHT", 10_000)
    monkeypatch.setattr(controller, "HEAVY_S", 0.2)

    class Stands(Server):
        async def apply(self, body: Object, *, over: Object | None, subresource: str = "") -> Object:
            if subresource:
                return await super().apply(body, over=over, subresource=subresource)
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> None:
        cache = Cache(lambda key: None, lambda key: None, lambda key: None)
        body = yaml.safe_load(EXAMPLE.read_text())
        body["metadata"] |= {"namespace": "default", "uid": "u", "generation": 1, "resourceVersion": "1"}
        cache.changed(body)
        cache.changed(child(*KEY, "u", 500))
        one = Controller(
            api=cast(Api, server := Stands()),
            cache=cache,
            facts=cast(KnownFacts, NoFacts()),
            defaults=Defaults(),
            metrics=Metrics(),
        )
        with pytest.raises(Refused, match=r"longer than 0\.2 s"):
            await one.reconcile(KEY)
        assert "longer than 0.2 s" in str(server.statuses[-1]), "the status says why nothing happens"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_is_looked_at_of_a_service_is_what_was_weighed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its spec is read, on the bench, which has turns, somebody may fill it."""
    monkeypatch.setattr(controller, "LIGHT", 10_000)

    async def main() -> None:
        cache = Cache(lambda key: None, lambda key: None, lambda key: None)
        body = yaml.safe_load(EXAMPLE.read_text())
        body["metadata"] |= {"namespace": "default", "uid": "u", "generation": 1, "resourceVersion": "1"}
        cache.changed(body)
        key = "default", body["metadata"]["name"]
        one = Controller(
            api=cast(Api, Server()),
            cache=cache,
            facts=cast(KnownFacts, NoFacts()),
            defaults=Defaults(),
            metrics=Metrics(),
        )
        weights, look = [], controller._look

        def weighed(service: InferenceService, make: Children) -> tuple[list[Object], Observed]:
            weights.append(make.weight)
            return look(service, make)

        monkeypatch.setattr(controller, "_look", weighed)
        assert not one.is_heavy(key)
        await one.bench._turn.acquire()
        running = asyncio.create_task(one.reconcile(key))
        await asyncio.sleep(0)
        cache.changed(child(*key, "u", 500))
        one.bench._turn.release()
        await running
        assert one.is_heavy(key) and weights == [0]

    asyncio.run(asyncio.wait_for(main(), 60))
