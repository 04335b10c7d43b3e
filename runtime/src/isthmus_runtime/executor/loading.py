"""Reads a model's weights to a device and makes its scratch: all that is there before there is a KV pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import torch

from isthmus_kernels import batch_invariance, dispatch_weights

from ..checkpoints.fp8 import Fp8Weights
from ..checkpoints.mxfp4 import Mxfp4Source, Mxfp4Weights
from ..checkpoints.quantized import Expanded, scheme_of
from ..checkpoints.safetensors import Checkpoint
from ..config import ModelConfig, SchedulerConfig
from ..errors import ConfigError, EngineFailed
from ..kv.groups import LayerSpec
from ..lora_config import LoraConfig
from ..models.base import Model, ModelSpec, TensorSource, check_shards
from ..models.pooling import Pooling, read_task
from ..models.registry import read_model_spec
from ..models.shard import WHOLE, Shard
from ..request import GENERATES, ServedTask
from .adapters import AdapterSlots
from .device.base import KV_DTYPES, KV_NAMES, Device
from .device.select import open_device
from .weights import on_device

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights and scratch in memory, before there is a KV pool."""

    spec: ModelSpec
    model: Model
    device: Device
    workspace: Any
    """The model's scratch, for the scheduler's largest step."""
    kv_auto: torch.dtype
    """The pool's element type where none is asked for."""
    shard: Shard = WHOLE
    """Which part of the model this is."""
    adapters: AdapterSlots | None = None
    """Low-rank adapters, if there may be any."""
    kv_variants: tuple[str, ...] = ()
    """What the keys depend on besides weights, layout and element type."""
    task: ServedTask = GENERATES
    pooling: Pooling | None = None
    """How prompts become embeddings; None: they do not."""

    def kv_dtype(self, kv_dtype: str) -> torch.dtype:
        """The pool's element type for `--kv-dtype`."""
        if kv_dtype == "auto":
            return self.kv_auto
        if kv_dtype not in KV_DTYPES:
            raise ConfigError(f"--kv-dtype {kv_dtype!r} is not supported; known: auto, {', '.join(KV_DTYPES)}")
        dtype = KV_DTYPES[kv_dtype]
        if dtype == torch.float8_e4m3fn:
            self._check_fp8_kv()
        return dtype

    def _check_fp8_kv(self) -> None:
        reasons = []
        if not self.device.reads_fp8:
            reasons.append(f"{self.device.name} does not read it (a GPU of compute capability 8.9 or newer, or a CPU)")
        if any(layer.width is not None for layer in self.spec.layer_specs(1, "bf16")):
            reasons.append(f"the latents of {self.spec.architecture} are kept as they are")
        if self.spec.head_dim % 2:
            reasons.append(f"heads of {self.spec.head_dim} numbers leave its scales between addresses of fp32")
        if reasons:
            raise ConfigError(f"--kv-dtype fp8: {'; '.join(reasons)}; use auto (engine.kvCache.dtype)")

    def draw_bytes(self, scheduler: SchedulerConfig) -> int:
        """About what the largest draw takes beside the pool: logits of all rows and, with filters, a score and a token
        for each of them."""
        rows = min(scheduler.max_num_seqs, scheduler.max_batched_tokens)
        return 3 * torch.float32.itemsize * rows * self.spec.vocab_size

    def layer_specs(self, block_size: int, kv_dtype: str) -> tuple[LayerSpec, ...]:
        """What `kv.plan` needs to know about the layers of one rank."""
        return self.spec.layer_specs(block_size, KV_NAMES[self.kv_dtype(kv_dtype)], self.shard.size)


