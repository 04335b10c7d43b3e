"""Watches against a server that lists in pages, tells, breaks off, forgets and refuses."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from isthmus_operator.errors import ApiError
from isthmus_operator.shell.client import connect
from isthmus_operator.shell.informer import Informer, Kind

PATH = "/apis/apps/v1/deployments"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def thing(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": str(version)}}


def page(version: int, *names: str, more: str = "") -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        meta = {"resourceVersion": str(version), "continue": more}
        items = [thing(name, version) for name in names]
        return web.json_response({"kind": "DeploymentList", "apiVersion": "apps/v1", "metadata": meta, "items": items})

    return answer


def tells(*events: tuple[str, dict[str, Any]], breaks: bool = False, stays: bool = False) -> Answer:
    """A watch. breaks: the connection is lost in the middle of an event; stays: it goes on in silence."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for kind, body in events:
            line = json.dumps({"type": kind, "object": {"kind": "Deployment", "apiVersion": "apps/v1"} | body})
            # In two parts: a line need not come as one.
            await response.write(line[:20].encode())
            await response.write(line[20:].encode() + b"\n")
        if breaks:
            await response.write(b'{"type": "ADDED", "obj')
            assert request.transport is not None
            request.transport.abort()
        if stays:
            await asyncio.Event().wait()
        return response

    return answer


def refuses(status: int) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"message": "no"}, status=status)

    return answer


class Seen:
    """A sink that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def changed(self, body: dict[str, Any]) -> None:
        assert (body["kind"], body["apiVersion"]) == ("Deployment", "apps/v1")
        self.told.append(f"+{body['metadata']['name']}{body['metadata']['resourceVersion']}")

    def gone(self, body: dict[str, Any]) -> None:
        self.told.append(f"-{body['metadata']['name']}")

    def absent(self, kind: str, namespace: str, present: set[str]) -> None:
        self.told.append(f"only {' '.join(sorted(present))} of {kind}")


def play(tmp_path: Path, *script: Answer) -> tuple[list[str], list[dict[str, str]]]:
    """Run an informer until the last answer of the script has been asked for and goes on; what it told, and the
    queries of its requests."""

    async def main() -> tuple[list[str], list[dict[str, str]]]:
        asked: list[dict[str, str]] = []
        last = asyncio.Event()

        async def handle(request: web.Request) -> web.StreamResponse:
            assert request.path == PATH
            asked.append(dict(request.query))
            answer = script[min(len(asked), len(script)) - 1]
            if len(asked) >= len(script):
                last.set()
            return await answer(request)

        app = web.Application()
        app.add_routes([web.get("/{any:.*}", handle)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        config = tmp_path / "kubeconfig"
        named = {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}
        config.write_text(
            json.dumps(
                {
                    "clusters": [{"name": "c", "cluster": named}],
                    "users": [{"name": "u", "user": {}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        api, sink = await connect(str(config)), Seen()
        clock = asyncio.get_running_loop().time
        informer = Informer(api, Kind("apps", "v1", "deployments", "a=b"), "", sink, clock=clock, first_pause_s=0.01)
        running = asyncio.create_task(informer.run())
        try:
            await asyncio.wait_for(last.wait(), 30)
            assert not running.done()
            return sink.told, asked
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await api.close()
            await runner.cleanup()

    return asyncio.run(main())


def test_all_pages_are_told_before_it_watches_from_where_the_list_was(tmp_path: Path) -> None:
    told, asked = play(tmp_path, page(7, "a", "b", more="m"), page(7, "c"), tells(stays=True))
    assert told == ["+a7", "+b7", "+c7", "only uid-a uid-b uid-c of Deployment"]
    assert [query.get("continue") for query in asked] == [None, "m", None]
    assert asked[2]["resourceVersion"] == "7"
    assert {query["labelSelector"] for query in asked} == {"a=b"}


def test_a_watch_that_ends_or_breaks_goes_on_from_the_last_event(tmp_path: Path) -> None:
    told, asked = play(
        tmp_path,
        page(7, "a"),
        tells(("MODIFIED", thing("a", 8)), ("BOOKMARK", thing("", 20))),
        tells(("ADDED", thing("b", 21)), ("DELETED", thing("a", 22)), breaks=True),
        tells(stays=True),
    )
    assert told[2:] == ["+a8", "+b21", "-a"]
    assert [query.get("resourceVersion") for query in asked] == [None, "7", "20", "22"]


def test_a_place_that_the_server_has_forgotten_means_a_new_list(tmp_path: Path) -> None:
    forgotten = ("ERROR", {"code": 410, "message": "too old", "metadata": {}})
    told, asked = play(
        tmp_path, page(7, "a"), tells(forgotten), page(30, "b"), refuses(410), page(31), tells(stays=True)
    )
    assert told == ["+a7", "only uid-a of Deployment", "+b30", "only uid-b of Deployment", "only  of Deployment"]
    assert [query.get("resourceVersion") for query in asked] == [None, "7", None, "30", None, "31"]


def test_refusals_are_outlived(tmp_path: Path) -> None:
    told, asked = play(
        tmp_path, refuses(403), refuses(500), page(7, "a", more="m"), refuses(410), page(9, "b"), tells(stays=True)
    )
    # A list that was not finished says nothing about what is absent.
    assert told == ["+a7", "+b9", "only uid-b of Deployment"]
    assert len(asked) == 6


def test_whoever_goes_on_asking_in_an_outage_is_not_deaf() -> None:
    """/healthz fails on what was last heard, and liveness would end an operator that only waits for its API server."""

    class Silent:
        def __init__(self) -> None:
            self.asked = 0
            self.often = asyncio.Event()

        async def get(self, path: str, **query: str) -> Any:
            self.asked += 1
            if self.asked == 3:
                self.often.set()
            raise ApiError(0, "no answer")

    async def main() -> None:
        api, times = Silent(), iter(range(1000, 10**6, 1000))
        one = Informer(
            api,  # type: ignore[arg-type]
            Kind("", "v1", "pods"),
            "",
            None,  # type: ignore[arg-type]
            clock=lambda: float(next(times)),
            spread=lambda: 0.0,
            first_pause_s=0.001,
        )
        began = one.heard
        task = asyncio.create_task(one.run())
        async with asyncio.timeout(30):
            await api.often.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert one.heard > began
        assert not one.listed.is_set()

    asyncio.run(main())
