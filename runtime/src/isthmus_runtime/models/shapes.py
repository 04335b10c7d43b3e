"""The tensors of a decoder in the names that Llama's checkpoints made usual."""

from __future__ import annotations

from collections.abc import Container

from .base import ModelSpec, Shapes


def decoder_shapes(
    spec: ModelSpec,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    fused: bool = False,
    mixtures: Container[int] = (),
    attention: bool = True,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
) -> Shapes:
    """Name and shape of every tensor.

    `output_bias` is that of the attention's output projection; `qk_norm` a weight for each query and key head's norm;
    `fused` whether q, k and v are one tensor, and gate and up another; `mixtures` the layers whose MLP the family adds
    itself, and without `attention` it adds that, too; `norms` the names of a layer's norms over the hidden size.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for number in range(spec.num_layers):
        layer = f"model.layers.{number}"
        for norm in norms:
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
        if attention and fused:
            linear(f"{layer}.self_attn.qkv_proj", q + 2 * kv, hidden, qkv_bias)
        elif attention:
            linear(f"{layer}.self_attn.q_proj", q, hidden, qkv_bias)
            linear(f"{layer}.self_attn.k_proj", kv, hidden, qkv_bias)
            linear(f"{layer}.self_attn.v_proj", kv, hidden, qkv_bias)
        if attention:
            linear(f"{layer}.self_attn.o_proj", hidden, q, output_bias)
        if qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (spec.head_dim,)
        if number in mixtures:
            continue
        if fused:
            linear(f"{layer}.mlp.gate_up_proj", 2 * inner, hidden, mlp_bias)
        else:
            linear(f"{layer}.mlp.gate_proj", inner, hidden, mlp_bias)
            linear(f"{layer}.mlp.up_proj", inner, hidden, mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes
