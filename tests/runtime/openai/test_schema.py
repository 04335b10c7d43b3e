"""Bodies: each parameter is honoured or refused by its name."""

from __future__ import annotations

import json
import re
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.errors import InvalidRequest
from isthmus_runtime.openai import bodies, structured
from isthmus_runtime.openai.bodies import json_object, parsed
from isthmus_runtime.openai.messages import conversation
from isthmus_runtime.openai.problems import MAX_PROBLEMS
from isthmus_runtime.openai.ranking import RerankRequest
from isthmus_runtime.openai.schema import parse_chat, parse_completion
from isthmus_runtime.request import Structure

LEAST = {"model": "m", "prompt": "p"}, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def completion(**fields):
    return parse_completion(json.dumps({**LEAST[0], **fields}).encode())


def chat(**fields):
    return parse_chat(json.dumps({**LEAST[1], **fields}).encode())


NEUTRAL_BOTH = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "seed": None,
    "stop": None,
    "n": None,
    "user": "u",
    "stream_options": None,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "service_tier": "flex",
    "safety_identifier": "s",
    "store": False,
    "use_beam_search": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "length_penalty": 1.0,
    "temperature": 2.5,
    "model": None,
}
REFUSED_BOTH = {
    "frequency_penalty": 2.5,
    "presence_penalty": "much",
    "repetition_penalty": 0,
    "logit_bias": {"5": 101},
    "min_tokens": -1,
    "allowed_token_ids": [],
    "bad_words": [""],
    "metadata": "a",
    "store": True,
    "use_beam_search": True,
    "truncate_prompt_tokens": 0,
    "no_such_thing": 1,
    "temperature": -1,
    "top_p": 0,
    "top_k": -2,
    "min_p": 1.5,
    "n": 0,
    "seed": 1.5,
    "stop": [""],
    "stop_token_ids": ["a"],
    "stream": "yes",
    "stream_options": {"include_usage": True},
    "prompt_logprobs": -1,
    "priority": 0.5,
}
REFUSED_CHAT = {
    "reasoning_effort": 5,
    "continue_final_message": "yes",
    "chat_template_kwargs": [],
    "functions": [{}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "top_logprobs": 3,
    "logprobs": 3,
    "max_completion_tokens": -1,
    "max_tokens": 0,
    "echo": True,
}
BAD_TOOLS = {
    "tools[0].type": [{"type": "code"}],
    "tools[0].function.name": [{"type": "function", "function": {}}],
    "tools[0].function.parameters": [{"type": "function", "function": {"name": "f", "parameters": "x"}}],
    "tools[0].x": [{"type": "function", "function": {"name": "f"}, "x": 1}],
    "tools": {"a": 1},
}
REFUSED_COMPLETION = {"echo": 1, "suffix": "x", "best_of": 129, "logprobs": 21, "tools": [], "max_tokens": -1}


@pytest.mark.parametrize(("name", "value"), NEUTRAL_BOTH.items())
def test_neutral_values_pass(name, value):
    completion(**{name: value})
    chat(**{name: value})


def test_neutral_values_of_each_endpoint_pass():
    completion(best_of=1, echo=False, suffix="")
    chat(tools=[], tool_choice="none", response_format={"type": "text"}, modalities=["text"], parallel_tool_calls=True)


@pytest.mark.parametrize(
    ("parse", "name", "value"),
    [
        *((completion, *item) for item in [*REFUSED_BOTH.items(), *REFUSED_COMPLETION.items()]),
        *((chat, *item) for item in [*REFUSED_BOTH.items(), *REFUSED_CHAT.items()]),
    ],
)
def test_refused_by_name(parse, name, value):
    with pytest.raises(InvalidRequest) as caught:
        parse(**{name: value})
    assert caught.value.status == 400
    assert caught.value.param is not None and caught.value.param.split(".")[0] == name
    assert name in caught.value.message


def test_all_problems_at_once():
    with pytest.raises(InvalidRequest) as caught:
        completion(frequency_penalty=3, temperature=-9, wrong=1, n=0)
    for name in ("frequency_penalty", "temperature", "wrong", "n"):
        assert f"{name}: " in caught.value.message
    assert caught.value.param == "wrong"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"model": "m",\n "prompt" "p"}', "line 2, column 11"),
        (b"[]", "JSON list, expected an object"),
        (b'{"model": "\xff"}', "0xff at offset 11"),
        (b'{"model": "m", "prompt": "p", "temperature": NaN}', "NaN, which is not JSON"),
        (b'{"model": "m", "prompt": "\\ud83d"}', "half of a surrogate pair"),
        (b"[" * 60_000, "nested too deeply"),
        (b'{"a":' * 400 + b"1" + b"}" * 400, "nested too deeply"),
        (b'{"model": "m", "prompt": "p", "max_tokens": ' + b"9" * 5000 + b"}", "number of several thousand digits"),
        (b'{"model": "m"}', "prompt: required"),
    ],
)
def test_broken_bodies(body, message):
    with pytest.raises(InvalidRequest, match=message):
        parse_completion(body)


