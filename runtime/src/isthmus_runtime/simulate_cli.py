"""`isthmus-runtime simulate`: proof runs of the core, and capacity planning with the coarse model. Torch-free."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .config import parse_duration
from .errors import ConfigError
from .sim.faults import draw
from .sim.hardware import GPUS, MODELS, StepModel, calibrate, find_gpu, find_model
from .sim.planner import Cluster, Slo, simulate
from .sim.proof import prove
from .sim.report import distribution_svg, search_svg, summary
from .sim.search import search
from .sim.traces import TraceRequest, generate_trace, read_trace, write_trace


def build_simulate_parser() -> argparse.ArgumentParser:
    """Flags of `isthmus-runtime simulate`."""
    p = argparse.ArgumentParser(prog="isthmus-runtime simulate", description=__doc__)
    proof = p.add_argument_group("proof: the real core under a virtual clock and faults from a seed")
    proof.add_argument("--proof", action="store_true", help="run the proof instead of planning")
    proof.add_argument("--seed", type=int, help="run this one seed and print its trace if it fails")
    proof.add_argument("--first-seed", type=int, default=0)
    proof.add_argument("--lifetimes", type=int, default=10_000, help="requests to see from arrival to end")
    proof.add_argument("--keep-going", action="store_true", help="do not stop at the first violation")
    plan = p.add_argument_group("planning: a coarse model of a whole cluster")
    plan.add_argument("--model", default="qwen3-8b", help=f"model directory, or {', '.join(sorted(MODELS))}")
    plan.add_argument("--gpu", default="h100", help=f"JSON file, or {', '.join(sorted(GPUS))}")
    plan.add_argument("--tp", type=int, default=1, help="GPUs per engine")
    plan.add_argument("--trace", default="synthetic", help="Mooncake trace (JSON lines), or synthetic")
    plan.add_argument("--rate", type=float, default=10.0, help="synthetic: requests per second")
    plan.add_argument("--duration", default="10m", help="synthetic: length of the trace")
    plan.add_argument("--prefill", type=int, default=1, help="prefill engines")
    plan.add_argument("--decode", type=int, default=1, help="decode engines")
    plan.add_argument("--search", action="store_true", help="find the cheapest split that meets the SLO")
    plan.add_argument("--slo-ttft", default="2s")
    plan.add_argument("--slo-itl", default="50ms")
    plan.add_argument("--attainment", type=float, default=0.9, help="search: share of requests within the SLO")
    plan.add_argument("--cache", default="local", choices=["none", "local", "pool"], help="where prefixes are kept")
    plan.add_argument("--link-gbps", type=float, default=25.0, help="GB/s of KV transfer out of a prefill engine")
    plan.add_argument("--calibration", default="", help="JSON list of measured steps (docs/simulation.md)")
    plan.add_argument("--out", default="", help="directory for report.json, latency.svg and, with --search, search.svg")
    plan.add_argument("--write-trace", default="", help="also write the trace to this file")
    return p


def simulate_main(argv: Sequence[str]) -> int:
    """Run it. 0: done (no violation); 1: a violation; ConfigError: wrong flags."""
    args = build_simulate_parser().parse_args(argv)
    return _proof(args) if args.proof else _plan(args)


def _proof(args: argparse.Namespace) -> int:
    started = time.process_time()
    if args.seed is not None:
        result = prove([args.seed])
        print(draw(args.seed), file=sys.stderr)
    else:
        seeds = itertools.count(args.first_seed)
        result = prove(seeds, lifetimes=args.lifetimes, stop_at_first=not args.keep_going)
    took = time.process_time() - started
    for violation in result.violations:
        print(violation)
    print("\n".join(result.lines()))
    print(f"{took:.1f} s of CPU, {result.lifetimes / max(took, 1e-9) * 60:.0f} lifetimes a minute of one core")
    return 1 if result.violations else 0


def _trace(args: argparse.Namespace) -> list[TraceRequest]:
    if args.trace != "synthetic":
        return read_trace(args.trace)
    return generate_trace(rate=args.rate, duration_s=parse_duration(args.duration), seed=args.first_seed)


def _problems(args: argparse.Namespace) -> list[str]:
    limits = {"tp": 1, "prefill": 1, "decode": 1}
    found = [f"--{k} {getattr(args, k)} must be {low} or more" for k, low in limits.items() if getattr(args, k) < low]
    found += [f"--{k.replace('_', '-')} must be above 0" for k in ("rate", "link_gbps") if getattr(args, k) <= 0]
    if not 0 < args.attainment <= 1:
        found.append(f"--attainment {args.attainment} must be above 0, at most 1")
    for flag in ("slo_ttft", "slo_itl", "duration"):
        try:
            parse_duration(getattr(args, flag))
        except ValueError as error:
            found.append(f"--{flag.replace('_', '-')}: {error}")
    if args.trace != "synthetic" and not Path(args.trace).is_file():
        found.append(f"--trace {args.trace!r} is neither a file nor synthetic")
    return found


def _plan(args: argparse.Namespace) -> int:
    if problems := _problems(args):
        raise ConfigError(problems)
    steps = StepModel(model=find_model(args.model), gpu=find_gpu(args.gpu), tp=args.tp)
    if steps.kv_tokens < 1:
        raise ConfigError(f"{args.model} does not fit {args.tp} x {args.gpu}; raise --tp")
    fit = None
    if args.calibration:
        fit = calibrate(steps, json.loads(Path(args.calibration).read_text()))
        steps = fit.steps
    trace = _trace(args)
    if args.write_trace:
        write_trace(args.write_trace, trace)
    slo = Slo(ttft_s=parse_duration(args.slo_ttft), itl_s=parse_duration(args.slo_itl))
    cluster = Cluster(
        steps=steps,
        prefills=args.prefill,
        decodes=args.decode,
        link_bytes_per_s=args.link_gbps * 1e9,
        cache=args.cache,
    )
    started = time.process_time()
    charts: dict[str, str] = {}
    tried: list[dict[str, float]] = []
    if args.search:
        found = search(cluster, trace, slo, args.attainment)
        cluster, report = found.cluster, found.report
        tried = [{"prefill": t.prefills, "decode": t.decodes, "within_slo": t.attainment} for t in found.tried]
        points = [((t.prefills + t.decodes) * args.tp, t.attainment) for t in found.tried]
        charts["search.svg"] = search_svg(points, args.attainment)
    else:
        report = simulate(cluster, trace, slo)
    body = summary(cluster, report, slo, round(time.process_time() - started, 3))
    charts["latency.svg"] = distribution_svg(report, slo)
    if tried:
        body["tried"] = tried
    if fit is not None:
        body["calibration"] = {"points": fit.points, "worst_error": fit.worst_error}
    if args.out:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(body, indent=2) + "\n")
        for name, svg in charts.items():
            (out / name).write_text(svg)
    print(json.dumps({k: v for k, v in body.items() if k != "tried"}, indent=2))
    return 0
