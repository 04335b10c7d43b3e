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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..errors import ConfigError, EngineFailed, InvalidRequest
from ..interfaces.steps import Forced
from ..request import Structure
from .schemas import closed

_T = TypeVar("_T")
MAX_TEXT = 256 * 1024
"""Most characters of a grammar."""
MAX_CHOICES = 4096
_LIMITS = LLParserLimits(
    # Regular expressions and terminals: about a second of work at most, and 64 MiB, for all of a grammar.
    initial_lexer_fuel=1_000_000,
    # The same for one token; the parser's part of it.
    step_lexer_fuel=200_000,
    # A tenth of a second of it at most, for which all other requests wait. A schema of 300 optional properties needs
    # some 3,000.
    step_max_items=10_000,
    max_items_in_row=2_000,
    # Of all requests with a grammar, as they share its lexer until that is full; 160 bytes each. A text in JSON of at
    # most 4,000 characters has some 40,000.
    max_lexer_states=100_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
# Between JSON's tokens a model may put white space, but not without end: small models do.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""llguidance's `whitespace_pattern`, wherever a schema is compiled."""
_ERROR_TEXT = 400
_FULL = "too many states"
"""In llguidance's error where a lexer has `max_lexer_states`."""
_KEPT = 32
"""Compiled grammars; the largest take 30 MB."""
_QUICK_S = 0.1
"""A grammar that took no longer to compile is compiled again in the midst of an answer, for which all others wait."""


@dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    """matcher: at the start of its grammar; took_s: of a processor."""

    matcher: LLMatcher
    took_s: float


class _LexerFull(InvalidRequest):
    """The lexer of this matcher, which copies of it share, has all the states that it may have. It does not recover."""


class Grammars:
    """Makes a `Guide` of a `Structure`, for the vocabulary of one model. Safe to use from several threads."""

    def __init__(self, tokenizer_json: str, *, eos_token_ids: Sequence[int], vocab_size: int | None) -> None:
        """`tokenizer_json`: the text of the model's tokenizer.json. ConfigError for one that cannot be read."""
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Structure, _Compiled] = OrderedDict()
        """A request with n = 128 asks for one as often."""
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        except ValueError as e:
            raise ConfigError(f"tokenizer.json: not usable for structured output: {e}") from e

    @staticmethod
    def load(model: str | Path, *, eos_token_ids: Sequence[int] = (), vocab_size: int | None = None) -> Grammars:
        """Of a model directory. The masks end with the last id of the tokenizer where no `vocab_size` is given."""
        text = (Path(model) / "tokenizer.json").read_text(encoding="utf-8")
        return Grammars(text, eos_token_ids=eos_token_ids, vocab_size=vocab_size)

    def guide(self, structure: Structure) -> Guide:
        """A new guide at the start of the grammar. InvalidRequest for one that is wrong or impossible.

        A grammar that nobody has checked (`checker.Checker`) may take very long.
        """
        return self.known(structure) or Guide(self, structure, self._fresh(structure))

    def known(self, structure: Structure) -> Guide | None:
        """The same at once, where the grammar was compiled not long ago."""
        with self._lock:
            compiled = self._compiled.get(structure)
            if compiled is None:
                return None
            self._compiled.move_to_end(structure)
            return Guide(self, structure, compiled)

    def instead(self, structure: Structure, full: _Compiled) -> _Compiled | None:
        """Another in place of one whose lexer is full, which nobody gets from now on. None: it takes too long to have
        it here and now."""
        with self._lock:
            found = self._compiled.get(structure)
            if found is full:
                del self._compiled[structure]
        if found is not None and found is not full:
            return found
        return self._fresh(structure) if full.took_s <= _QUICK_S else None

    def _fresh(self, structure: Structure) -> _Compiled:
        began = time.thread_time()
        matcher = self._compile(structure)
        compiled = _Compiled(matcher, time.thread_time() - began)
        with self._lock:
            self._compiled[structure] = compiled
            self._compiled.move_to_end(structure)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, structure: Structure) -> LLMatcher:
        param = "structure"
        check_size(structure, param)
        try:
            grammar = _GRAMMARS[structure.kind](structure.text)
        except (ValueError, RecursionError) as e:
            raise InvalidRequest(f"{param}: {e}"[:_ERROR_TEXT], param=param) from e
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            # The first mask shows what compiling does not: that nothing at all fulfils the grammar.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequest(f"{param}: {_first_line(matcher)}", param=param)
        return matcher


def check_size(structure: Structure, param: str) -> None:
    """Raise InvalidRequest, naming `param`, for a text that is too long to be looked at."""
    if len(structure.text) > MAX_TEXT:
        raise InvalidRequest(f"{param}: {len(structure.text)} characters, at most {MAX_TEXT} are allowed", param=param)


