"""What one forward pass is told about its batch. Requests are flattened: there is no padding and no loop over them.

Dimension letters used in layers and models:
    T tokens of the step, all requests one after another     R requests of the step     S tokens to sample for
    H hidden size     I MLP size     V vocabulary     D head dim     Hq query heads     Hk key/value heads
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Where the requests' keys and values are, in one KV group."""

    block_tables: Tensor
    """int32 [R, max blocks]; entries past a request's context are not read."""
    slot_mapping: Tensor
    """int64 [T]: block id * block size + offset; -1: the token is not written."""


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's part of the KV pool."""

    group: int
    """Which of a batch's groups the layer belongs to."""
    pages: Tensor
    """[num_blocks, 2, block_size, Hk, D], keys before values; of latent attention [num_blocks, 1, block_size, 1, W]."""
    scales: Tensor | None = None
    """fp32 [num_blocks, 2, block_size, Hk] of a pool of 8-bit floats: what a head's numbers are multiplied with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The tokens of a step, or some of them, as attention sees them."""

    positions: Tensor
    """int64 [T]."""
    query_start_loc: Tensor
    """int32 [R + 1]: request r has tokens query_start_loc[r] to query_start_loc[r + 1]."""
    seq_lens: Tensor
    """int32 [R]: context length, this step's tokens included."""
    groups: tuple[GroupBatch, ...]
    max_query_len: int
    max_seq_len: int
    adapters: Tensor | None = None
    """int32 [T]: slot of each token's adapter, 0 for none; None: no token has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch(AttentionBatch):
    """One step."""

    token_ids: Tensor
    """int32 [T]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch(AttentionBatch):
    """The tokens of a step whose states are read after the last layer: of each request its last ones, or none. Their
    keys and values have been written; no slot of theirs is."""

    tokens: Tensor
    """int64 [T']: which tokens of the step."""
