"""The forward pass that the families share: embedding, layers, final norm, head. Dimension letters: layers/batch.py.

Every family here is a residual stream with two branches a layer. What differs (biases, norms of heads, norms after a
branch, activation, windows, rotary tables, scales, caps) is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers.adaptable import Adaptable, Projection
from ..layers.attention import Attention
from ..layers.batch import AttentionBatch, ForwardBatch, LayerKv, ReadBatch
from ..layers.embedding import Embedding
from ..layers.latent_attention import LatentAttention
from ..layers.linear import Linear
from ..layers.mlp import Activation, GatedMlp, Mlp, MlpScratch
from ..layers.moe import ExpertWeights
from ..layers.norm import Joint, RmsNorm
from ..layers.rope import cos_sin_tables
from ..layers.rope_spec import RopeSpec
from .base import ModelSpec, PackedSource, ScaledSource, TensorSource
from .shard import WHOLE, Shard, Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Attention and MLP: each with a norm of its input, and where a family has them, a norm of its output."""

    attention_norm: RmsNorm
    attention: Attention | LatentAttention
    after_attention: RmsNorm | None = None
    mlp_norm: RmsNorm
    mlp: Mlp
    after_mlp: RmsNorm | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Scratch for the largest step, and the rotary tables."""

    hidden: Tensor
    residual: Tensor
    projected: Tensor
    qkv: Tensor
    context: Tensor
    gate_up: Tensor
    inner: Tensor
    ropes: tuple[tuple[Tensor, Tensor], ...]
    """Cosines and sines, by the number that a layer's attention names."""


