"""Which fault comes when: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` hits `target` at `start_s` of the storm, for `seconds`; `peer` is the other end of a cut."""

    start_s: float
    kind: str
    target: str
    seconds: float
    peer: str = ""

    def __str__(self) -> str:
        other = f" and {self.peer}" if self.peer else ""
        return f"{self.start_s:6.1f} s  {self.kind} {self.target}{other} for {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: whom it may hit, and how long it lasts."""

    name: str
    roles: tuple[str, ...]
    seconds: tuple[float, float]
    peers: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """Of the machine and the mode: network, disk, clock, store."""


_ENGINES = ("prefill", "decode")
_OURS = ("router", *_ENGINES)
KINDS = (
    # Seconds of a kill: how long until the process is started again.
    Kind("kill", ("prefill",), (0.2, 2.0)),
    Kind("kill", ("decode",), (0.2, 2.0)),
    Kind("kill", ("router",), (0.2, 1.0)),
    Kind("kill", ("master",), (0.2, 3.0), needs=("store",)),
    Kind("freeze", ("prefill",), (0.5, 3.0)),
    Kind("freeze", ("decode",), (0.5, 3.0)),
    # Longer than the router waits for a silent engine.
    Kind("freeze", _ENGINES, (7.0, 9.0)),
    Kind("freeze", ("router",), (0.5, 3.0)),
    Kind("freeze", ("master",), (0.5, 4.0), needs=("store",)),
    Kind("drain", _ENGINES, (0.2, 1.0)),
    Kind("isolate", ("prefill",), (2.0, 9.0), needs=("network",)),
    Kind("isolate", ("decode",), (2.0, 9.0), needs=("network",)),
    Kind("cut", _ENGINES, (1.0, 8.0), ("router",), needs=("network",)),
    Kind("cut", ("decode",), (1.0, 6.0), ("prefill",), needs=("network",)),
    Kind("cut", _ENGINES, (1.0, 6.0), ("master",), needs=("network", "store")),
    Kind("one-way cut", _ENGINES, (1.0, 6.0), ("router", "prefill", "decode"), needs=("network",)),
    Kind("reset", _ENGINES, (0.05, 0.3), needs=("network",)),
    Kind("throttle", _ENGINES, (2.0, 6.0), needs=("network",)),
    Kind("delay", _ENGINES, (2.0, 6.0), needs=("network",)),
    Kind("log disk", _OURS, (0.5, 3.0)),
    # As many files as it has open: what it opens meanwhile fails.
    Kind("few descriptors", _OURS, (0.5, 3.0)),
    Kind("few descriptors", ("master",), (0.5, 3.0), needs=("store",)),
    # As much memory as it has: what it asks for meanwhile is refused.
    Kind("little memory", ("router",), (0.5, 3.0)),
    Kind("little memory", _ENGINES, (0.5, 3.0)),
    Kind("little memory", ("master",), (0.5, 3.0), needs=("store",)),
    # More bodies than it has memory for, by the limit that it knows of.
    Kind("crowd", ("router",), (0.5, 1.0)),
    Kind("crowd", _ENGINES, (0.5, 1.0)),
    Kind("clock jump", ("router",), (1.0, 5.0), needs=("clock",)),
    Kind("clock jump", _ENGINES, (1.0, 5.0), needs=("clock",)),
    Kind("clock jump", ("master",), (1.0, 5.0), needs=("clock", "store")),
    Kind("no names", ("router",), (2.0, 8.0), needs=("network",)),
    Kind("no names", _ENGINES, (2.0, 8.0), needs=("network", "store")),
    Kind("slow disk", _OURS, (2.0, 6.0), needs=("disk",)),
    # Killed, and started again where no file takes a byte.
    Kind("full disk", ("router",), (0.2, 0.5), needs=("network",)),
    Kind("full disk", _ENGINES, (0.2, 0.5), needs=("network",)),
    Kind("full disk", ("master",), (0.2, 0.5), needs=("network", "store")),
    # Killed, and started again with its model on a slow disk.
    Kind("slow start", ("router",), (0.2, 0.5), needs=("disk",)),
    Kind("full store", ("pool",), (2.0, 6.0), needs=("store",)),
    Kind("evicting store", ("pool",), (2.0, 6.0), needs=("store",)),
)


def plan(
    seed: int, seconds: float, names: Sequence[str], able: Collection[str], only: Sequence[str] = ()
) -> list[Fault]:
    """Faults from 2 s on until 3 s before the end. Kinds come from a shuffled deck: each once before any comes again.

    At most two overlap, and never on the same target. `able`: what kinds may need. `only`: names of the kinds to take;
    empty: all.
    """
    rng = random.Random(f"faults {seed}")
    kinds = [k for k in KINDS if set(k.needs) <= set(able)]
    kinds = [k for k in kinds if k.name in only] if only else kinds
    faults: list[Fault] = []
    deck: list[Kind] = []
    now = 2.0
    while True:
        if not deck:
            deck = rng.sample(kinds, len(kinds))
        kind = deck.pop()
        running = [f for f in faults if f.start_s + f.seconds > now]
        if len(running) > 1:
            now = min(f.start_s + f.seconds for f in running)
        length = rng.uniform(*kind.seconds)
        taken = {f.target for f in faults if f.start_s + f.seconds > now}
        able = [n for n in (*names, "pool") if n.rstrip("0123456789") in kind.roles and n not in taken]
        if able:
            if now + length > seconds - 3.0:
                return faults
            target = rng.choice(able)
            others = [n for n in names if n.rstrip("0123456789") in kind.peers and n != target]
            faults.append(Fault(now, kind.name, target, length, rng.choice(others) if others else ""))
        now += rng.uniform(0.5, 3.5)
