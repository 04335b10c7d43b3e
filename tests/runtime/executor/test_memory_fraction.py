"""What graphs and steps take beside the KV pool is measured at the start, and the fraction of the card is kept."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from tiny_config import SMALLEST
from torch import Tensor

from isthmus_kernels import dispatch_logits
from isthmus_runtime.checkpoints.random import RandomTensors
from isthmus_runtime.commands.ranks import LoadedEngine, with_pool
from isthmus_runtime.config import EngineConfig
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.executor.loading import load
from isthmus_runtime.models.base import ModelSpec
from isthmus_runtime.serve_flags import parse_serve

MIB = 1 << 20
TOTAL, ASIDE = 1024 * MIB, 100 * MIB


class Card(FakeDevice):
    """On which graphs and steps take `takes` bytes beside the pool, and others what `others` says at each look."""

    def __init__(self, takes: int, *others: int) -> None:
        super().__init__()
        self.takes, self.others = takes, list(others)
        self.pools: list[int] = []

    def kv_bytes(self, fraction: float, beside: int = 0) -> int:
        left = int(TOTAL * fraction) - ASIDE - beside
        if left <= 0:
            raise ConfigError(f"graphs and steps need {(ASIDE + beside) // MIB} MiB")
        return left

    def pool(self, nbytes: int) -> Tensor:
        self.pools.append(nbytes)
        return super().pool(nbytes)

    def overdrawn(self, fraction: float) -> int:
        taken = self.pools[-1] + self.takes + (self.others.pop(0) if self.others else 0)
        return max(0, taken - int(TOTAL * fraction))


def random_weights(spec: ModelSpec, device: torch.device) -> RandomTensors:
    return RandomTensors(spec.tensor_shapes(), device=device, dtype=torch.float32, seed=1)


def start(folder: Path, card: Card, *flags: str) -> LoadedEngine:
    (folder / "config.json").write_text(json.dumps(SMALLEST))
    given = ["--kv-memory-fraction=0.9", "--max-num-seqs=8", "--max-batched-tokens=64", *flags]
    config = parse_serve(["--role", "unified", "--model", str(folder), *given])
    assert isinstance(config, EngineConfig)
    model = load(config.model, config.scheduler, device=card, source=random_weights)
    engine = with_pool(config, model, config.kv.memory_fraction, lambda number: (number,))
    engine.executor.close()
    return engine


def test_what_was_set_aside_is_enough(tmp_path: Path) -> None:
    card = Card(ASIDE)
    engine = start(tmp_path, card)
    assert len(card.pools) == 1 and not card.overdrawn(0.9)
    assert card.pools[0] == engine.plan.num_blocks * engine.plan.bytes_per_block > 800 * MIB


def test_graphs_that_take_more_make_the_pool_smaller(tmp_path: Path) -> None:
    """The card's share is kept, and no more given up than what is missing and a margin."""
    card = Card(350 * MIB)
    engine = start(tmp_path, card)
    first, second = card.pools
    assert second == engine.plan.num_blocks * engine.plan.bytes_per_block
    assert 0.9 * TOTAL - 80 * MIB < second + card.takes <= 0.9 * TOTAL < first + card.takes
    assert not card.graphs, "the first start's graphs are still there"


def test_graphs_that_leave_no_pool_are_told_with_figures(tmp_path: Path) -> None:
    card = Card(950 * MIB)
    with pytest.raises(ConfigError, match=r"graphs and steps need 101\d MiB"):
        start(tmp_path, card)
    assert not card.graphs, "what was started is still there"


@pytest.mark.parametrize("flag", ["--kv-memory=100Mi", "--num-blocks-override=100"])
def test_a_pool_of_a_given_size_stays_as_it_is(flag: str, tmp_path: Path) -> None:
    card = Card(2 * TOTAL)
    start(tmp_path, card, flag)
    assert len(card.pools) == 1


def test_requests_longer_than_the_model_are_refused_at_the_start(tmp_path: Path) -> None:
    start(tmp_path, Card(ASIDE), "--max-model-len=256")
    with pytest.raises(ConfigError, match=r"--max-model-len 257 is more than the 256 positions .* give 256 or less"):
        start(tmp_path, Card(ASIDE), "--max-model-len=257")


def test_what_others_take_meanwhile_is_told_and_served_beside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        start(tmp_path, card := Card(ASIDE, 200 * MIB, 512 * MIB))
    assert len(card.pools) == 2
    assert "graphs and steps take 0.20 GiB more than was set aside" in caplog.text
    assert "GiB more are taken than --kv-memory-fraction (gpuMemoryFraction) allows" in caplog.text


def test_the_largest_draw_is_made_before_memory_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters need a score and a token for each logit of each row: not when the first full batch asks for them."""
    drawn: list[tuple[int, bool]] = []
    sample = dispatch_logits.sample

    def noting(logits: Tensor, **given: Any) -> Tensor:
        drawn.append((len(logits), {"top_k", "top_p"} <= given.keys()))
        return sample(logits, **given)

    monkeypatch.setattr(dispatch_logits, "sample", noting)
    start(tmp_path, Card(ASIDE))
    assert (8, True) in drawn
