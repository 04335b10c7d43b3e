"""Turns a GGUF file into a Hugging Face directory of safetensors: once, before serving.

Quantised weights are expanded and rounded to bf16, as the models they were made from; unquantised ones keep their
precision. The directory appears whole or not at all.
"""

from __future__ import annotations

import glob
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import WeightsError
from ..models.base import ModelSpec
from ..models.gguf_format import GgufFormat, GgufHeader
from ..models.registry import gguf_formats, parse_model_spec
from .gguf_header import Stored, scan_header
from .gguf_tokenizer import Tokenizer, read_tokenizer
from .provenance import MARKER, sha256_of

# Raise it when the import writes something else for the same file: earlier imports are then redone.
_FORMAT = 3
# safetensors files of at most this size, so that a large model loads and uploads in parts.
_SHARD_BYTES = 5 << 30

Progress = Callable[[str], None]
Place = tuple[str, int | None]
"""A tensor's name in a file, and which of the stacked ones it is."""
_Judged = tuple[dict[str, Stored], GgufFormat, Tokenizer, dict[str, Any], ModelSpec, dict[str, Place]]


def import_gguf(source: Path, out: Path, progress: Progress) -> bool:
    """Write `out` from the GGUF file `source`; False when `out` already is the import of this very file.

    Raises WeightsError for a bad or unsupported file, or an `out` that holds something else; nothing is left behind.
    """
    judged, marker = _look(source, [out], progress)
    return _import(source, out, judged, marker, progress)


def import_under(source: Path, folder: Path, progress: Progress) -> Path:
    """Import `source` to a folder of its own in `folder`, which is returned: by its name and what it holds, so that no
    import of another file is replaced, which may be in use. Errors as of `import_gguf`."""
    judged, marker = _look(source, folder.glob(f"{glob.escape(source.stem)}-*"), progress)
    held = sha256(f"{_FORMAT} {marker['sha256']}".encode()).hexdigest()
    out = folder / f"{source.stem}-{held[:12]}"
    _import(source, out, judged, marker, progress)
    return out


def _look(source: Path, known: Iterable[Path], progress: Progress) -> tuple[_Judged | None, dict[str, Any]]:
    """What `source` holds, and its marker. None in place of the one where an import of it may be among `known`."""
    if not source.is_file():
        raise WeightsError(f"{source} is not a file")
    scan = scan_header(source)
    _family(GgufHeader(source=str(source), metadata=scan.metadata, tensors=frozenset(scan.tensors)))
    # Hashing reads the whole file: not before its header was found good, nor twice where it is imported already.
    judged = None if any((out / MARKER).is_file() for out in known) else _judge(source)
    progress(f"hashing {source.name}")
    return judged, {"format": _FORMAT, "source": source.name, "sha256": sha256_of(source)}


def _import(source: Path, out: Path, judged: _Judged | None, marker: Mapping[str, Any], progress: Progress) -> bool:
    if _is_done(out, marker):
        progress(f"{out} already holds this import")
        return False
    tensors, form, tokenizer, config, spec, names = judged or _judge(source)

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        # mkdtemp makes it private to this user; a model directory is as readable as its parent.
        partial.chmod(0o755)
        dtype = _write_weights(partial, spec, form, names, tensors, source, progress)
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
        ends = list(tokenizer.eos)
        generation = {
            "bos_token_id": tokenizer.bos,
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "pad_token_id": tokenizer.pad,
        }
        for file, content in (
            ("config.json", config),
            ("generation_config.json", {key: value for key, value in generation.items() if value is not None}),
            ("tokenizer.json", tokenizer.tokenizer),
            ("tokenizer_config.json", tokenizer.tokenizer_config),
        ):
            _write_json(partial / file, content)
        _write_json(partial / MARKER, {**marker, "files": {path.name: _size(path) for path in partial.iterdir()}})
        for path in partial.iterdir():
            path.chmod(0o644)
        _replace(partial, out, marker)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    progress(f"wrote {out}")
    return True


