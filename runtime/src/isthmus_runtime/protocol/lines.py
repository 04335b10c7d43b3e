"""Lines of token streams, and answers of prefill, which may be lines: to and from bytes."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode

from ..errors import RequestError, error_from_json
from ..request import FinishReason, TokenChunk
from .calls import PrefillAnswer
from .scores import read_scores, read_with_scores, write_scores
from .ticket import Ticket


def reserved_line(ticket: Ticket) -> bytes:
    """First line of a decode stream whose KV comes from a peer."""
    return b'{"reserved":' + ticket.model_dump_json().encode() + b"}\n"


def token_line(chunk: TokenChunk) -> bytes:
    """One `TokenChunk` as an NDJSON line. Short keys: this is the hot path."""
    body: dict[str, object] = {"t": chunk.token_ids}
    if chunk.logprobs:
        body["l"] = [(p.token_id, p.logprob, p.top) for p in chunk.logprobs]
    if chunk.cached_tokens:
        body["c"] = chunk.cached_tokens
    if chunk.note:
        body["n"] = chunk.note
    if chunk.vector:
        body["v"] = b64encode(chunk.vector).decode()
    if chunk.prompt_tokens:
        body["m"] = chunk.prompt_tokens
    if chunk.finish_reason is not None:
        body["f"] = chunk.finish_reason.value
    if chunk.error is not None:
        body["e"] = {"status": chunk.error.status, **chunk.error.to_json()}
    line = json.dumps(body, separators=(",", ":")).encode() + b"\n"
    # First, so that no text comes before them.
    return b'{"p":%b,%b' % (write_scores(chunk.prompt_logprobs), line[1:]) if chunk.prompt_logprobs else line


def parse_line(line: bytes) -> Ticket | TokenChunk:
    """Inverse of `reserved_line` and `token_line`. Raises ValueError on anything else."""
    body, scores = read_with_scores(line, "p")
    if not isinstance(body, dict):
        raise ValueError(f"stream line is {type(body).__name__}, expected an object")
    if "reserved" in body:
        return Ticket.model_validate(body["reserved"])
    error: RequestError | None = None
    if (raw := body.get("e")) is not None:
        error = error_from_json(int(raw.get("status", 500)), raw)
    return TokenChunk(
        token_ids=tuple(body["t"]),
        logprobs=tuple(read_scores(body["l"])) if "l" in body else (),
        finish_reason=FinishReason(body["f"]) if "f" in body else None,
        error=error,
        cached_tokens=body.get("c", 0),
        note=body.get("n", ""),
        prompt_logprobs=scores,
        vector=b64decode(body["v"], validate=True) if "v" in body else b"",
        prompt_tokens=body.get("m", 0),
    )


def prefill_answer_json(answer: PrefillAnswer) -> bytes:
    """A `PrefillAnswer` as JSON. Routers of an older version refuse a field that they do not know: one is there only
    for who asks for it."""
    plain = answer.model_dump_json(exclude_defaults=True, exclude={"prompt_logprobs"}).encode()
    if not answer.prompt_logprobs:
        return plain
    return b'{"prompt_logprobs":%b,%b' % (write_scores(answer.prompt_logprobs), plain[1:])


def parse_prefill_answer(raw: bytes) -> PrefillAnswer:
    """Inverse of `prefill_answer_json`. Raises ValueError on anything else."""
    try:
        body, scores = read_with_scores(raw, "prompt_logprobs")
    except TypeError as e:
        raise ValueError(f"prompt_logprobs: {e}") from e
    if not isinstance(body, dict):
        raise ValueError(f"the answer is {type(body).__name__}, expected an object")
    return PrefillAnswer.model_validate(body).model_copy(update={"prompt_logprobs": scores})


_SENT = b'{"sent":'


def sent_line(answer: PrefillAnswer) -> bytes:
    """The last line of a prompt that was begun without its ticket."""
    return b"%b%b}\n" % (_SENT, prefill_answer_json(answer))


def parse_prefill_line(line: bytes) -> TokenChunk | PrefillAnswer:
    """Inverse of `sent_line` and, for what comes before it, of `token_line`. Raises ValueError on anything else."""
    if line.startswith(_SENT):
        return parse_prefill_answer(line.strip()[len(_SENT) : -1])
    found = parse_line(line)
    if isinstance(found, Ticket):
        raise ValueError("a ticket among a prefill engine's lines")
    return found
