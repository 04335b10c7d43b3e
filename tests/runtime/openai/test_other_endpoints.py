"""/v1/responses and /v1/messages with the clients that users have; /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import shutil
import threading
import tracemalloc

import aiohttp
import openai
import pytest
from api_calls import HELLO, client, events, spell
from pydantic import BaseModel

from isthmus_runtime.config import ChatConfig
from isthmus_runtime.errors import EngineFailed, InvalidRequest
from isthmus_runtime.openai import responses, tokens
from isthmus_runtime.openai.chat import Conversation
from isthmus_runtime.openai.tokenizer import Tokenizer
from isthmus_runtime.openai.tokens import Tokenized, detokenized, written
from isthmus_runtime.structured.checker import Checker

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "größer"}}\n</tool_call>'
ANSWER = f"<think>hm</think>\n\nI look. {CALL}"
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.fixture(scope="module")
def caller(model_dir, tmp_path_factory) -> Tokenizer:
    root = tmp_path_factory.mktemp("caller") / "copy"
    shutil.copytree(model_dir, root)
    (root / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.load(root)


@pytest.fixture
def anthropic():
    """The client's module: importing it takes seconds, which not every process that collects this file should spend."""
    import anthropic

    return anthropic


@pytest.fixture
def claude(anthropic):
    def make(api, key="any"):
        plain = anthropic.DefaultAsyncHttpxClient(verify=False)
        return anthropic.AsyncAnthropic(base_url=api.url, api_key=key, max_retries=0, timeout=20, http_client=plain)

    return make


def shown(tokenizer, api):
    return tokenizer.pieces_with(None).join(api.backend.requests[-1].prompt_token_ids)


LONG = [{"role": "user", "content": "x " * 400}]
TOOL = {"type": "function", "name": "look", "description": "d", "parameters": {"type": "object"}, "strict": True}
THEIR_TOOL = {"name": "look", "description": "d", "input_schema": {"type": "object"}}


def test_responses(serve, run, caller):
    async def main():
        async with serve(spell(caller, ANSWER), used=caller) as api, client(api) as c:
            api.backend.max_model_len = 4000
            got = await c.responses.create(model="tiny", input="hi", instructions="Be kind.", tools=[TOOL], store=False)
            assert [item.type for item in got.output] == ["reasoning", "message", "function_call"]
            assert (got.status, got.output_text, got.id[:5]) == ("completed", "I look.", "resp_")
            assert json.loads(got.output[2].arguments) == {"at": "größer"}
            assert got.usage.output_tokens == len(caller.encode(ANSWER)) + 1
            prompt = shown(caller, api)
            assert "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>" in prompt
            # Stateless: what was said goes in again.
            said = [item.model_dump(exclude_none=True) for item in got.output]
            result = {"type": "function_call_output", "call_id": got.output[2].call_id, "output": "seen"}
            first = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
            again = await c.responses.create(model="tiny", input=[first, *said, result], max_output_tokens=3)
            assert (again.status, again.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert "I look.{" in shown(caller, api) and "<|im_start|>tool\nseen<|im_end|>" in shown(caller, api)

    run(main())


def test_a_stream_of_a_response(serve, run, caller):
    async def main():
        async with serve(spell(caller, ANSWER), used=caller) as api, client(api) as c:
            api.backend.max_model_len = 4000
            seen = []
            async with c.responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:
                async for event in stream:
                    seen.append(event)
                final = await stream.get_final_response()
            assert [e.sequence_number for e in seen] == list(range(len(seen)))
            kinds = [e.type for e in seen]
            assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
            assert "".join(e.delta for e in seen if e.type == "response.output_text.delta") == "I look."
            assert "".join(e.delta for e in seen if e.type == "response.reasoning_text.delta") == "hm"
            assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
            assert final.output_text == "I look." and json.loads(final.output[2].arguments) == {"at": "größer"}
            assert final.usage.total_tokens > 0

    run(main())


def test_a_response_repeats_no_more_than_it_may_hold(serve, run, tokenizer, monkeypatch):
    monkeypatch.setattr(responses, "MAX_REPEATED", 2000)
    schema = {"type": "json_schema", "name": "n", "schema": {"x": "y" * 2000}}

    async def main():
        async with serve(spell(tokenizer, "a")) as api:
            status, answer = await events(api, "/v1/responses", {"input": "hi", "text": {"format": schema}})
            assert (status, answer["error"]["param"]) == (400, "text")

    run(main())


def test_a_response_repeats_what_was_asked_in_one_piece_and_in_a_stream(serve, run, caller):
    more = {"metadata": {"größer": "1"}, "user": "u", "temperature": 0.5, "tools": [TOOL], "instructions": "Be kind."}

    async def main():
        async with serve(spell(caller, "a"), used=caller) as api:
            api.backend.max_model_len = 4000
            _, whole = await events(api, "/v1/responses", {"input": "hi", "return_token_ids": True, **more})
            _, seen = await events(
                api, "/v1/responses", {"input": "hi", "stream": True, "return_token_ids": True, **more}
            )
            told = [json.loads(part.partition("data: ")[2])["response"] for part in seen if '"response":' in part]
            assert [one["status"] for one in told] == ["in_progress", "in_progress", "completed"]
            for one in (whole, *told):
                assert one.items() >= more.items()
            assert told[-1]["token_ids"] == whole["token_ids"] and whole["token_ids"]

    run(main())


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"n": 2}, "n"),
        ({"messages": HELLO}, "messages"),
        ({"nothing": 1}, "nothing"),
        # The answer repeats these, and holds them as long as it streams.
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"x": [{}]}}, "metadata"),
        ({"metadata": {"x" * 65: "x"}}, "metadata"),
        ({"metadata": {"x": "x" * 513}}, "metadata"),
        ({"metadata": "x"}, "metadata"),
        ({"user": "x" * 513}, "user"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"tone": "kind"}}, "text.tone"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"depth": 1}}, "reasoning.depth"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "look", "mode": "x"}}, "tool_choice.mode"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": "look"}}, "tool_choice.type"),
        ({"tools": [{**TOOL, "examples": []}]}, "tools[0].examples"),
        ({"input": [{"role": "user", "content": "hi", "name": "Ann"}]}, "input[0].name"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "k": 1}]}]},
            "input[0].content[0].k",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "k": 1}]}, "input[0].k"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x", "k": 1}]}, "input[0].k"),
    ],
)
def test_responses_refuses_by_name(serve, run, tokenizer, more, param):
    async def main():
        async with serve(spell(tokenizer, "a")) as api:
            status, answer = await events(api, "/v1/responses", {"input": "hi", **more})
            assert (status, answer["error"]["param"]) == (400, param)
            assert api.backend.requests == []

    run(main())


