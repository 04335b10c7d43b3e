"""Runs the generations of one request over a Backend and writes the answer, streamed or whole."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import Cancelled, EngineFailed, RequestError
from ..interfaces.backend import Backend, Pushing, Said, Take
from ..metrics import RequestMetrics
from ..request import FinishReason, GenerateRequest, Structure, TokenChunk, TokenLogprobs
from ..serving.call import Call
from .detokenizer import Stops, TextStream
from .output import Delta, Reader
from .pieces import Pieces
from .prompts import Echo, Told
from .sse import TOOL_CALLS, Answer, Format, More, Usage
from .tool_formats.base import collect
from .untold import AnswerScores, TextSize, Untold
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


@dataclass(slots=True, kw_only=True)
class Job:
    """A request that was checked, and tokenised or left as text. Nobody changes it: to freeze so many fields would
    take longer than to set them."""

    answer_id: str
    requests: tuple[GenerateRequest, ...]
    """One for each choice, in the order of `index`."""
    n: int
    """Choices per prompt. They share its KV: the others begin when the first has a token, and so find it in the prefix
    cache."""
    shown: int
    """How many of them are told, the likeliest; less than `n` for the best of several."""
    stops: Stops | None
    """The strings that end the text."""
    structure: Structure | None
    """What the text of each choice must be."""
    structure_param: str
    """The parameter that says so."""
    logprobs: bool
    scores: int
    """Log-probabilities of prompts that the answer tells."""
    stream: bool
    include_usage: bool
    format: Format
    pieces: Pieces
    include_stop: bool = False
    """What ends the text, a stop string or a stop token, is part of it."""
    return_ids: bool = False
    continuous_usage: bool = False
    """Each chunk of a stream tells the tokens so far."""
    reader: Callable[[], Reader] | None = None
    """Takes the text of a choice apart. None: all of it is content."""
    show_cached: bool = True
    """Usage tells what prefix caches had."""
    one_call: bool = False
    """The first call of a tool ends the choice."""
    echoes: tuple[Echo, ...] = ()
    """The prompts, where the answer repeats them."""
    silent: bool = False
    """The one token that engines generate at least is left out: only the prompt is of interest."""
    client: str = ""
    """Whose it is, where that is known."""
    told: Callable[[], None] = lambda: None
    """To be called when nothing is kept any more of what the answer tells of prompts."""
    tells_end: bool = False
    """The token that ends a text has its log-probabilities told, though it is no part of the text."""


class _Choice:
    """One generation as text."""

    def __init__(self, index: int, request: GenerateRequest, job: Job) -> None:
        self.index = index
        self.request = request
        self.text = TextStream(job.pieces, job.stops or (), logprobs=job.logprobs, include_stop=job.include_stop)
        self.begun = asyncio.Event() if len(job.requests) > 1 else None
        """The prompt is computed: others wait for that."""
        self.prompt_tokens = len(request.prompt_token_ids)
        """Told by the first chunk where the prompt is text."""
        self.tokens = 0
        self.cached = 0
        self.finish = ""
        self._job = job
        self._reader = job.reader() if job.reader is not None else None
        self.bare = not (
            job.reader or job.stops or job.logprobs or job.return_ids or job.continuous_usage or job.silent
        )
        """Of the tokens nothing is told but their text, as it is."""
        self._held = 0
        self._size = TextSize()
        self._called = False
        self.shown = False
        """A stream has begun to tell of it."""
        self.cut = False
        """Ended by us: what the backend would still give is not wanted."""
        self._ids: list[int] | None = [] if job.return_ids else None
        self.prompt = Told(request.prompt_token_ids, job.echoes[index // job.n] if job.echoes else None)
        self._end: list[TokenLogprobs] = []
        self._likelihood = 0.0
        """Sum of the log-probabilities of all tokens, where they are known."""

    @property
    def mean_logprob(self) -> float:
        """By token: what the best of several candidates have most of."""
        return self._likelihood / max(1, self.tokens)

    def named(self, error: RequestError) -> RequestError:
        """With the client's parameter where an engine says `structure`, which is its own word."""
        if error.param != "structure":
            return error
        named = copy.copy(error)
        named.param = self._job.structure_param
        named.message = f"{named.param}: {error.message.removeprefix('structure: ')}"
        named.args = (named.message,)
        return named

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Entries of the tokens that made the text given since the last call."""
        taken = self.text.take_logprobs()
        if self._end:
            taken, self._end = taken + self._end, []
        return taken

    @property
    def untold_ids(self) -> int:
        """How many ids `take_more` would tell."""
        return len(self._ids or ())

    def grown(self, delta: Delta) -> int:
        """Characters of what is new, as `Untold` counts them."""
        return self._size.more(delta.content, delta.reasoning, *(call.arguments for call in delta.calls))

    def newly_held(self) -> int:
        """How many more characters are held back than at the last call."""
        if self._reader is None:
            return 0
        held = 4 * self._reader.held
        before, self._held = self._held, held
        return held - before

    def take_more(self) -> More | None:
        """What a chunk of a stream tells beside its text, since the last call; None: nothing."""
        if self._ids is None and not self._job.continuous_usage:
            return None
        ids, usage = None, None
        if self._ids is not None:
            ids, self._ids = self._ids, []
        if self._job.continuous_usage:
            cached = self.cached if self._job.show_cached else 0
            usage = Usage(self.prompt_tokens, self.tokens, cached)
        return More(ids, usage)

    def feed(self, chunk: TokenChunk) -> Delta:
        """What is certain after `chunk`. Raises the error that ends the generation."""
        if self.bare and self.tokens and chunk.finish_reason is None and not chunk.logprobs:
            self.tokens += len(chunk.token_ids)
            return Delta("", self.text.push(chunk.token_ids))
        text = self._push(chunk)
        if self._reader is None:
            return Delta("", text)
        delta = self._reader.feed(text)
        if self.finish:
            rest = self._reader.finish()
            delta = Delta(delta.reasoning + rest.reasoning, delta.content + rest.content, delta.calls + rest.calls)
        if delta.calls:
            self._called = True
            if self._job.one_call:
                delta = delta._replace(calls=delta.calls[:1])
                self.finish, self.cut = FinishReason.STOP.value, True
        if self._called and self.finish == FinishReason.STOP.value:
            self.finish = TOOL_CALLS
        return delta

    def _push(self, chunk: TokenChunk) -> str:
        if chunk.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise chunk.error or Cancelled("the request was aborted")
        self.cached = max(self.cached, chunk.cached_tokens)
        if chunk.prompt_tokens:
            self.prompt_tokens = chunk.prompt_tokens
        if chunk.prompt_logprobs:
            self.prompt.scores = chunk.prompt_logprobs
        if self._job.silent:
            self.finish, self.cut = FinishReason.LENGTH.value, True
            return ""
        ids: Sequence[int] = chunk.token_ids
        logprobs: Sequence[TokenLogprobs] = chunk.logprobs
        ended = chunk.finish_reason is FinishReason.STOP and ids and ids[-1] in self.request.sampling.stop_token_ids
        if ended and not self._job.include_stop:
            if self._job.tells_end and self.text.keeps_logprobs:
                self._end = list(logprobs[-1:])
            ids, logprobs = ids[:-1], logprobs[:-1]  # a stop token ends the text and is no part of it
        if self.text.keeps_logprobs and len(logprobs) != len(ids):
            raise EngineFailed(f"{len(ids)} tokens came with {len(logprobs)} log-probabilities")
        text, taken = self._push_until_stop(ids, logprobs)
        told, entries = chunk.token_ids, chunk.logprobs
        if self.text.stopped:
            told, entries = told[:taken], entries[:taken]
        self.tokens += len(told)
        if entries:
            self._likelihood += sum(entry.logprob for entry in entries)
        if self._ids is not None:
            self._ids += told
        if self.text.stopped:
            self.finish = FinishReason.STOP.value
        elif chunk.finish_reason is not None:
            text += self.text.finish()
            self.finish = chunk.finish_reason.value
        return text

    def _push_until_stop(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> tuple[str, int]:
        """The text that is certain after `ids`, and how many of them were taken: none after a stop string."""
        if len(ids) <= 1 or not self.text.may_stop:
            return self.text.push(ids, logprobs), len(ids)
        text = ""
        for taken, token in enumerate(ids, 1):
            text += self.text.push((token,), logprobs[taken - 1 : taken])
            if self.text.stopped:
                return text, taken
        return text, len(ids)


Sink = Callable[[_Choice, Delta], Callable[[], Awaitable[None]] | None]
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

        def sink(choice: _Choice, delta: Delta) -> None:
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
            answer.calls += delta.calls
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
            if scores > _MANY_SCORES or untold.held > _MANY_SCORES or ids > _MANY_IDS:
                body = await self._writers.joined(job.client, pieces)
            else:
                body = b"".join(pieces())
        await call.reply(200, headers, body)
        return usage

    async def _opening(self, job: Job, told: int) -> bytes:
        """`told`: tokens of the prompt, for the one request whose prompt is text."""

        def joined() -> bytes:
            first = job.format.first
            return b"".join(first(i, r, len(r.prompt_token_ids) or told) for i, r in enumerate(job.requests))

        many = sum(len(request.prompt_token_ids) for request in job.requests) > _MANY_IDS
        return await self._writers.do(job.client, joined) if many else joined()

    async def stream(self, job: Job, arrived: float, call: Call) -> Usage:
        """The answer as server-sent events, begun when the first text is there: until then a failure still gets its
        own HTTP status. Raises RequestError."""
        opening, opened, kept = asyncio.Lock(), False, 0
        shown: list[_Choice] = []
        """Until all are."""
        form, write_now = job.format, call.writer()

        def is_long(choice: _Choice, delta: Delta) -> bool:
            return kept > _MUCH_TEXT and (bool(choice.finish) or form.ends_text(delta))

        def written(choice: _Choice, delta: Delta, logprobs: Sequence[TokenLogprobs]) -> bytes:
            more = choice.take_more()
            data = form.delta(choice.index, delta, logprobs, more) if delta != _NOTHING or logprobs else b""
            if choice.finish:
                more = choice.take_more() if data else more
                data += form.finish(choice.index, choice.finish, more, choice.text.met)
            return data

        async def tell(choice: _Choice, delta: Delta) -> None:
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
                if len(choice.prompt.scores) > _MANY_SCORES:
                    data = await self._writers.do(job.client, partial(form.echo, choice.index, choice.prompt))
                else:
                    data = form.echo(choice.index, choice.prompt)
            if not choice.shown:
                choice.shown = True
                shown.append(choice)
            logprobs = choice.take_logprobs()
            if (count := _scores(logprobs)) > _MANY_SCORES or is_long(choice, delta):
                data += await self._writers.do(job.client, partial(written, choice, delta, logprobs))
            else:
                data += written(choice, delta, logprobs)
            await call.write(data)
            untold.told(count)
            if len(shown) == len(job.requests):
                for one in shown:  # which others have of the first, and nobody reads again
                    one.prompt.scores = ()
                shown.clear()
                job.told()

        def sink(choice: _Choice, delta: Delta) -> Callable[[], Awaitable[None]] | None:
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
            await call.write(await self._writers.do(job.client, end) if kept > _MUCH_TEXT else end())
        await call.end()
        return usage

    async def _run(self, job: Job, sink: Sink, arrived: float, untold: Untold) -> Usage:
        choices = [_Choice(i, r, job) for i, r in enumerate(job.requests)]
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

    async def _after(self, first: _Choice, choice: _Choice, sink: Sink, arrived: float, untold: Untold) -> None:
        """The first choice of a prompt computes it and what is told of it, the others find its KV."""
        if choice is not first:
            assert first.begun is not None
            await first.begun.wait()
            choice.prompt.scores = first.prompt.scores
        await self._generate(choice, sink, arrived, untold)

    async def _generate(self, choice: _Choice, sink: Sink, arrived: float, untold: Untold) -> None:
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


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them side by side. The first error cancels the others, whose own are its echo, and is raised: a RequestError
    if there is one.

    It is raised where no group is its context: the group holds it, and is held by asyncio's frame in its traceback.
    Such cycles would keep the prompts and answers of all until the collector comes by.
    """
    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        errors.__traceback__ = None
        failed = next((error for error in errors.exceptions if isinstance(error, RequestError)), errors.exceptions[0])
    if failed is not None:
        try:
            raise failed
        finally:
            del failed  # its traceback has this frame
