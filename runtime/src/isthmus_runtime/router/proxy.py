"""The router as a Backend: chooses engines, runs attempts on them, and hands the chunks on as they come."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import urandom
from types import MappingProxyType

from ..config import RouterConfig
from ..errors import InvalidRequest, NeverFits, Overloaded, RequestError, UnknownModel
from ..interfaces.backend import Take
from ..metrics import RouterMetrics
from ..protocol.request import may_begin_early, request_parts
from ..request import GenerateRequest, ServedTask, TokenChunk
from ..tokenising import Tokenising
from .attempt import Attempt, TryElsewhere
from .links import Links
from .passed_on import NeedsIds, OwnTokenizer, expected_tokens, takes, takes_text
from .policy import Choice, Facts, Fleet, PolicyName, Refusal, Rules, choose
from .pool import EnginePool
from .prefixes import Prefixes, cached_tokens, prompt_hashes

_DEADLINE_MARGIN_S = 0.5
"""Engines enforce the deadline and know what they were waiting for; the router steps in when they do not answer."""
_RETRY_AFTER_S = 1.0
_GAP_S = 10.0
"""How long a request waits while engines are there and none takes requests: the only one restarts, or a rollout has
stopped the last of the old before the first of the new is ready."""
_GROUPS = 4096
"""Prompts with several choices whose engine is remembered: the choices after the first follow it at once."""
_GROUPS_HASHED = 16
"""Of these, those whose prompt's hashes are remembered: 36 bytes for each block."""
_OFF_LOOP_TOKENS = 8192
"""Longer prompts are hashed in a thread (about 0.1 ms per thousand tokens)."""
_TEXT_REFUSED = ("prompt", "request.prompt")
"""What engines name that take no text: those without a tokenizer, and those that do not know the field."""

_REFUSALS = {
    Refusal.NO_DECODE: "no decode engine takes requests now",
    Refusal.NO_ADAPTER: "no decode engine that takes requests now has the adapter",
    Refusal.NO_PREFILL: "no prefill engine takes requests now, and computing prompts on decode is switched off",
    Refusal.NO_COMPATIBLE_PREFILL: (
        "no prefill engine has the fingerprint and transfer mode of a decode engine, and computing prompts on decode "
        "is switched off"
    ),
}


