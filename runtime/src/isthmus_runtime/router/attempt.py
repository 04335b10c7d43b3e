"""One try of one request on one choice of engines: the decode leg, and the prefill leg beside it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from ..errors import Cancelled, DeadlineExceeded, EngineFailed, EngineLost, Overloaded, RequestError, is_panic
from ..interfaces.backend import Said, Take
from ..metrics import RouterMetrics
from ..protocol.calls import CommitCall, PrefillAnswer, TicketCall
from ..protocol.lines import parse_line, parse_prefill_answer, parse_prefill_line
from ..protocol.request import CLIENT_HEADER
from ..protocol.ticket import Ticket
from ..request import FinishReason, GenerateRequest, TokenChunk
from ..tracing.span import current
from .links import LOST, Links, lost, refusal
from .policy import Choice, Facts
from .pool import EnginePool
from .remote_engine import Hold
from .token_lines import TokenLines
from .wire import Exchange

_log = logging.getLogger(__name__)
_LONG = 1 << 16
"""Bytes of an engine's words above which they are read in a thread: a prompt's scores may be megabytes."""


class TryElsewhere(Exception):
    """Nothing was delivered yet and another engine may do better than `url`."""

    def __init__(self, error: RequestError, url: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.url = url


class Attempt:
    """Use: `first()` once, then `next()` until a chunk has a finish reason, or `pass_on()`; `close()` always.

    The caller's task reads the decode leg; the prefill leg runs in a task of its own, from decode's reservation on or,
    where it begins `early`, beside it. Then the first token is prefill's, as soon as it is known and decode has
    reserved; decode says it again with the KV that it got, or computed, and that is not passed on.

    Whatever goes wrong on one leg ends the other: decode learns of prefill's failure by a commit and recomputes or
    fails by its own setting; prefill is cancelled by closing its connection and by an abort.
    """

    def __init__(
        self,
        request: GenerateRequest,
        body: bytes,
        choice: Choice,
        facts: Facts,
        *,
        attempt: str,
        deadline: float,
        pool: EnginePool,
        links: Links,
        other_prefill: Callable[[str], bool],
        metrics: RouterMetrics | None,
        early: bool = False,
    ) -> None:
        """`body`: the request as JSON. `deadline`: on the event loop's clock. `other_prefill(url)`: whether the
        request could be paired without that prefill engine. `early`: prefill begins before decode has reserved."""
        self._request = request
        self._body = body
        self._decode = choice.decode
        self._prefill = choice.prefill
        self._client = f"{CLIENT_HEADER}: {request.client}\r\n".encode() if request.client else b""
        self._attempt = attempt
        self._pool = pool
        self._links = links
        self._other_prefill = other_prefill
        self._metrics = metrics
        self._span = current().child("attempt")
        if self._span.recording:
            self._span.set(_place(choice, attempt))
        self._loop = asyncio.get_running_loop()
        self._failure: RequestError | TryElsewhere | None = None
        self._timer: asyncio.Timeout | None = None
        self._response: Exchange | None = None
        self._lines = TokenLines()
        self._passing: asyncio.Future[Said | None] | None = None
        self._prefill_task: asyncio.Task[None] | None = None
        self._early = early
        self._ticket: Ticket | None = None
        self._reserved = asyncio.Event()
        """`_ticket` is there."""
        self._first: asyncio.Future[TokenChunk | None] | None = None
        """Waits for the first token of prefill, or for decode's word."""
        self._told: int | None = None
        """The first token, if prefill has told it."""
        self._owed = False
        """Decode has yet to say it again."""
        self._delivered = False
        self._answer: PrefillAnswer | None = None
        """Prefill's, which comes before decode may start."""
        self.unsent = True
        """No engine has seen a byte of it."""
        self._ended = False
        self._closed = False
        self._decode_gone = False
        self._prefill_timer: asyncio.Timeout | None = None
        self._expiry = self._loop.call_at(deadline, self._expire)
        self._hold = pool.hold(
            self._decode.url, facts.missing(self._decode.url, facts.decode_tokens), self._decode_lost
        )
        # Held from the start, so that the next choice sees the work that is on its way to this engine.
        self._prefill_hold: Hold | None = None
        if self._prefill is not None:
            missing = facts.missing(self._prefill.url, facts.prompt_tokens)
            self._prefill_hold = pool.hold(self._prefill.url, missing, self._prefill_lost)

    async def first(self) -> TokenChunk:
        """The first chunk. Raises TryElsewhere or RequestError."""
        try:
            if self._early:
                self._run(None)
            await self._open()
            line = await self._line()
            if isinstance(line, Ticket):
                self._start_prefill(line)
                told = await self._early_token() if self._early else None
                if told is not None:
                    hits = line.skip_blocks * self._decode.block_size
                    return told._replace(cached_tokens=max(told.cached_tokens, hits))
                line = await self._line()
            elif self._early:
                self._cancel_prefill()
            if isinstance(line, Ticket):
                raise EngineFailed(f"decode engine {self._decode.url} reserved twice", stage="decode")
            if line.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise line.error or EngineFailed(f"decode engine {self._decode.url} gave no reason", stage="decode")
            if self._request.prompt is not None and not line.prompt_tokens:
                raise EngineFailed(
                    f"decode engine {self._decode.url} did not say how many tokens a prompt has that went as text",
                    stage="decode",
                )
        except RequestError as error:
            self._count("decode", error)
            located = error.located("decode", self._attempt)
            if isinstance(error, EngineFailed | Overloaded):
                raise TryElsewhere(located, self._decode.url) from error
            raise located from error
        self._delivered = True
        if line.note == "transferred" and self._answer is not None:
            # Nobody computed these tokens. Decode's own hits are a prefix of the same prompt: the longer one counts.
            cached = max(line.cached_tokens, self._answer.cached_tokens)
            line = line._replace(cached_tokens=cached, prompt_logprobs=self._answer.prompt_logprobs)
            self._answer = None
        return line

    async def next(self) -> TokenChunk:
        """A later chunk. A failure ends the attempt, and is the last one."""
        try:
            return await self._next()
        except RequestError as error:
            self.close()
            return TokenChunk(finish_reason=FinishReason.ERROR, error=error)

    async def pass_on(self, chunk: TokenChunk, take: Take) -> None:
        """Give `take` the first chunk and all that follow: plain ones where they arrive, without waking this task,
        which would be a third of what a stream costs. A failure is the last chunk. Raises what `take` does."""
        said = take(chunk)
        while (said if isinstance(said, bool) else await said()) and not (self._ended or self._closed):
            passed = self._pass_plain(take)
            if passed is None:
                passed = await self._arrivals(take)
            said = take(await self.next()) if passed is None else passed

    def close(self) -> None:
        """End what still runs, at once and without waiting. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._span.end()
        self._expiry.cancel()
        del self._expiry  # it refers back to this attempt, which would have to wait for the collector
        self._hold.release()
        if self._prefill_hold is not None:
            self._prefill_hold.release()
        self._cancel_prefill()
        if self._ended:
            assert self._response is not None
            self._response.release()
            return
        if self._response is not None:
            self._response.close()
        if not self._decode_gone:
            self._links.abort(self._decode.url, self._request.request_id, self._attempt)

    # -------------------------------------------------------------------------------------------------- decode leg

    async def _next(self) -> TokenChunk:
        try:
            line = await self._line()
            if isinstance(line, Ticket):
                raise EngineFailed(
                    f"decode engine {self._decode.url} reserved in the middle of a stream", stage="decode"
                )
        except RequestError as error:
            self._count("decode", error)
            raise error.located("decode", self._attempt) from error
        return line

    def _pass_plain(self, take: Take) -> Said | None:
        """What `take` says of the plain lines that are here; None: there is none."""
        assert self._response is not None
        if self._owed:
            # Decode's word for the token that was told: `_line` looks at it, and its failure is located and counted.
            self._lines.add(self._response.here())
            return None
        chunk = self._lines.plain_of(self._response.here())
        if chunk is None:
            return None
        self._hold.heard()
        self._ended = chunk.finish_reason is not None
        return take(chunk)

    async def _arrivals(self, take: Take) -> Said | None:
        """Give plain lines to `take` as they arrive, until it says anything but to go on, or until they end. None:
        what comes next is not one of them."""
        response = self._response
        assert response is not None
        if self._lines or response.over:
            return None
        done = self._passing = self._loop.create_future()
        response.follow(partial(self._arrived, done, take))
        del done  # an error of it holds this frame, and would be held by it
        try:
            return await self._passing
        finally:
            response.follow(None)
            self._passing = None

    def _arrived(self, done: asyncio.Future[Said | None], take: Take) -> None:
        self._hold.heard()
        if done.done():
            return
        try:
            said = self._pass_plain(take)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            done.set_exception(error)
            del done  # the error holds this frame
            return
        assert self._response is not None
        if self._ended or self._lines or self._response.over or said not in (None, True):
            done.set_result(said)

    async def _open(self) -> None:
        pairing = f',"local_attempt":"{self._attempt}"'
        if self._prefill is not None:
            pairing = (
                f',"attempt":"{self._attempt}","prefill_url":"{self._prefill.url}",'
                f'"prefill_epoch":"{self._prefill.epoch}"'
            )
        url = self._decode.url
        try:
            response = self._links.idle(url) or await self._connect(url)
            if self._failure is not None:
                response.close()
                raise self._failure
            self._response = response  # from here on `_interrupt` ends every wait by closing it
            self.unsent = False
            body = b'{"request":%b%b}' % (self._body, pairing.encode())
            await self._links.send(response, url, "/internal/generate", body, self._headers())
            if response.status == 200:
                return
            raw = await response.read()
        except LOST as e:
            raise self._failure or self._lost_decode(e) from e
        self._ended = True
        raise refusal(response.status, raw, "decode", url)

    def _headers(self) -> bytes:
        return self._span.headers() + self._client

    async def _connect(self, url: str) -> Exchange:
        """A new connection, unless `_interrupt` ends the wait first."""
        timer = self._timer = asyncio.timeout(None if self._failure is None else 0)
        try:
            async with timer:
                return await self._links.connect(url)
        finally:
            self._timer = None

    async def _line(self) -> Ticket | TokenChunk:
        """The next line, without the token that prefill has told."""
        while True:
            line = await self._whole_line()
            if isinstance(line, Ticket) or not self._owed:
                return line
            line = self._without_told(line)
            if line.token_ids or line.finish_reason is not None:
                return line

    def _without_told(self, chunk: TokenChunk) -> TokenChunk:
        if not chunk.token_ids:
            return chunk
        self._owed = False
        if chunk.token_ids[0] != self._told:
            raise EngineFailed(
                f"decode engine {self._decode.url} has {chunk.token_ids[0]} for the first token, and the client "
                f"{self._told} from prefill",
                stage="decode",
            )
        if self._metrics is not None and chunk.note:
            self._metrics.prompt(chunk.note)
        return chunk._replace(token_ids=chunk.token_ids[1:], logprobs=chunk.logprobs[1:])

    async def _whole_line(self) -> Ticket | TokenChunk:
        while not self._lines:
            assert self._response is not None
            try:
                data = await self._response.readany()
            except LOST as e:
                raise self._failure or self._lost_decode(e) from e
            self._hold.heard()
            if not data:
                raise self._failure or self._lost_decode("it closed the stream without an end")
            self._lines.add(data)
        plain = self._lines.plain()
        if plain is not None:
            self._ended = plain.finish_reason is not None
            return plain
        raw = self._lines.pop()
        try:
            line = parse_line(raw) if len(raw) <= _LONG else await asyncio.to_thread(parse_line, raw)
        except (ValueError, KeyError, TypeError) as e:
            raise EngineFailed(f"decode engine {self._decode.url} sent a line that is not a valid chunk: {e}") from e
        if isinstance(line, Ticket):
            return line
        if line.finish_reason is None and not line.logprobs and not line.vector:
            line = self._lines.plain(line) or line
        self._ended = line.finish_reason is not None
        return line

    def _expire(self) -> None:
        stage = "decode" if self._prefill_task is None or self._prefill_task.done() else "prefill"
        message = f"the request did not end within {self._request.timeout_s:g} s (--request-timeout)"
        self._interrupt(DeadlineExceeded(message, stage=stage))

    def _lost_decode(self, cause: object) -> EngineLost:
        self._decode_gone = True
        error = lost("decode", self._decode.url, self._attempt, cause)
        self._pool.failed(self._decode.url, error.message)
        return error

    def _decode_lost(self, reason: str) -> None:
        self._interrupt(self._lost_decode(reason))

    def _interrupt(self, failure: RequestError | TryElsewhere) -> None:
        """Make the reader of the decode leg raise `failure`, now or at its next wait."""
        if self._failure is not None or self._ended:
            return
        self._failure = failure
        if self._timer is not None:
            if not self._timer.expired():
                self._timer.reschedule(self._loop.time())
        elif self._response is not None:
            # Wakes the reader with an error. A timeout around each read would do the same, at a cost for each token.
            self._response.close()

    # ------------------------------------------------------------------------------------------------- prefill leg

    def _start_prefill(self, ticket: Ticket) -> None:
        if self._prefill is None or ticket.attempt != self._attempt:
            raise EngineFailed(
                f"decode engine {self._decode.url} reserved for attempt {ticket.attempt!r}, "
                f"expected {self._attempt if self._prefill else 'none'!r}",
                stage="decode",
            )
        self._ticket = ticket
        self._reserved.set()
        if not self._early:
            self._run(ticket)

    def _run(self, ticket: Ticket | None) -> None:
        assert self._prefill is not None
        self._prefill_task = asyncio.create_task(self._run_prefill(self._prefill.url, ticket))
        self._prefill_task.add_done_callback(self._prefill_ended)

    def _cancel_prefill(self) -> None:
        if self._prefill_task is not None and not self._prefill_task.done():
            assert self._prefill is not None
            self._prefill_task.cancel()
            self._links.abort(self._prefill.url, self._request.request_id, self._attempt)

    async def _early_token(self) -> TokenChunk | None:
        """The first token, when prefill has it; None: prefill does not tell it, or decode has something to say."""
        response, task = self._response, self._prefill_task
        assert response is not None and task is not None
        if self._lines or response.over or task.done():
            return None
        self._first = self._loop.create_future()
        response.follow(partial(self._answer_first, None))
        try:
            return await self._first
        finally:
            response.follow(None)
            self._first = None

    def _answer_first(self, chunk: TokenChunk | None) -> None:
        if self._first is None or self._first.done():
            return
        if chunk is not None:
            self._delivered = self._owed = True
            self._told = chunk.token_ids[0]
        self._first.set_result(chunk)

    def _prefill_ended(self, task: asyncio.Task[None]) -> None:
        self._answer_first(None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the prefill leg of %s broke", self._request.request_id, exc_info=error)
            self._interrupt(EngineFailed("internal error; the router's log has the details", stage="prefill"))

    def _prefill_lost(self, reason: str) -> None:
        if self._prefill_timer is not None and not self._prefill_timer.expired():
            self._prefill_timer.reschedule(self._loop.time())

    async def _run_prefill(self, url: str, ticket: Ticket | None) -> None:
        assert self._prefill_hold is not None
        try:
            try:
                await self._ask_prefill(url, ticket)
            except Overloaded:
                if ticket is not None or self._told is not None:
                    raise
                # It waits for decode no longer. Decode may take its time; then prefill is asked as if for the first
                # time.
                await self._reserved.wait()
                await self._ask_prefill(url, self._ticket)
            finally:
                self._prefill_hold.release()
        except RequestError as failure:
            error = failure.located("prefill", self._attempt)
            self._count("prefill", error)
            elsewhere = isinstance(error, EngineFailed | Overloaded) and not self._delivered
            if elsewhere and self._other_prefill(url):
                self._interrupt(TryElsewhere(error, url))
                return
            await self._reserved.wait()  # decode would not know what the word is about
            outcome = CommitCall(
                request_id=self._request.request_id,
                attempt=self._attempt,
                ok=False,
                stage=error.stage or "prefill",
                reason=error.message,
                first_token=self._told,
            )
        else:
            outcome = CommitCall(
                request_id=self._request.request_id, attempt=self._attempt, ok=True, first_token=self._told
            )
        try:
            await self._links.commit(self._decode.url, outcome)
        except RequestError as error:
            self._interrupt(error)
        except LOST as e:
            self._interrupt(self._lost_decode(e))

    async def _ask_prefill(self, url: str, ticket: Ticket | None) -> None:
        """Have the prompt computed and sent. Without a ticket that is passed on when it is there."""
        legs = f',"attempt":"{self._attempt}"'
        if ticket is not None:
            legs += f',"ticket":{ticket.model_dump_json()}'
        body = b'{"request":%b%b}' % (self._body, legs.encode())
        early: PrefillAnswer | None = None
        hold = self._prefill_hold
        assert hold is not None
        # The request's own deadline ends this leg with the other one, by `close`.
        timer = asyncio.timeout(0 if hold.lost else None)
        try:
            async with timer:
                self._prefill_timer = timer
                response = await self._links.open(url, "/internal/prefill", body, self._headers())
                try:
                    if ticket is None and response.status == 200:
                        early = await self._early_answer(url, response)
                    raw = await response.read()
                except BaseException:
                    response.close()
                    raise
                response.release()
        except LOST as e:
            self._links.abort(url, self._request.request_id, self._attempt)
            error = lost("prefill", url, self._attempt, hold.lost or e)
            self._pool.failed(url, error.message)
            raise error from e
        finally:
            self._prefill_timer = None
        if response.status != 200:
            raise refusal(response.status, raw, "prefill", url)
        answer = await self._read_answer(url, raw) if early is None else early
        if answer.attempt != self._attempt:
            raise EngineFailed(
                f"prefill engine {url} answered for attempt {answer.attempt!r}, expected {self._attempt!r}",
                stage="prefill",
            )
        self._answer = answer

    async def _read_answer(self, url: str, raw: bytes) -> PrefillAnswer:
        try:
            brief = len(raw) <= _LONG
            return parse_prefill_answer(raw) if brief else await asyncio.to_thread(parse_prefill_answer, raw)
        except ValueError as e:
            raise EngineFailed(f"prefill engine {url} sent an answer that cannot be read: {e}", stage="prefill") from e

    async def _early_answer(self, url: str, response: Exchange) -> PrefillAnswer:
        """The last line of a prompt that was begun without a ticket, after all that is to be done for those before."""
        lines, passed = TokenLines(), False
        while True:
            while not lines:
                data = await response.readany()
                if not data:
                    raise ConnectionResetError("it closed the stream without an end")
                lines.add(data)
            try:
                said = parse_prefill_line(lines.pop())
            except (ValueError, KeyError, TypeError) as e:
                raise EngineFailed(f"prefill engine {url} sent a line that cannot be read: {e}") from e
            if isinstance(said, PrefillAnswer):
                return said
            if said.error is not None:
                raise said.error
            if said.token_ids:
                self._answer_first(said)
            elif not passed:
                await self._reserved.wait()
                assert self._ticket is not None
                passed = True
                self._links.ticket(url, TicketCall(ticket=self._ticket))

    def _count(self, leg: str, error: RequestError) -> None:
        self._span.fail(error)
        if self._metrics is not None and not isinstance(error, Cancelled):
            self._metrics.leg_failed(leg, error.code)


def _place(choice: Choice, attempt: str) -> dict[str, str | int]:
    """Where an attempt runs, as attributes of its span."""
    decode = urlsplit(choice.decode.url)
    place: dict[str, str | int] = {"isthmus.attempt.id": attempt, "isthmus.choice": choice.reason.value}
    place |= {"server.address": decode.hostname or "", "server.port": decode.port or 0}
    return place if choice.prefill is None else place | {"isthmus.prefill.url": choice.prefill.url}
