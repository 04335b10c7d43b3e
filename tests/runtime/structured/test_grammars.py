"""Masks hold a text to its grammar, whatever is drawn; what cannot be held to is refused."""

from __future__ import annotations

import gc
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from tokenizers import Tokenizer

from isthmus_runtime.errors import EngineFailed, InvalidRequest, Overloaded
from isthmus_runtime.interfaces.steps import Outgrown
from isthmus_runtime.request import Structure
from isthmus_runtime.structured import compiled as compiling
from isthmus_runtime.structured import grammars as module
from isthmus_runtime.structured import guide as walking
from isthmus_runtime.structured.allocated import memory_in_use
from isthmus_runtime.structured.compiled import MAX_TEXT, memory_of
from isthmus_runtime.structured.grammars import Grammars
from isthmus_runtime.structured.guide import Guide

EOS = (2, 0)
VOCAB = 410
"""More than the tokenizer has: models pad their output layer."""


@pytest.fixture(scope="session")
def grammars(model: Path) -> Grammars:
    return Grammars.load(model, eos_token_ids=EOS, vocab_size=VOCAB)


def allowed_ids(mask: bytes) -> list[int]:
    return [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]


def walk(grammars: Grammars, structure: Structure, tokenizer: Tokenizer, seed: int, most: int = 400) -> str | None:
    """A text of random allowed tokens, which ends as soon as it may where it gets long; None: longer than `most`."""
    rng, guide, generated = random.Random(seed), grammars.guide(structure), list[int]()
    while len(generated) < most:
        ids = allowed_ids(guide.allowed(generated))
        assert ids and max(ids) < VOCAB, f"seed {seed}: {len(ids)} tokens are allowed after {generated}"
        ends = [i for i in ids if i in EOS]
        assert len(ends) in {0, len(EOS)}, "either every end-of-sequence token is allowed or none"
        if ends and (len(generated) > 40 or len(ends) == len(ids) or rng.random() < 0.2):
            return str(tokenizer.decode(generated, skip_special_tokens=True))
        choices = [i for i in ids if i not in EOS]
        # Closing characters are rare among 400 tokens: without help a random text would nest for ever.
        closing = [i for i in choices if set(tokenizer.decode([i])) <= set('"]}, 0')] if len(generated) > 60 else []
        generated.append(rng.choice(closing or choices))
    return None


@pytest.mark.parametrize("seed", range(4))
def test_forced_tokens_are_those_without_an_alternative(grammars: Grammars, seed: int) -> None:
    """Token by token by another guide: each mask before a forced token allows that one alone."""
    rng, found = random.Random(seed), 0
    names = {"a_rather_long_name": {"enum": ["alpha", "beta"]}, "another": {"const": "this and nothing else"}}
    long = {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
    for schema in (*SCHEMAS, long):
        structure = Structure(kind="json_schema", text=json.dumps(schema))
        guide, by_one, generated = grammars.guide(structure), grammars.guide(structure), list[int]()
        for _ in range(60):
            mask = guide.allowed(generated)
            forced = guide.forced(generated, 4)
            assert len(forced.masks) == len(forced.tokens) <= 4
            assert guide.forced(generated, 0).tokens == forced.tokens[:1] and not guide.forced(generated, 0).masks
            assert guide.allowed(generated) == mask, "looking ahead leaves the guide where it was"
            ahead = list(generated)
            for token, after in zip(forced.tokens, forced.masks, strict=True):
                assert allowed_ids(by_one.allowed(ahead)) == [token], f"seed {seed}: {schema} after {ahead}"
                ahead.append(token)
                assert by_one.allowed(ahead) == after
            found += len(forced.tokens)
            generated = ahead
            ids = allowed_ids(guide.allowed(generated))
            if set(ids) & set(EOS):
                break
            by_one = grammars.guide(structure)
            generated.append(rng.choice(ids))
    assert found > 20, f"seed {seed}: only {found} forced tokens"


SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": "größer 日本語"}]},
    {"type": "array", "items": {"type": "number", "exclusiveMinimum": -1, "maximum": 1}, "minItems": 1, "maxItems": 2},
    {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    },
)


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_whatever_is_drawn_fulfils_the_schema(grammars: Grammars, model: Path, number: int) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    schema = SCHEMAS[number]
    texts = [walk(grammars, Structure("json_schema", json.dumps(schema)), tokenizer, seed) for seed in range(30)]
    found = [text for text in texts if text is not None]
    assert len(found) > 10, "most walks should come to an end"
    for text in found:
        assert jsonschema_rs.is_valid(schema, json.loads(text)), text