class RouterBackend:
    """A pair of remote engines behind the Backend protocol."""

    def __init__(
        self,
        config: RouterConfig,
        pool: EnginePool,
        links: Links,
        *,
        metrics: RouterMetrics | None = None,
        prefixes: Prefixes | None = None,
        tokenizer: OwnTokenizer | None = None,
        gap_s: float = _GAP_S,
    ) -> None:
        """`tokenizer` None: prompts come as ids alone."""
        self._pool = pool
        self._tokenizer = tokenizer
        self._tokenising = None if tokenizer is None else Tokenising(tokenizer.tokenise)
        self._links = links
        self._metrics = metrics
        self._gap_s = gap_s
        self._prefixes = prefixes
        self._max_queue = config.max_queue
        self._rules = Rules(
            policy=PolicyName(config.policy),
            disaggregate_above=config.disaggregate_above,
            local_without_prefill=config.on_prefill_unavailable == "local",
        )
        self._in_flight = 0
        self._begun = 0
        """Of these, requests that have a token."""
        self._turn = 0
        self._holders: OrderedDict[str, str] = OrderedDict()
        """Group of requests with one prompt -> the engine that has its KV."""
        self._hashed: OrderedDict[str, Mapping[int, Sequence[int]]] = OrderedDict()
        """The newest such groups -> hashes of the prompt."""
        self._able: Fleet | None = None
        """The last fleet that `ready` found able to serve."""
        self._text: tuple[Fleet | None, bool] = None, False
        """The fleet that was looked at, and whether it takes prompts as text."""
        if metrics is not None:
            metrics.in_flight.set_function(lambda: self._in_flight)
            metrics.running.set_function(lambda: self._begun)
            metrics.waiting.set_function(lambda: self._in_flight - self._begun)

    @property
    def max_model_len(self) -> int:
        """Shortest limit of the engines that generate, tokens; 0 while none has reported."""
        return self._pool.max_model_len

    @property
    def task(self) -> ServedTask:
        """What the engines serve their model for; meaningful once one has reported."""
        return self._pool.task

    def takes_text(self) -> bool:
        """Whether a prompt had better come as text, at present."""
        fleet = self._pool.fleet
        looked_at, found = self._text
        if looked_at is not fleet:
            found = takes_text(self._tokenizer, self._rules.policy, fleet)
            self._text = fleet, found  # at once: threads ask, too
        return found

    def ready(self) -> str:
        """Empty when a prompt could be served now, else why not. It names no engine, for clients are told it: the log
        and /info have what each of them lacks."""
        refusal = self._refusal()
        if refusal is None:
            return ""
        return _REFUSALS[refusal] if self._pool.statuses() else f"{_REFUSALS[refusal]}: none was found yet"

    def _refusal(self) -> Refusal | None:
        fleet = self._pool.fleet
        if self._able is fleet:  # load does not decide whether anybody can
            return None
        long_prompt = Facts(prompt_tokens=self._rules.disaggregate_above + 1, max_tokens=1, turn=0)
        choice = choose(self._rules, fleet, self._pool.loads, long_prompt)
        if isinstance(choice, Choice) or choice is Refusal.LONG_PROMPT:  # shorter ones are served
            self._able = fleet
            return None
        return choice

    def accepting(self) -> str:
        """Empty once prompts were servable, or when a decode engine is known and none is on its way that would change
        the answer; else why not."""
        reason = self.ready()
        pool = self._pool
        settled = pool.complete and pool.max_model_len and not pool.expecting
        return "" if self._able is not None or settled else reason

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer. A failure before the first token is tried once more on another pair, then raised; a later
        one arrives as the last chunk. An engine that cannot be reached at all does not count as a try, for as
        long as a request waits for engines."""
        attempt, chunk = await self._start(request)
        try:
            self._count(request, chunk)
            while True:
                yield chunk
                if chunk.finish_reason is not None:
                    return
                chunk = await attempt.next()
        finally:
            self._end(attempt)

    async def push(self, request: GenerateRequest, take: Take) -> None:
        """See `Pushing`."""
        attempt, chunk = await self._start(request)
        try:
            self._count(request, chunk)
            await attempt.pass_on(chunk, take)
        finally:
            self._end(attempt)

    async def _start(self, request: GenerateRequest) -> tuple[Attempt, TokenChunk]:
        """The attempt that works, with its first chunk. In flight until `_end`."""
        if self._in_flight >= self._max_queue:
            self._refuse("queue-full")
            raise Overloaded(
                f"{self._in_flight} requests are in flight, the limit is {self._max_queue} (--max-queue)",
                status=429,
                retry_after_s=_RETRY_AFTER_S,
            )
        self._in_flight += 1
        try:
            attempt, chunk = await self._begin(request)
        except BaseException:
            self._in_flight -= 1
            raise
        self._begun += 1
        return attempt, chunk

    def _end(self, attempt: Attempt) -> None:
        attempt.close()
        self._begun -= 1
        self._in_flight -= 1

    def _count(self, request: GenerateRequest, chunk: TokenChunk) -> None:
        """What the first chunk tells."""
        if self._metrics is None:
            return
        self._metrics.prefix_queries.inc(chunk.prompt_tokens or len(request.prompt_token_ids))
        if chunk.cached_tokens:
            self._metrics.prefix_hits.inc(chunk.cached_tokens)
        if chunk.note:
            self._metrics.prompt(chunk.note)

    async def _begin(self, request: GenerateRequest) -> tuple[Attempt, TokenChunk]:
        """The attempt that works, with its first chunk."""
        deadline = asyncio.get_running_loop().time() + request.timeout_s + _DEADLINE_MARGIN_S
        if request.prompt is None:
            return await self._try(request, deadline)
        try:
            return await self._try(request, deadline)
        except (NeedsIds, InvalidRequest) as error:
            if isinstance(error, InvalidRequest) and error.param not in _TEXT_REFUSED:
                raise
            # Since it was planned, an engine of an older version has joined the others, or is where one of them was.
            assert self._tokenising is not None
            request = await self._tokenising.by_ids(request)
        attempt, chunk = await self._try(request, deadline)
        return attempt, chunk._replace(prompt_tokens=len(request.prompt_token_ids))

    async def _try(self, request: GenerateRequest, deadline: float) -> tuple[Attempt, TokenChunk]:
        """The same. Raises NeedsIds where the engine that it goes to does not take its prompt as text."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + min(self._gap_s, request.timeout_s)
        hashes: Mapping[int, Sequence[int]] = {} if self._prefixes is None else await self._hashes(request)
        self._turn += 1
        excluded: frozenset[str] = frozenset()
        failed: RequestError | None = None
        try:
            while True:
                facts = self._facts(request, excluded, hashes)
                choice = choose(self._rules, self._pool.fleet, self._pool.loads, facts)
                if isinstance(choice, Refusal):
                    if choice is Refusal.NO_ADAPTER and (now := self._as_named_now(request)) is not request:
                        request, hashes = now, await self._hashed_anew(now)
                        continue
                    if failed is None and await self._changes(patience):
                        continue
                    self._refuse(choice.value)
                    raise failed or self._refused(choice, facts)
                if request.prompt is not None and not takes(self._tokenizer, choice.decode):
                    raise NeedsIds
                if self._metrics is not None:
                    self._metrics.chosen(choice.reason.value)
                if self._prefixes is not None:
                    for engine in (choice.prefill, choice.decode):
                        if engine is not None:
                            self._prefixes.sent(engine, hashes.get(engine.block_size, ()))
                attempt = Attempt(
                    request,
                    request_parts(request),
                    choice,
                    facts,
                    attempt=urandom(16).hex(),
                    deadline=deadline,
                    pool=self._pool,
                    links=self._links,
                    other_prefill=partial(self._could_pair, request) if failed is None else lambda _: False,
                    metrics=self._metrics,
                    early=self._begins_early(request, choice, facts),
                )
                try:
                    chunk = await attempt.first()
                    if hashes:
                        self._placed(choice, facts, hashes)
                    if request.prompt_group:
                        self._hold(request.prompt_group, choice.decode.url)
                    return attempt, chunk
                except TryElsewhere as e:
                    attempt.close()
                    if isinstance(e.error, UnknownModel):
                        if not await self._has_changed(request, e.url):
                            raise e.error from e
                        request = self._as_named_now(request)
                        hashes = await self._hashed_anew(request)
                        continue
                    if attempt.unsent and failed is None and loop.time() < patience:
                        continue  # the pool has taken it out, until it answers a probe
                    if failed is not None:
                        raise e.error from e
                    failed = e.error
                    excluded = frozenset((e.url,))
                    if self._metrics is not None:
                        self._metrics.retries.inc()
                except BaseException:
                    attempt.close()
                    raise
        finally:
            failed = None  # its traceback has this frame, which has the request

    def _as_named_now(self, request: GenerateRequest) -> GenerateRequest:
        """The request with the adapter that its name stands for by now: it may have another content than when the
        request was planned."""
        now = None if request.adapter is None else self._pool.adapters.get(request.adapter.name)
        return request if now in (None, request.adapter) else replace(request, adapter=now)

    async def _has_changed(self, request: GenerateRequest, url: str) -> bool:
        """Whether the engine, which has refused the request for its adapter, had been given another content of that
        name since it told what it has, and the name stands for one still."""
        wanted = request.adapter
        if wanted is None:
            return False
        await self._pool.ask_again(url)
        fleet = self._pool.fleet
        told = {digest for e in (*fleet.prefill, *fleet.decode) if e.url == url for digest in e.adapters}
        return wanted.digest not in told and wanted.name in self._pool.adapters

    def _refused(self, refusal: Refusal, facts: Facts) -> RequestError:
        if refusal is Refusal.LONG_PROMPT:
            most = self._pool.fleet.longest_prefill
            return NeverFits(
                f"the prompt is too long: it has {facts.prompt_tokens} tokens, but prefill engines take {most} at "
                "most, and computing longer ones on decode is switched off; shorten it"
            )
        return Overloaded(_REFUSALS[refusal], retry_after_s=_RETRY_AFTER_S)

    def _begins_early(self, request: GenerateRequest, choice: Choice, facts: Facts) -> bool:
        """Whether prefill need not wait for decode's reservation."""
        prefill, decode = choice.prefill, choice.decode
        if request.prompt_group:
            # Its other choices begin with the first one's token, and are to find the KV of the prompt at decode.
            return False
        if prefill is None or not (prefill.begins_early and decode.begins_early and may_begin_early(request)):
            return False
        return self._pool.has_room(decode.url, facts.decode_tokens)

    async def _changes(self, until: float) -> bool:
        """Wait for the fleet to change. False: it did not, or no engine could join it."""
        if not self._pool.expecting:
            return False
        try:
            async with asyncio.timeout_at(until):
                await self._pool.changed()
        except TimeoutError:
            return False
        return True

    def _placed(self, choice: Choice, facts: Facts, hashes: Mapping[int, Sequence[int]]) -> None:
        engine = choice.prefill or choice.decode
        if self._metrics is not None and (blocks := len(hashes.get(engine.block_size, ()))):
            self._metrics.placed(facts.cached.get(engine.url, 0) // engine.block_size, blocks)

    def _hold(self, group: str, url: str) -> None:
        self._holders[group] = url
        if len(self._holders) > _GROUPS:
            self._holders.popitem(last=False)

    def _could_pair(self, request: GenerateRequest, without: str) -> bool:
        facts = self._facts(request, frozenset((without,)))
        choice = choose(self._rules, self._pool.fleet, self._pool.loads, facts)
        return isinstance(choice, Choice) and choice.prefill is not None

    async def _hashed_anew(self, request: GenerateRequest) -> Mapping[int, Sequence[int]]:
        """The same, with another adapter than before."""
        self._hashed.pop(request.prompt_group, None)
        return {} if self._prefixes is None else await self._hashes(request)

    async def _hashes(self, request: GenerateRequest) -> Mapping[int, Sequence[int]]:
        """The prompt's block hashes by block size, for the policies that ask for them; once for all its choices."""
        group = self._hashed.get(request.prompt_group)
        if group is not None:
            return group
        fleet = self._pool.fleet
        found: dict[int, Sequence[int]] = {}
        for size in {e.block_size for e in (*fleet.prefill, *fleet.decode)} - {0}:
            if len(request.prompt_token_ids) > _OFF_LOOP_TOKENS:
                found[size] = await asyncio.to_thread(prompt_hashes, request, size)
            else:
                found[size] = prompt_hashes(request, size)
        if request.prompt_group:
            self._hashed[request.prompt_group] = found
            if len(self._hashed) > _GROUPS_HASHED:
                self._hashed.popitem(last=False)
        return found

    def _facts(
        self,
        request: GenerateRequest,
        excluded: frozenset[str],
        hashes: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> Facts:
        cached: Mapping[str, int] = {}
        if self._prefixes is not None and hashes:
            fleet = self._pool.fleet
            cached = cached_tokens(self._prefixes, (*fleet.prefill, *fleet.decode), hashes)
        return Facts(
            prompt_tokens=expected_tokens(request),
            max_tokens=request.sampling.max_tokens,
            turn=self._turn,
            excluded=excluded,
            cached=cached,
            adapter="" if request.adapter is None else request.adapter.digest,
            holder=self._holders.get(request.prompt_group, ""),
        )

    def _refuse(self, reason: str) -> None:
        if self._metrics is not None:
            self._metrics.refused(reason)
