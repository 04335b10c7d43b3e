"""Self-attention over the paged KV pool: projection, rotation and KV write, attention, output projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from isthmus_kernels import dispatch

from .batch import AttentionBatch, LayerKv
from .linear import Linear
from .norm import Joint


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention of one layer. `qkv` is the joined projection, rows in the order q, k, v."""

    qkv: Linear
    output: Linear
    num_heads: int
    scale: float
    """On the products of queries and keys."""
    window: int | None
    """A token sees so many, itself included; None: all before it."""
    softcap: float | None = None
    """Scores s become c tanh(s / c)."""
    sinks: Tensor | None = None
    """fp32 [Hq]: a score of each head that has no value, so that its other weights sum to less than 1."""
    rope: int
    """Which of the rotary tables turns its heads."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float

    @property
    def nbytes(self) -> int:
        """Bytes of the large weights."""
        return self.qkv.nbytes + self.output.nbytes

    def __call__(
        self,
        x: Tensor,
        batch: AttentionBatch,
        kv: LayerKv,
        ropes: Sequence[tuple[Tensor, Tensor]],
        *,
        qkv: Tensor,
        context: Tensor,
        flat: Tensor,
        out: Tensor,
        joint: Joint,
    ) -> None:
        """x [T, H] to `joint`, by way of `out` [T, H] if need be; this step's keys and values to `kv` first.

        Args:
            kv: this layer's part of the pool.
            ropes: cosines and sines of each rotary embedding of the model.
            qkv, context: scratch, [T, (Hq + 2 Hk) D] and [T, Hq, D]; `flat` is context seen as [T, Hq D].
        """
        where = batch.groups[kv.group]
        cos, sin = ropes[self.rope]
        self.qkv(x, qkv, batch.adapters)
        q = dispatch.rope_kv_write(
            qkv,
            batch.positions,
            cos,
            sin,
            kv.pages,
            where.slot_mapping,
            num_heads=self.num_heads,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.eps,
            scales=kv.scales,
        )
        dispatch.paged_attention(
            q,
            kv.pages,
            where.block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            scale=self.scale,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            scales=kv.scales,
            out=context,
        )
        self.output.join(flat, out, joint, batch.adapters)

    def write(
        self,
        x: Tensor,
        batch: AttentionBatch,
        kv: LayerKv,
        ropes: Sequence[tuple[Tensor, Tensor]],
        *,
        qkv: Tensor,
    ) -> None:
        """Only write the keys and values of x [T, H]; arguments as of a call."""
        keys = None if batch.adapters is not None else self.qkv.outputs_from(self.num_heads * kv.pages.shape[4])
        cos, sin = ropes[self.rope]
        if keys is not None:
            qkv = qkv.view(-1)[: len(x) * keys.out_features].view(len(x), keys.out_features)
            dispatch.linear(x, keys, out=qkv)
        else:
            self.qkv(x, qkv, batch.adapters)
        dispatch.rope_kv_write(
            qkv,
            batch.positions,
            cos,
            sin,
            kv.pages,
            batch.groups[kv.group].slot_mapping,
            num_heads=self.num_heads if keys is None else 0,
            q_norm=self.q_norm if keys is None else None,
            k_norm=self.k_norm,
            eps=self.eps,
            scales=kv.scales,
        )
