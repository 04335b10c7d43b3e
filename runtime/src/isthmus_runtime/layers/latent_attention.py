"""Multi-head latent attention (DeepSeek-V2, 2024), with the latent as its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from isthmus_kernels import dispatch

from .batch import AttentionBatch, LayerKv
from .linear import HeadLinear, Linear
from .norm import Joint, RmsNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention whose heads make keys and values of one latent row a token, of width W = L + R.

    A head's key is ``key_up z | r`` and its value ``value_up z``, for the token's latent z [L] and its turned part r
    [R]. Since ``q · key_up z = (key_up^T q) · z``, queries are brought to the latents instead of latents to keys: all
    heads attend to the rows as they are stored, one KV head of width W, and the latents' weighted sum goes through
    value_up afterwards. What is computed is the same; what is kept is W numbers a token instead of 2 Hq D.
    """

    query_down: Linear | None
    query_norm: RmsNorm | None
    query_up: Linear
    """To [Hq, N + R]: the part against the latents, then the part that turns."""
    latent: Linear
    """To [W]."""
    latent_norm: RmsNorm
    key_up: HeadLinear
    """N to L."""
    value_up: HeadLinear
    """L to V."""
    output: Linear
    scale: float
    """On the products of queries and keys."""

    @property
    def nbytes(self) -> int:
        """Bytes of the large weights."""
        query = self.query_up.nbytes + (0 if self.query_down is None else self.query_down.nbytes)
        return query + self.latent.nbytes + self.key_up.nbytes + self.value_up.nbytes + self.output.nbytes

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
        """x [T, H] to `joint`, by way of `out` [T, H] if need be; this step's rows are written to `kv` first.

        Args:
            kv: this layer's part of the pool.
            ropes: cosines and sines, of the one rotary embedding.
            qkv, context: scratch, [T, (Hq + 2) W] and [T, Hq, W]; `flat` is not used.
        """
        del flat
        where, (cos, sin), pages = batch.groups[kv.group], ropes[0], kv.pages
        tokens, (heads, inner, width) = x.shape[0], self.key_up.shape
        query = x
        if self.query_down is not None and self.query_norm is not None:
            down = self.query_down(x, slots=batch.adapters)
            query = self.query_norm(down, down)
        query = self.query_up(query, slots=batch.adapters).view(tokens, heads, -1)
        dispatch.latent_kv_write(
            query[..., inner:], self._latents(x, batch), batch.positions, cos, sin, pages, where.slot_mapping
        )
        q = qkv[:, : heads * pages.shape[4]].view(tokens, heads, pages.shape[4])
        self.key_up(query[..., :inner], q[..., :width])
        q[..., width:] = query[..., inner:]
        dispatch.paged_attention(
            q,
            # Keys and values are the same rows.
            pages.expand(-1, 2, -1, -1, -1),
            where.block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            scale=self.scale,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            out=context,
        )
        values = self.value_up(context[..., :width], x.new_empty(tokens, heads, self.value_up.shape[2]))
        self.output.join(values.view(tokens, -1), out, joint, batch.adapters)

    def write(
        self,
        x: Tensor,
        batch: AttentionBatch,
        kv: LayerKv,
        ropes: Sequence[tuple[Tensor, Tensor]],
        *,
        qkv: Tensor,
    ) -> None:
        """Only write the latents of x [T, H]; arguments as of a call."""
        cos, sin = ropes[0]
        none = qkv[:, :0].view(len(x), 0, 2 * cos.shape[1])
        slots = batch.groups[kv.group].slot_mapping
        dispatch.latent_kv_write(none, self._latents(x, batch), batch.positions, cos, sin, kv.pages, slots)

    def _latents(self, x: Tensor, batch: AttentionBatch) -> Tensor:
        """x [T, H] to latents, normed, beside the part that turns: [T, W]."""
        row, width = self.latent(x, slots=batch.adapters), self.key_up.shape[2]
        row[:, :width] = self.latent_norm(plain := row[:, :width].contiguous(), plain)
        return row
