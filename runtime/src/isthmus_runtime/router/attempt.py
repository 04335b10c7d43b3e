"""One try of one request on one choice of engines: the decode leg, and the prefill leg beside it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from ..errors import Cancelled, DeadlineExceeded, EngineFailed, Overloaded, RequestError, UnknownModel
from ..interfaces.backend import Take
from ..metrics import RouterMetrics
from ..protocol.calls import CommitCall
from ..protocol.request import CLIENT_HEADER
from ..protocol.ticket import Ticket
from ..request import FinishReason, GenerateRequest, TokenChunk
from ..tracing.span import current
from .decode_leg import DecodeLeg
from .links import LOST, Links
from .policy import Choice, Facts
from .pool import EnginePool
from .prefill_leg import PrefillLeg

_log = logging.getLogger(__name__)


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
        body: Sequence[bytes],
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
        """`body`: the request as JSON, in parts, held until both legs have it. `deadline`: on the event loop's clock.
        `other_prefill(url)`: whether the request could be paired without that prefill engine. `early`: prefill begins
        before decode has reserved."""
        self._request = request
        self._body = body
        self._choice = choice
        self._attempt = attempt
        self._links = links
        self._other_prefill = other_prefill
        self._metrics = metrics
        self._early = early
        self._span = current().child("attempt")
        if self._span.recording:
            self._span.set(_place(choice, attempt))
        client = f"{CLIENT_HEADER}: {request.client}\r\n".encode() if request.client else b""
        self._headers = self._span.headers() + client
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[TokenChunk | None] | None = None
        """Waits for the first token of prefill, or for decode's word."""
        self._told: int | None = None
        """The first token, if prefill has told it."""
        self._delivered = False
        self._closed = False
        self._expiry = self._loop.call_at(deadline, self._expire)
        url = choice.decode.url
        self._decode = DecodeLeg(
            url,
            request.request_id,
            attempt,
            tokens=facts.missing(url, facts.decode_tokens),
            pool=pool,
            links=links,
            metrics=metrics,
        )
        self._prefill: PrefillLeg | None = None
        self._prefill_task: asyncio.Task[None] | None = None
        if choice.prefill is not None:
            url = choice.prefill.url
            self._prefill = PrefillLeg(
                url,
                request.request_id,
                attempt,
                self._headers,
                tokens=facts.missing(url, facts.prompt_tokens),
                pool=pool,
                links=links,
            )

    @property
    def unsent(self) -> bool:
        """No engine has seen a byte of it."""
        return self._decode.unsent

    async def first(self) -> TokenChunk:
        """The first chunk. Raises TryElsewhere or RequestError."""
        decode = self._decode
        try:
            if self._early:
                self._run(None)
            await decode.open(self._call(), self._headers)
            line = await decode.line()
            if isinstance(line, Ticket):
                self._start_prefill(line)
                told = await self._early_token() if self._early else None
                if told is not None:
                    hits = line.skip_blocks * self._choice.decode.block_size
                    return told._replace(cached_tokens=max(told.cached_tokens, hits))
                line = await decode.line()
            elif self._early:
                self._cancel_prefill()
            if isinstance(line, Ticket):
                raise EngineFailed(f"decode engine {decode.url} reserved twice", stage="decode")
            if line.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise line.error or EngineFailed(f"decode engine {decode.url} gave no reason", stage="decode")
            if self._request.prompt is not None and not line.prompt_tokens:
                raise EngineFailed(
                    f"decode engine {decode.url} did not say how many tokens a prompt has that went as text",
                    stage="decode",
                )
        except RequestError as error:
            self._count("decode", error)
            raise self._failed(error) from error
        self._delivered = True
        self._body = ()  # decode has computed the prompt
        prefill = self._prefill
        if line.note == "transferred" and prefill is not None and (answer := prefill.answer) is not None:
            # Nobody computed these tokens. Decode's own hits are a prefix of the same prompt: the longer one counts.
            cached = max(line.cached_tokens, answer.cached_tokens)
            line = line._replace(cached_tokens=cached, prompt_logprobs=answer.prompt_logprobs)
            prefill.answer = None
        return line

    def _failed(self, error: RequestError) -> Exception:
        """What `first` raises for an error of decode. Made here: a frame of it that has it would hold all of this until
        the collector comes by."""
        located = error.located("decode", self._attempt)
        elsewhere = isinstance(error, EngineFailed | Overloaded | UnknownModel)
        return TryElsewhere(located, self._decode.url) if elsewhere else located

    async def next(self) -> TokenChunk:
        """A later chunk. A failure ends the attempt, and is the last one."""
        try:
            line = await self._decode.line()
            if isinstance(line, Ticket):
                raise EngineFailed(
                    f"decode engine {self._decode.url} reserved in the middle of a stream", stage="decode"
                )
            return line
        except RequestError as error:
            self._count("decode", error)
            self.close()
            return TokenChunk(finish_reason=FinishReason.ERROR, error=error.located("decode", self._attempt))

    async def pass_on(self, chunk: TokenChunk, take: Take) -> None:
        """Give `take` the first chunk and all that follow: plain ones where they arrive, without waking this task,
        which would be a third of what a stream costs. A failure is the last chunk. Raises what `take` does."""
        decode = self._decode
        said = take(chunk)
        while (said if isinstance(said, bool) else await said()) and not (decode.ended or self._closed):
            passed = decode.pass_plain(take)
            if passed is None:
                passed = await decode.arrivals(take)
            said = take(await self.next()) if passed is None else passed

    def close(self) -> None:
        """End what still runs, at once and without waiting. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._span.end()
        self._expiry.cancel()
        del self._expiry  # it refers back to this attempt, which would have to wait for the collector
        if self._prefill is not None:
            self._prefill.close()
        self._cancel_prefill()
        self._decode.close()

    def _call(self) -> Sequence[bytes]:
        """The body of the call to decode."""
        prefill, body = self._choice.prefill, self._body
        if prefill is None or self._early:
            self._body = ()  # prefill needs none, or has it
        pairing = f',"local_attempt":"{self._attempt}"'
        if prefill is not None:
            pairing = f',"attempt":"{self._attempt}","prefill_url":"{prefill.url}","prefill_epoch":"{prefill.epoch}"'
        return b'{"request":', *body, b"%b}" % pairing.encode()

    def _expire(self) -> None:
        stage = "decode" if self._prefill_task is None or self._prefill_task.done() else "prefill"
        message = f"the request did not end within {self._request.timeout_s:g} s (--request-timeout)"
        self._decode.interrupt(DeadlineExceeded(message, stage=stage))

    # ------------------------------------------------------------------------------------------- prefill beside it

    def _start_prefill(self, ticket: Ticket) -> None:
        if self._prefill is None or ticket.attempt != self._attempt:
            raise EngineFailed(
                f"decode engine {self._decode.url} reserved for attempt {ticket.attempt!r}, "
                f"expected {self._attempt if self._prefill else 'none'!r}",
                stage="decode",
            )
        self._prefill.give(ticket)
        if not self._early:
            self._run(ticket)

    def _run(self, ticket: Ticket | None) -> None:
        assert self._prefill is not None
        body = self._body
        if ticket is not None:
            self._body = ()  # decode has it
        self._prefill_task = asyncio.create_task(self._run_prefill(self._prefill, body, ticket))
        self._prefill_task.add_done_callback(self._prefill_ended)

    def _cancel_prefill(self) -> None:
        if self._prefill_task is not None and not self._prefill_task.done():
            assert self._prefill is not None
            self._prefill_task.cancel()
            self._links.abort(self._prefill.url, self._request.request_id, self._attempt)

    async def _early_token(self) -> TokenChunk | None:
        """The first token, when prefill has it; None: prefill does not tell it, or decode has something to say."""
        decode, task = self._decode, self._prefill_task
        assert task is not None
        if decode.has_news or task.done():
            return None
        self._first = self._loop.create_future()
        decode.follow(self._no_early_token)
        try:
            return await self._first
        finally:
            decode.follow(None)
            self._first = None

    def _tell_first(self, chunk: TokenChunk) -> bool:
        """The first token of prefill is the client's, if that is still waited for."""
        if self._first is None or self._first.done():
            return False
        self._delivered = True
        self._told = chunk.token_ids[0]
        self._decode.expect(self._told)
        self._first.set_result(chunk)
        return True

    def _no_early_token(self) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def _prefill_ended(self, task: asyncio.Task[None]) -> None:
        self._no_early_token()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the prefill leg of %s broke", self._request.request_id, exc_info=error)
            self._decode.interrupt(EngineFailed("internal error; the router's log has the details", stage="prefill"))

    async def _run_prefill(self, prefill: PrefillLeg, body: Sequence[bytes], ticket: Ticket | None) -> None:
        """Run the leg, and tell decode what became of it."""
        error: RequestError | None = None
        try:
            await prefill.run(body, ticket, self._tell_first)
        except RequestError as failure:
            error = failure.located("prefill", self._attempt)
            self._count("prefill", error)
            other = isinstance(error, EngineFailed | Overloaded) and self._other_prefill(prefill.url)
            if not self._delivered and (other or isinstance(error, UnknownModel)):
                self._decode.interrupt(TryElsewhere(error, prefill.url))
                return
            await prefill.reserved()  # decode would not know what the word is about
        outcome = CommitCall(
            request_id=self._request.request_id,
            attempt=self._attempt,
            ok=error is None,
            stage="" if error is None else error.stage or "prefill",
            reason="" if error is None else error.message,
            first_token=self._told,
        )
        try:
            await self._links.commit(self._decode.url, outcome)
        except RequestError as refused:
            self._decode.interrupt(refused)
        except LOST as e:
            self._decode.interrupt(self._decode.lose(e))

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
