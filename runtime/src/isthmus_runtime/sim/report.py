"""Results as JSON and as SVG written by hand: two small line charts are not worth a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .planner import Cluster, Report, Slo

_WIDTH, _HEIGHT, _LEFT, _TOP = 460, 260, 56, 34
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37")


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank of sorted values; 0 when there are none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def summary(cluster: Cluster, report: Report, slo: Slo, cpu_s: float) -> dict[str, object]:
    """Everything a reader needs to judge and repeat the run."""
    ttft, itl, span = sorted(report.ttft), sorted(report.itl), max(report.span_s, 1e-9)
    steps = cluster.steps
    return {
        "cluster": {
            "prefill_engines": cluster.prefills,
            "decode_engines": cluster.decodes,
            "tensor_parallel": steps.tp,
            "gpus": cluster.gpus,
            "model": steps.model.name,
            "gpu": steps.gpu.name,
            "gpu_source": steps.gpu.source,
            "cache": cluster.cache,
            "kv_tokens_per_engine": steps.kv_tokens,
            "prefill_efficiency": round(steps.prefill_efficiency, 4),
            "decode_efficiency": round(steps.decode_efficiency, 4),
        },
        "slo": {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s},
        "requests": report.requests,
        "never_fit": report.never_fit,
        "ttft_s": {name: percentile(ttft, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "itl_s": {name: percentile(itl, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "within_slo": report.attainment,
        "goodput_requests_per_s": report.good / span,
        "output_tokens_per_s": report.output_tokens / span,
        "prefill_utilisation": report.prefill_busy_s / span / cluster.prefills,
        "decode_utilisation": report.decode_busy_s / span / cluster.decodes,
        "kv_hit_rate": report.hit_tokens / max(1, report.prompt_tokens),
        "virtual_s": report.span_s,
        "cpu_s": cpu_s,
    }


def distribution_svg(report: Report, slo: Slo) -> str:
    """Cumulative distributions of TTFT and ITL, each with its limit."""
    charts = (
        ("time to first token, s", sorted(report.ttft), slo.ttft_s),
        ("inter-token latency, ms", sorted(v * 1000 for v in report.itl), slo.itl_s * 1000),
    )
    parts: list[str] = []
    for number, (title, values, limit) in enumerate(charts):
        top = max(limit * 1.5, percentile(values, 0.99) * 1.1, 1e-9)
        points = [(min(percentile(values, i / 200), top), i / 200) for i in range(201)] if values else []
        parts.append(_chart(number, title, points, top, limit))
    return _page(parts)


def search_svg(tried: Sequence[tuple[int, float]], wanted: float) -> str:
    """Best attainment by number of GPUs."""
    best: dict[int, float] = {}
    for gpus, attainment in tried:
        best[gpus] = max(best.get(gpus, 0.0), attainment)
    points = sorted((float(gpus), share) for gpus, share in best.items())
    title = f"GPUs; share of requests within the SLO ({wanted:.0%} wanted)"
    return _page([_chart(0, title, points, max(x for x, _ in points) * 1.05, None)])


def _chart(number: int, title: str, points: Sequence[tuple[float, float]], top: float, limit: float | None) -> str:
    left = _LEFT + number * (_WIDTH + _LEFT)

    def place(x: float, y: float) -> str:
        return f"{left + x / top * (_WIDTH - 20):.1f},{_TOP + (1 - y) * _HEIGHT:.1f}"

    line = " ".join(place(x, y) for x, y in points)
    parts = [f'<text x="{left}" y="{_TOP - 14}" font-weight="bold">{escape(title)}</text>']
    for share in (0.0, 0.5, 0.9, 1.0):
        y = _TOP + (1 - share) * _HEIGHT
        parts.append(f'<line x1="{left}" x2="{left + _WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for i in range(5):
        x = left + i / 4 * (_WIDTH - 20)
        parts.append(f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{top * i / 4:.3g}</text>')
    if limit is not None:
        start, end = place(limit, 0), place(limit, 1)
        (x1, y1), (x2, y2) = start.split(","), end.split(",")
        parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{_COLOURS[1]}" stroke-dasharray="5 4"/>'
        )
    parts.append(f'<polyline points="{line}" fill="none" stroke="{_COLOURS[0]}" stroke-width="2"/>')
    return "\n".join(parts)


def _page(parts: Sequence[str]) -> str:
    width, height = len(parts) * (_WIDTH + _LEFT) + 20, _HEIGHT + _TOP + 36
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
