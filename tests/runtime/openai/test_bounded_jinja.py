"""Templates that never end or grow without end: stopped by counting, with a clear error."""

from __future__ import annotations

import json
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.errors import ConfigError, InvalidRequest
from isthmus_runtime.openai import paid_operations
from isthmus_runtime.openai.chat import ChatTemplate, Conversation

X = Conversation(messages=[{"role": "user", "content": "x"}])
BOMBS = {
    "range": "{% for i in range(10**9) %}a{% endfor %}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested lists": "{% set r = range(9999) | list %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "nested filters": "{% for i in range(9999) %}{{ range(9999) | select('eq', 1) | list }}{% endfor %}",
    "times": "{{ 'a' * 10**9 }}",
    "times, folded": "{% set a = 10**9 %}{{ ('a' * a) | length }}",
    "list times": "{{ ([1] * 10**9) | length }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "doubling": "{% set n = namespace(a='aaaa') %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(a='aaaa') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "doubling in a call": (
        "{% set n = namespace(a='aa') %}{% for i in range(99) %}{% set n.a = (n.a ~ n.a) | trim %}{% endfor %}"
    ),
    "doubling by set": (
        "{% set n = namespace(a='aa') %}{% for i in range(99) %}{% set b %}{{ n.a }}{{ n.a }}{% endset %}"
        "{% set n.a = b %}{% endfor %}"
    ),
    "doubling by a macro": (
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(a='aa') %}"
        "{% for i in range(99) %}{% set n.a = f(n.a) %}{% endfor %}"
    ),
    "replace": "{% set a = 'a' * 60000 %}{{ a | replace('a', a) }}",
    "replace method": "{% set a = 'a' * 60000 %}{{ a.replace('a', a) }}",
    "join": "{% set a = 'a' * 60000 %}{{ ([a] * 60000) | join(a) }}",
    "join method": "{% set a = 'a' * 60000 %}{{ a.join(a) }}",
    "nested list as text": (
        "{% set n = namespace(a=[1]) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}"
    ),
    "nested list as JSON": (
        "{% set n = namespace(a=[1]) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a | tojson }}"
    ),
    "comparing": ("{% set a = 'a' * 9999999 %}{% for i in range(99999) %}{% if 'b' in a %}x{% endif %}{% endfor %}"),
    "slices": "{% set a = 'a' * 999999 %}{% for i in range(99999) %}{% set b = a[1:] %}{% endfor %}",
    "width": "{{ '%999999999d' % 1 }}",
    "width argument": "{{ '%*d' % (999999999, 1) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "format method": "{{ '{:999999999}'.format(1) }}",
    "nested format": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "indent": "{{ 'a\nb' | indent(999999999) }}",
    "indented JSON": "{{ [1] | tojson(indent=999999999) }}",
    "padding": "{{ 'a'.ljust(999999999) }}",
    "centred": "{{ 'a' | center(999999999) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "lorem ipsum": "{{ lipsum(n=999999) }}",
    "text of marked-up text": "{{ ('a' | safe).ljust(999999999) | length }}",
    "bytes of a boolean": "{{ True.to_bytes(999999999, 'big') | length }}",
    "numbers": "{% for i in range(99999) %}{{ range(99999).count('a') }}{% endfor %}",
    "indent by text": "{% set a = 'a\n' * 60000 %}{{ a | indent('b' * 60000) | length }}",
    "JSON separated by text": "{% set a = [1] * 60000 %}{{ a | tojson(separators=('b' * 60000, ':')) | length }}",
    "one argument many times": "{% set a = 'a' * 999999 %}{{ ('%(a)s' * 9999) % {'a': a} }}",
    "one argument many times by format": "{% set a = 'a' * 999999 %}{{ ('{0}' * 9999).format(a) }}",
    "long texts in a list as text": "{% set a = ['a' * 1000000] * 1000 %}{{ a | upper | length }}",
    "searching from the end": "{% set a = 'a' * 1000000 %}{{ a.rfind('b' ~ 'a' * 400000) }}",
    "stripping by many": "{% set a = 'a' * 3000000 %}{{ a.strip('b' * 3000000 ~ 'a') | length }}",
    "trimming by many": "{% set a = 'a' * 3000000 %}{{ a | trim('b' * 3000000 ~ 'a') | length }}",
    "dividing large numbers": (
        "{% set a = ('f' * 4000000) | int(base=16) %}{% set b = ('f' * 2000000) | int(base=16) %}{{ a // b > 1 }}"
    ),
    "deep tuples": (
        "{% set n = namespace(m=(1,)) %}{% for i in range(9000) %}{% set n.m = (n.m,) %}{% endfor %}"
        "{% set d = {n.m: 1} %}"
    ),
}
SHARED = {
    "key of a dictionary": "{% set d = {n.m: 1} %}",
    "key of a subscript": "{{ {'a': 1}[n.m] }}",
    "key of get": "{{ {'a': 1}.get(n.m) }}",
    "key of dict": "{{ dict([[n.m, 1]]) }}",
    "index": "{{ [n.m].index(o.m) }}",
    "count": "{{ [n.m].count(o.m) }}",
    "in": "{{ n.m in [o.m] }}",
    "equal": "{{ n.m == o.m }}",
    "is eq": "{{ n.m is eq(o.m) }}",
    "is lt": "{{ n.m is lt(o.m) }}",
    "is in": "{{ n.m is in([o.m]) }}",
    "is lower": "{{ n.m is lower }}",
    "select": "{{ [n.m] | select('eq', o.m) | list }}",
    "refusal": "{{ raise_exception(n.m) }}",
    "namespace": "{{ n }}",
    "namespace joined": "{{ n ~ 'a' }}",
    "values": "{{ {'a': n.m}.values() }}",
    "items": "{{ {'a': n.m}.items() == {'a': o.m}.items() }}",
    "changed": "{% for x in [1, 2] %}{{ loop.changed(n.m if x == 1 else o.m) }}{% endfor %}",
    "upper": "{{ n.m | upper }}",
    "unique": "{{ [n.m, o.m] | unique | list }}",
    "format": "{{ '%s' % n }}",
}
_PAIR = (
    "{% set n = namespace(m=(1,)) %}{% set o = namespace(m=(1,)) %}"
    "{% for i in range(COUNT) %}{% set n.m = (n.m, n.m) %}{% set o.m = (o.m, o.m) %}{% endfor %}"
)
# 2^25 steps end in a second or ten where nobody counts them, and fail the test then; 2^60 would not end.
BOMBS |= {f"shared values, {name}": _PAIR.replace("COUNT", "25") + source for name, source in SHARED.items()}