def test_whole_surrogate_pair_is_a_character():
    assert parse_completion(b'{"model": "m", "prompt": "\\ud83d\\ude42"}').prompts() == ["🙂"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [(1, 2)]), ([[1], [2, 3]], [(1,), (2, 3)])],
)
def test_prompt_forms(prompt, expected):
    assert completion(prompt=prompt).prompts() == expected


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], ["a", 1], [1.0], [True], 5, {"a": 1}, [[1], []], ["a"] * 129])
def test_bad_prompts(prompt):
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt).prompts()
    assert caught.value.param == "prompt"


def test_messages():
    conversation = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "x", "refusal": None, "tool_calls": [], "name": "n"},
        ]
    ).conversation()
    assert conversation == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": "x", "name": "n"},
    ]


def test_tool_messages():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    found = chat(
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "content": [{"type": "text", "text": "5"}], "tool_call_id": "c1"},
        ]
    ).conversation()
    assert found == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(("param", "tools"), BAD_TOOLS.items())
def test_bad_tools(param, tools):
    with pytest.raises(InvalidRequest) as caught:
        chat(tools=tools).offered_tools()
    assert caught.value.param == param


def test_offered_tools():
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": {}, "strict": True}}
    clean = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert chat(tools=[tool]).offered_tools() == [clean]
    assert chat(tools=[tool], tool_choice="none").offered_tools() == []


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "function", "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "tool", "content": None}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "user", "content": "x", "weight": 1}], "messages[0].weight"),
    ],
)
def test_bad_messages(messages, param):
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=messages).conversation()
    assert caught.value.param == param


def test_a_byte_order_mark_is_read_over() -> None:
    body = b'{"model": "m", "prompt": "a"}'
    assert parse_completion(b"\xef\xbb\xbf" + body) == parse_completion(body)
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_completion(b"\xef\xbb\xbf" * 2 + body)


