"""Asks the pods of a service what they know about themselves: /info of engines and of a router of each revision, and
/metrics for Auto.

A pod runs whatever its owner likes, so what it says is not trusted: an answer is read up to a size and a time, never
unpacked, never followed elsewhere, and its texts and numbers are bounded before anybody sees them. A pod that does not
answer in time, or answers otherwise, is left out; nothing here fails a reconcile. Answers are kept for a short time, so
that a burst of events does not become a burst of requests, and a little longer where a pod that is ready falls silent.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import aiohttp

from ..plan.observed import EngineFacts, Facts, Pod, Word, printable
from ..render.names import ENGINE_PORT, METRICS_PORT, ROUTER_PORT, Component

DEADLINE_S = 2.0
"""For all pods of one service together."""
PATIENT_S = 10.0
"""The same where nothing was ever heard of a service: after a start, all are asked at once."""
KEPT_S = 10.0
SILENT_S = 60.0
"""How long the last answer of a pod that is ready stands in for one that does not come."""
MOST_AT_ONCE = 64
MOST_OF_A_SERVICE = 8
MOST_OF_A_NAMESPACE = 16
"""Requests at once: no service's pods, and no tenant's, can keep all others' from being asked."""
MOST_BYTES = 64 * 1024
"""Of an engine's /info, which has 2 KB."""
MOST_ENGINES = 256 * 1024
"""Of a router's /info, which has 400 bytes an engine at most."""
MOST_METRICS = 256 * 1024
"""Of /metrics. An engine's have 20 KB, and four times as many with the longest name of a model in each line."""
MOST_HEADERS = 32
MOST_LINE = 4096
MOST_TEXT = 256
MOST_NUMBER = 2**53
MOST_PROBLEMS = 65
"""Of adapters: a service has 64 at most."""

_log = logging.getLogger(__name__)
_Turns = tuple[asyncio.Semaphore, asyncio.Semaphore]
"""Of a service and of its namespace."""