@pytest.mark.parametrize(
    "more",
    [
        {"text": {"verbosity": "medium", "format": None}},
        {"reasoning": {"effort": None, "summary": "auto"}},
        {"stream_options": {"include_obfuscation": False}},
        {"metadata": {"x" * 64: "x" * 512}, "user": "u" * 512},
        {"tools": [{**TOOL, "description": "x" * 1_000_000}], "tool_choice": "none"},
        {"input": [{"type": "message", "role": "user", "content": "hi", "id": "m", "status": None, "phase": None}]},
        {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": [{}]}]}]},
    ],
)
def test_responses_takes_what_asks_for_nothing(serve, run, tokenizer, more):
    async def main():
        async with serve(spell(tokenizer, "a")) as api:
            status, answer = await events(api, "/v1/responses", {"input": "hi", **more})
            assert status == 200, answer

    run(main())


def block(kind, **fields):
    return {"messages": [{"role": "assistant" if kind in ("tool_use", "thinking") else "user",
                          "content": [{"type": kind, **fields}]}]}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"system": [{"type": "text", "text": "x", "k": 1}]}, "system[0].k"),
        ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "messages[0].name"),
        (block("text", text="x", citations=[{"type": "char_location"}]), "messages[0].content[0].citations"),
        (block("tool_use", id="t", name="f", input={}, k=1), "messages[0].content[0].k"),
        (block("tool_result", tool_use_id="t", content="x", k=1), "messages[0].content[0].k"),
        (block("thinking", thinking="x", signature="", k=1), "messages[0].content[0].k"),
        ({"tools": [{**THEIR_TOOL, "input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [THEIR_TOOL], "tool_choice": {"type": "auto", "name": "look"}}, "tool_choice.name"),
        ({"tools": [THEIR_TOOL], "tool_choice": {"type": "tool", "name": "look", "k": 1}}, "tool_choice.k"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024, "k": 1}}, "thinking.k"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    ],
)
def test_messages_refuses_by_name(serve, run, tokenizer, more, param):
    async def main():
        async with serve(spell(tokenizer, "a")) as api:
            asked = {"max_tokens": 3, "messages": HELLO, **more}
            status, answer = await events(api, "/v1/messages", asked)
            assert (status, answer["error"]["param"]) == (400, param)
            assert api.backend.requests == []

    run(main())


@pytest.mark.parametrize("kind", [[], {}, None, 1, "some"])
def test_a_choice_of_tools_that_is_none_is_refused(serve, run, caller, kind):
    async def main():
        async with serve(spell(caller, "a"), used=caller) as api:
            body = {"max_tokens": 3, "messages": HELLO, "tool_choice": {"type": kind}}
            status, answer = await events(api, "/v1/messages", body)
            assert status == 400 and "tool_choice.type" in answer["error"]["message"], answer

    run(main())


def test_a_failed_call_of_a_tool_is_told_as_one(serve, run, caller):
    async def main():
        async with serve(spell(caller, "a"), used=caller) as api:
            for is_error in (True, False):
                more = block("tool_result", tool_use_id="t", content="no such place", is_error=is_error)
                status, answer = await events(api, "/v1/messages", {"max_tokens": 3, **more})
                assert status == 200, answer
                assert ("tool\nError: no such place<" if is_error else "tool\nno such place<") in shown(caller, api)

    run(main())


def test_messages(serve, run, caller, claude, anthropic):
    async def main():
        async with serve(spell(caller, ANSWER), used=caller, api_key="k") as api, claude(api, "k") as c:
            api.backend.max_model_len = 4000
            system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
            ask = {"model": "tiny", "max_tokens": 300, "tools": [THEIR_TOOL]}
            got = await c.messages.create(**ask, messages=HELLO, system=system, cache_control={"type": "ephemeral"})
            assert [b.type for b in got.content] == ["thinking", "text", "tool_use"]
            assert (got.stop_reason, got.content[1].text, got.content[2].input) == (
                "tool_use",
                "I look.",
                {"at": "größer"},
            )
            assert "<|im_start|>system\nBe kind.<|im_end|>" in shown(caller, api)
            prompt = len(api.backend.requests[-1].prompt_token_ids)
            assert got.usage.input_tokens + got.usage.cache_read_input_tokens == prompt
            count = await c.messages.count_tokens(model="tiny", messages=HELLO, system=system, tools=[THEIR_TOOL])
            assert count.input_tokens == prompt
            back = [
                *HELLO,
                {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in got.content]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": got.content[2].id, "content": "seen"},
                        {"type": "text", "text": "and?"},
                    ],
                },
            ]
            await c.messages.create(**ask, messages=back, thinking={"type": "disabled"})
            prompt = shown(caller, api)
            assert "<think>hm</think>I look." in prompt and prompt.endswith("assistant\n<think></think>")
            assert "<|im_start|>tool\nseen<|im_end|>\n<|im_start|>user\nand?<|im_end|>" in prompt
            short = await c.messages.create(model="tiny", max_tokens=2, messages=HELLO)
            assert short.stop_reason == "max_tokens"
            stopped = await c.messages.create(**ask, messages=HELLO, stop_sequences=["look"])
            assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[1].text) == (
                "stop_sequence",
                "look",
                "I ",
            )
        async with serve(spell(caller, "a"), used=caller, api_key="k") as api, claude(api, "wrong") as c:
            with pytest.raises(anthropic.AuthenticationError):
                await c.messages.create(model="tiny", max_tokens=2, messages=HELLO)

    run(main())


