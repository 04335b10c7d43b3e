"""Scores of long prompts as JSON between engines and routers, written and read a piece at a time.

Neither `to_json` nor `from_json` lets another thread run until it returns, and a quarter of a million log-probabilities
take a fifth of a second: in a thread of its own, one call would hold up every stream of the process all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import from_json, to_json

from ..request import TokenLogprobs

LONG = 64 << 10
"""Bytes of JSON from which it is read in pieces."""
_ENTRIES = 512
_ENTRY_END = re.compile(rb"\],\d+\](?=,\[)")
"""The end of `[id, logprob, [[id, logprob], ...], rank]` where another follows: nothing within an entry looks so."""
_LAST_END = re.compile(rb"\],\d+\]\]")


def write_scores(scores: Sequence[TokenLogprobs]) -> bytes:
    """A JSON array of them."""
    pieces = (to_json(scores[at : at + _ENTRIES], inf_nan_mode="constants") for at in range(0, len(scores), _ENTRIES))
    return b"[%b]" % b",".join(piece[1:-1] for piece in pieces)


def read_with_scores(raw: bytes, name: str) -> tuple[Any, tuple[TokenLogprobs, ...]]:
    """What `raw` holds, and apart from it the scores in its field `name`, which is before any text of others.

    Raises ValueError and TypeError for what is no JSON or no scores.
    """
    field = b'"%b":[' % name.encode()
    begin = raw.find(field) if len(raw) > LONG else -1
    last = None if begin < 0 else _LAST_END.search(raw, begin)
    if last is None:
        body = from_json(raw)
        return body, tuple(read_scores(body.pop(name))) if isinstance(body, dict) and name in body else ()
    at, end = begin + len(field), last.end() - 1
    found: list[TokenLogprobs] = []
    while at < end:
        cut = _ENTRY_END.search(raw, min(at + LONG, end), end)
        until = end if cut is None else cut.end()
        found += read_scores(from_json(b"[%b]" % raw[at:until]))
        at = until + 1
    return from_json(raw[: begin + len(field)] + raw[end:]), tuple(found)


def read_scores(found: Iterable[list[Any]]) -> Iterable[TokenLogprobs]:
    """Scores out of what JSON makes of them. Raises TypeError."""
    return (_entry(*entry) for entry in found)


def _entry(token_id: int, logprob: float, top: list[tuple[int, float]], rank: int = 0) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, tuple((other, value) for other, value in top), rank)
