"""kopf glue: watches that wake the queue, the webhook, and `run`, which puts an operator together.

kopf only watches and serves. It stores nothing in objects, adds no finalizer, and decides nothing: every event wakes
one level-based reconcile (controller.py) through one queue.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import kopf

from .api.v1alpha1 import API_VERSION, GROUP, PLURAL, VERSION, parse
from .cache import Cache, Key
from .client import Api, connect
from .controller import Controller
from .errors import ApiError, InvalidSpec, UserError
from .facts import FactReader
from .leader import LeaseSettings, lead
from .reasons import Reason
from .render.names import SERVICE_LABEL, Defaults
from .telemetry import Metrics, serve
from .workqueue import Pauses, WorkQueue

_log = logging.getLogger(__name__)

WATCHED = (
    ("apps", "v1", "deployments"),
    ("apps", "v1", "statefulsets"),
    ("", "v1", "services"),
    ("", "v1", "pods"),
    ("policy", "v1", "poddisruptionbudgets"),
    ("networking.k8s.io", "v1", "networkpolicies"),
    (GROUP, VERSION, "rolescalers"),
)
WORKERS = 4
RIGHTS_S = 20.0
"""How long rights may take to come into force after they were given."""


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
        self.cache = Cache()
        self.facts = FactReader()
        self.controller = Controller(
            api=api, cache=self.cache, facts=self.facts, defaults=options.defaults, metrics=self.metrics
        )
        self.queue = WorkQueue(self._work, failed=self._failed, pauses=options.pauses)
        self.watching = asyncio.Event()
        self.stopping = asyncio.Event()
        self._troubled: set[Key] = set()
        self._watches = 0
        self.registry = kopf.OperatorRegistry()
        self._register()

    async def _work(self, key: Key) -> float | None:
        try:
            with self.metrics.seconds.time():
                after = await self.controller.reconcile(key)
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
        found = self.cache.every()
        ready = sum(
            any(c["type"] == "Ready" and c["status"] == "True" for c in (one.get("status") or {}).get("conditions", ()))
            for one in found
        )
        self.metrics.services.labels("true").set(ready)
        self.metrics.services.labels("false").set(len(found) - ready)
        self.metrics.queue.set(len(self.queue))

    # ------------------------------------------------------------------------------------------------------ kopf

    def _register(self) -> None:
        kopf.on.startup(registry=self.registry)(self._startup)
        kopf.on.login(registry=self.registry)(self._login)
        kopf.index(GROUP, VERSION, PLURAL, id=PLURAL, registry=self.registry)(_index_service)
        kopf.on.event(GROUP, VERSION, PLURAL, id=f"wake-{PLURAL}", registry=self.registry)(self._service_changed)
        for group, version, plural in WATCHED:
            kopf.index(group, version, plural, id=plural, registry=self.registry)(_index_child)
            kopf.on.event(group, version, plural, id=f"wake-{plural}", registry=self.registry)(self._child_changed)
        if self.options.webhook_port:
            kopf.on.validate(GROUP, VERSION, PLURAL, id="validate", registry=self.registry)(validate)

    def settings(self) -> kopf.OperatorSettings:
        """Bounded waits everywhere, no posts of its own, and only labelled objects over the wire."""
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.watching.server_timeout = 300
        settings.watching.client_timeout = 330
        settings.watching.connect_timeout = 10
        settings.networking.request_timeout = 30
        settings.networking.connect_timeout = 10
        settings.admission.managed = None
        for group, version, plural in WATCHED:
            settings.watching.label_selectors[group, version, plural] = SERVICE_LABEL
        if self.options.webhook_port:
            folder = self.options.webhook_cert_dir
            settings.admission.server = kopf.WebhookServer(
                addr="0.0.0.0",
                port=self.options.webhook_port,
                certfile=f"{folder}/tls.crt",
                pkeyfile=f"{folder}/tls.key",
            )
        return settings

    async def _startup(self, **kwargs: Any) -> None:
        self.cache.services = kwargs[PLURAL]
        self.cache.indexes = {plural: kwargs[plural] for _, _, plural in WATCHED}
        self.watching.set()

    def catch_signals(self) -> None:
        """SIGTERM and SIGINT end us in our order."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)

    def unready(self) -> str:
        """Why /readyz fails; empty when it does not."""
        return self.deaf() if self.watching.is_set() else "not watching yet"

    def deaf(self) -> str:
        """kopf does not start a watch again that has failed for good: then only a new process hears anything."""
        if not self.watching.is_set():
            return ""
        alive = sum(task.get_name().startswith("watcher for ") for task in asyncio.all_tasks())
        self._watches = max(self._watches, alive)
        return f"{self._watches - alive} of {self._watches} watches have ended" if alive < self._watches else ""

    async def _login(self, **kwargs: Any) -> kopf.ConnectionInfo:
        """The same cluster, as the same user, as our own client."""
        return kopf.ConnectionInfo(**await self.controller.api.credentials())

    async def _service_changed(self, event: Mapping[str, Any], namespace: str | None, name: str, **_: Any) -> None:
        assert namespace is not None, "namespaced kind"
        if event["type"] == "DELETED":
            self.queue.remove((namespace, name))
            self.cache.forget((namespace, name))
            self._count()
        else:
            self.queue.add((namespace, name))

    async def _child_changed(
        self, event: Mapping[str, Any], body: kopf.Body, namespace: str | None, labels: Mapping[str, str], **_: Any
    ) -> None:
        key = (namespace or "", labels.get(SERVICE_LABEL, ""))
        if event["type"] == "DELETED":
            self.cache.gone(key, body)
        if key in self.cache.services:
            self.queue.add(key)


