"""Tool calls and reasoning in text: found however it is cut, and nothing lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.openai.output import Reader, Thinking
from isthmus_runtime.openai.tool_formats import FORMATS, base, format_of
from isthmus_runtime.openai.tool_formats.base import ToolCall

NAMES = ("look", "add-2")
A = '{"name": "look", "arguments": {"at": "} \\" ] </tool_call> ü"}}'
B = '{"name": "add-2", "arguments": {"x": [1, {"y": 2}]}}'
CALL_A = ToolCall("look", '{"at": "} \\" ] </tool_call> ü"}')
CALL_B = ToolCall("add-2", '{"x": [1, {"y": 2}]}')
P = '{"name": "add-2", "parameters": {"x": [1, {"y": 2}]}}'
STRANGER = '{"name": "rm", "arguments": {}}'
CASES = {
    "hermes": [
        (f"<tool_call>\n{A}\n</tool_call>", "", [CALL_A]),
        (f"I look. \n<tool_call>{A}</tool_call>\n<tool_call>\n{B}\n</tool_call> \n", "I look.", [CALL_A, CALL_B]),
        (f"<tool_call>{B}", "", [CALL_B]),
        (f"<tool_call>{B}</tool_call>\n\nDone. ", "Done. ", [CALL_B]),
        (f"<tool_call>{STRANGER}</tool_call>", f"<tool_call>{STRANGER}</tool_call>", []),
        ('<tool_call>{"name": "look"', '<tool_call>{"name": "look"', []),
        ("<tool_call>{name: look}</tool_call>", "<tool_call>{name: look}</tool_call>", []),
        ('<tool_call>{"name": "look", "arguments": 5}</tool_call>',) * 2 + ([],),
        (f"<tool_call> no, <tool_call>{B}</tool_call>", "<tool_call> no,", [CALL_B]),
        (f'<tool_call>{{"name": "add-2", "arguments": {json.dumps(CALL_B.arguments)}}}</tool_call>', "", [CALL_B]),
        ("a < b  <tool", "a < b  <tool", []),
        (" \n text \n ", " \n text \n ", []),
        (A, A, []),
    ],
    "llama3": [
        (P, "", [CALL_B]),
        (f"<|python_tag|>{P}; {P}", "", [CALL_B, CALL_B]),
        (f" {P}\n", "", [CALL_B]),
        (STRANGER, STRANGER, []),
        ('{"a": 1} is an object', '{"a": 1} is an object', []),
        (f"See {P}", f"See {P}", []),
        (f"I look: <|python_tag|>{P}", "I look:", [CALL_B]),
        (P[:-1], P[:-1], []),
        ("plain; text", "plain; text", []),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{A}, {B}]", "", [CALL_A, CALL_B]),
        (f"Well. [TOOL_CALLS][{B}]", "Well.", [CALL_B]),
        (f"[TOOL_CALLS]add-2[ARGS]{CALL_B.arguments}", "", [CALL_B]),
        (
            f"[TOOL_CALLS]add-2{CALL_B.arguments}[TOOL_CALLS]look[CALL_ID]x1[ARGS]{{}}",
            "",
            [CALL_B, ToolCall("look", "{}")],
        ),
        (f"[TOOL_CALLS] [{A}, {STRANGER}]", f"[TOOL_CALLS] [{A}, {STRANGER}]", []),
        ("[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
        ("[TOOL", "[TOOL", []),
    ],
    "json": [
        (A, "", [CALL_A]),
        (f"[{A}, {B}]", "", [CALL_A, CALL_B]),
        (f"```json\n{A}\n```\n", "", [CALL_A]),
        (f"{A}\n{B}", "", [CALL_A, CALL_B]),
        (STRANGER, STRANGER, []),
        ("```json\n{}\n```", "```json\n{}\n```", []),
        ("``` python", "``` python", []),
        (f"no {A}", f"no {A}", []),
        ("[1]", "[1]", []),
        ("[]", "[]", []),
    ],
}
FLAT = [(name, *case) for name, cases in CASES.items() for case in cases]


def pieces(text, cuts):
    places = sorted({min(c, len(text)) for c in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def read(reader, parts):
    deltas = [*map(reader.feed, parts), reader.finish()]
    calls = [c for d in deltas for c in d.calls]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


@pytest.mark.parametrize(("name", "text", "content", "calls"), FLAT)
def test_cases_whole_and_by_characters(name, text, content, calls):
    for parts in ([text], list(text)):
        assert read(Reader(FORMATS[name].parser(NAMES), None), parts) == ("", content, calls)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_cuts_make_no_difference_and_no_text_is_lost(data):
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    cases = [text for text, *_ in CASES[name]]
    markers = ["<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "```json", ";", "{", "}", "[", " ", "\n", "text"]
    text = "".join(data.draw(st.lists(st.sampled_from([*cases, *markers]), max_size=6)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    parser = FORMATS[name].parser
    whole = read(Reader(parser(NAMES), None), [text])
    assert read(Reader(parser(NAMES), None), pieces(text, cuts)) == whole
    for call in whole[2]:
        assert call.name in NAMES and isinstance(json.loads(call.arguments), dict)
    if not whole[2]:
        assert whole[1] == text


THINKING = [
    ("<think>\nhm\n</think>\n\nYes.", False, ("hm", "Yes.")),
    ("hm\n</think>Yes. ", True, ("hm", "Yes. ")),
    (" Yes. <think>no</think>", False, ("", " Yes. <think>no</think>")),
    ("<think>never ends </thi", False, ("never ends </thi", "")),
    ("<thi", False, ("", "<thi")),
    ("<think></think>", False, ("", "")),
]


@pytest.mark.parametrize(("text", "opened", "expected"), THINKING)
def test_reasoning_is_split_off(text, opened, expected):
    for parts in ([text], list(text)):
        assert read(Reader(None, Thinking(opened=opened)), parts) == (*expected, [])


def test_reasoning_comes_before_calls():
    text = f"<think>I look: <tool_call>{B}</tool_call></think>\n<tool_call>{A}</tool_call>"
    found = read(Reader(FORMATS["hermes"].parser(NAMES), Thinking(opened=False)), list(text))
    assert found == (f"I look: <tool_call>{B}</tool_call>", "", [CALL_A])


def test_the_template_tells_the_format():
    assert format_of("x <tool_call> y").name == "hermes"
    assert format_of("[TOOL_CALLS]").name == "mistral"
    assert format_of('<|start_header_id|> {"name": , "parameters": }').name == "llama3"
    assert format_of("{{ messages }}").name == "json"


def test_white_space_in_half_a_call_is_shared_out_in_one_way() -> None:
    """2,000 spaces took 51 s, and twice as many eight times as long."""
    text = '[TOOL_CALLS][{"x": "[TOOL_CALLS]a' + " " * 400 + "b{"
    reader = FORMATS["mistral"].parser(NAMES)
    assert "".join(map(str, [*reader.feed(text), *reader.finish()])) == text
    reader = FORMATS["mistral"].parser(NAMES)
    reader.feed('[TOOL_CALLS][{"x": "[TOOL_CALLS]a' + " " * 100_000 + "b{")  # it would take years
    reader.finish()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("half", ["{", '{"a": "', '[{"a": ', '{"name": "look", "arguments": {"x": "\\'])
@pytest.mark.parametrize("end", ["", '"}}' * 9])
def test_what_half_calls_within_half_calls_cost_is_bounded(name, half, end, monkeypatch) -> None:
    """Each opening had all that follows looked at, a character at a time: 3,000 of them took 6 s."""
    looked = 0
    scan_end, calls_in = base._Scan.end, base.ToolParser.calls_in

    def scanned(scan, text, start):
        nonlocal looked
        before = max(scan.at, start)
        found = scan_end(scan, text, start)
        looked += scan.at - before
        return found

    def parsed(parser, source):
        nonlocal looked
        looked += len(source)
        return calls_in(parser, source)

    monkeypatch.setattr(base._Scan, "end", scanned)
    monkeypatch.setattr(base.ToolParser, "calls_in", parsed)
    parser = FORMATS[name].parser(NAMES)
    marker = next(iter((*parser.markers, *parser.first_markers)))
    text = (marker + half) * 5_000 + end
    parts = []
    for at in range(0, len(text), 1_000):
        parts += parser.feed(text[at : at + 1_000])
    parts += parser.finish()
    assert "".join(part for part in parts if isinstance(part, str)) == text
    assert looked <= 8 * len(text) + 2 * base._MOST_WORK
