"""Requests whose prompts each have one short answer, a vector or a score: run side by side, told together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from ..errors import Cancelled, EngineFailed, RequestError
from ..interfaces.backend import Backend
from ..metrics import RequestMetrics
from ..request import FinishReason, GenerateRequest, TokenChunk
from ..serving.call import Call
from .sse import Usage
from .together import together
from .writers import Writers

WIDTH = 32
"""Prompts of one request at a time: engines are kept busy, and other requests do not wait for all of them."""

_FEW = 1 << 13
"""Numbers of vectors and characters, which are written here and now (some 4 ms)."""

Tell = Callable[[Sequence[TokenChunk], int], Iterator[bytes]]
"""The body of the answer in pieces, from the last chunk of each prompt and the tokens of all. May run in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A request that was checked and tokenised."""

    answer_id: str
    requests: tuple[GenerateRequest, ...]
    tell: Tell
    numbers: int = 0
    """Entries of all vectors, which are held until the answer is read."""
    characters: int = 0
    """Of texts that the answer repeats."""
    client: str = ""
    """Whose it is, where that is known."""
    show_cached: bool = True
    """As of `Job`; these answers tell no cached tokens."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_token_ids) for request in self.requests)


class BatchRunner:
    """Answers batches; one for the whole process."""

    def __init__(
        self, backend: Backend, writers: Writers, metrics: RequestMetrics | None, clock: Callable[[], float]
    ) -> None:
        """`clock`: monotonic seconds."""
        self._backend = backend
        self._writers = writers
        self._metrics = metrics
        self._clock = clock

    async def run(self, batch: Batch, width: int, arrived: float, call: Call) -> Usage:
        """The answer, from at most `width` prompts at a time. Raises RequestError."""
        found: dict[int, TokenChunk] = {}
        waiting = iter(enumerate(batch.requests))

        async def work() -> None:
            for number, request in waiting:
                found[number] = await self._last_chunk(request)

        await together(work() for _ in range(min(width, len(batch.requests))))
        tokens = batch.prompt_tokens
        pieces = partial(batch.tell, [found[number] for number in range(len(found))], tokens)
        large = batch.numbers + batch.characters > _FEW or len(found) > WIDTH
        body = await self._writers.joined(batch.client, pieces, large=large)
        if self._metrics is not None:
            self._metrics.prompt_tokens.inc(tokens)
            for _ in found:
                self._metrics.succeeded("stop", self._clock() - arrived)
        await call.reply(200, {"Content-Type": "application/json", "X-Request-Id": batch.answer_id}, body)
        return Usage(tokens, 0, sum(chunk.cached_tokens for chunk in found.values()) if batch.show_cached else 0)

    async def _last_chunk(self, request: GenerateRequest) -> TokenChunk:
        try:
            async with aclosing(self._backend.generate(request)) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                        raise chunk.error or Cancelled("the request was aborted")
                    if chunk.finish_reason is not None:
                        return chunk
        except RequestError as error:
            raise error.located("admission", request.request_id) from error
        raise EngineFailed("the token stream ended without a finish reason")
