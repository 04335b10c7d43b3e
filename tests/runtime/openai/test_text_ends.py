"""Special tokens around a text are those that transformers' class of the model adds."""

from __future__ import annotations

import json
import logging

import pytest
from small_bpe import byte_level_bpe
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

from isthmus_runtime.openai.tokenizer import Tokenizer

TEXT = "some words"
SPECIAL = ["<|begin|>", "<|end|>"]
POSTS = {"none": "$A", "ends": "$A <|end|>", "both": "<|begin|> $A <|end|>"}
SETTINGS = [(None, None), (True, None), (False, False), (True, True), (None, True)]
KINDS = [
    ("LlamaTokenizer", ""),
    ("LlamaTokenizerFast", "qwen2"),
    ("GemmaTokenizer", ""),
    ("CohereTokenizerFast", ""),
    ("GPTNeoXTokenizer", ""),
    ("Qwen2Tokenizer", "qwen3"),
    ("PreTrainedTokenizerFast", "llama"),
    (None, "llama"),
    (None, "qwen3"),
]


def folder(root, kind, model_type, post, begins, ends):
    made = byte_level_bpe([TEXT], special=SPECIAL)
    ids = [(text, made.token_to_id(text)) for text in SPECIAL]
    made.post_processor = Sequence([ByteLevel(trim_offsets=False), TemplateProcessing(POSTS[post], None, ids)])
    root.mkdir(parents=True)
    made.save(str(root / "tokenizer.json"))
    settings = {"tokenizer_class": kind, "add_bos_token": begins, "add_eos_token": ends}
    config = {name: value for name, value in settings.items() if value is not None}
    named = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "unk_token": SPECIAL[1], "legacy": False}
    (root / "tokenizer_config.json").write_text(json.dumps(named | config))
    model = {"model_type": model_type} if model_type else {}
    (root / "config.json").write_text(json.dumps({"vocab_size": made.get_vocab_size(), **model}))
    return root


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model_type"), KINDS)
def test_they_are_those_of_transformers(kind, model_type, tmp_path):
    from transformers import AutoTokenizer

    logging.getLogger("transformers").setLevel(logging.ERROR)
    for post in POSTS:
        for begins, ends in SETTINGS:
            root = folder(tmp_path / f"{post}-{begins}-{ends}", kind, model_type, post, begins, ends)
            right = AutoTokenizer.from_pretrained(root)(TEXT)["input_ids"]
            ours = Tokenizer.load(root)
            assert ours.encode(TEXT) == right, (post, begins, ends)
            assert ours.encode_end(TEXT, 2) == right[-2:]
            assert ours.encode_alone(TEXT) == [one for one in right if one > 1]


def test_a_text_to_embed_ends_with_the_token_that_is_pooled(tmp_path):
    """As Qwen3-Embedding's files have it, and E5-Mistral's."""
    for kind, settings in (("Qwen2Tokenizer", (False, None)), ("LlamaTokenizer", (True, True))):
        ours = Tokenizer.load(folder(tmp_path / kind, kind, "", "ends", *settings))
        ids = ours.encode(TEXT)
        assert ids[-1] == ours.control_id("<|end|>") and ids.count(ids[-1]) == 1
        assert (ids[0] == ours.control_id("<|begin|>")) == (kind == "LlamaTokenizer")


def test_engines_of_the_same_ids_have_the_same_digest_and_others_do_not(tmp_path):
    """Of tokenizers whose texts end as they did in earlier versions it is what it was."""
    plain = Tokenizer.load(folder(tmp_path / "a", "Qwen2Tokenizer", "", "none", False, None))
    also = Tokenizer.load(folder(tmp_path / "b", "LlamaTokenizer", "", "none", False, False))
    ends = Tokenizer.load(folder(tmp_path / "c", "LlamaTokenizer", "", "none", False, True))
    assert plain.encode(TEXT) == also.encode(TEXT) != ends.encode(TEXT)
    assert len({plain.digest, ends.digest}) == 2
