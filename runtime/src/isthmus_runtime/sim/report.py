"""Results as JSON and as SVG written by hand: two small line charts are not worth a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10

from .planner import Cluster, Report, Slo
from .search import Found, Tried

_WIDTH, _HEIGHT, _LEFT, _TOP = 460, 260, 56, 48
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37")
_FAINT = "#59636e"


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank of sorted values; 0 when there are none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def summary(cluster: Cluster, report: Report, slo: Slo, cpu_s: float) -> dict[str, object]:
    """Everything a reader needs to judge and repeat the run."""
    ttft, itl, span = sorted(report.ttft), sorted(report.itl), max(report.span_s, 1e-9)
    steps = cluster.steps
    return {
        "cluster": {
            **steps.describe(),
            "prefill_engines": cluster.prefills,
            "decode_engines": cluster.decodes,
            "unified_engines": cluster.unified,
            "tensor_parallel": steps.tp,
            "gpus": cluster.gpus,
            "cache": cluster.cache,
            "kv_tokens_per_engine": steps.kv_tokens,
        },
        "slo": {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s},
        "requests": report.requests,
        "never_fit": report.never_fit,
        "ttft_s": {name: percentile(ttft, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "itl_s": {name: percentile(itl, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "within_slo": report.attainment,
        "goodput_requests_per_s": report.good / span,
        "output_tokens_per_s": report.output_tokens / span,
        "prefill_utilisation": report.prefill_busy_s / span / max(1, cluster.prefills),
        "decode_utilisation": report.decode_busy_s / span / (cluster.decodes or cluster.unified),
        "kv_hit_rate": report.hit_tokens / max(1, report.prompt_tokens),
        "virtual_s": report.span_s,
        "cpu_s": cpu_s,
    }


def distribution_svg(report: Report, slo: Slo) -> str:
    """Cumulative distributions of TTFT and ITL, each with its limit."""
    charts = (
        ("time to first token, seconds", sorted(report.ttft), slo.ttft_s, "s"),
        ("inter-token latency, milliseconds", sorted(v * 1000 for v in report.itl), slo.itl_s * 1000, "ms"),
    )
    parts: list[str] = []
    for number, (title, values, limit, unit) in enumerate(charts):
        axes = _Axes(number, max(limit * 1.25, percentile(values, 0.99) * 1.1, 1e-9), 1.0)
        parts += axes.frame(title, "share of requests", x_ticks=_ticks(axes.right), y_ticks=_SHARES, percent=True)
        parts.append(axes.upright(limit, f"limit {limit:g} {unit}"))
        if values:
            shares = [i / 200 for i in range(201)]
            parts.append(axes.line([(min(percentile(values, i), axes.right), i) for i in shares]))
    return _page(parts, 2)


def search_svg(found: Found, wanted: float) -> str:
    """How many GPUs it takes and in what split: the best share by number of GPUs, and every split that was tried."""
    tp, tried = found.cluster.steps.tp, found.tried
    chosen = (found.cluster.prefills, found.cluster.decodes)
    best: dict[int, Tried] = {}
    for t in tried:
        total = t.prefills + t.decodes
        if total not in best or best[total].attainment < t.attainment:
            best[total] = t
    right = max(best) * tp * 1.08
    axes = _Axes(0, right, 1.0)
    answer = f"least: {sum(chosen) * tp} GPUs: {chosen[0] * tp} prefill, {chosen[1] * tp} decode"
    parts = axes.frame("requests within both limits, by number of GPUs", answer, _ticks(right), _SHARES, percent=True)
    parts.append(axes.level(wanted, f"{wanted:.0%} wanted"))
    parts.append(axes.line([(total * tp, t.attainment) for total, t in sorted(best.items())]))
    parts += [
        axes.dot(n * tp, t.attainment, _COLOURS[0], f"{n * tp} GPUs: {t.attainment:.1%}") for n, t in best.items()
    ]
    parts.append(axes.ring(sum(chosen) * tp, found.report.attainment))
    across = max(t.prefills for t in tried) * tp * 1.15
    up = max(t.decodes for t in tried) * tp * 1.1
    axes = _Axes(1, across, up)
    parts += axes.frame("splits that were tried", "decode GPUs", _ticks(across), _ticks(up), percent=False)
    parts.append(axes.text(across, 0, "prefill GPUs", "end", dy=-8))
    for t in sorted(tried, key=lambda t: t.attainment):
        name = f"{t.prefills * tp} prefill, {t.decodes * tp} decode: {t.attainment:.1%}"
        parts.append(axes.dot(t.prefills * tp, t.decodes * tp, _shade(t.attainment, wanted), name))
    parts.append(axes.ring(chosen[0] * tp, chosen[1] * tp))
    for number, (share, text) in enumerate(((wanted, "enough"), (wanted * 0.75, "not enough"), (0.0, "far too few"))):
        y = _TOP + _HEIGHT + 40
        x = axes.left + 8 + number * 110
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="4.5" fill="{_shade(share, wanted)}"/>')
        parts.append(f'<text x="{x + 10}" y="{y}">{text}</text>')
    return _page(parts, 2)


_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def _shade(attainment: float, wanted: float) -> str:
    """Green when it is enough; else from grey to amber."""
    if attainment >= wanted:
        return _COLOURS[2]
    part = attainment / wanted
    grey, amber = (201, 205, 211), (230, 145, 20)
    return "#" + "".join(f"{round(g + (a - g) * part):02x}" for g, a in zip(grey, amber, strict=True))


def _ticks(top: float) -> tuple[float, ...]:
    """Round numbers from 0, four to nine of them."""
    step = 10.0 ** floor(log10(top))
    step = next(step * part for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if top / (step * part) <= 8)
    return tuple(i * step for i in range(int(top / step + 1e-9) + 1))


class _Axes:
    """One chart, left to right the `number`th; x from 0 to `right`, y from 0 to `top`."""

    def __init__(self, number: int, right: float, top: float) -> None:
        self.left = _LEFT + number * (_WIDTH + _LEFT)
        self.right, self.top = right, top

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is drawn."""
        return self.left + x / self.right * (_WIDTH - 20), _TOP + (1 - y / self.top) * _HEIGHT

    def frame(
        self, title: str, side: str, x_ticks: Sequence[float], y_ticks: Sequence[float], *, percent: bool
    ) -> list[str]:
        """Title, grid and numbers. `side`: what is upwards."""
        parts = [f'<text x="{self.left}" y="{_TOP - 26}" font-weight="bold">{escape(title)}</text>']
        parts.append(f'<text x="{self.left}" y="{_TOP - 9}" fill="{_FAINT}">{escape(side)}</text>')
        for tick in y_ticks:
            x, y = self.at(0, tick)
            shown = f"{tick:.0%}" if percent else f"{tick:g}"
            parts.append(f'<line x1="{x}" x2="{x + _WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e6ea"/>')
            parts.append(f'<text x="{x - 8}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>')
        for tick in x_ticks:
            x, y = self.at(tick, 0)
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}" stroke="#8c959f"/>')
            parts.append(f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{tick:g}</text>')
        return parts

    def line(self, points: Sequence[tuple[float, float]]) -> str:
        """A curve."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*p) for p in points))
        return f'<polyline points="{path}" fill="none" stroke="{_COLOURS[0]}" stroke-width="2"/>'

    def dot(self, x: float, y: float, colour: str, name: str) -> str:
        """A point that tells its name when pointed at."""
        cx, cy = self.at(x, y)
        return f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4.5" fill="{colour}"><title>{escape(name)}</title></circle>'

    def ring(self, x: float, y: float) -> str:
        """Around the answer."""
        cx, cy = self.at(x, y)
        return f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="8" fill="none" stroke="{_COLOURS[1]}" stroke-width="2"/>'

    def text(self, x: float, y: float, text: str, anchor: str, dy: float = 0) -> str:
        """A note beside a point."""
        tx, ty = self.at(x, y)
        return f'<text x="{tx:.1f}" y="{ty + dy:.1f}" text-anchor="{anchor}">{escape(text)}</text>'

    def upright(self, x: float, name: str) -> str:
        """A limit on x."""
        (x1, y1), (_, y2) = self.at(x, 0), self.at(x, self.top)
        return (
            f'<line x1="{x1:.1f}" x2="{x1:.1f}" y1="{y1}" y2="{y2}" stroke="{_COLOURS[1]}" stroke-dasharray="5 4"/>\n'
            f'<text x="{x1:.1f}" y="{y2 - 6}" text-anchor="middle" fill="{_COLOURS[1]}">{escape(name)}</text>'
        )

    def level(self, y: float, name: str) -> str:
        """A limit on y."""
        (x1, y1), (x2, _) = self.at(0, y), self.at(self.right, y)
        return (
            f'<line x1="{x1}" x2="{x2}" y1="{y1:.1f}" y2="{y1:.1f}" stroke="{_COLOURS[1]}" stroke-dasharray="5 4"/>\n'
            f'<text x="{x1 + 6}" y="{y1 - 6:.1f}" fill="{_COLOURS[1]}">{escape(name)}</text>'
        )


def _page(parts: Sequence[str], charts: int) -> str:
    width, height = charts * (_WIDTH + _LEFT) + 20, _HEIGHT + _TOP + 52
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
