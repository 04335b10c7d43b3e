"""Formats in which models call tools: one pure parser a file, chosen by the model's chat template.

A new one: a file with a `ToolParser`, a line in `FORMATS`, and, if templates tell it, one in `format_of`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import ToolParser
from .hermes import Hermes
from .llama3 import Llama3
from .mistral import Mistral
from .plain_json import PlainJson


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model calls tools."""

    name: str
    parser: type[ToolParser]
    shown: tuple[str, ...] = ()
    """Special tokens that the parser needs to see."""
    short_ids: bool = False
    """Ids of calls are nine letters and digits, which the templates insist on."""


FORMATS = {
    f.name: f
    for f in (
        ToolFormat("hermes", Hermes, ("<tool_call>", "</tool_call>")),
        ToolFormat("llama3", Llama3, ("<|python_tag|>",)),
        ToolFormat("mistral", Mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), short_ids=True),
        ToolFormat("json", PlainJson),
    )
}


def format_of(template: str) -> ToolFormat:
    """The format that a chat template shows to the model."""
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and "parameters" in template):
        return FORMATS["llama3"]
    return FORMATS["json"]
