"""Llama, Mistral, Qwen2 and Qwen3: one forward pass, written out. Dimension letters: layers/batch.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..layers.attention import Attention
from ..layers.batch import ForwardBatch
from ..layers.embedding import Embedding
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.norm import RmsNorm
from ..layers.replay import Replay
from ..layers.rope import cos_sin_tables
from .config import ModelSpec

_OPS_PER_LAYER = 9
"""Two norms, four products, rotation with KV write, attention, gated activation."""


class TensorSource(Protocol):
    """Checked weights by name."""

    def take(self, *names: str) -> Tensor:
        """The tensors joined along their first dimension, in memory of their own and the dtype of the checkpoint.

        Their shapes were checked against `tensor_shapes` before.
        """


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint must hold, with its shape."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for number in range(spec.num_layers):
        layer = f"model.layers.{number}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        linear(f"{layer}.self_attn.q_proj", q, hidden, spec.qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv, hidden, spec.qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv, hidden, spec.qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, q, spec.output_bias)
        if spec.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (spec.head_dim,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, spec.mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, spec.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, spec.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each with the norm that follows the residual addition before it."""

    attention: Attention
    attention_norm: RmsNorm
    mlp: GatedMlp
    mlp_norm: RmsNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Scratch for the largest step, and the rotary tables. Made once: allocating per step costs page faults, and
    fixed addresses let a decode step be replayed."""

    hidden: Tensor
    residual: Tensor
    projected: Tensor
    qkv: Tensor
    context: Tensor
    gate_up: Tensor
    inner: Tensor
    cos_sin: tuple[Tensor, Tensor]
    replay: Replay
    """Decode steps by their number of tokens."""


class LlamaModel:
    """The weights of a whole model, ready for the forward pass. Holds no request state."""

    __slots__ = ("_embedding", "_following", "_head", "_layers", "_norm", "dtype", "spec")

    def __init__(self, spec: ModelSpec, source: TensorSource, dtype: torch.dtype) -> None:
        def linear(*names: str, bias: bool) -> Linear:
            # Weights join along their rows: one product instead of two or three.
            weight = source.take(*(f"{name}.weight" for name in names))
            return Linear(weight, source.take(*(f"{name}.bias" for name in names)) if bias else None, dtype)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(source.take(f"{name}.weight"), spec.rms_norm_eps, dtype)

        self.spec = spec
        self.dtype = dtype
        embedding = source.take("model.embed_tokens.weight")
        self._embedding = Embedding(embedding, dtype)
        self._layers: list[DecoderLayer] = []
        for number in range(spec.num_layers):
            at = f"model.layers.{number}.self_attn"
            mlp = f"model.layers.{number}.mlp"
            attention = Attention(
                qkv=linear(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj", bias=spec.qkv_bias),
                output=linear(f"{at}.o_proj", bias=spec.output_bias),
                num_heads=spec.num_heads,
                head_dim=spec.head_dim,
                window=spec.windows[number],
                q_norm=source.take(f"{at}.q_norm.weight").to(dtype) if spec.qk_norm else None,
                k_norm=source.take(f"{at}.k_norm.weight").to(dtype) if spec.qk_norm else None,
                eps=spec.rms_norm_eps,
            )
            gated = GatedMlp(
                linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=spec.mlp_bias),
                linear(f"{mlp}.down_proj", bias=spec.mlp_bias),
            )
            self._layers.append(
                DecoderLayer(
                    attention,
                    norm(f"model.layers.{number}.input_layernorm"),
                    gated,
                    norm(f"model.layers.{number}.post_attention_layernorm"),
                )
            )
        # The addition after a layer is fused with the next layer's norm; after the last, with the final one, on the
        # rows that sample only.
        self._following = [*(layer.attention_norm for layer in self._layers[1:]), None]
        self._norm = norm("model.norm")
        head = embedding if spec.tie_word_embeddings else source.take("lm_head.weight")
        self._head = Linear(head, None, dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes held by the large weights."""
        layers = sum(
            part.nbytes
            for layer in self._layers
            for part in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        )
        return layers + self._embedding.nbytes + self._head.nbytes

    def workspace(self, max_tokens: int, max_len: int) -> Workspace:
        """Scratch for steps of at most `max_tokens` tokens at positions below `max_len`."""
        spec = self.spec

        def scratch(width: int) -> Tensor:
            # Written once now, so that the first large step does not pay for the page faults.
            return torch.empty(max_tokens, width, dtype=self.dtype).zero_()

        return Workspace(
            hidden=scratch(spec.hidden_size),
            residual=scratch(spec.hidden_size),
            projected=scratch(spec.hidden_size),
            qkv=scratch((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim),
            context=scratch(spec.num_heads * spec.head_dim),
            gate_up=scratch(2 * spec.intermediate_size),
            inner=scratch(spec.intermediate_size),
            cos_sin=cos_sin_tables(spec.rope, spec.head_dim, max_len),
            replay=Replay(_OPS_PER_LAYER * spec.num_layers),
        )

    def forward(self, batch: ForwardBatch, kv: Sequence[tuple[int, Tensor]], scratch: Workspace) -> Tensor:
        """Logits [S, V] of the tokens `batch.logit_rows`.

        `kv` holds per layer its group and its view of the pool, [num_blocks, 2, block_size, Hk, D].
        """
        num = batch.token_ids.shape[0]
        residual, projected = scratch.residual[:num], scratch.projected[:num]
        self._embedding(batch.token_ids, residual)
        if batch.max_query_len == 1:
            # One token a request: everything the layers touch lies where it lay in the last step of this size.
            scratch.replay.run(num, lambda: self._run_layers(batch, kv, scratch))
        else:
            self._run_layers(batch, kv, scratch)
        rows = batch.logit_rows
        last_hidden, last_residual = projected[rows], residual[rows]
        self._norm.add(last_hidden, last_residual, last_hidden)
        return self._head(last_hidden)

    def _run_layers(self, batch: ForwardBatch, kv: Sequence[tuple[int, Tensor]], scratch: Workspace) -> None:
        """From `residual` (the embedding) to `projected` and `residual`, whose sum is the last layer's output."""
        num = batch.token_ids.shape[0]
        residual, hidden, projected = scratch.residual[:num], scratch.hidden[:num], scratch.projected[:num]
        qkv, flat = scratch.qkv[:num], scratch.context[:num]
        context = flat.view(num, self.spec.num_heads, self.spec.head_dim)
        gate_up, inner = scratch.gate_up[:num], scratch.inner[:num]
        self._layers[0].attention_norm(residual, hidden)
        for layer, following, (group, layer_kv) in zip(self._layers, self._following, kv, strict=True):
            layer.attention(
                hidden,
                batch,
                group,
                layer_kv,
                scratch.cos_sin,
                qkv=qkv,
                context=context,
                flat=flat,
                out=projected,
            )
            layer.mlp_norm.add(projected, residual, hidden)
            layer.mlp(hidden, gate_up=gate_up, inner=inner, out=projected)
            if following is not None:
                following.add(projected, residual, hidden)
