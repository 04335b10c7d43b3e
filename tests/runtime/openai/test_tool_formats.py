"""Tool calls and reasoning in text: found however it is cut, and nothing lost."""

from __future__ import annotations

import json
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.openai.output import Reader, Thinking
from isthmus_runtime.openai.tool_formats import FORMATS, base, format_of, json_end
from isthmus_runtime.openai.tool_formats.base import ToolCall
from isthmus_runtime.openai.tool_formats.json_end import NEVER, JsonEnd

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


def value_at(text, at):
    """The JSON value at a place, and where it ends; None: there is none."""

    def never(name):
        raise ValueError(name)

    try:
        return json.JSONDecoder(strict=False, parse_constant=never).raw_decode(text, at)
    except ValueError:
        return None


def call_of(value):
    """The call that a value of the interpreter's JSON is; None: it is none."""
    value = (
        value.get("function", value)
        if isinstance(value, dict) and isinstance(value.get("function", {}), dict)
        else value
    )
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in NAMES:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        found = value_at(arguments.strip(" \t\r\n"), 0)
        arguments = found[0] if found is not None and found[1] == len(arguments.strip(" \t\r\n")) else None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def called_at(name, text, at):
    """The calls that follow an opening, and where they end; None: there are none. By the interpreter's JSON."""
    begin, function = at + len(text[at : at + 256]) - len(text[at : at + 256].lstrip()), None
    first = text[begin : begin + 1]
    if name == "mistral" and first not in ("[", "{"):
        begin = text.find("{", at, at + 512)
        head = text[at:begin] if begin >= 0 else ""
        found = re.fullmatch(r"\s*([^\s\[\]{}\"]{1,256})\s*(\[CALL_ID\][^\s\[\]{}\"]{1,64}\s*)?(\[ARGS\]\s*)?", head)
        if found is None:
            return None
        function, first = found[1], "{"
    if first not in ({"json": ("{", "["), "mistral": ("{", "[")}.get(name, ("{",))):
        return None
    found = value_at(text, begin)
    if found is None:
        return None
    value, end = found
    if function is not None:
        values = [{"name": function, "arguments": value}]
    else:
        values = value if isinstance(value, list) else [value]
    calls = [call_of(v) for v in values]
    if not calls or None in calls:
        return None
    after = end + len(text[end : end + 256]) - len(text[end : end + 256].lstrip())
    for close in {"hermes": ["</tool_call>"], "json": ["```"]}.get(name, []):
        end = after + len(close) if text.startswith(close, after) else end
    return calls, end


def reference(name, text):
    """What a parser must make of a text, slowly: each opening looks at all that follows."""
    form = FORMATS[name].parser
    content, calls, said, at, first = "", [], "", 0, True
    while True:
        opening = place = None
        if first:
            place = at + len(text[at:]) - len(text[at:].lstrip())
            if calls and form.separator and text.startswith(form.separator, place):
                place += 1
                place += len(text[place:]) - len(text[place:].lstrip())
            begins = [m for m in form.first_markers if text.startswith(m, place)]
            opening = begins[0] if begins else "" if text[place : place + 1] and text[place] in form.bare else None
        if opening is None:
            first = False
            found = [(text.find(m, at), m) for m in form.markers if m in text[at:]]
            if not found:
                break
            place, opening = min(found)
        found = called_at(name, text, place + len(opening))
        if found is None:
            said += text[at:place] + opening
            at, first = place + len(opening), False
            continue
        said += text[at:place]
        said = said.lstrip() if calls else said
        content += "" if said.strip() == (form.separator if calls else "") else said.rstrip()
        calls, at, said, first = calls + found[0], found[1], "", True
    said += text[at:]
    return "", content + (said.lstrip() if calls else said), calls


SHARDS = [
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        '"',
        "\\",
        ":",
        ",",
        ";",
        " ",
        "\n",
        " " * 300,
        "a" * 300,
        "5",
        "e",
        "é",
        "NaN",
        "1e999",
    ),
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "```json",
        "```\n",
        "```",
    ),
    *(
        '{"name": "look"',
        '{"name":"add-2","arguments":{',
        '"arguments"',
        "look",
        "{}",
        '{"a":"',
        '\\"',
        "}}",
        "<tool",
        "[TOOL",
    ),
]


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_whatever_a_model_writes_is_read_as_the_slow_way_reads_it(name, data):
    """Whole, by characters and in pieces, of texts that hold what opens and ends calls and strings."""
    parser = FORMATS[name].parser
    cases = [text for text, *_ in CASES[name]]
    marker = next(iter((*parser.markers, *parser.first_markers)))
    shard = st.sampled_from(SHARDS) | st.sampled_from([marker, marker + "{", marker + '{"a":"', *cases])
    text = "".join(data.draw(st.lists(shard, max_size=24)))
    expected = reference(name, text)
    assert read(Reader(parser(NAMES), None), [text]) == expected
    assert read(Reader(parser(NAMES), None), list(text)) == expected
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert read(Reader(parser(NAMES), None), pieces(text, cuts)) == expected


