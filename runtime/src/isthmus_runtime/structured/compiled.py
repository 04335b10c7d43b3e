"""A grammar as llguidance compiles it: within which limits, and what it may take of memory."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..errors import InvalidRequest
from ..request import Structure
from .sources import GRAMMARS
from .special_tokens import SpecialTokens

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
_SPENT = "lexer error"
"""What llguidance's word for a lexer that is used up begins with, whatever of it is; it gets no more for anybody who
shares it."""
_OF_A_GRAMMAR, _OF_A_CHARACTER, _OF_A_STATE = 1 << 20, 256, 340
"""Bytes that a compiled grammar may take, and more for each of its characters (usual ones take 150 for each, and those
of a few words 100 KiB); and of a lexer for each state that it may have."""


class Compiled:
    """A grammar and its lexer, there for as long as a request walks with it, or it is kept."""

    def __init__(self, memory: int, states: int) -> None:
        """`memory`: bytes, at most. `states` that its lexer may have."""
        self.matcher: LLMatcher | None = None
        """At the start; None while it is compiled."""
        self.memory = memory
        self.states = states

    @property
    def largest(self) -> bool:
        """Whether no lexer may have more states."""
        return bool(self.states >= _LIMITS.max_lexer_states)

    def compile(self, tokenizer: LLTokenizer, special: SpecialTokens, structure: Structure) -> bool:
        """False: its lexer is not enough to begin with, and there are larger ones. InvalidRequest for a grammar that is
        wrong or impossible."""
        param = "structure"
        try:
            text = special.by_id(structure.text) if structure.kind == "grammar" else structure.text
            grammar = GRAMMARS[structure.kind](text)
        except (ValueError, RecursionError) as e:
            raise InvalidRequest(f"{param}: {e}"[:_ERROR_TEXT], param=param) from e
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_with_states(self.states))
        if not matcher.is_error():
            # The first mask shows what compiling does not: that nothing at all fulfils the grammar.
            matcher.compute_bitmask()
        if not matcher.is_error():
            self.matcher = matcher
            return True
        if self.largest or not spent(matcher):
            raise InvalidRequest(f"{param}: {first_line(matcher)}", param=param)
        return False


def states_of(asked: int | None) -> int:
    """States that a lexer gets where so many are asked for; None: as many as one may have."""
    most: int = _LIMITS.max_lexer_states
    return most if asked is None else min(asked, most)


def memory_of(structure: Structure, states: int = 0) -> int:
    """Most bytes that it may take when it is compiled, with so many states of its lexer: `checker` refuses what takes
    more, however short (a `multipleOf` of 199999 takes 90 MB)."""
    return _OF_A_GRAMMAR + _OF_A_CHARACTER * len(structure.text) + _OF_A_STATE * states


def check_size(structure: Structure, param: str) -> None:
    """Raise InvalidRequest, naming `param`, for a text that is too long to be looked at."""
    if len(structure.text) > MAX_TEXT:
        raise InvalidRequest(f"{param}: {len(structure.text)} characters, at most {MAX_TEXT} are allowed", param=param)


def spent(matcher: LLMatcher) -> bool:
    """Whether a matcher that has come to an end has done so with its lexer, which is used up."""
    return _SPENT in matcher.get_error()


def first_line(matcher: LLMatcher) -> str:
    """Why a matcher has come to an end."""
    error: str = matcher.get_error()
    return error.strip().splitlines()[0][:_ERROR_TEXT] if error.strip() else "the grammar was not accepted"


def _with_states(most: int) -> LLParserLimits:
    """The limits, of a lexer with so many states."""
    names = ("initial_lexer_fuel", "step_lexer_fuel", "step_max_items", "max_items_in_row", "max_grammar_size")
    return LLParserLimits(max_lexer_states=most, verbose_errors=False, **{n: getattr(_LIMITS, n) for n in names})
