"""A request's life whatever it asks for: admitted, kept within its time, counted, and ended exactly once."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from ..errors import Cancelled, DeadlineExceeded, RequestError, is_panic, unforeseen
from ..metrics import RequestMetrics, TenantMetrics
from ..serving.call import Call, Cut, error_answer
from ..serving.clients import known_by
from ..serving.in_flight import InFlight
from ..serving.limits import BodyTooLarge
from ..tracing.span import NO_TRACER, Tracer, current, within
from .keys import Keys
from .planning import Planning
from .sse import Format
from .tenants import Tenant
from .tenants_file import TenantsFile

_log = logging.getLogger(__name__)

_DEADLINE_MARGIN_S = 1.0
"""The backend enforces the deadline and knows the reason; we step in when it is stuck, or the client does not read."""
_LAST_WORDS_S = 1.0
"""How long a client that does not read may hold up its own error event."""

Describe = Callable[[RequestError], dict[str, Any]]
"""An error as the body of an answer."""


@dataclass(slots=True)
class Progress:
    """How far a request has come, for the error that may end it."""

    arrived: float
    """Monotonic seconds."""
    stage: str = "admission"
    answer_id: str = ""
    tenant: Tenant | None = None
    format: Format | None = None


_P = TypeVar("_P")
Answering = Callable[[Call, _P, Progress], Coroutine[Any, Any, None]]
"""Answers a request, given how its body is planned."""


def openai_error(error: RequestError) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": error.to_json()}


class Lifecycle:
    """The life of the requests of one process."""

    def __init__(
        self,
        keys: Keys,
        tenants: TenantsFile | None,
        *,
        timeout_s: float,
        in_flight: InFlight,
        metrics: RequestMetrics | None,
        tenant_metrics: TenantMetrics | None,
        tracer: Tracer,
        planning: Planning,
        clock: Callable[[], float],
    ) -> None:
        """`timeout_s`: what a request may take. `clock`: monotonic seconds."""
        self._planning = planning
        self._keys = keys
        self._tenants = tenants
        self._timeout_s = timeout_s
        self._in_flight = in_flight
        self._metrics = metrics
        self._tenant_metrics = tenant_metrics
        self._tracer = tracer
        self._clock = clock

    async def answer(
        self, call: Call, work: Answering[_P], plan: _P, *, describe: Describe = openai_error, operation: str = "chat"
    ) -> None:
        """Have `work` answer, or tell why it could not."""
        if self._tracer is NO_TRACER:
            await self._respond(call, work, plan, describe)
            return
        span = self._tracer.request("request", call.headers)
        with within(span):
            span.set({"http.request.method": call.method, "url.path": call.path, "gen_ai.operation.name": operation})
            try:
                await self._respond(call, work, plan, describe)
            finally:
                span.end()

    def end(self) -> Callable[[RequestError], None]:
        """What ends the current task's request with an error, where it still runs then."""
        task = asyncio.current_task()
        assert task is not None

        def end(error: RequestError) -> None:
            if self._in_flight.works_on(task):
                self._in_flight.end(task, error)

        return end

    async def compute(
        self, call: Call, make: Callable[[bytes], bytes], most: int, describe: Describe = openai_error
    ) -> None:
        """Answer with what `make` makes of a body of at most `most` bytes, in a thread: it may take long, and no engine
        is asked. One at a time, in turns of clients; Overloaded (429) when too many wait."""

        async def work(call: Call, make: Callable[[bytes], bytes], progress: Progress) -> None:
            body = await call.read()
            if len(body) > most:
                raise BodyTooLarge(f"the body has {len(body)} bytes, {call.path} takes {most}; send parts")
            who = whose(call, progress.tenant)
            answer = await self._planning.alone(who, make, body)
            await call.reply(200, {"Content-Type": "application/json"}, answer)

        await self._respond(call, work, make, describe)

    async def _respond(self, call: Call, work: Answering[_P], plan: _P, describe: Describe) -> None:
        progress = Progress(self._clock())
        try:
            with self._in_flight.track():
                progress.tenant = self._keys.check(call)
                self._admit(progress.tenant)
                async with asyncio.timeout(self._timeout_s + _DEADLINE_MARGIN_S):
                    await work(call, plan, progress)
            self._count_tenant(progress, 200)
            return
        except RequestError as e:
            error = e
        except TimeoutError:
            error = DeadlineExceeded(f"the request did not end within {self._timeout_s:g} s (--request-timeout)")
        except asyncio.CancelledError:
            refusal = self._in_flight.cancelled()
            if refusal is None:
                self._count_left(progress)
                raise
            error = refusal
        except ConnectionResetError:
            self._count_left(progress)
            return
        except BaseException as e:
            if not isinstance(e, Exception) and not is_panic(e):
                raise
            _log.exception("%s failed", call.path)
            error = unforeseen(e)
        try:
            self._count(error)
            self._count_tenant(progress, error.status)
            error = error.located(progress.stage, progress.answer_id or uuid.uuid4().hex)
            if error.attempt and not progress.answer_id:
                _log.info("%s, %s: %s", call.path, error.attempt, error.message)
            if call.begun:
                await _last_words(call, error, progress)
            else:
                await call.reply(*_described(error, describe))
        finally:
            # Its traceback holds this frame, which holds it: a cycle, with the body in its frames, until the collector
            # comes by, which is seldom.
            del error

    def _admit(self, tenant: Tenant | None) -> None:
        """Count a request against its tenant's rate: also those that no engine is asked for cost others something."""
        if tenant is not None and self._tenants is not None:
            self._tenants.tenants.admit(tenant, self._clock())

    def _count(self, error: RequestError) -> None:
        current().fail(error)
        if self._metrics is not None:
            self._metrics.failed(error.status, error.code)

    def _count_left(self, progress: Progress) -> None:
        self._count(Cancelled("the client left"))
        self._count_tenant(progress, Cancelled.status)

    def _count_tenant(self, progress: Progress, status: int) -> None:
        if progress.tenant is not None and self._tenant_metrics is not None:
            self._tenant_metrics.ended(progress.tenant.name, status)


def whose(call: Call, tenant: Tenant | None) -> str:
    """Who takes turns with others: a tenant, or an address where there are none."""
    if tenant is not None:
        return tenant.name
    return "" if call.client is None else known_by(call.client.host)


def known_as(client: str) -> str:
    """What engines know a client by: neither a tenant's name nor an address."""
    return blake2b(client.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


async def _last_words(call: Call, error: RequestError, progress: Progress) -> None:
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            if progress.format is None:  # an answer in one piece, of which a part is written
                raise Cut
            await call.write(progress.format.error(error))
            await call.end()
    except (TimeoutError, ConnectionResetError) as e:
        raise Cut from e


def _described(error: RequestError, describe: Describe) -> tuple[int, dict[str, str], bytes]:
    status, headers, _ = error_answer(error)
    return status, headers, json.dumps(describe(error)).encode()
