"""The coarse model against closed forms, its searches, its formats and its command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.commands.simulate import simulate_main
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.sim.hardware import GPUS, MODELS, StepModel, find_gpu, find_model
from isthmus_runtime.sim.measured import MeasuredSteps
from isthmus_runtime.sim.planner import Cluster, Slo, simulate
from isthmus_runtime.sim.search import search
from isthmus_runtime.sim.traces import TraceRequest, generate_trace, read_trace, write_trace

STEPS = StepModel(model=MODELS["qwen3-8b"], gpu=GPUS["h100"])
SLO = Slo(ttft_s=2.0, itl_s=0.05)


def cluster(prefills: int = 1, decodes: int = 1, **options: object) -> Cluster:
    return Cluster(steps=STEPS, prefills=prefills, decodes=decodes, **options)  # type: ignore[arg-type]


def alone(new: int, steps: StepModel = STEPS) -> float:
    """Seconds for one prompt by itself."""
    return steps.prefill_s(new, new * new / 2)


def test_one_request_alone_takes_what_the_formulas_say() -> None:
    one = cluster(cache="none", link_latency_s=0.0, request_s=0.125)
    report = simulate(one, [TraceRequest(0.0, 1000, 11, ())], SLO)
    moved = 1000 * STEPS.model.kv_bytes_per_token / one.link_bytes_per_s
    assert report.ttft == [pytest.approx(0.125 + alone(1000) + moved)]
    assert report.itl == [pytest.approx(STEPS.decode_s(1, 1001), rel=1e-3)]
    assert report.good == 1
    assert report.prefill_busy_s == pytest.approx(alone(1000))


def test_a_long_prompt_runs_in_chunks_and_only_the_last_one_shows_its_transfer() -> None:
    one = cluster(cache="none", link_latency_s=0.0, chunk_tokens=400)
    report = simulate(one, [TraceRequest(0.0, 1000, 1, ())], SLO)
    moved = 400 * STEPS.model.kv_bytes_per_token / one.link_bytes_per_s
    assert report.ttft == [pytest.approx(alone(1000) + STEPS.overhead_s + moved, rel=1e-3)]  # 800 and 200 tokens


def test_two_requests_share_a_decode_engine() -> None:
    fast = cluster(prefills=2, cache="none")
    report = simulate(fast, [TraceRequest(0.0, 100, 1000, ()), TraceRequest(0.0, 100, 1000, ())], SLO)
    assert report.itl[0] == pytest.approx(report.itl[1], rel=0.01)
    assert report.itl[0] == pytest.approx(STEPS.decode_s(2, 202), rel=0.02)


def test_prompts_that_come_while_one_is_computed_share_the_next_step() -> None:
    one = cluster(cache="none", link_latency_s=0.0, link_bytes_per_s=1e30)
    report = simulate(one, [TraceRequest(at, 500, 1, ()) for at in (0.0, 0.001, 0.002)], SLO)
    both = STEPS.prefill_s(1000, 2 * 500 * 250)
    assert report.ttft == [pytest.approx(alone(500) + (both if at else 0.0) - at) for at in (0.0, 0.001, 0.002)]


def test_a_busy_decode_engine_reads_its_messages_while_a_step_runs() -> None:
    one = cluster(cache="none", link_latency_s=0.0, link_bytes_per_s=1e30)
    step = STEPS.decode_s(1, 1001)
    begins = alone(1000)
    at = begins + 10.5 * step
    report = simulate(one, [TraceRequest(0.0, 1000, 2000, ()), TraceRequest(at, 10, 1, ())], SLO)
    assert report.ttft[0] == pytest.approx(alone(10), rel=0.02)


def test_a_unified_engine_puts_a_prompt_into_the_step_that_is_not_planned_yet() -> None:
    one = Cluster(steps=STEPS, unified=1, cache="none")
    begins, step = alone(1000), STEPS.decode_s(1, 1001)
    at = begins + 10.5 * step
    report = simulate(one, [TraceRequest(0.0, 1000, 100, ()), TraceRequest(at, 500, 1, ())], SLO)
    mixed = STEPS.mixed_s(500, 500 * 250, 1, 1011)
    ttft = dict(zip(("short", "long"), report.ttft, strict=True))
    assert ttft["long"] == pytest.approx(begins)
    assert ttft["short"] == pytest.approx(0.5 * step + step + mixed, rel=0.01)
    assert report.itl == [pytest.approx((98 * step + mixed) / 99, rel=0.01)]


SLOW = MeasuredSteps(
    name="slow",
    kv_tokens=100_000,
    kv_bytes_per_token=46_080,
    decode=((1, 0.100), (2, 0.110)),
    context_s=0.0,
    prefill=((100, 0.2), (1100, 2.2)),
    attention_s=0.0,
    stall=((100, 0.2), (1100, 2.2)),
)


@pytest.mark.parametrize(("late", "steps"), [(0.2, 0.8), (0.9, 1.1)])
def test_a_prompt_goes_into_the_next_step_unless_that_is_planned_already(late: float, steps: float) -> None:
    """Of a step of 100 ms the last 20 ms are too late."""
    one = Cluster(steps=SLOW, unified=1, cache="none")
    at = SLOW.prefill_s(100, 5000) + (10 + late) * 0.1
    report = simulate(one, [TraceRequest(0.0, 100, 100, ()), TraceRequest(at, 50, 1, ())], SLO)
    assert report.ttft[0] == pytest.approx(steps * 0.1 + SLOW.mixed_s(50, 1250, 1, 0), rel=0.01)


def test_a_long_prompt_is_computed_in_steps_of_the_longest_time() -> None:
    for bound in (0.3, 0.6):
        one = Cluster(steps=SLOW, unified=1, cache="none", max_step_s=bound)
        report = simulate(one, [TraceRequest(0.0, 100, 200, ()), TraceRequest(2.0, 1000, 1, ())], SLO)
        # 2 ms a token; the stream's own step leaves the rest of the bound to the prompt.
        steps = 2.0 / (bound - 0.1)
        assert max(report.ttft) == pytest.approx(steps * bound, rel=0.15)
    (alone_s,) = simulate(one, [TraceRequest(0.0, 1000, 1, ())], SLO).ttft
    assert alone_s == pytest.approx(SLOW.prefill_s(1000, 500_000), rel=0.01), "nobody waits: not slowed"


def test_default_efficiencies_give_the_measured_peer() -> None:
    assert 4096 / alone(4096) == pytest.approx(41_052, rel=0.1)
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
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_every_request_ends_and_no_engine_is_busier_than_time(
    work: list[tuple[float, int, int]], prefills: int, decodes: int
) -> None:
    trace = [TraceRequest(at, length, output, ()) for at, length, output in sorted(work)]
    unified = Cluster(steps=STEPS, unified=decodes)
    report = simulate(cluster(prefills, decodes) if prefills else unified, trace, SLO)
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


def test_keys_and_values_of_8_bits_halve_what_is_held_and_moved() -> None:
    model = MODELS["qwen3-8b"]
    narrow = model.with_fp8_kv()
    assert narrow.kv_bytes_per_token == 2 * 36 * 8 * (128 + 4) < 0.52 * model.kv_bytes_per_token
    gpu = find_gpu("h100")
    tokens = [StepModel(model=one, gpu=gpu).kv_tokens for one in (model, narrow)]
    assert tokens[1] == pytest.approx(tokens[0] * 256 / 132, rel=1e-4)
    with pytest.raises(ConfigError, match="--kv-dtype fp8: the latents"):
        replace(model, kv_parts=1).with_fp8_kv()


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
        simulate_main(
            ["--prefill", "0", "--slo-ttft", "soon", "--trace", "missing.jsonl", "--unified", "1", "--search"]
        )
    assert len(caught.value.problems) == 4


def test_the_command_compares_routing_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_main(["--routing", "--trace", "fan-out", "--rate", "4", "--duration", "30s"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in rows[-2:]] == ["kv-aware, events only", "oracle"]


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 1e300, "input_length": 1, "output_length": 1}',
        '{"timestamp": 1e999, "input_length": 1, "output_length": 1}',
        '{"timestamp": NaN, "input_length": 1, "output_length": 1}',
        '{"timestamp": -1, "input_length": 1, "output_length": 1}',
        '{"timestamp": 1, "input_length": Infinity, "output_length": 1}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1e15}',
        "[" * 100_000,
    ],
    ids=range(7),
)
def test_a_trace_that_would_never_end_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: not a trace line"):
        read_trace(path)


def test_more_engines_than_anybody_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="--prefill 100000000 must be at most 10000"):
        simulate_main(["--prefill", "100000000"])


def test_a_rate_without_end_and_a_file_that_is_no_gpu_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--rate 1e\+300 must be at most 10000"):
        simulate_main(["--rate", "1e300"])
    for text in ("[" * 100_000, "{nope"):
        (tmp_path / "gpu.json").write_text(text)
        with pytest.raises(ConfigError, match="not JSON"):
            find_gpu(str(tmp_path / "gpu.json"))
