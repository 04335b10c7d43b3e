"""Structured output: what a request may generate, as masks over the vocabulary. llguidance does the parsing.

A grammar comes from a client and is hostile until shown otherwise: its text is bounded here, the work of compiling it
and of every mask by llguidance's limits (docs/adr/0029). Free of torch: the API checks a grammar before any engine
sees it, an engine makes the masks.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from ..errors import ConfigError, EngineFailed, InvalidRequest, Overloaded
from ..interfaces.steps import Forced, Outgrown
from ..request import Structure
from .shares import Held, giving_way
from .sources import GRAMMARS

MAX_TEXT = 256 * 1024
"""Most characters of a grammar."""
_LIMITS = LLParserLimits(
    # Regular expressions and terminals: about a second of work at most, and 64 MiB, for all of a grammar.
    initial_lexer_fuel=1_000_000,
    # The same for one token; the parser's part of it.
    step_lexer_fuel=200_000,
    # A tenth of a second of it at most, for which all other requests wait. A schema of 300 optional properties needs
    # some 3,000.
    step_max_items=10_000,
    max_items_in_row=2_000,
    # Of all requests with a grammar, as they share its lexer until that is full; some 330 bytes each with what they
    # stand for.
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
_ERROR_TEXT = 400
_KEPT, _KEPT_TEXT = 32, 1 << 22
"""Compiled grammars, and characters of them together."""
_SPENT = "lexer error"
"""What llguidance's word for a lexer that is used up begins with, whatever of it is; it gets no more for anybody who
shares it."""
_LEAST_SHARED, _LEAST_PROGRESS = 8, 256
"""Tokens after which a shared lexer may be used up, and one of one's own: sooner, the grammar is the cause, and not the
length of answers."""
_MOST_ALONE = 8
"""Requests of an engine that have a lexer of their own, at a time."""
_FIRST_STATES, _GROWTH = 2_000, 5
"""Of a grammar's first lexer, and how many times as many the next one has; few need more than the first. A text of
counted characters does after some 100 tokens."""
_OF_A_GRAMMAR, _OF_A_CHARACTER, _OF_A_STATE = 1 << 20, 256, 340
"""Bytes that a compiled grammar may take, and more for each of its characters (usual ones take 150 for each, and those
of a few words 100 KiB); and of a lexer for each state that it may have."""
_MOST_MEMORY = 1 << 30
"""Bytes of all that an engine has at a time: requests may each have a grammar that nobody else has."""
_WALK_RATE, _TAKING_RATE, _TOKEN_WALK = 24e6, 320e6, 200_000
"""What a walk keeps, as llguidance does not tell it: bytes for each second of a processor that it takes, and for each
of taking tokens in, whichever is less; and of a token at most. Measured: 4 to 20 MB a second, and 44 to 300, of usual
schemas (230 bytes a token, 5 and 17 microseconds) as of those that are made to keep much (19 KB, 0.1 and 2.3 ms)."""
_STEP = 512 << 10
"""Bytes that a walk may grow until all are added up again."""
_LET_GO_S = 2.0
"""Longest wait for the masks that those are at who give way."""


_SLOW_S, _MOST_COUNTED_S = 0.0005, 0.25
"""A grammar that takes longer to take a token in has the next ones taken in apart; and how much is counted of each."""


_R = TypeVar("_R")


class _Place:
    """A request has it as long as it has a lexer of its own."""


class _Compiled:
    """A grammar and its lexer, there for as long as a request walks with it, or it is kept."""

    def __init__(self, memory: int, states: int) -> None:
        """`memory`: bytes, at most. `states` that its lexer may have."""
        self.matcher: LLMatcher | None = None
        """At the start; None while it is compiled."""
        self.memory = memory
        self.states = states


class Grammars:
    """Makes a `Guide` of a `Structure`, for the vocabulary of one model. Safe to use from several threads."""

    def __init__(self, tokenizer_json: str, *, eos_token_ids: Sequence[int], vocab_size: int | None) -> None:
        """`tokenizer_json`: the text of the model's tokenizer.json. ConfigError for one that cannot be read."""
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Structure, _Compiled] = OrderedDict()
        """At the start of their grammars; a request with n = 128 asks for one as often. All copies of one walk with one
        lexer, whose states are found once for all of them, and are bounded."""
        self._size = 0
        """Characters of their texts."""
        self._there: WeakSet[_Compiled] = WeakSet()
        """All that are compiled now, kept or walked with, until they are really gone."""
        self._guides: WeakSet[Guide] = WeakSet()
        self._places: WeakSet[_Place] = WeakSet()
        """Of the requests that have a lexer of their own."""
        self._executor: LLExecutor | None = None
        self.told: Callable[[], None] = lambda: None
        """Called, on any thread, when guides have let go: requests that wait may have one of them (`Guide.lost`)."""
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        except ValueError as e:
            raise ConfigError(f"tokenizer.json: not usable for structured output: {e}") from e

    @staticmethod
    def load(model: str | Path, *, eos_token_ids: Sequence[int] = (), vocab_size: int | None = None) -> Grammars:
        """Of a model directory. The masks end with the last id of the tokenizer where no `vocab_size` is given."""
        text = (Path(model) / "tokenizer.json").read_text(encoding="utf-8")
        return Grammars(text, eos_token_ids=eos_token_ids, vocab_size=vocab_size)

    def guide(self, structure: Structure, whose: str = "") -> Guide:
        """A new guide at the start of the grammar, for a client. InvalidRequest for one that is wrong or impossible.

        A grammar that nobody has checked (`checker.Checker`) may take very long.
        """
        found = self.known(structure, whose)
        return self._guide(structure, self._shared(structure, None, whose), whose) if found is None else found

    def known(self, structure: Structure, whose: str = "") -> Guide | None:
        """The same at once, where the grammar was compiled not long ago."""
        with self._lock:
            compiled = self._compiled.get(structure)
            if compiled is None:
                return None
            self._compiled.move_to_end(structure)
        return self._guide(structure, compiled, whose)

    def _guide(self, structure: Structure, shared: _Compiled, whose: str) -> Guide:
        def another(spent: _Compiled | None, place: _Place | None) -> _Compiled:
            if place is None:
                return self._shared(structure, spent, whose)
            with self._lock:
                if self._compiled.get(structure) is spent:
                    self._drop(structure)
                if place not in self._places and len(self._places) >= _MOST_ALONE:
                    raise Overloaded(
                        f"structured output: the grammar takes a lexer of its own, which {_MOST_ALONE} other requests "
                        "have now; simplify it, or retry later",
                        status=429,
                    )
                self._places.add(place)
            return self._compile(structure, whose=whose)

        guide = Guide(shared, another, self._apart, self._grew, whose)
        with self._lock:
            self._guides.add(guide)
        return guide

    def _apart(self) -> tuple[LLExecutor, LLMatcher]:
        """A thread of llguidance's own, of which all have one, and a matcher that refuses all tokens at once."""
        with self._lock:
            if self._executor is None:
                self._executor = LLExecutor(num_threads=1)
        idle = LLMatcher(self._tokenizer, 'start: "a"', log_level=0)
        idle.consume_token(self._tokenizer.eos_token)
        assert idle.is_error(), "it would be work to feed it"
        return self._executor, idle

    def _shared(self, structure: Structure, spent: _Compiled | None, whose: str) -> _Compiled:
        """What all requests with this grammar copy: that which is kept, unless it is `spent`, else a new one."""
        with self._lock:
            found = self._compiled.get(structure)
        if found is None or found is spent:
            made = self._compile(structure, _FIRST_STATES if spent is None else _GROWTH * spent.states, whose)
            with self._lock:
                found = self._compiled.get(structure)
                if found is None or found is spent:
                    found = made
                    self._keep(structure, made)
        return found

    def _keep(self, structure: Structure, compiled: _Compiled) -> None:
        self._drop(structure)
        self._compiled[structure] = compiled
        self._size += len(structure.text)
        while len(self._compiled) > _KEPT or self._size > max(_KEPT_TEXT, len(structure.text)):
            self._drop(next(iter(self._compiled)))

    def _drop(self, structure: Structure) -> None:
        if self._compiled.pop(structure, None) is not None:
            self._size -= len(structure.text)

    def check(self, structure: Structure) -> object:
        """Compile it as an engine does, without keeping it: what it takes is taken for as long as what is returned is
        held. Raises as `guide`."""
        return self._compile(structure, _FIRST_STATES)

    def _compile(self, structure: Structure, states: int | None = None, whose: str = "") -> _Compiled:
        """`states`: with no larger lexer than that, if it is enough to begin with; None: the largest."""
        param = "structure"
        check_size(structure, param)
        most: int = _LIMITS.max_lexer_states
        states = most if states is None else min(states, most)
        compiled = self._room_for(memory_of(structure) + _OF_A_STATE * states, states, whose)
        try:
            try:
                grammar = GRAMMARS[structure.kind](structure.text)
            except (ValueError, RecursionError) as e:
                raise InvalidRequest(f"{param}: {e}"[:_ERROR_TEXT], param=param) from e
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_with_states(states))
            if not matcher.is_error():
                # The first mask shows what compiling does not: that nothing at all fulfils the grammar.
                matcher.compute_bitmask()
            if not matcher.is_error():
                compiled.matcher = matcher
                return compiled
            if states >= most or _SPENT not in matcher.get_error():
                raise InvalidRequest(f"{param}: {_first_line(matcher)}", param=param)
        finally:
            if compiled.matcher is None:  # an error may hold this frame for a while
                with self._lock:
                    self._there.discard(compiled)
        del compiled, matcher
        return self._compile(structure, _GROWTH * states, whose)

    def _room_for(self, memory: int, states: int, whose: str) -> _Compiled:
        """One of so many bytes, of a client, that is counted from now on. For its sake what nobody walks with is kept
        no longer, and then what takes most of the client's that has most gives way. Overloaded where that would be the
        new one, or takes no more, or is not gone soon."""
        why = ""
        while True:
            with self._lock:
                used = self._used()
                if used + memory > _MOST_MEMORY:
                    used = self._drop_unused(memory)
                if used + memory <= _MOST_MEMORY:
                    compiled = _Compiled(memory, states)
                    self._there.add(compiled)
                    return compiled
                ending = None if why else self._giving_way(memory, whose)
            if ending is None:
                raise _crowded(used, memory, why or "no client has more of them")
            self._let_go(ending)
            why = "what gives way for it is still in use"

    def _grew(self) -> None:
        """A walk did: where all take too much, let go what gives way."""
        ending = list[Guide]()
        with self._lock:
            if self._used() > _MOST_MEMORY and self._drop_unused(0) > _MOST_MEMORY:
                ending = self._giving_way(0, "") or []
        self._let_go(ending)

    def _used(self) -> int:
        """Bytes of all that is there."""
        return sum(one.memory for one in self._there) + sum(one.walk for one in self._guides)

    def _drop_unused(self, memory: int) -> int:
        """Keep no longer what nobody walks with until there is room; bytes in use then."""
        walked = {id(guide.compiled) for guide in self._guides}
        for structure in [s for s, compiled in self._compiled.items() if id(compiled) not in walked]:
            if self._used() + memory <= _MOST_MEMORY:
                break
            self._drop(structure)
        return self._used()

    def _giving_way(self, memory: int, whose: str) -> list[Guide] | None:
        """Whose walks are to end for so many bytes more; what only they walk with is kept no longer. None: as
        `giving_way`."""
        holders: dict[Held, list[Guide]] = {}
        grammars: dict[int, int] = {}
        for guide in self._guides:
            compiled = guide.compiled
            if compiled is not None:
                grammars[id(compiled)] = compiled.memory
                holders.setdefault((guide.whose, id(compiled)), []).append(guide)
        walks = {held: sum(guide.walk for guide in guides) for held, guides in holders.items()}
        gone = giving_way(grammars, walks, self._used() + memory - _MOST_MEMORY, whose, memory)
        if gone is None:
            return None
        left = {key for _, key in walks.keys() - set(gone)}
        unused = {key for _, key in gone} - left
        for structure in [s for s, compiled in self._compiled.items() if id(compiled) in unused]:
            self._drop(structure)
        return [guide for held in gone for guide in holders[held]]

    def _let_go(self, guides: Sequence[Guide]) -> None:
        ends_at = time.monotonic() + _LET_GO_S
        for guide in guides:
            guide.let_go(max(0.0, ends_at - time.monotonic()))
        if guides:
            self.told()


