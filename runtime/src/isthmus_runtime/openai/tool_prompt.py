"""Tools for models whose chat template has no place for them: told in the system's message, asked for as JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTION = """You can call tools. To call one, answer with nothing but a JSON object like this:
{"name": "the tool's name", "arguments": {"an argument": "its value"}}
To call several at once, answer with a list of such objects. The results come in the next message.
When no tool is needed, answer in plain text.
The tools, with JSON schemas of their arguments:"""


def in_plain_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` without roles and fields that such a template does not know: calls are the assistant's text, as the
    instruction asks for them, and results are the user's. `tools` are described in the system's message."""
    found: list[dict[str, Any]] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            name = f" of {message['name']}" if "name" in message else ""
            results.append(f"Result{name}: {message['content']}")
            continue
        # Joined once: there may be a hundred thousand of them, and each addition would copy all before it.
        found += _of_user(results)
        results = []
        if message.get("tool_calls"):
            calls = [c["function"] for c in message["tool_calls"]]
            text = json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False)
            before = f"{message['content']}\n" if message["content"] else ""
            found.append({"role": "assistant", "content": before + text})
        else:
            found.append(dict(message))
    found += _of_user(results)
    if tools:
        told = "\n".join([_INSTRUCTION, *(json.dumps(t["function"], ensure_ascii=False) for t in tools)])
        if found[0]["role"] == "system":
            found[0]["content"] = f"{found[0]['content']}\n\n{told}"
        else:
            found.insert(0, {"role": "system", "content": told})
    return found


def _of_user(results: Sequence[str]) -> list[dict[str, Any]]:
    """The message that results of tools are; none for none."""
    return [{"role": "user", "content": "\n".join(results)}] if results else []
