"""What every family provides, and what the executor may ask of a model. Torch-free at run time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from ..errors import ConfigError
from ..kv.groups import LayerSpec
from ..layers.rope_spec import RopeSpec
from .quantization import Quantization
from .shard import WHOLE, Shard, Slice

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..layers.adaptable import Adaptable
    from ..layers.batch import ForwardBatch, LayerKv, ReadBatch

Shapes = dict[str, tuple[int, ...]]
"""Tensor name of the checkpoint -> shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(ABC):
    """A decoder-only transformer, as its `config.json` describes it. A family adds what is its own.

    A family is a module under `models/` with one such record, a function `parse(reader: ConfigReader) -> ModelSpec`,
    and where llama.cpp knows the family, its `GGUF: GgufFormat`. `registry.FAMILIES` maps architectures to modules.
    """

    sharded: ClassVar[bool] = False
    """Whether several ranks can compute it together (`shard.py`)."""
    row_invariant: ClassVar[bool] = True
    """Whether all its operations can compute a row alike in any batch on a GPU (ADR 40); on a CPU all do (ADR 25)."""

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
    """Longest sequence the model was made for, tokens."""
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    """Per layer: sliding window in tokens, the current one included, or None for the whole prefix."""
    quantization: Quantization | None = None
    """How the checkpoint's weights are stored; None: as they are."""
    dtype: str
    """The dtype the checkpoint says it has (`float32`, `bfloat16`, `float16`), or empty."""
    eos_token_ids: tuple[int, ...]

    @abstractmethod
    def tensor_shapes(self) -> Shapes:
        """Every tensor that the checkpoint must hold, with its shape."""

    @abstractmethod
    def build(self, source: TensorSource, dtype: torch.dtype, shard: Shard = WHOLE) -> Model:
        """Take a rank's part of the weights out of `source` and make a model that computes in `dtype`, on the weights'
        device. `check_shards` has let the number of ranks pass."""

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        """Beginnings of the names of tensors that a checkpoint may hold beside these."""
        return ()

    def active_fraction(self, name: str) -> float:
        """How much of tensor `name` the computation of one token uses: less than 1 for experts."""
        del name
        return 1.0

    def kv_variants(self, max_len: int) -> tuple[str, ...]:
        """What the keys depend on besides the weights and this record, in an engine whose longest sequence has
        `max_len` tokens: it belongs in the layout digest."""
        ropes = [value for field in fields(self) if isinstance(value := getattr(self, field.name), RopeSpec)]
        return tuple(variant for rope in ropes if (variant := rope.variant(max_len)) is not None)

    def layer_specs(self, block_size: int, dtype: str, ranks: int = 1) -> tuple[LayerSpec, ...]:
        """What `kv.plan` needs to know about the layers of one of `ranks` ranks, with `dtype` the name of the pool's
        element type: neighbours of one kind are one entry, in model order."""
        specs: list[LayerSpec] = []
        run = 0
        for number, window in enumerate(self.windows):
            run += 1
            if number + 1 < self.num_layers and self.windows[number + 1] == window:
                continue
            specs.append(
                LayerSpec(
                    kind="full" if window is None else "sliding",
                    layers=run,
                    block_size=block_size,
                    dtype=dtype,
                    kv_heads=max(1, self.num_kv_heads // ranks),
                    head_dim=self.head_dim,
                    window=window,
                )
            )
            run = 0
        return tuple(specs)


def check_shards(spec: ModelSpec, size: int) -> None:
    """Raise ConfigError, with all reasons, for a model that `size` ranks cannot compute together."""
    if size == 1:
        return
    flag = f"--tensor-parallel-size {size}"
    if not spec.sharded:
        raise ConfigError(f"{flag}: {spec.architecture} is not split over ranks yet; use 1")
    problems: list[str] = []
    for name, count in (("num_attention_heads", spec.num_heads), ("intermediate_size", spec.intermediate_size)):
        if count % size:
            problems.append(f"{flag} does not divide {name} {count} of {spec.architecture}; use a divisor of it")
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        problems.append(
            f"{flag} neither divides num_key_value_heads {spec.num_kv_heads} of {spec.architecture} nor is a multiple "
            "of it; use one that does"
        )
    if problems:
        raise ConfigError(problems)


class TensorSource(Protocol):
    """Checked weights by name."""

    def take(self, *parts: str | Slice) -> Tensor:
        """Tensors by name, or slices of them, joined along their first dimension, in memory of their own and the dtype
        of the checkpoint. Of a slice's tensor no more is kept than the slice.

        Their shapes were checked against `tensor_shapes` before.
        """


@runtime_checkable
class ScaledSource(TensorSource, Protocol):
    """A source some of whose matrices are to be multiplied as 8-bit floats with a scale for each row."""

    def scaled(self, *parts: str | Slice) -> tuple[Tensor, Tensor] | None:
        """The matrices, or slices of them, joined along their rows, E4M3 [N, K], and fp32 scales of the rows [N].
        None: `take` them."""


@runtime_checkable
class PackedSource(TensorSource, Protocol):
    """A source some of whose experts are to be multiplied as 4-bit floats."""

    def packed(self, *names: str) -> list[tuple[Tensor, Tensor]] | None:
        """Of each weight [E, inputs, outputs] the bytes and the scales that `isthmus_kernels.dispatch.moe` multiplies,
        outputs before inputs. None: `take` them."""


class Model(Protocol):
    """Weights that are ready for the forward pass. Holds no request state, and knows no policy of graphs.

    What `workspace` returns belongs to the model; the executor makes it once and hands it back.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in."""

    @property
    def device(self) -> torch.device:
        """The device of its weights."""

    @property
    def weight_bytes(self) -> int:
        """Bytes held by the weights."""

    @property
    def adaptable(self) -> Sequence[Adaptable]:
        """The linear layers that can have adapters."""

    def workspace(self, max_tokens: int, max_len: int) -> Any:
        """Scratch, on the weights' device, for steps of at most `max_tokens` tokens at positions below `max_len`.

        Made once: allocating per step costs page faults, and fixed addresses let a step be captured and replayed.
        """

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKv], scratch: Any, *, whole: bool = True) -> None:
        """All layers over `batch`; the states before the final norm are left in `scratch`. Without `whole`, of the last
        layer only the keys and values: `finish` does the rest.

        Capturable: it reads and writes tensors at fixed addresses only, and its control flow depends on nothing but
        shapes and `batch.max_query_len`. `kv` has an entry a layer.
        """

    def finish(self, read: ReadBatch, kv: Sequence[LayerKv], scratch: Any) -> None:
        """The rest of the last layer, after a `forward` that was not whole, for the tokens of `read` alone, which from
        then on are the tokens of the forward pass."""

    def states(self, rows: Tensor, scratch: Any) -> Tensor:
        """States [S, H] after the final norm of the tokens `rows` (int64 [S]) of the last forward pass."""

    def logits(self, rows: Tensor, scratch: Any) -> Tensor:
        """Logits [S, V] of the tokens `rows` (int64 [S]) of the last forward pass."""
