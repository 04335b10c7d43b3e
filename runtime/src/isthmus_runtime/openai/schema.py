"""The parameters of /v1/completions and /v1/chat/completions: names, types, bounds, and what excludes what."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, create_model, model_validator

from ..errors import InvalidRequest
from ..request import SamplingOptions, Structure, WrittenIds
from . import messages
from .bodies import hints, ids_as_written, json_object, parsed
from .logit_options import LogitOptions
from .structured import ResponseFormat, StructuredOutputs, structure_of

MAX_CHOICES = 128
"""Most generations one request may ask for: prompts times n."""
MAX_LOGPROBS = 20
MAX_SCORES = 1 << 18
"""Most log-probabilities of prompts in one answer: tokens times one more than alternatives, for each choice that tells
them. About 60 MiB."""
MAX_COPIED_IDS, MAX_COPIED_TEXT = 1 << 22, 1 << 23
"""Most tokens of prompts, and characters of a grammar, in all choices of a request together: engines get each choice
with its own. 150 MB as they hold them."""
MAX_ECHO = 1 << 22
"""Most characters of prompts in one answer, over all its choices."""
MAX_STOP_STRINGS, MAX_STOP_TEXT = 16, 4096
"""And their characters together: what looks for them takes 1 MiB as long as the request runs, which is counted."""

Prompt = str | tuple[int, ...]
"""Text, or ids that are taken as they are."""

# Parameters of the OpenAI API (and some common extensions) that are not implemented, with the values that ask for
# nothing. Clients send those by default, so they are let through.
_NEUTRAL_BOTH: Mapping[str, tuple[object, ...]] = {
    "store": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
}
_NEUTRAL_COMPLETION = {**_NEUTRAL_BOTH, "suffix": ("",), "add_special_tokens": (True,)}
_NEUTRAL_CHAT: Mapping[str, tuple[object, ...]] = {
    **_NEUTRAL_BOTH,
    "echo": (False,),
    "best_of": (1,),
    "add_special_tokens": (False,),
    "include_reasoning": (True,),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
PROMPT = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]}


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_TEXT)]
_OneStop = Annotated[str, Field(max_length=MAX_STOP_TEXT)]


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _check(self) -> StreamOptions:
        if self.include_obfuscation:
            raise ValueError("include_obfuscation is not supported; remove it or set it to false")
        return self


_OPTIONS = {name: hint for name, hint in get_type_hints(SamplingOptions, include_extras=True).items() if name[0] != "_"}
if TYPE_CHECKING:
    _Sampling = BaseModel
else:
    _Sampling = create_model("_Sampling", **{name: (hint | None, None) for name, hint in _OPTIONS.items()})


class _Common(LogitOptions, _Sampling):
    """Parameters of both endpoints, those of `SamplingOptions` among them. `None` means the model's default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str = ""
    """Empty: the one that is served."""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: _OneStop | Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    # Extensions, with the names that other servers use.
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default_factory=list, max_length=256)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=2**31)
    """Keep the last so many tokens of a prompt; -1: as many as fit."""
    cache_salt: str = Field(default="", max_length=256)
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _check_common(self) -> _Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed together with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not in a stream; remove stream, or use echo with logprobs")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise ValueError(f"stop: {len(self.stop_strings)} strings, at most {MAX_STOP_STRINGS} are allowed")
        if (length := sum(map(len, self.stop_strings))) > MAX_STOP_TEXT:
            raise ValueError(f"stop: {length} characters, at most {MAX_STOP_TEXT} are allowed in all strings together")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens: 0 would leave nothing; give at least 1, or -1 for what fits")
        if self.stop == "":
            raise ValueError("stop: an empty string would stop everything; remove it")
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("structured_outputs: only allowed without response_format")
        if self.ignore_eos and self.structure is not None:
            raise ValueError("ignore_eos: text with a structure ends where that ends; remove one of the two")
        return self

    @cached_property
    def structure(self) -> Structure | None:
        """What the answer's text must be; None: any text. Written once."""
        if self.structured_outputs is not None:
            return self.structured_outputs.structure()
        return None if self.response_format is None else structure_of(self.response_format)

    @property
    def structure_param(self) -> str:
        """The parameter that `structure` comes from."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def sampling(self, defaults: SamplingOptions) -> dict[str, Any]:
        """The fields of `SamplingOptions`, each as given or else as in `defaults`."""
        if self.model_fields_set.isdisjoint(_OPTIONS):
            return {name: getattr(defaults, name) for name in _OPTIONS}
        given = {name: getattr(self, name) for name in _OPTIONS}
        return {name: getattr(defaults, name) if value is None else value for name, value in given.items()}

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream tells the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def num_logprobs(self) -> int:
        """-1 off, else how many alternatives per position."""
        raise AssertionError("defined by both endpoints")

    @property
    def num_prompt_logprobs(self) -> int:
        """-1 off, else how many alternatives `prompt_logprobs` tells."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def num_scores(self) -> int:
        """-1 off, else how many alternatives are needed of each token of the prompt."""
        return self.num_prompt_logprobs

    @property
    def scores_per_token(self) -> int:
        """How many log-probabilities the answer tells of each token of a prompt."""
        return self.num_prompt_logprobs + 1

    @property
    def num_candidates(self) -> int:
        """Generations for each prompt, of which n are shown."""
        return self.n


