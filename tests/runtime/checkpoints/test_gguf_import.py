"""GGUF to a Hugging Face directory: weights, configuration, tokenizer, and files that must be refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from isthmus_runtime.checkpoints.provenance import MARKER
from isthmus_runtime.commands.model import model_main
from isthmus_runtime.models.registry import read_model_spec

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

Edit = Callable[["Source"], None]


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {**{b: chr(b) for b in kept}, **{b: chr(256 + i) for i, b in enumerate(moved)}}


class Source:
    """What a small GGUF file will hold; tests change it before it is written."""

    def __init__(self) -> None:
        generator = np.random.default_rng(7)
        self.arch = "llama"
        self.merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2"]
        words = [merge.replace(" ", "") for merge in self.merges]
        self.tokens = ["<|end|>", "<|start|>", "<tool>", *bytes_to_unicode().values(), *words]
        self.types = [3, 3, 4] + [1] * (len(self.tokens) - 3)
        self.model, self.pre, self.template = "gpt2", "smollm", "{{ messages[0]['content'] }}"
        self.add_bos: bool | None = False
        self.ids = {"bos": 1, "eos": 0, "padding": 0}
        self.extra: dict[str, float | str] = {}
        self.quantised: set[str] = set()
        self.tensors: dict[str, np.ndarray] = {}

        def put(name: str, *shape: int) -> None:
            # bf16 numbers, so that expanding and rounding them is exact.
            values = torch.from_numpy(generator.standard_normal(shape).astype(np.float32)).bfloat16().float()
            self.tensors[name] = values.numpy()

        put("token_embd.weight", len(self.tokens), HIDDEN)
        for layer in range(LAYERS):
            put(f"blk.{layer}.attn_norm.weight", HIDDEN)
            put(f"blk.{layer}.attn_q.weight", HEADS * HEAD_DIM, HIDDEN)
            put(f"blk.{layer}.attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN)
            put(f"blk.{layer}.attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN)
            put(f"blk.{layer}.attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
            put(f"blk.{layer}.ffn_norm.weight", HIDDEN)
            put(f"blk.{layer}.ffn_gate.weight", INNER, HIDDEN)
            put(f"blk.{layer}.ffn_up.weight", INNER, HIDDEN)
            put(f"blk.{layer}.ffn_down.weight", HIDDEN, INNER)
        put("output_norm.weight", HIDDEN)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.arch)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(5000.0)
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        writer.add_chat_template(self.template)
        for role, number in self.ids.items():
            writer.add_uint32(f"tokenizer.ggml.{role}_token_id", number)
        if self.add_bos is not None:
            writer.add_add_bos_token(self.add_bos)
        for key, value in self.extra.items():
            (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
        for name, values in self.tensors.items():
            if name in self.quantised:
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def convert(source: Source, tmp_path: Path) -> Path:
    out = tmp_path / "models" / "tiny"
    assert model_main(["import", str(source.write(tmp_path / "tiny.gguf")), "--out", str(out)]) == 0
    return out


def refusal(source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a failed import says; it must leave nothing behind."""
    before = sorted(out.parent.glob("**/*"), key=str) if out.parent.exists() else []
    assert model_main(["import", str(source), "--out", str(out)]) == 1
    assert (sorted(out.parent.glob("**/*"), key=str) if out.parent.exists() else []) == before
    return capsys.readouterr().err


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows, as its converter defines it."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def test_weights_survive_exactly_and_unpermuted(tmp_path: Path) -> None:
    source = Source()
    q, k = source.tensors["blk.1.attn_q.weight"], source.tensors["blk.1.attn_k.weight"]
    source.tensors["blk.1.attn_q.weight"] = permute(q, HEADS)
    source.tensors["blk.1.attn_k.weight"] = permute(k, KV_HEADS)
    out = convert(source, tmp_path)
    found = load_file(out / "model.safetensors")
    spec = read_model_spec(out)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == spec.tensor_shapes()
    assert torch.equal(found["model.layers.1.self_attn.q_proj.weight"], torch.from_numpy(q))
    assert torch.equal(found["model.layers.1.self_attn.k_proj.weight"], torch.from_numpy(k))
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.layers.1.self_attn.v_proj.weight", "blk.1.attn_v.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        assert torch.equal(found[ours], torch.from_numpy(source.tensors[theirs]))


