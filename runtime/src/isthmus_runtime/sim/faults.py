"""What one seed stands for: the size of the world, its load, and everything that goes wrong in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from ..executor.fake import Windows
from ..transfer.memory import Faults
from .network import NetworkFaults

CLIENTS = 40
"""Request lifetimes per seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A whole simulated run. Everything in it follows from `seed`, except what a test overrides."""

    seed: int
    mode: str = "memory"
    """memory: prefill writes into decode's blocks (as `direct` does); store: through a pool of keys."""
    prefills: int = 2
    decodes: int = 2
    odd_fingerprint: bool = False
    """One decode engine has another block size: nobody may be paired with it."""
    prefill_blocks: int = 40
    decode_blocks: int = 40
    block_size: int = 4
    windows: Windows = (None,)
    """Of each KV group: its sliding window in tokens, or None where it keeps the whole prefix."""
    max_model_len: int = 64
    rows: int = 3
    budget: int = 16
    max_step_s: float = 0.02
    """Beside `step_s`, short enough to bound chunks in some runs and not in others."""
    max_waiting: int = 64
    queue_timeout_s: float = 10.0
    transfer_timeout_s: float = 1.0
    record_slots: int = 4096
    prefix_caching: bool = True
    recompute: bool = True
    step_s: float = 0.004
    decode_slower: float = 1.0
    """Decode's steps take this many times longer: peers then act while a step runs."""
    disaggregate_above: int = 4
    policy: str = "least-load"
    local_without_prefill: bool = True
    clients: int = CLIENTS
    spread_s: float = 2.0
    """Arrivals fall within this time."""
    prompt_max: int = 40
    output_max: int = 12
    disconnect: float = 0.1
    timeouts_s: tuple[float, ...] = (20.0, 20.0, 20.0, 1.0)
    link_bytes_per_s: float = 200e3
    network: NetworkFaults = field(default_factory=NetworkFaults)
    transfer: Faults = field(default_factory=Faults)
    store_blocks: int = 400
    crashes: tuple[str, ...] = ()
    """Roles that crash (and come back) during the run, one entry per crash."""
    scale_downs: int = 0
    """Engines told to leave while they work; each is replaced later."""
    dead_links: int = 0
    """Times during which no transfer ends."""
    drain_timeout_s: float = 3.0
    early: bool = False
    """Prefill begins beside decode's reservation, also where decode has no room."""


def draw(seed: int) -> Scenario:
    """The scenario of a seed. Each kind of trouble is absent in a good part of the seeds, so that others show."""
    r = Random(f"scenario {seed}")

    def sometimes(share: float, low: float, high: float) -> float:
        return r.uniform(low, high) if r.random() < share else 0.0

    net, moves = r.random() < 0.6, r.random() < 0.6
    block_size = r.choice((2, 4, 4, 8))
    max_len = r.choice((32, 64))
    fits = max_len // block_size + 1
    mode = r.choice(("memory", "memory", "store"))
    roles = ["prefill", "decode", "router"] + (["store"] if mode == "store" else [])
    return Scenario(
        seed=seed,
        mode=mode,
        prefills=r.randint(1, 2),
        decodes=r.randint(1, 2),
        odd_fingerprint=r.random() < 0.1,
        prefill_blocks=r.choice((fits, fits + r.randint(1, 20), fits * 3, fits * 5)),
        decode_blocks=r.choice((fits, fits + r.randint(1, 20), fits * 3, fits * 5)),
        block_size=block_size,
        max_model_len=max_len,
        rows=r.randint(1, 5),
        budget=r.choice((3, 8, 16, 32)),
        max_waiting=4 if r.random() < 0.15 else 64,
        queue_timeout_s=0.5 if r.random() < 0.2 else 10.0,
        transfer_timeout_s=r.choice((0.3, 1.0)),
        record_slots=2 if r.random() < 0.1 else 4096,
        prefix_caching=r.random() < 0.8,
        recompute=r.random() < 0.7,
        step_s=r.choice((0.001, 0.004, 0.01)),
        decode_slower=r.choice((1.0, 1.0, 8.0)),
        disaggregate_above=r.choice((0, 4, 12)),
        policy=r.choice(("least-load", "round-robin")),
        local_without_prefill=r.random() < 0.8,
        spread_s=r.choice((0.2, 1.0, 3.0)),
        prompt_max=r.choice((12, max_len // 2, max_len - 4)),
        output_max=r.choice((3, 12, 24)),
        disconnect=sometimes(0.5, 0.05, 0.4),
        timeouts_s=r.choice(((20.0,), (20.0,), (20.0, 20.0, 1.0), (20.0, 0.3))),
        link_bytes_per_s=r.choice((5e3, 50e3, 1e7)),
        network=NetworkFaults(
            lose=sometimes(net * 0.4, 0.01, 0.1),
            duplicate=sometimes(net * 0.3, 0.02, 0.2),
            delay=sometimes(net * 0.5, 0.02, 0.3),
            delay_s=r.choice((0.05, 1.5)),
            reset=sometimes(net * 0.3, 0.002, 0.03),
        ),
        transfer=Faults(
            drop=sometimes(moves * 0.3, 0.02, 0.2),
            partial=sometimes(moves * 0.3, 0.02, 0.2),
            wrote_all_but_failed=sometimes(moves * 0.3, 0.02, 0.2),
            never=sometimes(moves * 0.3, 0.02, 0.2),
            duplicate=sometimes(moves * 0.3, 0.02, 0.2),
            stale=sometimes(moves * 0.3, 0.02, 0.2),
            evicted=sometimes(moves * 0.3, 0.02, 0.2),
            damaged=sometimes(moves * 0.3, 0.02, 0.2) if mode == "store" else 0.0,
            delay=sometimes(moves * 0.3, 0.05, 0.4),
            delay_s=r.choice((0.05, 0.5)),
            late_s=r.choice((0.2, 3.0)),
        ),
        store_blocks=r.choice((20, 400)),
        crashes=tuple(r.choice(roles) for _ in range(r.choice((0, 0, 1, 2, 4)))),
        scale_downs=r.choice((0, 0, 0, 1, 2)),
        dead_links=r.choice((0, 0, 0, 1)),
        drain_timeout_s=r.choice((0.05, 3.0)),
        early=r.random() < 0.5,
    )
