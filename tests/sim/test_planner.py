"""The coarse model against closed forms, its searches, its formats and its command."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.errors import ConfigError
from isthmus_runtime.sim.hardware import GPUS, MODELS, StepModel, calibrate, find_gpu, find_model
from isthmus_runtime.sim.planner import Cluster, Slo, simulate
from isthmus_runtime.sim.search import search
from isthmus_runtime.sim.traces import TraceRequest, generate_trace, read_trace, write_trace
from isthmus_runtime.simulate_cli import simulate_main

STEPS = StepModel(model=MODELS["qwen3-8b"], gpu=GPUS["h100"])
SLO = Slo(ttft_s=2.0, itl_s=0.05)


def cluster(prefills: int = 1, decodes: int = 1, **options: object) -> Cluster:
    return Cluster(steps=STEPS, prefills=prefills, decodes=decodes, **options)  # type: ignore[arg-type]


def test_one_request_alone_takes_what_the_formulas_say() -> None:
    one = cluster(cache="none", link_latency_s=0.0)
    report = simulate(one, [TraceRequest(0.0, 1000, 11, ())], SLO)
    moved = 1000 * STEPS.model.kv_bytes_per_token / one.link_bytes_per_s
    assert report.ttft == [pytest.approx(STEPS.prefill_s(1000, 0) + moved)]
    assert report.itl == [pytest.approx(STEPS.decode_s(1, 1001))]
    assert report.good == 1


def test_two_requests_share_a_decode_engine() -> None:
    fast = cluster(prefills=2, cache="none")
    report = simulate(fast, [TraceRequest(0.0, 100, 1000, ()), TraceRequest(0.0, 100, 1000, ())], SLO)
    assert report.itl[0] == pytest.approx(report.itl[1])
    assert report.itl[0] == pytest.approx(STEPS.decode_s(2, 202), rel=0.02)


def test_default_efficiencies_give_the_measured_peer() -> None:
    assert 4096 / STEPS.prefill_s(4096, 0) == pytest.approx(41_052, rel=0.1)
    assert 1 / STEPS.decode_s(1, 256) == pytest.approx(147, rel=0.1)


def test_a_second_turn_hits_the_cache_of_the_first() -> None:
    turns = [TraceRequest(0.0, 2048, 10, (1, 2, 3, 4)), TraceRequest(30.0, 2560, 10, (1, 2, 3, 4, 5))]
    for cache, hits in (("none", 0), ("local", 2048), ("pool", 2048)):
        assert simulate(cluster(cache=cache), turns, SLO).hit_tokens == hits


def test_what_never_fits_is_refused_not_waited_for() -> None:
    report = simulate(cluster(), [TraceRequest(0.0, 10**7, 10, ()), TraceRequest(0.0, 100, 10, ())], SLO)
    assert (report.never_fit, len(report.ttft), report.requests) == (1, 1, 2)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.integers(1, 200_000), st.integers(1, 500)), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_every_request_ends_and_no_engine_is_busier_than_time(
    work: list[tuple[float, int, int]], prefills: int, decodes: int
) -> None:
    trace = [TraceRequest(at, length, output, ()) for at, length, output in sorted(work)]
    report = simulate(cluster(prefills, decodes), trace, SLO)
    assert len(report.ttft) + report.never_fit == len(trace)
    able = [q for q in trace if q.input_tokens + q.output_tokens <= STEPS.kv_tokens]
    assert report.output_tokens == sum(q.output_tokens for q in able)
    assert report.prefill_busy_s <= prefills * report.span_s + 1e-6
    assert report.decode_busy_s <= decodes * report.span_s + 1e-6
    assert all(t >= 0 for t in report.ttft + report.itl)


def test_search_finds_the_cheapest_split() -> None:
    trace = generate_trace(rate=12, duration_s=60, seed=1)
    slo = Slo(ttft_s=2.0, itl_s=0.03)
    found = search(cluster(), trace, slo, 0.9)
    assert found.report.attainment >= 0.9
    total = found.cluster.prefills + found.cluster.decodes
    cheaper = [simulate(cluster(p, total - 1 - p), trace, slo).attainment for p in range(1, total - 1)]
    assert all(attainment < 0.9 for attainment in cheaper), (total, cheaper)


def test_an_impossible_slo_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"within TTFT 2 s and ITL 1 ms"):
        search(cluster(), generate_trace(rate=2, duration_s=5), Slo(ttft_s=2.0, itl_s=0.001), 0.9)


def test_traces_survive_a_round_trip(tmp_path: Path) -> None:
    trace = generate_trace(rate=5, duration_s=30, seed=2)
    write_trace(tmp_path / "t.jsonl", trace)
    again = read_trace(tmp_path / "t.jsonl")
    assert [(q.input_tokens, q.output_tokens, q.hash_ids) for q in again] == [
        (q.input_tokens, q.output_tokens, q.hash_ids) for q in trace
    ]
    assert len(trace) / 30 == pytest.approx(5, rel=0.4)


def test_the_public_format_is_read_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}\n'
        '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2366]}\n'
    )
    assert read_trace(path)[0] == TraceRequest(27.482, 6955, 52, (46, 47, 2353))
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match=r"trace\.jsonl:1: not a trace line"):
        read_trace(path)


def test_calibration_fits_measured_steps_and_says_how_well() -> None:
    truth = StepModel(model=STEPS.model, gpu=STEPS.gpu, prefill_efficiency=0.5, decode_efficiency=0.6)
    points: list[dict[str, object]] = [
        {"kind": "prefill", "new": n, "cached": 0, "seconds": truth.prefill_s(n, 0)} for n in (512, 4096)
    ]
    for batch in (2, 64):
        seconds = truth.decode_s(batch, batch * 500)
        points.append({"kind": "decode", "batch": batch, "context": batch * 500, "seconds": seconds})
    fit = calibrate(STEPS, points)
    assert fit.steps.prefill_efficiency == pytest.approx(0.5)
    assert fit.steps.decode_efficiency == pytest.approx(0.6)
    assert fit.worst_error < 1e-6
    with pytest.raises(ConfigError, match="calibration entry 0"):
        calibrate(STEPS, [{"kind": "prefill"}])


def test_unknown_names_list_what_is_known() -> None:
    with pytest.raises(ConfigError, match="qwen3-8b"):
        find_model("nothing")
    with pytest.raises(ConfigError, match="h100"):
        find_gpu("nothing")


def test_the_command_writes_report_and_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "4", "--duration", "30s", "--search", "--slo-itl", "40ms", "--out", str(tmp_path)]
    assert simulate_main(flags) == 0
    shown = json.loads(capsys.readouterr().out)
    body = json.loads((tmp_path / "report.json").read_text())
    assert body["within_slo"] >= 0.9 and body["tried"] and shown["cluster"] == body["cluster"]
    for name in ("latency.svg", "search.svg"):
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")


def test_the_command_names_every_wrong_flag_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        simulate_main(["--prefill", "0", "--slo-ttft", "soon", "--trace", "missing.jsonl"])
    assert len(caught.value.problems) == 3
