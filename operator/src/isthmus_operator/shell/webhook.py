"""The server of the admission webhook, as kopf asks for one: reviews that anybody in the cluster may send.

The API server shows no certificate of its own unless a cluster's owner has it do so, so that a review is as little
trusted as the resource in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import kopf
from aiohttp import web

from ..api.limits import too_large
from ..api.v1alpha1 import GROUP, PLURAL, VERSION
from .answers import clipped
from .certificates import Certificates
from .door import listening
from .turns import Busy, Turns

PATH = "/validate"
BODY_S = 4.0
"""How long a review may take to arrive: less than the API server waits for the answer."""
ROOM = 512
"""Connections that may wait for others to be answered: an API server opens as many as it has requests at once."""
AGAIN_S = 1
"""When one may be asked about again that had to give way."""
SMALL = 64 * 1024
"""Bytes of a review that never waits for larger ones. That of a service of the usual kind has 8 KiB."""
LARGE_AT_ONCE, LARGE_OF_ONE = 8, 4
"""Larger ones that are read at the same time, of all addresses and of one."""
LARGE_S = 0.5
"""How long one is read, at least, before it gives way to an address that has fewer. An API server's is here at once."""
MOST_VALUES = 100_000
"""Of a review, by its brackets and commas: an empty list takes 25 bytes for each of its own."""
_RESOURCE = {"group": GROUP, "version": VERSION, "resource": PLURAL}


@dataclass(slots=True, eq=False)
class _Reading:
    address: str
    since: float
    timer: asyncio.Timeout


class Large:
    """Turns at reading large reviews. Where all are taken, the one that has been read longest of the address that has
    most gives way to an address with fewer: who sends slowly has only what others leave. For one event loop."""

    def __init__(self) -> None:
        self._reading: list[_Reading] = []
        self._waiting: list[tuple[_Reading, asyncio.Future[None]]] = []
        self._look: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self, address: str, timer: asyncio.Timeout) -> AsyncIterator[None]:
        """`timer` ends it, with the time that it had or when it gives way."""
        loop = asyncio.get_running_loop()
        mine = _Reading(address, loop.time(), timer), loop.create_future()
        self._waiting.append(mine)
        try:
            self._make_room()
            await mine[1]
            yield
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:
                self._reading.remove(mine[0])
            self._make_room()

    def _make_room(self) -> None:
        loop, count = asyncio.get_running_loop(), Counter(one.address for one in self._reading)
        if self._look is not None:
            self._look.cancel()
            self._look = None
        while len(self._reading) < LARGE_AT_ONCE:
            waiting = [one for one in self._waiting if count[one[0].address] < LARGE_OF_ONE]
            if not waiting:
                break
            mine = min(waiting, key=lambda one: count[one[0].address])
            self._waiting.remove(mine)
            mine[0].since = loop.time()
            self._reading.append(mine[0])
            count[mine[0].address] += 1
            if not mine[1].done():  # it may just have left
                mine[1].set_result(None)
        if not self._waiting or not count:
            return
        most = max(count.values())
        if most <= min(count[one.address] for one, _ in self._waiting):
            return
        oldest = min((one for one in self._reading if count[one.address] == most), key=lambda one: one.since)
        if loop.time() < oldest.since + LARGE_S:
            due = oldest.since + LARGE_S
            self._look = loop.call_at(due, self._look_again, due)
        elif not oldest.timer.expired():
            oldest.timer.reschedule(loop.time())

    def _look_again(self, due: float) -> None:
        """Time in which this process stood still is nobody's: what is read may have come long ago."""
        late = asyncio.get_running_loop().time() - due
        if late > LARGE_S / 2:
            for one in self._reading:
                one.since += late + LARGE_S / 2
        self._make_room()


class Webhook:
    """kopf calls it with what answers a review. `serving`: called when it listens."""

    def __init__(self, host: str, port: int, certificates: Certificates, serving: Callable[[], object]) -> None:
        self._host = host
        self._port = port
        self._certificates = certificates
        self._serving = serving
        self._turns = Turns()
        self._large = Large()

    async def __call__(self, fn: kopf.WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
        async def validate(request: web.Request) -> web.Response:
            address, body = request.remote or "", await self._body(request)
            asked = _review(body)["request"]
            uid, namespace, size = asked["uid"], _field(asked["object"], "metadata").get("namespace", ""), len(body)
            # Decoded it takes many times as much, so that there is one of them.
            del asked
            try:
                async with self._turns.turn(address, namespace, size):
                    if request.transport is None:  # nobody waits for the answer
                        raise web.HTTPRequestTimeout
                    return web.json_response(await fn(_review(body), headers=dict(request.headers)))
            except Busy:
                return web.json_response(_busy(uid, namespace))

        handlers = {("POST", PATH): validate}
        async with listening(handlers, self._host, self._port, tls=self._certificates.context, room=ROOM) as port:
            self._serving()
            host = f"[{self._host}]" if ":" in self._host else self._host
            yield kopf.WebhookClientConfig(url=f"https://{host}:{port}{PATH}")
            await asyncio.Event().wait()

    async def _body(self, request: web.Request) -> bytes:
        """HTTPException for one that does not come, or has more in it than any resource that is admitted."""
        size = request.content_length
        small = size is not None and size <= SMALL
        try:
            async with asyncio.timeout(BODY_S) as timer:
                waits = contextlib.nullcontext() if small else self._large.turn(request.remote or "", timer)
                async with waits:
                    body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(text="the body did not arrive in time") from None
        if sum(body.count(mark) for mark in (b"{", b"[", b",")) > MOST_VALUES:
            raise web.HTTPRequestEntityTooLarge(max_size=MOST_VALUES, actual_size=len(body), text="too many values")
        return body


def _review(received: bytes) -> Any:
    """A review of our kind, with what is looked at of it. HTTPException for whatever else comes."""
    try:
        review = json.loads(received)
    except (ValueError, RecursionError):
        raise web.HTTPBadRequest(text="the body is not JSON") from None
    asked = _field(review, "request")
    body = _field(asked, "object")
    meta = _field(body, "metadata")
    if not meta or any(not isinstance(meta.get(name, ""), str) for name in ("name", "namespace", "uid")):
        raise web.HTTPBadRequest(text="not an AdmissionReview with an object in its request")
    if asked.get("resource") != _RESOURCE:
        raise web.HTTPNotFound(text=f"only {PLURAL}.{GROUP}/{VERSION} are validated here")
    uid = str(asked.get("uid", ""))
    # Under UPDATE kopf would remember each object, and anybody may make some up; it would compare it with the former,
    # too, which nobody here looks at.
    # Whatever else is in it kopf copies and goes through, and a spec that is too large is refused by its beginning.
    body = {**body, "metadata": {key: value for key, value in meta.items() if key != "managedFields"}}
    if "spec" in body and too_large(body["spec"]):
        body["spec"] = clipped(body["spec"])
    reduced = {"uid": uid, "resource": _RESOURCE, "operation": "CREATE", "userInfo": {}, "object": body}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": reduced}


def _busy(uid: str, namespace: str) -> dict[str, Any]:
    """Clients try again by themselves after an answer of this kind."""
    message = f"too many changes wait to be validated, and most of them are of namespace {namespace}; try again"
    details = {"retryAfterSeconds": AGAIN_S}
    status = {"code": 429, "reason": "TooManyRequests", "message": message, "details": details}
    response = {"uid": uid, "allowed": False, "status": status}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def _field(value: object, name: str) -> dict[str, Any]:
    """A mapping inside a mapping; empty where there is none."""
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}