@pytest.mark.slow
def test_an_answer_lists_few_of_many_problems_and_repeats_little_of_what_was_sent():
    many = {f"unknown_{number}": 1 for number in range(100_000)}
    long = "x" * 1_000_000
    message = {"role": "user", "content": "hi"}
    for parse in (
        lambda: completion(**many),
        lambda: chat(**many),
        lambda: completion(**{long: 1}),
        lambda: completion(stop=[1] * 100_000),
        lambda: completion(stop_token_ids=["a"] * 100_000),
        lambda: chat(messages=[{**message, **many}]).conversation(),
        lambda: chat(messages=[{**message, "role": long}]).conversation(),
        lambda: chat(messages=[{**message, "content": [{"type": long, "text": "hi"}]}]).conversation(),
    ):
        with pytest.raises(InvalidRequest) as error:
            parse()
        assert len(error.value.message) < 3000 and len(error.value.param) < 3000
        assert error.value.message.count("unknown parameter") <= MAX_PROBLEMS
    with pytest.raises(InvalidRequest, match="and 99992 more problems"):
        completion(**many)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structure("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            Structure("json_schema", '{"type": "null"}'),
        ),
        ({"structured_outputs": {"json": {"type": "null"}}}, Structure("json_schema", '{"type": "null"}')),
        ({"structured_outputs": {"json": "{}"}}, Structure("json_schema", "{}")),
        ({"structured_outputs": {"json_object": True}}, Structure("json_object")),
        ({"structured_outputs": {"regex": "a+"}}, Structure("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Structure("choice", '["a", "b"]')),
        ({"structured_outputs": {"grammar": "start: X"}}, Structure("grammar", "start: X")),
    ],
)
def test_structures(given, want):
    assert completion(**given).structure == want
    assert chat(**given).structure == want


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}}, "whitespace_pattern"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "without response_format"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_wrong_structures_are_named(given, words):
    for parse in (completion, chat):
        with pytest.raises(InvalidRequest, match=words):
            parse(**given)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, {}),
        ({"logit_bias": {"5": 1, "3": -100}}, {"logit_bias": ((3, -100.0), (5, 1.0))}),
        ({"min_tokens": 4}, {"min_tokens": 4}),
        ({"allowed_token_ids": [7, 2, 7]}, {"allowed_token_ids": (2, 7)}),
        ({"bad_words": ["ab", " c"]}, {"bad_words": ((32, 97, 98), (32, 99), (97, 98), (99,))}),
        # After each of the two one is left.
        (
            {"bad_words": ["ab", "ba"], "allowed_token_ids": [97, 98]},
            {"bad_words": ((32, 97, 98), (32, 98, 97), (97, 98), (98, 97)), "allowed_token_ids": (97, 98)},
        ),
        # A tokenizer may know ids that the model does not have, and so never draws.
        ({"bad_words": ["zz", "a"]}, {"bad_words": ((32, 97), (97,))}),
    ],
)
def test_logit_options(given, want):
    nothing = {"min_tokens": 0, "logit_bias": (), "allowed_token_ids": (), "bad_words": ()}
    for parse in (completion, chat):
        found = parse(**given).logit_params(lambda t: [ord(c) for c in t], 100, max_tokens=4, structured=False)
        assert nothing | found == nothing | want


@pytest.mark.parametrize(
    ("given", "structured", "words"),
    [
        ({"logit_bias": {"100": 1}}, False, "logit_bias: 100 is not in the vocabulary"),
        ({"allowed_token_ids": [-1]}, False, "allowed_token_ids: -1 is not in the vocabulary"),
        ({"min_tokens": 5}, False, "min_tokens: 5 is more than the 4"),
        ({"min_tokens": 1}, True, "min_tokens: not with structured output"),
        ({"allowed_token_ids": [1]}, True, "allowed_token_ids: not with structured output"),
        ({"bad_words": ["a"]}, True, "bad_words: not with structured output"),
        ({"bad_words": ["a"], "allowed_token_ids": [97]}, False, "bad_words: where one of them has begun"),
        ({"bad_words": ["ab", "aa"], "allowed_token_ids": [97, 98]}, False, "bad_words: where one of them has begun"),
        ({"bad_words": ["cab", "b", "aba"], "allowed_token_ids": [97, 98]}, False, "bad_words: where one of them has"),
        ({"bad_words": ["b"], "min_tokens": 1, "allowed_token_ids": [7, 98]}, False, "bad_words: where one of them"),
        ({"bad_words": ["a" * 40]}, False, "has 41 tokens, at most 32"),
        ({"min_tokens": 2, "allowed_token_ids": [7]}, False, "min_tokens: every token of allowed_token_ids ends"),
    ],
)
def test_logit_options_that_cannot_be(given, structured, words):
    with pytest.raises(InvalidRequest, match=words):
        completion(**given).logit_params(
            lambda t: [ord(c) for c in t], 100, max_tokens=4, structured=structured, stops=(7, 8)
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        # Work and memory for each choice, on the event loop.
        ({"stop": "a" * 4097, "n": 128}, "stop: string should have at most 4096 characters"),
        ({"stop": ["a" * 2400, "b" * 2400]}, "stop: 4800 characters, at most 4096 are allowed in all strings together"),
        # A megabyte of mistakes is not to become a gigabyte of what is wrong with each.
        ({"structured_outputs": {"choice": [1] * 200_000}}, "at most 4096 items"),
        ({"structured_outputs": {f"u{i}": 1 for i in range(100_000)}}, "more than 1024 fields"),
        *(
            pytest.param(given, words, marks=pytest.mark.slow)
            for given, words in (
                (
                    {"response_format": {"type": "text", **{f"u{i}": 1 for i in range(100_000)}}},
                    "more than 1024 fields",
                ),
                (
                    {"response_format": {"type": "json_schema", "json_schema": {f"u{i}": 1 for i in range(100_000)}}},
                    "more than 1024 fields",
                ),
                ({"logit_bias": {str(i): "a" for i in range(60_000)}}, "more than 1024 fields"),
                ({"stop": [{f"u{i}": 1 for i in range(100_000)}]}, "more than 4096 fields"),
            )
        ),
    ],
)
def test_what_is_large_and_wrong_is_refused_by_its_size(given, words):
    for parse, least in zip((parse_completion, parse_chat), LEAST, strict=True):
        body = json.dumps({**least, **given}).encode()
        tracemalloc.start()
        try:
            with pytest.raises(InvalidRequest, match=words):
                parse(body)
            assert tracemalloc.get_traced_memory()[1] < 30 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("documents", [1, 2000])
