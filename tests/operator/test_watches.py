"""The whole shell with kopf in it, against an API server that lists, tells, breaks off, forgets and refuses."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_cluster import ScriptedCluster

from isthmus_operator.errors import ApiError
from isthmus_operator.shell import handlers, operator, start
from isthmus_operator.shell.cache import Cache
from isthmus_operator.shell.client import connect
from isthmus_operator.shell.leader import LeaseSettings
from isthmus_operator.shell.operator import Operator, OperatorOptions
from isthmus_operator.shell.watched import WATCHED, look

KEY = ("ns", "svc")
# No test here is about renewals that are late, as they are on a busy machine.
LEASE = LeaseSettings(namespace="ns", name="l", holder="one", duration_s=1, renew_s=0.02, deadline_s=30.0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers.Pauses, "__iter__", lambda self: iter(lambda: 0.02, None))
    monkeypatch.setattr(operator, "LOOK_AGAIN_S", 0.02)


def names(one: Operator) -> set[str]:
    return {child["metadata"]["name"] for child in one.cache.children(KEY)()}


async def until(true: Callable[[], bool], what: Callable[[], object] = lambda: "") -> None:
    """The operator is asked again while it works, as it tells nobody."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 30
    while not true():
        assert loop.time() < end, what()
        await asyncio.sleep(0.01)


@asynccontextmanager
async def working(
    server: ScriptedCluster, folder: Path, lease: LeaseSettings | None = None, namespaces: tuple[str, ...] = ()
) -> AsyncIterator[Operator]:
    """An operator that has looked and watches; ended as a signal would end it."""
    with server.running(folder) as kubeconfig:
        api = await connect(str(kubeconfig))
        options = OperatorOptions(
            namespaces=namespaces, lease=lease, metrics_host="127.0.0.1", metrics_port=0, health_port=0
        )
        one = Operator(api, options)
        running = asyncio.create_task(handlers.be(one))
        try:
            yield one
            assert not running.done()
        finally:
            one.stopping.set()
            await asyncio.wait_for(running, 30)
            await api.close()


