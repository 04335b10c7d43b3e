"""Fitting the planner to bench's step times: what is recovered of a known engine, what is refused, and that bench
writes what the planner reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from ended import end

from isthmus_runtime.commands.bench_client import BenchFailed, Target, replay
from isthmus_runtime.commands.bench_steps import Sweep, measure_steps
from isthmus_runtime.commands.simulate import simulate_main
from isthmus_runtime.engine.pace import plan_ahead_s
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.sim.measured import Calibration, MeasuredSteps, calibrate, read_steps
from isthmus_runtime.sim.planner import Cluster, Slo, simulate
from isthmus_runtime.sim.traces import TraceRequest

TRUTH = MeasuredSteps(
    name="known",
    kv_tokens=20_000,
    kv_bytes_per_token=46_080,
    decode=((1, 0.020), (2, 0.024), (4, 0.028), (8, 0.040)),
    context_s=2e-6,
    prefill=((32, 0.060), (64, 0.100), (128, 0.190), (256, 0.390), (512, 0.840)),
    attention_s=0.0,
    stall=((64, 0.004), (256, 0.010)),
    prefill_slowed=0.08,
)
OUTSIDE_S, TOKEN_S = 0.011, 40e-6


def bench(unified: bool) -> list[Mapping[str, object]]:
    """What bench would write for `TRUTH`."""
    points: list[Mapping[str, object]] = []
    for new, seconds in TRUTH.prefill:
        outside = OUTSIDE_S + (0.0 if unified else TOKEN_S * new)
        points.append({"kind": "prefill", "new": new, "seconds": seconds})
        points.append({"kind": "first", "new": new, "batch": 0, "context": 0, "seconds": seconds + outside})
    for batch, each in ((1, 84), (2, 84), (4, 84), (8, 84), (1, 1044), (8, 532)):
        context = batch * each
        points.append({"kind": "decode", "batch": batch, "context": context, "seconds": TRUTH.decode_s(batch, context)})
    for new, seconds in TRUTH.stall:
        step = TRUTH.decode_s(4, 336)
        if unified:
            first = OUTSIDE_S + step / 2 + plan_ahead_s(step) + TRUTH.mixed_s(new, new * new / 2, 4, 336)
        else:
            prompt = TRUTH.prefill_s(new, new * new / 2) * (1 + TRUTH.prefill_slowed)
            first = OUTSIDE_S + TOKEN_S * new + prompt
        points.append({"kind": "first", "new": new, "batch": 4, "context": 336, "seconds": first})
        points.append({"kind": "stall", "new": new, "batch": 4, "context": 336, "seconds": seconds})
    return points


def fit(points: list[Mapping[str, object]], unified: bool = False) -> Calibration:
    return calibrate(points, name="known", kv_tokens=20_000, kv_bytes_per_token=46_080, tp=1, unified=unified)


@pytest.mark.parametrize("unified", [False, True])
def test_a_known_engine_is_recovered(unified: bool) -> None:
    found = fit(bench(unified), unified)
    assert found.request_s == pytest.approx(OUTSIDE_S)
    assert found.steps.context_s == pytest.approx(TRUTH.context_s)
    assert found.steps.prefill_s(300, 300 * 150) == pytest.approx(TRUTH.prefill_s(300, 300 * 150))
    assert found.steps.decode_s(3, 300) == pytest.approx(TRUTH.decode_s(3, 300))
    assert found.steps.received_s(128) == pytest.approx(TRUTH.received_s(128))
    if unified:
        assert (found.link_bytes_per_s, found.steps.prefill_slowed) == (None, 0.0)
    else:
        assert found.link_bytes_per_s == pytest.approx(46_080 / TOKEN_S)
        assert found.steps.prefill_slowed == pytest.approx(0.08)
    assert max(found.errors.values()) < 1e-6


def test_the_fit_says_how_far_it_is_from_the_points() -> None:
    points = [dict(p) for p in bench(False)]
    odd = next(p for p in points if p["kind"] == "decode" and p["batch"] == 2)
    points.append(odd | {"seconds": 1.5 * TRUTH.decode_s(2, 168)})
    assert fit(list(points)).errors["decode"] == pytest.approx(0.25, abs=0.05)


def test_attention_is_the_curvature_of_prefill() -> None:
    curved = [(n, 0.01 + 1e-3 * n + 1e-6 * n * n / 2) for n in (100, 500, 900)]
    points = [{"kind": "prefill", "new": n, "seconds": s} for n, s in curved]
    points += [{"kind": "decode", "batch": 1, "context": 10, "seconds": 0.02}]
    steps = fit(list(points)).steps
    assert steps.attention_s == pytest.approx(1e-6)
    half_cached = steps.prefill_s(500, 500 * (400 + 250))
    assert half_cached - steps.prefill_s(500, 500 * 250) == pytest.approx(1e-6 * 500 * 400)


def test_an_idle_service_answers_a_single_prompt_as_it_was_measured() -> None:
    points = bench(False)
    found = fit(points)
    one = found.around(Cluster(steps=found.steps, prefills=1, decodes=1, cache="none"))
    for p in points:
        if p["kind"] == "first" and p["batch"] == 0:
            report = simulate(one, [TraceRequest(0.0, int(str(p["new"])), 1, ())], Slo(ttft_s=9, itl_s=9))
            assert report.ttft == [pytest.approx(p["seconds"])]


@pytest.mark.parametrize(
    ("points", "match"),
    [
        ([{"kind": "prefill"}], r"calibration entry 0 is .*expected numbers of a kind: prefill \(new, seconds\)"),
        ([{"kind": "decode", "batch": 1, "context": 1, "seconds": 0}], "calibration entry 0"),
        ([{"kind": "decode", "batch": 1, "context": 1, "seconds": 0.1}], "no points of kind prefill"),
    ],
)
def test_what_cannot_be_fitted_is_refused_by_name(points: list[Mapping[str, object]], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        fit(points)


def test_a_file_that_bench_did_not_write_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"bench\.json: holds no `steps`"):
        read_steps(path)
    with pytest.raises(ConfigError, match=r"missing\.json"):
        read_steps(tmp_path / "missing.json")


class Engine:
    """An OpenAI endpoint that makes one token of every stream a turn of the event loop."""

    def __init__(self) -> None:
        self.streams: dict[int, asyncio.Queue[None]] = {}
        self.prompts: list[int] = []
        self.refuse = False

    async def steps(self) -> None:
        while True:
            for queue in self.streams.values():
                queue.put_nowait(None)
            await asyncio.sleep(0)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.refuse:
            return web.Response(status=503, text="full")
        self.prompts.append(len(body["prompt"]))
        response = web.StreamResponse()
        await response.prepare(request)
        queue = self.streams[id(request)] = asyncio.Queue[None]()
        try:
            for _ in range(body["max_tokens"]):
                await queue.get()
                await self.send(response, {"choices": [{"text": "x", "finish_reason": None}]})
            await self.send(response, {"choices": [{"text": "", "finish_reason": "length"}]})
            await self.send(response, {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        finally:
            del self.streams[id(request)]
        return response

    @staticmethod
    async def send(response: web.StreamResponse, event: dict[str, object]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def serve(engine: Engine) -> tuple[web.AppRunner, Target]:
    app = web.Application()
    app.router.add_post("/v1/completions", engine.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    return runner, Target(url=f"http://127.0.0.1:{port}", model="m", vocab_size=1000)


def test_bench_measures_every_kind_and_the_planner_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine()
    sweep = Sweep(prompts=(8, 16), decode=((1, 8), (2, 8), (2, 32)), loaded=((2, 16),), output_len=200, repeats=1)

    async def run() -> list[dict[str, float | str]]:
        runner, target = await serve(engine)
        turning = asyncio.create_task(engine.steps())
        try:
            return await measure_steps(target, replace(sweep, max_model_len=100_000), say=lambda line: None)
        finally:
            turning.cancel()
            await end(runner)

    steps = asyncio.run(run())
    kinds = [(p["kind"], p.get("new", p.get("batch"))) for p in steps]
    assert kinds == [
        ("first", 8), ("prefill", 8), ("first", 16), ("prefill", 16),
        ("decode", 1), ("decode", 2), ("decode", 2), ("first", 16), ("stall", 16),
    ]  # fmt: skip
    assert not engine.streams, "streams that ran beside were left"
    path = tmp_path / "bench.json"
    for p in steps:  # nothing here takes time: all that is asked of the numbers is that they are read
        p["seconds"] = 0.01
    path.write_text(json.dumps({"steps": steps}))
    flags = ["--calibrate", str(path), "--rate", "1", "--duration", "5s", "--kv-tokens", "100000"]
    assert simulate_main(flags) == 0
    assert json.loads(capsys.readouterr().out)["calibration"]["points"] == len(steps)


def test_replay_keeps_lengths_and_order_and_names_a_refusal() -> None:
    engine = Engine()
    trace = [TraceRequest(0.0, 5, 3, ()), TraceRequest(0.001, 7, 1, ())]

    async def run() -> None:
        runner, target = await serve(engine)
        turning = asyncio.create_task(engine.steps())
        try:
            seen = await replay(target, trace, seed=1)
            assert [s.tokens for s in seen] == [3, 1]
            assert seen[0].itl_s is not None and seen[1].itl_s is None
            assert sorted(engine.prompts) == [5, 7]
            engine.refuse = True
            with pytest.raises(BenchFailed, match="HTTP 503: full"):
                await replay(target, trace, seed=1)
        finally:
            turning.cancel()
            await end(runner)

    asyncio.run(run())


@pytest.mark.parametrize(
    "line",
    [
        b"data: " + b"a" * 3_000_000,
        b"data: {nope",
        b'data: {"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"completion_tokens":"x"}}',
        b'data: {"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"completion_tokens":1e999}}',
        b"data: []",
        b"data: " + b"[" * 100_000,
    ],
    ids=range(6),
)
def test_a_server_that_answers_something_else_is_named(line: bytes) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(line + b"\n\n")
        return response

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            target = Target(url=f"http://127.0.0.1:{runner.addresses[0][1]}", model="m", vocab_size=1000)
            with pytest.raises(BenchFailed, match=r"its answer is none of a completion|LineTooLong"):
                await replay(target, [TraceRequest(0.0, 4, 2, ())], seed=0)
        finally:
            await end(runner)

    asyncio.run(main())