def memory_of(structure: Structure) -> int:
    """Most bytes that it may take when it is compiled, without its lexer's states: `checker` refuses what takes more,
    however short (a `multipleOf` of 199999 takes 90 MB)."""
    return _OF_A_GRAMMAR + _OF_A_CHARACTER * len(structure.text)


def _with_states(most: int) -> LLParserLimits:
    """The limits, of a lexer with so many states."""
    names = ("initial_lexer_fuel", "step_lexer_fuel", "step_max_items", "max_items_in_row", "max_grammar_size")
    return LLParserLimits(max_lexer_states=most, verbose_errors=False, **{n: getattr(_LIMITS, n) for n in names})


def _crowded(used: int, memory: int, why: str) -> Overloaded:
    return Overloaded(
        f"structured output: the grammars of all requests take {used >> 20} MiB, and this one {memory >> 20} MiB more; "
        f"{_MOST_MEMORY >> 20} are allowed, and {why}; simplify it, or retry later",
        status=429,
    )


def check_size(structure: Structure, param: str) -> None:
    """Raise InvalidRequest, naming `param`, for a text that is too long to be looked at."""
    if len(structure.text) > MAX_TEXT:
        raise InvalidRequest(f"{param}: {len(structure.text)} characters, at most {MAX_TEXT} are allowed", param=param)


