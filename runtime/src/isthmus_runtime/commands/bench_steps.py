"""`isthmus-runtime bench --steps`: what one service's steps take, measured from outside; the planner is fitted to it.

Works on any OpenAI endpoint. Each quantity has an experiment of its own, on a service that nobody else uses:

    first    one prompt on an idle service: all there is to a first token but waiting
    prefill  two prompts at once: the second waits for exactly the first one's computation, so the difference to
             `first` is how long a prompt keeps an engine
    decode   a stream beside others that outlast it: what further tokens add to its time
    loaded   prompts one after another beside running streams: how much later their first tokens come (`first` with a
             batch), and how much each of them delays a stream (`stall`)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from statistics import median

import aiohttp

from .bench_client import BenchFailed, Target, stream

_PROMPTS = 4
"""Prompts sent beside one stream."""
_SHORT = 8
"""Tokens of a stream that is over soon."""

Step = dict[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to measure. `decode` and `loaded`: (streams, prompt tokens)."""

    prompts: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    decode: tuple[tuple[int, int], ...] = ((1, 64), (2, 64), (4, 64), (8, 64), (16, 64), (1, 1024), (8, 512))
    loaded: tuple[tuple[int, int], ...] = ((4, 64), (4, 256), (4, 512))
    output_len: int = 40
    """Tokens of a measured stream."""
    max_model_len: int = 2048
    """Of the service: how long the streams may be that run beside."""
    repeats: int = 3
    seed: int = 0


class _Run:
    def __init__(
        self, session: aiohttp.ClientSession, target: Target, sweep: Sweep, say: Callable[[str], None]
    ) -> None:
        self._session, self._target, self._sweep, self._say = session, target, sweep, say
        self._rng = Random(sweep.seed)
        self.steps: list[Step] = []
        self._first: dict[int, float] = {}
        self._decode: dict[int, float] = {}

    async def _send(self, tokens: int, output: int, on_text: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """One random prompt: (time to first token, time from the first token to the last)."""
        prompt = self._target.prompt(self._rng, tokens)
        seen = await stream(self._session, self._target, prompt, output, on_text=on_text)
        return seen.ttft_s, seen.last_s - seen.sent_s - seen.ttft_s

    @asynccontextmanager
    async def _streams(self, count: int, tokens: int) -> AsyncIterator[Callable[[], int]]:
        """`count` running streams that outlast what is measured; yields how many tokens they hold together."""
        output = self._sweep.max_model_len - tokens
        texts = [0] * count
        running = asyncio.Event()

        def note(number: int) -> None:
            texts[number] += 1
            if all(texts):
                running.set()

        def noter(number: int) -> Callable[[], None]:
            return lambda: note(number)

        sent = [asyncio.create_task(self._send(tokens, output, noter(i))) for i in range(count)]
        started = asyncio.create_task(running.wait())
        try:
            if count:
                await asyncio.wait([started, *sent], return_when=asyncio.FIRST_COMPLETED)
            yield lambda: count * tokens + sum(texts)
            if ended := next((t for t in sent if t.done()), None):
                await ended
                raise BenchFailed(f"a stream of {output} tokens ended while others were measured beside it")
        finally:
            for task in (started, *sent):
                task.cancel()
            await asyncio.gather(started, *sent, return_exceptions=True)

    def _note(self, kind: str, seconds: float, **what: float) -> None:
        self.steps.append({"kind": kind, **what, "seconds": seconds})
        self._say(f"{kind:8} {' '.join(f'{k} {v:g}' for k, v in what.items()):24} {seconds * 1e3:9.2f} ms")

    async def first(self, tokens: int) -> None:
        times = [(await self._send(tokens, 1))[0] for _ in range(self._sweep.repeats + 1)]
        self._first[tokens] = median(times[1:])
        self._note("first", self._first[tokens], new=tokens, batch=0, context=0)

    async def prefill(self, tokens: int) -> None:
        times = []
        for _ in range(self._sweep.repeats):
            pair = await asyncio.gather(self._send(tokens, 1), self._send(tokens, 1))
            times.append(max(ttft for ttft, _ in pair) - self._first[tokens])
        self._note("prefill", max(1e-6, median(times)), new=tokens)

    async def decode(self, batch: int, tokens: int) -> None:
        output = self._sweep.output_len
        times, contexts = [], []
        for _ in range(self._sweep.repeats):
            async with self._streams(batch - 1, tokens) as held:
                # The first tokens of a stream that joins others come later than the rest: they are taken off.
                _, short = await self._send(tokens, _SHORT)
                before = held()
                _, long = await self._send(tokens, _SHORT + output)
                contexts.append((before + held() + output) / 2 + tokens)
                times.append((long - short) / output)
        self._decode.setdefault(batch, median(times))
        self._note("decode", median(times), batch=batch, context=median(contexts))

    async def loaded(self, batch: int, tokens: int) -> None:
        output = self._sweep.output_len + round(_PROMPTS * self._first[tokens] / self._decode[batch])
        firsts, stalls = [], []
        for _ in range(self._sweep.repeats):
            _, alone, _ = await self._probe(batch, output, None)
            found, took, sent = await self._probe(batch, output, tokens)
            firsts += found
            stalls.append((took - alone) / max(1, sent))
        if not firsts:
            raise BenchFailed(
                f"no prompt of {tokens} tokens was answered while a stream of {output} tokens ran beside it"
            )
        context = batch * (self._sweep.decode[0][1] + output / 2)
        self._note("first", median(firsts), new=tokens, batch=batch, context=context)
        self._note("stall", max(0.0, median(stalls)), new=tokens, batch=batch, context=context)

    async def _probe(self, batch: int, output: int, tokens: int | None) -> tuple[list[float], float, int]:
        """One of `batch` streams, and prompts of `tokens` beside it: (their TTFT, how long it took, their number)."""
        short = self._sweep.decode[0][1]
        firsts: list[float] = []
        async with self._streams(batch - 1, short):
            begun = asyncio.Event()
            probe = asyncio.create_task(self._send(short, output, begun.set))
            waiting = asyncio.create_task(begun.wait())
            await asyncio.wait([waiting, probe], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            while tokens is not None and len(firsts) < _PROMPTS and not probe.done():
                first, _ = await self._send(tokens, 1)
                if not probe.done():
                    firsts.append(first)
            _, took = await probe
        return firsts, took, len(firsts)


async def measure_steps(
    target: Target, sweep: Sweep, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
) -> list[Step]:
    """Run all experiments, one after another. Raises BenchFailed."""
    async with target.session() as session:
        run = _Run(session, target, sweep, say)
        for _ in range(2):
            await run._send(sweep.prompts[0], 8)
        for tokens in sorted({*sweep.prompts, *(n for _, n in sweep.loaded)}):
            await run.first(tokens)
            await run.prefill(tokens)
        for batch, tokens in _with_batches(sweep):
            await run.decode(batch, tokens)
        for batch, tokens in sweep.loaded:
            await run.loaded(batch, tokens)
        return run.steps


def _with_batches(sweep: Sweep) -> Sequence[tuple[int, int]]:
    """`decode`, and what `loaded` compares with if that is not among them."""
    short = sweep.decode[0][1]
    wanted = [*sweep.decode, *((batch, short) for batch, _ in sweep.loaded)]
    return sorted(dict.fromkeys(wanted), key=lambda pair: (pair[1], pair[0]))
