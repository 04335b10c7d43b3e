"""How long a step takes: a roofline over a model's shape and a GPU's measured ceilings, with two efficiencies.

Prefill is bound by arithmetic: 2 operations per weight and token, plus attention over what precedes the token.
Decode is bound by memory: every step reads the weights once and every context once. For an engine that somebody has
at hand, `measured.py` knows better.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Protocol

from ..errors import ConfigError
from ..models.registry import read_model_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What matters of a model."""

    name: str
    parameters: float
    active_parameters: float
    """Per token; less than `parameters` for mixtures of experts."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_parts: int = 2
    """Keys and values; 1 where they are made of one row a token."""
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of all layers."""
        return self.kv_parts * self.layers * self.kv_heads * self.head_dim * self.bytes_per_kv

    def with_fp8_kv(self) -> ModelShape:
        """The same with keys and values in 8-bit floats: a byte a number, four for the scale of a head. ConfigError for
        latents, which an engine does not round."""
        if self.kv_parts == 1:
            raise ConfigError(f"--kv-dtype fp8: the latents of {self.name} are kept as they are; leave it out")
        return replace(self, bytes_per_kv=1 + 4 / self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Ceilings of one GPU."""

    name: str
    flops: float
    """bf16 matrix multiplication, FLOP/s."""
    bytes_per_s: float
    """Device memory, read."""
    memory_bytes: float
    source: str


MODELS = {
    m.name: m
    for m in (
        ModelShape(
            name="qwen3-8b", parameters=8.2e9, active_parameters=7.6e9, layers=36, heads=32, kv_heads=8, head_dim=128
        ),
        ModelShape(
            name="llama-3.1-8b",
            parameters=8.0e9,
            active_parameters=7.5e9,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
        ),
        ModelShape(
            name="llama-3.1-70b",
            parameters=70.6e9,
            active_parameters=69.5e9,
            layers=80,
            heads=64,
            kv_heads=8,
            head_dim=128,
        ),
    )
}
GPUS = {
    g.name: g
    for g in (
        Gpu(name="h100", flops=767e12, bytes_per_s=2.94e12, memory_bytes=80e9, source="measured (SXM5)"),
        Gpu(name="h200", flops=799e12, bytes_per_s=4.56e12, memory_bytes=141e9, source="measured (SXM)"),
        Gpu(name="a100", flops=250e12, bytes_per_s=1.7e12, memory_bytes=80e9, source="80 % of the datasheet"),
    )
}


class Steps(Protocol):
    """Step times of one engine, all in seconds.

    `new`: prompt tokens of a step. `attended`: the sum, over those tokens, of how many precede each in its prompt.
    `batch`: requests of which the step makes one token each, holding `context` tokens of KV together.
    """

    @property
    def tp(self) -> int:
        """GPUs of an engine."""

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV one engine holds."""

    @property
    def kv_bytes_per_token(self) -> float:
        """What a transfer moves."""

    @property
    def prefill_slowed(self) -> float:
        """How much longer prompts take while the decode engine they go to is busy: 0 unless both share hardware."""

    def prefill_s(self, new: float, attended: float) -> float:
        """A step of prompts alone."""

    def decode_s(self, batch: float, context: float) -> float:
        """A step without prompts."""

    def mixed_s(self, new: float, attended: float, batch: float, context: float) -> float:
        """A step of both."""

    def received_s(self, tokens: int) -> float:
        """What a decode engine loses by taking in the KV of a prompt."""

    def describe(self) -> dict[str, object]:
        """A line for the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """The roofline of one engine of `tp` GPUs.

    The efficiencies give what vLLM 0.24 reaches with Qwen3-8B on the measured H100 (41,052 prompt tokens/s at 4,096
    tokens, 147 tokens/s in a single stream).
    """

    model: ModelShape
    gpu: Gpu
    tp: int = 1
    prefill_efficiency: float = 0.88
    decode_efficiency: float = 0.74
    tp_efficiency: float = 0.9
    """Share of the added GPUs' speed that is left after communication."""
    overhead_s: float = 0.0005
    kv_share: float = 0.9
    """Share of the memory left by the weights that holds KV."""
    kv_tokens_given: int | None = None
    """Instead of that."""

    @property
    def scale(self) -> float:
        """How much faster than one GPU."""
        return 1 + (self.tp - 1) * self.tp_efficiency

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV one engine holds."""
        if self.kv_tokens_given is not None:
            return self.kv_tokens_given
        free = self.tp * self.gpu.memory_bytes - self.model.parameters * self.model.bytes_per_weight
        return int(max(0.0, free) * self.kv_share / self.model.kv_bytes_per_token)

    @property
    def kv_bytes_per_token(self) -> float:
        """What a transfer moves."""
        return self.model.kv_bytes_per_token

    @property
    def prefill_slowed(self) -> float:
        """Engines share nothing."""
        return 0.0

    def prefill_s(self, new: float, attended: float) -> float:
        """Bound by arithmetic."""
        m = self.model
        work = 2 * m.active_parameters * new + 4 * m.layers * m.heads * m.head_dim * attended
        return work / (self.gpu.flops * self.prefill_efficiency * self.scale) + self.overhead_s

    def decode_s(self, batch: float, context: float) -> float:
        """Bound by memory, or by arithmetic in very large batches."""
        m = self.model
        touched = m.parameters if batch > 1 else m.active_parameters
        memory = (touched * m.bytes_per_weight + context * m.kv_bytes_per_token) / self.gpu.bytes_per_s
        compute = 2 * m.active_parameters * batch / self.gpu.flops
        return max(memory, compute) / (self.decode_efficiency * self.scale) + self.overhead_s

    def mixed_s(self, new: float, attended: float, batch: float, context: float) -> float:
        """The decoding requests' tokens go through the products with the prompts', then each reads its context."""
        reading = context * self.model.kv_bytes_per_token / self.gpu.bytes_per_s
        together = self.prefill_s(new + batch, attended) + reading / (self.decode_efficiency * self.scale)
        return max(together, self.decode_s(batch, context))

    def received_s(self, tokens: int) -> float:
        """The network card writes it."""
        return 0.0

    def describe(self) -> dict[str, object]:
        """A line for the report."""
        return {
            "model": self.model.name,
            "gpu": self.gpu.name,
            "step_times": f"roofline of {self.gpu.source} ceilings",
            "prefill_efficiency": self.prefill_efficiency,
            "decode_efficiency": self.decode_efficiency,
        }


def find_model(name: str) -> ModelShape:
    """A known name, or a model directory. ConfigError lists what is known."""
    if name in MODELS:
        return MODELS[name]
    if not Path(name).is_dir():
        raise ConfigError(f"--model {name!r} is neither a model directory nor one of {', '.join(sorted(MODELS))}")
    spec = read_model_spec(name)
    sizes = {name: prod(shape) for name, shape in spec.tensor_shapes().items() if len(shape) > 1}
    # Of an embedding that is not the output projection, too, a token reads one row.
    looked_up = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
    active = sum(size * spec.active_fraction(name) for name, size in sizes.items())
    return ModelShape(
        name=Path(name).name,
        parameters=sum(sizes.values()),
        active_parameters=round(active) - looked_up,
        layers=spec.num_layers,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        kv_parts=1 if any(layer.kind == "mla" for layer in spec.layer_specs(1, "bf16")) else 2,
    )


def find_gpu(name: str) -> Gpu:
    """A known name, or a JSON file with the fields of `Gpu`. ConfigError lists what is known."""
    if name in GPUS:
        return GPUS[name]
    if not Path(name).is_file():
        raise ConfigError(f"--gpu {name!r} is neither a JSON file nor one of {', '.join(sorted(GPUS))}")
    try:
        body = json.loads(Path(name).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--gpu {name}: not JSON ({error})") from None
    known = {field.name for field in fields(Gpu)}
    if not isinstance(body, dict) or set(body) != known:
        raise ConfigError(f"--gpu {name}: must be an object with exactly the fields {', '.join(sorted(known))}")
    return Gpu(**body)