def test_configuration(tmp_path: Path) -> None:
    out = convert(Source(), tmp_path)
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == "float32" and config["rms_norm_eps"] == 1e-5
    spec = read_model_spec(out)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_position) == (HEADS, KV_HEADS, HEAD_DIM, 128)
    assert spec.rope.theta == 5000.0 and spec.tie_word_embeddings
    assert spec.eos_token_ids == (0,)
    assert json.loads((out / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def test_quantised_weights_are_rounded_to_bf16_and_norms_kept(tmp_path: Path) -> None:
    source = Source()
    source.quantised = {name for name, values in source.tensors.items() if values.ndim == 2}
    out = convert(source, tmp_path)
    found = load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.dequantize(gguf.quantize(source.tensors["blk.0.ffn_up.weight"], kind), kind)
    weight = found["model.layers.0.mlp.up_proj.weight"]
    assert weight.dtype == torch.bfloat16 and torch.equal(weight, torch.from_numpy(expected).bfloat16())
    assert found["model.norm.weight"].dtype == torch.float32


def test_untied_output_and_linear_rope(tmp_path: Path) -> None:
    source = Source()
    source.tensors["output.weight"] = source.tensors["token_embd.weight"][::-1].copy()
    source.extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    out = convert(source, tmp_path)
    spec = read_model_spec(out)
    assert not spec.tie_word_embeddings and (spec.rope.kind, spec.rope.factor) == ("linear", 4.0)
    found = load_file(out / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"].flip(0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_reads_the_directory(tmp_path: Path) -> None:
    import transformers

    out = convert(Source(), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert model(torch.tensor([[3, 4]])).logits.shape == (1, 2, len(Source().tokens))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|start|>", "<|end|>", "<|end|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"
    assert tokenizer("hello").input_ids == Tokenizer.from_file(str(out / "tokenizer.json")).encode("hello").ids


def test_importing_again_does_nothing_until_the_source_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = convert(Source(), tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    convert(Source(), tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert "already holds this import" in capsys.readouterr().err
    (out / "config.json").unlink()
    convert(Source(), tmp_path)
    assert (out / "config.json").exists(), "an incomplete directory was taken for a finished import"
    changed = Source()
    changed.tensors["output_norm.weight"] *= 2
    convert(changed, tmp_path)
    assert torch.equal(
        load_file(out / "model.safetensors")["model.norm.weight"],
        torch.from_numpy(changed.tensors["output_norm.weight"]),
    )
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_files_of_one_name_have_folders_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is served from the one is not replaced by the other."""
    under, changed, found = tmp_path / "models", Source(), []
    changed.tensors["output_norm.weight"] *= 2
    for name, source in (("a", Source()), ("b", changed), ("a", Source())):
        (tmp_path / name).mkdir(exist_ok=True)
        file = source.write(tmp_path / name / "model [1].gguf")
        assert model_main(["import", str(file), "--under", str(under)]) == 0
        told = capsys.readouterr()
        found.append(Path(told.out.removesuffix("\n")))
        norm = load_file(found[-1] / "model.safetensors")["model.norm.weight"]
        assert torch.equal(norm, torch.from_numpy(source.tensors["output_norm.weight"]))
        assert found[-1].parent == under and found[-1].name.startswith("model [1]-")
    assert found[0] == found[2] != found[1]
    assert "already holds this import" in told.err
    assert sorted(under.iterdir()) == sorted(found[:2])


def test_foreign_directory_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = Source().write(tmp_path / "tiny.gguf")
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("precious")
    assert "was not made by `model import`" in refusal(file, out, capsys)
    (out / "thesis.txt").unlink()
    assert model_main(["import", str(file), "--out", str(out)]) == 0
    assert (out / MARKER).exists()


@pytest.mark.parametrize("keep", [0, 3, 20, 600, 6000, 40_000, -1])
def test_truncated_file(tmp_path: Path, keep: int, capsys: pytest.CaptureFixture[str]) -> None:
    file = Source().write(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    text = refusal(file, tmp_path / "out" / "m", capsys)
    assert "truncated or corrupt" in text or "is not a GGUF file" in text


def test_not_a_gguf_and_not_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.gguf"
    assert "is not a file" in refusal(file, tmp_path / "m", capsys)
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "is not a GGUF file: it starts with b'PK" in refusal(file, tmp_path / "m", capsys)


def test_a_file_without_heads_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    monkeypatch.setitem(globals(), "HEADS", 0)
    assert "llama.attention.head_count is 0" in refusal(source.write(tmp_path / "x.gguf"), tmp_path / "m", capsys)


def _set(**values: Any) -> Edit:
    def edit(source: Source) -> None:
        for name, value in values.items():
            setattr(source, name, value)

    return edit


def _drop(name: str) -> Edit:
    return lambda source: source.tensors.__delitem__(name)


def _put(name: str, *shape: int) -> Edit:
    return lambda source: source.tensors.update({name: np.ones(shape, np.float32)})


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (_set(arch="gpt9"), "general.architecture 'gpt9' is not supported; known: gemma2, gemma3, llama, "),
        (_set(model="t5"), "tokenizer.ggml.model 't5' is not supported; known: gpt2 (byte-level BPE), llama"),
        (_set(pre="chatglm-bpe"), "tokenizer.ggml.pre 'chatglm-bpe' is not supported; known: gpt-2, smollm"),
        (_set(types=[1]), "tokenizer.ggml.token_type has 1 entries"),
        (_set(ids={"eos": 99999}), "tokenizer.ggml.eos_token_id 99999 is outside the vocabulary"),
        (_set(extra={"llama.rope.scaling.type": "longrope"}), "llama.rope.scaling.type 'longrope' is not supported"),
        (_set(extra={"llama.rope.scaling.type": "yarn"}), "metadata llama.rope.scaling.factor is missing"),
        (_set(extra={"llama.rope.scaling.attn_factor": 1.2}), "llama.rope.scaling.attn_factor 1.2"),
        (
            lambda source: source.tensors.update({"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}),
            "which no scaling of Llama 3's kind gives",
        ),
        (_drop("blk.1.ffn_up.weight"), f"tensor blk.1.ffn_up.weight [{INNER}, {HIDDEN}] is missing"),
        (_put("output_norm.weight", 3), f"tensor output_norm.weight has shape [3], expected [{HIDDEN}]"),
        (_put("blk.0.attn_sinks.weight", 3), "tensor blk.0.attn_sinks.weight is not part of llama"),
    ],
)
def test_unsupported_files_are_refused_by_name(
    edit: Edit, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Source()
    edit(source)
    assert text in refusal(source.write(tmp_path / "tiny.gguf"), tmp_path / "out" / "m", capsys)


# ---- tokenizer -------------------------------------------------------------------------------------------------------


def encode_slowly(text: str, source: Source) -> list[int]:
    """Byte-level BPE by its definition, cut as llama.cpp cuts for `smollm`: digits alone, then GPT-2's words."""
    ids = {token: number for number, token in enumerate(source.tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(source.merges)}
    letters = bytes_to_unicode()
    special = [token for token, kind in zip(source.tokens, source.types, strict=True) if kind in (3, 4)]
    result: list[int] = []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            result.append(ids[part])
            continue
        for piece in regex.findall(r"\p{N}|\P{N}+", part):
            for word in regex.findall(GPT2_WORDS, piece):
                pieces = [letters[byte] for byte in word.encode()]
                while True:
                    pairs = [(ranks.get(pair, 1 << 30), i) for i, pair in enumerate(pairwise(pieces))]
                    best = min(pairs, default=(1 << 30, 0))
                    if best[0] == 1 << 30:
                        break
                    pieces[best[1] : best[1] + 2] = ["".join(pieces[best[1] : best[1] + 2])]
                result.extend(ids[piece] for piece in pieces)
    return result


TEXTS = [
    "hello world",
    "hello  worhello\n\n  hello 12 112 3.1412",
    "<|start|>user\nhello<|end|>\n<tool>x",
    "naïve café — 東京 🎉 ½ ٣٤",
    "I'll don't THEY'RE 's\t\ttabs",
    "   ",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_follows_the_definition(text: str, tmp_path: Path) -> None:
    source = Source()
    tokenizer = Tokenizer.from_file(str(convert(source, tmp_path) / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids == encode_slowly(text, source)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(("add_bos", "first"), [(True, [1]), (False, []), (None, [])])
def test_beginning_of_sequence_as_the_file_says(add_bos: bool | None, first: list[int], tmp_path: Path) -> None:
    source = Source()
    source.add_bos = add_bos
    tokenizer = Tokenizer.from_file(str(convert(source, tmp_path) / "tokenizer.json"))
    plain = tokenizer.encode("hello", add_special_tokens=False).ids
    assert tokenizer.encode("hello").ids == first + plain
    config = json.loads((tmp_path / "models/tiny/tokenizer_config.json").read_text())
    assert config["add_bos_token"] == bool(add_bos)


def test_control_tokens_are_special_and_user_tokens_are_not(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(convert(Source(), tmp_path) / "tokenizer.json"))
    assert tokenizer.decode([1, 2, 0]) == "<tool>"


def test_end_of_turn_is_a_second_end(tmp_path: Path) -> None:
    source = Source()
    source.ids = {"eos": 0, "eot": 1}
    assert read_model_spec(convert(source, tmp_path)).eos_token_ids == (0, 1)


def test_fetch_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A port nobody listens on: an unreachable hub, without leaving this machine.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out" / "m"
    assert model_main(["fetch", "hf://owner/name", str(out)]) == 1
    assert "the hub could not be reached for owner/name at main" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
    assert model_main(["fetch", "hf://not//valid", str(out)]) == 1
    assert "is not a hub id" in capsys.readouterr().err
    out.mkdir()
    (out / "x").touch()
    assert model_main(["fetch", "hf://owner/name", str(out)]) == 1
    assert "does not hold a complete model" in capsys.readouterr().err
