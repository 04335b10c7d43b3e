"""The router in virtual time: the real policy, and the order of calls that `router/attempt.py` makes over HTTP.

Per request: decode reserves and answers a ticket, prefill gets it, decode hears how that went (commit), tokens stream
back. Or prefill begins `early`, beside decode's reservation, and the ticket follows. The first failure ends the other
leg; before the first token the request is tried once more elsewhere, under a new attempt id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import DeadlineExceeded, EngineFailed, Overloaded, RequestError
from ..protocol.calls import AbortCall, CommitCall, GenerateCall, PrefillAnswer, PrefillCall, TicketCall
from ..protocol.request import WireRequest
from ..protocol.ticket import Ticket
from ..request import FinishReason, GenerateRequest, TokenChunk
from ..router import policy
from ..router.policy import Choice, Endpoint, Facts, Fleet, Load, Rules
from .clock import Clock, Violation
from .network import Exchange, Network, peer_url

PROBE_S = 0.2
PROBE_AGAIN_S = 0.05
RETRIES = 1
DEADLINE_MARGIN_S = 0.5


class VirtualRouter:
    """One router process."""

    def __init__(
        self,
        clock: Clock,
        net: Network,
        rules: Rules,
        epoch: str,
        discover: Callable[[], tuple[list[Endpoint], list[Endpoint]]],
        *,
        early: bool = False,
    ) -> None:
        self.clock = clock
        self.net = net
        self.rules = rules
        self.epoch = epoch
        self.up = True
        self.turn = 0
        self.loads: dict[str, Load] = {}
        self.flights: dict[Flight, None] = {}
        self.early = early
        self._discover = discover
        self.fleet: Fleet = policy.fleet((), ())
        self._watch()

    def _watch(self) -> None:
        if self.up:
            self._probe()
            self.clock.after(PROBE_S, self._watch)

    def _probe(self) -> None:
        self.fleet = policy.fleet(*self._discover())

    def failed(self, url: str) -> None:
        """A contact failed: no new requests to it until the next probe."""
        self.clock.after(PROBE_AGAIN_S, self._probe)
        engines = self.fleet
        givers = [e for e in engines.prefill if e.url != url]
        self.fleet = policy.fleet(givers, [e for e in engines.decode if e.url != url])

    def serve(self, exchange: Exchange, body: object) -> None:
        """A client's request."""
        assert isinstance(body, GenerateRequest)
        flight = Flight(self, exchange, body)
        self.flights[flight] = None
        exchange.on_close = flight.client_left
        flight.start()

    def crash(self) -> None:
        """The process is killed: every connection breaks, on both sides."""
        self.up = False
        for flight in self.flights:
            flight.abandon("connection reset")
        self.flights.clear()