SLOW = {
    "words counted": "{% set a = 'ab ' * 20000000 %}{{ a | wordcount }}",
    "words with capitals": "{% set a = 'ab ' * 6000000 %}{{ a | title | length }}",
    "words": "{% set a = 'ab ' * 20000000 %}{{ a.split() | length }}",
    "words from the end": "{% set a = 'ab ' * 20000000 %}{{ a.rsplit(maxsplit=9999999) | length }}",
    "parts": "{% set a = 'ab ' * 20000000 %}{{ a.split(' ') | length }}",
    "lines": "{% set a = '\r' * 20000000 %}{{ a.splitlines() | length }}",
    "indented lines": "{% set a = '\n' * 20000000 %}{{ a | indent(1) | length }}",
    "characters": "{% set a = 'ü' * 20000000 %}{{ a | list | length }}",
    "characters sorted": "{% set a = 'ü' * 9000000 %}{{ a | sort | length }}",
    "the least character": "{% set a = 'a' * 6000000 %}{{ a | min }}",
    "characters that are one": "{% set a = 'a' * 6000000 %}{{ a | unique | first }}{{ a | unique | list | length }}",
    "no character chosen": "{% set a = 'a' * 6000000 %}{{ a | select('number') | list | length }}",
    "copies to compare": "{% set a = 'a' * 10000000 %}{{ ([a] * 60) | sort | length }}",
    "a long list": "{% set a = [1] * 60000000 %}{{ a | length }}",
    "a list doubled": (
        "{% set n = namespace(a=[1]) %}{% for i in range(25) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a | length }}"
    ),
    "escapes": "{% set a = '<' * 50000000 %}{{ a | e | length }}",
}
"""Work, or memory, by Python or by regular expressions on one text, which no switch of threads interrupts."""


