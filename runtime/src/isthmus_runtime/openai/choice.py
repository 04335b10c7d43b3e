"""One choice of an answer: the chunks of its generation as text, calls and what else a client is told."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence

from ..errors import Cancelled, EngineFailed, RequestError
from ..request import FinishReason, GenerateRequest, TokenChunk, TokenLogprobs
from .detokenizer import TextStream
from .job import Job
from .output import Delta
from .prompts import Told
from .sse import TOOL_CALLS, More, Usage
from .untold import TextSize


class Choice:
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
        """The mean by token: what the best of several candidates have most of."""
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
        if not delta.calls and not delta.reasoning:
            return self._size.more(delta.content)
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
        if self._job.one_call and len(chunk.token_ids) > 1 and self._reader is not None:
            delta = Delta()
            for part in _singly(chunk):  # nothing after the call is told or counted, however many tokens come at a time
                new = self._feed(part)
                delta = Delta(delta.reasoning + new.reasoning, delta.content + new.content, delta.calls + new.calls)
                if self.finish:
                    break
            return delta
        return self._feed(chunk)

    def _feed(self, chunk: TokenChunk) -> Delta:
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
            self._end = []  # of a token behind the stop string
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


def _singly(chunk: TokenChunk) -> Iterator[TokenChunk]:
    """A chunk as those of its tokens, one each."""
    last = len(chunk.token_ids) - 1
    for number, token in enumerate(chunk.token_ids):
        one = chunk._replace(token_ids=(token,), logprobs=chunk.logprobs[number : number + 1])
        yield one if number == last else one._replace(finish_reason=None, error=None)