class Guide:
    """One request's place in its grammar: `interfaces.steps.Constraint`. Used by one thread at a time."""

    def __init__(self, grammars: Grammars, structure: Structure, compiled: _Compiled) -> None:
        self._grammars = grammars
        self._structure = structure
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._taken = 0
        self._renewed_at = -1
        """How many tokens there were when it last got a new lexer."""
        self._ahead: tuple[int, ...] = ()
        """Forced tokens that were found when `_ahead_at` tokens were there."""
        self._ahead_at = 0

    def allowed(self, generated: Sequence[int]) -> bytes:
        """The mask for the token after these: once the grammar is fulfilled, end-of-sequence tokens are in it.

        Raises InvalidRequest when a limit of the work for one token was met, which compiling did not show, and
        EngineFailed when a token was not allowed.
        """
        return self._with_room(generated, lambda: self._allowed(generated))

    def _allowed(self, generated: Sequence[int]) -> bytes:
        self._take(generated)
        mask: bytes = self._matcher.compute_bitmask()
        self._check()
        return mask

    def _with_room(self, generated: Sequence[int], work: Callable[[], _T]) -> _T:
        """What `work` returns, with a new lexer where others have filled the one that it had, or a long answer has."""
        try:
            return work()
        except _LexerFull:
            compiled = self._grammars.instead(self._structure, self._compiled)
            if compiled is None or len(generated) <= self._renewed_at:
                raise
        self._compiled, self._matcher = compiled, compiled.matcher.deep_copy()
        self._taken, self._ahead, self._renewed_at = 0, (), len(generated)
        return work()

    def forced(self, generated: Sequence[int], most: int) -> Forced:
        """The tokens to which the grammar leaves no alternative after these, at most `most`, and the masks after each.

        They are the tokens that the tokenizer makes of the forced text, and the masks before them allow no others: a
        token that also fits the text that may follow is left to be drawn.
        """
        return self._with_room(generated, lambda: self._forced(generated, most))

    def _forced(self, generated: Sequence[int], most: int) -> Forced:
        self._take(generated)
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
        self._check()
        self._matcher.rollback(len(masks))
        self._check()
        return Forced(tokens[: len(masks)], tuple(masks))

    def _forced_tokens(self, generated: Sequence[int]) -> tuple[int, ...]:
        """As many as there are. Looked for again only where those found before end, or another token was drawn: for
        `a{100000}` that takes a tenth of a second, and all requests' masks wait for it."""
        done = len(generated) - self._ahead_at
        if done < len(self._ahead) and self._ahead[:done] == tuple(generated[self._ahead_at :]):
            return self._ahead[done:]
        self._ahead, self._ahead_at = tuple(self._matcher.compute_ff_tokens()), len(generated)
        self._check()
        return self._ahead

    def _take(self, generated: Sequence[int]) -> None:
        assert len(generated) >= self._taken, "what was generated does not shrink"
        if len(generated) > self._taken:
            new = list(generated[self._taken :])
            taken = self._matcher.try_consume_tokens(new)
            self._taken += taken
            self._check()
            if taken < len(new):
                raise EngineFailed(
                    f"structured output: token {new[taken]} was drawn after {self._taken} others, though not allowed"
                )

    def _check(self) -> None:
        # Which grammar is too much work is known only where it is walked: what is wrong is the request, not the engine,
        # and another engine would do no better.
        if self._matcher.is_error():
            full = _FULL in self._matcher.get_error()
            raise (_LexerFull if full else InvalidRequest)(
                f"structure: structured output ended after {self._taken} tokens: {_first_line(self._matcher)}; "
                "simplify the grammar",
                param="structure",
            )


def _first_line(matcher: LLMatcher) -> str:
    error: str = matcher.get_error()
    return error.strip().splitlines()[0][:_ERROR_TEXT] if error.strip() else "the grammar was not accepted"


def _json_schema(text: str) -> str:
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object, not {type(schema).__name__}")
    grammar: str = LLMatcher.grammar_from_json_schema(closed(schema), overrides={"whitespace_pattern": WHITESPACE})
    return grammar


def _choice(text: str) -> str:
    choices: Any = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("give a list of one or more strings, none empty")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"{len(choices)} choices, at most {MAX_CHOICES} are allowed")
    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices)))


_GRAMMARS: Mapping[str, Any] = MappingProxyType(
    {
        "json_object": lambda _: _json_schema('{"type": "object"}'),
        "json_schema": _json_schema,
        "regex": LLMatcher.grammar_from_regex,
        "choice": _choice,
        "grammar": LLMatcher.grammar_from_lark,
    }
)
