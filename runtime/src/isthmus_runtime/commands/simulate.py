"""`isthmus-runtime simulate`: proof runs of the core, and capacity planning with the coarse model. Torch-free."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import ConfigError
from ..quantities import parse_duration
from ..sim.faults import draw
from ..sim.hardware import GPUS, MODELS, StepModel, Steps, find_gpu, find_model
from ..sim.measured import Calibration, calibrate, read_steps
from ..sim.planner import Cluster, Slo, simulate
from ..sim.proof import prove
from ..sim.report import distribution_svg, search_svg, summary
from ..sim.routing import RoutingWorld, compare
from ..sim.search import search
from ..sim.traces import TraceRequest, generate_fan_out, generate_trace, read_trace, write_trace

GENERATORS: dict[str, Callable[..., list[TraceRequest]]] = {"synthetic": generate_trace, "fan-out": generate_fan_out}


_MOST_PODS = 10_000
_MOST_RATE = 10_000.0
"""Requests a second of a trace that is made up: ten minutes of them are six million."""


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
    plan.add_argument("--kv-dtype", default="auto", choices=["auto", "fp8"], help="of the KV pool; auto: 2 bytes")
    plan.add_argument("--gpu", default="h100", help=f"JSON file, or {', '.join(sorted(GPUS))}")
    plan.add_argument("--tp", type=int, default=1, help="GPUs per engine")
    plan.add_argument("--trace", default="synthetic", help="Mooncake trace (JSON lines), synthetic or fan-out")
    plan.add_argument("--rate", type=float, default=10.0, help="synthetic: requests per second")
    plan.add_argument("--duration", default="10m", help="synthetic: length of the trace")
    plan.add_argument("--prefill", type=int, default=1, help="prefill engines")
    plan.add_argument("--decode", type=int, default=1, help="decode engines")
    plan.add_argument("--unified", type=int, default=0, help="unified engines, instead of --prefill and --decode")
    plan.add_argument("--search", action="store_true", help="find the cheapest split that meets the SLO")
    plan.add_argument("--slo-ttft", default="2s")
    plan.add_argument("--slo-itl", default="50ms")
    plan.add_argument("--attainment", type=float, default=0.9, help="search: share of requests within the SLO")
    plan.add_argument("--cache", default="local", choices=["none", "local", "pool"], help="where prefixes are kept")
    plan.add_argument("--link-gbps", type=float, help="GB/s of KV transfer out of a prefill engine; default 25")
    plan.add_argument("--calibrate", default="", help="what `bench --steps` wrote: that engine instead of --gpu's")
    plan.add_argument("--kv-tokens", type=int, help="tokens whose KV an engine holds; default by --model and --gpu")
    plan.add_argument("--routing", action="store_true", help="instead: hit rates of the routing policies on the trace")
    plan.add_argument("--routers", type=int, default=2, help="with --routing: replicas of the router")
    plan.add_argument("--engines", type=int, default=4, help="with --routing: engines behind them")
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
    if (make := GENERATORS.get(args.trace)) is None:
        return read_trace(args.trace)
    return make(rate=args.rate, duration_s=parse_duration(args.duration), seed=args.first_seed)


def _problems(args: argparse.Namespace) -> list[str]:
    limits = {"tp": 1, "prefill": 1, "decode": 1, "routers": 1, "engines": 1}
    found = [f"--{k} {getattr(args, k)} must be {low} or more" for k, low in limits.items() if getattr(args, k) < low]
    found += [f"--{k} {getattr(args, k)} must be at most {_MOST_PODS}" for k in limits if getattr(args, k) > _MOST_PODS]
    if args.trace in GENERATORS and args.rate > _MOST_RATE:
        found.append(f"--rate {args.rate:g} must be at most {_MOST_RATE:g}")
    above = {k: getattr(args, k) for k in ("rate", "link_gbps", "kv_tokens")}
    found += [f"--{k.replace('_', '-')} must be above 0" for k, v in above.items() if v is not None and v <= 0]
    if args.unified < 0 or (args.unified and args.search):
        found.append(f"--unified {args.unified} must be 0 or more, and --search is for prefill and decode")
    if not 0 < args.attainment <= 1:
        found.append(f"--attainment {args.attainment} must be above 0, at most 1")
    for flag in ("slo_ttft", "slo_itl", "duration"):
        try:
            parse_duration(getattr(args, flag))
        except ValueError as error:
            found.append(f"--{flag.replace('_', '-')}: {error}")
    if args.trace not in GENERATORS and not Path(args.trace).is_file():
        found.append(f"--trace {args.trace!r} is neither a file nor one of {', '.join(GENERATORS)}")
    return found


def _engine(args: argparse.Namespace) -> tuple[Steps, Calibration | None]:
    """Step times: measured, or a roofline."""
    model = find_model(args.model)
    if args.kv_dtype == "fp8":
        model = model.with_fp8_kv()
    roof = StepModel(model=model, gpu=find_gpu(args.gpu), tp=args.tp)
    kv_tokens = roof.kv_tokens if args.kv_tokens is None else args.kv_tokens
    if kv_tokens < 1:
        raise ConfigError(f"{args.model} does not fit {args.tp} x {args.gpu}; raise --tp")
    if not args.calibrate:
        return replace(roof, kv_tokens_given=args.kv_tokens), None
    fit = calibrate(
        read_steps(args.calibrate),
        name=roof.model.name,
        kv_tokens=kv_tokens,
        kv_bytes_per_token=roof.kv_bytes_per_token,
        tp=args.tp,
        unified=bool(args.unified),
    )
    return fit.steps, fit


def _routing(args: argparse.Namespace) -> int:
    found = compare(_trace(args), RoutingWorld(engines=args.engines, routers=args.routers))
    print("| policy | hit rate | busiest engine / mean | mean wait |\n|---|---|---|---|")
    for r in found:
        print(f"| {r.policy} | {r.hit_rate:.1%} | {r.imbalance:.2f} | {r.mean_wait_s:.2f} s |")
    return 0


def _plan(args: argparse.Namespace) -> int:
    if problems := _problems(args):
        raise ConfigError(problems)
    if args.routing:
        return _routing(args)
    steps, fit = _engine(args)
    trace = _trace(args)
    if args.write_trace:
        write_trace(args.write_trace, trace)
    slo = Slo(ttft_s=parse_duration(args.slo_ttft), itl_s=parse_duration(args.slo_itl))
    cluster = Cluster(
        steps=steps,
        prefills=0 if args.unified else args.prefill,
        decodes=0 if args.unified else args.decode,
        unified=args.unified,
        cache=args.cache,
    )
    if fit is not None:
        cluster = fit.around(cluster)
    if args.link_gbps is not None:
        cluster = replace(cluster, link_bytes_per_s=args.link_gbps * 1e9)
    gc.freeze()  # the trace stays to the end: the collector need not walk through it again and again
    started = time.process_time()
    charts: dict[str, str] = {}
    tried: list[dict[str, float]] = []
    if args.search:
        found = search(cluster, trace, slo, args.attainment)
        cluster, report = found.cluster, found.report
        tried = [{"prefill": t.prefills, "decode": t.decodes, "within_slo": t.attainment} for t in found.tried]
        charts["search.svg"] = search_svg(found, args.attainment)
    else:
        report = simulate(cluster, trace, slo)
    body = summary(cluster, report, slo, round(time.process_time() - started, 3))
    charts["latency.svg"] = distribution_svg(report, slo)
    if tried:
        body["tried"] = tried
    if fit is not None:
        body["calibration"] = {
            "points": fit.points,
            "request_s": fit.request_s,
            "prefill_slowed_beside_decode": fit.steps.prefill_slowed,
            "largest_error": fit.errors,
        }
    if args.out:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(body, indent=2) + "\n")
        for name, svg in charts.items():
            (out / name).write_text(svg)
    print(json.dumps({k: v for k, v in body.items() if k != "tried"}, indent=2))
    return 0
