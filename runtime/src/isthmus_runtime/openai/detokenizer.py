"""Token ids to text, one token at a time, with stop strings."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Sequence
from functools import cached_property, lru_cache

from ..request import TokenLogprobs
from .pieces import Pieces

_UTF8 = codecs.getincrementaldecoder("utf-8")
_OF_A_STATE = 270


class Stops:
    """All stop strings as one automaton (Aho and Corasick, 1975): a character costs one step, however many they are.

    A state is the longest end of the text so far that begins a stop string. Each takes some 270 bytes.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self.next: list[dict[str, int]] = [{}]
        """By state: the state that a character leads to, where that is one character longer."""
        self.length = [0]
        """By state: of that end of the text."""
        self.ended = [""]
        """By state: the longest stop string that ends there."""
        for stop in stops:
            state = 0
            for char in stop:
                state = self.next[state].setdefault(char, len(self.next))
                if state == len(self.next):
                    self.next.append({})
                    self.length.append(0)
                    self.ended.append("")
            self.ended[state] = stop
        self.begins = re.compile("|".join(map(re.escape, self.next[0])))
        """A character that leads away from the beginning."""
        self.shorter = [0] * len(self.next)
        """By state: that of the next shorter end which begins a stop string."""
        row = [0]
        while row:
            row = [self._join(state, char, after) for state in row for char, after in self.next[state].items()]

    @property
    def bytes_held(self) -> int:
        """Bytes that it takes, about."""
        return _OF_A_STATE * len(self.next)

    def _join(self, state: int, char: str, after: int) -> int:
        self.length[after] = self.length[state] + 1
        if state:
            end = self.shorter[state]
            while end and char not in self.next[end]:
                end = self.shorter[end]
            self.shorter[after] = end = self.next[end].get(char, 0)
            self.ended[after] = self.ended[after] or self.ended[end]
        return after


@lru_cache(16)
def stops_of(stops: tuple[str, ...]) -> Stops:
    """Kept: texts are told of by the same ones again and again. Of 4,096 characters it takes 4 ms."""
    return Stops(stops)


class TextStream:
    """Text of one generation as it grows.

    Never shows half a character, nor text that may turn out to be part of a stop string. Where a stop string ends
    first, the text is cut right before it; how tokens are cut into calls of `push` makes no difference. Work per
    token does not grow with the length of the text.

    With `logprobs=True` the entries given to `push` come back from `take_logprobs` together with the text they made.
    """

    def __init__(
        self, pieces: Pieces, stop: Sequence[str] | Stops = (), *, logprobs: bool = False, include_stop: bool = False
    ) -> None:
        """`include_stop`: the text ends after the stop string instead of before it."""
        self._include_stop = include_stop
        self._piece = pieces.of
        self._stop = stop if isinstance(stop, Stops) else stops_of(tuple(stop)) if stop else None
        self._state = 0
        """Of `_stop`."""
        self.may_stop = self._stop is not None
        """Whether there are stop strings."""
        self._half = False
        """The text so far ends inside a character."""
        self._certain = self._stop is None and not logprobs
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
        if self._stop is None:
            self._shown += len(text)
            self._release(final=final)
            return text
        cut = self._find_stop(text)
        held = self._held + text
        if cut is not None:
            self.stopped = True
            out, self._held = held[:cut], ""
        else:
            keep = 0 if final else self._stop.length[self._state]
            out, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self._shown += len(out)
        self._release(final=final or self.stopped)
        return out

    def _find_stop(self, text: str) -> int | None:
        """Where to cut held + `text`: the start of the stop string that is complete first; of several, the longest."""
        stops, state, before = self._stop, self._state, len(self._held)
        assert stops is not None
        following, shorter, at = stops.next, stops.shorter, 0
        while at < len(text):
            if not state:
                found = stops.begins.search(text, at)
                if found is None:
                    break
                at = found.start()
            char = text[at]
            at += 1
            while state and char not in following[state]:
                state = shorter[state]
            state = following[state].get(char, 0)
            if stops.ended[state]:
                self.met = stops.ended[state]
                end = before + at
                return end if self._include_stop else end - len(self.met)
        self._state = state
        return None

    def _release(self, *, final: bool) -> None:
        waiting = self._waiting
        while waiting and waiting[0][1] <= self._shown:
            self._released.append(waiting.popleft()[2])
        if final:
            # After a stop string, tokens that begin behind the cut made no text and are left out.
            self._released += [e for start, _, e in waiting if not self.stopped or start < self._shown]
            waiting.clear()
