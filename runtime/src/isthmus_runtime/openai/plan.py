"""From the body of a request to the generations it asks for: checks, tokenises, resolves every default."""

from __future__ import annotations

from collections.abc import Callable
from os import urandom
from typing import Protocol

from ..config import ChatConfig
from ..errors import InvalidRequest, NeverFits, Overloaded, UnknownModel
from ..interfaces.backend import Backend
from ..request import GenerateRequest, SamplingParams
from .answer import Job
from .chat import Conversation
from .schema import ChatRequest, CompletionRequest, parse_chat, parse_completion
from .sse import ChatFormat, CompletionFormat
from .tokenizer import Tokenizer, TooManyTokens

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
    ) -> None:
        """`seeds` gives the seed of a request that names none; `wall_clock` seconds since the epoch."""
        self._backend = backend
        self._tokenizer = tokenizer
        self._names = served_names
        self._config = chat
        self._timeout_s = timeout_s
        self._seeds = seeds
        self._wall_clock = wall_clock

    def completion(self, body: bytes, *, briefly: bool = False) -> Job:
        """A body of /v1/completions. Raises RequestError."""
        request = parse_completion(body)
        limit = self._admit(request.model)
        prompts = [self._prompt_ids(p, limit) for p in request.prompts()]
        room = limit - max(map(len, prompts))
        wanted = _DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        # More than there is room for is no error: the answer ends with finish_reason "length".
        return self._job(request, prompts, min(wanted, room), "cmpl-", CompletionFormat)

    def chat(self, body: bytes, *, briefly: bool = False) -> Job:
        """A body of /v1/chat/completions. Raises RequestError, and where `briefly` is asked for, NeedsThread."""
        request = parse_chat(body)
        limit = self._admit(request.model)
        conversation = Conversation(
            messages=request.conversation(),
            allow_control_tokens=self._allows_control(request.allow_control_tokens),
        )
        try:
            ids = tuple(self._tokenizer.chat(conversation, limit - 1, briefly=briefly).ids)
        except TooManyTokens as e:
            raise _too_long(str(e), limit, "messages") from e
        if not ids:
            raise InvalidRequest("messages: the rendered prompt is empty", param="messages")
        room = limit - len(ids)
        wanted = room if request.output_limit is None else min(request.output_limit, room)
        return self._job(request, [ids], wanted, "chatcmpl-", ChatFormat)

    def _allows_control(self, asked: bool | None) -> bool:
        setting = self._config.control_tokens
        if asked and setting == "never":
            raise InvalidRequest(
                "allow_control_tokens: this server runs with --control-tokens never; remove it",
                param="allow_control_tokens",
            )
        return setting == "always" if asked is None else asked

    def _admit(self, model: str) -> int:
        """The length limit. Raises when the model is not ours or no engine could serve it yet: the limit is known
        from the first engine on. Whether one can serve it now is the backend's to say, which may wait for it."""
        self.check_model(model)
        limit = self._backend.max_model_len
        if not limit:
            reason = self._backend.ready() or "the length limit is not known yet"
            raise Overloaded(f"not ready: {reason}", retry_after_s=1.0)
        return limit

    def _prompt_ids(self, prompt: str | tuple[int, ...], limit: int) -> tuple[int, ...]:
        """1 to `limit` - 1 ids."""
        if isinstance(prompt, str):
            try:
                ids = tuple(self._tokenizer.encode(prompt, limit - 1))
            except TooManyTokens as e:
                raise _too_long(str(e), limit, "prompt") from e
            if not ids:
                raise InvalidRequest("prompt: is empty; give at least one token", param="prompt")
            return ids
        if len(prompt) >= limit:
            raise _too_long(f"{len(prompt)} tokens", limit, "prompt")
        low, high, size = min(prompt), max(prompt), self._tokenizer.vocab_size
        if low < 0 or high >= size:
            bad = low if low < 0 else high
            raise InvalidRequest(f"prompt: token id {bad} is not in the vocabulary (0 to {size - 1})", param="prompt")
        return prompt

    def _job(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[tuple[int, ...]],
        max_tokens: int,
        prefix: str,
        form: type[ChatFormat] | type[CompletionFormat],
    ) -> Job:
        answer_id = prefix + urandom(16).hex()
        logprobs = request.num_logprobs
        sampling = self._sampling(request, max_tokens)
        seed = self._seeds() if request.seed is None else request.seed
        structure = request.structure
        requests = [
            GenerateRequest(
                request_id=f"{answer_id}-{p * request.n + i}",
                prompt_token_ids=ids,
                sampling=sampling(seed + i),
                priority=request.priority,
                cache_salt=request.cache_salt,
                timeout_s=self._timeout_s,
                structure=structure,
            )
            for p, ids in enumerate(prompts)
            for i in range(request.n)
        ]
        return Job(
            answer_id=answer_id,
            requests=tuple(requests),
            n=request.n,
            structure=structure,
            prompt_tokens=sum(map(len, prompts)),
            stop=tuple(request.stop_strings),
            logprobs=logprobs >= 0,
            stream=request.stream,
            include_usage=request.include_usage,
            format=form(
                self._tokenizer.pieces,
                answer_id,
                int(self._wall_clock()),
                request.model,
                logprobs=logprobs,
                include_usage=request.include_usage,
            ),
        )

    def _sampling(self, request: CompletionRequest | ChatRequest, max_tokens: int) -> Callable[[int], SamplingParams]:
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
            self._tokenizer.encode_alone, size, max_tokens=max_tokens, structured=request.structure is not None
        )

        def with_seed(seed: int) -> SamplingParams:
            return SamplingParams(
                **options,
                max_tokens=max_tokens,
                seed=seed % (1 << 63),
                stop_token_ids=stop_ids,
                logprobs=request.num_logprobs,
            )

        return with_seed

    def check_model(self, name: str) -> None:
        """Raises UnknownModel."""
        if name not in self._names:
            served = ", ".join(self._names)
            raise UnknownModel(f"model: {name!r} is not served here; served: {served}", param="model")


def _too_long(size: str, limit: int, param: str) -> NeverFits:
    return NeverFits(
        f"{param}: {size}, but prompt and output together may have {limit}; "
        f"shorten the prompt to {limit - 1} tokens or fewer",
        param=param,
    )