HALVES = [
    "{",
    '{"a": "',
    '{"a": ",": "',
    '[{"a": ',
    '{"a":[[[',
    " {",
    ' look{"',
    "look[ARGS]{",
    '{"\\',
    '"}{',
    '{"a":"\\"',
]


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_character_is_gone_over_more_than_four_times(name, data):
    """Twice as ends are looked for, and as often as what has one is read: however many openings there are, and however
    they are within each other."""
    ends = []

    class Noted(JsonEnd):
        def __init__(self):
            super().__init__()
            ends.append(self)

    parser = FORMATS[name].parser(NAMES)
    marker = next(iter((*parser.markers, *parser.first_markers)))
    shard = st.sampled_from([marker + half for half in HALVES]) | st.sampled_from(SHARDS)
    text = "".join(data.draw(st.lists(shard, max_size=12))) * data.draw(st.integers(1, 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "JsonEnd", Noted)
        parser = FORMATS[name].parser(NAMES)
        for part in pieces(text, data.draw(st.lists(st.integers(0, len(text)), max_size=6))):
            parser.feed(part)
        parser.finish()
    assert sum(end.looked for end in ends) <= 4 * len(text), len(text)


def steps(work):
    """Lines that the parsers execute."""
    count = 0

    def count_line(frame, event, _):
        nonlocal count
        count += event == "line"
        return count_line

    def enter(frame, event, _):
        return (
            count_line if "tool_formats" in frame.f_code.co_filename or "output" in frame.f_code.co_filename else None
        )

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("half", [*HALVES, " ", "look ", '{"name": "look"}', "{}"])
def test_twice_the_text_is_twice_the_work(name, half):
    parser = FORMATS[name].parser
    marker = next(iter((*parser.markers, *parser.first_markers)))

    def work(count):
        text = (marker + half) * count
        return lambda: read(Reader(parser(NAMES), None), pieces(text, range(0, len(text), 50)))

    once, twice = steps(work(50)), steps(work(100))
    assert twice <= 2.2 * once + 100, (once, twice)


def test_a_marker_ends_a_value_that_it_is_not_a_text_of():
    """By which no more than two values are under way at a time."""
    for form in FORMATS.values():
        for marker in form.parser.markers:
            assert JsonEnd().find("[" + marker, 0) == NEVER and not set(marker) & set('"\\')


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "json"])
def test_what_is_held_back_for_a_call_is_bounded(name, monkeypatch):
    monkeypatch.setattr(json_end, "MAX_SIZE", 100)
    parser = FORMATS[name].parser
    marker = next(iter(parser.markers), "")
    for size in (60, 100, 101, 140):
        call = '{"name": "look", "arguments": {"a": ""}}'
        call = call.replace('""', f'"{"x" * (size - len(call))}"')
        text = marker + call
        for parts in ([text], list(text), pieces(text, [70, 100 + len(marker)])):
            _, content, calls = read(Reader(parser(NAMES), None), parts)
            assert (len(calls), content) == ((1, "") if size <= 100 else (0, text)), size
    reader = Reader(parser(NAMES), None)
    text = marker + '{"a": "' + "x" * 200
    assert "".join(reader.feed(char).content for char in text) == text, "it is told as soon as it can be none"


@pytest.mark.parametrize("levels", [json_end.MAX_DEPTH, json_end.MAX_DEPTH + 1, 5000])
def test_calls_are_as_deep_as_a_request_may_tell_of(levels):
    """Deeper ones took the interpreter's stack."""
    arguments = '{"a":' * (levels - 1) + "1" + "}" * (levels - 1)
    for text in (
        f'{{"name": "look", "arguments": {arguments}}}',
        f'{{"name": "look", "arguments": {json.dumps(arguments)}}}',
    ):
        _, content, calls = read(Reader(FORMATS["json"].parser(NAMES), None), [text])
        deep = levels > json_end.MAX_DEPTH + (arguments not in text)
        assert (content, len(calls)) == ((text, 0) if deep else ("", 1))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "[NaN]", r'"\ud83d"', r'{"\udc00": 1}'])
def test_arguments_are_json(value):
    for arguments in (f'{{"x": {value}}}', json.dumps(f'{{"x": {value}}}')):
        text = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
        assert read(Reader(FORMATS["hermes"].parser(NAMES), None), [text]) == ("", text, [])


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", " ", "\n", "a", "<", "</thi"]), max_size=20).map("".join),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_reasoning_is_the_same_however_it_is_cut(text, data):
    for opened in (False, True):
        whole = read(Reader(None, Thinking(opened=opened)), [text])
        cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
        assert read(Reader(None, Thinking(opened=opened)), pieces(text, cuts)) == whole
        assert read(Reader(None, Thinking(opened=opened)), list(text)) == whole