def play(folder: Path, test: Callable[[ScriptedCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        server = ScriptedCluster()
        await test(server)
        assert server.writes == [], "kopf is to write nothing"

    asyncio.run(main())


def test_a_start_waits_for_one_list_and_not_for_one_after_the_other(tmp_path: Path) -> None:
    async def main() -> None:
        server = ScriptedCluster()
        for plural in ("pods", "deployments"):
            server.put(plural, plural)
        with server.running(tmp_path) as kubeconfig:
            api = await connect(str(kubeconfig))
            server.meeting = asyncio.Barrier(len(WATCHED))
            known = Cache(lambda key: None, lambda key: None, lambda key: None)
            try:
                await look(api, ("ns",), known)
                assert len(known.children(KEY)()) == 2
                server.meeting, server.refuse = None, 403
                with pytest.raises(ApiError, match="inferenceservices: HTTP 403"):
                    await look(api, ("ns",), known)
            finally:
                await api.close()

    asyncio.run(main())


def test_what_is_listed_and_told_is_known_and_kopf_writes_nothing(tmp_path: Path) -> None:
    async def test(server: ScriptedCluster) -> None:
        for number in range(250):
            server.put("pods", f"p{number}")
        server.put("deployments", "d")
        async with working(server, tmp_path) as one:
            await until(lambda: len(names(one)) == 251)
            await until(lambda: server.watches == len(WATCHED))
            server.tell("pods", "ADDED", server.put("pods", "new"))
            await until(lambda: "new" in names(one))
            server.tell("pods", "MODIFIED", server.put("pods", "new", status={"phase": "Running"}))
            server.tell("pods", "DELETED", server.drop("pods", "p0"))
            await until(lambda: "p0" not in names(one))
            (pod,) = (child for child in one.cache.children(KEY)() if child["metadata"]["name"] == "new")
            assert pod["status"] == {"phase": "Running"}
            selected = {plural: query.get("labelSelector") for plural, query in server.queries if "watch" in query}
            assert selected == {kind.plural: kind.selector or None for kind in WATCHED}
            assert all(
                "limit" in query for plural, query in server.queries if plural == "pods" and "watch" not in query
            )

    play(tmp_path, test)


def test_finalizers_of_others_stay_be_they_those_that_kopf_has_by_default(tmp_path: Path) -> None:
    async def test(server: ScriptedCluster) -> None:
        theirs = server.put("configmaps", "theirs")
        theirs["metadata"]["finalizers"] = ["kopf.zalando.org/KopfFinalizerMarker"]
        async with working(server, tmp_path) as one:
            await until(lambda: server.watches == len(WATCHED))
            server.tell("configmaps", "MODIFIED", theirs)
            server.tell("pods", "ADDED", server.put("pods", "last"))
            await until(lambda: names(one) == {"theirs", "last"})

    play(tmp_path, test)


def test_of_objects_that_somebody_has_filled_kopf_gets_what_says_whose_they_are(tmp_path: Path) -> None:
    full = {"ingress": [{}] * 50_000}

    async def test(server: ScriptedCluster) -> None:
        for number in range(12):
            server.put("networkpolicies", f"listed{number}", spec=full)
        async with working(server, tmp_path) as one:
            await until(lambda: server.watches == len(WATCHED))
            server.tell("networkpolicies", "ADDED", server.put("networkpolicies", "told", spec=full))
            server.tell("networkpolicies", "ADDED", server.put("networkpolicies", "usual", spec={"ingress": [{}]}))
            await until(lambda: len(names(one)) == 14)
            specs = {child["metadata"]["name"]: child.get("spec") for child in one.cache.children(KEY)()}
            assert specs.pop("usual") == {"ingress": [{}]}
            assert set(specs.values()) == {None}

    play(tmp_path, test)


def test_a_broken_watch_goes_on_and_a_forgotten_place_means_a_new_list(tmp_path: Path) -> None:
    async def test(server: ScriptedCluster) -> None:
        async with working(server, tmp_path) as one:
            await until(lambda: server.watches == len(WATCHED))
            server.break_off()
            server.queries.clear()
            await until(lambda: sum("watch" in query for _, query in server.queries) >= 8)
            assert {query["resourceVersion"] for _, query in server.queries if "watch" in query} == {"10"}
            server.put("pods", "unheard")
            server.too_old = server.version
            server.break_off()
            await until(lambda: "unheard" in names(one))

    play(tmp_path, test)


@pytest.mark.parametrize("code", [410, 429, 500, 504])
def test_a_watch_that_tells_of_an_error_begins_anew(tmp_path: Path, code: int) -> None:
    async def test(server: ScriptedCluster) -> None:
        async with working(server, tmp_path) as one:
            await until(lambda: server.watches == len(WATCHED))
            server.put("pods", "unheard")
            server.queries.clear()
            server.fail("pods", code)
            await until(lambda: "unheard" in names(one))
            # The new one, and no more the old one.
            await until(lambda: any("watch" in query for _, query in server.queries) and server.watches == len(WATCHED))
            server.tell("pods", "ADDED", server.put("pods", "new"))
            await until(lambda: "new" in names(one))

    play(tmp_path, test)


@pytest.mark.parametrize(
    "line",
    [b'{"type":"ADDED","object":null}\n', b'{"type": "ADDED"}\n', b"{}\n", b"<html>no end", b'{"type":"ADDED","ob'],
)
def test_a_watch_that_tells_of_nothing_begins_anew(tmp_path: Path, line: bytes) -> None:
    async def test(server: ScriptedCluster) -> None:
        async with working(server, tmp_path) as one:
            await until(lambda: server.watches == len(WATCHED))
            server.put("pods", "unheard")
            server.say("pods", line)
            await until(lambda: "unheard" in names(one))

    play(tmp_path, test)


def test_while_a_page_of_html_comes_in_place_of_all_answers_the_lease_is_waited_for(tmp_path: Path) -> None:
    async def test(server: ScriptedCluster) -> None:
        async with working(server, tmp_path, replace(LEASE, deadline_s=0.5)) as one:
            await until(lambda: server.watches == len(WATCHED))
            server.refuse = 200
            server.break_off()
            await until(lambda: not one.metrics.leader._value.get())
            server.refuse = None
            await until(lambda: bool(one.metrics.leader._value.get()))
            server.tell("pods", "ADDED", server.put("pods", "new"))
            await until(lambda: "new" in names(one))

    play(tmp_path, test)


def test_what_was_deleted_unheard_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "LOOK_S", 0.05)

    async def test(server: ScriptedCluster) -> None:
        server.put("pods", "p")
        async with working(server, tmp_path) as one:
            await until(lambda: names(one) == {"p"})
            server.drop("pods", "p")
            await until(lambda: names(one) == set())

    play(tmp_path, test)


@pytest.mark.parametrize("status", [0, 200, 401, 403, 429, 500, 503])
def test_an_api_server_that_refuses_for_a_while_is_outlived(tmp_path: Path, status: int) -> None:
    async def test(server: ScriptedCluster) -> None:
        async with working(server, tmp_path) as one:
            await until(lambda: server.watches == len(WATCHED))
            server.queries.clear()
            server.refuse = status
            server.break_off()
            await until(lambda: len(server.queries) > 10)
            server.refuse = None
            await until(lambda: server.watches == len(WATCHED))
            server.tell("pods", "ADDED", server.put("pods", "new"))
            await until(lambda: "new" in names(one))

    play(tmp_path, test)


def test_what_it_goes_on_refusing_ends_the_operator_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "RIGHTS_S", 0.5)

    async def main() -> None:
        server = ScriptedCluster()
        with server.running(tmp_path) as kubeconfig:
            api = await connect(str(kubeconfig))
            one = Operator(api, OperatorOptions(metrics_host="127.0.0.1", metrics_port=0, health_port=0))
            running = asyncio.create_task(handlers.be(one))
            await until(lambda: server.watches == len(WATCHED))
            server.refuse = 401
            server.break_off()
            with pytest.raises(ApiError, match="401"):
                await asyncio.wait_for(running, 30)
            await api.close()

    asyncio.run(main())


@pytest.mark.parametrize("from_the_start", [False, True])
def test_a_namespace_that_may_not_be_read_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_the_start: bool
) -> None:
    """Who administers a namespace can take the operator's rights there away, also before it starts or logs in anew."""
    monkeypatch.setattr(operator, "LOOK_S", 0.05)
    monkeypatch.setattr(start, "RIGHTS_S", 0.2)
    both = ("ns", "theirs")

    async def test(server: ScriptedCluster) -> None:
        server.put("pods", "p")
        server.forbidden = {"theirs"} if from_the_start else set()
        async with working(server, tmp_path, namespaces=both) as one:
            await until(lambda: names(one) == {"p"})
            if not from_the_start:
                await until(lambda: server.watches == len(both) * len(WATCHED))
                server.forbidden = {"theirs"}
                server.break_off()
            await until(lambda: list(one.controller.unread) == ["theirs"])
            await until(lambda: server.watches == len(WATCHED))
            server.tell("pods", "ADDED", server.put("pods", "new"))
            await until(lambda: names(one) == {"p", "new"})
            server.forbidden = set()
            await until(lambda: not one.controller.unread)
            await until(lambda: server.watches == len(both) * len(WATCHED))

    play(tmp_path, test)


