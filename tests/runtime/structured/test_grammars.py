"""Masks hold a text to its grammar, whatever is drawn; what cannot be held to is refused."""

from __future__ import annotations

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

from isthmus_runtime.errors import EngineFailed, InvalidRequest
from isthmus_runtime.request import Structure
from isthmus_runtime.structured import grammars as module
from isthmus_runtime.structured.grammars import MAX_TEXT, Grammars, Guide

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


def test_a_grammar_that_proves_too_much_work_is_the_request_s_fault(grammars: Grammars) -> None:
    """Its first mask is cheap, so that compiling accepts it: engines would fail one after another, each with a 500."""
    guide = grammars.guide(Structure("regex", "a{1000000}"))
    token = next(i for i in allowed_ids(guide.allowed([])) if i not in EOS)
    with pytest.raises(InvalidRequest, match=r"after 0 tokens: .*simplify the grammar") as caught:
        guide.allowed([token])
    assert caught.value.param == "structure"


def test_a_token_that_was_not_allowed_is_the_engine_s_fault(grammars: Grammars) -> None:
    guide = grammars.guide(Structure("choice", '["once"]'))
    refused = next(i for i in range(VOCAB) if i not in set(allowed_ids(guide.allowed([]))))
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


def test_forced_tokens_are_looked_for_once(grammars: Grammars) -> None:
    """Where a long text is forced, that takes long, and the masks of other requests wait for it."""

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


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[int, str]:
    return {i: text for i in ids if (text := tokenizer.decode([i])).isascii() and text.isalpha() and text.islower()}


def answered(guide: Guide, letters: Sequence[int], count: int, seed: int) -> list[int]:
    """Tokens of letters, as a JSON text may hold them."""
    rng, generated = random.Random(seed), list[int]()
    while len(generated) < count:
        ids = set(allowed_ids(guide.allowed(generated)))
        fitting = [i for i in letters if i in ids]
        generated.append(rng.choice(fitting) if fitting else min(ids))
    return generated


def test_a_full_lexer_is_not_for_ever(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with one grammar share its lexer, whose states were a budget for its lifetime: some answers by a schema
    of three long texts were fine, and from then on everybody's request with it was refused."""
    monkeypatch.setattr(module, "_LIMITS", LLParserLimits(max_lexer_states=300))
    grammars = Grammars.load(model, eos_token_ids=EOS, vocab_size=VOCAB)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    letters = list(texts_of(tokenizer, range(tokenizer.get_vocab_size())))
    renewed, instead = 0, Grammars.instead

    def counted(*args: Any) -> Any:
        nonlocal renewed
        renewed += 1
        return instead(*args)

    monkeypatch.setattr(Grammars, "instead", counted)
    structure = Structure("regex", "[a-z]*[aeiou][a-z]{8}c")
    for seed in range(10):
        assert len(answered(grammars.guide(structure), letters, 40, seed)) == 40
    assert renewed, "or the lexer was never full"
    monkeypatch.setattr(module, "_QUICK_S", -1.0)
    with pytest.raises(InvalidRequest, match="too many states"):
        for seed in range(10, 100):
            answered(grammars.guide(structure), letters, 40, seed)
    assert len(answered(grammars.guide(structure), letters, 40, 0)) == 40, "the next one begins anew"
