"""A request's life whatever it asks for: admitted, kept within its time, counted, and ended exactly once."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

from ..errors import Cancelled, DeadlineExceeded, RequestError, is_panic, unforeseen
from ..metrics import RequestMetrics, TenantMetrics
from ..serving.call import Call, Cut, error_answer
from ..serving.clients import known_by
from ..serving.in_flight import InFlight
from ..serving.limits import BodyTooLarge
from ..serving.memory import MemoryGuard
from ..sharing.reserve import Reserve, SetAside
from ..sharing.threads_in_turns import MOST_HELD_S, ThreadsInTurns
from ..sharing.turns import Turns
from ..threads import processors
from ..tokenising import LARGE, OF_A_LETTER
from ..tracing.span import NO_TRACER, Tracer, current, within
from .bounds import longest_part
from .keys import Keys
from .sse import Format
from .tenants import Tenant
from .tenants_file import TenantsFile

_log = logging.getLogger(__name__)

_DEADLINE_MARGIN_S = 1.0
"""The backend enforces the deadline and knows the reason; we step in when it is stuck, or the client does not read."""
_LAST_WORDS_S = 1.0
"""How long a client that does not read may hold up its own error event."""
_MOST_COMPUTING = 64
"""Requests to `compute` that wait for their turn."""
_MOST_PLANNING, _PLACES = 1024, min(16, max(4, processors()))
"""Long requests that wait to be planned, and how many are at a time."""
_SMALL_HELD_S = 3.0
"""As MOST_HELD_S, of the bodies that have little of it: their texts take two seconds at most, but for odd ones."""
_WAIT_TO_COMPUTE = "requests of this kind wait for their turn"
_WAIT = "large bodies wait to be planned"
_MOST_LETTERS, _OF_A_BYTE = 1 << 20, 26
"""Characters that are tokenised at a time where nothing cuts them; and bytes that planning takes at most for each of a
body, as JSON, marked, rendered and made bare again (tests/hostile)."""

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
_M = TypeVar("_M")
Answering = Callable[[Call, _P, Progress], Coroutine[Any, Any, None]]
"""Answers a request, given how its body is planned."""


def openai_error(error: RequestError) -> dict[str, Any]:
    """As OpenAI's clients read it."""
    return {"error": error.to_json()}


class Lifecycle:
    """Of the requests of one process."""

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
        memory: MemoryGuard,
        clock: Callable[[], float],
        part: int = 0,
    ) -> None:
        """`part`: of `Tokenizer`. `timeout_s`: what a request may take. `clock`: monotonic seconds."""
        self._memory = memory
        self._part = part
        self._keys = keys
        self._tenants = tenants
        self._timeout_s = timeout_s
        self._in_flight = in_flight
        self._metrics = metrics
        self._tenant_metrics = tenant_metrics
        self._tracer = tracer
        self._clock = clock
        # What a thread has begun cannot be ended: generations have others than what no engine is asked for.
        self._computing = ThreadsInTurns(1, "compute", _MOST_COMPUTING, _WAIT_TO_COMPUTE)
        self._may_compute = Turns(_MOST_COMPUTING, _WAIT_TO_COMPUTE)
        self._planners = ThreadsInTurns(
            _PLACES,
            "plan",
            _MOST_PLANNING,
            "long prompts and batches wait to be planned",
            one_by_one=lambda: memory.tight,
        )
        # Two, so that many small ones and few large ones do not wait for each other.
        self._small, self._large = (
            Reserve(partial(_share, memory, quarters), _MOST_PLANNING, _WAIT, self._planners, held_s)
            for quarters, held_s in ((1, _SMALL_HELD_S), (3, MOST_HELD_S))
        )

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
            async with self._may_compute.turn(who):  # before memory is set aside: there is one thread alone
                part = await self._set_aside(who, body) if len(body) > LARGE else None
                answer = await self._computing.do(who, make, body, part)
            await call.reply(200, {"Content-Type": "application/json"}, answer)

        await self._respond(call, work, make, describe)

    async def planned(self, call: Call, tenant: Tenant | None, plan: Callable[[bytes], _M], body: bytes) -> _M:
        """What `plan` makes of a long body, in a thread: few at a time, in turns of clients, of whom none takes all
        threads. Overloaded (429) when too many wait."""
        who = whose(call, tenant)
        if len(body) <= LARGE:
            return await self._planners.do(who, plan, body)
        return await self._planners.do(who, plan, body, await self._set_aside(who, body))

    async def _set_aside(self, who: str, body: bytes) -> SetAside:
        """Wait until what is made of a body may take is there; to be given back when it is over."""
        letters = longest_part(body, self._part) if self._part else len(body)
        takes, share = planning_takes(len(body), letters), _share(self._memory, 1)
        # One client has half of the small one, so that there is room for what another one has there.
        reserve = self._small if share is None or takes <= share // 2 else self._large
        part = await reserve.take(who, takes)
        try:
            self._memory.look()
            self._memory.check_new()
            await self._memory.make_room(takes)
        except BaseException:
            part.give_back()
            raise
        return part

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


def _share(memory: MemoryGuard, quarters: int) -> int | None:
    """So many of what may be taken on the way; None: anything."""
    room = memory.room_on_the_way
    return None if room is None else quarters * room // 4


def planning_takes(size: int, letters: int) -> int:
    """Bytes that planning a body of so many may take on its way, of which so many are tokenised at a time at most."""
    return OF_A_LETTER * min(letters, _MOST_LETTERS) + _OF_A_BYTE * size


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