async def _index_service(body: kopf.Body, namespace: str | None, name: str, **_: Any) -> dict[Key, dict[str, Any]]:
    return {(namespace or "", name): dict(body)}


async def _index_child(body: kopf.Body, namespace: str | None, labels: Mapping[str, str], **_: Any) -> dict[Key, Any]:
    kept = dict(body)
    if kept.get("kind") == "Pod":
        # Half of a pod's size, and we never write pods.
        kept["metadata"] = {key: value for key, value in kept["metadata"].items() if key != "managedFields"}
    return {(namespace or "", labels.get(SERVICE_LABEL, "")): kept}


async def validate(body: kopf.Body, **_: Any) -> None:
    """Admission: refuses a spec with all its problems at once, with their field paths."""
    try:
        parse(dict(body))
    except InvalidSpec as error:
        raise kopf.AdmissionError(str(error), code=422) from None


async def run(options: OperatorOptions) -> None:
    """Be an operator until a signal or a lost lease ends it. UserError and ApiError say what keeps it from starting."""
    api = await connect(options.kubeconfig)
    try:
        await _require_api(api)
        await _require_rights(api, options.namespaces)
        operator = _Operator(api, options)
        try:
            host, port = options.metrics_host, options.metrics_port
            async with serve(operator.metrics, host, port, healthy=operator.deaf, ready=operator.unready) as bound:
                _log.info("metrics on port %d; watching %s", bound, ", ".join(options.namespaces) or "all namespaces")
                await _until_stopped(api, operator)
        finally:
            await operator.facts.close()
    finally:
        await api.close()


async def _until_stopped(api: Api, operator: _Operator) -> None:
    """Our own tasks end before kopf's, as kopf cancels every task of the loop that it does not know when it ends."""
    options, stop = operator.options, asyncio.Event()

    async def work() -> None:
        operator.metrics.leader.set(1)
        await operator.watching.wait()
        await operator.queue.run(WORKERS)

    others = asyncio.all_tasks()
    # Else kopf asks for the name of the user, and the user of a restricted pod has none. Its type is not exported.
    name: Any = "isthmus-operator"
    tasks = await kopf.spawn_tasks(
        identity=name,
        registry=operator.registry,
        settings=operator.settings(),
        standalone=True,
        clusterwide=not options.namespaces,
        namespaces=list(options.namespaces),
        stop_flag=stop,
    )
    # Only now, as kopf has set handlers of its own.
    operator.catch_signals()
    watching = asyncio.create_task(kopf.run_tasks(tasks, ignored=others))
    leading = asyncio.ensure_future(lead(api, options.lease, work) if options.lease else work())
    signalled = asyncio.create_task(operator.stopping.wait())
    await asyncio.wait([watching, leading, signalled], return_when=asyncio.FIRST_COMPLETED)
    if not leading.done():
        leading.cancel()
    ended = await asyncio.gather(leading, return_exceptions=True)
    stop.set()
    signalled.cancel()
    await watching
    if isinstance(ended[0], Exception):
        raise ended[0]


async def _require_api(api: Api) -> None:
    found = await api.find(f"/apis/{API_VERSION}")
    kinds = {resource["name"] for resource in (found or {}).get("resources", ())}
    missing = [name for name in (PLURAL, "rolescalers") if name not in kinds]
    if missing:
        raise UserError(f"the API server does not know {', '.join(missing)} of {API_VERSION}; apply the files of crds/")


async def _require_rights(api: Api, namespaces: tuple[str, ...]) -> None:
    """A watch without the right to it would leave the operator deaf. Rights and CRDs that were made this moment take a
    few seconds."""
    deadline = asyncio.get_running_loop().time() + RIGHTS_S
    while problems := await _unreadable(api, namespaces):
        if asyncio.get_running_loop().time() > deadline:
            raise ApiError(403, f"cannot read what it looks after: {'; '.join(problems)}; see operator/docs/rbac.md")
        await asyncio.sleep(1.0)


async def _unreadable(api: Api, namespaces: tuple[str, ...]) -> list[str]:
    found = []
    for group, version, plural in (*WATCHED, (GROUP, VERSION, PLURAL)):
        for namespace in namespaces or ("",):
            root = f"/apis/{group}/{version}" if group else f"/api/{version}"
            place = f"/namespaces/{namespace}" if namespace else ""
            try:
                await api.get(f"{root}{place}/{plural}", limit="1", labelSelector=SERVICE_LABEL)
            except ApiError as error:
                found.append(str(error))
    return found