class FactReader:
    """One HTTP session, and the last answer of each pod by its uid."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._known: dict[str, tuple[float, EngineFacts]] = {}
        self._words: dict[str, tuple[float, dict[str, Word]]] = {}
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)
        self._tenants: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def close(self) -> None:
        """Idempotent."""
        if self._session is not None:
            await self._session.close()

    async def read(self, namespace: str, pods: Iterable[Pod], *, load: bool, patient: bool = False) -> Facts:
        """Facts of the ready engine pods of one service in `namespace`, and what routers say about them.
        `load`: queues and KV use too; `patient`: wait for PATIENT_S."""
        live = [pod for pod in pods if pod.ends is None and _is_of_a_pod(pod.ip)]
        ready = [pod for pod in live if pod.ready]
        engines = [pod for pod in ready if pod.component not in (Component.ROUTER, Component.STORE)]
        routers = {pod.revision: pod for pod in reversed(ready) if pod.component is Component.ROUTER}
        if not engines and not routers:
            return Facts()
        if self._session is None:
            self._session = _session()
        tenant = self._tenants.setdefault(namespace, asyncio.Semaphore(MOST_OF_A_NAMESPACE))
        turns = asyncio.Semaphore(MOST_OF_A_SERVICE), tenant
        tasks = {pod.name: asyncio.ensure_future(self._engine(pod, turns, load=load)) for pod in engines}
        # Of these alone: whatever a router knows besides is kept nowhere.
        addresses = {pod.ip for pod in engines}
        asked = {name: asyncio.ensure_future(self._said(pod, turns, addresses)) for name, pod in routers.items()}
        waiting = [*tasks.values(), *asked.values()]
        done, late = await asyncio.wait(waiting, timeout=PATIENT_S if patient else DEADLINE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        found = {
            pod.name: facts
            for pod in engines
            if (facts := (tasks[pod.name].result() if tasks[pod.name] in done else None) or self._last(pod))
        }
        said = {
            revision: words
            for revision, pod in routers.items()
            if (words := (asked[revision].result() if asked[revision] in done else None) or self._last_words(pod))
            is not None
        }
        for pod in live:  # where none is ready for a moment, what one said before goes on to hold
            if pod.component is Component.ROUTER and not pod.ready and (before := self._last_words(pod)) is not None:
                said.setdefault(pod.revision, before)
        self._forget()
        return Facts(engines=found, routers=said)

    def _forget(self) -> None:
        limit = asyncio.get_running_loop().time() - SILENT_S
        self._known = {uid: entry for uid, entry in self._known.items() if entry[0] > limit}
        self._words = {uid: entry for uid, entry in self._words.items() if entry[0] > limit}

    def _last_words(self, pod: Pod) -> dict[str, Word] | None:
        known = self._words.get(pod.uid)
        if known is None:
            return None
        if not pod.ready:  # it does nothing that could be told, and comes back as it was
            self._words[pod.uid] = (asyncio.get_running_loop().time(), known[1])
        return known[1]

    def _last(self, pod: Pod) -> EngineFacts | None:
        """What a pod has said before, as its layout and transport do not change while it runs. Its load does."""
        known = self._known.get(pod.uid)
        return replace(known[1], stale=True) if known is not None else None

    @asynccontextmanager
    async def _turn(self, turns: _Turns) -> AsyncIterator[None]:
        service, tenant = turns
        async with service, tenant, self._slots:
            yield

    async def _engine(self, pod: Pod, turns: _Turns, *, load: bool) -> EngineFacts | None:
        now = asyncio.get_running_loop().time()
        if (known := self._known.get(pod.uid)) and now - known[0] < KEPT_S:
            return known[1]
        base = f"http://{_host(pod.ip)}:{METRICS_PORT if pod.guarded else ENGINE_PORT}"
        async with self._turn(turns):
            info = _object(await self._text(f"{base}/info", pod), pod)
            if info is None:
                return None
            metrics = await self._text(f"{base}/metrics", pod, MOST_METRICS) if load else None
        try:
            facts = engine_facts(info, metrics or "")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            _log.warning(
                "pod %s: /info is not understood: %s: %s", pod.name, type(error).__name__, str(error)[:MOST_TEXT]
            )
            return None
        self._known[pod.uid] = (now, facts)
        return facts

    async def _said(self, pod: Pod, turns: _Turns, addresses: Collection[str]) -> dict[str, Word] | None:
        async with self._turn(turns):
            port = METRICS_PORT if pod.guarded else ROUTER_PORT
            info = _object(await self._text(f"http://{_host(pod.ip)}:{port}/info", pod, MOST_ENGINES), pod)
        engines = (info or {}).get("engines")
        if not isinstance(engines, list):
            return None
        found = words((one for one in engines if isinstance(one, dict)), addresses)
        self._words[pod.uid] = (asyncio.get_running_loop().time(), found)
        return found

    async def _text(self, url: str, pod: Pod, limit: int = MOST_BYTES) -> str | None:
        """The body of an answer; None for whatever else comes."""
        assert self._session is not None
        try:
            async with self._session.get(url, allow_redirects=False) as answer:
                if answer.status != 200:
                    _log.debug("pod %s: %s answered HTTP %d", pod.name, url, answer.status)
                    return None
                if answer.headers.get("Content-Encoding", "identity") != "identity":
                    _log.warning("pod %s: %s answered in an encoding that was not asked for", pod.name, url)
                    return None
                body = await _up_to(limit, answer.content)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            _log.debug("pod %s: %s: %s: %s", pod.name, url, type(error).__name__, error)
            return None
        if body is None:
            _log.warning("pod %s: %s answered with more than %d bytes", pod.name, url, limit)
            return None
        return body.decode(errors="replace")


def _session() -> aiohttp.ClientSession:
    """Asks pods by their address, never through a proxy of the surroundings, and keeps nothing of theirs."""
    return aiohttp.ClientSession(
        trust_env=False,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        connector=aiohttp.TCPConnector(limit=MOST_AT_ONCE, force_close=True),
        headers={"Accept-Encoding": "identity"},
        # Who waits has the deadline; this one is for what nobody waits for any more.
        timeout=aiohttp.ClientTimeout(total=PATIENT_S),
        max_line_size=MOST_LINE,
        max_field_size=MOST_LINE,
        max_headers=MOST_HEADERS,
        read_bufsize=MOST_BYTES,
    )


async def _up_to(limit: int, content: aiohttp.StreamReader) -> bytes | None:
    """The whole body; None where it is larger."""
    found = bytearray()
    while chunk := await content.read(limit + 1 - len(found)):
        found += chunk
        if len(found) > limit:
            return None
    return bytes(found)


def _object(text: str | None, pod: Pod) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        _log.warning("pod %s: its answer is not JSON", pod.name)
        return None
    return found if isinstance(found, dict) else None


def _is_of_a_pod(address: str) -> bool:
    """Whether a pod can have it: no service of the node or the cloud lies behind it."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (found.is_link_local or found.is_multicast or found.is_unspecified)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def engine_facts(info: Mapping[str, Any], metrics: str = "") -> EngineFacts:
    """The answer of an engine's /info; KeyError, TypeError or ValueError if it is malformed, or a number out of range.
    Texts are cut at MOST_TEXT."""
    kv, transfer = info["kv"], info["transfer"]
    listed = info.get("adapter_list") or {"digest": "", "problems": []}
    return EngineFacts(
        fingerprint=_line(info["fingerprint"]),
        model=_line(info["model"]),
        model_revision=_line(info.get("model_revision") or ""),
        transfer_mode=_line(transfer["mode"]),
        transport=_line(transfer["transport"]),
        probed_gbps=_number(transfer["probed_gbps"]),
        transfer_ready=bool(transfer["ready"]),
        transfer_reason=_line(transfer["reason"]),
        physical_blocks=int(_number(kv["physical_blocks"])),
        usable_blocks=int(_number(kv["usable_blocks"])),
        bytes_per_block=int(_number(kv["bytes_per_block"])),
        max_model_len=int(_number(kv["max_model_len"])),
        queued=_load(info.get("waiting")),
        kv_usage=_load(_sample(metrics, "vllm:kv_cache_usage_perc")),
        adapter_list=_line(listed["digest"]),
        adapter_problems=tuple(
            (_line(one["name"]), _line(one["problem"])) for one in listed["problems"][:MOST_PROBLEMS]
        ),
    )


def _line(value: object) -> str:
    if not isinstance(value, str | int | float):
        raise TypeError(f"a {type(value).__name__} is no text")
    return printable(" ".join(str(value)[:MOST_TEXT].split()))


def _number(value: Any) -> float:
    found = float(value)
    if not (math.isfinite(found) and 0 <= found <= MOST_NUMBER):
        raise ValueError(f"{found:g} is no number from 0 to {MOST_NUMBER}")
    return found


def _load(value: Any) -> float | None:
    return None if value is None else _number(value)


def words(engines: Iterable[Mapping[str, Any]], addresses: Collection[str]) -> dict[str, Word]:
    """Pod address -> what a router says of it, from its /info; of no others than `addresses`."""
    out = {}
    for engine in engines:
        url = engine.get("url")
        host = url.partition("//")[2].rpartition(":")[0].strip("[]") if isinstance(url, str) else ""
        if host in addresses:
            refused = Word.OTHER if engine.get("other_tokenizer") is True else Word.NOT_NOW
            out[host] = refused if engine.get("reason") else Word.TAKEN
    return out


def _sample(metrics: str, name: str) -> float | None:
    """The sum of a metric's samples in the Prometheus text format; None where there are none."""
    values = [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(value) for value in values) if values else None
