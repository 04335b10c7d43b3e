"""/v1/responses and /v1/messages are answered as chats: errors name what was sent, at its place."""

from __future__ import annotations

import copy

import aiohttp
import pytest
from api_calls import HELLO, spell

from isthmus_runtime.errors import NeverFits
from isthmus_runtime.openai.as_sent import Names

USER = {"role": "user", "content": "x"}
LONG = {"role": "user", "content": "x " * 5000}
TOOL = {"type": "function", "name": "f"}
THEIR_TOOL = {"name": "f", "input_schema": {}}


def call(**more):
    return {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"} | more


def schema(**more):
    return {"text": {"format": {"type": "json_schema", "name": "n"} | more}}


def formed(**more):
    return {"output_config": {"format": {"type": "json_schema"} | more}}


def blocks(role, *found):
    return {"messages": [*HELLO, {"role": role, "content": list(found)}]}


def use(**more):
    return {"type": "tool_use", "id": "1", "name": "f", "input": {}} | more


def result(**more):
    return {"type": "tool_result", "tool_use_id": "1", "content": "x"} | more


RESPONSES = [
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 100_000}, "max_output_tokens"),
    ({"max_output_tokens": 5, "max_tokens": 7}, "max_tokens"),
    ({"max_output_tokens": 5, "max_completion_tokens": 5}, "max_completion_tokens"),
    (schema(), "text.format.schema"),
    (schema(schema={}), "text.format"),  # no grammars here, which is known last
    (schema(schema={}, more=1), "text.format.more"),
    ({"text": {"format": {"type": "odd"}}}, "text.format"),
    (schema(schema={}) | {"response_format": {"type": "text"}}, "response_format"),
    (schema(schema={}) | {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"reasoning": {"effort": "x" * 40}}, "reasoning.effort"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, "reasoning_effort"),
    ({"tools": [TOOL, {"type": "function"}]}, "tools[1].name"),
    ({"tools": [TOOL, TOOL | {"parameters": 5}]}, "tools[1].parameters"),
    ({"tools": [TOOL | {"odd": 5}]}, "tools[0].odd"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": ["auto"]}, "tool_choice"),
    ({"input": []}, "input"),
    ({"input": [LONG]}, "input"),
    ({"input": [USER, {"role": "user", "content": 5}]}, "input[1].content"),
    ({"input": [USER, {"role": "odd", "content": "x"}], "instructions": "s"}, "input[1].role"),
    ({"input": [USER, {"type": "reasoning"}, call(call_id=5)], "instructions": "s"}, "input[2].call_id"),
    ({"input": [USER, call(), call(name=5)]}, "input[2].name"),
    ({"input": [{"role": "assistant", "content": "x"}, call(), call(), call(arguments="[")]}, "input[3].arguments"),
    ({"input": [call(), {"type": "function_call_output", "call_id": "1"}]}, "input[1].output"),
    ({"input": [call(), {"type": "function_call_output", "call_id": 1, "output": ""}, USER]}, "input[1].call_id"),
]
MESSAGES = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["a"], "stop": ["b"]}, "stop"),
    ({"thinking": {"type": "enabled"}}, "thinking"),
    ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, "reasoning_effort"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}, "output_config.effort"),
    ({"output_config": {"effort": 5}}, "output_config.effort"),
    ({"output_config": {"effort": "low"}, "reasoning_effort": "low"}, "reasoning_effort"),
    ({"output_config": {"odd": 5}}, "output_config.odd"),
    (formed(), "output_config.format.schema"),
    (formed(schema={}, more=1), "output_config.format.more"),
    (formed(type="odd"), "output_config.format.type"),
    (formed(schema={}) | {"response_format": {"type": "text"}}, "response_format"),
    (formed(schema={}), "output_config.format"),  # no grammars here, which is known last
    ({"cache_control": 5}, "cache_control"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"tools": [THEIR_TOOL, THEIR_TOOL | {"input_schema": 5}]}, "tools[1].input_schema"),
    ({"tools": [THEIR_TOOL, {"input_schema": {}}]}, "tools[1].name"),
    ({"tools": [THEIR_TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [THEIR_TOOL], "tool_choice": {"type": "odd", "name": "f"}}, "tool_choice.type"),
    ({"tools": [THEIR_TOOL], "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
    ({"messages": [LONG]}, "messages"),
    ({"system": "s", "messages": [USER, {"role": "odd", "content": "x"}]}, "messages[1].role"),
    (blocks("assistant", {"type": "text", "text": "a"}, {"type": "text", "text": 5}), "messages[1].content[1].text"),
    (blocks("user", result(), {"type": "text", "text": "a", "odd": 5}), "messages[1].content[1].odd"),
    (blocks("assistant", {"type": "text", "text": "a"}, use(), use(id=5)), "messages[1].content[2].id"),
    ({"system": "s"} | blocks("assistant", use(), use(input="{")), "messages[1].content[1].input"),
    (blocks("assistant", use(name=5)), "messages[1].content[0].name"),
    (blocks("assistant", {"type": "thinking", "thinking": {"a": 1}}), "messages[1].content[0].thinking"),
    (
        blocks("user", result(), {"type": "text", "text": "a"}, result(tool_use_id=5)),
        "messages[1].content[2].tool_use_id",
    ),
    (blocks("user", result(content=[{"type": "image"}])), "messages[1].content[0].content[0].type"),
]


@pytest.mark.parametrize(
    "path, base, cases",
    [
        ("responses", {"input": "x"}, RESPONSES),
        ("messages", {"messages": HELLO, "max_tokens": 5}, MESSAGES),
        (
            "messages/count_tokens",
            {"messages": HELLO},
            [case for case in MESSAGES if case[1] not in ("messages", "stop_sequences", "output_config.format")],
        ),
    ],
)
def test_errors_name_what_was_sent(serve, run, tokenizer, path, base, cases):
    async def main():
        async with serve(spell(tokenizer, "a")) as api, aiohttp.ClientSession() as session:
            for more, param in cases:
                async with session.post(f"{api.url}/v1/{path}", json=base | more) as answer:
                    error = (await answer.json()).get("error", {})
                assert (answer.status, error.get("param")) == (400, param), (more, error)
                assert error["message"].startswith(param), (more, error)

    run(main())


def test_of_several_problems_each_is_called_as_it_was_sent():
    names = Names("messages[2].tool_calls[0]")
    for chat, sent in (("stop", "stop_sequences"), ("messages[1]", "system"), ("messages[2]", "messages[0]")):
        names.note(chat, sent)
    error = NeverFits("stop.0: odd; stops: odd; messages[2].role: stop: odd; top_k: odd", param="messages[2].role")
    kept = copy.copy(error)
    told = names.told(error)
    assert told.message == str(told) == "stop_sequences.0: odd; stops: odd; messages[0].role: stop: odd; top_k: odd"
    assert (type(told), told.param, told.code) == (NeverFits, "messages[0].role", error.code)
    assert (error.message, error.param) == (kept.message, kept.param)
    assert names.sent("messages[1].content") == "messages[1].content", "of another item nothing is kept"
