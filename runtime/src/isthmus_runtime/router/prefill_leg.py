"""The prefill leg of an attempt: has the prompt computed and sent, by decode's ticket or before there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..errors import EngineFailed, EngineLost, Overloaded
from ..protocol.calls import PrefillAnswer, TicketCall
from ..protocol.lines import parse_prefill_answer, parse_prefill_line
from ..protocol.ticket import Ticket
from ..request import TokenChunk
from .decode_leg import LONG_WORDS
from .links import LOST, Links, lost, refusal
from .pool import EnginePool
from .token_lines import TokenLines
from .wire import Exchange

Tell = Callable[[TokenChunk], bool]
"""Takes the first token; False: nobody waits for it."""


class PrefillLeg:
    """Use: `run` once, in a task of its own, and `give` when decode has reserved; `close` always."""

    def __init__(
        self,
        url: str,
        request_id: str,
        attempt: str,
        headers: bytes,
        *,
        tokens: int,
        pool: EnginePool,
        links: Links,
    ) -> None:
        """`tokens`: what it counts for in the engine's load, from now on, so that the next choice sees the work that is
        on its way there."""
        self._request_id = request_id
        self.url = url
        self.answer: PrefillAnswer | None = None
        """What the engine said when everything was sent; it comes before decode may start."""
        self._attempt = attempt
        self._headers = headers
        self._pool = pool
        self._links = links
        self._ticket: Ticket | None = None
        self._reserved = asyncio.Event()
        """`_ticket` is there."""
        self._told = False
        """Somebody has taken the first token."""
        self._timer: asyncio.Timeout | None = None
        self._hold = pool.hold(url, tokens, self._lost)

    async def run(self, body: Sequence[bytes], ticket: Ticket | None, tell: Tell) -> None:
        """Have the prompt of a request, `body` as JSON, computed and its KV sent; without a ticket it begins now, and
        is sent when `give` brings it. Then `tell` gets the first token. Raises RequestError."""
        try:
            try:
                await self._ask(body, ticket, tell)
            except Overloaded:
                if ticket is not None or self._told:
                    raise
                # It waits for decode no longer. Decode may take its time; then prefill is asked as if for the first
                # time.
                await self.reserved()
                await self._ask(body, self._ticket, tell)
        finally:
            self._hold.release()

    def give(self, ticket: Ticket) -> None:
        """Decode has reserved."""
        self._ticket = ticket
        self._reserved.set()

    async def reserved(self) -> None:
        """Returns when decode has."""
        await self._reserved.wait()

    def close(self) -> None:
        """Count it no more in the engine's load."""
        self._hold.release()

    # --------------------------------------------------------------------------------------------------- internals

    async def _ask(self, body: Sequence[bytes], ticket: Ticket | None, tell: Tell) -> None:
        url = self.url
        legs = f',"attempt":"{self._attempt}"'
        if ticket is not None:
            legs += f',"ticket":{ticket.model_dump_json()}'
        early: PrefillAnswer | None = None
        # The request's own deadline ends this leg with the other one, when the attempt is closed.
        timer = asyncio.timeout(0 if self._hold.lost else None)
        try:
            async with timer:
                self._timer = timer
                response = await self._links.open(
                    url, "/internal/prefill", (b'{"request":', *body, b"%b}" % legs.encode()), self._headers
                )
                try:
                    if ticket is None and response.status == 200:
                        early = await self._early_answer(response, tell)
                    raw = await response.read()
                except BaseException:
                    response.close()
                    raise
                response.release()
        except LOST as e:
            self._links.abort(url, self._request_id, self._attempt)
            raise self._lose(e) from e
        finally:
            self._timer = None
        if response.status != 200:
            raise refusal(response.status, raw, "prefill", url)
        answer = await self._read_answer(raw) if early is None else early
        if answer.attempt != self._attempt:
            raise EngineFailed(
                f"prefill engine {url} answered for attempt {answer.attempt!r}, expected {self._attempt!r}",
                stage="prefill",
            )
        self.answer = answer

    def _lose(self, cause: object) -> EngineLost:
        """The engine is gone, and the pool knows; the error for that."""
        error = lost("prefill", self.url, self._attempt, self._hold.lost or cause)
        self._pool.failed(self.url, error.message)
        return error

    async def _read_answer(self, raw: bytes) -> PrefillAnswer:
        try:
            brief = len(raw) <= LONG_WORDS
            return parse_prefill_answer(raw) if brief else await asyncio.to_thread(parse_prefill_answer, raw)
        except ValueError as e:
            raise EngineFailed(
                f"prefill engine {self.url} sent an answer that cannot be read: {e}", stage="prefill"
            ) from e

    async def _early_answer(self, response: Exchange, tell: Tell) -> PrefillAnswer:
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
                raise EngineFailed(f"prefill engine {self.url} sent a line that cannot be read: {e}") from e
            if isinstance(said, PrefillAnswer):
                return said
            if said.error is not None:
                raise said.error
            if said.token_ids:
                self._told = tell(said) or self._told
            elif not passed:
                await self.reserved()
                assert self._ticket is not None
                passed = True
                self._links.ticket(self.url, TicketCall(ticket=self._ticket))

    def _lost(self, reason: str) -> None:
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(asyncio.get_running_loop().time())