@pytest.mark.parametrize("source", SLOW.values(), ids=SLOW)
def test_a_text_that_is_gone_through_slowly_is_paid_for_before(source):
    """Within all that one rendering may do. Each made what took 0.5 to 1.5 GiB, or seconds."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"too many steps|too much text"):
            ChatTemplate(source, {}).render(X)
        assert tracemalloc.get_traced_memory()[1] < 150 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("values", [4_000, 9_000])
@pytest.mark.parametrize("wide", ["a", "\U0001f642"])
def test_indented_json_is_paid_for_before_it_is_made(values, wide):
    """Each value has a line as long as it is deep: 60 KB made 173 MiB, 680 KB 1.2 GiB."""
    parameters = [1] * values
    for _ in range(180):
        parameters = [parameters]
    tools = [{"function": {"description": wide, "parameters": parameters}}]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="too much text"):
            ChatTemplate("{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}", {}).render(
                Conversation(messages=X.messages, tools=tools)
            )
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}{% for i in range(900) %}{{ 'a' * 9999 }}{% endfor %}",
        "{% set x %}{% for i in range(900) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}{{ x[:5] }}",
        "{{ messages[0].content + 'a' * 900000 }}",
        "{{ messages[0].content ~ 'a' * 900000 }}",
        "{{ [messages[0].content, 'a' * 900000] | join }}",
        "{{ ('a' * 900000) | replace('b', messages[0].content) ~ messages[0].content }}",
        "{{ ['a' * 900000, messages[0].content] | tojson }}",
        "{{ ['a' * 900000, messages[0].content] | upper }}",
    ],
)
def test_a_text_of_a_short_conversation_is_short_and_wide_characters_count_by_their_bytes(source):
    """For short bodies no memory is set aside, and several are rendered at once."""
    wide = Conversation(messages=[{"role": "user", "content": "\U0001f642"}])
    template = ChatTemplate(source, {})
    if "range" not in source:
        assert len(template.render(X)) > 900_000
    with pytest.raises(InvalidRequest, match="too much text"):
        template.render(wide)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.none(), inner),
    ),
    indent=st.none() | st.integers(-1, 9) | st.just("\t "),
    separators=st.none() | st.just((",", ":")) | st.just((" ,  ", " :")),
    ascii_only=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_json_is_no_longer_than_was_paid(value, indent, separators, ascii_only):
    written = json.dumps(value, indent=indent, separators=separators, ensure_ascii=ascii_only)
    size = paid_operations._Written(indent, separators, ensure_ascii=ascii_only)
    assert len(written) <= size.of(value)


@given(texts=st.lists(st.text() | st.text("ab\u00e9", min_size=50) | st.text("a\u65e5", min_size=50)))
def test_texts_take_no_more_bytes_than_they_count(texts):
    for text in texts:
        text.encode("utf-8", "surrogatepass")  # may be kept beside it
    whole = "".join(texts)
    assert sys.getsizeof(whole) - sys.getsizeof("\U0001f642") <= paid_operations.size_of(*texts)


def test_long_conversations_are_cut_as_templates_do():
    """A megabyte of answers, each of which is cut where its reasoning ends, and has its lines counted."""
    source = (
        "{% for m in messages %}{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "{{ m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].splitlines() | length }}{% endif %}"
        "{{ m.content.strip().split() | length }}{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "<think>\n" + "hm, well.\n" * 200 + "</think>\nYes."}] * 500
    assert "Yes." in ChatTemplate(source, {}).render(Conversation(messages=messages))


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_bombs_end_with_a_clear_error_in_little_memory(source):
    tracemalloc.start()
    try:
        with pytest.raises((InvalidRequest, ValueError), match="chat template") as caught:
            ChatTemplate(source, {}).render(X, steps=20_000)
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()
    assert isinstance(caught.value, ConfigError) or caught.value.param == "messages"


@pytest.mark.slow
def test_a_budget_is_for_one_rendering():
    template = ChatTemplate("{% for m in messages %}{{ m.content | upper }}{% endfor %}", {})
    many = Conversation(messages=[{"role": "user", "content": "x"}] * 20_000)
    for _ in range(20):
        assert template.render(many) == "X" * 20_000


def test_the_number_of_messages_may_be_asked_for_in_a_loop_over_them():
    """As templates of Qwen3 do, for each of hundreds with their tool calls."""
    source = (
        "{% for m in messages %}{{ (messages | length) - loop.index0 }}{{ messages | count }}"
        "{{ (messages | first).role }}{{ (messages | last).role }}{{ tools | default([]) | length }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "look", "arguments": {str(i): [i] for i in range(20)}}}
    messages = [{"role": "assistant", "content": "x" * 4000, "tool_calls": [call]}] * 1000
    text = ChatTemplate(source, {}).render(Conversation(messages=messages, tools=[call] * 50), steps=50_000)
    assert text.startswith("10001000assistantassistant50")


def test_long_texts_may_be_copied_often():
    text = "word " * 1_000_000
    source = "{% for m in messages %}" + "{% set c = m.content | trim %}" * 20 + "{{ '<' ~ c ~ '>' }}{% endfor %}"
    assert (
        len(ChatTemplate(source, {}).render(Conversation(messages=[{"role": "user", "content": text}] * 3)))
        > 14_000_000
    )


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro g() %}{{ caller() }}{% endmacro %}"
        "{% macro f() %}{% call g() %}{{ f() }}{% endcall %}{% endmacro %}{{ f() }}",
        "{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}",
        "{% block b %}{{ self.b() }}{% endblock %}",
    ],
)
def test_calls_within_calls_end_long_before_the_stack_does(source):
    """Libraries raise the interpreter's own limit, and past the stack's end there is no exception."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)
    try:
        with pytest.raises((InvalidRequest, ValueError), match="within each other"):
            ChatTemplate(source, {}).render(X, steps=20_000)
    finally:
        sys.setrecursionlimit(before)