def test_documents_that_are_large_and_wrong_are_refused_by_their_size(documents):
    """One body stopped a router for seconds and took gigabytes."""
    fields = {f"u{i}": 1 for i in range(100_000 // documents)}
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="documents: has more than 4096 fields"):
            parsed(RerankRequest, {"query": "q", "documents": [{"text": "a", **fields}] * documents}, {})
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()
    whole = parsed(RerankRequest, {"query": "q", "documents": [{"text": "a"}] * 2048}, {})
    assert len(whole.texts) == 2048


@pytest.mark.parametrize("values", [b"[],", b'{"a":0},', b"0,", b'"",'])
def test_a_body_of_many_small_values_is_refused_unread(values):
    """No other thread ran for seconds while they were made."""
    body = b'{"prompt":"a","metadata":{"a":[' + values * (15_000_000 // len(values)) + b"0]}}"
    tracemalloc.start()
    try:
        with pytest.raises(
            InvalidRequest,
            match=r"the body has \d+ (brackets \[ and \{|commas) \(those inside of texts count\); at most",
        ):
            json_object(body)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ends", [b"", b"\\\\", b"\\\\" * 8], ids=["plain", "escaped", "escaped often"])
@pytest.mark.parametrize("value", [b'"%d%b":1,', b'"%d%b":"",'], ids=["keys", "keys and texts"])
def test_a_body_of_many_keys_is_refused_unread(ends, value):
    """Each took four times as long as a number, and no other thread ran meanwhile."""
    body = b'{"chat_template_kwargs":{' + b"".join(value % (i, ends) for i in range(280_000)) + b'"a":1}}'
    with pytest.raises(InvalidRequest, match=r"the body has (280|560)\d+ keys and texts; at most"):
        json_object(body)


@given(text=st.text('a"\\', max_size=60))
def test_quotation_marks_of_a_body(text):
    """Those that are not escaped, as a text before them is read; more where very many backslashes come before one."""
    plain = sum((len(run) - len(run.rstrip("\\"))) % 2 == 0 for run in text.split('"')[:-1])
    longest = max((len(run) for run in re.findall(r"\\+", text)), default=0)
    found = bodies._quotes(text.encode(), -1)
    assert found == plain or (longest > 8 and found >= plain)


def test_large_bodies_are_read_one_at_a_time(monkeypatch):
    reading, at_once = threading.Semaphore(1), []
    inner = bodies._json_object

    def noted(body):
        at_once.append(not reading.acquire(blocking=False))
        try:
            return inner(body)
        finally:
            if not at_once[-1]:
                reading.release()

    monkeypatch.setattr(bodies, "_json_object", noted)
    body = json.dumps({"prompt": list(range(200_000))}).encode()
    threads = [threading.Thread(target=json_object, args=(body,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert at_once == [False] * 6


def calls(*arguments):
    made = [{"type": "function", "function": {"name": "f", "arguments": text}} for text in arguments]
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": made}]


def test_texts_of_json_are_counted_together_before_they_are_read():
    """Within a text quotation marks are escaped, and no others of the body's: a million keys were made at once."""
    keys, where = json.dumps({f"{i:x}": 1 for i in range(80_000)}), "messages[1].tool_calls[1].function.arguments"
    assert len(conversation(calls(keys))[1]["tool_calls"][0]["function"]["arguments"]) == 80_000
    with pytest.raises(InvalidRequest, match=r"have 160000 keys and texts; at most 14\d{4} are allowed") as caught:
        conversation(calls(keys, keys))
    assert caught.value.param == where
    for text, words in ((f'{{"a":"{"a" * (1 << 20)}"}}', "at most 1048576 are"), ("[{}," * 140_000, "280001 brackets")):
        with pytest.raises(InvalidRequest, match=words) as caught:
            conversation(calls("{}", text))
        assert caught.value.param == where
    code = json.dumps({"code": 'a["b"], ' * 70_000})
    told = conversation(calls(code, ""))[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in told] == [json.loads(code), {}]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner),
)


@given(value=VALUES, most=st.integers(0, 60))
def test_a_value_is_no_shorter_than_its_least(value, most):
    written = len(json.dumps(value))
    assert bodies.least_written(value, 1 << 20) <= written
    assert (bodies.least_written(value, most) <= most) or written > most


def test_a_value_of_texts_is_as_long_as_its_least():
    value = [{"a": ["b", "c", "ddd"], "e": {}}, "f", []]
    assert bodies.least_written(value, 99) == len(json.dumps(value))
    assert bodies.least_written([10**4000], 9999) > 3000 and bodies.least_written([[1] * 60], 99) > 99


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1] * 200_000}}}},
        {"structured_outputs": {"json": {"enum": [1] * 200_000}}},
        {"structured_outputs": {"json": json.dumps({"enum": [1] * 200_000})}},
        {"structured_outputs": {"choice": ["a" * 200_000] * 2}},
        {"structured_outputs": {"regex": "a" * 300_000}},
    ],
)
def test_a_structure_is_bounded_before_it_is_written(given, monkeypatch):
    """It was written each time that anybody looked at it, by a call that let nothing else run."""
    both = (
        (parse_completion, json.dumps({"prompt": "p", **given}).encode()),
        (parse_chat, json.dumps({"messages": calls(), **given}).encode()),
    )
    written = []
    monkeypatch.setattr(structured.json, "dumps", written.append)
    for parse, body in both:
        with pytest.raises(InvalidRequest, match=r"\d+ characters or more, at most 262144 are allowed") as caught:
            parse(body)
        assert caught.value.param == next(iter(given))
    assert not written


