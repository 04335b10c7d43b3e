"""What 8-bit products and 8-bit KV change: next-token distributions of a model against fp32, on a CPU.

    python runtime/bench/fp8_accuracy.py MODEL TEXT [TEXT ...] [--tokens 512] [--pieces 16]

Each text is cut into pieces, and every position of a piece is compared. The 8-bit products are the definition's
(`isthmus_kernels.fp8_linear.reference`), which rounds both factors.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from isthmus_runtime.config import ModelConfig, SchedulerConfig
from isthmus_runtime.executor.device.cpu import CpuDevice
from isthmus_runtime.executor.loading import LoadedModel, load
from isthmus_runtime.layers.batch import ForwardBatch, GroupBatch, LayerKv

BLOCK = 16


class Able(CpuDevice):
    """Computes the definition of 8-bit products."""

    multiplies_fp8 = True


@dataclass(frozen=True, slots=True)
class Form:
    """One way of computing the model."""

    name: str
    dtype: str
    quantization: str = "none"
    kv_dtype: str = "auto"


FORMS = (
    Form("float32", "float32"),
    Form("bfloat16", "bfloat16"),
    Form("fp8 products", "bfloat16", quantization="fp8"),
    Form("fp8 KV, float32", "float32", kv_dtype="fp8"),
    Form("fp8 KV, bfloat16", "bfloat16", kv_dtype="fp8"),
)


def layer_kv(loaded: LoadedModel, blocks: int, kv_dtype: torch.dtype) -> LayerKv:
    """One layer's pool, zero."""
    shape = (blocks, 2, BLOCK, loaded.spec.num_kv_heads, loaded.spec.head_dim)
    scales = torch.zeros(shape[:4]) if kv_dtype == torch.float8_e4m3fn else None
    return LayerKv(0, torch.zeros(shape, dtype=kv_dtype), scales)


def logits(loaded: LoadedModel, ids: list[int], kv_dtype: torch.dtype) -> Tensor:
    """fp32 [T, V]: of every position of one piece."""
    count = len(ids)
    blocks = -(-count // BLOCK)
    pool = [layer_kv(loaded, blocks + 1, kv_dtype) for _ in range(loaded.spec.num_layers)]
    batch = ForwardBatch(
        token_ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.arange(count),
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        groups=(
            GroupBatch(
                block_tables=torch.arange(1, blocks + 1, dtype=torch.int32)[None],
                slot_mapping=torch.arange(count) + BLOCK,
            ),
        ),
        max_query_len=count,
        max_seq_len=count,
    )
    with torch.inference_mode():
        loaded.model.forward(batch, pool, loaded.workspace)
        return loaded.model.logits(torch.arange(count), loaded.workspace).float()


def main() -> None:
    """Print one line a form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=512, help="of a piece")
    parser.add_argument("--pieces", type=int, default=16)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    pieces: list[list[int]] = []
    for path in args.text:
        ids = tokenizer.encode(path.read_text()).ids
        pieces += [ids[at : at + args.tokens] for at in range(0, len(ids) - args.tokens + 1, args.tokens)]
    pieces = pieces[:: max(1, len(pieces) // args.pieces)][: args.pieces]
    print(f"{len(pieces)} pieces of {args.tokens} tokens")
    scheduler = SchedulerConfig(max_batched_tokens=args.tokens, max_num_seqs=1, max_model_len=args.tokens)
    truth: list[Tensor] = []
    for form in FORMS:
        config = ModelConfig(path=str(args.model), dtype=form.dtype, quantization=form.quantization)
        loaded = load(config, scheduler, device=Able())
        kv_dtype = loaded.kv_dtype(form.kv_dtype)
        found = [logits(loaded, ids, kv_dtype).log_softmax(dim=-1) for ids in pieces]
        truth = truth or found
        apart, agree, loss = [], [], []
        for ids, exact, own in zip(pieces, truth, found, strict=True):
            apart.append((exact.exp() * (exact - own)).sum(dim=-1))
            agree.append((exact.argmax(dim=-1) == own.argmax(dim=-1)).float())
            loss.append(-own[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
        kl = torch.cat(apart)
        print(
            f"{form.name:16} KL from float32: mean {kl.mean():.5f}, 99th percentile {kl.quantile(0.99):.4f}; same "
            f"first choice {torch.cat(agree).mean():.2%}; perplexity {torch.cat(loss).mean().exp():.3f}; "
            f"weights {loaded.model.weight_bytes / 1e6:.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
