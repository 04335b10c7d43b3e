"""Runs the generations of one request over a Backend and writes the answer, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial

from ..errors import EngineFailed, RequestError
from ..interfaces.backend import Backend, Pushing, Said, Take
from ..metrics import RequestMetrics
from ..request import GenerateRequest, TokenChunk, TokenLogprobs
from ..serving.call import Call
from .choice import Choice
from .job import Job
from .output import Delta
from .sse import TOOL_CALLS, Answer, Usage
from .together import together
from .tool_formats.base import collect
from .untold import AnswerScores, Untold
from .writers import Writers

_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx in front would collect the stream otherwise
}


_NOTHING = Delta()
_MANY_SCORES = 2000
"""With log-probabilities of more tokens of prompts, or with more of them of its own (or as much text), an answer is
written in a thread (about 10 ms of work)."""
_MUCH_TEXT = 1 << 18
"""Characters of a stream that are told again at its end: more are written in a thread."""
_OF_AN_ID = 36
"""Bytes of a token's id that is held: counted as characters."""
_MANY_IDS = 100_000
"""The same where all choices' prompts have more tokens, whose ids an answer may tell (about 10 ms of work, too)."""


Sink = Callable[[Choice, Delta], Callable[[], Awaitable[None]] | None]
"""Tells what is new of a choice. What it returns has to be awaited before more is told."""


async def _push(backend: Backend, request: GenerateRequest, take: Take) -> None:
    """`Pushing.push` of a backend that has none."""
    async with aclosing(backend.generate(request)) as chunks:
        async for chunk in chunks:
            said = take(chunk)
            if not (said if isinstance(said, bool) else await said()):
                break


