"""Asks the pods of a service what they know about themselves: /info of engines and of one router, /metrics for Auto.

A pod that does not answer within the deadline is left out; nothing here fails a reconcile. Answers are kept for a short
time, so that a burst of events does not become a burst of requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp

from ..plan.observed import EngineFacts, Facts, Pod
from ..render.names import ENGINE_PORT, ROUTER_PORT, Component

DEADLINE_S = 2.0
"""For all pods of one service together."""
KEPT_S = 10.0
MOST_AT_ONCE = 32

_log = logging.getLogger(__name__)


class FactReader:
    """One HTTP session, and the last answer of each pod by its uid."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._known: dict[str, tuple[float, EngineFacts]] = {}
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)

    async def close(self) -> None:
        """Idempotent."""
        if self._session is not None:
            await self._session.close()

    async def read(self, pods: Iterable[Pod], *, load: bool) -> Facts:
        """Facts of the ready engine pods, and what a ready router says about them. `load`: queues and KV use too."""
        ready = [pod for pod in pods if pod.ready and pod.ends is None and pod.ip]
        engines = [pod for pod in ready if pod.component not in (Component.ROUTER, Component.STORE)]
        routers = [pod for pod in ready if pod.component is Component.ROUTER]
        if not engines and not routers:
            return Facts()
        if self._session is None:
            # Pods are asked by their address, never through a proxy of the surroundings.
            self._session = aiohttp.ClientSession(trust_env=False)
        tasks = {pod.name: asyncio.ensure_future(self._engine(pod, load=load)) for pod in engines}
        router = asyncio.ensure_future(self._routable(routers[0])) if routers else None
        waiting = [*tasks.values(), *([router] if router else [])]
        done, late = await asyncio.wait(waiting, timeout=DEADLINE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        found = {name: facts for name, task in tasks.items() if task in done and (facts := task.result())}
        self._forget()
        return Facts(engines=found, routable=router.result() if router in done and router is not None else None)

    def _forget(self) -> None:
        limit = asyncio.get_running_loop().time() - 10 * KEPT_S
        self._known = {uid: entry for uid, entry in self._known.items() if entry[0] > limit}

    async def _engine(self, pod: Pod, *, load: bool) -> EngineFacts | None:
        now = asyncio.get_running_loop().time()
        if (known := self._known.get(pod.uid)) and now - known[0] < KEPT_S:
            return known[1]
        info = await self._json(f"http://{_host(pod.ip)}:{ENGINE_PORT}/info", pod)
        if info is None:
            return None
        metrics = await self._text(f"http://{_host(pod.ip)}:{ENGINE_PORT}/metrics", pod) if load else ""
        try:
            facts = engine_facts(info, metrics or "")
        except (KeyError, TypeError, ValueError) as error:
            _log.warning("pod %s: /info is not understood: %s: %s", pod.name, type(error).__name__, error)
            return None
        self._known[pod.uid] = (now, facts)
        return facts

    async def _routable(self, pod: Pod) -> dict[str, bool] | None:
        info = await self._json(f"http://{_host(pod.ip)}:{ROUTER_PORT}/info", pod)
        if info is None or not isinstance(info.get("engines"), list):
            return None
        return routable(info["engines"])

    async def _json(self, url: str, pod: Pod) -> dict[str, Any] | None:
        text = await self._text(url, pod)
        if not text:
            return None
        try:
            found = json.loads(text)
        except ValueError:
            _log.warning("pod %s: %s is not JSON", pod.name, url)
            return None
        return found if isinstance(found, dict) else None

    async def _text(self, url: str, pod: Pod) -> str | None:
        assert self._session is not None
        try:
            async with self._slots, self._session.get(url) as answer:
                if answer.status != 200:
                    _log.debug("pod %s: %s answered HTTP %d", pod.name, url, answer.status)
                    return None
                return await answer.text()
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            _log.debug("pod %s: %s: %s: %s", pod.name, url, type(error).__name__, error)
            return None


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def engine_facts(info: Mapping[str, Any], metrics: str = "") -> EngineFacts:
    """The answer of an engine's /info; KeyError, TypeError or ValueError if it is malformed."""
    kv, transfer = info["kv"], info["transfer"]
    return EngineFacts(
        fingerprint=str(info["fingerprint"]),
        model=str(info["model"]),
        transfer_mode=str(transfer["mode"]),
        transport=str(transfer["transport"]),
        probed_gbps=float(transfer["probed_gbps"]),
        transfer_ready=bool(transfer["ready"]),
        transfer_reason=str(transfer["reason"]),
        physical_blocks=int(kv["physical_blocks"]),
        usable_blocks=int(kv["usable_blocks"]),
        bytes_per_block=int(kv["bytes_per_block"]),
        max_model_len=int(kv["max_model_len"]),
        queued=float(info.get("waiting", 0)),
        kv_usage=_sample(metrics, "vllm:kv_cache_usage_perc"),
    )


def routable(engines: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """Pod address -> whether the router may choose it, from a router's /info."""
    out = {}
    for engine in engines:
        host = str(engine.get("url", "")).partition("//")[2].rpartition(":")[0].strip("[]")
        if host:
            out[host] = not engine.get("reason")
    return out


def _sample(metrics: str, name: str) -> float:
    """The sum of a metric's samples in the Prometheus text format; 0 for none."""
    values = [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(value) for value in values)
