"""How long a step takes: a roofline over a model's shape and a GPU's measured ceilings, with two fitted efficiencies.

Prefill is bound by arithmetic: 2 operations per weight and token, plus attention over what precedes the token.
Decode is bound by memory: every step reads the weights once and every context once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

from ..errors import ConfigError
from ..models.config import read_model_spec


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
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_kv


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
        Gpu(name="h200", flops=767e12, bytes_per_s=4.3e12, memory_bytes=141e9, source="H100; memory: datasheet"),
        Gpu(name="a100", flops=250e12, bytes_per_s=1.7e12, memory_bytes=80e9, source="80 % of the datasheet"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Step times of one engine of `tp` GPUs.

    The default efficiencies give what vLLM 0.24 reaches with Qwen3-8B on the measured H100 (41,052 prompt tokens/s at
    4,096 tokens, 147 tokens/s in a single stream); a calibration replaces them.
    """

    model: ModelShape
    gpu: Gpu
    tp: int = 1
    prefill_efficiency: float = 0.88
    decode_efficiency: float = 0.74
    tp_efficiency: float = 0.9
    """Share of the added GPUs' speed that is left after communication; not fitted."""
    overhead_s: float = 0.0005
    kv_share: float = 0.9
    """Share of the memory left by the weights that holds KV."""

    @property
    def scale(self) -> float:
        """How much faster than one GPU."""
        return 1 + (self.tp - 1) * self.tp_efficiency

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV one engine holds."""
        free = self.tp * self.gpu.memory_bytes - self.model.parameters * self.model.bytes_per_weight
        return int(max(0.0, free) * self.kv_share / self.model.kv_bytes_per_token)

    def prefill_s(self, new: int, cached: int) -> float:
        """Seconds to compute `new` prompt tokens after `cached` ones."""
        m = self.model
        attention = 4 * m.layers * m.heads * m.head_dim * new * (cached + new / 2)
        work = 2 * m.active_parameters * new + attention
        return work / (self.gpu.flops * self.prefill_efficiency * self.scale) + self.overhead_s

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds for one token of each of `batch` requests that hold `context` tokens together."""
        m = self.model
        touched = m.parameters if batch > 1 else m.active_parameters
        memory = (touched * m.bytes_per_weight + context * m.kv_bytes_per_token) / self.gpu.bytes_per_s
        compute = 2 * m.active_parameters * batch / self.gpu.flops
        return max(memory, compute) / (self.decode_efficiency * self.scale) + self.overhead_s


def find_model(name: str) -> ModelShape:
    """A known name, or a model directory. ConfigError lists what is known."""
    if name in MODELS:
        return MODELS[name]
    if not Path(name).is_dir():
        raise ConfigError(f"--model {name!r} is neither a model directory nor one of {', '.join(sorted(MODELS))}")
    spec = read_model_spec(name)
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    body = spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)
    embedding = spec.vocab_size * spec.hidden_size
    return ModelShape(
        name=Path(name).name,
        parameters=body + embedding * (1 if spec.tie_word_embeddings else 2),
        active_parameters=body + embedding,
        layers=spec.num_layers,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )


def find_gpu(name: str) -> Gpu:
    """A known name, or a JSON file with the fields of `Gpu`. ConfigError lists what is known."""
    if name in GPUS:
        return GPUS[name]
    if not Path(name).is_file():
        raise ConfigError(f"--gpu {name!r} is neither a JSON file nor one of {', '.join(sorted(GPUS))}")
    body = json.loads(Path(name).read_text())
    known = {field.name for field in fields(Gpu)}
    if not isinstance(body, dict) or set(body) != known:
        raise ConfigError(f"--gpu {name}: must be an object with exactly the fields {', '.join(sorted(known))}")
    return Gpu(**body)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted model and how far it is from what was measured."""

    steps: StepModel
    worst_error: float
    """Largest relative error over the measured points, after the fit."""
    points: int


def calibrate(steps: StepModel, measured: object) -> Calibration:
    """Fit the two efficiencies to measured steps, each by the median ratio.

    `measured`: a list of ``{"kind": "prefill", "new": n, "cached": n, "seconds": s}`` and
    ``{"kind": "decode", "batch": n, "context": tokens, "seconds": s}``. ConfigError names the first wrong entry.
    """
    points: list[tuple[str, float, float, float]] = []
    for number, entry in enumerate(measured if isinstance(measured, list) else [None]):
        points.append(_point(entry, number))

    def predicted(model: StepModel, point: tuple[str, float, float, float]) -> float:
        kind, first, second, _ = point
        return model.prefill_s(int(first), int(second)) if kind == "prefill" else model.decode_s(first, second)

    for kind in ("prefill", "decode"):
        mine = [p for p in points if p[0] == kind]
        if not mine:
            continue
        ratio = median((predicted(steps, p) - steps.overhead_s) / max(1e-9, p[3] - steps.overhead_s) for p in mine)
        name = f"{kind}_efficiency"
        steps = replace(steps, **{name: getattr(steps, name) * ratio})
    worst = max(abs(predicted(steps, p) / p[3] - 1) for p in points)
    return Calibration(steps, worst, len(points))


def _point(entry: object, number: int) -> tuple[str, float, float, float]:
    names = {"prefill": ("new", "cached"), "decode": ("batch", "context")}
    if isinstance(entry, Mapping) and (pair := names.get(str(entry.get("kind")))) is not None:
        values = [entry.get(name) for name in (*pair, "seconds")]
        if all(isinstance(v, int | float) and v >= 0 for v in values) and values[2]:
            first, second, seconds = (float(v) for v in values if isinstance(v, int | float))
            return str(entry["kind"]), first, second, seconds
    raise ConfigError(
        f"calibration entry {number} is {entry!r}; expected kind prefill (new, cached, seconds) "
        "or decode (batch, context, seconds), seconds above 0"
    )
