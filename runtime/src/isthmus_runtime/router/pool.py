"""The live engines: found by name resolution, asked for /info and /ready, dropped on the first failed contact."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp
from pydantic import ValidationError

from ..config import RouterConfig
from ..credentials import Credentials
from ..metrics import RouterMetrics
from ..protocol.info import EngineInfo
from ..request import GENERATES, AdapterName
from .kv_events import follow
from .own_time import OwnTime
from .patience import Patience
from .policy import Fleet, Load, fleet
from .prefixes import Prefixes, StoredBlocks
from .remote_engine import EngineStatus, EngineView, FleetRole, Hold, RemoteEngine
from .resolving import Resolve, engine_url, resolve_all

_log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 2.0
_RESOLVE_TIMEOUT_S = 5.0
_DEAD_AFTER_S = 5.0
"""An engine that says nothing for this long, to a probe or of a request, is dead, whatever its connections look like (a
stopped process). Time in which this process stood still is not counted."""
_LATE = "no answer in time"
_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 1.0


class EnginePool:
    """Keeps the fleet up to date in the background. `fleet` and `loads` are what the policy reads."""

    def __init__(
        self,
        config: RouterConfig,
        session: aiohttp.ClientSession,
        *,
        metrics: RouterMetrics | None = None,
        resolve: Resolve = resolve_all,
        dead_after_s: float = _DEAD_AFTER_S,
        on_gone: Callable[[str], None] | None = None,
        prefixes: Prefixes | None = None,
        credentials: Credentials | None = None,
        vocabulary: str = "",
    ) -> None:
        """`on_gone(url)` is called when an engine is neither listed nor in use any more. `prefixes` is told of lost
        engines and, where it can follow them, fed with their KV events. `vocabulary`: of the router's tokenizer;
        engines that tell another take no requests."""
        self._vocabulary = vocabulary
        self._prefixes = prefixes
        self._credentials = credentials
        self._session = session
        self._on_gone = on_gone
        self._interval = config.discovery_interval_s
        self._metrics = metrics
        self._resolve = resolve
        self._dead_after = dead_after_s
        self._own = OwnTime()
        roles: tuple[tuple[FleetRole, tuple[str, ...]], ...] = (
            ("prefill", config.prefill),
            ("decode", config.decode),
            ("unified", config.worker),
        )
        self._addresses: tuple[tuple[FleetRole, str], ...] = tuple((r, a) for r, group in roles for a in group)
        self._unified = bool(config.worker)
        self._engines: dict[str, RemoteEngine] = {}
        self._of_address: dict[str, set[str]] = {}
        self._asked: set[str] = set()
        self._loads: dict[str, Load] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.fleet = Fleet(unified=self._unified)
        """Engines that take new requests now."""
        self.adapters: Mapping[str, AdapterName] = {}
        """Low-rank adapters that requests may ask for: of engines that are there, or were last."""
        self.failure = ""
        """Why engines are no longer looked for or after; empty while they are."""
        self.max_model_len = 0
        """The shortest limit of the engines that generate; 0: none is known."""
        self.task = GENERATES
        """What the engines serve their model for; meaningful once one is known."""

    @property
    def loads(self) -> Mapping[str, Load]:
        """Outstanding work by engine URL."""
        return self._loads

    @property
    def roles(self) -> list[FleetRole]:
        """Those of the service, in the order of a request's way."""
        return list(dict.fromkeys(role for role, _ in self._addresses))

    @property
    def expecting(self) -> bool:
        """Whether an engine is listed that takes no requests yet, or not at present."""
        return any(e.listed and not e.routable for e in self._engines.values())

    @property
    def complete(self) -> bool:
        """Whether every address has been looked up at least once."""
        return len(self._asked) == len({address for _, address in self._addresses})

    def start(self) -> None:
        """Begin discovery and probing."""
        self._spawn(self._own.run())
        for role, address in self._addresses:
            self._spawn(self._discover(role, address))

    async def close(self) -> None:
        """Stop all background work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def changed(self) -> None:
        """Returns after the next change of the fleet."""
        await self._changed.wait()

    def hold(self, url: str, tokens: int, on_lost: Callable[[str], None]) -> Hold:
        """Count a request at the engine until `release`; `on_lost` is called once if the engine dies meanwhile."""
        return self._engines[url].hold(tokens, on_lost)

    def has_room(self, url: str, tokens: int) -> bool:
        """Whether the engine will reserve for `tokens` more at once, as `policy.has_room` means it."""
        engine = self._engines.get(url)
        return engine is not None and engine.has_room(tokens)

    def failed(self, url: str, problem: str) -> None:
        """A contact failed: no new requests until a probe succeeds."""
        engine = self._engines.get(url)
        if engine is not None and not engine.problem:
            engine.problem = problem
            engine.failures = 1
            engine.wake.set()
            _log.warning("%s %s: %s", engine.role, url, problem)
            self._forget(engine)
            self._rebuild()

    async def ask_again(self, url: str = "") -> None:
        """Probe every engine, or that one, since what they have was changed; returns when that is known here, or after
        as long as a probe may take."""
        # One that has begun may have been answered before the change.
        wanted = [(engine, engine.probes + 1) for engine in self._engines.values() if url in ("", engine.url)]
        for engine, _ in wanted:
            engine.wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                for engine, number in wanted:
                    async with engine.probed:
                        await engine.probed.wait_for(partial(engine.has_answered, number))

    def statuses(self) -> list[EngineStatus]:
        """Every known engine."""
        return [
            EngineStatus(
                url=e.url,
                role=e.role,
                state=self._state(e),
                reason=e.problem,
                requests=len(e.holds),
                fingerprint=e.info.fingerprint if e.info else "",
                other_tokenizer=self._vocabulary != "" and e.tells_another(self._vocabulary),
            )
            for e in self._engines.values()
        ]

    def views(self) -> list[EngineView]:
        """Every listed engine as of its last probe."""
        now = asyncio.get_running_loop().time()
        return [
            EngineView(e.role, e.routable, e.info, e.rates.tokens_per_s(now), e.rates.sent_bytes_per_s(now))
            for e in self._engines.values()
            if e.listed
        ]

    # --------------------------------------------------------------------------------------------------- discovery

    async def _discover(self, role: FleetRole, address: str) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        problem = ""
        while True:
            try:
                async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                    found = await self._resolve(host, int(port))
            except (OSError, TimeoutError) as e:
                # The resolver cannot tell: what is known stays, the probes judge it. For a name without pods, this is
                # also what resolvers say in a cluster whose DNS reaches no other.
                before, problem = problem, str(e) or "no answer in time"
                level = logging.DEBUG if problem == before else logging.WARNING
                _log.log(level, "cannot resolve %s (%s): %s", host, role, problem)
            else:
                problem = ""
                self._update(role, address, {engine_url(ip, port) for ip in found})
            self._asked.add(address)
            await asyncio.sleep(self._interval)

    def _update(self, role: FleetRole, address: str, urls: set[str]) -> None:
        before = self._of_address.get(address, set())
        self._of_address[address] = urls
        if urls == before:
            return
        elsewhere = set[str]().union(*(found for other, found in self._of_address.items() if other != address))
        for url in before - urls - elsewhere:
            if (gone := self._engines.get(url)) is not None:
                gone.listed = False
                gone.wake.set()
        for url in urls - before:
            if (known := self._engines.get(url)) is not None:
                known.listed = True
                known.wake.set()
                continue
            engine = self._engines[url] = RemoteEngine(url, role, self._loads, self._own)
            self._spawn(self._watch(engine))
        self._rebuild()

    # ----------------------------------------------------------------------------------------------------- probing

    async def _watch(self, engine: RemoteEngine) -> None:
        """Probe one engine until it is neither listed nor in use."""
        while engine.listed or engine.holds:
            engine.wake.clear()  # whoever sets it from now on wants another probe than this
            engine.probes += 1
            problem = await self._probe(engine)
            engine.failures = engine.failures + 1 if problem else 0
            if problem == _LATE and engine.routable and engine.silent_s < self._dead_after:
                problem = ""  # a busy node answers late; a closed or refused connection would have said more
            engine.has_served |= not problem
            if problem != engine.problem:
                level = logging.WARNING if problem else logging.INFO
                _log.log(level, "%s %s: %s", engine.role, engine.url, problem or "takes requests")
                engine.problem = problem
            self._check_alive(engine)
            if engine.known() != engine.shown:
                self._rebuild()
            self._follow(engine)
            await engine.tell_probed()
            try:
                async with asyncio.timeout(self._pause(engine)):
                    await engine.wake.wait()
            except TimeoutError:
                continue
        del self._engines[engine.url]
        self._loads.pop(engine.url, None)
        self._forget(engine)
        if self._on_gone is not None:
            self._on_gone(engine.url)
        self._rebuild()

    def _pause(self, engine: RemoteEngine) -> float:
        if engine.holds or not engine.failures:
            return min(self._interval, self._dead_after / 4) if engine.holds else self._interval
        return min(_FIRST_BACKOFF_S * 2.0 ** (engine.failures - 1), _LAST_BACKOFF_S)

    async def _probe(self, engine: RemoteEngine) -> str:
        """Ask the engine; returns why it takes no requests."""
        patience_s = min(_PROBE_TIMEOUT_S, self._dead_after / 2)
        try:
            async with Patience(patience_s), self._session.get(engine.url + "/info") as answer:
                body = await answer.read()
                at = asyncio.get_running_loop().time()
                engine.heard()
                if answer.status != 200:
                    return f"/info answered HTTP {answer.status}"
                info = EngineInfo.model_validate_json(body)
            async with Patience(patience_s), self._session.get(engine.url + "/ready") as answer:
                ready = answer.status == 200
                text = (await answer.text(errors="replace"))[:200]
        except TimeoutError:
            return _LATE
        except (aiohttp.ClientError, OSError) as e:
            return f"no answer: {str(e) or type(e).__name__}"
        except ValidationError as e:
            return f"/info is not understood: {e.error_count()} problems, first {e.errors()[0]['loc']}"
        if engine.info is not None and engine.info.transfer.epoch != info.transfer.epoch:
            self._forget(engine)
        engine.info = info
        engine.rates.add(at, info.transfer.epoch, info.load)
        if info.role != engine.role:
            return f"is a {info.role} engine, but is listed as {engine.role}"
        if problem := self._foreign(engine):
            return problem
        if info.draining:
            return "draining"
        if not ready:
            return f"not ready: {text}"
        if not info.transfer.ready and engine.role == "prefill":
            return f"transfer not ready: {info.transfer.reason}"
        return ""

    def _foreign(self, engine: RemoteEngine) -> str:
        """Why this router's ids are, or may be, other words there; empty: they are not, or that cannot be told. An
        engine that does not tell (of an older version, or without a tokenizer in its model's folder) takes requests as
        long as no other of its role that is listed, and has served, tells that it is the router's."""
        own = self._vocabulary
        if not own or engine.tells(own):
            return ""
        if engine.tells_another(own):
            return "its model has another tokenizer than this router's: ids would be other words there"
        others = (one for one in self._engines.values() if one.listed and one.role == engine.role)
        if any(one.has_served and one.tells(own) for one in others):
            return "it does not tell which tokenizer its model has, and others tell that theirs is this router's"
        return ""

    # --------------------------------------------------------------------------------------------------- KV caches

    def _follow(self, engine: RemoteEngine) -> None:
        """Read the engine's KV events, unless that is done or impossible. Called after each probe."""
        blocks = self._prefixes
        if isinstance(blocks, StoredBlocks) and engine.follower is None and engine.routable and engine.has_events:
            engine.follower = self._spawn(self._read_events(engine, blocks))

    async def _read_events(self, engine: RemoteEngine, blocks: StoredBlocks) -> None:
        try:
            engine.has_events = await follow(self._session, engine.url, blocks, self._credentials)
        finally:
            engine.follower = None
        if not engine.has_events:
            _log.info("%s %s: has no KV events (prefix caching is off)", engine.role, engine.url)

    def _forget(self, engine: RemoteEngine) -> None:
        """The engine was lost or started anew."""
        engine.has_events = True
        if engine.follower is not None:
            engine.follower.cancel()
        if self._prefixes is not None:
            self._prefixes.forget(engine.url)

    def _check_alive(self, engine: RemoteEngine) -> None:
        silent = engine.silent_s
        # One probe alone may have failed because this process stood still, and the silence be its own.
        if engine.holds and silent >= self._dead_after and engine.failures > 1:
            _log.error("%s %s: silent for %.1f s, its requests end", engine.role, engine.url, silent)
            for hold in tuple(engine.holds):
                hold.lose(f"it answered nothing for {silent:.1f} s")

    def _rebuild(self) -> None:
        for engine in self._engines.values():
            engine.shown = engine.known()
        able = [e for e in self._engines.values() if e.routable]
        generate = [e for e in able if e.role != "prefill"]
        self.fleet = fleet(
            (e.endpoint() for e in able if e.role == "prefill"),
            (e.endpoint() for e in generate),
            unified=self._unified,
        )
        # Of those that are away for a while as well, where no other has one of that name: "no such model" would be the
        # last word to most clients. What a name stands for, those decide that can answer.
        here = [e.info for e in generate if e.info is not None]
        away = [
            e.info
            for e in self._engines.values()
            if e.listed and not e.routable and e.role != "prefill" and e.info is not None and not self._foreign(e)
        ]
        if here or away:
            self.adapters = {**_adapters(away), **_adapters(here)}
        limits = [e.info.kv.max_model_len for e in generate if e.info is not None]
        self.max_model_len = min(limits, default=self.max_model_len)
        self.task = next((e.info.task for e in generate if e.info is not None), self.task)
        self._changed.set()
        self._changed = asyncio.Event()
        if self._metrics is not None:
            counts: dict[tuple[str, str], int] = {
                (r, s): 0 for r, _ in self._addresses for s in ("ready", "unready", "leaving")
            }
            for engine in self._engines.values():
                counts[engine.role, self._state(engine)] += 1
            for (role, state), count in counts.items():
                self._metrics.endpoints(role, state, count)

    @staticmethod
    def _state(engine: RemoteEngine) -> str:
        return "ready" if engine.routable else "unready" if engine.listed else "leaving"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("engine discovery has stopped", exc_info=error)
            self.failure = f"engine discovery has stopped: {type(error).__name__}: {error}"


def _adapters(infos: Iterable[EngineInfo]) -> dict[str, AdapterName]:
    """By name. Where engines have different ones of a name, as while one is replaced, that which most have."""
    counts = Counter((adapter.name, adapter.digest) for info in infos for adapter in info.adapters)
    found: dict[str, AdapterName] = {}
    for (name, digest), _ in sorted(counts.items(), key=lambda one: (-one[1], one[0])):
        found.setdefault(name, AdapterName(name, digest))
    return found
