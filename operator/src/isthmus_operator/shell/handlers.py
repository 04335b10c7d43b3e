"""`run`, which puts an operator together: watches that wake the queue, and the webhook.

Every change wakes one level-based reconcile (controller.py) through one queue. kopf serves the webhook and does no
more: as an informer it keeps every object as Python dictionaries, and each of them twice while it starts.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import kopf

from ..api.reasons import Reason
from ..api.v1alpha1 import API_VERSION, GROUP, PLURAL, VERSION
from ..errors import ApiError, InvalidSpec, Refused, UserError
from ..plan.admission import admit
from ..render.names import SERVICE_LABEL, Defaults
from .cache import Cache, Key
from .certificates import Certificates
from .client import Api, connect
from .controller import Controller
from .facts import FactReader
from .informer import Informer, Kind
from .known_facts import KnownFacts
from .leader import LeaseSettings, lead
from .telemetry import Metrics, serve
from .workqueue import Pauses, WorkQueue

_log = logging.getLogger(__name__)

WATCHED = (
    Kind(GROUP, VERSION, PLURAL),
    Kind("apps", "v1", "deployments", SERVICE_LABEL),
    Kind("apps", "v1", "statefulsets", SERVICE_LABEL),
    Kind("", "v1", "services", SERVICE_LABEL),
    Kind("", "v1", "pods", SERVICE_LABEL),
    Kind("policy", "v1", "poddisruptionbudgets", SERVICE_LABEL),
    Kind("networking.k8s.io", "v1", "networkpolicies", SERVICE_LABEL),
    Kind(GROUP, VERSION, "rolescalers", SERVICE_LABEL),
)
WORKERS = 8
WEBHOOK_HOST = "0.0.0.0"
NEVER_S = 1e9
RIGHTS_S = 20.0
"""How long rights and CRDs may take to come into force after they were given, or after the API server has begun."""
MOST_PAUSE_S = 5.0
"""Between two looks for the API server at the start: until it is found, nobody validates specs."""
SILENT_S = 600.0
"""A watch that the API server has not answered for so long may do better in a new process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOptions:
    """namespaces: those to look after; empty: all. lease: None works without one. webhook_port 0: no webhook.
    metrics_port 0: any free one."""

    namespaces: tuple[str, ...] = ()
    kubeconfig: str = ""
    lease: LeaseSettings | None = None
    defaults: Defaults = field(default_factory=Defaults)
    webhook_port: int = 0
    webhook_cert_dir: str = ""
    metrics_host: str = "0.0.0.0"
    metrics_port: int = 9090
    pauses: Pauses = field(default_factory=Pauses)