@pytest.mark.slow
def test_a_kind_that_is_no_more_ends_the_operator(tmp_path: Path) -> None:
    """Of a CRD that was removed; it is started anew, and waits for it."""

    async def main() -> None:
        server = ScriptedCluster()
        with server.running(tmp_path) as kubeconfig:
            api = await connect(str(kubeconfig))
            one = Operator(api, OperatorOptions(metrics_host="127.0.0.1", metrics_port=0, health_port=0))
            running = asyncio.create_task(handlers.be(one))
            await until(lambda: server.watches == len(WATCHED))
            del server.objects["rolescalers"]
            server.break_off()
            await asyncio.wait((running,), timeout=60)
            assert running.done()
            assert "rolescalers" in repr(getattr(running.exception(), "__cause__", None))
            await api.close()

    asyncio.run(main())


def test_last_words_are_said_by_the_one_holder_of_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rights that are taken away while it works: it works no more when it says so, and nobody holds the lease after."""
    monkeypatch.setattr(start, "RIGHTS_S", 0.5)
    told: list[tuple[float, str]] = []

    async def main() -> None:
        server = ScriptedCluster()
        with server.running(tmp_path) as kubeconfig:
            api = await connect(str(kubeconfig))
            one = Operator(api, OperatorOptions(lease=LEASE, metrics_host="127.0.0.1", metrics_port=0, health_port=0))

            async def unread(refused: object) -> None:
                assert server.lease is not None
                if refused:
                    told.append((one.metrics.leader._value.get(), server.lease["spec"]["holderIdentity"]))

            monkeypatch.setattr(one, "_unread", unread)
            running = asyncio.create_task(handlers.be(one))
            await until(lambda: server.watches == len(WATCHED) and one.metrics.leader._value.get() == 1)
            server.refuse = 401
            server.break_off()
            with pytest.raises(ApiError, match="401"):
                await asyncio.wait_for(running, 60)
            await api.close()
            assert server.lease is not None and server.lease["spec"]["holderIdentity"] == ""

    asyncio.run(main())
    assert told[-1] == (0.0, "one")


def test_the_lease_is_given_back_at_the_end(tmp_path: Path) -> None:
    async def test(server: ScriptedCluster) -> None:
        async with working(server, tmp_path, LEASE) as one:
            await until(lambda: one.metrics.leader._value.get() == 1)
            assert server.lease is not None and server.lease["spec"]["holderIdentity"] == "one"
        assert server.lease["spec"]["holderIdentity"] == ""

    play(tmp_path, test)


def test_everything_is_listed_anew_when_the_lease_is_won_back(tmp_path: Path) -> None:
    async def test(server: ScriptedCluster) -> None:
        server.put("pods", "p")
        async with working(server, tmp_path, LEASE) as one:
            await until(lambda: names(one) == {"p"})

            def lost() -> bool:
                # Again, where a renewal was on its way and has written over it: this server has no versions.
                assert server.lease is not None
                server.lease["spec"] |= {"holderIdentity": "another", "renewTime": "x"}
                return bool(one.metrics.leader._value.get() == 0)

            await until(lost)
            server.drop("pods", "p")
            await until(lambda: names(one) == set())

    play(tmp_path, test)