class Parts:
    """Takes a rank's part of a model's weights out of their source. Which projections have biases or are stored as
    one, and which heads have norms or sinks, is what `spec.tensor_shapes` says."""

    __slots__ = (
        "_embedding",
        "_shapes",
        "_source",
        "adaptable",
        "dtype",
        "heads",
        "inner",
        "kv_heads",
        "norm_offset",
        "shard",
        "spec",
    )

    def __init__(
        self,
        spec: ModelSpec,
        source: TensorSource,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        *,
        norm_offset: float = 0.0,
    ) -> None:
        """`norm_offset` is added to every norm's weight: 1 where checkpoints store the difference from 1."""
        assert shard.size == 1 or spec.sharded, f"{spec.architecture} is not split over ranks"
        self.spec = spec
        self.dtype = dtype
        self.shard = shard
        self.heads = shard.part(spec.num_heads)
        self.kv_heads = shard.kv_heads(spec.num_kv_heads)
        self.inner = shard.part(spec.intermediate_size)
        """This rank's query heads, key and value heads, and channels of a dense MLP: [start, stop)."""
        self.norm_offset = norm_offset
        self.adaptable: list[Adaptable] = []
        """The layers made so far that can have adapters."""
        self._source = source
        self._shapes = spec.tensor_shapes()
        self._embedding = source.take("model.embed_tokens.weight")

    def embedding(self, scale: float = 1.0) -> Embedding:
        """The token embedding."""
        return Embedding(self._embedding, self.dtype, scale)

    def head(self) -> Linear:
        """The output projection, which may be the embedding's weight; of a shard, its part of the vocabulary."""
        rows = Slice("lm_head.weight", 0, *self.shard.part(self.spec.vocab_size))
        tied = self.spec.tie_word_embeddings
        return Linear(rows.of(self._embedding) if tied else self._source.take(rows), None, self.dtype)

    def linear(self, name: str, rows: Callable[[Tensor], Tensor] | None = None) -> Linear:
        """A whole projection. `rows` puts the rows of weight and bias in another order."""
        weight, scale = self._matrix(f"{name}.weight")
        bias = self._source.take(f"{name}.bias") if f"{name}.bias" in self._shapes else None
        if rows is not None:
            # By bytes: few operations know 8-bit floats.
            weight = rows(weight) if scale is None else rows(weight.view(torch.uint8)).view(weight.dtype)
            bias, scale = (None if part is None else rows(part) for part in (bias, scale))
        linear = Linear(weight, bias, self.dtype, scale)
        self.adaptable.append(Adaptable(linear, (Projection(name, 0, rows),)))
        return linear

    def router(self, name: str) -> Linear:
        """The product that chooses experts, in the dtype of the computation: small, and a near tie would turn."""
        bias = self._source.take(f"{name}.bias") if f"{name}.bias" in self._shapes else None
        return Linear(self._source.take(f"{name}.weight"), bias, self.dtype)

    def experts(self, name: str, count: int) -> ExpertWeights:
        """The weights of a mixture whose experts `name`.0, `name`.1, ... are gated MLPs."""
        names = [f"{name}.{expert}" for expert in range(count)]
        halves = [f"{expert}.{part}_proj.weight" for expert in names for part in ("gate", "up")]
        downs = [f"{expert}.down_proj.weight" for expert in names]
        first, second = self._scaled(*halves), self._scaled(*downs)
        if first is None or second is None:
            gate_up, down = self.take(*halves), self.take(*downs)
            return ExpertWeights(gate_up.unflatten(0, (count, -1)), down.unflatten(0, (count, -1)))
        return ExpertWeights(*(part.unflatten(0, (count, -1)) for part in (first[0], second[0], first[1], second[1])))

    def packed(self, *names: str) -> list[tuple[Tensor, Tensor]] | None:
        """Bytes and scales of experts that are to be multiplied as 4-bit floats; None: they are not."""
        return self._source.packed(*names) if isinstance(self._source, PackedSource) else None

    def _scaled(self, *parts: str | Slice) -> tuple[Tensor, Tensor] | None:
        """Matrices that are to be multiplied as 8-bit floats, and their rows' scales; None: they are not."""
        return self._source.scaled(*parts) if isinstance(self._source, ScaledSource) else None

    def _matrix(self, *parts: str | Slice) -> tuple[Tensor, Tensor | None]:
        """The weight of a product, its rows joined, and if it is of 8-bit floats its rows' scales."""
        return self._scaled(*parts) or (self._source.take(*parts), None)

    def split(self, *outputs: tuple[str, int, int]) -> Linear:
        """Projections of one input, of which this rank computes some outputs: rows [start, stop) of each name."""
        weight, scale = self._matrix(*(Slice(f"{name}.weight", 0, start, stop) for name, start, stop in outputs))
        bias = None
        if f"{outputs[0][0]}.bias" in self._shapes:
            bias = self._source.take(*(Slice(f"{name}.bias", 0, start, stop) for name, start, stop in outputs))
        return Linear(weight, bias, self.dtype, scale)

    def summand(self, name: str, start: int, stop: int) -> Linear:
        """The projection `name` of its inputs [start, stop), which this rank has: a summand of the whole one. The first
        rank's has the bias."""
        weight, scale = self._matrix(Slice(f"{name}.weight", 1, start, stop))
        biased = f"{name}.bias" in self._shapes and self.shard.rank == 0
        return Linear(weight, self._source.take(f"{name}.bias") if biased else None, self.dtype, scale)

    def take(self, *names: str) -> Tensor:
        """Plain weights in the dtype of the computation, their rows joined."""
        return self._source.take(*names).to(self.dtype)

    def wide(self, part: str | Slice) -> Tensor:
        """A small weight in fp32."""
        return self._source.take(part).float()

    def norm(self, name: str, eps: float | None = None) -> RmsNorm:
        """A norm; `eps` instead of the model's."""
        return RmsNorm(self._norm_weight(name), self.spec.rms_norm_eps if eps is None else eps, self.dtype)

    def _joined(self, name: str, whole: str, *parts: tuple[str, int, int, int]) -> Linear:
        """`name`'s projections (part, rows, start, stop) as one layer of this rank's rows: out of one tensor, `whole`,
        where the checkpoint has that."""
        outputs: list[tuple[str, int, int]] = []
        modules: dict[str, tuple[int, list[tuple[int, int]]]] = {}
        first = at = 0
        for part, rows, start, stop in parts:
            if f"{name}.{whole}.weight" in self._shapes:
                outputs.append((f"{name}.{whole}", first + start, first + stop))
            else:
                outputs.append((f"{name}.{part}", start, stop))
            module, *own = outputs[-1]
            modules.setdefault(module, (at, []))[1].append((own[0], own[1]))
            first, at = first + rows, at + stop - start
        linear = self.split(*outputs)
        projections = (Projection(module, at, _rows(ranges)) for module, (at, ranges) in modules.items())
        self.adaptable.append(Adaptable(linear, tuple(projections)))
        return linear

    def _output(self, name: str, start: int, stop: int) -> Linear:
        """The projection back to the hidden size."""
        linear = self.summand(name, start, stop)
        self.adaptable.append(Adaptable(linear, (Projection(name, 0),), (start, stop)))
        return linear

    def _qkv(self, name: str) -> Linear:
        dim, spec = self.spec.head_dim, self.spec
        (q0, q1), (k0, k1) = self.heads, self.kv_heads
        keys = spec.num_kv_heads * dim, k0 * dim, k1 * dim
        queries = spec.num_heads * dim, q0 * dim, q1 * dim
        return self._joined(name, "qkv_proj", ("q_proj", *queries), ("k_proj", *keys), ("v_proj", *keys))

    def attention(
        self,
        name: str,
        *,
        window: int | None,
        scale: float | None = None,
        rope: int = 0,
        softcap: float | None = None,
    ) -> Attention:
        """`scale`: on the products of queries and keys, D ** -0.5 by default; `rope`: which of the rotary tables;
        `softcap`: scores s become c tanh(s / c)."""
        spec = self.spec
        normed = f"{name}.q_norm.weight" in self._shapes
        return Attention(
            qkv=self._qkv(name),
            output=self._output(f"{name}.o_proj", *(head * spec.head_dim for head in self.heads)),
            num_heads=self.heads[1] - self.heads[0],
            scale=spec.head_dim**-0.5 if scale is None else scale,
            window=window,
            softcap=softcap,
            sinks=self.wide(Slice(f"{name}.sinks", 0, *self.heads)) if f"{name}.sinks" in self._shapes else None,
            rope=rope,
            q_norm=self._norm_weight(f"{name}.q_norm").to(self.dtype) if normed else None,
            k_norm=self._norm_weight(f"{name}.k_norm").to(self.dtype) if normed else None,
            eps=spec.rms_norm_eps,
        )

    def mlp(self, name: str, activation: Activation = "silu") -> GatedMlp:
        """The gated MLP."""
        width = self._shapes[f"{name}.down_proj.weight"][1]  # shared experts have their own
        own = self.shard.part(width)
        gate_up = self._joined(name, "gate_up_proj", ("gate_proj", width, *own), ("up_proj", width, *own))
        return GatedMlp(gate_up, self._output(f"{name}.down_proj", *own), activation)

    def layer(self, number: int, mlp: Mlp | None = None) -> DecoderLayer:
        """A whole layer of Llama's kind; `mlp` in place of the gated one."""
        at = f"model.layers.{number}"
        return DecoderLayer(
            attention_norm=self.norm(f"{at}.input_layernorm"),
            attention=self.attention(f"{at}.self_attn", window=self.spec.windows[number]),
            mlp_norm=self.norm(f"{at}.post_attention_layernorm"),
            mlp=mlp or self.mlp(f"{at}.mlp"),
        )

    def _norm_weight(self, name: str) -> Tensor:
        weight = self._source.take(f"{name}.weight")
        return weight.float() + self.norm_offset if self.norm_offset else weight


