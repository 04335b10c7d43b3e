"""Structured output: what a request may generate, as masks over the vocabulary. llguidance does the parsing.

A grammar comes from a client and is hostile until shown otherwise: its text is bounded here, the work of compiling it
and of every mask by llguidance's limits (docs/adr/0029). Free of torch: the API checks a grammar before any engine
sees it, an engine makes the masks.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakSet

from llguidance import LLExecutor, LLMatcher, LLTokenizer

from ..errors import ConfigError, Overloaded
from ..request import Structure
from .allocated import memory_in_use
from .as_written import as_written
from .compiled import Compiled, check_size, memory_of, states_of
from .guide import Guide, Place
from .shares import Held, giving_way
from .special_tokens import SpecialTokens

_KEPT, _KEPT_TEXT = 32, 1 << 22
"""Compiled grammars, and characters of them together."""
_MOST_ALONE = 8
"""Requests of an engine that have a lexer of their own, at a time."""
_FIRST_STATES, _GROWTH = 2_000, 5
"""Of a grammar's first lexer, and how many times as many the next one has; few need more than the first. A text of
counted characters does after some 100 tokens."""
_MOST_MEMORY = 1 << 30
"""Bytes of all that an engine has at a time: requests may each have a grammar that nobody else has."""
_ROOM = 8
"""Where too much is counted, walks are weighed until this part of all is free: soon they have grown again."""
_RELEASE_S = 2.0
"""Longest wait for the masks that those are at who give way."""


class Grammars:
    """Makes a `Guide` of a `Structure`, for the vocabulary of one model. Safe to use from several threads."""

    def __init__(self, tokenizer_json: str, *, eos_token_ids: Sequence[int], vocab_size: int | None) -> None:
        """`tokenizer_json`: the text of the model's tokenizer.json. ConfigError for one that cannot be read."""
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Structure, Compiled] = OrderedDict()
        """At the start of their grammars; a request with n = 128 asks for one as often. All copies of one walk with one
        lexer, whose states are found once for all of them, and are bounded."""
        self._size = 0
        """Characters of their texts."""
        self._there: WeakSet[Compiled] = WeakSet()
        """All that are compiled now, kept or walked with, until they are really gone."""
        self._guides: WeakSet[Guide] = WeakSet()
        self._places: WeakSet[Place] = WeakSet()
        """Of the requests that have a lexer of their own."""
        self._executor: LLExecutor | None = None
        self._in_use = memory_in_use()
        self.told: Callable[[], None] = lambda: None
        """Called, on any thread, when guides have released: requests that wait may have one of them (`Guide.lost`)."""
        try:
            tokenizer = json.loads(tokenizer_json)
            self._special = SpecialTokens(tokenizer)
            apart = json.dumps(as_written(self._special.apart(tokenizer)))
            del tokenizer  # many times as large
            self._tokenizer = LLTokenizer(apart, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        except ValueError as e:
            raise ConfigError(f"tokenizer.json: not usable for structured output: {e}") from e

    @staticmethod
    def load(model: str | Path, *, eos_token_ids: Sequence[int] = (), vocab_size: int | None = None) -> Grammars:
        """Grammars for a model directory. Masks end with the tokenizer's last id where no `vocab_size` is given."""
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

    def _guide(self, structure: Structure, shared: Compiled, whose: str) -> Guide:
        def another(spent: Compiled | None, place: Place | None) -> Compiled:
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

    def _shared(self, structure: Structure, spent: Compiled | None, whose: str) -> Compiled:
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

    def _keep(self, structure: Structure, compiled: Compiled) -> None:
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

    def _compile(self, structure: Structure, states: int | None = None, whose: str = "") -> Compiled:
        """`states`: with no larger lexer than that, if it is enough to begin with; None: the largest."""
        check_size(structure, "structure")
        states = states_of(states)
        compiled = self._room_for(memory_of(structure, states), states, whose)
        try:
            if compiled.compile(self._tokenizer, self._special, structure):
                return compiled
        finally:
            if compiled.matcher is None:  # an error may hold this frame for a while
                with self._lock:
                    self._there.discard(compiled)
        del compiled
        return self._compile(structure, _GROWTH * states, whose)

    def _room_for(self, memory: int, states: int, whose: str) -> Compiled:
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
                    compiled = Compiled(memory, states)
                    self._there.add(compiled)
                    return compiled
            self._weigh(memory)
            with self._lock:
                if self._used() + memory <= _MOST_MEMORY:
                    continue
                ending = None if why else self._giving_way(memory, whose)
            if ending is None:
                raise _crowded(used, memory, why or "no client has more of them")
            self._release(ending)
            why = "what gives way for it is still in use"

    def _grew(self) -> None:
        """A walk has grown: where all take too much, release what gives way."""
        with self._lock:
            if self._used() <= _MOST_MEMORY or self._drop_unused(0) <= _MOST_MEMORY:
                return
        self._weigh(0)
        with self._lock:
            ending = [] if self._used() <= _MOST_MEMORY else self._giving_way(0, "") or []
        self._release(ending)

    def _weigh(self, memory: int) -> None:
        """Before anybody gives way for so many bytes: what walks take is counted by time, which may be too much."""
        if not self._in_use():
            return
        with self._lock:
            guides = sorted(self._guides, key=lambda guide: -guide.walk)
        for guide in guides:
            guide.weigh(self._in_use)
            with self._lock:
                if self._used() + memory <= _MOST_MEMORY - _MOST_MEMORY // _ROOM:
                    return

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

    def _release(self, guides: Sequence[Guide]) -> None:
        ends_at = time.monotonic() + _RELEASE_S
        for guide in guides:
            guide.release(_MOST_MEMORY, max(0.0, ends_at - time.monotonic()))
        if guides:
            self.told()


def _crowded(used: int, memory: int, why: str) -> Overloaded:
    return Overloaded(
        f"structured output: the grammars of all requests take {used >> 20} MiB, and this one {memory >> 20} MiB more; "
        f"{_MOST_MEMORY >> 20} are allowed, and {why}; simplify it, or retry later",
        status=429,
    )
