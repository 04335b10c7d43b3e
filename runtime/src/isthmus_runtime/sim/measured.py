"""Step times fitted to a bench run (`isthmus-runtime bench --steps`): lines through what was measured, no ceilings.

From the measured kinds (docs/simulation.md says how each is taken):

    decode   seconds by batch, and a slope for the context: least squares over batches measured with several contexts
    prefill  seconds by prompt length; the curvature is attention's
    stall    what a step with decoding requests takes longer for a prompt in it (unified), or what a decode engine
             loses by a prompt that is computed beside it and received (disaggregated)
    first    minus prefill: the part of a first token outside the engines, fixed and by prompt token; with a batch:
             how much prompts slow down beside a busy decode engine
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from ..engine.pace import plan_ahead_s
from ..errors import ConfigError
from .planner import Cluster

Line = tuple[tuple[float, float], ...]
"""(x, y), x ascending, y never descending."""

_FIELDS = {
    "prefill": ("new",),
    "decode": ("batch", "context"),
    "first": ("new", "batch", "context"),
    "stall": ("new", "batch", "context"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Step times of one engine as it was measured; see `hardware.Steps` for the calls."""

    name: str
    kv_tokens: int
    kv_bytes_per_token: float
    decode: Line
    """Seconds by batch, with no context."""
    context_s: float
    """Per token of context."""
    prefill: Line
    """Seconds by prompt tokens, one prompt alone."""
    attention_s: float
    """Per pair of a token and one before it."""
    stall: Line
    """Seconds by prompt tokens; empty: not measured."""
    prefill_slowed: float = 0.0
    tp: int = 1

    def prefill_s(self, new: float, attended: float) -> float:
        """A step of prompts alone."""
        return at(self.prefill, new) + self._more(new, attended)

    def decode_s(self, batch: float, context: float) -> float:
        """A step without prompts."""
        return at(self.decode, batch) + self.context_s * context

    def mixed_s(self, new: float, attended: float, batch: float, context: float) -> float:
        """A step of both."""
        return self.decode_s(batch, context) + at(self.stall or self.prefill, new) + self._more(new, attended)

    def received_s(self, tokens: int) -> float:
        """What a decode engine loses by a prompt that it receives."""
        return at(self.stall, tokens) if self.stall else 0.0

    def describe(self) -> dict[str, object]:
        """A line for the report."""
        return {"model": self.name, "gpu": "as measured", "step_times": "measured"}

    def _more(self, new: float, attended: float) -> float:
        """Several prompts attend to less than one of their length, a cached prefix makes it more."""
        return max(self.attention_s * (attended - new * new / 2), -at(self.prefill, new) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A fitted engine, what lies around it, and how far the fit is from the measurement."""

    steps: MeasuredSteps
    request_s: float
    """Outside the engines, of each request."""
    link_bytes_per_s: float | None
    """What the time to the first token grows by a prompt token beyond its computation, as the speed of a link; None:
    it does not grow, or the engines are unified."""
    points: int
    errors: Mapping[str, float]
    """Largest relative error by kind of point."""

    def around(self, cluster: Cluster) -> Cluster:
        """The cluster with what was measured outside the engines; the link's latency is part of that."""
        link = self.link_bytes_per_s or float("inf")
        return replace(cluster, request_s=self.request_s, link_bytes_per_s=link, link_latency_s=0.0)


def at(line: Line, x: float) -> float:
    """Between the points; the last segment goes on, and so does the first, down to half of the first point."""
    if len(line) == 1:
        return line[0][1]
    i = min(max(1, bisect_right(line, (x, float("inf")))), len(line) - 1)
    (x0, y0), (x1, y1) = line[i - 1], line[i]
    return max(y0 + (x - x0) * (y1 - y0) / (x1 - x0), line[0][1] / 2)


def read_steps(path: str | Path) -> list[dict[str, object]]:
    """The `steps` of what bench wrote. ConfigError names the file."""
    try:
        body = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--calibrate {path}: {error}") from error
    steps = body.get("steps") if isinstance(body, dict) else None
    if not isinstance(steps, list):
        raise ConfigError(f"--calibrate {path}: holds no `steps`; write it by `isthmus-runtime bench --steps --out`")
    return steps


def calibrate(
    measured: Sequence[object], *, name: str, kv_tokens: int, kv_bytes_per_token: float, tp: int, unified: bool
) -> Calibration:
    """Fit an engine. ConfigError names the entry that is wrong, or what is missing."""
    points: dict[str, list[_Point]] = {kind: [] for kind in _FIELDS}
    for number, entry in enumerate(measured):
        kind, point = _point(entry, number)
        points[kind].append(point)
    if missing := [kind for kind in ("prefill", "decode") if not points[kind]]:
        raise ConfigError(f"calibration: no points of kind {' or '.join(missing)}; run the whole `bench --steps`")
    context_s = _context_slope(points["decode"])
    prefill = _line((p.first, p.seconds) for p in points["prefill"])
    steps = MeasuredSteps(
        name=name,
        kv_tokens=kv_tokens,
        kv_bytes_per_token=kv_bytes_per_token,
        decode=_line((p.first, p.seconds - context_s * p.context) for p in points["decode"]),
        context_s=context_s,
        prefill=prefill,
        attention_s=_curvature(prefill),
        stall=_line((p.first, p.seconds) for p in points["stall"]),
        tp=tp,
    )
    request_s, token_s = _outside(prefill, [p for p in points["first"] if not p.batch], slope=not unified)

    def first(p: _Point, slowed: float) -> float:
        """Time to a first token by this fit."""
        alone = at(prefill, p.first)
        outside = request_s + token_s * p.first
        if not p.batch:
            return outside + alone
        step = steps.decode_s(p.batch, p.context)
        if unified:
            # Half of the step that runs, another one if the next is planned already, the step with the prompt.
            wait = step / 2 + plan_ahead_s(step)
            return outside + wait + steps.mixed_s(p.first, p.first**2 / 2, p.batch, p.context)
        return outside + alone * (1 + slowed)

    beside = [p for p in points["first"] if p.batch]
    slowed = 0.0
    if beside and not unified:
        slowed = max(0.0, median((p.seconds - first(p, 0.0)) / at(prefill, p.first) for p in beside))
    errors = {
        "decode": [steps.decode_s(p.first, p.context) / p.seconds for p in points["decode"]],
        "first": [first(p, slowed) / p.seconds for p in points["first"] if not p.batch],
        "first beside streams": [first(p, slowed) / p.seconds for p in beside],
    }
    return Calibration(
        steps=replace(steps, prefill_slowed=slowed),
        request_s=request_s,
        link_bytes_per_s=kv_bytes_per_token / token_s if token_s > 0 else None,
        points=len(measured),
        errors={kind: max(abs(ratio - 1) for ratio in ratios) for kind, ratios in errors.items() if ratios},
    )


@dataclass(frozen=True, slots=True)
class _Point:
    first: float
    """Prompt tokens; of decode the batch."""
    batch: float
    context: float
    seconds: float


def _point(entry: object, number: int) -> tuple[str, _Point]:
    if isinstance(entry, Mapping) and (names := _FIELDS.get(kind := str(entry.get("kind")))) is not None:
        values = [entry.get(name) for name in (*names, "seconds")]
        numbers = [float(v) for v in values if isinstance(v, int | float) and v >= 0]
        if len(numbers) == len(values) and (numbers[-1] or kind == "stall"):
            found = dict(zip(names, numbers, strict=False))
            batch = found.get("batch", 0.0)
            return kind, _Point(found.get("new", batch), batch, found.get("context", 0.0), numbers[-1])
    wanted = "; ".join(f"{kind} ({', '.join(names)}, seconds)" for kind, names in _FIELDS.items())
    raise ConfigError(f"calibration entry {number} is {entry!r}; expected numbers of a kind: {wanted}")


def _line(points: Iterable[tuple[float, float]]) -> Line:
    """Through the median at each x; a descent is noise and becomes flat."""
    by_x: dict[float, list[float]] = {}
    for x, y in points:
        by_x.setdefault(x, []).append(y)
    line: list[tuple[float, float]] = []
    for x in sorted(by_x):
        line.append((x, max(median(by_x[x]), line[-1][1] if line else 0.0)))
    return tuple(line)


def _context_slope(decode: Sequence[_Point]) -> float:
    """Least squares within batches that were measured with several contexts."""
    above = below = 0.0
    for batch in {p.batch for p in decode}:
        mine = [p for p in decode if p.batch == batch]
        context = sum(p.context for p in mine) / len(mine)
        above += sum((p.context - context) * p.seconds for p in mine)
        below += sum((p.context - context) ** 2 for p in mine)
    return max(0.0, above / below) if below else 0.0


def _curvature(prefill: Line) -> float:
    """c of a + b x + c x^2 / 2: how much the slope grows from the first half of the line to the second."""
    if len(prefill) < 3:
        return 0.0
    (x0, y0), (x1, y1), (x2, y2) = prefill[0], prefill[len(prefill) // 2], prefill[-1]
    return max(0.0, ((y2 - y1) / (x2 - x1) - (y1 - y0) / (x1 - x0)) / ((x2 - x0) / 2))


def _outside(prefill: Line, idle: Sequence[_Point], *, slope: bool) -> tuple[float, float]:
    """(fixed, by prompt token) of a first token on an idle service beyond the prompt's computation.

    Least squares of relative errors: the difference of two long times says little about a short one.
    """
    rest = [(p.first, p.seconds - at(prefill, p.first), p.seconds**-2) for p in idle]
    if not rest:
        return 0.0, 0.0
    total = sum(w for _, _, w in rest)
    x, y = sum(w * a for a, _, w in rest) / total, sum(w * b for _, b, w in rest) / total
    below = sum(w * (a - x) ** 2 for a, _, w in rest)
    token_s = max(0.0, sum(w * (a - x) * (b - y) for a, b, w in rest) / below) if slope and below else 0.0
    if token_s * x > y:  # a line through zero
        token_s = max(0.0, sum(w * a * b for a, b, w in rest) / sum(w * a * a for a, _, w in rest))
        return 0.0, token_s
    return max(0.0, y - token_s * x), token_s
