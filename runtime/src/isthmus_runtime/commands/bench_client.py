"""What `isthmus-runtime bench` sends: one streamed completion of fixed length, and a trace of them at its own times."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from ..errors import IsthmusError
from ..sim.traces import TraceRequest


class BenchFailed(IsthmusError):
    """The service under test refused or broke a request; the message is what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An OpenAI endpoint."""

    url: str
    """Without /v1."""
    model: str
    vocab_size: int
    """Random token ids lie in 100..vocab_size."""
    timeout_s: float = 600.0

    def session(self) -> aiohttp.ClientSession:
        """Connections without a limit of their number."""
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    def prompt(self, rng: Random, tokens: int) -> list[int]:
        """Random token ids."""
        return [rng.randrange(100, self.vocab_size) for _ in range(tokens)]


@dataclass(slots=True)
class Seen:
    """One answer on the client's clock, seconds."""

    sent_s: float
    text_s: list[float] = field(default_factory=list)
    """When each piece of text came; a token whose bytes end inside a character brings none."""
    last_s: float = 0.0
    """When the choice was finished, which is with its last token."""
    tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return (self.text_s[0] if self.text_s else self.last_s) - self.sent_s

    @property
    def itl_s(self) -> float | None:
        """Mean time between tokens; None with fewer than two."""
        return (self.last_s - self.sent_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else None


async def stream(
    session: aiohttp.ClientSession,
    target: Target,
    prompt: Sequence[int],
    output_len: int,
    *,
    on_text: Callable[[], None] = lambda: None,
) -> Seen:
    """One greedy completion of exactly `output_len` tokens. Raises BenchFailed."""
    try:
        return await _stream(session, target, prompt, output_len, on_text)
    except (aiohttp.ClientError, HttpProcessingError, TimeoutError) as error:
        raise BenchFailed(f"{target.url}: {type(error).__name__}: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"[:200]
        raise BenchFailed(f"{target.url}: its answer is none of a completion: {what}") from error


async def _stream(
    session: aiohttp.ClientSession, target: Target, prompt: Sequence[int], output_len: int, on_text: Callable[[], None]
) -> Seen:
    body = {
        "model": target.model,
        "prompt": list(prompt),
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    seen = Seen(time.perf_counter())
    async with session.post(f"{target.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise BenchFailed(f"HTTP {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise BenchFailed(f"error in the stream: {event['error']}")
            if event.get("usage"):
                seen.tokens = int(event["usage"]["completion_tokens"])
            for choice in event.get("choices", ()):
                now = time.perf_counter()
                if choice.get("text"):
                    seen.text_s.append(now)
                    on_text()
                if choice.get("finish_reason"):
                    seen.last_s = now
    if not seen.last_s:
        raise BenchFailed("the stream ended without a finish reason")
    return seen


async def replay(target: Target, trace: Sequence[TraceRequest], seed: int) -> list[Seen]:
    """Send each request of a trace at its time, whatever became of those before; answers in the trace's order.

    Prompts are random: nothing is shared, whatever `hash_ids` says. Raises BenchFailed with the first failure.
    """
    rng = Random(seed)
    prompts = [target.prompt(rng, request.input_tokens) for request in trace]
    loop = asyncio.get_running_loop()
    async with target.session() as session:
        start = loop.time() + 0.1

        async def one(request: TraceRequest, prompt: list[int]) -> Seen:
            await asyncio.sleep(max(0.0, start + request.at_s - loop.time()))
            return await stream(session, target, prompt, request.output_tokens)

        tasks = [asyncio.create_task(one(r, p)) for r, p in zip(trace, prompts, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
