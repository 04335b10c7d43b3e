"""Prompts that came as text, made ids by whoever is not to stand still meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from .errors import DeadlineExceeded
from .request import GenerateRequest, PromptText, tokenised
from .sharing.loop_share import LoopShare
from .sharing.reserve import Reserve
from .sharing.threads_in_turns import ThreadsInTurns
from .threads import processors

LONG = 1 << 12
"""Characters; longer prompts are tokenised on a thread."""
_MOST_WAITING = 1024
LARGE = 1 << 16
"""Characters of a text for which memory is set aside before."""
AT_ONCE = 32 << 20
"""Bytes that tokenising takes at most at a time, in this process (`Tokenizer`)."""
_OF_A_LETTER = 64
"""Bytes of what comes in and of the ids, for each character."""
_LEAST_S = 0.001
"""A request always has some time: it ends by its deadline like all others."""
_THREADS = min(16, max(2, processors()))


class Tokenising:
    """Tokenises prompts in one process. Belongs to one event loop."""

    def __init__(
        self,
        tokenise: Callable[[PromptText], Sequence[int]],
        *,
        one_by_one: Callable[[], bool] = lambda: False,
        most: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`tokenise` raises InvalidRequest. `one_by_one`: of `Turns`. `most`: bytes that large texts may take together
        on their way, as of `Reserve`."""
        self._tokenise = tokenise
        self._short = LoopShare()
        self._threads = ThreadsInTurns(
            _THREADS, "tokenise", _MOST_WAITING, "prompts wait to be tokenised", one_by_one=one_by_one
        )
        self._reserve = Reserve(most, _MOST_WAITING, "large prompts wait to be tokenised", self._threads)

    @property
    def set_aside(self) -> int:
        """Bytes that texts on their way may take at present. From any thread."""
        return self._reserve.used

    async def by_ids(self, request: GenerateRequest) -> GenerateRequest:
        """`request`, whose prompt is text, by ids, with what is left of its time.

        A long text waits for its turn among those of other clients. InvalidRequest as of `tokenise`, Overloaded (429)
        when too many wait, DeadlineExceeded when the request's time is over before.
        """
        prompt = request.prompt
        assert prompt is not None
        if len(prompt.text) <= LONG:
            await self._short.room(request.whose)
            return tokenised(request, self._short.spend(partial(self._tokenise, prompt)))
        loop = asyncio.get_running_loop()
        until = loop.time() + request.timeout_s
        try:
            async with asyncio.timeout_at(until):
                ids = await self._on_a_thread(request.whose, prompt)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the request did not end within {request.timeout_s:g} s (--request-timeout): its prompt of "
                f"{len(prompt.text)} characters waited to be tokenised"
            ) from None
        return replace(tokenised(request, ids), timeout_s=max(_LEAST_S, until - loop.time()))

    async def _on_a_thread(self, whose: str, prompt: PromptText) -> Sequence[int]:
        if len(prompt.text) <= LARGE:
            return await self._threads.do(whose, self._tokenise, prompt)
        part = await self._reserve.take(whose, AT_ONCE + _OF_A_LETTER * len(prompt.text))
        return await self._threads.do(whose, self._tokenise, prompt, part)
