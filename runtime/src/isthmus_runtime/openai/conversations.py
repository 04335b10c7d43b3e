"""What a chat request is to its model: what the template gets, what the answer must be, and who takes it apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic_core import from_json

from ..config import ChatConfig
from ..errors import InvalidRequest
from ..request import Structure
from .chat import Conversation
from .output import Reader, Thinking
from .schema import ChatRequest
from .structured import check_length
from .tokenizer import Tokenizer
from .tool_formats import FORMATS, format_of
from .tool_grammar import after_thought, calls_grammar
from .tool_prompt import in_plain_text

MAX_TOOLS = 1 << 20
"""Characters of all tools as JSON, which the template writes into the prompt."""


class Conversations:
    """Makes conversations of chat requests for one model, as the server is set. Called from several threads."""

    def __init__(self, tokenizer: Tokenizer, config: ChatConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        auto = config.tool_format == "auto"
        self.tool_format = format_of(tokenizer.template) if auto else FORMATS[config.tool_format]
        """How the model writes calls of tools."""

    def of(self, request: ChatRequest, tools: list[dict[str, Any]]) -> Conversation:
        """What the template gets. Raises InvalidRequest."""
        messages = request.conversation()
        if request.continue_final_message and messages[-1].get("tool_calls"):
            raise InvalidRequest(
                "continue_final_message: the last message has tool calls, which cannot be continued",
                param="continue_final_message",
            )
        check_length(tools, "tools", MAX_TOOLS)
        if not self._tokenizer.knows("tools"):
            messages, tools = in_plain_text(messages, tools), []
        add = request.add_generation_prompt
        return Conversation(
            messages=messages,
            tools=tools or None,
            kwargs={**self._effort(request.reasoning_effort), **request.chat_template_kwargs},
            add_generation_prompt=not request.continue_final_message if add is None else add,
            continue_final_message=request.continue_final_message,
            allow_control_tokens=self._allows_control(request.allow_control_tokens),
        )

    def calls(self, request: ChatRequest, tools: list[dict[str, Any]], prompt: str) -> Structure | None:
        """What the answer must be where tools, or a reasoning that the prompt has begun, make that another thing than
        the request's own structure."""
        # An answer that must be a call has no text that `response_format` could be about; clients send both.
        answer = None if request.must_call else request.structure
        callable_tools = request.callable_tools()
        opened = self._thinks and prompt.rstrip().endswith(Thinking.OPEN)
        if not tools and answer is not None and opened:
            return self._after_thought(answer, request.structure_param)
        if not tools or not (request.must_call or answer is not None):
            return None
        # A model that may call and is held to JSON otherwise must be let do either.
        schema = None
        if answer is not None:
            if answer.kind not in {"json_object", "json_schema"}:
                raise InvalidRequest(
                    f"structured_outputs: {answer.kind} is not supported together with tools; remove one of the two",
                    param="structured_outputs",
                )
            schema = _schema(answer.text or '{"type": "object"}')
        check_length([tool["function"].get("parameters") for tool in callable_tools], "tools")
        return calls_grammar(
            self.tool_format.name,
            [tool["function"] for tool in callable_tools],
            self._tokenizer.control_id,
            several=request.tool_choice in (None, "auto", "required") and request.parallel_tool_calls,
            answer=schema,
            thinking=Thinking.CLOSE if opened else "",
        )

    def _after_thought(self, answer: Structure, param: str) -> Structure:
        """The prompt has begun a reasoning, which is no part of what the answer is held to."""
        try:
            return after_thought(answer, self._tokenizer.control_id, Thinking.CLOSE)
        except (ValueError, RecursionError) as e:
            raise InvalidRequest(f"{param}: {e}", param=param) from e

    def reader(self, tools: list[dict[str, Any]], prompt: str) -> Callable[[], Reader] | None:
        """What takes the answers apart; None: nothing does."""
        thinks = self._thinks
        if not thinks and not tools:
            return None
        names = frozenset(t["function"]["name"] for t in tools)  # of all choices
        opened = prompt.rstrip().endswith(Thinking.OPEN)
        parser = self.tool_format.parser
        return lambda: Reader(parser(names) if names else None, Thinking(opened=opened) if thinks else None)

    @property
    def _thinks(self) -> bool:
        """Whether the model writes its reasoning before its answer."""
        return self._tokenizer.thinks if self._config.reasoning == "auto" else self._config.reasoning == "think"

    def _effort(self, effort: str | None) -> dict[str, Any]:
        """`reasoning_effort` in the variables of the model's template."""
        if effort is None:
            return {}
        if self._tokenizer.knows("reasoning_effort"):
            return {"reasoning_effort": effort}
        if self._tokenizer.knows("enable_thinking"):
            return {"enable_thinking": effort != "none"}
        if effort == "none" and not self._tokenizer.thinks:
            return {}
        raise InvalidRequest(
            f"reasoning_effort: {effort!r} would have no effect, for the model's template does not know it; remove it",
            param="reasoning_effort",
        )

    def _allows_control(self, asked: bool | None) -> bool:
        setting = self._config.control_tokens
        if asked and setting == "never":
            raise InvalidRequest(
                "allow_control_tokens: this server runs with --control-tokens never; remove it",
                param="allow_control_tokens",
            )
        return setting == "always" if asked is None else asked


def _schema(text: str) -> dict[str, Any]:
    try:
        found = from_json(text)
    except ValueError as e:
        raise InvalidRequest(f"structured_outputs: json is no JSON: {e}", param="structured_outputs") from e
    found = {} if found is True else found
    if not isinstance(found, dict):
        raise InvalidRequest("structured_outputs: a JSON schema is an object", param="structured_outputs")
    return found