class Flight:
    """One request on its way through the router."""

    def __init__(self, router: VirtualRouter, exchange: Exchange, request: GenerateRequest) -> None:
        self.router = router
        self.request = request
        self._client = exchange
        self._wire = WireRequest.of(request)
        self._tries = 0
        self._excluded: frozenset[str] = frozenset()
        self._done = False
        self._sent = 0
        self._held: list[tuple[str, int]] = []
        self._choice: Choice | None = None
        self._attempt = ""
        self._decode: Exchange | None = None
        self._prefill: Exchange | None = None
        self._commit: Exchange | None = None
        router.clock.after(request.timeout_s + DEADLINE_MARGIN_S, self._timeout)

    def start(self) -> None:
        """Choose engines and call decode."""
        router = self.router
        router.turn += 1
        facts = self._facts(self._excluded)
        choice = policy.choose(router.rules, router.fleet, router.loads, facts)
        if not isinstance(choice, Choice):
            self._refuse(Overloaded(f"no engine takes the request: {choice}"))
            return
        self._choice = choice
        prefill, decode = choice.prefill, choice.decode
        if prefill is not None and (prefill.fingerprint, prefill.mode) != (decode.fingerprint, decode.mode):
            raise Violation(f"paired {prefill} with {decode}")
        self._tries += 1
        name = f"{self.request.request_id}.{self._tries}.{router.epoch}"
        attempt = name if prefill is not None else ""
        self._attempt = name
        self._ticket: Ticket | None = None
        self._waits: Callable[[], None] | None = None
        self._told: int | None = None
        self._owed = False
        router.clock.note("router", self.request.request_id, attempt, "->", prefill and prefill.url, decode.url)
        self._hold(decode.url, facts.decode_tokens)
        if prefill is not None:
            self._hold(prefill.url, facts.prompt_tokens)
        call = GenerateCall(
            request=self._wire,
            attempt=attempt,
            local_attempt="" if attempt else name,
            prefill_url=peer_url(prefill.url) if prefill else "",
            prefill_epoch=prefill.epoch if prefill else "",
        )
        self._decode = router.net.call(
            decode.url,
            call,
            lambda item: self._from_decode(item, prefill, decode, attempt),
            lambda problem: self._decode_over(problem, decode),
        )
        if prefill is not None and router.early:
            self._call_prefill(None, prefill, decode, attempt)

    # ------------------------------------------------------------------------------------------------------ decode

    def _from_decode(self, item: object, prefill: Endpoint | None, decode: Endpoint, attempt: str) -> None:
        if isinstance(item, Ticket):
            assert prefill is not None
            self._ticket = item
            if not self.router.early:
                self._call_prefill(item, prefill, decode, attempt)
            elif self._waits is not None:
                self._waits()
            return
        assert isinstance(item, TokenChunk)
        if self._owed and item.token_ids:
            self._owed = False
            if item.token_ids[0] != self._told:
                raise Violation(f"{attempt}: the client has {self._told} for the first token, decode {item.token_ids}")
            item = item._replace(token_ids=item.token_ids[1:], logprobs=item.logprobs[1:])
        if item.error is not None and self._may_retry(item.error):
            self._retry(decode.url)
            return
        self._sent += len(item.token_ids)
        self._client.push(item)
        if item.finish_reason is not None:
            self._decode = None  # over: nothing to abort there
            self._finish()

    def _decode_over(self, problem: str, decode: Endpoint) -> None:
        if self._done:
            return
        self.router.failed(decode.url)
        error = EngineFailed(f"decode engine {decode.url} was lost: {problem or 'ended early'}", stage="decode")
        if self._may_retry(error):
            self._retry(decode.url)
        else:
            self._refuse(error)

    def _may_retry(self, error: RequestError) -> bool:
        return self._sent == 0 and self._tries <= RETRIES and isinstance(error, EngineFailed | Overloaded)

    def _retry(self, avoid: str) -> None:
        self._excluded = frozenset((avoid,))
        self._hang_up()
        self.start()

    def _facts(self, excluded: frozenset[str]) -> Facts:
        return Facts(
            prompt_tokens=len(self.request.prompt_token_ids),
            max_tokens=self.request.sampling.max_tokens,
            turn=self.router.turn,
            excluded=excluded,
        )

    # ----------------------------------------------------------------------------------------------------- prefill

    def _call_prefill(self, ticket: Ticket | None, prefill: Endpoint, decode: Endpoint, attempt: str) -> None:
        answered: list[bool] = []

        def failed(error: RequestError) -> None:
            if ticket is None and self._told is None and isinstance(error, Overloaded):
                self._when_reserved(attempt, lambda: self._call_prefill(self._ticket, prefill, decode, attempt))
            elif self._may_retry(error) and self._could_pair(prefill.url):
                self._retry(prefill.url)
            else:
                stage = error.stage or "prefill"
                self._when_reserved(attempt, lambda: self._tell(decode, attempt, False, stage, error.message))

        def item(reply: object) -> None:
            if isinstance(reply, TokenChunk) and reply.error is None:
                self._when_reserved(attempt, lambda: self._early(reply, prefill, attempt))
                return
            answered.append(True)
            self._prefill = None  # over: nothing to abort there
            if isinstance(reply, PrefillAnswer):
                self._tell(decode, attempt, True, "", "")
                return
            assert isinstance(reply, TokenChunk) and reply.error is not None
            failed(reply.error)

        def over(problem: str) -> None:
            if not answered:
                self.router.failed(prefill.url)
                failed(EngineFailed(f"prefill engine {prefill.url} was lost: {problem}", stage="prefill"))

        call = PrefillCall(request=self._wire, attempt=attempt, ticket=ticket)
        self._prefill = self.router.net.call(prefill.url, call, item, over)

    def _when_reserved(self, attempt: str, work: Callable[[], None]) -> None:
        """Now, or when this attempt's ticket comes; after what waits already."""
        before = self._waits

        def both() -> None:
            if before is not None:
                before()
            if self._attempt == attempt and not self._done:
                work()

        if self._ticket is None:
            self._waits = both
        else:
            work()

    def _early(self, chunk: TokenChunk, prefill: Endpoint, attempt: str) -> None:
        """What prefill says before its answer: that the ticket may come, and the first token."""
        assert self._ticket is not None
        if not chunk.token_ids:
            call = TicketCall(ticket=self._ticket)
            self.router.net.call(prefill.url, call, lambda item: None, lambda problem: None)
        elif not self._sent:
            self._told, self._owed = chunk.token_ids[0], True
            self._sent = 1
            self._client.push(chunk)

    def _could_pair(self, without: str) -> bool:
        router = self.router
        choice = policy.choose(router.rules, router.fleet, router.loads, self._facts(frozenset((without,))))
        return isinstance(choice, Choice) and choice.prefill is not None

    def _tell(self, decode: Endpoint, attempt: str, ok: bool, stage: str, reason: str) -> None:
        """Commit; when it does not get through, decode counts as lost."""

        def over(problem: str) -> None:
            if problem:
                self._decode_over(f"commit: {problem}", decode)

        call = CommitCall(
            request_id=self.request.request_id,
            attempt=attempt,
            ok=ok,
            stage=stage,
            reason=reason,
            first_token=self._told,
        )
        self._commit = self.router.net.call(decode.url, call, lambda item: None, over)

    # --------------------------------------------------------------------------------------------------------- end

    def client_left(self) -> None:
        """The client hung up."""
        self._finish()

    def abandon(self, problem: str) -> None:
        """The router dies."""
        self._done = True
        self._hang_up()
        self._client.end(problem)

    def _timeout(self) -> None:
        if not self._done:
            self._refuse(DeadlineExceeded(f"no end within {self.request.timeout_s:g} s", stage="router"))

    def _refuse(self, error: RequestError) -> None:
        self._client.push(TokenChunk(finish_reason=FinishReason.ERROR, error=error))
        self._finish()

    def _finish(self) -> None:
        self._done = True
        self._hang_up()
        self._client.end()
        self.router.flights.pop(self, None)

    def _hang_up(self) -> None:
        """Close what is open; an abort goes beside it, for a peer that does not notice."""
        if self._choice is not None and self.router.up:
            for exchange, engine in ((self._decode, self._choice.decode), (self._prefill, self._choice.prefill)):
                if exchange is not None and exchange.client_open and engine is not None:
                    call = AbortCall(request_id=self.request.request_id, attempt=self._attempt)
                    self.router.net.call(engine.url, call, lambda item: None, lambda problem: None)
        for exchange in (self._decode, self._prefill, self._commit):
            if exchange is not None:
                exchange.close()
        self._decode = self._prefill = self._commit = None
        for url, tokens in self._held:
            self.router.loads[url] = self.router.loads[url].plus(-1, -tokens)
        self._held.clear()

    def _hold(self, url: str, tokens: int) -> None:
        self._held.append((url, tokens))
        self.router.loads[url] = self.router.loads.get(url, Load()).plus(1, tokens)


def idle(loads: Mapping[str, Load]) -> bool:
    """Whether no load is left over."""
    return all(load == Load() for load in loads.values())
