"""What a grammar says is text, also where the model has a token of that name, or writes it otherwise; by name a grammar
asks for the token."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from isthmus_runtime.errors import InvalidRequest
from isthmus_runtime.request import Structure
from isthmus_runtime.structured.grammars import Grammars
from isthmus_runtime.structured.special_tokens import SpecialTokens

EOS = 2
NAMES = ["<think>", "</think>", "<a b>", "<h1>"]
ALL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", *NAMES, "[PLAIN]", "\n\n"]


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    made = Tokenizer.from_file(str(model / "tokenizer.json"))
    made.add_special_tokens(["[TOOL_CALLS]"])
    made.add_tokens([AddedToken(text, normalized=False) for text in (*NAMES, "[PLAIN]", "\n\n")])
    return made


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.to_str(), eos_token_ids=[EOS], vocab_size=tokenizer.get_vocab_size())


def walk(grammars: Grammars, structure: Structure, seed: int = 0) -> list[int]:
    """Random tokens of those that are allowed, without the last."""
    rng, guide, generated = random.Random(seed), grammars.guide(structure), list[int]()
    while len(generated) < 200:
        mask = guide.allowed(generated)
        allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
        forced = guide.forced(generated, 8).tokens
        assert not forced or allowed == [forced[0]]
        generated.append(rng.choice(allowed))
        if generated[-1] == EOS:
            return generated[:-1]
    raise AssertionError(generated)


def test_text_is_text_whatever_tokens_have_its_name(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for name in ALL:
        text = f"a{name}{name} x"
        for said in (name, text):
            plain = "".join(f"\\u{ord(char):04x}" for char in said)
            for structure in (
                Structure("choice", json.dumps([said])),
                Structure("regex", plain),
                Structure("grammar", f"start: {json.dumps(said)}"),
                Structure("grammar", f"start: /{plain}/ // {name}"),
                Structure("grammar", json.dumps({"grammars": [{"lark_grammar": f"start: {json.dumps(said)}"}]})),
            ):
                ids = walk(grammars, structure)
                assert tokenizer.decode(ids, skip_special_tokens=False) == said, structure
            found = tokenizer.decode(walk(grammars, Structure("json_schema", json.dumps({"const": said}))), False)
            assert json.loads(found) == said
            before = walk(grammars, Structure("grammar", f"start: {json.dumps(said)} /[ab]{{3}}/"))
            assert tokenizer.decode(before[:-1], skip_special_tokens=False).startswith(said)


def test_the_token_is_asked_for_by_name_or_id(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for name in ("<think>", "<|im_start|>", "<h1>"):
        number = tokenizer.token_to_id(name)
        for source in (f'start: {name} "{name}" {name}', f'start: <[{number}]> "{name}" {name}'):
            for text in (source, json.dumps({"grammars": [{"lark_grammar": source}]})):
                ids = walk(grammars, Structure("grammar", text))
                assert ids[0] == ids[-1] == number and number not in ids[1:-1]
                assert tokenizer.decode(ids[1:-1], skip_special_tokens=False) == name
    with pytest.raises(InvalidRequest, match=r"^structure: <nothing> is no token of this model"):
        grammars.guide(Structure("grammar", "start: <nothing>"))


def test_no_text_has_such_a_token(grammars: Grammars, tokenizer: Tokenizer) -> None:
    mask = grammars.guide(Structure("regex", "(.|\\n)*")).allowed([])
    allowed = {name for name in ALL if mask[(i := tokenizer.token_to_id(name)) // 8] >> i % 8 & 1}
    assert allowed == {"<|im_end|>", "[PLAIN]", "\n\n"}  # the first ends it


@pytest.mark.parametrize("word", ["é", "größer", "größer als", "中文"])
def test_added_words_are_what_they_are_decoded_as(word: str, model: Path) -> None:
    """A byte-level decoder takes `é` for a byte, and `größer` for bytes that are no text."""
    made = Tokenizer.from_file(str(model / "tokenizer.json"))
    made.add_tokens([word])
    grammars = Grammars(made.to_str(), eos_token_ids=[EOS], vocab_size=made.get_vocab_size())
    for said in (word, f"a {word}."):
        assert made.decode(walk(grammars, Structure("choice", json.dumps([said])))) == said
    for seed in range(5):
        found = made.decode(walk(grammars, Structure("json_schema", '{"type": "string", "maxLength": 40}'), seed))
        assert "\ufffd" not in json.loads(found)


def sentencepiece() -> Tokenizer:
    """With a sign for a space, and tokens of single bytes for what no other has."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abehnotuxy12", "▁a", "▁▁", "he"]
    vocab = {text: i for i, text in enumerate(texts)}
    made = Tokenizer(
        models.BPE(vocab, [("▁", "a"), ("▁", "▁"), ("h", "e")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<s>", "</s>"])
    return made


OTHERWISE = {
    "nfc": lambda made: setattr(made, "normalizer", normalizers.NFC()),  # as Qwen 2 and 3
    "lower": lambda made: setattr(
        made, "normalizer", normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "space before": lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
}


@pytest.mark.parametrize("before", [[], [normalizers.Prepend("▁")]])
def test_spaces_beside_added_words_are_those_of_the_text(before: list[normalizers.Normalizer]) -> None:
    """A text goes on anew after each such word: Llama 2's normalizer put a space there again."""
    made = sentencepiece()
    made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    made.add_tokens(["NewWord"])
    grammars = Grammars(made.to_str(), eos_token_ids=[2], vocab_size=made.get_vocab_size())
    for said in ("NewWord", "a NewWord b", "heNewWordab", "NewWord  NewWord", " NewWord", "a he"):
        for structure in (Structure("choice", json.dumps([said])), Structure("regex", f"{said}[ab]")):
            found = made.decode(walk(grammars, structure), skip_special_tokens=False)
            assert (found[:-1] if structure.kind == "regex" else found) == said, (structure, found)


@pytest.mark.parametrize(
    "prefix",
    [
        {"add_prefix_space": True},  # as tokenizers before 0.15 wrote it
        {"add_prefix_space": True, "prepend_scheme": "first"},
        {"add_prefix_space": False, "prepend_scheme": "never"},
        {"prepend_scheme": "always", "split": False},
        {"prepend_scheme": "first", "split": False},
    ],
)
@pytest.mark.parametrize("inner", [False, True])
def test_a_metaspace_puts_no_space_before_a_text(prefix: dict[str, object], inner: bool) -> None:
    made = sentencepiece()
    made.add_tokens(["NewWord"])
    whole = json.loads(made.to_str())
    metaspace = {"type": "Metaspace", "replacement": "▁", **prefix}
    whole["normalizer"] = None
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [metaspace]} if inner else metaspace
    text = json.dumps(whole)
    Tokenizer.from_str(text)  # it is one
    grammars = Grammars(text, eos_token_ids=[2], vocab_size=made.get_vocab_size())
    for said in ("a he", " a", "NewWord", "a NewWord b", "NewWord  NewWord", "a▁ ▁▁  a"):
        for structure in (Structure("choice", json.dumps([said])), Structure("regex", f"{said}[ab]")):
            found = made.decode(walk(grammars, structure), skip_special_tokens=False)
            assert (found[:-1] if structure.kind == "regex" else found) == said, (structure, found)


@pytest.mark.parametrize("how", [*OTHERWISE, "sign for a space"])
def test_text_is_not_what_the_tokenizer_would_make_of_it(how: str, model: Path) -> None:
    made = Tokenizer.from_file(str(model / "tokenizer.json")) if how in OTHERWISE else sentencepiece()
    OTHERWISE.get(how, lambda made: None)(made)
    grammars = Grammars(made.to_str(), eos_token_ids=[EOS], vocab_size=made.get_vocab_size())
    # Letters as macOS writes them in names of files, an ohm sign, a letter as keyboards for Hindi write it, bars.
    for said in ("a he", "  12 a", "cafe\u0301", "10 \u2126", "\u095c", "A\u212b", "▁▂▃", "a▁ ▁▁  a"):
        for structure in (
            Structure("choice", json.dumps([said])),
            Structure("regex", f"{said}[ab]"),
            Structure("json_schema", json.dumps({"const": said})),
        ):
            ids = walk(grammars, structure)
            found = made.decode(ids, skip_special_tokens=False)
            found = json.loads(found) if structure.kind == "json_schema" else found
            assert (found[:-1] if structure.kind == "regex" else found) == said, (structure, found)


def test_what_has_no_end_is_gone_over_once() -> None:
    """Where each quote is looked at to the end of the line, this takes minutes."""
    special = SpecialTokens({"added_tokens": [{"content": "<a>", "id": 7}]})
    for letters in ('\\"', "/", '"', "<", "</", '<"', "#<", "<a", "\\/"):
        text = letters * (200_000 // len(letters))
        assert special.by_id(text + "\n <a>") == text + "\n <[7]>"
