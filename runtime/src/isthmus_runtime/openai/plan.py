"""From the body of a request to the generations it asks for: checks, tokenises, resolves every default."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import urandom
from typing import Any, Protocol

from ..config import ChatConfig
from ..errors import InvalidRequest
from ..interfaces.backend import Backend
from ..protocol.request import MANY_ALLOWED
from ..request import AdapterName, GenerateRequest, PromptText, SamplingParams, Structure, WrittenIds
from . import anthropic, responses
from .as_sent import Names, made_as_chat
from .bodies import json_object
from .chat import Conversation
from .conversations import Conversations
from .detokenizer import stops_of
from .job import Job
from .job_bounds import check_copies, check_echo, check_room, told_scores
from .output import Reader
from .pieces import Pieces
from .prompts import Echo, echo_of_ids, echo_of_text
from .schema import (
    ChatRequest,
    CompletionRequest,
    chat_request,
    parse_chat,
    parse_completion,
)
from .served import Served
from .sse import ChatFormat, CompletionFormat, Format
from .text_prompts import ids_of, too_long
from .tokenizer import Tokenizer, TooManyTokens, last

MakeFormat = Callable[..., Format]
"""Takes what `Format` does."""
_LONG = 1024
"""Tokens of a prompt that is worth being made compact."""
_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions."""


class Plan(Protocol):
    """From a body to a job. Raises RequestError; NeedsThread where it is to be brief."""

    def __call__(self, body: bytes, *, briefly: bool = False) -> Job: ...