class _Operator:
    """The parts, wired."""

    def __init__(self, api: Api, options: OperatorOptions) -> None:
        self.options = options
        self.metrics = Metrics()
        self.queue = WorkQueue(self._work, failed=self._failed, pauses=options.pauses)
        self.cache = Cache(self.queue.add, partial(self.queue.add, anew=True), self._removed)
        self.facts = KnownFacts(FactReader(), self.queue.add)
        self.controller = Controller(
            api=api, cache=self.cache, facts=self.facts, defaults=options.defaults, metrics=self.metrics
        )
        self.informers = [
            Informer(api, kind, namespace, self.cache, clock=asyncio.get_running_loop().time)
            for kind in WATCHED
            for namespace in options.namespaces or ("",)
        ]
        self.stopping = asyncio.Event()
        self._troubled: set[Key] = set()

    async def _work(self, key: Key) -> float | None:
        try:
            with self.metrics.seconds.time():
                after = await self.controller.reconcile(key)
        except Refused:
            # The status says it.
            raise
        except ApiError as error:
            if key not in self._troubled:
                self._troubled.add(key)
                await self.controller.complain(key, Reason.RECONCILE_FAILED, str(error))
            raise
        self._troubled.discard(key)
        self.metrics.reconciles.labels("done").inc()
        self._count()
        return after

    def _failed(self, key: Key, error: Exception) -> None:
        self.metrics.reconciles.labels("failed").inc()
        # A refusal of the API server is explained by its message; anything else is a defect and needs its place.
        expected = isinstance(error, ApiError)
        _log.error("%s/%s: %s", *key, error, exc_info=None if expected else error)

    def _count(self) -> None:
        ready, others = self.cache.counts()
        self.metrics.services.labels("true").set(ready)
        self.metrics.services.labels("false").set(others)
        self.metrics.queue.set(len(self.queue))

    def _removed(self, key: Key) -> None:
        self.queue.remove(key)
        self.facts.forget(key)
        self.controller.contests.forget(key)
        self._count()

    async def watch(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self.informers:
                group.create_task(informer.run())

    async def work(self) -> None:
        """Until cancelled; from when all that there is has been seen. Called anew whenever the lease was won back."""
        self.metrics.leader.set(1)
        try:
            # What another operator has done until now must be known, and a watch may be behind without knowing it.
            for informer in self.informers:
                informer.relist()
            for informer in self.informers:
                await informer.listed.wait()
            await self.queue.run(WORKERS)
        finally:
            self.metrics.leader.set(0)

    def catch_signals(self) -> None:
        """SIGTERM and SIGINT end us in our order."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)

    def unready(self) -> str:
        """Why /readyz fails; empty when it does not."""
        waiting = [str(informer) for informer in self.informers if not informer.listed.is_set()]
        return f"not watching yet: {', '.join(waiting)}" if waiting else self.deaf()

    def deaf(self) -> str:
        """Why /healthz fails; empty when it does not."""
        now = asyncio.get_running_loop().time()
        silent = [str(informer) for informer in self.informers if now - informer.heard > SILENT_S]
        return f"no answer for {SILENT_S:.0f} s: watch of {', '.join(silent)}" if silent else ""

    # ------------------------------------------------------------------------------------------------------ webhook

    def registry(self) -> kopf.OperatorRegistry:
        """What kopf is to do."""
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self._login)
        kopf.on.validate(GROUP, VERSION, PLURAL, id="validate", registry=registry)(validate)
        return registry

    def settings(self) -> kopf.OperatorSettings:
        """Bounded waits, no posts of its own, and no rights to look for kinds or namespaces."""
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.networking.request_timeout = 30
        settings.networking.connect_timeout = 10
        settings.admission.managed = None
        settings.admission.server = webhook_server(self.options)
        return settings

    async def _login(self, **kwargs: Any) -> kopf.ConnectionInfo:
        """The same cluster, as the same user, as our own client."""
        return kopf.ConnectionInfo(**await self.controller.api.credentials())


async def validate(body: kopf.Body, **_: Any) -> None:
    """Admission: refuses a spec with all its problems at once, with their field paths."""
    try:
        admit(dict(body))
    except InvalidSpec as error:
        raise kopf.AdmissionError(str(error), code=422) from None


def webhook_server(options: OperatorOptions) -> kopf.WebhookServer:
    """Serves the webhook, and each renewed certificate from the first connection after it was written.

    UserError where the certificate cannot be used.
    """
    certificates = Certificates(options.webhook_cert_dir)
    return kopf.WebhookServer(
        addr=WEBHOOK_HOST,
        port=options.webhook_port,
        context=certificates.context,
        # kopf loads them once more at its start. Its own look at the files would stop and start the server.
        certfile=certificates.certificate,
        pkeyfile=certificates.key,
        file_check_interval=NEVER_S,
    )


async def run(options: OperatorOptions) -> None:
    """Be an operator until a signal ends it. UserError and ApiError say what keeps it from starting; an API server that
    does not answer does not: it is waited for."""
    _require_port("--metrics-port", options.metrics_host, options.metrics_port)
    _require_port("--webhook-port", WEBHOOK_HOST, options.webhook_port)
    api = await connect(options.kubeconfig)
    try:
        operator = _Operator(api, options)
        operator.catch_signals()
        try:
            host, port = options.metrics_host, options.metrics_port
            async with serve(operator.metrics, host, port, healthy=operator.deaf, ready=operator.unready) as bound:
                _log.info("metrics on port %d; watching %s", bound, ", ".join(options.namespaces) or "all namespaces")
                if await _unless_stopped(operator, _require_cluster(api, options.namespaces)):
                    await _until_stopped(api, operator)
        finally:
            await operator.facts.close()
    finally:
        await api.close()


async def _unless_stopped(operator: _Operator, work: Coroutine[Any, Any, None]) -> bool:
    """Whether `work` ended before a signal came; the signal cancels it."""
    tasks = [asyncio.create_task(work), asyncio.create_task(operator.stopping.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    (ended, _) = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(ended, Exception):
        raise ended
    return ended is None


async def _until_stopped(api: Api, operator: _Operator) -> None:
    """Our own tasks end before kopf's, as kopf cancels every task of the loop that it does not know when it ends."""
    options, stop = operator.options, asyncio.Event()
    leading = asyncio.ensure_future(lead(api, options.lease, operator.work) if options.lease else operator.work())
    ours = [leading, asyncio.create_task(operator.watch())]
    signalled = asyncio.create_task(operator.stopping.wait())
    serving: list[asyncio.Task[None]] = []
    if options.webhook_port:
        others = asyncio.all_tasks()
        # Else kopf asks for the name of the user, and the user of a restricted pod has none. Its type is not exported.
        name: Any = "isthmus-operator"
        tasks = await kopf.spawn_tasks(
            identity=name,
            registry=operator.registry(),
            settings=operator.settings(),
            standalone=True,
            clusterwide=not options.namespaces,
            namespaces=list(options.namespaces),
            stop_flag=stop,
        )
        serving.append(asyncio.create_task(kopf.run_tasks(tasks, ignored=others)))
    # Only now, as kopf has set handlers of its own.
    operator.catch_signals()
    await asyncio.wait([*ours, signalled, *serving], return_when=asyncio.FIRST_COMPLETED)
    for task in ours:
        task.cancel()
    ended = await asyncio.gather(*ours, return_exceptions=True)
    stop.set()
    signalled.cancel()
    await asyncio.gather(*serving)
    for error in ended:
        if isinstance(error, Exception):
            raise error


def _require_port(flag: str, host: str, port: int) -> None:
    """Before anything is started: kopf would tell of a port in use by a traceback. Port 0 is any free one, or none."""
    if not port:
        return
    try:
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise UserError(
            f"{flag} {port}: cannot listen on {host} port {port}: {error.strerror}; give another"
        ) from error


async def _require_cluster(api: Api, namespaces: tuple[str, ...]) -> None:
    """Return when the API server answers, knows our kinds and lets us read what we watch.

    UserError or ApiError where it goes on answering that it does not.
    """
    loop = asyncio.get_running_loop()
    refused: float | None = None
    pause = 1.0
    while True:
        try:
            await _require_kinds(api)
            await _require_rights(api, namespaces)
            return
        except (UserError, ApiError) as error:
            if isinstance(error, ApiError) and (error.status in (0, 429) or error.status >= 500):
                refused = None
            else:
                refused = refused or loop.time()
                if loop.time() - refused > RIGHTS_S:
                    raise
            # An API server that has just started itself answers so for a moment.
            (_log.info if pause < 4 else _log.warning)("cannot start yet: %s", error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, MOST_PAUSE_S)


async def _require_kinds(api: Api) -> None:
    found = await api.find(f"/apis/{API_VERSION}")
    kinds = {resource["name"] for resource in (found or {}).get("resources", ())}
    missing = [name for name in (PLURAL, "rolescalers") if name not in kinds]
    if missing:
        raise UserError(f"the API server does not know {', '.join(missing)} of {API_VERSION}; apply the files of crds/")


async def _require_rights(api: Api, namespaces: tuple[str, ...]) -> None:
    """A watch without the right to it would leave the operator deaf."""
    refused = []
    for kind in WATCHED:
        for namespace in namespaces or ("",):
            try:
                await api.get(kind.path(namespace), limit="1", labelSelector=SERVICE_LABEL)
            except ApiError as error:
                if error.status not in (401, 403, 404):
                    raise
                refused.append(str(error))
    if refused:
        raise ApiError(403, f"cannot read what it looks after: {'; '.join(refused)}; see operator/docs/rbac.md")
