"""Tools, reasoning and the options of chats, over HTTP with the official client."""

from __future__ import annotations

import json
import shutil

import aiohttp
import openai
import pytest
from api_calls import HELLO, client, events, spell

from isthmus_runtime.config import ChatConfig
from isthmus_runtime.openai import tokenizer as tokenizer_module
from isthmus_runtime.openai import untold
from isthmus_runtime.openai.chat import Conversation
from isthmus_runtime.openai.tokenizer import Tokenizer
from isthmus_runtime.openai.tool_grammar import after_thought, calls_grammar
from isthmus_runtime.openai.tool_prompt import in_plain_text
from isthmus_runtime.request import FinishReason, Structure, TokenChunk
from isthmus_runtime.structured.checker import Checker

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "größer"}}\n</tool_call>'
TOOLS_TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n</think>{% endif %}"
)


@pytest.fixture
def caller(model_dir, tmp_path) -> Tokenizer:
    """A tokenizer whose template shows tools as Hermes and Qwen do."""
    root = tmp_path / "copy"
    shutil.copytree(model_dir, root)
    (root / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    return Tokenizer.load(root)


def test_calls_of_tools(serve, run, caller):
    async def main():
        async with serve(spell(caller, f"I look.\n{CALL}\n{CALL}"), used=caller) as api, client(api) as c:
            ask = {"model": "tiny", "messages": HELLO, "tools": [LOOK], "max_tokens": 200}
            api.backend.max_model_len = 2000
            got = (await c.chat.completions.create(**ask)).choices[0]
            assert (got.finish_reason, got.message.content) == ("tool_calls", "I look.")
            assert [json.loads(t.function.arguments) for t in got.message.tool_calls] == [{"at": "größer"}] * 2
            assert len({t.id for t in got.message.tool_calls}) == 2
            assert '"look"' in caller.decode(api.backend.requests[0].prompt_token_ids)
            one = (await c.chat.completions.create(**ask, parallel_tool_calls=False)).choices[0]
            assert len(one.message.tool_calls) == 1 and one.finish_reason == "tool_calls"
            text, calls, reason = "", {}, None
            async for chunk in await c.chat.completions.create(**ask, stream=True):
                choice = chunk.choices[0]
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    calls[call.index] = (call.id, call.type, call.function.name, call.function.arguments)
                reason = choice.finish_reason or reason
            assert (text, reason, sorted(calls)) == ("I look.", "tool_calls", [0, 1])
            assert calls[1][1:] == ("function", "look", '{"at": "größer"}')
            # The answer goes back with the results.
            history = [*HELLO, got.message.model_dump(exclude_none=True)]
            results = [{"role": "tool", "tool_call_id": t.id, "content": "seen"} for t in got.message.tool_calls]
            await c.chat.completions.create(**{**ask, "messages": history + results})
            assert "seen" in caller.decode(api.backend.requests[-1].prompt_token_ids)
            none = (await c.chat.completions.create(**ask, tool_choice="none")).choices[0]
            assert CALL in none.message.content and none.message.tool_calls is None
            assert '"look"' not in caller.decode(api.backend.requests[-1].prompt_token_ids)

    run(main())


@pytest.mark.parametrize("together", [1, 3, 200])
def test_nothing_after_the_one_call_is_told_or_counted(serve, run, caller, together):
    """However many tokens come at a time."""
    ids = caller.encode(f"I look.\n{CALL} and more\n{CALL} and more")
    until = next(n for n in range(len(ids)) if "</tool_call>" in caller.decode(ids[:n]))

    def script(_):
        for begin in range(0, len(ids), together):
            last = begin + together >= len(ids)
            yield TokenChunk(tuple(ids[begin : begin + together]), finish_reason=FinishReason.STOP if last else None)

    async def main():
        async with serve(script, used=caller) as api, client(api) as c:
            api.backend.max_model_len = 2000
            got = await c.chat.completions.create(
                model="tiny", messages=HELLO, tools=[LOOK], max_tokens=400, parallel_tool_calls=False
            )
            assert got.choices[0].message.content == "I look." and len(got.choices[0].message.tool_calls) == 1
            assert got.usage.completion_tokens == until

    run(main())


def test_a_call_that_is_cut_off_is_text(serve, run, caller):
    async def main():
        async with serve(spell(caller, CALL[:40], eos=False), used=caller) as api:
            n = len(caller.encode(CALL[:40]))
            body = {"messages": HELLO, "tools": [LOOK], "max_tokens": n}
            _, answer = await events(api, "/v1/chat/completions", body)
            assert answer["choices"][0]["message"]["content"] == CALL[:40]
            assert answer["choices"][0]["finish_reason"] == "length"

    run(main())


def test_models_whose_template_knows_no_tools_are_told_in_words(serve, run, tokenizer):
    async def main():
        call = '{"name": "look", "arguments": {}}'
        async with serve(spell(tokenizer, call)) as api, client(api) as c:
            api.backend.max_model_len = 4000
            got = await c.chat.completions.create(model="tiny", messages=HELLO, tools=[LOOK])
            assert got.choices[0].message.tool_calls[0].function.name == "look"
            history = [
                *HELLO,
                got.choices[0].message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": "x", "content": "seen"},
            ]
            await c.chat.completions.create(model="tiny", messages=history, tools=[LOOK])
            prompt = tokenizer.pieces_with(None).join(api.backend.requests[-1].prompt_token_ids)
            assert prompt.startswith("<|im_start|>system\nYou can call tools.")
            assert f"assistant\n{call}<|im_end|>\n<|im_start|>user\nResult: seen" in prompt

    run(main())


def test_reasoning(serve, run, caller):
    async def main():
        async with serve(spell(caller, "<think>\nhm\n</think>\n\nYes."), used=caller) as api, client(api) as c:
            got = (await c.chat.completions.create(model="tiny", messages=HELLO)).choices[0].message
            assert (got.reasoning_content, got.content) == ("hm", "Yes.")
            reasoning, text = "", ""
            async for chunk in await c.chat.completions.create(model="tiny", messages=HELLO, stream=True):
                reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
                text += chunk.choices[0].delta.content or ""
            assert (reasoning, text) == ("hm", "Yes.")
            await c.chat.completions.create(model="tiny", messages=HELLO, reasoning_effort="high")
            assert "<think>" in caller.decode(api.backend.requests[-1].prompt_token_ids)
            await c.chat.completions.create(model="tiny", messages=HELLO, reasoning_effort="none")
            assert "<think>" not in caller.decode(api.backend.requests[-1].prompt_token_ids)
        async with serve(spell(caller, "<think>a</think>b"), used=caller, chat=ChatConfig(reasoning="none")) as api:
            _, answer = await events(api, "/v1/chat/completions", {"messages": HELLO})
            assert answer["choices"][0]["message"]["content"] == "<think>a</think>b"

    run(main())


@pytest.mark.parametrize("text", ['<tool_call>\n{"name": "look", "arguments": {"at": "%s', "<think>a%s"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_held_back_of_an_answer_is_bounded(serve, run, caller, monkeypatch, text, stream):
    """A call that never ends, and white space after which more may come."""
    monkeypatch.setattr(untold, "MAX_OF_AN_ANSWER", 16)

    async def main():
        for size, fits in ((50, True), (400, False)):
            script = spell(caller, text % (" " * size))
            async with serve(script, used=caller) as api, aiohttp.ClientSession() as http:
                api.backend.max_model_len = 2000
                body = {"model": "tiny", "messages": HELLO, "tools": [LOOK], "max_tokens": 900, "stream": stream}
                async with http.post(f"{api.url}/v1/chat/completions", json=body) as answer:
                    told = await answer.text()
                assert ("characters of text for each" in told) is not fits, told

    run(main())


def test_tools_are_bounded_before_a_template_writes_them(serve, run, caller, tokenizer, monkeypatch):
    monkeypatch.setattr("isthmus_runtime.openai.conversations.MAX_TOOLS", 1000)

    async def main():
        for used in (caller, tokenizer):
            async with serve(spell(used, "a"), used=used) as api, client(api) as c:
                tool = {"type": "function", "function": {"name": "look", "description": "x" * 1000}}
                for choice in ("auto", "required"):
                    with pytest.raises(openai.BadRequestError, match="characters or more, at most 1000 are"):
                        ask = {"model": "tiny", "messages": HELLO, "tools": [tool], "tool_choice": choice}
                        await c.chat.completions.create(**ask)

    run(main())


THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}{# </think> #}"
)


def test_an_answer_that_is_held_to_something_is_so_after_the_reasoning_that_its_prompt_begins(
    serve, run, model_dir, tmp_path
):
    """DeepSeek-R1's template opens it, and so do those of QwQ and Qwen3-Thinking."""
    root = tmp_path / "copy"
    shutil.copytree(model_dir, root)
    (root / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    thinker = Tokenizer.load(root)

    async def main():
        checker = Checker(root)
        try:
            script = spell(thinker, 'hm\n</think>\n\n{"a": 1}')
            async with serve(script, used=thinker, grammars=checker) as api, client(api) as c:
                for form in ({"type": "json_object"}, {"type": "text"}):
                    ask = {"model": "tiny", "messages": HELLO, "response_format": form}
                    got = (await c.chat.completions.create(**ask)).choices[0].message
                    assert (got.reasoning_content, got.content) == ("hm", '{"a": 1}')
                held, free = (request.structure for request in api.backend.requests)
                assert free is None and held == after_thought(Structure("json_object"), thinker.control_id, "</think>")
                for wrong in ({"json": "[1"}, {"regex": "("}, {"grammar": "start: x"}):
                    with pytest.raises(openai.BadRequestError, match="structured_outputs"):
                        more = {"structured_outputs": wrong}
                        await c.chat.completions.create(model="tiny", messages=HELLO, extra_body=more)
        finally:
            await checker.close()

    run(main())


def test_effort_that_would_have_none_is_refused(serve, run, tokenizer):
    async def main():
        async with serve(spell(tokenizer, "a")) as api, client(api) as c:
            await c.chat.completions.create(model="tiny", messages=HELLO, reasoning_effort="none")
            with pytest.raises(openai.BadRequestError, match="reasoning_effort: 'high' would have no effect"):
                await c.chat.completions.create(model="tiny", messages=HELLO, reasoning_effort="high")

    run(main())


def test_template_variables_and_continued_messages(serve, run, caller):
    async def main():
        async with serve(spell(caller, "a"), used=caller) as api:
            path = "/v1/chat/completions"
            show = lambda: caller.pieces_with(None).join(api.backend.requests[-1].prompt_token_ids)  # noqa: E731
            await events(api, path, {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True}})
            assert show().endswith("<think>\n</think>")
            await events(api, path, {"messages": HELLO, "add_generation_prompt": False})
            assert show() == "<|im_start|>user\nhi<|im_end|>\n"
            started = [*HELLO, {"role": "assistant", "content": "Well, "}]
            await events(api, path, {"messages": started, "continue_final_message": True})
            assert show().endswith("<|im_start|>assistant\nWell, ")
            for more, param in (
                ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
                ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
            ):
                status, answer = await events(api, path, {"messages": started, **more})
                assert (status, answer["error"]["param"]) == (400, param)

    run(main())


def test_what_ends_the_text_and_special_tokens_may_be_shown(serve, run, tokenizer):
    async def main():
        async with serve(spell(tokenizer, "The fox STOP")) as api:
            body = {"prompt": "x", "max_tokens": 50}
            _, answer = await events(
                api, "/v1/completions", {**body, "stop": "STOP", "include_stop_str_in_output": True}
            )
            assert answer["choices"][0]["text"] == "The fox STOP"
            _, answer = await events(
                api, "/v1/completions", {**body, "skip_special_tokens": False, "include_stop_str_in_output": True}
            )
            assert answer["choices"][0]["text"] == "The fox STOP<|im_end|>"

    run(main())


def test_token_ids(serve, run, tokenizer):
    async def main():
        ids = [*tokenizer.encode("The fox"), 2]
        async with serve(spell(tokenizer, "The fox")) as api:
            prompt = tokenizer.chat(Conversation(messages=HELLO)).ids
            body = {"messages": HELLO, "return_token_ids": True}
            _, answer = await events(api, "/v1/chat/completions", body)
            assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (prompt, ids)
            _, data = await events(api, "/v1/chat/completions", {**body, "stream": True})
            chunks = [json.loads(d) for d in data[:-1]]
            assert chunks[0]["prompt_token_ids"] == prompt
            assert [i for c in chunks for i in c["choices"][0].get("token_ids", ())] == ids
            body = {"prompt": [5, 6], "return_token_ids": True}
            _, answer = await events(api, "/v1/completions", body)
            assert (answer["choices"][0]["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([5, 6], ids)
            _, data = await events(api, "/v1/completions", {**body, "stream": True})
            chunks = [json.loads(d) for d in data[:-1]]
            assert chunks[0]["choices"][0]["prompt_token_ids"] == [5, 6]
            assert [i for c in chunks for i in c["choices"][0].get("token_ids", ())] == ids

    run(main())


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/responses", {"input": HELLO}, "response.incomplete"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 4}, "message_delta"),
    ],
)
def test_token_ids_and_truncation_of_other_endpoints(serve, run, tokenizer, path, body, last):
    async def main():
        prompt = tokenizer.chat(Conversation(messages=HELLO)).ids
        limit = {"max_output_tokens": 4} if path == "/v1/responses" else {}
        for keep in (None, 3):
            async with serve(lambda request: [10, 11, 12, 13]) as api:
                asked = {**body, **limit, "return_token_ids": True, "truncate_prompt_tokens": keep}
                expected = (prompt if keep is None else prompt[-keep:], [10, 11, 12, 13])
                _, answer = await events(api, path, asked)
                assert (answer["prompt_token_ids"], answer["token_ids"]) == expected
                _, data = await events(api, path, {**asked, "stream": True})
                told = [json.loads(d.partition("data: ")[2]) for d in data]
                (end,) = [event.get("response", event) for event in told if event["type"] == last]
                assert (end["prompt_token_ids"], end["token_ids"]) == expected
                assert all("token_ids" not in json.dumps(event) for event in told if event["type"] != last)
                _, answer = await events(api, path, {**body, **limit})
                assert "token_ids" not in answer

    run(main())


def test_prompts_may_be_truncated(serve, run, tokenizer):
    async def main():
        async with serve(spell(tokenizer, "a")) as api:
            path = "/v1/completions"
            await events(api, path, {"prompt": [*range(3, 203)] * 2, "truncate_prompt_tokens": 4})
            assert api.backend.requests[-1].prompt_token_ids == (199, 200, 201, 202)
            await events(api, path, {"prompt": "x " * 400, "truncate_prompt_tokens": -1, "max_tokens": 1})
            assert api.backend.requests[-1].prompt_token_ids == tuple(tokenizer.encode("x " * 400)[-255:])
            body = {"messages": HELLO, "truncate_prompt_tokens": 2, "max_tokens": 1}
            await events(api, "/v1/chat/completions", body)
            assert api.backend.requests[-1].prompt_token_ids == tuple(
                tokenizer.chat(Conversation(messages=HELLO)).ids[-2:]
            )

    run(main())


def test_usage_of_each_chunk(serve, run, tokenizer):
    async def main():
        async with serve(spell(tokenizer, "The fox")) as api:
            options = {"include_usage": True, "continuous_usage_stats": True}
            for path, body in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "x"})):
                _, data = await events(api, "/v1/" + path, {**body, "stream": True, "stream_options": options})
                told = [json.loads(d)["usage"] for d in data[:-1]]
                counts = [u["completion_tokens"] for u in told if u]
                assert counts == sorted(counts) and counts[-1] == len(tokenizer.encode("The fox")) + 1
                assert len(counts) >= len(told) - 1

    run(main())


