"""What requests ask of logits before the draw: penalties, biases, words and ids that may not come, masks.

Everything follows from the token table on the device and from what a request said once: nothing waits for a sampled id,
and a recompute, a preemption or another engine adjusts alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isthmus_kernels import dispatch_logits

from ..request import SamplingParams
from .device.base import Device

Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
_NEVER = -np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """The adjustments of one step, on the host."""

    penalties: tuple[npt.NDArray[Any], ...]
    """Of P rows: the draw, the row of the token table, prompt length, known tokens (int64); repetition, frequency and
    presence penalty (fp32)."""
    most: int
    """Most known tokens among them."""
    biases: tuple[npt.NDArray[Any], ...]
    """The draw, the token id (int64), what is added to its logit (fp32)."""
    words: tuple[npt.NDArray[Any], ...]
    """Of B forbidden sequences: the draw, the row of the token table, prompt length, known tokens, the last token
    (int64); and int64 [B, K], the tokens before it, -1 in front of shorter ones."""
    masks: tuple[tuple[int, bytes], ...]
    """Draws that may take some ids only."""


@dataclass(frozen=True, slots=True)
class _Row:
    """What a request asks for, in the form of a step's: a step has no time to go through it item by item."""

    sampling: SamplingParams
    prompt_len: int
    biased: Longs
    by: Floats
    ends: Longs
    last: Longs
    """Of each forbidden sequence."""
    before: Longs
    """int64 [words, K]; -1 in front of shorter ones."""
    mask: bytes

    @staticmethod
    def of(sampling: SamplingParams, prompt_len: int) -> _Row:
        words = sampling.bad_words
        width = max((len(word) - 1 for word in words), default=0)
        before = np.full((len(words), width), -1, np.int64)
        for at, word in enumerate(words):
            before[at, width - len(word) + 1 :] = word[:-1]
        return _Row(
            sampling=sampling,
            prompt_len=prompt_len,
            biased=np.array([token for token, _ in sampling.logit_bias], np.int64),
            by=np.array([value for _, value in sampling.logit_bias], np.float32),
            ends=np.array(sampling.stop_token_ids if sampling.min_tokens else (), np.int64),
            last=np.array([word[-1] for word in words], np.int64),
            before=before,
            mask=_mask(sampling.allowed_token_ids),
        )


class AdjustedRows:
    """The rows whose requests adjust anything."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def set(self, row: int, sampling: SamplingParams, prompt_len: int) -> None:
        """Set what the row's request asks for."""
        asks = (
            penalised(sampling)
            or sampling.min_tokens
            or sampling.logit_bias
            or sampling.allowed_token_ids
            or sampling.bad_words
        )
        if asks:
            self._rows[row] = _Row.of(sampling, prompt_len)
        else:
            self._rows.pop(row, None)

    def of(self, rows: Longs, known: Longs) -> Adjustments | None:
        """The adjustments for the draws of a step: their rows, and how many tokens of each are known."""
        if not self._rows:
            return None
        penalties: list[tuple[float, ...]] = []
        biases: list[tuple[int, Longs, Floats]] = []
        words: list[tuple[tuple[int, int, int, int], _Row]] = []
        masks: list[tuple[int, bytes]] = []
        for draw, (row, length) in enumerate(zip(rows.tolist(), known.tolist(), strict=True)):
            if row not in self._rows:
                continue
            asked = self._rows[row]
            sampling, prompt_len = asked.sampling, asked.prompt_len
            if penalised(sampling):
                factors = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
                penalties.append((draw, row, prompt_len, length, *factors))
            if len(asked.biased):
                biases.append((draw, asked.biased, asked.by))
            if len(asked.ends) and length - prompt_len < sampling.min_tokens:
                biases.append((draw, asked.ends, np.full(len(asked.ends), _NEVER, np.float32)))
            if len(asked.last):
                words.append(((draw, row, prompt_len, length), asked))
            if asked.mask:
                masks.append((draw, asked.mask))
        if not (penalties or biases or words or masks):
            return None
        return Adjustments(
            penalties=_columns(penalties, 4, 3),
            most=max((int(entry[3]) for entry in penalties), default=0),
            biases=_biases(biases),
            words=_words(words),
            masks=tuple(masks),
        )


