"""The operator's parts, wired: what was watched wakes the queue, whose workers reconcile while the lease is held.

Knows nothing of kopf, which tells it what happens (handlers.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

from ..api.profile import PERMISSIVE, Profile
from ..errors import ApiError, OverBudget, UserError
from ..render.names import Defaults
from .cache import Cache, Key
from .client import Api
from .controller import EVERYWHERE, Controller
from .facts import FactReader
from .issuer import AGAIN_S, find_issuer
from .known_facts import KnownFacts
from .leader import LeaseSettings, lead
from .start import require_cluster
from .telemetry import Metrics, serve, serve_health
from .watched import UNREADABLE, look
from .workqueue import Pauses, WorkQueue

_log = logging.getLogger(__name__)
WORKERS = 7
"""Beside the one for heavy services."""
LOOK_S = 120.0
"""Between two lists of everything: as long may something stay that was deleted while the watches were cut off."""
LOOK_PAUSE_S = 0.02
"""After each page of those lists: nobody waits for them, and reconciles would."""
LAST_WORDS_S = 10.0
"""To tell services, at a start that is refused, that they are not looked after."""
LOOK_AGAIN_S = 3.0
"""After a list that the API server did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOptions:
    """namespaces: those to look after; empty: all. lease: None works without one. webhook_port 0: no webhook.
    metrics_port 0: any free one. health_port 0: no liveness endpoint."""

    namespaces: tuple[str, ...] = ()
    kubeconfig: str = ""
    lease: LeaseSettings | None = None
    defaults: Defaults = field(default_factory=Defaults)
    profile: Profile = PERMISSIVE
    webhook_host: str = "0.0.0.0"
    webhook_port: int = 0
    webhook_cert_dir: str = ""
    metrics_host: str = "0.0.0.0"
    metrics_port: int = 9090
    health_port: int = 8080
    pauses: Pauses = field(default_factory=Pauses)