def _rows(ranges: Sequence[tuple[int, int]]) -> Callable[[Tensor], Tensor]:
    """Takes the rows [start, stop) out of a matrix, joined."""
    return lambda matrix: torch.cat([matrix[start:stop] for start, stop in ranges])


class Decoder:
    """A whole model: `base.Model`."""

    __slots__ = (
        "_embedding",
        "_head",
        "_heads",
        "_inner",
        "_kv_heads",
        "_layers",
        "_norm",
        "_rope_dim",
        "_ropes",
        "_shard",
        "_softcap",
        "adaptable",
        "device",
        "dtype",
        "spec",
    )

    def __init__(
        self,
        parts: Parts,
        layers: Sequence[DecoderLayer],
        *,
        ropes: Sequence[RopeSpec],
        rope_dim: int | None = None,
        embedding_scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """`ropes`: the rotary embeddings that the layers number, of `rope_dim` channels (default: a
        head's); `softcap`: logits l become c tanh(l / c)."""
        self.spec = parts.spec
        self.dtype = parts.dtype
        self.adaptable = tuple(parts.adaptable)
        """Where adapters can be."""
        self._shard = parts.shard
        self._heads, self._kv_heads, self._inner = (
            stop - start for start, stop in (parts.heads, parts.kv_heads, parts.inner)
        )
        self._embedding = parts.embedding(embedding_scale)
        self.device = self._embedding.device
        self._layers = list(layers)
        self._norm = parts.norm("model.norm")
        self._head = parts.head()
        self._ropes = tuple(ropes)
        self._rope_dim = rope_dim or self.spec.head_dim
        self._softcap = softcap

    @property
    def weight_bytes(self) -> int:
        """Bytes held by the large weights."""
        layers = sum(layer.attention.nbytes + layer.mlp.nbytes for layer in self._layers)
        return layers + self._embedding.nbytes + self._head.nbytes

    def workspace(self, max_tokens: int, max_len: int) -> Workspace:
        """Scratch for steps of at most `max_tokens` tokens at positions below `max_len`."""
        spec = self.spec

        def scratch(width: int) -> Tensor:
            # Written once now, so that the first large step does not pay for the page faults.
            return torch.empty(max_tokens, width, dtype=self.dtype, device=self.device).zero_()

        return Workspace(
            hidden=scratch(spec.hidden_size),
            residual=scratch(spec.hidden_size),
            projected=scratch(spec.hidden_size),
            qkv=scratch((self._heads + 2 * self._kv_heads) * spec.head_dim),
            context=scratch(self._heads * spec.head_dim),
            gate_up=scratch(2 * self._inner),
            inner=scratch(self._inner),
            ropes=tuple(cos_sin_tables(rope, self._rope_dim, max_len, self.device) for rope in self._ropes),
        )

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKv], scratch: Workspace, *, whole: bool = True) -> None:
        """Leaves in `residual` and `projected` two states whose sum is the last layer's output; without `whole`, its
        input in `residual`, and normed in `hidden`."""
        num = batch.token_ids.shape[0]
        residual, hidden = scratch.residual[:num], scratch.hidden[:num]
        self._embedding(batch.token_ids, residual)
        self._layers[0].attention_norm(residual, hidden)
        last = len(self._layers) - 1
        for number, (layer, layer_kv) in enumerate(zip(self._layers, kv, strict=True)):
            if number == last and not whole:
                layer.attention.write(hidden, batch, layer_kv, scratch.ropes, qkv=scratch.qkv[:num])
                return
            # The addition after a layer is fused with the next layer's norm; after the last, with the final one, on
            # the rows that sample only.
            following = self._layers[number + 1].attention_norm if number < last else None
            self._layer(layer, batch, layer_kv, scratch, num, following)

    def finish(self, read: ReadBatch, kv: Sequence[LayerKv], scratch: Workspace) -> None:
        """Leaves the states of `read` where `forward` leaves those of all tokens."""
        num = read.tokens.shape[0]
        # Copies first: tokens move to places where others are still to be read.
        for states in (scratch.hidden, scratch.residual):
            states[:num] = states[read.tokens]
        self._layer(self._layers[-1], read, kv[-1], scratch, num, None)

    def _layer(
        self,
        layer: DecoderLayer,
        batch: AttentionBatch,
        kv: LayerKv,
        scratch: Workspace,
        num: int,
        following: RmsNorm | None,
    ) -> None:
        """One layer over the first `num` rows, from its input in `residual`, and normed in `hidden`. Its output is left
        in the same way for the `following` norm; without one as two states in `residual` and `projected`."""
        residual, hidden, projected = scratch.residual[:num], scratch.hidden[:num], scratch.projected[:num]
        flat = scratch.context[:num]
        ranks = self._shard.collectives
        layer.attention(
            hidden,
            batch,
            kv,
            scratch.ropes,
            qkv=scratch.qkv[:num],
            context=flat.view(num, self._heads, self.spec.head_dim),
            flat=flat,
            out=projected,
            joint=Joint(
                residual=residual, ranks=ranks, after=layer.after_attention, norm=layer.mlp_norm, normed=hidden
            ),
        )
        layer.mlp(
            hidden,
            MlpScratch(scratch.gate_up[:num], scratch.inner[:num], projected),
            Joint(residual=residual, ranks=ranks, after=layer.after_mlp, norm=following, normed=hidden),
            batch.adapters,
        )

    def states(self, rows: Tensor, scratch: Workspace) -> Tensor:
        """States [S, H] after the final norm of the tokens `rows` of the last forward pass."""
        hidden, residual = scratch.projected[rows], scratch.residual[rows]
        self._norm.add(hidden, residual, hidden)
        return hidden

    def logits(self, rows: Tensor, scratch: Workspace) -> Tensor:
        """Logits [S, V] of the tokens `rows` of the last forward pass."""
        logits = self._whole(self._head(self.states(rows, scratch)))
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits

    def _whole(self, logits: Tensor) -> Tensor:
        """Every rank's logits [S, V of this rank] side by side: [S, V]."""
        collectives, vocab = self._shard.collectives, self.spec.vocab_size
        if collectives is None:
            return logits
        # All ranks exchange as much: the last may have fewer ids.
        width = self._shard.part(vocab)[1] - self._shard.part(vocab)[0]
        most = -(-vocab // self._shard.size)
        part = logits if width == most else torch.nn.functional.pad(logits, (0, most - width))
        return collectives.gather(part.contiguous()).transpose(0, 1).reshape(len(logits), -1)[:, :vocab].contiguous()