def test_long_conversations_are_rendered_in_a_thread(serve, run, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "SOME_STEPS", 1000)

    async def main():
        async with serve(spell(tokenizer, "a")) as api:
            api.backend.max_model_len = 10**6
            many = [{"role": "user", "content": "x"}] * 100
            body = json.dumps({"messages": many})
            assert len(body) < 4096
            status, _ = await events(api, "/v1/chat/completions", json.loads(body))
            assert status == 200
            assert list(api.backend.requests[-1].prompt_token_ids) == tokenizer.chat(Conversation(messages=many)).ids

    run(main())


def deep_call(levels):
    function = {"name": "look", "arguments": '{"a":' * levels + "1" + "}" * levels}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def test_grammars_are_checked_in_turns_of_addresses_where_there_are_no_tenants(serve, run, caller):
    """A dozen costly ones of one client kept everybody's waiting for two minutes."""

    class Asked:
        def __init__(self):
            self.by = []

        async def check(self, structure, param, who):
            self.by.append(who)

    async def main():
        asked = Asked()
        async with serve(spell(caller, "a"), used=caller, grammars=asked) as api:
            for host in ("127.0.0.1", "127.0.0.2"):
                connector = aiohttp.TCPConnector(local_addr=(host, 0))
                body = {"model": "tiny", "messages": HELLO, "response_format": {"type": "json_object"}}
                async with aiohttp.ClientSession(connector=connector) as http:
                    for salt in ("a", "b"):
                        asks = http.post(f"{api.url}/v1/chat/completions", json={**body, "cache_salt": salt})
                        async with asks as answer:
                            assert answer.status == 200
            # Engines tell clients apart as well: not by a salt, of which each may have many.
            one, again, other, last = (request.client for request in api.backend.requests)
            assert one == again != other == last and "127" not in one
        assert asked.by == ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2"]

    run(main())


