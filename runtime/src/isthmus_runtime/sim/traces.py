"""Request traces: the public Mooncake format, and a generator of conversations in the same form.

One JSON object per line: ``timestamp`` (milliseconds), ``input_length``, ``output_length`` (tokens) and ``hash_ids``
(one id per block of 512 prompt tokens; an id stands for the whole prefix up to and including its block).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ..errors import ConfigError

MOST_MS = 1e11
"""Three years."""
MOST_TOKENS = 10_000_000
"""Of a prompt or an answer."""
HASH_BLOCK = 512
"""Prompt tokens per hash id."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Requests in order of time. ConfigError names the file and line that is wrong."""
    requests: list[TraceRequest] = []
    with Path(path).open() as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                body = json.loads(line)
                at, length, output = float(body["timestamp"]), int(body["input_length"]), int(body["output_length"])
                ids = tuple(int(i) for i in body.get("hash_ids", ()))
                _check(at, length, output)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise ConfigError(
                    f"{path}:{number}: not a trace line ({error}); expected timestamp, input_length, output_length"
                ) from error
            requests.append(TraceRequest(at / 1000, max(1, length), max(1, output), ids))
    if not requests:
        raise ConfigError(f"{path}: holds no requests")
    requests.sort(key=lambda r: r.at_s)
    return requests


def _check(at_ms: float, *counts: int) -> None:
    """ValueError for what would be simulated without end."""
    if not 0 <= at_ms <= MOST_MS:
        raise ValueError(f"timestamp {at_ms}: from 0 to {MOST_MS:g}")
    if max(counts) > MOST_TOKENS:
        raise ValueError(f"lengths {counts}: at most {MOST_TOKENS}")


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> None:
    """The same format."""
    with Path(path).open("w") as file:
        for r in requests:
            body = {
                "timestamp": round(r.at_s * 1000),
                "input_length": r.input_tokens,
                "output_length": r.output_tokens,
                "hash_ids": list(r.hash_ids),
            }
            file.write(json.dumps(body) + "\n")


def generate_trace(
    *,
    rate: float,
    duration_s: float,
    seed: int = 0,
    turns: float = 3.0,
    first_tokens: float = 3000.0,
    turn_tokens: float = 600.0,
    output_tokens: float = 300.0,
) -> list[TraceRequest]:
    """Conversations with Poisson arrivals: each turn's prompt is all before it plus something new.

    Args:
        rate: requests per second on average.
        turns: mean turns of a conversation (geometric), 5 to 120 s apart.
        first_tokens, turn_tokens, output_tokens: medians (log-normal, sigma 0.8).
    """
    r = Random(seed)
    next_id = 0
    sessions: list[list[TraceRequest]] = []
    at = -120.0 * turns / 2
    while at < duration_s:
        at += r.expovariate(rate / turns)
        tokens, ids, when = 0, list[int](), at
        session: list[TraceRequest] = []
        while True:
            tokens += max(1, round((turn_tokens if ids else first_tokens) * r.lognormvariate(0, 0.8)))
            while len(ids) < tokens // HASH_BLOCK:
                ids.append(next_id)
                next_id += 1
            output = max(1, round(output_tokens * r.lognormvariate(0, 0.8)))
            if 0 <= when < duration_s:
                session.append(TraceRequest(when, tokens, output, tuple(ids)))
            tokens += output
            when += r.uniform(5, 120)
            if r.random() < 1 / turns:
                break
        sessions.append(session)
    return sorted((request for session in sessions for request in session), key=lambda request: request.at_s)


def generate_fan_out(*, rate: float, duration_s: float, seed: int = 0, width: int = 4) -> list[TraceRequest]:
    """Requests that come `width` at a time, 0.2 s apart on average, with a common beginning of 2,048 to 5,120 tokens
    that nobody had before: agents that split a task, several questions about one document.

    Args:
        rate: requests per second on average.
    """
    r = Random(seed)
    next_id, at = 0, 0.0
    trace: list[TraceRequest] = []
    while (at := at + r.expovariate(rate / width)) < duration_s:
        common = r.randint(4, 10)
        shared = tuple(range(next_id, next_id + common))
        next_id += common
        when = at
        for _ in range(width):
            ids = (*shared, next_id, next_id + 1)
            next_id += 2
            trace.append(TraceRequest(when, len(ids) * HASH_BLOCK, max(1, round(200 * r.lognormvariate(0, 0.5))), ids))
            when += r.expovariate(5.0)
    return sorted(trace, key=lambda request: request.at_s)