class Guide:
    """One request's place in its grammar: `interfaces.steps.Constraint`. Used by one thread at a time.

    Where the lexer that it shares with other requests is used up, it goes on with the next one that is shared, and
    where that does not last with one of its own, which few have: what others ask for does not end it, and a long answer
    may use up many. Any thread may have it let go of its grammar, at once where it is not in use, as that of a request
    which waits for a row: it refuses to answer then.
    """

    def __init__(
        self,
        shared: _Compiled,
        another: Callable[[_Compiled | None, _Place | None], _Compiled],
        apart: Callable[[], tuple[LLExecutor, LLMatcher]],
        grew: Callable[[], None],
        whose: str,
    ) -> None:
        """`shared`: the guide walks with a copy of it. `another` takes a shared one whose lexer
        is used up, and gives the next one that is shared, or for a place one that nobody shares; it may take seconds.
        `apart`: what slow tokens are taken in with. `grew` is called when the walk has, and may let go of any. `whose`:
        of which client."""
        self.whose = whose
        self.walk = 0
        """Bytes that it keeps of the tokens it has taken, about."""
        self._taking_s = 0.0
        """Taken to take the newest tokens in."""
        self._told = 0
        """How many they were when `grew` was called."""
        self._grew = grew
        self._using = threading.Lock()
        """Held by whoever looks at the matcher."""
        self._gave_way = ""
        """Why it has let go, or is to."""
        self._another = another
        self._make_apart = apart
        self._apart: tuple[LLExecutor, LLMatcher] | None = None
        self.apart_s = 0.0
        """Taken by work on another thread than the caller's, about."""
        self._shared: _Compiled | None = shared
        """None: it is alone."""
        self.compiled: _Compiled | None = None
        """What it walks with; None: it has let go."""
        self._matcher: Any = None
        self._renewed = 0
        self._place: _Place | None = None
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

    def let_go(self, timeout_s: float) -> None:
        """Give the grammar back: within so many seconds, or with the mask that it is at. Nothing is allowed then."""
        compiled = self.compiled
        if compiled is None:
            return
        self._gave_way = (
            f"structured output: this grammar takes {compiled.memory + self.walk >> 20} MiB, the most of this "
            f"client's, who has most of the {_MOST_MEMORY >> 20} of all; simplify it, or retry later"
        )
        del compiled
        if self._using.acquire(timeout=timeout_s):
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

    def _begin(self, compiled: _Compiled) -> None:
        assert compiled.matcher is not None, "it is compiled"
        self.compiled = compiled
        self.walk = self._told = 0
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
        if _SPENT in self._matcher.get_error() and self._may_go_on(count):
            raise self._outgrown(count)
        # Which grammar is too much work is known only where it is walked: what is wrong is the request, not the engine,
        # and another engine would do no better.
        raise InvalidRequest(
            f"structure: structured output ended after {self._taken} tokens: {_first_line(self._matcher)}; "
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
            spent, soon, self._begun_at = self._shared, count - self._begun_at < _LEAST_SHARED, count
            grows = self.compiled.states < _LIMITS.max_lexer_states
            self._renewed += not grows
            alone = spent is None or not (grows or self._renewed == 1 or not soon)
            if alone:
                self._place = self._place or _Place()
            place = self._place if alone else None
        finally:
            self._end_use()
        found = self._another(spent, place)  # it may take seconds
        self._begin_use()
        try:
            self._begin(found)
            self._shared = None if alone else found
        finally:
            self._end_use()


def _first_line(matcher: LLMatcher) -> str:
    error: str = matcher.get_error()
    return error.strip().splitlines()[0][:_ERROR_TEXT] if error.strip() else "the grammar was not accepted"