def _judge(source: Path) -> _Judged:
    """Tensors, format, tokenizer, config.json, its model, and where each of its tensors is.

    Raises WeightsError when the file's header describes no model that can be imported.
    """
    scan = scan_header(source, arrays=True)
    tensors = scan.tensors
    header = GgufHeader(
        source=str(source),
        metadata=scan.metadata,
        tensors=frozenset(tensors),
        numbers=lambda name: [float(value) for value in np.array(tensors[name].read(source), np.float32)],
    )
    architecture, form = _family(header)
    tokenizer, config = _describe(header, architecture, form, tensors)
    spec = parse_model_spec(config, {}, source=str(source))
    return tensors, form, tokenizer, config, spec, _match(spec, form, tensors, str(source))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    # Piece by piece: of a large vocabulary they would take gigabytes together.
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def _is_done(out: Path, marker: Mapping[str, Any]) -> bool:
    """Whether `out` holds this import. WeightsError when it holds what we must not overwrite."""
    if not out.exists():
        return False
    try:
        held = json.loads((out / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        if out.is_dir() and not any(out.iterdir()):
            return False
        raise WeightsError(
            f"{out} exists but was not made by `model import`; remove it or name another --out"
        ) from None
    return (
        isinstance(held, dict)
        and all(held.get(key) == marker[key] for key in ("format", "sha256"))
        and all(_size(out / name) == size for name, size in held["files"].items())
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _replace(partial: Path, out: Path, marker: Mapping[str, Any]) -> None:
    if _is_done(out, marker):
        # Another process imported the same file meanwhile.
        shutil.rmtree(partial)
    elif out.exists():
        # A directory cannot be replaced in one step: the old one steps aside, and comes back if the rename fails.
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
        out.rename(aside / "old")
        try:
            partial.rename(out)
        except OSError:
            (aside / "old").rename(out)
            raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    else:
        partial.rename(out)


def _family(header: GgufHeader) -> tuple[str, GgufFormat]:
    """Our name of the file's architecture, and how it is stored."""
    known = gguf_formats()
    arch = header.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in known:
        raise WeightsError(
            f"{header.source}: general.architecture {arch!r} is not supported; known: {', '.join(known)}"
        )
    return known[arch]


def _describe(
    header: GgufHeader, architecture: str, form: GgufFormat, tensors: Mapping[str, Stored]
) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and the model's config.json (without its dtype)."""
    meta, source, value, arch = header.metadata, header.source, header.value, form.architecture
    heads, hidden = value("attention.head_count"), value("embedding_length")
    if heads < 1:
        raise WeightsError(f"{source}: {arch}.attention.head_count is {heads}; a model has one head or more")
    head_dim = meta.get(f"{arch}.attention.key_length") or hidden // heads
    rope_scaling = None if form.own_rope else _rope_scaling(header, head_dim)
    context = value("context_length")
    tokenizer = read_tokenizer(meta, source=source, max_length=context)
    embedding = tensors.get("token_embd.weight")
    vocab = embedding.shape[0] if embedding is not None else tokenizer.vocab_size
    if tokenizer.vocab_size > vocab:
        raise WeightsError(f"{source}: {tokenizer.vocab_size} tokens, but token_embd.weight has {vocab} rows")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": arch,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        # GGUF keeps it as fp32; the shortest text that gives the same fp32 is what was meant.
        "rms_norm_eps": float(str(np.float32(value("attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(value("rope.freq_base", 10000.0)),
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eos[0] if len(tokenizer.eos) == 1 else list(tokenizer.eos) or None,
        "pad_token_id": tokenizer.pad,
        "use_cache": True,
        **form.config(header),
    }
    return tokenizer, config


def _rope_scaling(header: GgufHeader, head_dim: int) -> dict[str, Any] | None:
    """`rope_scaling` of a family without rules of its own. WeightsError for what nothing here reads."""
    source, arch = header.source, header.metadata["general.architecture"]
    rotary = header.value("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise WeightsError(f"{source}: {arch}.rope.dimension_count {rotary} differs from the head size {head_dim}")
    kind, factor = header.value("rope.scaling.type", "none"), header.value("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise WeightsError(f"{source}: {arch}.rope.scaling.type {kind!r} is not supported; known: none, linear, yarn")
    if factor != 1.0:
        raise WeightsError(f"{source}: {arch}.rope.scaling.attn_factor {factor} is not supported; known: 1")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": float(header.value("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = header.value("rope.scaling.original_context_length")
    return scaling


def _match(spec: ModelSpec, form: GgufFormat, tensors: Mapping[str, Stored], source: str) -> dict[str, Place]:
    """Where every tensor is that config.json asks for. WeightsError lists what is missing, misshapen or left."""
    places = {name: form.place(name) for name in spec.tensor_shapes()}
    wanted: dict[str, tuple[int, ...]] = {}
    for name, shape in spec.tensor_shapes().items():
        theirs, index = places[name]
        # Of stacked experts the last says how many there are.
        wanted[theirs] = shape if index is None else (index + 1, *shape)
    problems: list[str] = []
    for theirs, shape in wanted.items():
        tensor = tensors.get(theirs)
        if tensor is None:
            problems.append(f"{source}: tensor {theirs} {list(shape)} is missing")
            continue
        if tensor.shape != shape:
            problems.append(f"{source}: tensor {theirs} has shape {list(tensor.shape)}, expected {list(shape)}")
    for name in sorted(tensors.keys() - wanted.keys() - set(form.extra_tensors)):
        problems.append(f"{source}: tensor {name} is not part of {form.architecture}")
    if problems:
        raise WeightsError(problems[:8])
    return places


def _write_weights(
    folder: Path,
    spec: ModelSpec,
    form: GgufFormat,
    names: Mapping[str, Place],
    tensors: Mapping[str, Stored],
    source: Path,
    progress: Progress,
) -> torch.dtype:
    """Write the weights, in shards if they are large; the dtype of the matrices."""
    shards: list[dict[str, Tensor]] = [{}]
    size, total = 0, 0
    where: dict[str, int] = {}
    written: list[Path] = []
    matrices = torch.bfloat16
    step = max(1, len(names) // 4)

    def flush() -> None:
        written.append(folder / f"part-{len(written)}.safetensors")
        save_file(shards[-1], written[-1], metadata={"format": "pt"})
        shards[-1] = {}

    for number, (name, (theirs, index)) in enumerate(names.items()):
        tensor = form.restore(spec, name, _tensor(tensors[theirs], index, source)).contiguous()
        if tensor.dim() == 2:
            matrices = torch.promote_types(matrices, tensor.dtype) if tensor.dtype != torch.float16 else tensor.dtype
        if size and size + tensor.nbytes > _SHARD_BYTES:
            flush()
            size = 0
        shards[-1][name] = tensor
        where[name] = len(written)
        size += tensor.nbytes
        total += tensor.nbytes
        if number % step == step - 1:
            progress(f"expanded {number + 1} of {len(names)} tensors")
    flush()
    if len(written) == 1:
        written[0].rename(folder / "model.safetensors")
        return matrices
    final = [f"model-{number + 1:05}-of-{len(written):05}.safetensors" for number in range(len(written))]
    for path, target in zip(written, final, strict=True):
        path.rename(folder / target)
    listing = {
        "metadata": {"total_size": total},
        "weight_map": {name: final[number] for name, number in where.items()},
    }
    _write_json(folder / "model.safetensors.index.json", listing)
    return matrices


def _tensor(tensor: Stored, index: int | None, source: Path) -> Tensor:
    kind, data, shape = tensor.kind, tensor.read(source), tensor.shape
    if index is not None:
        data, shape = data[index], shape[1:]
    kinds = gguf.GGMLQuantizationType
    if kind == kinds.F16:
        values = torch.from_numpy(np.array(data, np.float16))
    elif kind == kinds.F32:
        values = torch.from_numpy(np.array(data, np.float32))
    else:
        try:
            expanded: npt.NDArray[np.float32] = gguf.dequantize(data, kind)
        except NotImplementedError as e:
            raise WeightsError(f"{source}: tensor {tensor.name} has type {kind.name}, which cannot be read: {e}") from e
        values = torch.from_numpy(np.ascontiguousarray(expanded)).to(torch.bfloat16)
    return values.reshape(shape)
