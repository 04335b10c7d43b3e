"""The server of the admission webhook, as kopf asks for one: reviews that anybody in the cluster may send.

The API server shows no certificate of its own unless a cluster's owner has it do so, so that a review is as little
trusted as the resource in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import kopf
from aiohttp import web

from ..api.v1alpha1 import GROUP, PLURAL, VERSION
from .certificates import Certificates
from .door import listening

PATH = "/validate"
BODY_S = 4.0
"""How long a review may take to arrive: less than the API server waits for the answer."""
AT_ONCE = 4
"""Reviews of one address that are read or worked on; its further ones wait, and those of others pass them."""
SMALL = 64 * 1024
"""Bytes of a review that never waits for larger ones. That of a service of the usual kind has 8 KiB."""
LARGE_AT_ONCE = 8
"""Larger ones that are read at the same time, of all addresses."""
MOST_VALUES = 100_000
"""Of a review, by its brackets and commas: an empty list takes 25 bytes for each of its own."""
_RESOURCE = {"group": GROUP, "version": VERSION, "resource": PLURAL}


class Webhook:
    """kopf calls it with what answers a review. `serving`: called when it listens."""

    def __init__(self, host: str, port: int, certificates: Certificates, serving: Callable[[], object]) -> None:
        self._host = host
        self._port = port
        self._certificates = certificates
        self._serving = serving
        self._turns: dict[str, tuple[asyncio.Semaphore, list[None]]] = {}
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._work = asyncio.Lock()

    async def __call__(self, fn: kopf.WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
        async def validate(request: web.Request) -> web.Response:
            async with self._turn(request.remote or ""):
                body = await self._body(request)
                # Decoded it takes many times as much, so that there is one of them.
                async with self._work:
                    return web.json_response(await fn(_review(body), headers=dict(request.headers)))

        handlers = {("POST", PATH): validate}
        async with listening(handlers, self._host, self._port, tls=self._certificates.context) as port:
            self._serving()
            yield kopf.WebhookClientConfig(url=f"https://{self._host}:{port}{PATH}")
            await asyncio.Event().wait()

    async def _body(self, request: web.Request) -> bytes:
        """HTTPException for one that does not come, or has more in it than any resource that is admitted."""
        size = request.content_length
        waits = contextlib.nullcontext() if size is not None and size <= SMALL else self._large
        try:
            async with asyncio.timeout(BODY_S), waits:
                body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(text="the body did not arrive in time") from None
        if sum(body.count(mark) for mark in (b"{", b"[", b",")) > MOST_VALUES:
            raise web.HTTPRequestEntityTooLarge(max_size=MOST_VALUES, actual_size=len(body), text="too many values")
        return body

    @asynccontextmanager
    async def _turn(self, address: str) -> AsyncIterator[None]:
        """One of the turns of an address, which is forgotten after its last."""
        turns, users = self._turns.setdefault(address, (asyncio.Semaphore(AT_ONCE), []))
        users.append(None)
        try:
            async with turns:
                yield
        finally:
            users.pop()
            if not users:
                del self._turns[address]


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
    reduced = {"uid": uid, "resource": _RESOURCE, "operation": "CREATE", "userInfo": {}, "object": body}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": reduced}


def _field(value: object, name: str) -> dict[str, Any]:
    """A mapping inside a mapping; empty where there is none."""
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}