def test_an_answer_that_has_to_be_a_call_is_held_to_it(serve, run, caller, model_dir):
    async def main():
        checker = Checker(model_dir)
        try:
            async with serve(spell(caller, CALL), used=caller, grammars=checker) as api, client(api) as c:
                ask = {"model": "tiny", "messages": HELLO, "tools": [LOOK]}
                named = {"type": "function", "function": {"name": "look"}}
                for choice, several in (("required", True), (named, False)):
                    got = await c.chat.completions.create(**ask, tool_choice=choice)
                    assert [t.function.name for t in got.choices[0].message.tool_calls] == ["look"]
                    held = api.backend.requests[-1].structure
                    assert held == calls_grammar("hermes", [LOOK["function"]], caller.control_id, several=several)
                    # Clients send a form for the text as well, of which there is none.
                    await c.chat.completions.create(**ask, tool_choice=choice, response_format={"type": "json_object"})
                    assert api.backend.requests[-1].structure == held
                wrong = (
                    ({"tool_choice": "required", "tools": []}, "tool_choice: required, but no tools"),
                    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "no function 'x'"),
                    ({"tool_choice": "sometimes"}, "tool_choice: must be none, auto, required"),
                    ({"tool_choice": "required", "structured_outputs": {"json": {}}}, "another structure"),
                    ({"structured_outputs": {"regex": "a"}}, "regex is not supported together with tools"),
                    ({"structured_outputs": {"json": "{"}}, "structured_outputs: json is no JSON"),
                    ({"structured_outputs": {"json": "[]"}}, "a JSON schema is an object"),
                    ({"messages": [*HELLO, deep_call(400)]}, "arguments: must be a JSON object"),
                    ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos: an answer that must be a call"),
                    ({"tool_choice": "required", "min_tokens": 2}, "min_tokens: not with"),
                    ({"tool_choice": named, "allowed_token_ids": [1]}, "allowed_token_ids: not with"),
                    ({"tool_choice": "required", "bad_words": ["look"]}, "bad_words: not with"),
                )
                made = len(api.backend.requests)
                for body, words in wrong:
                    status, answer = await events(api, "/v1/chat/completions", {**ask, **body})
                    assert status == 400 and words in answer["error"]["message"], answer
                bad = {"type": "function", "function": {"name": "b", "parameters": {"not": {}}}}
                status, answer = await events(
                    api, "/v1/chat/completions", {**ask, "tools": [bad], "tool_choice": "required"}
                )
                assert status == 400 and answer["error"]["param"] == "tools"
                assert len(api.backend.requests) == made
        finally:
            await checker.close()

    run(main())


def test_results_in_a_row_are_one_message_of_the_user():
    """However many there are: each was added to a copy of all before it, 60,000 took a minute of a processor."""
    result, named = {"role": "tool", "content": "seen"}, {"role": "tool", "content": "too", "name": "look"}
    asked = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    many = [result] * 60_000
    told = in_plain_text([*HELLO, asked, result, named, asked, *many], [])
    call = {"role": "assistant", "content": '{"name": "look", "arguments": {}}'}
    assert told[:4] == [*HELLO, call, {"role": "user", "content": "Result: seen\nResult of look: too"}, call]
    assert told[4:] == [{"role": "user", "content": "\n".join(["Result: seen"] * len(many))}]
    assert in_plain_text([result, *HELLO], []) == [{"role": "user", "content": "Result: seen"}, *HELLO]
