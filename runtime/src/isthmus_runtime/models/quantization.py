"""How a checkpoint's weights are quantised: `quantization_config` of a `config.json`. Torch-free.

Weights are expanded when they are loaded (`checkpoints/quantized.py`), so what counts is how they are stored; keys
about activations and about how the quantisation was made change nothing here. All others are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from .json_reader import JsonReader

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq", "mxfp4")
# Which layers stay as they are is what the checkpoint's tensors say.
_LEFT = ("modules_to_not_convert", "ignored_layers", "ignore")
# How the calibration went, and how other engines run it.
_GPTQ_NOTES = (
    "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_percent", "damp_auto_increment",
    "dataset", "desc_act", "exllama_config", "hyb_act", "max_input_length", "meta", "mse", "model_file_base_name",
    "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "pad_token_id", "quantizer", "static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama",
)  # fmt: skip
_COMPRESSED_NOTES = ("global_compression_ratio", "quantization_status", "version", "sparsity_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How weights are stored.

    Fields:
        method: `fp8` (8-bit floats times a scale per tensor, row or block), `awq`, `gptq` (whole numbers less a zero,
            times a scale, both per group of inputs and output) or `mxfp4` (4-bit floats times a power of two per 32).
        bits: of a whole number.
        group_size: inputs that share scale and zero; None: all.
        zero_offset: what was taken off the zeros before they were stored.
        block: fp8's block, rows and columns, where scales are per block.
    """

    method: str
    bits: int = 8
    group_size: int | None = None
    zero_offset: int = 0
    block: tuple[int, int] | None = None


def read_quantization(read: JsonReader) -> Quantization:
    """The record of a `quantization_config`."""
    method = read.text("quant_method", "")
    if method not in METHODS:
        read.problem("quant_method", f"{method!r} is not supported; known: {', '.join(METHODS)}")
        return Quantization(method="fp8")
    found = _READERS[method](read)
    for key in _LEFT:
        read.get(key)
    read.refuse_unread(f"{method} checkpoints")
    return found


def _fp8(read: JsonReader) -> Quantization:
    read.only("fmt", "e4m3")
    for key in ("activation_scheme", "activation_scale_ub"):
        read.get(key)
    sizes = read.get("weight_block_size")
    if sizes is None:
        return Quantization(method="fp8")
    rows, columns = (int(size) for size in read.numbers("weight_block_size", 2))
    return Quantization(method="fp8", block=(max(1, rows), max(1, columns)))


def _compressed(read: JsonReader) -> Quantization:
    read.only("format", "float-quantized")
    read.only("kv_cache_scheme")
    for key in _COMPRESSED_NOTES:
        read.get(key)
    groups, block = read.inner("config_groups"), None
    for name in groups.names():
        group = groups.inner(name)
        group.only("format", "float-quantized")
        for key in ("input_activations", "output_activations", "targets"):
            group.get(key)
        weights = group.inner("weights")
        weights.only("num_bits", 8)
        weights.only("type", "float")
        weights.only("strategy", "tensor", "channel", "block")
        weights.only("symmetric", True)
        for key in ("dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
            weights.get(key)
        if weights.get("block_structure") is not None:
            rows, columns = (int(size) for size in weights.numbers("block_structure", 2))
            block = (max(1, rows), max(1, columns))
        weights.refuse_unread("compressed-tensors weights")
        group.refuse_unread("compressed-tensors groups")
    return Quantization(method="fp8", block=block)


def _awq(read: JsonReader) -> Quantization:
    read.only("bits", 4)
    read.only("version", "gemm", "GEMM")
    read.only("zero_point", True)
    read.only("backend", "autoawq")
    read.get("do_fuse")
    return Quantization(method="awq", bits=4, group_size=_group_size(read))


def _gptq(read: JsonReader) -> Quantization:
    read.only("bits", 2, 4, 8)
    read.only("checkpoint_format", "gptq", "gptq_v2")
    read.only("is_marlin_format", False)
    read.only("lm_head", False)
    read.only("pack_dtype", "int32")
    for key in _GPTQ_NOTES:
        read.get(key)
    # The first format stores zeros less 1.
    offset = 0 if read.get("checkpoint_format") == "gptq_v2" else 1
    return Quantization(method="gptq", bits=read.integer("bits"), group_size=_group_size(read), zero_offset=offset)


def _group_size(read: JsonReader) -> int | None:
    return None if read.get("group_size") == -1 else read.integer("group_size", 128)


def _mxfp4(read: JsonReader) -> Quantization:
    read.get("dequantize")
    return Quantization(method="mxfp4", bits=4, group_size=32)


_READERS = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