@contextmanager
def starting(device: Device, what: str) -> Iterator[None]:
    """Whoever starts an engine is told in a line why its card cannot run it: ConfigError if `what` does not fit,
    EngineFailed if the card is lost."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise ConfigError(f"{what} does not fit: {device.explain(e)}") from e
    except torch.AcceleratorError as e:
        raise EngineFailed(f"the engine did not start: {device.explain(e)}") from e


SourceFactory = Callable[[ModelSpec, torch.device], TensorSource]


def load(
    config: ModelConfig,
    scheduler: SchedulerConfig | None = None,
    *,
    device: Device | None = None,
    source: SourceFactory | None = None,
    shard: Shard = WHOLE,
    lora: LoraConfig | None = None,
) -> LoadedModel:
    """Read, check and pack a rank's part of the weights of `config.path`. Raises WeightsError or ConfigError.

    `device` instead of the one that `config` names; `source` instead of the directory's safetensors.
    """
    start = perf_counter()
    spec, served = read_model_spec(config.path), read_task(config.path, config.task)
    if served.pooling is not None:
        # Without a head of its own: what it would give, nobody asks for, and such checkpoints leave it out.
        spec = replace(spec, tie_word_embeddings=True)
    check_shards(spec, shard.size)
    device = device or open_device(
        config.device, threads=config.threads, index=shard.rank, deterministic=config.deterministic
    )
    if config.deterministic:
        _check_deterministic(spec, device)
    device.enter()
    dtype = device.dtype(config.dtype)
    _check_quantization(config, device, dtype)
    scheduler = scheduler or SchedulerConfig()
    with starting(device, config.path), torch.inference_mode():
        if source is not None:
            model, fp8, mxfp4 = _build(spec, config, device, dtype, source(spec, device.torch_device), shard)
        else:
            model, fp8, mxfp4 = _read(spec, config, device, dtype, shard)
        most = max((scheduler.max_batched_tokens, *device.graph_sizes(scheduler.max_num_seqs)[-1:]))
        max_len = min(spec.max_position, scheduler.max_model_len or spec.max_position)
        workspace = model.workspace(most, max_len)
        adapters = AdapterSlots(model, device, lora) if lora is not None and lora.max_loras else None
    _LOG.info(
        "loaded %s from %s to %s: %.0f MB of weights, %s%s%s, %.2f s",
        spec.architecture,
        config.path,
        device.name,
        model.weight_bytes / 1e6,
        dtype,
        " and 8-bit floats" if fp8 else "",
        " and 4-bit floats" if mxfp4 else "",
        perf_counter() - start,
    )
    # A compute dtype that was asked for is the same in every engine of a service. One that the machine decided need
    # not be, and prefill and decode must agree on their KV.
    kv_auto = torch.float32 if config.dtype == "auto" and device.dtype_varies else dtype
    # KV that another engine computed as its batch had it would undo the promise.
    marked = ("rows:alike",) if config.deterministic and device.name != "cpu" else ()
    return LoadedModel(
        spec=spec,
        model=model,
        device=device,
        workspace=workspace,
        kv_auto=kv_auto,
        shard=shard,
        adapters=adapters,
        kv_variants=(*spec.kv_variants(max_len), *(("weights:fp8",) if fp8 else ()), *marked),
        task=served.task,
        pooling=served.pooling,
    )


def _check_deterministic(spec: ModelSpec, device: Device) -> None:
    if device.torch_device.type == "cpu":
        return
    if not spec.row_invariant:
        raise ConfigError(
            f"--deterministic on: {spec.architecture} has operations whose results depend on the batch on "
            f"{device.name}; leave it out"
        )
    # Else whoever opened it left it out, and rows would depend on their batch without a word.
    assert batch_invariance.required(device.torch_device), f"{device.name} was not opened as deterministic"


def _check_quantization(config: ModelConfig, device: Device, dtype: torch.dtype) -> None:
    if config.quantization != "fp8":
        return
    problems = []
    if not device.multiplies_fp8:
        problems.append(f"{device.name} has no products of 8-bit floats (a GPU of compute capability 8.9 or more has)")
    if dtype != torch.bfloat16:
        problems.append(f"activations are bfloat16 then, but --dtype {config.dtype} is {dtype} here")
    if problems:
        raise ConfigError(f"--quantization fp8: {'; '.join(problems)}; leave it at auto")


class _Built(NamedTuple):
    model: Model
    fp8: bool = False
    """Some of its matrices are 8-bit floats."""
    mxfp4: bool = False
    """Some of its experts are 4-bit floats."""


def _build(
    spec: ModelSpec, config: ModelConfig, device: Device, dtype: torch.dtype, source: TensorSource, shard: Shard
) -> _Built:
    if config.quantization == "none" or dtype != torch.bfloat16:
        return _Built(spec.build(source, dtype, shard))
    weights = source
    eight = four = None
    if device.multiplies_fp8:
        quantize = dispatch_weights.quantize if config.quantization == "fp8" else None
        weights = eight = Fp8Weights(source, quantize)
    if device.multiplies_mxfp4 and isinstance(source, Mxfp4Source):
        weights = four = Mxfp4Weights(source, weights, dispatch_weights.pack_mxfp4)
    model = spec.build(weights, dtype, shard)
    if eight is not None and (eight.kept or eight.rounded):
        _LOG.info(
            "8-bit floats: %d matrices as they are stored, %d rounded at load, %d left in %s",
            eight.kept,
            eight.rounded,
            eight.left,
            dtype,
        )
    if four is not None and (four.kept or four.left):
        _LOG.info(
            "4-bit floats: experts' matrices of %d layers as they are stored, of %d left in %s",
            four.kept // 2,
            four.left // 2,
            dtype,
        )
    return _Built(
        model,
        fp8=eight is not None and eight.kept + eight.rounded > 0,
        mxfp4=four is not None and four.kept > 0 and not four.left,
    )


def _read(spec: ModelSpec, config: ModelConfig, device: Device, dtype: torch.dtype, shard: Shard) -> _Built:
    shapes, scheme = spec.tensor_shapes(), scheme_of(spec.quantization)
    with (
        Checkpoint(config.path, shapes, scheme=scheme, unused=spec.unused_tensors) as checkpoint,
        on_device(checkpoint, device) as weights,
    ):
        if scheme is None:
            return _build(spec, config, device, dtype, weights, shard)
        expanded = Expanded(weights, scheme, shapes, checkpoint.parts)
        built = _build(spec, config, device, dtype, expanded, shard)
        if not built.fp8 and not built.mxfp4:
            _LOG.warning("%s: %s", config.path, expanded.cost(checkpoint.nbytes))
        return built
