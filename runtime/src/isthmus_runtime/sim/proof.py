"""Many seeds one after another, and what they covered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .clock import Violation
from .faults import CLIENTS, draw
from .world import run_scenario


@dataclass(slots=True)
class Proof:
    """The sum of many runs."""

    seeds: int = 0
    lifetimes: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    facts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The lines of the report."""
        return [
            f"{self.lifetimes} request lifetimes in {self.seeds} seeds, {self.steps} engine turns, "
            f"{self.virtual_s:.0f} virtual seconds; {len(self.violations)} violations",
            "ends: " + ", ".join(f"{name} {count}" for name, count in self.ends.most_common()),
            "seen: " + ", ".join(f"{name} {count}" for name, count in self.facts.most_common()),
        ]


def prove(seeds: Iterable[int], *, lifetimes: int | None = None, stop_at_first: bool = True) -> Proof:
    """Run seeds until `lifetimes` requests have lived (or the seeds are used up)."""
    proof = Proof()
    for seed in seeds:
        if lifetimes is not None and proof.lifetimes >= lifetimes:
            break
        proof.seeds += 1
        try:
            outcome = run_scenario(draw(seed))
        except Violation as violation:
            proof.violations.append(str(violation))
            if stop_at_first:
                break
            proof.lifetimes += CLIENTS
            continue
        proof.lifetimes += outcome.lifetimes
        proof.steps += outcome.steps
        proof.virtual_s += outcome.virtual_s
        proof.ends.update(outcome.ends)
        proof.facts.update(outcome.facts)
    return proof