def test_a_key_is_looked_for_without_going_through_its_mapping() -> None:
    """Templates that look ahead over a long conversation ask each message what it has."""
    message = {"role": "user", "content": ["x"] * 5000, "tool_calls": []}
    ahead = "{% for b in messages %}{{ 'y' if 'none' in b or 'tool_calls' not in b }}{% endfor %}"
    source = "{% for a in messages %}" + ahead + "{% endfor %}"
    assert ChatTemplate(source, {}).render(Conversation(messages=[message] * 20), steps=30_000) == ""
    listed = "{% for a in messages %}{{ 'y' if 'none' in a.content }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="too many steps"):
        ChatTemplate(listed, {}).render(Conversation(messages=[message] * 20), steps=30_000)


def test_a_comparison_with_a_constant_looks_at_no_more_than_that() -> None:
    """Templates look ahead over a long conversation for a role, from each message on."""
    message = {"role": "user", "content": ["x"] * 5000}

    def render(condition: str) -> str:
        ahead = "{% for b in messages %}{{ 'y' if " + condition + " }}{% endfor %}"
        source = "{% for a in messages %}" + ahead + "{% endfor %}"
        return ChatTemplate(source, {}).render(Conversation(messages=[message] * 20), steps=5_000)

    assert render("b.role == 'none' or 'none' == b.content or b.content == 5") == ""
    for costly in ("a.content != b.content", "'a' < b.role < b.content", "b.content in ['a']"):
        with pytest.raises((InvalidRequest, ValueError), match="too many steps"):
            render(costly)