def penalised(sampling: SamplingParams) -> bool:
    """Whether the draw depends on what came before it in other ways than by the logits."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1)


def apply(
    device: Device,
    logits: Tensor,
    tokens: Tensor,
    adjustments: Adjustments | None,
    masks: Sequence[tuple[int, bytes]],
) -> None:
    """Within a body: adjust `logits` [S, V] in place. `tokens` is the token table; `masks` are those of the step.

    Log-probabilities are of what comes out. Masks come last: no bias allows what they refuse.
    """
    if adjustments is not None:
        if adjustments.penalties:
            dispatch_logits.penalize(logits, tokens, *_staged(device, adjustments.penalties), most=adjustments.most)
        if adjustments.biases:
            rows, ids, values = _staged(device, adjustments.biases)
            logits.index_put_((rows, ids), values.to(logits.dtype), accumulate=True)
        if adjustments.words:
            _forbid(logits, tokens, *_staged(device, adjustments.words))
        masks = (*adjustments.masks, *masks)
    if masks:
        width = max(len(mask) for _, mask in masks)
        bits = np.zeros((len(masks), width), np.uint8)
        for at, (_, mask) in enumerate(masks):
            bits[at, : len(mask)] = np.frombuffer(mask, np.uint8)
        dispatch_logits.mask_logits(logits, *_staged(device, (np.array([draw for draw, _ in masks], np.int64), bits)))


def _forbid(
    logits: Tensor,
    tokens: Tensor,
    draws: Tensor,
    rows: Tensor,
    starts: Tensor,
    ends: Tensor,
    last: Tensor,
    before: Tensor,
) -> None:
    """-inf for the last token of each sequence whose other tokens are the newest generated ones."""
    width = before.shape[1]
    positions = ends.unsqueeze(1) + torch.arange(-width, 0, device=logits.device)
    there = tokens[rows.unsqueeze(1), positions.clamp(min=0)]
    matches = ((there == before) & (positions >= starts.unsqueeze(1))) | (before < 0)
    found = torch.where(matches.all(1), _NEVER, 0.0).to(logits.dtype)
    logits.index_put_((draws, last), found, accumulate=True)


def _staged(device: Device, columns: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
    there = []
    for column in columns:
        host = torch.from_numpy(column)
        staged = device.staging(*host.shape, dtype=host.dtype)
        staged.copy_(host)
        there.append(device.zeros(*host.shape, dtype=host.dtype))
        device.copy(there[-1], staged)
    return there


def _columns(entries: Sequence[tuple[float, ...]], longs: int, floats: int) -> tuple[npt.NDArray[Any], ...]:
    kinds = (np.int64,) * longs + (np.float32,) * floats
    return (
        tuple(np.array(c, kind) for c, kind in zip(zip(*entries, strict=True), kinds, strict=True)) if entries else ()
    )


def _biases(entries: Sequence[tuple[int, Longs, Floats]]) -> tuple[npt.NDArray[Any], ...]:
    if not entries:
        return ()
    draws, ids, values = zip(*entries, strict=True)
    return np.repeat(np.array(draws, np.int64), list(map(len, ids))), np.concatenate(ids), np.concatenate(values)


def _words(entries: Sequence[tuple[tuple[int, int, int, int], _Row]]) -> tuple[npt.NDArray[Any], ...]:
    if not entries:
        return ()
    counts = [len(asked.last) for _, asked in entries]
    where = np.repeat(np.array([at for at, _ in entries], np.int64), counts, axis=0)
    before = np.full((sum(counts), max(1, *(asked.before.shape[1] for _, asked in entries))), -1, np.int64)
    begin = 0
    for count, (_, asked) in zip(counts, entries, strict=True):
        before[begin : begin + count, before.shape[1] - asked.before.shape[1] :] = asked.before
        begin += count
    last = np.concatenate([asked.last for _, asked in entries])
    return (*(np.ascontiguousarray(column) for column in where.T), last, before)


@lru_cache(8)
def _mask(allowed: tuple[int, ...]) -> bytes:
    """As in `interfaces.steps.RowMask`; empty for no ids. Kept: all choices of a request have the same."""
    bits = np.zeros(8 * (max(allowed, default=-8) // 8 + 1), np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()