@settings(max_examples=40, deadline=None)
@given(choices=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6, unique=True), seed=st.integers(0, 99))
def test_a_choice_is_one_of_them(grammars: Grammars, model: Path, choices: list[str], seed: int) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert walk(grammars, Structure("choice", json.dumps(choices)), tokenizer, seed) in choices


def test_regular_expressions_and_grammars(grammars: Grammars, model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for seed in range(20):
        text = walk(grammars, Structure("regex", "[0-9]{3}-[a-c]{1,4}"), tokenizer, seed)
        assert text is not None and re.fullmatch("[0-9]{3}-[a-c]{1,4}", text), text
        text = walk(grammars, Structure("grammar", 'start: "x" start | "y"'), tokenizer, seed)
        assert text is None or re.fullmatch("x*y", text), text


def test_a_mask_is_a_function_of_what_was_generated(grammars: Grammars) -> None:
    structure = Structure("json_schema", json.dumps(SCHEMAS[0]))
    first, generated = grammars.guide(structure), list[int]()
    masks = []
    for _ in range(12):
        masks.append(first.allowed(generated))
        assert first.allowed(generated) == masks[-1]
        generated.append(next(i for i in allowed_ids(masks[-1]) if i not in EOS))
    # As after a preemption, or on the engine that takes over after prefill: many tokens at once.
    for taken in (0, 1, 7, 11):
        assert grammars.guide(structure).allowed(generated[:taken]) == masks[taken]


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (Structure("json_schema", "{"), ["Expecting"]),
        (Structure("json_schema", "[]"), ["object", "list"]),
        (Structure("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'), ["minLength"]),
        (Structure("json_schema", '{"not": {"type": "string"}}'), ["not"]),
        (Structure("json_schema", '{"type": "string", "format": "foo"}'), ["format", "foo"]),
        (Structure("json_schema", '{"$ref": "http://127.0.0.1:9/x"}'), ["127.0.0.1"]),
        (Structure("json_schema", '{"a":' * 5000 + "1" + "}" * 5000), ["recursion"]),
        (Structure("regex", "(["), ["regex"]),
        (Structure("grammar", "start: nothing"), ["nothing"]),
        (Structure("choice", "[]"), ["one or more"]),
        (Structure("choice", '["a", ""]'), ["empty"]),
        (Structure("choice", '["a", 5]'), ["strings"]),
        (Structure("regex", "a" * (MAX_TEXT + 1)), [str(MAX_TEXT)]),
    ],
)
def test_what_cannot_be_held_to_is_refused(grammars: Grammars, structure: Structure, words: Sequence[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammars.guide(structure)
    assert all(word in str(caught.value) for word in words), caught.value
    assert len(str(caught.value)) < 600


@pytest.mark.slow
def test_a_grammar_that_proves_too_much_work_is_the_request_s_fault(grammars: Grammars) -> None:
    """Its first mask is cheap, so that compiling accepts it: engines would fail one after another, each with a 500."""
    guide = grammars.guide(Structure("regex", "a{1000000}"))
    token = next(i for i in allowed_ids(guide.allowed([])) if i not in EOS)
    for _ in range(4):  # a small lexer, larger ones, and one of its own
        with pytest.raises(Outgrown) as outgrown:
            guide.allowed([token])
        outgrown.value.renew()
    with pytest.raises(InvalidRequest, match=r"after 0 tokens: .*simplify the grammar") as caught:
        guide.allowed([token])
    assert caught.value.param == "structure"


def test_a_token_that_was_not_allowed_is_the_engine_s_fault(grammars: Grammars) -> None:
    guide = grammars.guide(Structure("choice", '["once"]'))
    refused = next(i for i in range(VOCAB) if i not in set(allowed_ids(guide.allowed([]))))
    for _ in range(4):  # by the lexers that it shares, and by another
        with pytest.raises(Outgrown) as outgrown:
            guide.allowed([refused])
        outgrown.value.renew()
    with pytest.raises(EngineFailed, match=f"token {refused} was drawn"):
        guide.allowed([refused])


def test_a_grammar_is_compiled_once_for_all_choices_of_a_request(grammars: Grammars) -> None:
    structure = Structure("choice", '["once", "only"]')
    assert grammars.known(structure) is None
    first = grammars.guide(structure)
    second = grammars.known(structure)
    assert second is not None
    begin = first.allowed([])
    drawn = next(i for i in allowed_ids(begin) if i not in EOS)
    assert first.allowed([drawn]) != begin
    assert second.allowed([]) == begin, "each is at a place of its own"
    third = grammars.guide(Structure("choice", '["once", "only"]'))
    assert third.allowed([]) == begin


def test_forced_tokens_are_looked_for_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a long text is forced, that takes long, and the masks of other requests wait for it."""
    monkeypatch.setattr(walking, "_SLOW_S", 1e9)  # apart, there is no counting

    class Counting:
        def __init__(self, matcher: Any) -> None:
            self.matcher, self.looked = matcher, 0

        def __getattr__(self, name: str) -> Any:
            self.looked += name == "compute_ff_tokens"
            return getattr(self.matcher, name)

    guide = grammars.guide(Structure("regex", "(x|y)" + "ab" * 200 + "[0-9]"))
    counting = Counting(guide._matcher)
    guide._matcher = counting
    generated: list[int] = []
    while (mask := int.from_bytes(guide.allowed(generated), "little")) and len(generated) < 1000:
        tokens = guide.forced(generated, 0).tokens
        token = tokens[0] if tokens else (mask & -mask).bit_length() - 1
        assert mask >> token & 1
        if token in (0, 2):
            break
        generated.append(token)
    assert len(generated) > 50 and counting.looked < 10


SPENDS = Structure("regex", r"(.|\n)*[ae](.|\n){40}c")
"""A few random tokens take its lexer thousands of states, each of which is another set of places."""


def follow(guide: Guide, most: int, seed: int, generated: list[int] | None = None) -> tuple[int, int, str]:
    """Random tokens of a guide, as an engine's threads ask for them: how many, how often it was renewed, and the error
    that ended it."""
    rng, renewed, generated = random.Random(seed), 0, [] if generated is None else generated
    while len(generated) < most:
        try:
            ids = [i for i in allowed_ids(guide.allowed(generated)) if i not in EOS]
        except Outgrown as outgrown:
            outgrown.renew()
            renewed += 1
        except InvalidRequest as error:
            return len(generated), renewed, str(error)
        else:
            generated.append(rng.choice(ids))
    return len(generated), renewed, ""


def few_states(monkeypatch: pytest.MonkeyPatch, model: Path, most: int) -> Grammars:
    monkeypatch.setattr(compiling, "_LIMITS", LLParserLimits(max_lexer_states=most, verbose_errors=False))
    return Grammars.load(model, eos_token_ids=EOS, vocab_size=VOCAB)


def test_a_lexer_that_others_have_used_up_is_replaced_for_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with one grammar share it: no request's text may end another one, nor those that come later."""
    grammars = few_states(monkeypatch, model, 500)
    monkeypatch.setattr(walking, "_LEAST_SHARED", 1000)
    made, compiled = list[Structure](), grammars._compile

    def counted(structure: Structure, states: int | None = None, whose: str = "") -> Any:
        made.append(structure)
        return compiled(structure, states, whose)

    monkeypatch.setattr(grammars, "_compile", counted)
    early = [grammars.guide(SPENDS) for _ in range(6)]
    drawn = list[int]()  # on another engine, which has a lexer of its own
    follow(few_states(monkeypatch, model, 500).guide(SPENDS), 1, 7, drawn)
    count, renewed, error = follow(grammars.guide(SPENDS), 400, seed=0)
    assert (renewed, len(made)) == (2, 3) and count < 400, "a shared one, the next, and one of its own"
    assert f"after {count} tokens: lexer error: too many states: 500" in error, error
    assert follow(early.pop(), 3, 1, drawn)[::2] == (3, ""), "a full one refuses tokens without a word"
    for guide in (*early, grammars.guide(SPENDS)):
        assert follow(guide, 3, seed=1)[::2] == (3, "")
    assert len(made) == 4, "the others share the next one"


def test_a_long_answer_may_use_up_many_lexers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place in a counted repeat is a few states more."""
    grammars = few_states(monkeypatch, model, 1000)
    monkeypatch.setattr(walking, "_LEAST_PROGRESS", 20)
    text = {"type": "string", "minLength": 900, "maxLength": 1000}
    schema = {"type": "object", "properties": {"a": text}, "required": ["a"], "additionalProperties": False}
    structure = Structure("json_schema", json.dumps(schema))
    guide = grammars.guide(structure)
    count, renewed, error = follow(guide, 300, seed=1)
    assert (count, error) == (300, "") and renewed >= 2, (count, renewed, error)
    monkeypatch.undo()
    fresh = Grammars.load(model, eos_token_ids=EOS, vocab_size=VOCAB).guide(structure)
    generated = list[int]()
    follow(few_states(monkeypatch, model, 1000).guide(structure), 300, 1, generated)
    assert guide.allowed(generated) == fresh.allowed(generated), "whatever lexer it walks with"


def test_kept_grammars_are_bounded_by_their_texts(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_TEXT", 100)
    first, large, small = (Structure("regex", letter * size) for letter, size in (("a", 60), ("b", 300), ("c", 60)))
    grammars.guide(first)
    assert grammars.known(first) is not None
    grammars.guide(large)
    assert grammars.known(first) is None and grammars.known(large) is not None
    grammars.guide(small)
    assert grammars.known(large) is None and grammars.known(small) is not None
    assert grammars._size == 60


@pytest.mark.parametrize("text", ["[a-z]*[aeiou][a-z]{3}", "(ab|cd|e){2,40}"])
def test_tokens_of_a_slow_grammar_are_taken_in_apart_with_the_same_masks(
    model: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """llguidance holds the interpreter's lock while it takes tokens in: milliseconds of everybody's steps."""
    grammars, structure = Grammars.load(model, eos_token_ids=EOS, vocab_size=VOCAB), Structure("regex", text)
    plain, apart = grammars.guide(structure), grammars.guide(structure)
    rng, generated = random.Random(3), list[int]()
    for _ in range(30):
        monkeypatch.setattr(walking, "_SLOW_S", 1e9)
        wanted = plain.allowed(generated), plain.forced(generated, 4)
        monkeypatch.setattr(walking, "_SLOW_S", -1.0)
        assert (apart.allowed(generated), apart.forced(generated, 4)) == wanted
        ids = [i for i in allowed_ids(wanted[0]) if i not in EOS]
        if not ids:
            break
        generated += rng.choices(ids, k=1)
    assert plain._apart is None and apart._apart is not None and apart.apart_s > 0
    with pytest.raises((InvalidRequest, EngineFailed)):
        apart.allowed([*generated, 409])


def test_who_goes_on_shares_the_next_lexer_and_the_next(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = few_states(monkeypatch, model, 500)
    guide = grammars.guide(SPENDS)
    count, renewed, error = follow(guide, 250, seed=0)
    assert (count, error) == (250, "") and renewed > 2
    assert not grammars._places and grammars._compiled[SPENDS] is guide._shared


def test_few_have_a_lexer_of_their_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be tens of megabytes, and a request may have 128 choices."""
    grammars = few_states(monkeypatch, model, 500)
    monkeypatch.setattr(walking, "_LEAST_SHARED", 1000)
    monkeypatch.setattr(module, "_MOST_ALONE", 2)
    guides = [grammars.guide(SPENDS) for _ in range(3)]
    lengths = [follow(guide, 250, seed)[0] for seed, guide in enumerate(guides[:2])]
    assert all(length < 250 for length in lengths) and len(grammars._places) == 2
    with pytest.raises(Overloaded, match="which 2 other requests have now; simplify it, or retry later") as caught:
        follow(guides[2], 250, seed=2)
    assert caught.value.status == 429
    gc.disable()
    try:
        guides.clear()
        assert not grammars._places, "they wait for the collector"
    finally:
        gc.enable()


def test_a_grammar_begins_with_a_small_lexer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of requests may each have a grammar of their own; few use up what they begin with."""
    monkeypatch.setattr(module, "_FIRST_STATES", 500)
    grammars = Grammars.load(model, eos_token_ids=EOS, vocab_size=VOCAB)
    large = few_states(monkeypatch, model, 5000).guide(SPENDS)
    monkeypatch.undo()
    monkeypatch.setattr(module, "_FIRST_STATES", 500)
    guide = grammars.guide(SPENDS)
    small, drawn = grammars._compiled[SPENDS], list[int]()
    count, renewed, error = follow(guide, 250, 0, drawn)
    assert (count, error) == (250, "") and renewed
    assert small.states == 500 and grammars._compiled[SPENDS].states > 500
    assert guide.allowed(drawn) == large.allowed(drawn)


def test_grammars_that_differ_are_bounded_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what they may take: each request may have one that nobody else has. Whose client has most gives way."""
    one = memory_of(Structure("regex", "a000"), module._FIRST_STATES)
    monkeypatch.setattr(module, "_MOST_MEMORY", 8 * one)
    grammars = Grammars.load(model, eos_token_ids=EOS, vocab_size=VOCAB)
    for i in range(20):  # nobody walks with them any more
        grammars.guide(Structure("regex", f"a{i:03}"))
    costly = grammars.guide(Structure("regex", "(" + "|".join(f"b{i:03}" for i in range(2000)) + ")"), "many")
    guides = [grammars.guide(Structure("regex", f"c{i:03}"), "many") for i in range(8)]
    with pytest.raises(Overloaded, match="the most of this client's") as caught:
        costly.allowed([])
    assert caught.value.status == 429
    assert all(guide.allowed([]) for guide in guides)
    with pytest.raises(Overloaded, match="no client has more of them") as caught:
        grammars.guide(Structure("regex", "d000"), "many")
    assert caught.value.status == 429
    # Whoever has less finds room, with a grammar that takes more than each of theirs.
    few = grammars.guide(Structure("regex", "(e|f)" * 100), "few")
    with pytest.raises(Overloaded, match="the most of this client's"):
        for guide in guides:
            guide.allowed([])
    assert few.allowed([])
    left = [i for i, guide in enumerate(guides) if guide.compiled is not None]
    guides = [guides[i] for i in left]
    shared = grammars.guide(Structure("regex", f"c{left[-1]:03}"))
    assert shared.allowed([]) == guides[-1].allowed([])
    gc.disable()
    try:
        del guides[1:]
        assert grammars.guide(Structure("regex", "d000")).allowed([])
    finally:
        gc.enable()


def bounded(model: Path, monkeypatch: pytest.MonkeyPatch, small: int) -> Grammars:
    """With room for so many grammars of a few characters."""
    one = memory_of(Structure("regex", "a000"), module._FIRST_STATES)
    monkeypatch.setattr(module, "_MOST_MEMORY", small * one)
    return Grammars.load(model, eos_token_ids=EOS, vocab_size=VOCAB)


def really_there(grammars: Grammars) -> int:
    return sum(one.memory for one in grammars._there)


def test_grammars_of_requests_that_wait_are_bounded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks these for a mask until they have a row. Each is smaller than the last, so that the last gives way."""
    grammars, held, lost = bounded(model, monkeypatch, 8), list[Guide](), list[int]()
    grammars.told = lambda: lost.append(sum(guide.lost() is not None for guide in held))
    for i in range(40):
        held.append(grammars.guide(Structure("regex", "(a|b)" * (100 - i)), "many"))
        assert really_there(grammars) <= module._MOST_MEMORY, f"{i + 1} wait"
    with pytest.raises(Overloaded, match="the most of this client's"):
        held[0].allowed([])
    assert held[-1].allowed([]) and held[-1].lost() is None
    assert len(lost) > 30 and lost == sorted(set(lost)), "told each time, when it is so"


def test_who_gives_way_counts_until_gone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = bounded(model, monkeypatch, 2)
    monkeypatch.setattr(module, "_RELEASE_S", 0.0)
    guide = grammars.guide(Structure("regex", "(a|b)" * 100), "many")
    guide._using.acquire()  # as a mask that takes long
    with pytest.raises(Overloaded, match="what gives way for it is still in use") as caught:
        grammars.guide(Structure("regex", "(c|d)" * 99), "few")
    assert caught.value.status == 429 and really_there(grammars) <= module._MOST_MEMORY
    guide._end_use()
    few = grammars.guide(Structure("regex", "(c|d)" * 99), "few")
    assert few.allowed([]) and really_there(grammars) <= module._MOST_MEMORY


def test_a_grammar_that_clients_share_is_not_let_go_for_one_s_excess(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars, shared = bounded(model, monkeypatch, 6), Structure("regex", "(a|b)" * 400)
    first = grammars.guide(shared, "many")  # the first to have asked for it, and the largest of all
    others = [grammars.guide(shared, f"few {i}") for i in range(3)]
    held = [grammars.guide(Structure("regex", f"c{i:03}"), "many") for i in range(4)]
    few = grammars.guide(Structure("regex", "d000"), "few 0")
    assert few.allowed([]) and all(guide.allowed([]) for guide in (first, *others))
    with pytest.raises(Overloaded, match="the most of this client's"):
        for guide in held:
            guide.allowed([])


def count_a_megabyte_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever time it takes."""
    monkeypatch.setattr(walking, "_WALK_RATE", 1e18)
    monkeypatch.setattr(walking, "_TAKING_RATE", 1e18)
    monkeypatch.setattr(walking, "_TOKEN_WALK", 1 << 20)


def walk_on(guide: Guide, count: int) -> list[int]:
    """So many tokens, the first of those that are allowed."""
    generated = list[int]()
    while len(generated) < count:
        generated.append(next(i for i in allowed_ids(guide.allowed(generated)) if i not in EOS))
    return generated


def test_walks_are_weighed_before_one_gives_way(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of wide schemas four times too much was counted, and some 50 requests ended with 429."""
    grammars = bounded(model, monkeypatch, 12)
    count_a_megabyte_a_token(monkeypatch)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(60)}}
    guides = [grammars.guide(Structure("json_schema", json.dumps(wide)), "many") for _ in range(3)]
    for guide in guides:
        assert guide.allowed(walk_on(guide, 30))
    assert all(guide.lost() is None for guide in guides)
    assert sum(guide.walk for guide in guides) < 45 << 20, "they were weighed"


def test_what_is_weighed_is_never_taken_for_less_than_it_is(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others free meanwhile does not make it nothing; what they allocate, not more than was counted."""
    count_a_megabyte_a_token(monkeypatch)
    guide = grammars.guide(Structure("regex", "[ab]*"))
    generated = walk_on(guide, 20)
    for others, found in ((-(1 << 30), (20 << 20) // 16), (1 << 30, 20 << 20)):
        guide.walk, guide._weighed = 20 << 20, 0
        told = iter((0, others))
        guide.weigh(lambda told=told: next(told))  # type: ignore[misc]
        assert guide.walk == found
    mask = guide.allowed(generated)
    guide.walk, guide._weighed = 20 << 20, 0
    guide.weigh(memory_in_use())
    assert guide.walk < 3 << 20 and guide.allowed(generated) == mask
    for walk, weighed in ((20 << 20, (20 << 20) - 1), (33 << 20, 0)):
        guide.walk, guide._weighed = walk, weighed
        guide.weigh(lambda: 1 // 0)
        assert guide.walk == walk
    with guide._using:
        guide.walk, guide._weighed = 20 << 20, 0
        guide.weigh(lambda: 1 // 0)


def test_what_walks_keep_is_bounded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the parser, with all that it may be, for each token."""
    monkeypatch.setattr(module, "memory_in_use", lambda: lambda: 0)  # there is no weighing
    grammars = bounded(model, monkeypatch, 8)
    count_a_megabyte_a_token(monkeypatch)
    kinds = range(20)
    text = "start: x*\nx: " + " | ".join(f"x{i}" for i in kinds) + "".join(f'\nx{i}: "a"' for i in kinds)
    walks, few = grammars.guide(Structure("grammar", text), "many"), grammars.guide(Structure("regex", "b*"), "few")
    generated = list[int]()
    with pytest.raises(Overloaded, match=r"takes 1[0-9] MiB, the most of this client's"):
        while len(generated) < 40:
            mask = walks.allowed(generated)
            generated.append(next(i for i in allowed_ids(mask) if i not in EOS))
    assert 5 < len(generated) < 40 and few.allowed([])
    assert grammars._used() <= module._MOST_MEMORY


def test_whatever_of_a_lexer_is_used_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states, or the expressions that these are made of."""
    words = set[str]()
    for states in (500, 1 << 20):
        monkeypatch.setattr(walking, "_LEAST_SHARED", 1 << 20)
        grammars = few_states(monkeypatch, model, states)
        structure = SPENDS if states == 500 else Structure("regex", r"(.|\n)*[ae ](.|\n){300}c")
        for seed in range(3):
            guide = grammars.guide(structure)
            _, renewed, error = follow(guide, 400, seed)
            if error:
                assert renewed == 2 and "lexer error: " in error, error
                words.add(error.partition("lexer error: ")[2][:14])
    assert "too many state" in words, words
