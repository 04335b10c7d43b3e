"""One request's walk through its grammar: masks, forced tokens, and what the walk keeps of memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from llguidance import LLExecutor, LLMatcher

from ..errors import EngineFailed, InvalidRequest, Overloaded
from ..interfaces.steps import Forced, Outgrown
from .compiled import Compiled, first_line, spent

_LEAST_SHARED, _LEAST_PROGRESS = 8, 256
"""Tokens after which a shared lexer may be used up, and one of one's own: sooner, the grammar is the cause, and not the
length of answers."""
_WALK_RATE, _TAKING_RATE, _TOKEN_WALK = 24e6, 320e6, 200_000
"""What a walk keeps, as llguidance does not tell it: bytes for each second of a processor that it takes, and for each
of taking tokens in, whichever is less; and of a token at most. Measured: 4 to 20 MB a second, and 44 to 300, of usual
schemas (230 bytes a token, 5 and 17 microseconds) as of those that are made to keep much (19 KB, 0.1 and 2.3 ms)."""
_STEP = 512 << 10
"""Bytes that a walk may grow until all are added up again."""
_MOST_WEIGHED, _SPARE, _LEAST_PART = 32 << 20, 2, 16
"""Bytes of a walk that may be copied to be weighed; how many times as much as a copy it takes at most, as what grows
has room for more; and of what it counted as the least part that it is taken for: others allocate, too, and free."""
_SLOW_S, _MOST_COUNTED_S = 0.0005, 0.25
"""A grammar that takes longer to take a token in has the next ones taken in apart; and how much is counted of each."""

_R = TypeVar("_R")


class Place:
    """A request has it as long as it has a lexer of its own."""


class Guide:
    """One request's place in its grammar: `interfaces.steps.Constraint`. Used by one thread at a time.

    Where the lexer that it shares with other requests is used up, it goes on with the next one that is shared, and
    where that does not last with one of its own, which few have: what others ask for does not end it, and a long answer
    may use up many. Any thread may have it release its grammar, at once where it is not in use, as that of a request
    which waits for a row: it refuses to answer then.
    """

    def __init__(
        self,
        shared: Compiled,
        another: Callable[[Compiled | None, Place | None], Compiled],
        apart: Callable[[], tuple[LLExecutor, LLMatcher]],
        grew: Callable[[], None],
        whose: str,
    ) -> None:
        """`shared`: the guide walks with a copy of it. `another` takes a shared one whose lexer is used up, and gives
        the next one that is shared, or for a place one that nobody shares; it may take seconds. `apart`: what slow
        tokens are taken in with. `grew` is called when the walk has, and may release any guide. `whose`: the client.
        """
        self.whose = whose
        self.walk = 0
        """Bytes that it keeps of the tokens it has taken, about."""
        self._taking_s = 0.0
        """Taken to take the newest tokens in."""
        self._weighed = 0
        """Its bytes when it was last weighed."""
        self._told = 0
        """How many they were when `grew` was called."""
        self._grew = grew
        self._using = threading.Lock()
        """Held by whoever looks at the matcher."""
        self._gave_way = ""
        """Why it has released its grammar, or is to."""
        self._another = another
        self._make_apart = apart
        self._apart: tuple[LLExecutor, LLMatcher] | None = None
        self.apart_s = 0.0
        """Taken by work on another thread than the caller's, about."""
        self._shared: Compiled | None = shared
        """None: it is alone."""
        self.compiled: Compiled | None = None
        """What it walks with; None: it has released it."""
        self._matcher: Any = None
        self._renewed = 0
        self._place: Place | None = None
        self._begun_at = 0
        """Tokens that were there when it got its present one."""
        self._begin(shared)

    def allowed(self, generated: Sequence[int]) -> bytes:
        """The mask for the token after these: once the grammar is fulfilled, end-of-sequence tokens are in it.

        Raises InvalidRequest when a limit of the work for one token was met, which compiling did not show, EngineFailed
        when a token was not allowed, and Outgrown.
        """
        return self._walking(generated, lambda: self._mask(generated))

    def _mask(self, generated: Sequence[int]) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()
        self._check(len(generated))
        return mask

    def forced(self, generated: Sequence[int], most: int) -> Forced:
        """The tokens to which the grammar leaves no alternative after these, at most `most`, and the masks after each.

        They are the tokens that the tokenizer makes of the forced text, and the masks before them allow no others: a
        token that also fits the text that may follow is left to be drawn.
        """
        return self._walking(generated, lambda: self._forced(generated, most))

    def release(self, most: int, timeout_s: float) -> None:
        """Give the grammar back: within so many seconds, or with the mask that it is at. Nothing is allowed then.
        `most`: bytes that those of all requests may take."""
        compiled = self.compiled
        if compiled is None:
            return
        self._gave_way = (
            f"structured output: this grammar takes {compiled.memory + self.walk >> 20} MiB, the most of this "
            f"client's, who has most of the {most >> 20} of all; simplify it, or retry later"
        )
        del compiled
        if self._using.acquire(timeout=timeout_s):
            self._end_use()

    def weigh(self, in_use: Callable[[], int]) -> None:
        """Count the walk by what a copy of it takes, where that is less: 300 optional properties take a processor long,
        and keep little. `in_use`: bytes that this process has allocated. Nothing where it is in use, is too large to be
        copied, or has hardly grown since."""
        if (
            not self.walk - self._weighed >= _STEP
            or self.walk > _MOST_WEIGHED
            or not self._using.acquire(blocking=False)
        ):
            return
        try:
            if self._gave_way or self._matcher is None:
                return
            before = in_use()
            copy = self._matcher.deep_copy()
            found = in_use() - before
            del copy
            self.walk = self._weighed = self._told = min(self.walk, max(_SPARE * found, self.walk // _LEAST_PART))
        finally:
            self._end_use()

    def lost(self) -> Overloaded | None:
        """Why nothing is allowed any more, without looking; None: something may be."""
        return Overloaded(self._gave_way, status=429) if self._gave_way else None

    def _end_use(self) -> None:
        if self._gave_way:
            self.compiled = self._shared = self._matcher = self._apart = self._place = None
            self.walk = 0
        self._using.release()

    def _begin_use(self) -> None:
        self._using.acquire()
        if self._gave_way:
            self._end_use()
            raise Overloaded(self._gave_way, status=429)

    def _walking(self, generated: Sequence[int], look: Callable[[], _R]) -> _R:
        """What a look at the matcher shows, once it has taken these in."""
        self._begin_use()
        try:
            began, apart, new = time.thread_time(), self.apart_s, len(generated) - self._taken
            self._taking_s = 0.0
            try:
                self._take(generated)
                return look()
            finally:
                took = time.thread_time() - began + self.apart_s - apart
                if new > 0:
                    self.walk += int(min(_WALK_RATE * took, _TAKING_RATE * self._taking_s, _TOKEN_WALK * new))
        finally:
            self._end_use()
            if self.walk > self._told + _STEP:
                self._told = self.walk
                self._grew()

    def _forced(self, generated: Sequence[int], most: int) -> Forced:
        tokens = self._forced_tokens(generated)
        if not most or not tokens:
            return Forced(tokens[:1])
        masks: list[bytes] = []
        for token in tokens[:most]:
            if not self._matcher.consume_token(token):
                break
            mask = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                break
            masks.append(mask)
        self._check(len(generated))
        self._matcher.rollback(len(masks))
        self._check(len(generated))
        return Forced(tokens[: len(masks)], tuple(masks))

    def _begin(self, compiled: Compiled) -> None:
        assert compiled.matcher is not None, "it is compiled"
        self.compiled = compiled
        self.walk = self._weighed = self._told = 0
        # One that nobody shares is kept as it is at its start, too: a copy shares its lexer, and is small.
        self._matcher = compiled.matcher.deep_copy()
        self._taken = 0
        self._ahead: tuple[int, ...] = ()
        """Forced tokens that were found when `_ahead_at` tokens were there."""
        self._ahead_at = 0

    def _forced_tokens(self, generated: Sequence[int]) -> tuple[int, ...]:
        """As many as there are. Looked for again only where those found before end, or another token was drawn: for
        `a{100000}` that takes a tenth of a second, and all requests' masks wait for it."""
        done = len(generated) - self._ahead_at
        if done < len(self._ahead) and self._ahead[:done] == tuple(generated[self._ahead_at :]):
            return self._ahead[done:]
        self._ahead, self._ahead_at = tuple(self._matcher.compute_ff_tokens()), len(generated)
        self._check(len(generated))
        return self._ahead

    def _take(self, generated: Sequence[int]) -> None:
        assert len(generated) >= self._taken, "what was generated does not shrink"
        if len(generated) > self._taken:
            new = list(generated[self._taken :])
            taken = self._take_in(new)
            self._taken += taken
            self._check(len(generated))
            if taken < len(new):
                if self._may_go_on(len(generated)):  # a full lexer may refuse, without a word, what it has allowed
                    raise self._outgrown(len(generated))
                raise EngineFailed(
                    f"structured output: token {new[taken]} was drawn after {self._taken} others, though not allowed"
                )

    def _take_in(self, new: list[int]) -> int:
        """How many of them were allowed, and are taken in.

        llguidance lets no other thread of the interpreter run meanwhile: milliseconds of all steps. Its executor
        does, where it has two matchers to feed.
        """
        if self._apart is None:
            began = time.thread_time()
            taken: int = self._matcher.try_consume_tokens(new)
            self._taking_s = time.thread_time() - began
            if self._taking_s > _SLOW_S * len(new):
                self._apart = self._make_apart()
            return taken
        executor, idle = self._apart
        began, taken = time.perf_counter(), 0
        for token in new:
            allowed, _ = executor.consume_token_par([(self._matcher, token), (idle, token)])
            if not allowed:
                break
            taken += 1
        self._taking_s = min(time.perf_counter() - began, _MOST_COUNTED_S)
        self.apart_s += self._taking_s
        return taken

    def _check(self, count: int) -> None:
        """Raise where the matcher has come to an end; `count`: tokens that were generated."""
        if not self._matcher.is_error():
            return
        if spent(self._matcher) and self._may_go_on(count):
            raise self._outgrown(count)
        # Which grammar is too much work is known only where it is walked: what is wrong is the request, not the engine,
        # and another engine would do no better.
        raise InvalidRequest(
            f"structure: structured output ended after {self._taken} tokens: {first_line(self._matcher)}; "
            "simplify the grammar",
            param="structure",
        )

    def _may_go_on(self, count: int) -> bool:
        """Whether another lexer may help."""
        return self._shared is not None or count - self._begun_at >= _LEAST_PROGRESS

    def _outgrown(self, count: int) -> Outgrown:
        return Outgrown(lambda: self._renew(count))

    def _renew(self, count: int) -> None:
        """Go on with another lexer. The walk begins anew: what it comes by is a small part of what masks look at."""
        self._begin_use()
        try:
            assert self.compiled is not None
            used_up, soon, self._begun_at = self._shared, count - self._begun_at < _LEAST_SHARED, count
            grows = not self.compiled.largest
            self._renewed += not grows
            alone = used_up is None or not (grows or self._renewed == 1 or not soon)
            if alone:
                self._place = self._place or Place()
            place = self._place if alone else None
        finally:
            self._end_use()
        found = self._another(used_up, place)  # it may take seconds
        self._begin_use()
        try:
            self._begin(found)
            self._shared = None if alone else found
        finally:
            self._end_use()
