"""Token ids to text, one token at a time, with stop strings."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from functools import cached_property, lru_cache

from ..request import TokenLogprobs
from .pieces import Pieces

_UTF8 = codecs.getincrementaldecoder("utf-8")


@lru_cache(256)
def _fallback(pattern: str) -> tuple[int, ...]:
    """For each beginning of `pattern`, how long a beginning it ends with. Kept: a request may have 128 choices."""
    found = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = found[length - 1]
        length += pattern[i] == pattern[length]
        found[i] = length
    return tuple(found)


class _Matcher:
    """Knuth-Morris-Pratt search for one stop string, a character at a time."""

    __slots__ = ("_fallback", "matched", "pattern")

    def __init__(self, pattern: str) -> None:
        assert pattern, "an empty stop string would match everywhere"
        self.pattern = pattern
        self.matched = 0
        """Length of the longest end of the text so far that begins the pattern."""
        self._fallback = _fallback(pattern)

    def step(self, char: str) -> bool:
        """Add a character; True when the pattern is complete. Not to be called after that."""
        matched = self.matched
        while matched and char != self.pattern[matched]:
            matched = self._fallback[matched - 1]
        matched += char == self.pattern[matched]
        self.matched = matched
        return matched == len(self.pattern)


class TextStream:
    """Text of one generation as it grows.

    Never shows half a character, nor text that may turn out to be part of a stop string. Where a stop string ends
    first, the text is cut right before it; how tokens are cut into calls of `push` makes no difference. Work per
    token does not grow with the length of the text.

    With `logprobs=True` the entries given to `push` come back from `take_logprobs` together with the text they made.
    """

    def __init__(
        self, pieces: Pieces, stop: Sequence[str] = (), *, logprobs: bool = False, include_stop: bool = False
    ) -> None:
        """`include_stop`: the text ends after the stop string instead of before it."""
        self._include_stop = include_stop
        self._piece = pieces.of
        self._stop = tuple(_Matcher(s) for s in stop)
        self.may_stop = bool(stop)
        """Whether there are stop strings."""
        self._half = False
        """The text so far ends inside a character."""
        self._certain = not stop and not logprobs
        """Whole characters are certain as they come, and nobody asks where."""
        self._held = ""
        self._shown = 0
        self.keeps_logprobs = logprobs
        self._waiting: deque[tuple[int, int, TokenLogprobs]] = deque()
        self._released: list[TokenLogprobs] = []
        self.stopped = False
        """A stop string was met; `push` must not be called again."""
        self.met = ""
        """Which."""

    @cached_property
    def _utf8(self) -> codecs.IncrementalDecoder:
        """Made for the first text that is not ASCII."""
        return _UTF8(errors="replace")

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> str:
        """Add tokens; returns the text that is now certain, often all of it, sometimes none."""
        if self.keeps_logprobs:
            text = self._push_one_by_one(token_ids, logprobs)
        else:
            raw = self._piece(token_ids[0]) if len(token_ids) == 1 else b"".join(map(self._piece, token_ids))
            if raw.isascii() and not self._half:
                text = raw.decode("ascii")
            else:
                text = self._utf8.decode(raw)
                self._half = bool(self._utf8.getstate()[0])
        return text if self._certain else self._advance(text, final=False)

    def finish(self) -> str:
        """No token follows: what was held back, an incomplete character as U+FFFD."""
        if self.stopped or (self._certain and not self._half):
            return ""
        return self._advance(self._utf8.decode(b"", final=True), final=True)

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Entries of the tokens that made the text returned since the last call."""
        if not self._released:
            return []
        taken, self._released = self._released, []
        return taken

    def _push_one_by_one(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> str:
        parts = []
        offset = self._shown + len(self._held)
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            start = offset
            parts.append(part := self._utf8.decode(self._piece(token_id)))
            offset += len(part)
            # A token that ends inside a character belongs with the text in which the character appears.
            end = offset + 1 if self._utf8.getstate()[0] else offset
            self._waiting.append((start, end, entry))
        return "".join(parts)

    def _advance(self, text: str, *, final: bool) -> str:
        if not self._stop:
            self._shown += len(text)
            self._release(final=final)
            return text
        cut = self._find_stop(text)
        held = self._held + text
        if cut is not None:
            self.stopped = True
            out, self._held = held[:cut], ""
        else:
            keep = 0 if final else max(m.matched for m in self._stop)
            out, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self._shown += len(out)
        self._release(final=final or self.stopped)
        return out

    def _find_stop(self, text: str) -> int | None:
        """Where to cut held + `text`: the start of the stop string that is complete first; of several, the longest."""
        end = len(self._held)
        for char in text:
            end += 1
            complete = [m.pattern for m in self._stop if m.step(char)]
            if complete:
                self.met = max(complete, key=len)
                return end if self._include_stop else end - len(self.met)
        return None

    def _release(self, *, final: bool) -> None:
        waiting = self._waiting
        while waiting and waiting[0][1] <= self._shown:
            self._released.append(waiting.popleft()[2])
        if final:
            # After a stop string, tokens that begin behind the cut made no text and are left out.
            self._released += [e for start, _, e in waiting if not self.stopped or start < self._shown]
            waiting.clear()
