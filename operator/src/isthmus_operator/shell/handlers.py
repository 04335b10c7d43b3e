"""kopf: watches, webhook, login, the order of start and end; and `run`, which is the operator.

Every event of a watch goes to the cache, which wakes one level-based reconcile (controller.py) where something that is
read has changed. Only `on.event`, so that kopf writes nothing: no finalizer, no annotation, no Event.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterator, MutableMapping
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain, repeat
from typing import Any

import aiohttp
import kopf

from ..api.profile import Profile
from ..api.rules import without_effect
from ..api.v1alpha1 import GROUP, PLURAL, VERSION
from ..errors import InvalidSpec, OverBudget
from ..plan.admission import admit
from .budget import Workbench
from .certificates import Certificates
from .client import connect
from .operator import Operator, OperatorOptions
from .start import require_port
from .watched import PAGE, WATCHED
from .webhook import Webhook

NO_FINALIZER = "no finalizer of ours"
"""Which no object can have: Kubernetes takes no spaces. kopf takes its own off whatever is watched and needs none, and
by default that is the one of every operator that is made with it."""
LOGIN_S = 3600.0
"""The credentials are read anew after that: tokens of service accounts change."""
WATCH_S = 240
"""How long the server goes on telling before it ends the answer and is asked again, from the same place."""
SLACK_S = 30.0
"""How much longer than that an answer may take."""
IDLE_S = 0.02
"""How long kopf's worker for an object, and that object's last event with it, waits for a further event."""
WORKERS_PER_KIND = 20
"""With IDLE_S: 1,000 objects a second, so that events do not queue up behind a list, nor all else behind a list's."""


class Pauses:
    """Seconds between attempts of one request. Without an end, as an outage is waited out."""

    def __iter__(self) -> Iterator[float]:
        return chain((1.0, 2.0, 5.0), repeat(10.0))


class Session:
    """What kopf uses of an aiohttp session. `ended`: whether the operator is at its end.

    At the end kopf closes it and does not await the watches that are open, which ask for new credentials then, and
    wait for them without end: they are cancelled.
    """

    def __init__(self, session: aiohttp.ClientSession, ended: Callable[[], bool]) -> None:
        self._session = session
        self._ended = ended

    @property
    def headers(self) -> MutableMapping[str, str]:
        """Headers of every request."""
        return self._session.headers

    @property
    def closed(self) -> bool:
        """Whether it takes no requests any more."""
        return self._session.closed

    async def request(self, **request: Any) -> aiohttp.ClientResponse:
        """One request; RuntimeError, by which kopf logs in anew, where the session was closed."""
        if self.closed and self._ended():
            raise asyncio.CancelledError
        return await self._session.request(**request)

    async def close(self) -> None:
        """Idempotent."""
        await self._session.close()


class NoMemory(kopf.DiffBaseStorage):
    """Handlers of events need no former state. kopf would copy each object to compare it with one."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        """Nothing to remember."""
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        """Nothing remembered."""
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Never called for events."""
        raise AssertionError


def registry_of(operator: Operator) -> kopf.OperatorRegistry:
    """The handlers that kopf is to call."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        await operator.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await operator.stop()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        """The same cluster, as the same user, as our own client. What was refused once kopf takes again, as it does
        not end at the same time: an API server may refuse good credentials for a moment."""
        until = datetime.now(UTC) + timedelta(seconds=LOGIN_S)
        known = kopf.ConnectionInfo(**await operator.admit())
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=known.as_ssl_context()),
            headers=known.as_http_headers(),
            response_class=operator.api.reader.response(),
        )
        lent: Any = Session(session, operator.ended.is_set)
        return kopf.AiohttpSession(server=known.server, aiohttp_session=lent, expiration=until)

    async def told(event: kopf.RawEvent, **_: Any) -> None:
        body: Any = event["object"]
        (operator.cache.gone if event["type"] == "DELETED" else operator.cache.changed)(body)

    for kind in WATCHED:
        kopf.on.event(kind.group, kind.version, kind.plural, id="told", registry=registry)(told)
    if operator.options.webhook_port:
        validate = partial(review, Workbench(), operator.options.profile)
        kopf.on.validate(GROUP, VERSION, PLURAL, id="validate", registry=registry)(validate)
    return registry


def settings_of(operator: Operator) -> kopf.OperatorSettings:
    """Bounded waits, no posts, no rights to look for kinds or namespaces, and little kept of what has been told."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = NoMemory()
    settings.persistence.finalizer = NO_FINALIZER
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = Pauses()
    settings.watching.chunk_size = PAGE
    settings.watching.server_timeout = WATCH_S
    settings.watching.client_timeout = WATCH_S + SLACK_S
    for kind in WATCHED:
        if kind.selector:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
    settings.queueing.idle_timeout = IDLE_S
    settings.queueing.worker_limit = WORKERS_PER_KIND
    settings.admission.managed = None
    if operator.options.webhook_port:
        settings.admission.server = webhook_server(operator.options, operator.serving.set)
    return settings


async def review(bench: Workbench, profile: Profile, /, body: kopf.Body, warnings: list[str], **_: Any) -> None:
    """Admission: refuses a spec with all its problems at once, with their field paths, and adds to `warnings`, which
    clients show.

    What is being deleted may go, whatever it says: taking its last finalizer off is an update, too.
    """
    meta = body["metadata"]
    if meta.get("deletionTimestamp"):
        return
    try:
        service = await bench.run((meta.get("namespace"), meta.get("name")), partial(admit, dict(body), profile))
    except InvalidSpec as error:
        raise kopf.AdmissionError(str(error), code=422) from None
    except OverBudget as error:
        raise kopf.AdmissionError(f"spec: {error}; make it smaller", code=422) from None
    warnings += without_effect(service.spec)


def webhook_server(options: OperatorOptions, serving: Callable[[], object]) -> Webhook:
    """Serves the webhook, and each renewed certificate from the first connection after it was written. `serving`:
    called when it listens.

    UserError where the certificate cannot be used.
    """
    return Webhook(options.webhook_host, options.webhook_port, Certificates(options.webhook_cert_dir), serving)


async def be(operator: Operator) -> None:
    """From start to end; until a signal comes, or the operator cannot go on: then what it failed of is raised."""
    options = operator.options
    # Else kopf asks for the name of the user, and the user of a restricted pod has none. Its type is not exported.
    name: Any = "isthmus-operator"
    await kopf.operator(
        identity=name,
        registry=registry_of(operator),
        settings=settings_of(operator),
        standalone=True,
        clusterwide=not options.namespaces,
        namespaces=list(options.namespaces),
        stop_flag=operator.stopping,
    )
    if operator.failure is not None:
        raise operator.failure


async def run(options: OperatorOptions) -> None:
    """Be an operator. UserError and ApiError say what keeps it from starting; an API server that does not answer does
    not: it is waited for."""
    # Containers begin with the soft limit of select(2), 1024, which three full doors come near.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    host = options.metrics_host
    require_port("--metrics-port", host, options.metrics_port)
    require_port("--health-port", host, options.health_port)
    require_port("--webhook-port", options.webhook_host, options.webhook_port)
    api = await connect(options.kubeconfig)
    try:
        await be(Operator(api, options))
    finally:
        await api.close()
