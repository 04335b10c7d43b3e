"""GPT-OSS with random experts of 4-bit floats on a GPU: kept as they are, and expanded, in one run.

    python runtime/bench/gpu_mxfp4.py [--layers 24] [--experts 32] [--only kept]

Tokens of both must be equal up to near ties, which come as early between two batches of one engine; the rest is what
each takes and how fast it is.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_engine import Bench
from torch import Tensor

from isthmus_kernels.dispatch_weights import pack_mxfp4
from isthmus_kernels.moe.mxfp4 import unpack_mxfp4
from isthmus_runtime.checkpoints.random import RandomTensors
from isthmus_runtime.config import KvConfig, ModelConfig, SchedulerConfig
from isthmus_runtime.executor.loading import load
from isthmus_runtime.models.base import ModelSpec, Shapes
from isthmus_runtime.models.shard import Slice

_SMALLEST = 119
"""Scales from here to 120 keep the size of what goes through: 2^-8 and 2^-7 on numbers of a variance of about 8."""


def config(layers: int, experts: int) -> dict[str, Any]:
    """Of GPT-OSS-20B; 120B has 36 layers and 128 experts."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


class Source:
    """Random weights, of which the experts are 4-bit floats."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self._shapes, self._device = shapes, device
        self._plain = RandomTensors(shapes, device=device, dtype=torch.bfloat16, seed=0)

    def take(self, *parts: str | Slice) -> Tensor:
        """As `models.base.TensorSource`."""
        name = parts[0]
        if len(parts) == 1 and isinstance(name, str) and name.endswith(("gate_up_proj", "down_proj")):
            numbers, scales = self.as_mxfp4(name)
            packed = pack_mxfp4(numbers, scales)
            assert packed is not None
            return unpack_mxfp4(*packed, self._shapes[name][1]).transpose(1, 2)
        return self._plain.take(*parts)

    def as_mxfp4(self, name: str) -> tuple[Tensor, Tensor]:
        """As `checkpoints.mxfp4.Mxfp4Source`."""
        experts, inputs, outputs = self._shapes[name]
        made = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        options: dict[str, Any] = {"generator": made, "dtype": torch.uint8, "device": self._device}
        numbers = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), **options)
        return numbers, torch.randint(_SMALLEST, 121, (experts, outputs, inputs // 32), **options)


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random ones."""
    draw = random.Random(seed)
    return [[draw.randrange(1000, 200_000) for _ in range(length)] for _ in range(count)]


Tokens = list[list[int]]


def measure(model: dict[str, Any], quantization: str) -> tuple[Tokens, Tokens]:
    """Print a line for each load; the tokens of the first, and those of its prompts one by one."""
    scheduler = SchedulerConfig(max_model_len=8448, max_batched_tokens=8192, max_num_seqs=256, max_waiting=4096)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))

        def source(spec: ModelSpec, where: torch.device) -> Source:
            return Source(spec.tensor_shapes(), where)

        loaded = load(ModelConfig(path=folder, device="cuda", quantization=quantization), scheduler, source=source)
    bench = Bench(loaded, scheduler=scheduler, kv=KvConfig(memory_fraction=0.9))
    label = "kept" if quantization == "auto" else "expanded"
    print(f"{label}: {loaded.model.weight_bytes / 1e9:.2f} GB of weights, {bench.plan.num_blocks} KV blocks")
    print(f"{label}: {bench.overdrawn / 2**30:.2f} GiB more than the fraction are taken", flush=True)
    tokens: Tokens = []
    loads: Sequence[tuple[int, int, int]] = ((4, 200, 48), (1, 128, 256), (8, 128, 256), (256, 128, 512), (1, 8192, 4))
    for count, length, out in loads:
        bench.run(prompts(count, length, 1), min(out, 16))
        run = bench.run(prompts(count, length, 2), out)
        tokens = tokens or run.tokens
        first = run.first_s[len(run.first_s) // 2] * 1e3
        print(
            f"{label}: {count} x {length}/{out}: {run.out_tokens / run.seconds:.1f} tok/s, step {run.decode_ms:.2f} ms,"
            f" first token {first:.1f} ms",
            flush=True,
        )
    count, length, out = loads[0]
    alone = [bench.run([prompt], out).tokens[0] for prompt in prompts(count, length, 2)]
    bench.close()
    return tokens, alone


def compare(label: str, some: Tokens, others: Tokens) -> None:
    """Print how many requests have equal tokens, and which is the first that differs."""
    pairs = list(zip(some, others, strict=True))
    same = sum(a == b for a, b in pairs)
    first = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None) for a, b in pairs]
    print(f"{label}: {same} of {len(pairs)} requests have equal tokens; first difference at {first}")


def main() -> None:
    """Both ways, then how many tokens are the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--only", choices=["kept", "both"], default="both")
    args = parser.parse_args()
    model = config(args.layers, args.experts)
    kept, kept_alone = measure(model, "auto")
    if args.only == "both":
        gc.collect()
        torch.cuda.empty_cache()
        expanded, expanded_alone = measure(model, "none")
        compare("kept and expanded", kept, expanded)
        compare("kept and expanded, one by one", kept_alone, expanded_alone)
        # Two batches of one engine differ in the order of additions, too: as early as this near ties come.
        compare("expanded together and one by one", expanded, expanded_alone)


if __name__ == "__main__":
    main()