class Operator:
    """One process. `start` and `stop` frame its work; in between, the watches report to it.

    stopping: set when it cannot go on, `failure` says why; serving: set when the webhook answers; ended: set at the end
    """

    def __init__(self, api: Api, options: OperatorOptions) -> None:
        self.api = api
        self.options = options
        self.metrics = Metrics()
        self.queue = WorkQueue(self._reconcile, failed=self._failed, heavy=self._is_heavy, pauses=options.pauses)
        self.cache = Cache(self.queue.add, partial(self.queue.add, anew=True), self._removed)
        self.facts = KnownFacts(FactReader(), self.queue.add)
        self.controller = Controller(
            api=api,
            cache=self.cache,
            facts=self.facts,
            defaults=options.defaults,
            metrics=self.metrics,
            profile=options.profile,
            clock=partial(Api.now, api),
        )
        self.stopping = asyncio.Event()
        self.serving = asyncio.Event()
        self.ended = asyncio.Event()
        self.failure: BaseException | None = None
        self._admitted = asyncio.Event()
        self._namespaces = options.namespaces or ("",)
        self._leading: asyncio.Task[None] | None = None
        self._open = AsyncExitStack()

    # ----------------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Show metrics, and lead or wait to."""
        options = self.options
        metrics = serve(self.metrics, options.metrics_host, options.metrics_port, unready=self.unready)
        port = await self._open.enter_async_context(metrics)
        if options.health_port:
            await self._open.enter_async_context(serve_health(options.metrics_host, options.health_port))
        _log.info("metrics on port %d; watching %s", port, ", ".join(options.namespaces) or "all namespaces")
        self._leading = asyncio.create_task(self._lead())
        self._leading.add_done_callback(self._ended)

    async def stop(self) -> None:
        """End what `start` began, and give the lease back."""
        self.ended.set()
        if self._leading is not None:
            self._leading.cancel()
            await asyncio.wait((self._leading,))
        await self.facts.close()
        await self._open.aclose()

    async def admit(self) -> dict[str, Any]:
        """The credentials to watch with, as soon as there is a cluster that takes them. Where it goes on refusing them
        the operator ends."""
        try:
            await require_cluster(self.api, self._namespaces)
        except (UserError, ApiError) as error:
            await self._last_words(str(error))
            await self._fail(error)
        self._admitted.set()
        return await self.api.credentials()

    def unready(self) -> str:
        """Why /readyz fails; empty when it does not."""
        if not self._admitted.is_set():
            return "the API server does not let the operator watch yet"
        return "the webhook does not answer yet" if self.options.webhook_port and not self.serving.is_set() else ""

    async def _last_words(self, why: str) -> None:
        """Report in every service's status that no operator manages it, as far as statuses can be read and written."""
        lease = self.options.lease
        if self._leading is not None:
            # It may hold the lease, or be about to: one process is one holder.
            self._leading.cancel()
            await asyncio.wait((self._leading,))

        async def tell() -> None:
            with contextlib.suppress(ApiError):
                await self._look_everywhere(0.0)
            await self._unread({EVERYWHERE: why})

        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await (lead(self.api, lease, tell) if lease else tell())
        except (ApiError, TimeoutError) as error:
            _log.warning("services could not be told: %s", error or "no answer in time")

    async def _unread(self, refused: Mapping[str, str]) -> None:
        """Note in which namespaces something may not be read, and why: their services say so."""
        before, self.controller.unread = self.controller.unread, refused
        for key in self.cache.services():
            why = refused.get(key[0], refused.get(EVERYWHERE, ""))
            if why == before.get(key[0], before.get(EVERYWHERE, "")):
                continue
            if not why:
                self.queue.add(key)
                continue
            try:
                await self.controller.reconcile(key)
            except ApiError as error:
                _log.warning("%s/%s: %s", *key, error)

    async def _fail(self, error: BaseException) -> NoReturn:
        self.failure = error
        self.stopping.set()
        await asyncio.Event().wait()
        raise AssertionError

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.failure = task.exception()
            self.stopping.set()

    async def _lead(self) -> None:
        await self._admitted.wait()
        lease = self.options.lease
        await (lead(self.api, lease, self._work) if lease else self._work())

    async def _work(self) -> None:
        """Until cancelled; from when all that there is has been seen. Called anew whenever the lease was won back."""
        self.metrics.leader.set(1)
        try:
            # What another operator has done until now must be known, and a watch may be behind without knowing it.
            await self._look()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._look_again())
                group.create_task(self._ask_again())
                group.create_task(self.queue.run(WORKERS))
        finally:
            self.metrics.leader.set(0)

    async def _look(self, *, pause: float = 0.0) -> None:
        while True:
            try:
                refused = await self._look_everywhere(pause)
                if len(refused) < len(self._namespaces):
                    await self._ask()
                    return await self._unread(refused)
                await self._unread(refused)
            except ApiError as error:
                _log.warning("cannot list what there is: %s", error)
                if error.status in UNREADABLE:
                    await self._unread({EVERYWHERE: f"cannot read what belongs to it: {error}"})
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _look_everywhere(self, pause: float) -> dict[str, str]:
        """Namespaces that may not be read, and why. Who administers one of several can take the right to it away, and
        not that to the others."""
        refused = {}
        for namespace in self._namespaces:
            try:
                await look(self.api, (namespace,), self.cache, pause=pause)
            except ApiError as error:
                if error.status not in UNREADABLE:
                    raise
                _log.warning("cannot list what there is: %s", error)
                refused[namespace] = f"cannot read what belongs to it: {error}"
        return refused

    async def _ask(self) -> None:
        """Learn whose tokens pods take; services are told where that has changed. ApiError leaves what was known."""
        issuer, defaults = await find_issuer(self.api), self.controller.defaults
        if issuer == defaults.issuer:
            return
        self.controller.defaults = replace(defaults, issuer=issuer)
        if defaults.issuer is not None:
            _log.info("the cluster's keys for ServiceAccount tokens have changed")
            for key in self.cache.services():
                self.queue.add(key)

    async def _ask_again(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            try:
                await self._ask()
            except ApiError as error:
                _log.warning("%s", error)

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look(pause=LOOK_PAUSE_S)

    # ------------------------------------------------------------------------------------------------ one service

    async def _reconcile(self, key: Key) -> float | None:
        try:
            with self.metrics.seconds.time():
                after = await self.controller.reconcile(key)
        finally:
            if key not in self.cache:
                # It was removed meanwhile, and has been noted again since.
                self._forget(key)
        self.metrics.reconciles.labels("done").inc()
        self._count()
        return after

    def _is_heavy(self, key: Key) -> bool:
        return self.controller.is_heavy(key)

    def _failed(self, key: Key, error: Exception) -> None:
        self.metrics.reconciles.labels("failed").inc()
        # A refusal of the API server is explained by its message; anything else is a defect and needs its place.
        expected = isinstance(error, ApiError | OverBudget)
        _log.error("%s/%s: %s", *key, error, exc_info=None if expected else error)

    def _count(self) -> None:
        ready, others = self.cache.counts()
        self.metrics.services.labels("true").set(ready)
        self.metrics.services.labels("false").set(others)
        self.metrics.queue.set(len(self.queue))

    def _removed(self, key: Key) -> None:
        self.queue.remove(key)
        self._forget(key)
        self._count()

    def _forget(self, key: Key) -> None:
        self.facts.forget(key)
        self.controller.contests.forget(key)