def test_a_structure_is_written_once():
    for parse in (completion, chat):
        request = parse(
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}
        )
        assert request.structure is request.structure
    longest = "a" * (1 << 18)
    assert completion(structured_outputs={"regex": longest}).structure.text == longest


def test_what_clients_send_has_few_values_for_its_length():
    code = {"content": 'if (a[i] == {"b": [1, 2]}) { c(d[0], e); }\n' * 5000}
    quoted = {"content": json.dumps({"content": json.dumps({f"k{i}": str(i) for i in range(50_000)})})}
    tools = [{"function": {"parameters": {"properties": {f"p{i}": {"type": ["a"]} for i in range(40)}}}}] * 512
    ids = {"prompt": list(range(1_000_000))}
    for data in (ids, {"messages": [code] * 4}, {"tools": tools}, {"messages": [quoted] * 3}):
        assert json_object(json.dumps(data).encode()) == data


def test_no_more_unknown_fields_of_a_message_are_kept_than_are_told():
    message = {"role": "user", "content": "x", **{f"u{i}": 1 for i in range(100_000)}}
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="u0: unknown parameter"):
            conversation([message])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("key", ["x", "-1", "1.5", "", "12345678901"])
def test_logit_bias_takes_token_ids(key):
    with pytest.raises(InvalidRequest, match=r"logit_bias.*is not a token id"):
        completion(logit_bias={key: 1})


@pytest.mark.parametrize("numbers", [[0.5] * 350_000, list(range(200_000))], ids=["floats", "ids"])
def test_arguments_as_an_object_are_bounded_as_their_text_is(numbers):
    """A template writes them at once, and nothing else runs meanwhile: 0.4 s for a million."""
    for arguments, fits in ({"a": numbers}, False), ({"a": numbers[:1000]}, True):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        if fits:
            assert conversation(asked)
            continue
        with pytest.raises(InvalidRequest, match=r"arguments: more than 1048576 characters as JSON"):
            conversation(asked)
