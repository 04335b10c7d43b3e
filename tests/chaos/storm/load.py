"""The clients: an open-loop load over the official protocol, each answer compared with what it must be."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from processes import MODEL
from tokenizers import Tokenizer

from isthmus_runtime.executor.fake import expected_tokens
from isthmus_runtime.request import SamplingParams

REQUEST_TIMEOUT_S = 20.0
"""What the router is given. It answers within this, 1 s of margin for the API, and the scheduling of a busy machine."""
HUNG_AFTER_S = REQUEST_TIMEOUT_S + 6.0
LEAVES = ("half a request", "before an answer", "in mid-stream")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as the seed makes it."""

    index: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stream: bool
    leaves: str
    """At which stage the client goes away; empty: it stays."""
    patience: float
    """With `leaves`: what share of that stage it waits for."""


@dataclass(slots=True)
class Outcome:
    """How a request ended. Times are time.time()."""

    ask: Ask
    began: float = field(default_factory=time.time)
    ended: float = 0.0
    ending: str = ""
    """ok | refused | failed | broken | lost | left | hung"""
    status: int = 0
    error: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    problem: str = ""
    """What is wrong with the answer itself; empty: nothing."""


def make_ask(seed: int, index: int) -> Ask:
    """Requests share prefixes: there are few families, and one prompt of a family begins like the next."""
    rng = random.Random(f"request {seed} {index}")
    family = rng.randrange(8)
    length = rng.choice((rng.randint(1, 40), rng.randint(16, 200), rng.randint(100, 700)))
    shared = random.Random(f"family {seed} {family}")
    prompt = [shared.randrange(900) for _ in range(length)]
    if rng.random() < 0.5:
        prompt[-1] = rng.randrange(900)
    greedy = rng.random() < 0.7
    sampling = SamplingParams(
        max_tokens=rng.choice((1, 2, rng.randint(3, 30), rng.randint(30, 200), rng.randint(400, 1500))),
        temperature=0.0 if greedy else 0.8,
        seed=0 if greedy else rng.randrange(1 << 30),
    )
    leaves = rng.choice(LEAVES) if rng.random() < 0.15 else ""
    stream = leaves == "in mid-stream" or rng.random() < 0.5
    return Ask(index, tuple(prompt), sampling, stream, leaves, rng.random())


class Load:
    """Starts `rate` requests a second until told to stop."""

    def __init__(self, url: str, seed: int, rate: float) -> None:
        self.outcomes: list[Outcome] = []
        self.lag_s = 0.0
        """Longest time this process could not run: the machine's share in every time measured."""
        self._url = url
        self._seed = seed
        self._rate = rate
        self._index = 0
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrivals = random.Random(f"arrivals {seed}")

    async def run(self, stop: asyncio.Event) -> None:
        """Send until `stop`, then return when every request has ended."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=5.0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            while not stop.is_set():
                task = asyncio.create_task(self._one(session, make_ask(self._seed, self._index)))
                self._index += 1
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await self._pause(self._arrivals.expovariate(self._rate))
            while self._tasks:
                await asyncio.wait(self._tasks)

    async def some(self, count: int) -> list[Outcome]:
        """`count` requests, one after the other, of clients that stay."""
        found: list[Outcome] = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            while len(found) < count:
                ask = make_ask(self._seed, self._index)
                self._index += 1
                if not ask.leaves:
                    await self._one(session, ask)
                    found.append(self.outcomes[-1])
        return found

    async def _pause(self, seconds: float) -> None:
        began = time.monotonic()
        await asyncio.sleep(seconds)
        self.lag_s = max(self.lag_s, time.monotonic() - began - seconds)

    async def _one(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        outcome = Outcome(ask)
        try:
            async with asyncio.timeout(HUNG_AFTER_S):
                if ask.leaves == "half a request":
                    await self._half(ask)
                    outcome.ending = "left"
                else:
                    await self._exchange(session, ask, outcome)
        except TimeoutError:
            outcome.ending = "hung"
        except (aiohttp.ClientError, OSError) as error:
            outcome.ending, outcome.problem = "lost", ""
            outcome.error = {"message": f"{type(error).__name__}: {error}"}
        outcome.ended = time.time()
        self.outcomes.append(outcome)

    def _body(self, ask: Ask) -> bytes:
        body: dict[str, Any] = {
            "model": "test",
            "prompt": list(ask.prompt),
            "max_tokens": ask.sampling.max_tokens,
            "temperature": ask.sampling.temperature,
            "ignore_eos": True,
            "stream": ask.stream,
        }
        if ask.sampling.temperature > 0:
            body["seed"] = ask.sampling.seed
        return json.dumps(body).encode()

    async def _half(self, ask: Ask) -> None:
        host, port = self._url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = self._body(ask)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write((head + body)[: int((len(head) + len(body)) * ask.patience)])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async def _exchange(self, session: aiohttp.ClientSession, ask: Ask, outcome: Outcome) -> None:
        headers = {"Content-Type": "application/json"}
        post = session.post(self._url + "/v1/completions", data=self._body(ask), headers=headers)
        if ask.leaves == "before an answer":
            try:
                async with asyncio.timeout(ask.patience * 0.3):
                    async with post as response:
                        await response.read()
            except TimeoutError:
                pass
            outcome.ending = "left"
            return
        async with post as response:
            outcome.status = response.status
            if response.status != 200:
                outcome.ending = "refused"
                outcome.error = (await response.json())["error"]
            elif ask.stream:
                await self._stream(response, ask, outcome)
            else:
                answer = await response.json()
                outcome.ending = "ok"
                outcome.text = answer["choices"][0]["text"]
                if answer["choices"][0]["finish_reason"] != "length":
                    outcome.problem = f"finish_reason {answer['choices'][0]['finish_reason']!r}"
        self._judge(ask, outcome)

    async def _stream(self, response: aiohttp.ClientResponse, ask: Ask, outcome: Outcome) -> None:
        events = finishes = 0
        done = False
        limit = 1 + int(ask.patience * 10) if ask.leaves == "in mid-stream" else 0
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if done:
                outcome.problem = "an event follows [DONE]"
                return
            events += 1
            if limit and events > limit:
                outcome.ending = "left"
                response.close()
                return
            if line == b"data: [DONE]\n":
                done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                outcome.error = event["error"]
                continue
            if outcome.error:
                outcome.problem = "tokens follow an error"
            choice = event["choices"][0]
            outcome.text += choice["text"]
            finishes += choice["finish_reason"] is not None
        outcome.ending = "failed" if outcome.error else "ok" if done and finishes == 1 else "broken"
        if outcome.error and finishes:
            outcome.problem = "an error follows a finish_reason"

    def _judge(self, ask: Ask, outcome: Outcome) -> None:
        """Compare with the undisturbed answer: all of it when complete, its beginning when not."""
        ids = expected_tokens(ask.prompt, ask.sampling, ask.sampling.max_tokens)
        right = self._tokenizer.decode(ids, skip_special_tokens=True)
        if outcome.ending == "ok" and outcome.text != right:
            outcome.problem = f"wrong tokens: {outcome.text[-60:]!r}, expected {right[-60:]!r}"
        elif outcome.ending in ("failed", "broken", "left") and not right.startswith(outcome.text):
            outcome.problem = f"wrong tokens before the end: {outcome.text[-60:]!r}"