@pytest.mark.parametrize(
    "content, more, end",
    [
        ("{", {}, "assistant\n{"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b "}], {}, "assistant\na\nb "),
        ([{"type": "thinking", "thinking": "hm", "signature": ""}], {}, "assistant\n<think>hm</think>"),
        ([], {}, "assistant\n"),
        ("{", {"continue_final_message": False}, "{<|im_end|>\n<|im_start|>assistant\n"),
        ("{", {"add_generation_prompt": True}, "{<|im_end|>\n<|im_start|>assistant\n"),
        ([{"type": "tool_use", "id": "1", "name": "f", "input": {}}], {}, "<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_last_message_of_the_assistant_is_continued(serve, run, caller, claude, content, more, end):
    async def main():
        async with serve(spell(caller, "a"), used=caller) as api, claude(api) as c:
            api.backend.max_model_len = 4000
            messages = [*HELLO, {"role": "assistant", "content": content}]
            got = await c.messages.create(model="tiny", max_tokens=9, messages=messages, extra_body=more)
            assert got.content[0].text == "a"
            assert shown(caller, api).endswith(end)
            count = await c.messages.count_tokens(model="tiny", messages=messages, extra_body=more)
            assert count.input_tokens == len(api.backend.requests[-1].prompt_token_ids)

    run(main())


def test_a_stream_of_a_message(serve, run, caller, claude):
    async def main():
        async with serve(spell(caller, ANSWER), used=caller) as api, claude(api) as c:
            api.backend.max_model_len = 4000
            ask = {"model": "tiny", "max_tokens": 300, "tools": [THEIR_TOOL], "messages": HELLO}
            text = ""
            async with c.messages.stream(**ask) as stream:
                async for event in stream:
                    text += event.text if event.type == "text" else ""
                final = await stream.get_final_message()
            assert text == "I look."
            assert [b.type for b in final.content] == ["thinking", "text", "tool_use"]
            assert (final.content[0].thinking, final.content[2].input) == ("hm", {"at": "größer"})
            assert final.stop_reason == "tool_use"
            assert final.usage.output_tokens == len(caller.encode(ANSWER)) + 1

    run(main())


def test_messages_are_held_to_a_schema(serve, run, caller, claude, model_dir):
    class Place(BaseModel):
        at: str

    async def main():
        checker, script = Checker(model_dir), spell(caller, '{"at": "x"}')
        plain = ChatConfig(reasoning="none")
        ask = {"model": "tiny", "max_tokens": 100, "messages": HELLO, "output_format": Place}
        try:
            async with serve(script, used=caller, grammars=checker, chat=plain) as api, claude(api) as c:
                assert (await c.messages.parse(**ask)).parsed_output == Place(at="x")
                async with c.messages.stream(**ask) as stream:
                    assert (await stream.get_final_message()).parsed_output == Place(at="x")
            for request in api.backend.requests:
                assert request.structure.kind == "json_schema" and '"at"' in request.structure.text
        finally:
            await checker.close()

    run(main())


@pytest.mark.parametrize(
    ("thinking", "effort", "end"),
    [
        (None, "none", "<think></think>"),
        (None, "low", "assistant\n"),
        ("adaptive", "low", "assistant\n"),
        ("disabled", "low", "<think></think>"),
    ],
)
def test_an_effort_is_one_of_reasoning(serve, run, caller, thinking, effort, end):
    async def main():
        async with serve(spell(caller, "a"), used=caller) as api:
            asked = {"max_tokens": 3, "messages": HELLO, "output_config": {"effort": effort}}
            asked |= {"thinking": {"type": thinking}} if thinking else {}
            status, answer = await events(api, "/v1/messages", asked)
            assert status == 200, answer
            assert shown(caller, api).endswith(end)

    run(main())


def test_a_loop_over_tools_goes_on_where_no_conversation_is_kept(serve, run, caller, claude, anthropic):
    @anthropic.beta_async_tool
    async def look(at: str) -> str:
        """Look at a place."""
        return f"seen {at}"

    async def main():
        async with serve(spell(caller, ANSWER), used=caller) as api, claude(api) as c:
            api.backend.max_model_len = 4000
            ask = {"model": "tiny", "max_tokens": 300, "messages": HELLO}
            said = [m async for m in c.beta.messages.tool_runner(**ask, tools=[look], max_iterations=2)]
            assert [m.stop_reason for m in said] == ["tool_use", "tool_use"]
            assert "tool\nseen größer<" in shown(caller, api)
            with pytest.raises(anthropic.BadRequestError, match="thread: not supported"):
                await c.beta.messages.create(**ask, thread={"type": "continue", "previous_message_id": "msg_1"})

    run(main())


@pytest.mark.parametrize(
    "said, items, blocks",
    [
        ("<think>hm</think>", ["reasoning"], ["thinking"]),
        ("<think>hm", ["reasoning"], ["thinking"]),
        ("", ["message"], []),
        (CALL, ["function_call"], ["tool_use"]),
        ("a", ["message"], ["text"]),
        (f"a{CALL}b", ["message", "function_call", "message"], ["text", "tool_use", "text"]),
        (f"{CALL}{CALL}b", ["function_call"] * 2 + ["message"], ["tool_use"] * 2 + ["text"]),
    ],
)
def test_an_answer_has_no_more_than_was_said(serve, run, caller, claude, said, items, blocks):
    """In one piece and in a stream, as the servers of whom these forms are."""

    async def main():
        async with serve(spell(caller, said), used=caller) as api, client(api) as c, claude(api) as a:
            api.backend.max_model_len = 4000
            ask = {"model": "tiny", "input": "hi", "tools": [TOOL]}
            assert [item.type for item in (await c.responses.create(**ask)).output] == items
            async with c.responses.stream(**ask) as stream:
                assert [item.type for item in (await stream.get_final_response()).output] == items
            ask = {"model": "tiny", "max_tokens": 300, "tools": [THEIR_TOOL], "messages": HELLO}
            assert [block.type for block in (await a.messages.create(**ask)).content] == blocks
            async with a.messages.stream(**ask) as stream:
                assert [block.type for block in (await stream.get_final_message()).content] == blocks

    run(main())


@pytest.mark.parametrize(
    "said, statuses",
    [
        ("<think>hm", {"reasoning": "incomplete"}),
        ("<think>hm</think>a", {"reasoning": "completed", "message": "incomplete"}),
        (CALL, {"function_call": "completed"}),
        (f"{CALL}b", {"function_call": "completed", "message": "incomplete"}),
    ],
)
def test_what_was_cut_off_is_told_as_incomplete(serve, run, caller, said, statuses):
    """In one piece and in a stream: the item that the limit of tokens has ended, and no call, which is whole."""

    async def main():
        async with serve(spell(caller, said), used=caller) as api, client(api) as c:
            api.backend.max_model_len = 4000
            ask = {"model": "tiny", "input": "hi", "tools": [TOOL], "max_output_tokens": len(caller.encode(said))}
            whole = await c.responses.create(**ask)
            done = {}
            async with c.responses.stream(**ask) as stream:
                async for event in stream:
                    if event.type == "response.output_item.done":
                        done[event.item.type] = event.item.status
                streamed = event.response
            assert whole.status == streamed.status == "incomplete"
            for answer in (whole, streamed):
                assert {item.type: item.status for item in answer.output} == statuses
            assert done == statuses

    run(main())


def test_what_was_said_after_a_call_goes_in_beside_it(serve, run, caller):
    """Templates want the results right after the message that has the calls."""

    async def main():
        async with serve(spell(caller, f"a{CALL}b"), used=caller) as api, client(api) as c:
            api.backend.max_model_len = 4000
            got = await c.responses.create(model="tiny", input="hi", tools=[TOOL])
            said = [item.model_dump(exclude_none=True) for item in got.output]
            result = {"type": "function_call_output", "call_id": got.output[1].call_id, "output": "seen"}
            ask = [{"role": "user", "content": "hi"}, *said, result]
            await c.responses.create(model="tiny", input=ask)
            prompt = shown(caller, api)
            assert prompt.count("<|im_start|>assistant\n") == 2 and "assistant\na\nb{" in prompt
            assert prompt.index('"look"') < prompt.index("<|im_start|>tool\nseen")
            bad = {"role": "assistant", "content": [{"type": "output_text", "text": 5}]}
            with pytest.raises(openai.BadRequestError) as e:
                await c.responses.create(model="tiny", input=[*ask[:3], bad, result])
            assert e.value.param == "input[3].content[0]"

    run(main())


def test_errors_in_their_form(serve, run, tokenizer, claude, anthropic):
    async def main():
        first = tokenizer.encode("a")[0]
        async with serve(lambda _: [first, EngineFailed("decode died", attempt="a1")]) as api, claude(api) as c:
            ask = {"model": "tiny", "max_tokens": 5, "messages": HELLO}
            with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
                await c.messages.create(**{**ask, "model": "gone"})
            with pytest.raises(anthropic.APIStatusError, match="decode died"):
                async with c.messages.stream(**ask) as stream:
                    async for _ in stream:
                        pass
            for more, message in (
                ({"messages": []}, "messages: "),
                ({"messages": [{"role": "system", "content": "x"}]}, "messages.0..role"),
                ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content.0..type"),
                ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0..type"),
                ({"thinking": {"type": "much"}}, "thinking.type"),
            ):
                with pytest.raises(anthropic.BadRequestError, match=message):
                    await c.messages.create(**{**ask, **more})
            async with client(api) as o:
                with pytest.raises(openai.APIError, match="decode died"):
                    async for _ in await o.responses.create(model="tiny", input="hi", stream=True):
                        pass

    run(main())


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat/completions", {"messages": LONG}, "prompt is too long: "),
        ("responses", {"input": LONG}, "prompt is too long: "),
        ("messages", {"messages": LONG, "max_tokens": 5}, "prompt is too long: "),
        ("completions", {"prompt": "x " * 400}, "prompt is too long: "),
        ("completions", {"prompt": [5] * 400}, "prompt is too long: "),
        ("chat/completions", {"messages": HELLO, "max_tokens": 250}, ""),
    ],
)
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_know(serve, run, tokenizer, path, body, words):
    """LiteLLM falls back to another model by either, langchain-anthropic knows only the latter."""

    async def main():
        async with serve(spell(tokenizer, "a")) as api:
            status, answer = await events(api, f"/v1/{path}", body)
            assert status == 400
            told = answer["error"]["message"]
            assert "this model's maximum context length is 256 tokens" in told and words in told

    run(main())


def test_tokenize_and_detokenize(serve, run, tokenizer):
    async def main():
        async with serve(spell(tokenizer, "a")) as api, aiohttp.ClientSession() as session:

            async def call(path, **body):
                async with session.post(api.url + path, json=body) as answer:
                    return answer.status, await answer.json()

            ids = tokenizer.encode("größer 🙂")
            status, found = await call("/tokenize", model="tiny", prompt="größer 🙂", return_token_strs=True)
            assert status == 200 and (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 256)
            assert len(found["token_strs"]) == len(ids)
            chat = tokenizer.chat(Conversation(messages=HELLO))
            assert (await call("/tokenize", messages=HELLO))[1]["tokens"] == chat.ids
            assert (await call("/detokenize", tokens=chat.ids))[1] == {"prompt": chat.text}
            for path, body, param in (
                ("/tokenize", {"prompt": [1]}, "prompt"),
                ("/tokenize", {"prompt": "x", "add_special_tokens": "y"}, "add_special_tokens"),
                ("/tokenize", {"model": "gone", "prompt": "x"}, "model"),
                ("/detokenize", {"tokens": [10**6]}, "tokens"),
                ("/detokenize", {"tokens": [1], "x": 1}, "x"),
            ):
                status, answer = await call(path, **body)
                assert (status in (400, 404), answer["error"]["param"]) == (True, param)
            assert len(api.in_flight) == 0

    run(main())


def test_lists_of_millions_are_written_in_parts():
    for count in (0, 1, 1 << 14, (1 << 14) + 1, 100_000):
        made = Tokenized(count=count, max_model_len=None, tokens=list(range(count)), token_strs=['é"\n'] * count)
        assert Tokenized.model_validate_json(written(made)) == made


async def until(condition):
    """The test's own deadline bounds this."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


def test_texts_that_are_slow_to_tokenise_keep_nobody_else_waiting(serve, run, tokenizer, monkeypatch):
    """They had all threads, and went on after their clients had left: no prompt above 20 KB was planned."""
    encode, slow, begun = tokenizer.encode_alone, threading.Event(), threading.Event()

    def encoded(text):
        if text == "slow":
            begun.set()
            assert slow.wait(30)
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode_alone", encoded)
    asked = {"prompt": "slow", "add_special_tokens": False}

    async def main():
        async with serve(spell(tokenizer, "a")) as api, aiohttp.ClientSession() as session:
            try:
                leaving = [asyncio.create_task(session.post(api.url + "/tokenize", json=asked)) for _ in range(40)]
                assert await asyncio.to_thread(begun.wait, 30)
                await until(lambda: len(api.in_flight) == len(leaving))
                for one in leaving:
                    one.cancel()
                await asyncio.wait(leaving)
                await until(lambda: not len(api.in_flight))
                failures = 'isthmus_request_failures_total{code="cancelled",model_name="tiny",status="499"'
                assert api.metric(failures) == len(leaving)
                body = {"prompt": [1], "max_tokens": 1, "user": "u" * 20_000}
                async with session.post(api.url + "/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
            finally:
                slow.set()

    run(main())


def test_long_prompts_of_a_client_that_left_keep_no_other_client_waiting(serve, run, tokenizer, monkeypatch):
    encode, slow, begun = tokenizer.encode, threading.Event(), threading.Event()

    def encoded(text, *args, **more):
        if text.startswith("slow"):
            begun.set()
            assert slow.wait(30)
        return encode(text, *args, **more)

    monkeypatch.setattr(tokenizer, "encode", encoded)
    long = {"max_tokens": 1, "user": "u" * 20_000}

    async def main():
        async with (
            serve(spell(tokenizer, "a")) as api,
            aiohttp.ClientSession() as session,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))) as other,
        ):
            url = api.url + "/v1/completions"
            try:
                leaving = [asyncio.create_task(session.post(url, json={"prompt": "slow", **long})) for _ in range(40)]
                assert await asyncio.to_thread(begun.wait, 30)
                await until(lambda: len(api.in_flight) == len(leaving))
                for one in leaving:
                    one.cancel()
                await asyncio.wait(leaving)
                await until(lambda: not len(api.in_flight))
                async with other.post(url, json={"prompt": [1], **long}) as answer:
                    assert answer.status == 200, await answer.text()
            finally:
                slow.set()

    run(main())


@pytest.mark.slow
def test_what_was_refused_leaves_no_body_behind(serve, run, tokenizer):
    """Nor a cycle with it, for the collector, which comes by seldom in a router."""
    bodies = [
        ("/v1/completions", {"prompt": "a b " * 250_000, "max_tokens": 1}, 400),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(60_000)}}, 400),
        ("/tokenize", {"prompt": 5, "x": "a" * 900_000}, 400),
    ]

    async def main():
        async with serve(spell(tokenizer, "a")) as api, aiohttp.ClientSession() as session:

            async def ask(times):
                for path, body, status in bodies * times:
                    async with session.post(api.url + path, data=io.BytesIO(json.dumps(body).encode())) as answer:
                        assert answer.status == status, await answer.text()

            await ask(1)  # what is made once
            gc.collect()
            gc.disable()
            tracemalloc.start()
            try:
                await ask(3)
                await until(lambda: not len(api.in_flight))
                # Of each kind alone more than 5 MB would be left; the client keeps some of its own.
                assert tracemalloc.get_traced_memory()[0] < 4_000_000
            finally:
                tracemalloc.stop()
                gc.enable()

    run(main())


def test_of_which_no_generation_is_asked_has_a_bound(serve, run, tokenizer):
    async def main():
        async with serve(spell(tokenizer, "a"), max_body_bytes=1 << 22) as api, aiohttp.ClientSession() as session:
            for path, body in (
                ("/tokenize", {"prompt": "a" * (1 << 20)}),
                ("/detokenize", {"tokens": [1] * (1 << 19)}),
                ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a" * (1 << 20)}]}),
            ):
                async with session.post(api.url + path, data=io.BytesIO(json.dumps(body).encode())) as answer:
                    assert answer.status == 413, path

    run(main())


def test_the_text_of_ids_has_a_bound(tokenizer, monkeypatch):
    class AnyModel:
        def check_model(self, name):
            pass

    ids = tokenizer.encode("größer")
    body = json.dumps({"tokens": ids * 100}).encode()
    assert detokenized(body, AnyModel(), tokenizer).prompt.startswith("größergrößer")
    monkeypatch.setattr(tokens, "MAX_TEXT", 500)
    with pytest.raises(InvalidRequest, match="their text has more than 500 bytes"):
        detokenized(body, AnyModel(), tokenizer)


class PanicException(BaseException):
    """As a library written in Rust raises it."""


@pytest.mark.parametrize("size", [10, 40_000])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_library_that_panics_ends_its_request_with_an_answer(serve, run, tokenizer, monkeypatch, path, size):
    def panic(*_, **__):
        raise PanicException("no such piece")

    async def main():
        async with serve(spell(tokenizer, "a")) as api:
            api.backend.max_model_len = 10**6
            monkeypatch.setattr(type(tokenizer), "_encoded", panic)
            body = {"model": "tiny"} | (
                {"messages": [{"role": "user", "content": "x " * size}]} if "chat" in path else {"prompt": "x " * size}
            )
            status, answer = await events(api, path, body)
            assert status == 500 and "a library of this process has failed: no such piece" in str(answer)
            monkeypatch.undo()
            status, _ = await events(api, "/v1/completions", {"model": "tiny", "prompt": "x"})
            assert status == 200

    run(main())
