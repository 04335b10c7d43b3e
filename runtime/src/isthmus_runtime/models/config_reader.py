"""Takes typed values out of a `config.json`, collecting every problem. Torch-free.

Keys are allow-listed: one that no family code asked for, that is not known to be harmless and that is set, is refused
by name, because it may change the mathematics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from ..errors import WeightsError
from ..layers.rope_spec import RopeSpec
from . import rope_config
from .json_reader import JsonReader
from .quantization import Quantization, read_quantization

# Bookkeeping, training and generation defaults that exporters write into config.json: none of it is used to compute
# logits.
# fmt: off
_HARMLESS = frozenset({
    "architectures", "attention_dropout", "attn_implementation", "bad_words_ids", "begin_suppress_tokens",
    "bos_token_id", "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "dtype", "early_stopping", "embd_pdrop", "encoder_no_repeat_ngram_size",
    "eos_token_id", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "id2label", "initializer_range", "label2id", "length_penalty", "max_length",
    "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "remove_invalid_values", "repetition_penalty", "resid_pdrop", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    # For embeddings: how short they may be cut (`pooling.py` reads it).
    "is_matryoshka", "matryoshka_dimensions",
    "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "typical_p",
    "unsloth_fixed", "unsloth_version", "use_cache",
})
# fmt: on


class Common(TypedDict):
    """The fields of `ModelSpec` that every family reads alike."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    tie_word_embeddings: bool
    quantization: Quantization | None
    dtype: str
    eos_token_ids: tuple[int, ...]


MOST_PARTS = 1 << 14
"""Of layers, and of experts: each is a record."""


class ConfigReader(JsonReader):
    """A model's configuration. `generation` is its `generation_config.json`, or empty."""

    def __init__(self, values: Mapping[str, Any], source: str, *, generation: Mapping[str, Any] | None = None) -> None:
        super().__init__(values, source)
        self._generation = generation or {}
        # Of the model, once `common` has read them.
        self._head_dim = self._max_position = 1

    def common(
        self, *, head_dim: int | None = None, max_position: int = 2048, tied: bool = False, eps: float = 1e-6
    ) -> Common:
        """The fields that every family has.

        The arguments are a family's defaults; `head_dim` where heads are not an even split of the hidden size, `eps` of
        `rms_norm_eps`.
        """
        hidden = self.integer("hidden_size")
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            self.problem("num_attention_heads", f"{heads} is not a multiple of num_key_value_heads {kv_heads}")
        head_dim = self.integer("head_dim", head_dim or max(1, hidden // heads))
        if head_dim % 2:
            self.problem("head_dim", f"{head_dim} is odd; rotary embedding needs an even one")
        quantized = self.inner("quantization_config") if self.get("quantization_config") else None
        self._head_dim = head_dim
        self._max_position = self.integer("max_position_embeddings", max_position)
        ends = self._generation.get("eos_token_id", self.get("eos_token_id"))
        return Common(
            architecture=str(self.get("architectures")[0]),
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.integer("intermediate_size"),
            num_layers=self.integer("num_hidden_layers", most=MOST_PARTS),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.number("rms_norm_eps", eps),
            max_position=rope_config.reach(self.scaling(), self._max_position),
            tie_word_embeddings=self.boolean("tie_word_embeddings", tied),
            quantization=None if quantized is None else read_quantization(quantized),
            dtype=self.text("dtype", "") or self.text("torch_dtype", ""),
            eos_token_ids=self._token_ids(ends, "eos_token_id"),
        )

    def rope(self, *, partial: bool = False, head_dim: int | None = None) -> RopeSpec:
        """The one rotary embedding of all layers; call it after `common`.

        `partial`: the family may turn a part of a head's channels. `head_dim`: of what turns, the heads' by default.
        """
        theta = self.number("rope_theta", 10000.0)
        return self.stretch(self.scaling(), theta, partial=partial, head_dim=head_dim)

    def stretch(
        self, scaling: JsonReader, theta: float, *, partial: bool = False, head_dim: int | None = None
    ) -> RopeSpec:
        """A rotary embedding out of `scaling`, an object of the `rope_scaling` kind; `theta` where it names none."""
        if not partial:
            self.only("partial_rotary_factor", 1, 1.0)
            scaling.only("partial_rotary_factor", 1, 1.0)
        # Only this kind has it beside the object.
        longrope = rope_config.kind_of(scaling) == "longrope"
        original = self.optional_integer("original_max_position_embeddings") if longrope else None
        return rope_config.read_rope(
            scaling,
            theta=theta,
            partial=self.number("partial_rotary_factor", 1.0) if partial else 1.0,
            head_dim=head_dim or self._head_dim,
            max_position=self._max_position,
            original=original,
        )

    def scaling(self) -> JsonReader:
        """The object that says how the rotary embedding is stretched."""
        # transformers 5 writes everything under rope_parameters, version 4 theta beside rope_scaling.
        return self.inner("rope_parameters" if self.get("rope_parameters") else "rope_scaling")

    def layer_types(self, num_layers: int) -> tuple[bool, ...] | None:
        """Per layer whether `layer_types` says it is a sliding one; None where the key is missing."""
        kinds = self.get("layer_types")
        if kinds is None:
            return None
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or not all(kind in ("sliding_attention", "full_attention") for kind in kinds)
        ):
            self.problem(
                "layer_types", f"must name sliding_attention or full_attention for each of the {num_layers} layers"
            )
            return (False,) * num_layers
        return tuple(kind == "sliding_attention" for kind in kinds)

    def qwen_windows(self, num_layers: int) -> tuple[int | None, ...]:
        """Windows by layer as Qwen2 and Qwen3 say them."""
        window, use = self.optional_integer("sliding_window", 4096), self.boolean("use_sliding_window", False)
        first, types = self.get("max_window_layers"), self.layer_types(num_layers)
        if window is None or not use:
            return (None,) * num_layers
        first = first if isinstance(first, int) else 28
        return tuple(
            window if (layer >= first if types is None else types[layer]) else None for layer in range(num_layers)
        )

    def finish(self, *ignored: str) -> None:
        """Refuse the keys that are set but were never read; `ignored` are this family's harmless ones.

        Raises WeightsError with every problem that was found.
        """
        self._read |= _HARMLESS | set(ignored)
        self.refuse_unread("this architecture")
        if self.problems:
            raise WeightsError(self.problems)

    def _token_ids(self, value: Any, key: str) -> tuple[int, ...]:
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            self.problem(key, f"is {value!r}, expected a token id or a list of them")
            return (0,)
        return tuple(ids)