class CompletionRequest(_Common):
    """POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra=hints(_NEUTRAL_COMPLETION))

    prompt: Annotated[Any, WithJsonSchema(PROMPT)]
    """Checked by `prompts`: validating a long id list element by element is not pydantic's strength."""
    max_tokens: int | None = Field(default=None, ge=0)
    """0: nothing is generated, which leaves what is told of the prompt."""
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of: {self.best_of} candidates are fewer than the n = {self.n} to choose")
        if self.num_candidates > self.n and self.stream:
            raise ValueError("best_of: the best are known at the end; remove stream, or give the value of n")
        return self

    @property
    def num_logprobs(self) -> int:
        """-1 off, else how many alternatives per position."""
        return -1 if self.logprobs is None else self.logprobs

    @property
    def num_scores(self) -> int:
        """-1 off, else how many alternatives are needed of each token of the prompt."""
        return max(self.num_prompt_logprobs, self.num_logprobs if self.echo else -1)

    @property
    def scores_per_token(self) -> int:
        """How many log-probabilities the answer tells of each token of a prompt: each choice has all of them, once for
        each parameter that asks."""
        return self.n * (self.num_prompt_logprobs + 1 + (self.num_logprobs + 1 if self.echo else 0))

    @property
    def num_candidates(self) -> int:
        """Generations for each prompt, of which n are shown."""
        return self.n if self.best_of is None else self.best_of

    def prompts(self) -> list[Prompt]:
        """The prompts, each text or ids. InvalidRequest names `prompt` and what it may be."""
        found = as_prompts(self.prompt, "prompt")
        if len(found) * self.num_candidates > MAX_CHOICES:
            name = "n" if self.num_candidates == self.n else "best_of"
            raise InvalidRequest(
                f"prompt: {len(found)} prompts times {name} = {self.num_candidates} are more than {MAX_CHOICES} "
                "generations; send several requests",
                param="prompt",
            )
        return found


class ChatRequest(_Common):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra=hints(_NEUTRAL_CHAT))

    messages: Annotated[Any, WithJsonSchema(messages.MESSAGES)]
    """Checked by `conversation`, which gives paths into the messages."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[Any, WithJsonSchema(messages.TOOLS)] = None
    """Checked by `offered_tools`, which gives paths into them."""
    tool_choice: Annotated[Any, WithJsonSchema(messages.TOOL_CHOICE)] = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = Field(default=None, max_length=32)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    allow_control_tokens: bool | None = None
    """Text of messages that reads like a control token is one (ADR 27). None: as the server is set."""

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only allowed together with logprobs: true")
        if self.must_call and self.structured_outputs is not None:
            raise ValueError("tool_choice: an answer that must be a call cannot have another structure; remove one")
        if self.must_call and self.ignore_eos:
            raise ValueError("ignore_eos: an answer that must be a call ends where that ends; remove one of the two")
        if self.must_call and self.continue_final_message:
            raise ValueError("tool_choice: an answer that must be a call cannot continue a message")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: excludes add_generation_prompt; give one of the two")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_completion_tokens: differs from max_tokens; give one of the two")
        return self

    @property
    def num_logprobs(self) -> int:
        """-1 off, else how many alternatives per position."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    @property
    def output_limit(self) -> int | None:
        """Most tokens to generate; None: as many as fit."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def limit_name(self) -> str:
        """The parameter that `output_limit` comes from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call of a tool."""
        return self.tool_choice not in (None, "none", "auto")

    def conversation(self) -> list[dict[str, Any]]:
        """Messages with plain text content, as chat templates take them. InvalidRequest names the path."""
        return messages.conversation(self.messages)

    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call. InvalidRequest names the path."""
        found = messages.offered([] if self.tools is None else self.tools)
        return [] if self.tool_choice == "none" else found

    def callable_tools(self) -> list[dict[str, Any]]:
        """Those of them that `tool_choice` lets it call. InvalidRequest names `tool_choice`."""
        return messages.chosen(self.offered_tools(), self.tool_choice)


def parse_completion(body: bytes) -> CompletionRequest:
    """A checked request. InvalidRequest tells every problem and names the parameter of the first."""
    data = json_object(body)
    if (ids := ids_as_written(body, data, "prompt")) is not None:
        data["prompt"] = ids
    return completion_request(data)


def completion_request(data: Mapping[str, Any]) -> CompletionRequest:
    """Parameters of /v1/completions from a body that is parsed."""
    return parsed(CompletionRequest, data, _NEUTRAL_COMPLETION)


def parse_chat(body: bytes) -> ChatRequest:
    """A checked request. InvalidRequest tells every problem and names the parameter of the first."""
    return chat_request(json_object(body))


def chat_request(data: Mapping[str, Any]) -> ChatRequest:
    """Parameters of a chat from a body that is parsed, or was translated from another endpoint's."""
    return parsed(ChatRequest, data, _NEUTRAL_CHAT)


def as_prompts(value: Any, param: str) -> list[Prompt]:
    """Prompts as OpenAI lets them be given, each text or ids. InvalidRequest names `param` and what it may be."""
    if isinstance(value, str | WrittenIds):
        return [value]
    if isinstance(value, list) and value and all(isinstance(p, str) for p in value):
        return list(value)
    if _is_ids(value):
        return [tuple(value)]
    if isinstance(value, list) and value and all(_is_ids(p) for p in value):
        return [tuple(p) for p in value]
    raise InvalidRequest(
        f"{param}: must be a string, a list of strings, a list of token ids, or a list of such lists, none empty",
        param=param,
    )


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}