class Planner:
    """Makes jobs. Called from several threads: long bodies are planned off the event loop."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        served_names: tuple[str, ...],
        *,
        chat: ChatConfig,
        timeout_s: float,
        seeds: Callable[[], int],
        wall_clock: Callable[[], float],
        adapters: Callable[[], Mapping[str, AdapterName]],
        takes_text: Callable[[], bool] = lambda: False,
    ) -> None:
        """`takes_text`: whether the backend would have prompts as text, at present. `seeds` gives the seed of a request
        that names none; `wall_clock` seconds since the epoch. `adapters` that may be named as the model, at present."""
        self._tokenizer = tokenizer
        self.served = Served(backend, served_names, adapters)
        self._conversations = Conversations(tokenizer, chat)
        self._timeout_s = timeout_s
        self._seeds = seeds
        self._wall_clock = wall_clock
        self._takes_text = takes_text

    def completion(self, body: bytes, *, briefly: bool = False) -> Job:
        """A body of /v1/completions. Raises RequestError."""
        request = parse_completion(body)
        limit = self.served.admit(request.model, "generate")
        keep = request.truncate_prompt_tokens
        given = request.prompts()
        wanted = _DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        text: PromptText | None = None
        first = given[0]
        alone = first if len(given) == 1 and isinstance(first, str) and not request.echo else None
        room = limit - max(1, wanted)
        if alone is not None and self._may_be_text(request) and self._tokenizer.surely_fits(alone, room, special=True):
            text = PromptText(text=alone, special=True, room=limit)
        many = len(given) > 1
        prompts = [self.prompt_ids(p, limit, keep, many=many) if text is None else () for p in given]
        longest = max(map(len, prompts)) if len(prompts) > 1 else len(prompts[0])
        check_room("max_tokens", request.max_tokens, longest, limit)

        def echo(pieces: Pieces) -> tuple[Echo, ...]:
            echoes: list[Echo] = []
            characters = 0
            for one, ids in zip(given, prompts, strict=True):
                echoes.append(self._echo(request, pieces, one, ids))
                characters += len(echoes[-1].text)
                check_echo(characters, request.n)
            return tuple(echoes)

        return self._job(
            request,
            prompts,
            max(1, min(wanted, limit - longest)),
            "cmpl-",
            CompletionFormat,
            echo=echo if request.echo else None,
            silent=wanted == 0,
            tells_end=True,
            text=text,
        )

    def _may_be_text(self, request: CompletionRequest | ChatRequest) -> bool:
        """Whether nothing but the length of its prompt needs ids here."""
        return (
            request.num_candidates == 1
            and request.truncate_prompt_tokens is None
            and request.num_scores < 0
            and not request.return_token_ids
            and self._takes_text()
        )

    def _echo(
        self, request: CompletionRequest, pieces: Pieces, given: str | tuple[int, ...], ids: Sequence[int]
    ) -> Echo:
        """What the answer repeats of a prompt: the text that came, or what is left of it."""
        offsets = request.num_logprobs >= 0
        if isinstance(given, str) and request.truncate_prompt_tokens is None:
            return echo_of_text(given, ids, self._tokenizer.pieces_with(None), offsets=offsets)
        return echo_of_ids(ids, pieces, offsets=offsets)

    def chat(self, body: bytes, *, briefly: bool = False) -> Job:
        """A body of /v1/chat/completions. Raises RequestError, and where `briefly` is asked for, NeedsThread."""
        return self.chat_job(parse_chat(body), "chatcmpl-", ChatFormat, briefly=briefly)

    def responses(self, body: bytes, *, briefly: bool = False) -> Job:
        """A body of /v1/responses. Raises as `chat`."""
        asked = json_object(body)
        form = partial(responses.ResponsesFormat, asked=asked)
        return made_as_chat(responses.as_chat, asked, partial(self._single, "resp_", form, briefly=briefly))

    def messages(self, body: bytes, *, briefly: bool = False) -> Job:
        """A body of /v1/messages. Raises as `chat`."""
        make = partial(self._single, "msg_", anthropic.AnthropicFormat, briefly=briefly)
        return made_as_chat(anthropic.as_chat, json_object(body), make)

    def count(self, body: bytes) -> int:
        """How many tokens the prompt of a body of /v1/messages/count_tokens has. Raises InvalidRequest."""

        def make(data: dict[str, Any], names: Names) -> int:
            return len(self.tokens(chat_request(data), special=True))

        return made_as_chat(partial(anthropic.as_chat, counting=True), json_object(body), make)

    def _single(self, prefix: str, form: MakeFormat, data: dict[str, Any], names: Names, *, briefly: bool) -> Job:
        request = chat_request(data)
        for name, given, neutral in (
            ("n", request.n, 1),
            ("logprobs", request.num_logprobs, -1),
            ("prompt_logprobs", request.num_prompt_logprobs, -1),
        ):
            if given != neutral:
                raise InvalidRequest(f"{name}: not supported here; remove it, or use /v1/chat/completions", param=name)
        job = self.chat_job(request, prefix, form, briefly=briefly)
        job.structure_param = names.sent(job.structure_param)
        return job

    def tokens(self, request: ChatRequest | CompletionRequest, *, special: bool) -> list[int]:
        """Ids of the prompt of a request, however long. Raises InvalidRequest."""
        self.check_model(request.model)
        if isinstance(request, ChatRequest):
            return self._tokenizer.chat(self._conversations.of(request, request.offered_tools())).ids or []
        prompt = request.prompts()[0]
        if not isinstance(prompt, str):
            raise InvalidRequest("prompt: must be a string", param="prompt")
        return self._tokenizer.encode(prompt) if special else self._tokenizer.encode_alone(prompt)

    def check_model(self, name: str) -> None:
        """Raises UnknownModel; "" is the model that is served."""
        self.served.check(name)

    def chat_job(self, request: ChatRequest, prefix: str, form: MakeFormat, *, briefly: bool) -> Job:
        """The job of a conversation, whichever endpoint it came by. Raises as `chat`."""
        limit = self.served.admit(request.model, "generate")
        tools = request.offered_tools()
        keep = request.truncate_prompt_tokens
        asked = request.output_limit
        # What is left for the answer is told where min_tokens is more.
        as_text = self._may_be_text(request) and (asked is not None or not request.min_tokens)
        try:
            prompt = self._tokenizer.chat(
                self._conversations.of(request, tools),
                limit - 1 if keep is None else None,
                briefly=briefly,
                as_text=limit - (asked or 1) if as_text else 0,
                end=0 if keep is None else _kept(keep, limit),
            )
        except TooManyTokens as e:
            raise too_long(str(e), limit, "messages") from e
        text: PromptText | None = None
        ids: tuple[int, ...] = ()
        if prompt.ids is None:
            text, wanted = PromptText(text=prompt.text, special=False, room=limit), asked or limit - 1
        else:
            ids = self._tokenizer.compact(prompt.ids) if len(prompt.ids) > _LONG else tuple(prompt.ids)
            if not ids:
                raise InvalidRequest("messages: the rendered prompt is empty", param="messages")
            if len(ids) >= limit:
                raise too_long(f"{len(ids)} tokens", limit, "truncate_prompt_tokens")
            check_room(request.limit_name, asked, len(ids), limit)
            wanted = limit - len(ids) if asked is None else asked
        return self._job(
            request,
            [ids],
            wanted,
            prefix,
            form,
            reader=self._conversations.reader(tools, prompt.text),
            tools=bool(tools),
            calls=self._conversations.calls(request, tools, prompt.text),
            text=text,
        )

    def prompt_ids(
        self,
        prompt: str | tuple[int, ...],
        limit: int,
        keep: int | None = None,
        name: str = "prompt",
        *,
        many: bool = True,
    ) -> tuple[int, ...]:
        """1 to `limit` - 1 ids; the last `keep` where that is given. Errors call it `name`. `many`: of a request that
        has many prompts."""
        ids = self._prompt_ids(prompt, limit, keep, name)
        return self._tokenizer.compact(ids) if many or len(ids) > _LONG else ids

    def _prompt_ids(self, prompt: str | tuple[int, ...], limit: int, keep: int | None, name: str) -> tuple[int, ...]:
        if keep is not None:
            count = _kept(keep, limit)
            prompt = tuple(
                self._tokenizer.encode_end(prompt, count) if isinstance(prompt, str) else last(prompt, count)
            )
            if not prompt:
                raise InvalidRequest(f"{name}: is empty; give at least one token", param=name)
        if isinstance(prompt, str):
            return ids_of(self._tokenizer, prompt, limit, name)
        if len(prompt) >= limit:
            raise too_long(f"{len(prompt)} tokens", limit, name)
        size, high = self._tokenizer.vocab_size, max(prompt)
        low = 0 if isinstance(prompt, WrittenIds) else min(prompt)
        if low < 0 or high >= size:
            bad = low if low < 0 else high
            raise InvalidRequest(f"{name}: token id {bad} is not in the vocabulary (0 to {size - 1})", param=name)
        return prompt

    def bounded(self, conversation: Conversation, limit: int, name: str) -> tuple[int, ...]:
        """Ids of a conversation: 1 to `limit` - 1. Errors call it `name`."""
        try:
            ids = self._tokenizer.chat(conversation, limit - 1).ids
        except TooManyTokens as e:
            raise too_long(str(e), limit, name) from e
        if not ids:
            raise InvalidRequest(f"{name}: the rendered prompt is empty", param=name)
        return self._tokenizer.compact(ids)

    def _job(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[tuple[int, ...]],
        max_tokens: int,
        prefix: str,
        form: MakeFormat,
        *,
        reader: Callable[[], Reader] | None = None,
        tools: bool = False,
        calls: Structure | None = None,
        echo: Callable[[Pieces], tuple[Echo, ...]] | None = None,
        silent: bool = False,
        tells_end: bool = False,
        text: PromptText | None = None,
    ) -> Job:
        """`echo`: what the answer repeats of each prompt. `text`: the prompt, where there are no ids of it."""
        answer_id = prefix + urandom(16).hex()
        logprobs, candidates = request.num_logprobs, request.num_candidates
        scores = told_scores(request, prompts)
        shown = None if not request.skip_special_tokens else self._conversations.tool_format.shown if tools else ()
        pieces = self._tokenizer.pieces_with(shown)
        structure = calls or request.structure
        sampling = self._sampling(request, max_tokens, structured=structure is not None)
        adapter = self.served.adapter(request.model)
        seed = self._seeds() if request.seed is None else request.seed
        if candidates > 1:
            # Each choice is written for an engine by itself, on the event loop.
            prompts = [WrittenIds.of(ids) if len(ids) > _LONG else ids for ids in prompts]
        requests = [
            GenerateRequest(
                request_id=f"{answer_id}-{p * candidates + i}",
                prompt_token_ids=ids,
                sampling=sampling(i, seed + i),
                prompt_group=f"{answer_id}-{p * candidates}" if candidates > 1 else "",
                priority=request.priority,
                cache_salt=request.cache_salt,
                timeout_s=self._timeout_s,
                structure=structure,
                adapter=adapter,
                prompt=text,
            )
            for p, ids in enumerate(prompts)
            for i in range(candidates)
        ]
        if len(requests) > 1:
            check_copies(requests, request.structure_param)
        return Job(
            answer_id=answer_id,
            requests=tuple(requests),
            n=candidates,
            shown=request.n,
            structure=structure,
            structure_param="tools" if tools and calls is not None else request.structure_param,
            stops=stops_of(tuple(request.stop_strings)) if request.stop_strings else None,
            logprobs=logprobs >= 0,
            scores=scores,
            stream=request.stream,
            include_usage=request.include_usage,
            pieces=pieces,
            include_stop=request.include_stop_str_in_output,
            return_ids=request.return_token_ids,
            continuous_usage=request.continuous_usage,
            reader=reader,
            one_call=isinstance(request, ChatRequest) and not request.parallel_tool_calls,
            echoes=() if echo is None else echo(pieces),
            silent=silent,
            tells_end=tells_end,
            format=form(
                pieces,
                answer_id,
                int(self._wall_clock()),
                self.served.named(request.model),
                logprobs=logprobs,
                prompt_logprobs=request.num_prompt_logprobs,
                include_usage=request.include_usage,
                return_ids=request.return_token_ids,
                short_call_ids=self._conversations.tool_format.short_ids,
            ),
        )

    def _sampling(
        self, request: CompletionRequest | ChatRequest, max_tokens: int, *, structured: bool
    ) -> Callable[[int, int], SamplingParams]:
        """Of the n-th choice of a prompt, with its seed. What is told of the prompt comes with the first."""
        size = self._tokenizer.vocab_size
        outside = [i for i in request.stop_token_ids if not 0 <= i < size]
        if outside:
            raise InvalidRequest(
                f"stop_token_ids: {outside[0]} is not in the vocabulary (0 to {size - 1})", param="stop_token_ids"
            )
        eos = () if request.ignore_eos else self._tokenizer.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *request.stop_token_ids)))
        options = request.sampling(self._tokenizer.defaults)
        options |= request.logit_params(
            self._tokenizer.encode_alone, size, max_tokens=max_tokens, structured=structured, stops=stop_ids
        )

        if len(allowed := options.get("allowed_token_ids", ())) > MANY_ALLOWED:
            options["allowed_token_ids"] = self._tokenizer.compact(allowed)

        # The best of several candidates are told by how likely they are.
        logprobs = request.num_logprobs if request.num_candidates == request.n else max(0, request.num_logprobs)

        def of_choice(choice: int, seed: int) -> SamplingParams:
            return SamplingParams(
                **options,
                max_tokens=max_tokens,
                seed=seed % (1 << 63),
                stop_token_ids=stop_ids,
                logprobs=logprobs,
                prompt_logprobs=-1 if choice else request.num_scores,
            )

        return of_choice


def _kept(keep: int, limit: int) -> int:
    """How many tokens `truncate_prompt_tokens` leaves; -1: as many as fit."""
    return limit - 1 if keep < 0 else keep
