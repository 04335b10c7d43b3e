"""An answer that has to call a tool: whatever is drawn is what the format's parser reads as calls of offered tools."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tokenizers import Tokenizer as HfTokenizer

from isthmus_runtime.openai.output import Reader, Thinking
from isthmus_runtime.openai.tool_formats import FORMATS
from isthmus_runtime.openai.tool_grammar import MAX_CALLS, after_thought, calls_grammar
from isthmus_runtime.request import Structure
from isthmus_runtime.structured.grammars import Grammars

EOS = (2, 0)
DAYS = {"type": "integer", "maximum": 9, "minimum": 1}
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "$defs": {"place": {"enum": ["Rome", "Oslo"]}, "more": {"$ref": "#/properties/city"}},
            "properties": {
                "city": {"$ref": "#/$defs/place"},
                "via": {"$ref": "#/$defs/more"},
                "days": {"type": "integer", "maximum": 9, "minimum": 1},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    {"name": "stop.now"},
]
ANSWER = {"type": "object", "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["sum"]}
ANSWER["additionalProperties"] = False


@pytest.fixture(scope="module")
def drawn(model_dir: Path):
    """`drawn(structure, seed)`: a random text that the grammar allows."""
    tokenizer = HfTokenizer.from_file(str(model_dir / "tokenizer.json"))
    grammars = Grammars.load(model_dir, eos_token_ids=EOS, vocab_size=tokenizer.get_vocab_size())

    def draw(structure, seed: int) -> str:
        rng, guide, ids = random.Random(seed), grammars.guide(structure), []
        while len(ids) < 600:
            mask = guide.allowed(ids)
            choices = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
            ends = set(choices) & set(EOS)
            if ends and (len(ids) > 60 or len(ends) == len(choices) or rng.random() < 0.3):
                return tokenizer.decode(ids, skip_special_tokens=False)
            left = [i for i in choices if i not in ends]
            # White space is always allowed: without help most of a random text would be that.
            solid = [i for i in left if tokenizer.decode([i]).strip()]
            ids.append(rng.choice(solid or left))
        raise AssertionError(f"seed {seed}: no end")

    return draw


def read(form: str, text: str, *, thinking: Thinking | None = None):
    reader = Reader(FORMATS[form].parser([f["name"] for f in FUNCTIONS]), thinking)
    deltas = [reader.feed(text), reader.finish()]
    return (
        "".join(d.reasoning for d in deltas),
        "".join(d.content for d in deltas),
        [call for d in deltas for call in d.calls],
    )


def check(calls) -> None:
    schemas = {f["name"]: f.get("parameters", {"type": "object", "maxProperties": 0}) for f in FUNCTIONS}
    for call in calls:
        assert jsonschema_rs.is_valid(schemas[call.name], json.loads(call.arguments)), call


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_calls_of_offered_tools_and_nothing_else(drawn, form: str, several: bool) -> None:
    structure = calls_grammar(form, FUNCTIONS, lambda text: None, several=several)
    counts = set()
    for seed in range(25):
        text = drawn(structure, seed)
        _, content, calls = read(form, text)
        assert not content.strip(), (text, content)
        check(calls)
        counts.add(len(calls))
    assert counts == {1} if not several else counts <= set(range(1, MAX_CALLS + 1)) and len(counts) > 1


def test_arguments_have_no_properties_that_their_schema_does_not_name(drawn) -> None:
    """A property may have the name of a keyword."""
    inner = {"type": "object", "properties": {"type": {"const": 1}}, "required": ["type"]}
    closed = {"type": "object", "properties": {"a": {"anyOf": [inner]}, "properties": {"const": 3}}, "required": ["a"]}
    found = set()
    for seed in range(40):
        text = drawn(calls_grammar("json", [{"name": "f", "parameters": closed}], lambda _: None, several=False), seed)
        arguments = json.loads(text)["arguments"]
        assert arguments["a"] == {"type": 1}
        found |= arguments.keys()
    assert found == {"a", "properties"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {}, "additionalProperties": {"const": 2}},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^b": {}}},
        {"allOf": [{"type": "object", "properties": {name: {"const": 1}}, "required": [name]} for name in "ab"]},
        {"type": "object"},
    ],
)
def test_objects_that_are_meant_to_be_open_stay_so(schema) -> None:
    told = calls_grammar("json", [{"name": "f", "parameters": schema}], lambda _: None, several=False).text
    assert json.dumps(schema) in told


def test_markers_that_are_tokens_are_drawn_as_tokens(model_dir: Path, drawn) -> None:
    """`<|im_start|>` plays the marker: a text of its letters would be another thing."""
    structure = calls_grammar("hermes", FUNCTIONS, {"<tool_call>": 1}.get, several=False)
    assert drawn(structure, 3).startswith("<|im_start|>\n{")
    named = calls_grammar("mistral", FUNCTIONS, {"[ARGS]": 1}.get, several=False)
    found = {drawn(named, seed).partition("<|im_start|>")[0] for seed in range(12)}
    assert found == {"[TOOL_CALLS]weather", "[TOOL_CALLS]stop.now"}


def test_an_answer_with_a_structure_may_be_a_call_instead(drawn) -> None:
    structure = calls_grammar("json", FUNCTIONS, lambda text: None, several=True, answer=ANSWER)
    kinds = set()
    for seed in range(30):
        _, content, calls = read("json", drawn(structure, seed))
        check(calls)
        if not calls:
            assert jsonschema_rs.is_valid(ANSWER, json.loads(content)), content
        kinds.add(bool(calls))
    assert kinds == {True, False}


@pytest.mark.parametrize("ends", [{}, {"</think>": 1}])
def test_a_reasoning_that_the_prompt_has_begun_comes_first(model_dir: Path, ends: dict[str, int]) -> None:
    tokenizer = HfTokenizer.from_file(str(model_dir / "tokenizer.json"))
    grammars = Grammars.load(model_dir, eos_token_ids=EOS, vocab_size=tokenizer.get_vocab_size())
    structure = calls_grammar("hermes", FUNCTIONS, ends.get, several=False, thinking="</think>")
    call = '<tool_call>\n{"name": "stop.now", "arguments": {}}\n</tool_call>'
    for reasoning in ("", "hm\n, <so>", "{}"):
        for space in ("", "\n\n"):
            ids = tokenizer.encode(reasoning).ids
            ids += list(ends.values()) or tokenizer.encode("</think>").ids
            ids += tokenizer.encode(space + call).ids
            guide = grammars.guide(structure)
            for taken in range(len(ids)):
                mask = guide.allowed(ids[:taken])
                assert mask[ids[taken] // 8] >> ids[taken] % 8 & 1, tokenizer.decode(ids[:taken])
            assert guide.allowed(ids)[EOS[0] // 8] >> EOS[0] % 8 & 1
            text = f"{reasoning}</think>{space}{call}"
            found, content, calls = read("hermes", text, thinking=Thinking(opened=True))
            assert (found, content, len(calls)) == (reasoning.strip(), "", 1)


@pytest.mark.parametrize("ends", [{}, {"</think>": 1}])
@pytest.mark.parametrize(
    ("structure", "answer", "wrong"),
    [
        (Structure("json_object"), '{"a": 1}', "1"),
        (Structure("json_schema", json.dumps(ANSWER)), '{"sum": 3}', '{"a": 1}'),
        (Structure("json_schema", "true"), "[1]", "a"),
        (Structure("regex", "a/b|start+\\\\n"), "starttt\\n", "stop"),
        (Structure("choice", '["start", "the end"]'), "the end", "a"),
        (
            Structure("grammar", 'start: "start" first | /start|x\\/y/ // start\nfirst: "1"\nrestart: start'),
            "start1",
            "restart",
        ),
        (Structure("grammar", json.dumps({"grammars": [{"json_schema": {"type": "integer"}}]})), "17", "a"),
        (Structure("grammar", 'TEXT: "a"\nthought: TEXT\nSPACE: "b"\nanswer: thought SPACE\nstart: answer'), "ab", "b"),
    ],
    ids=lambda value: value.kind if isinstance(value, Structure) else "",
)
def test_what_an_answer_must_be_holds_after_a_reasoning_that_the_prompt_has_begun(
    model_dir: Path, structure: Structure, answer: str, wrong: str, ends: dict[str, int]
) -> None:
    tokenizer = HfTokenizer.from_file(str(model_dir / "tokenizer.json"))
    grammars = Grammars.load(model_dir, eos_token_ids=EOS, vocab_size=tokenizer.get_vocab_size())

    def allowed(ids: list[int]) -> bool:
        guide = grammars.guide(after_thought(structure, ends.get, "</think>"))
        masks = ((guide.allowed(ids[:taken]), one) for taken, one in enumerate([*ids, EOS[0]]))
        return all(mask[one // 8] >> one % 8 & 1 for mask, one in masks)

    closing = list(ends.values()) or tokenizer.encode("</think>").ids
    for reasoning in ("", "hm\n, <so>", answer):
        for space in ("", "\n\n"):
            begin = tokenizer.encode(reasoning).ids + closing
            assert allowed(begin + tokenizer.encode(space + answer).ids)
        assert not allowed(begin + tokenizer.encode(wrong).ids)
    assert not allowed(tokenizer.encode(answer).ids), "nothing has ended the reasoning"


@pytest.mark.parametrize("text", ['{"a": 1}', '{"grammars": []}', '{"grammars": ["x"]}', '{"grammars": {"a": 1}}', "{"])
def test_a_grammar_that_is_other_json_is_none_after_a_reasoning_either(text: str) -> None:
    with pytest.raises(ValueError):
        after_thought(Structure("grammar", text), lambda _: None, "</think>")


@pytest.mark.parametrize("name", ["value", "default", "const", "enum", "examples", "properties"])
@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_a_parameter_may_be_named_as_a_keyword_of_schemas(drawn, name: str, form: str) -> None:
    place = {"$ref": "#/$defs/place"}
    schema = {"type": "object", "properties": {name: place}, "required": [name], "$defs": {"place": {"const": 7}}}
    function = {"name": "stop.now", "parameters": schema}
    text = drawn(calls_grammar(form, [function], lambda _: None, several=False), 1)
    (call,) = read(form, text)[2]
    assert json.loads(call.arguments) == {name: 7}