class Runner:
    """Answers jobs; one for the whole process."""

    def __init__(
        self, backend: Backend, writers: Writers, metrics: RequestMetrics | None, clock: Callable[[], float]
    ) -> None:
        """`clock`: monotonic seconds."""
        self._writers = writers
        self._push = backend.push if isinstance(backend, Pushing) else partial(_push, backend)
        self._metrics = metrics
        self._clock = clock
        self._scores = AnswerScores()
        self.untold = self._scores.by_task

    async def whole(self, job: Job, arrived: float, call: Call) -> Usage:
        """The answer in one piece. Raises RequestError."""
        answers: dict[int, Answer] = {}
        # A text that grew by each token would be copied as often.
        texts: dict[int, list[str]] = {}
        reasonings: dict[int, list[str]] = {}
        likelihood: dict[int, float] = {}

        def sink(choice: Choice, delta: Delta) -> None:
            answer = answers.get(choice.index)
            if answer is None:
                answer = answers[choice.index] = Answer(choice.prompt)
                texts[choice.index], reasonings[choice.index] = [], []
            collect(texts[choice.index], delta.content)
            untold.add_text(choice.grown(delta))
            answer.finish_reason = choice.finish
            if job.shown != job.n:
                likelihood[choice.index] = choice.mean_logprob
            if choice.bare:
                return
            collect(reasonings[choice.index], delta.reasoning)
            if delta.calls:
                answer.calls += delta.calls
                answer.places += [sum(map(len, texts[choice.index]))] * len(delta.calls)
            if job.return_ids and (more := choice.take_more()) is not None:
                answer.ids += more.ids or ()
                untold.add_text(_OF_AN_ID * len(more.ids or ()))
            answer.logprobs += choice.take_logprobs()
            answer.stop = choice.text.met

        with self._scores.answer(job.client, asyncio.current_task()) as untold:
            usage = await self._run(job, sink, arrived, untold)
            headers = {"Content-Type": "application/json", "X-Request-Id": job.answer_id}
            shown = _best(job, likelihood)
            scores = sum(len(answers[index].prompt.scores) for index in shown)
            ids = sum(len(answers[index].prompt.ids) for index in shown)

            def joined() -> Iterator[Answer]:
                for index in shown:
                    answer = answers.pop(index)  # what is written is not kept
                    answer.text = "".join(texts.pop(index))
                    answer.reasoning = "".join(reasonings.pop(index))
                    yield answer

            pieces = partial(job.format.whole, joined(), usage)
            large = scores > _MANY_SCORES or untold.held > _MANY_SCORES or ids > _MANY_IDS
            body = await self._writers.joined(job.client, pieces, large=large)
        await call.reply(200, headers, body)
        return usage

    async def _opening(self, job: Job, told: int) -> bytes:
        """`told`: tokens of the prompt, for the one request whose prompt is text."""

        def joined() -> bytes:
            first = job.format.first
            return b"".join(first(i, r, len(r.prompt_token_ids) or told) for i, r in enumerate(job.requests))

        many = sum(len(request.prompt_token_ids) for request in job.requests) > _MANY_IDS
        return await self._writers.do(job.client, joined, large=many)

    async def stream(self, job: Job, arrived: float, call: Call) -> Usage:
        """The answer as server-sent events, begun when the first text is there: until then a failure still gets its
        own HTTP status. Raises RequestError."""
        opening, opened, kept = asyncio.Lock(), False, 0
        shown: list[Choice] = []
        """Until all are."""
        form, write_now = job.format, call.writer()

        def is_long(choice: Choice, delta: Delta) -> bool:
            return kept > _MUCH_TEXT and (bool(choice.finish) or form.ends_text(delta))

        def written(choice: Choice, delta: Delta, logprobs: Sequence[TokenLogprobs]) -> bytes:
            more = choice.take_more()
            data = form.delta(choice.index, delta, logprobs, more) if delta != _NOTHING or logprobs else b""
            if choice.finish:
                more = choice.take_more() if data else more
                data += form.finish(choice.index, choice.finish, more, choice.text.met)
            return data

        async def tell(choice: Choice, delta: Delta) -> None:
            """With all that there may be to wait for."""
            nonlocal opened
            if not opened:
                async with opening:
                    if not opened:
                        await call.begin({**_STREAM_HEADERS, "X-Request-Id": job.answer_id})
                        await call.write(await self._opening(job, choice.prompt_tokens))
                        opened = True
            data = b""
            if choice.prompt.echo is not None and not choice.shown:
                echo = partial(form.echo, choice.index, choice.prompt)
                data = await self._writers.do(job.client, echo, large=len(choice.prompt.scores) > _MANY_SCORES)
            if not choice.shown:
                choice.shown = True
                shown.append(choice)
            logprobs = choice.take_logprobs()
            large = (count := _scores(logprobs)) > _MANY_SCORES or is_long(choice, delta)
            data += await self._writers.do(job.client, partial(written, choice, delta, logprobs), large=large)
            await call.write(data)
            untold.told(count)
            if len(shown) == len(job.requests):
                for one in shown:  # which others have of the first, and nobody reads again
                    one.prompt.scores = ()
                shown.clear()
                job.told()

        def sink(choice: Choice, delta: Delta) -> Callable[[], Awaitable[None]] | None:
            nonlocal kept
            if form.keeps_text:
                more = choice.grown(delta) + _OF_AN_ID * choice.untold_ids
                kept += more
                untold.add_text(more)
            if not choice.shown or job.logprobs or is_long(choice, delta):
                return partial(tell, choice, delta)
            bare = choice.bare and not choice.finish
            data = form.delta(choice.index, delta, (), None) if bare else written(choice, delta, ())
            return None if not data or write_now(data) else partial(call.write, data)

        with self._scores.answer(job.client, asyncio.current_task()) as untold:
            usage = await self._run(job, sink, arrived, untold)
            end = partial(form.end, usage, tell=job.include_usage)
            await call.write(await self._writers.do(job.client, end, large=kept > _MUCH_TEXT))
        await call.end()
        return usage

    async def _run(self, job: Job, sink: Sink, arrived: float, untold: Untold) -> Usage:
        choices = [Choice(i, r, job) for i, r in enumerate(job.requests)]
        first = choices[0]
        if len(choices) == 1:
            await self._generate(first, sink, arrived, untold)
            usage = Usage(first.prompt_tokens, first.tokens, first.cached if job.show_cached else 0)
        else:
            firsts = (choices[i - i % job.n] for i in range(len(choices)))
            await together(
                self._after(first, choice, sink, arrived, untold) for first, choice in zip(firsts, choices, strict=True)
            )
            cached = sum(c.cached for c in choices[:: job.n]) if job.show_cached else 0
            prompts = sum(c.prompt_tokens for c in choices[:: job.n])  # each once, whatever n is
            usage = Usage(prompts, sum(c.tokens for c in choices), cached)
        if self._metrics is not None:
            self._metrics.prompt_tokens.inc(usage.prompt_tokens)
            self._metrics.generation_tokens.inc(usage.completion_tokens)
            for choice in choices:
                self._metrics.succeeded(
                    "stop" if choice.finish == TOOL_CALLS else choice.finish, self._clock() - arrived
                )
        return usage

    async def _after(self, first: Choice, choice: Choice, sink: Sink, arrived: float, untold: Untold) -> None:
        """The first choice of a prompt computes it and what is told of it, the others find its KV."""
        if choice is not first:
            assert first.begun is not None
            await first.begun.wait()
            choice.prompt.scores = first.prompt.scores
        await self._generate(choice, sink, arrived, untold)

    async def _generate(self, choice: Choice, sink: Sink, arrived: float, untold: Untold) -> None:
        last = 0.0
        metrics = self._metrics

        def take(chunk: TokenChunk) -> Said:
            nonlocal last
            if metrics is not None and chunk.token_ids:
                now = self._clock()
                if last:
                    metrics.inter_token_latency.observe((now - last) / len(chunk.token_ids))
                else:
                    metrics.time_to_first_token.observe(now - arrived)
                last = now
            if choice.text.keeps_logprobs and chunk.logprobs:
                untold.add(_scores(chunk.logprobs))
            delta = choice.feed(chunk)
            if (back := choice.newly_held()) != 0:
                untold.add_text(back)
            if choice.begun is not None:
                choice.begun.set()
            told = sink(choice, delta) if delta != _NOTHING or choice.finish else None
            more = not (choice.finish or choice.cut or choice.text.stopped)
            return more if told is None else partial(_then, told, more)

        try:
            await self._push(choice.request, take)
            if not choice.finish:
                raise EngineFailed("the token stream ended without a finish reason")
        except RequestError as error:
            # Before the first token nothing but admission is known to have happened.
            stage = "generation" if choice.tokens else "admission"
            raise choice.named(error).located(stage, choice.request.request_id) from error


async def _then(told: Callable[[], Awaitable[None]], more: bool) -> bool:
    await told()
    return more


def _scores(entries: Sequence[TokenLogprobs]) -> int:
    """How many log-probabilities there are in them."""
    return sum(1 + len(entry.top) for entry in entries)


def _best(job: Job, likelihood: Mapping[int, float]) -> Sequence[int]:
    """Which choices are told: all, or of each prompt the likeliest, these first."""
    if job.shown == job.n:
        return range(len(job.requests))
    prompts = [range(i, i + job.n) for i in range(0, len(job.requests), job.n)]
    return [i for prompt in prompts for i in sorted(prompt, key=lambda c: -likelihood[c])[: job.shown]]
