"""Detokenisation against the library's own decode, and stop strings against a scan of the whole text."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models

from isthmus_runtime.errors import ConfigError
from isthmus_runtime.openai.detokenizer import TextStream
from isthmus_runtime.openai.pieces import Pieces
from isthmus_runtime.request import TokenLogprobs


@pytest.fixture(scope="module")
def byte_level(model_dir):
    return HfTokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def sentencepiece():
    """As in Llama 2: U+2581 for the space, bytes for what is missing, first space of a text dropped."""
    words = ["▁", "▁the", "▁fox", "t", "h", "e", "o", "x", "ing", "é", "▁▁", ".", "\n"]
    vocab = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    tokenizer = HfTokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def pieces_of(tokenizer) -> Pieces:
    special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    return Pieces(tokenizer, json.loads(tokenizer.to_str())["decoder"], frozenset(special))


def split(ids, cuts):
    edges = sorted({min(c, len(ids)) for c in cuts} | {0, len(ids)})
    return [ids[a:b] for a, b in pairwise(edges)]


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 399), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=8))
def test_any_bytes_in_any_portions_give_the_librarys_text(byte_level, ids, cuts):
    ids = [i for i in ids if i < byte_level.get_vocab_size()]
    stream = TextStream(pieces_of(byte_level))
    text = "".join(stream.push(part) for part in split(ids, cuts)) + stream.finish()
    assert text == byte_level.decode(ids, skip_special_tokens=True)


@settings(max_examples=200)
@given(text=st.text(alphabet="the fox.éß日本🙂🚀‍\n", max_size=30))
def test_whole_characters_only_and_nothing_late(byte_level, text):
    stream = TextStream(pieces_of(byte_level))
    shown = ""
    for token_id in byte_level.encode(text).ids:
        shown += stream.push([token_id])
        assert text.startswith(shown)  # in particular no U+FFFD
    assert shown == text and stream.finish() == ""


@settings(max_examples=200)
@given(text=st.text(alphabet="thefox ing.é日🙂\n", max_size=30))
def test_sentencepiece_continues_a_prompt(sentencepiece, text):
    prompt = sentencepiece.encode("▁the").ids
    ids = sentencepiece.encode(text.replace(" ", "▁")).ids
    stream = TextStream(pieces_of(sentencepiece))
    got = "".join(stream.push([i]) for i in ids) + stream.finish()
    assert got == text == sentencepiece.decode(prompt + ids)[len(sentencepiece.decode(prompt)) :]


def test_invalid_bytes_without_end_stay_linear(byte_level):
    """A run of continuation bytes never becomes a character: it must not pile up."""
    pieces = pieces_of(byte_level)
    bad = next(i for i in range(400) if pieces.of(i) == b"\x80")
    stream = TextStream(pieces)
    assert [stream.push([bad]) for _ in range(1000)] == ["\ufffd"] * 1000


def test_unknown_decoder_is_refused_by_name(byte_level):
    with pytest.raises(ConfigError, match="decoder 'WordPiece' is not supported"):
        Pieces(byte_level, {"type": "WordPiece"}, frozenset())


class Letters:
    """Pieces of a made-up vocabulary."""

    def __init__(self, words):
        self.words = words

    def of(self, token_id):
        return self.words[token_id]


def cut_by_scan(text, stops):
    """Reference: grow the text by a character at a time and look at its end."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


words_of_ab = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=15)


@settings(max_examples=500)
@given(
    words=words_of_ab,
    stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=16),
    step=st.integers(1, 4),
)
def test_stop_strings_cut_exactly(words, stops, step):
    expected, stopped = cut_by_scan("".join(words), stops)
    stream = TextStream(Letters([w.encode() for w in words]), stops)
    got = ""
    for at in range(0, len(words), step):
        got += stream.push(range(at, min(at + step, len(words))))
        assert expected.startswith(got)  # nothing is shown that is taken back later
        if stream.stopped:
            break
    got += stream.finish()
    assert (got, stream.stopped) == (expected, stopped)


@settings(max_examples=300)
@given(words=words_of_ab, stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=2))
def test_logprobs_travel_with_their_text(words, stops):
    stream = TextStream(Letters([w.encode() for w in words]), stops, logprobs=True)
    got, taken = "", []
    for i in range(len(words)):
        got += stream.push([i], [TokenLogprobs(i, -1.0)])
        taken += stream.take_logprobs()
        assert (
            "".join(words[e.token_id] for e in taken).startswith(got)
            or stream.stopped
            or got.startswith("".join(words[e.token_id] for e in taken))
        )
        if stream.stopped:
            break
    got += stream.finish()
    taken += stream.take_logprobs()
    ids = [e.token_id for e in taken]
    assert ids == list(range(len(ids)))
    whole = "".join(words[i] for i in ids)
    assert whole.startswith(got)
    if not stream.stopped:
        assert whole == got
    elif ids:
        assert len(whole) - len(words[ids[-1]]) < len(got)  # no token that lies behind the cut


def test_logprobs_of_half_a_character_wait_for_it():
    emoji = "🙂".encode()
    stream = TextStream(Letters([emoji[:2], emoji[2:]]), logprobs=True)
    assert stream.push([0], [TokenLogprobs(0, -1.0)]) == "" and stream.take_logprobs() == []
    assert stream.push([1], [TokenLogprobs(1, -1.0)]) == "🙂" and len(stream.take_logprobs()) == 2
