"""Chat templates: messages to the prompt text a model was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2

from ..errors import ConfigError, InvalidRequest, RequestError
from .bounded_jinja import BoundedEnvironment
from .paid_operations import Budget, TemplateTooCostly, as_text, paying_from, size_of

MOST_STEPS = 1_000_000
"""Of rendering one prompt: about a second."""
MOST_MADE, MOST_OF_A_TEXT, _FOR_EACH = 1 << 26, 1 << 20, 32
"""Bytes of texts made while rendering one prompt, and of one of them, and so many more for each byte that went in. For
a short body no memory is set aside, and of all texts but one most are gone when the last is made."""
SOME_STEPS, SOME_MADE = 20_000, (1 << 20, 1 << 16)
"""What may be done on the event loop; beyond it, rendering starts anew in a thread."""
SOME_TEXT = 1 << 14
"""Characters of what was rendered that are tokenised there: 5 ms."""
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


class NeedsThread(Exception):
    """This request takes longer than the event loop may stand still; plan it again in a thread."""


class _Refused(Exception):
    """The template called raise_exception."""


def _raise_exception(message: object) -> None:
    raise _Refused(as_text(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a chat template gets."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More variables for the template, by its own names."""
    add_generation_prompt: bool = True
    """End with what opens the assistant's turn."""
    continue_final_message: bool = False
    """End in the last message's text instead, which the model then continues."""
    allow_control_tokens: bool = False
    """Text that reads like a control token is one (ADR 27)."""


class ChatTemplate:
    """A model's Jinja2 chat template, rendered in jinja2's immutable sandbox as transformers does, within a budget."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`special_tokens`: `bos_token`, `eos_token`, ... by the template's names. ConfigError: it does not parse."""
        env = BoundedEnvironment()
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            with paying_from(Budget(MOST_STEPS, 1 << 16)):
                self._template = env.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise ConfigError(f"chat template, line {e.lineno}: {e.message}") from e
        except RecursionError:
            raise ConfigError("chat template: it is nested too deeply") from None
        self.source = source
        self._special = dict(special_tokens)

    def render(
        self, conversation: Conversation, *, steps: int = MOST_STEPS, made: tuple[int, int] | None = None
    ) -> str:
        """The prompt text. InvalidRequest (`messages`) when the template refuses, for example the order of roles;
        TooCostly when it needs more than `steps`, or makes more bytes of text than `made`, in all or at once. None: as
        many as a conversation of its length may."""
        reserved = _RESERVED & set(conversation.kwargs)
        if reserved:
            name = sorted(reserved)[0]
            raise InvalidRequest(
                f"chat_template_kwargs: {name} has a parameter of its own; give it there", param="chat_template_kwargs"
            )
        if made is None:
            more = _FOR_EACH * _size(conversation)
            made = MOST_MADE + more, MOST_OF_A_TEXT + more
        budget = Budget(steps, *made)
        try:
            with paying_from(budget):
                return self._template.render(
                    **{
                        **self._special,
                        **conversation.kwargs,
                        "messages": list(conversation.messages),
                        "tools": conversation.tools,
                        "add_generation_prompt": conversation.add_generation_prompt,
                    }
                )
        except _Refused as e:
            raise InvalidRequest(f"messages: the model's chat template refuses them: {e}", param="messages") from e
        except (TemplateTooCostly, RecursionError, MemoryError) as e:
            why = str(e) if isinstance(e, TemplateTooCostly) else "it needs too much memory"
            raise TooCostly(
                f"messages: the model's chat template was stopped, since {why} "
                f"(limits: {steps} steps, {MOST_MADE} bytes of text, {MOST_OF_A_TEXT} of one); "
                "shorten the conversation",
                param="messages",
            ) from e
        except RequestError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as e:
            raise InvalidRequest(f"messages: the model's chat template fails on them: {e}", param="messages") from e


class TooCostly(InvalidRequest):
    """Rendering was stopped."""


def _size(conversation: Conversation) -> int:
    """Bytes of its texts, and one for each other value."""
    found, left = 0, [conversation.messages, conversation.tools, conversation.kwargs]
    while left:
        value: Any = left.pop()
        if isinstance(value, str):
            found += size_of(value)
        elif isinstance(value, Mapping):
            left += (*value, *value.values())
        elif isinstance(value, (list, tuple)):
            left += value
        else:
            found += 1
    return found
