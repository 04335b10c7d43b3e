"""Bounds on prefill pods per decode pod: the arithmetic against brute force, and auto scaling that keeps them."""

import itertools
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_operator.api.ratio import Band, Span
from isthmus_operator.api.reasons import Reason
from isthmus_operator.api.v1alpha1 import InferenceService, parse
from isthmus_operator.plan.autoscale import Decision, decide
from isthmus_operator.plan.events import scaled
from isthmus_operator.plan.observed import EngineFacts, Facts, Observed, Pod, Workload
from isthmus_operator.plan.planner import Rollout, plan
from isthmus_operator.plan.status import status_of
from isthmus_operator.render.names import Component
from isthmus_operator.render.revision import role_revision

P, D, R = Component.PREFILL, Component.DECODE, Component.ROUTER
NOW = 5000.0

spans = st.tuples(st.integers(1, 7), st.integers(0, 6)).map(lambda s: (s[0], s[0] + s[1]))
fractions = st.fractions(Fraction(1, 8), Fraction(8), max_denominator=8)
bands = st.tuples(fractions, fractions, st.sampled_from(["both", "min", "max"])).map(
    lambda b: Band(least=min(b[:2]) if b[2] != "max" else Fraction(0), most=max(b[:2]) if b[2] != "min" else None)
)


def inside(band: Band, prefill: int, decode: int) -> bool:
    return band.least * decode <= prefill and (band.most is None or prefill <= band.most * decode)


def pairs(prefill: Span, decode: Span) -> list[tuple[int, int]]:
    return list(itertools.product(range(prefill[0], prefill[1] + 1), range(decode[0], decode[1] + 1)))


@given(band=bands, prefill=spans, decode=spans)
def test_satisfiable_is_what_trying_every_pair_finds(band: Band, prefill: Span, decode: Span) -> None:
    assert band.satisfiable(prefill, decode) == any(inside(band, *pair) for pair in pairs(prefill, decode))


@given(band=bands, prefill=spans, decode=spans, p=st.integers(0, 15), d=st.integers(0, 15))
def test_the_pair_is_inside_takes_least_away_and_adds_least(
    band: Band, prefill: Span, decode: Span, p: int, d: int
) -> None:
    found = band.fit((p, d), prefill, decode)
    every = pairs(prefill, decode)
    assert found in every

    def cost(pair: tuple[int, int]) -> tuple[Fraction, int, int]:
        below = max(Fraction(0), band.least * pair[1] - pair[0])
        above = Fraction(0) if band.most is None else max(Fraction(0), pair[0] - band.most * pair[1])
        less = max(0, p - pair[0]) + max(0, d - pair[1])
        return max(below, above), less, max(0, pair[0] - p) + max(0, pair[1] - d)

    assert cost(found) == min(cost(pair) for pair in every)
    assert (band.miss(*found) == 0) == inside(band, *found)
    if (p, d) in every and inside(band, p, d):
        assert found == (p, d), "what is allowed is left alone"


@pytest.mark.parametrize("ratio", [Fraction(1), Fraction(10001, 2), Fraction(1, 3)])
def test_ten_thousand_pods_are_gone_through_once(ratio: Fraction, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each pair of numbers anew it took a second of the operator in every run of one service."""
    asked = 0
    highest = Band._highest

    def counted(band: Band, decode: int, prefill: Span) -> int:
        nonlocal asked
        asked += 1
        return highest(band, decode, prefill)

    monkeypatch.setattr(Band, "_highest", counted)
    band, span = Band(least=ratio, most=ratio), (1, 10_000)
    for wanted in ((1, 10_000), (10_000, 1), (5000, 5000), (7, 3)):
        band.fit(wanted, span, span)
    assert asked < 11_000


def auto(least: int, most: int, target: int = 1) -> dict[str, Any]:
    wish = {"metric": "QueuedRequests", "value": target}
    return {"scaling": {"mode": "Auto", "min": least, "max": most, "target": wish}}


def service(roles: dict[str, Any], **bounds: str) -> InferenceService:
    policy = {"scalingPolicy": {"ratio": {"prefillPerDecode": bounds}}} if bounds else {}
    return parse(
        {
            "apiVersion": "serving.isthmus.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "s", "namespace": "ns", "uid": "u", "generation": 1},
            "spec": {"model": {"source": {"hostPath": {"path": "/m"}}}, "roles": roles, **policy},
        }
    )


def world(target: InferenceService, counts: dict[Component, int], load: dict[Component, float]) -> Observed:
    """All pods there and ready for long; `load`: what waits in all queues of a role together."""
    scales = {part: n for part, n in counts.items()}
    goals = plan(target, Observed(scales=scales), NOW).goals
    engines, facts = [], {}
    for part, goal in goals.items():
        found = tuple(
            Pod(name=f"{part}-{i}", component=part, revision=goal.revision, created=0, changed=0, ready=True)
            for i in range(goal.count)
        )
        engines.append(
            Workload(name=part, component=part, revision=goal.revision, replicas=goal.count, created=0, pods=found)
        )
        if part in load:
            facts |= {pod.name: EngineFacts(fingerprint="f", queued=load[part] / len(found)) for pod in found}
    router = settled_router(target)
    return Observed(engines=tuple(engines), routers=(router,), scales=scales, facts=Facts(engines=facts))


def settled_router(target: InferenceService) -> Workload:
    revision = role_revision(target, R)
    pods = tuple(
        Pod(name=f"router-{i}", component=R, revision=revision, created=0, changed=0, ready=True) for i in range(2)
    )
    return Workload(name="router", component=R, revision=revision, replicas=2, created=0, pods=pods)


def step(
    target: InferenceService, counts: dict[Component, int], load: dict[Component, float]
) -> dict[Component, Decision]:
    seen = world(target, counts, load)
    wanted = plan(target, seen, NOW)
    assert wanted.state is Rollout.COMPLETE
    return decide(target, seen, wanted, NOW)


def numbers(found: dict[Component, Decision]) -> tuple[int, int]:
    return found[P].count, found[D].count


def test_the_lagging_role_is_scaled_up_first() -> None:
    target = service({"prefill": auto(1, 8), "decode": auto(1, 8)}, min="0.5", max="2")
    assert numbers(step(target, {P: 2, D: 2}, {P: 6, D: 2})) == (6, 3), "decode follows"
    assert numbers(step(target, {P: 2, D: 2}, {P: 2, D: 7})) == (4, 7), "prefill follows"
    assert numbers(step(target, {P: 2, D: 2}, {P: 3, D: 2})) == (3, 2), "inside: nothing follows"


def test_what_the_lagging_role_cannot_reach_takes_the_other_down() -> None:
    target = service({"prefill": auto(1, 8), "decode": auto(1, 3)}, max="2")
    found = step(target, {P: 2, D: 2}, {P: 8, D: 2})
    assert numbers(found) == (6, 3)
    assert "fewer pods" in found[P].held
    assert "more pods" in found[D].held
    assert "more pods" in scaled(D, 2, found[D]).message


def test_without_a_ratio_each_role_is_alone() -> None:
    target = service({"prefill": auto(1, 8), "decode": auto(1, 8)})
    found = step(target, {P: 2, D: 2}, {P: 8, D: 2})
    assert numbers(found) == (8, 2)
    assert not found[P].held
    event = scaled(P, 2, found[P])
    assert (event.reason, event.message) == (
        Reason.SCALED,
        "prefill: 2 to 8 pods: QueuedRequests is 4.00 a pod, the target 1",
    )


@pytest.mark.parametrize(
    ("decode", "count"), [({"scaling": {"replicas": 3}}, 6), ({"scaling": {"mode": "External"}}, 6)]
)
def test_a_role_that_is_not_auto_is_followed_and_never_moved(decode: dict[str, Any], count: int) -> None:
    target = service({"prefill": auto(1, 8), "decode": decode}, min="2")
    found = step(target, {P: 1, D: 3}, {P: 1})
    assert found.keys() == {P}
    assert found[P].count == count


def test_a_role_without_pods_sets_no_ratio() -> None:
    target = service({"prefill": auto(1, 8), "decode": {"scaling": {"mode": "External"}}}, max="1")
    assert step(target, {P: 4, D: 0}, {P: 4})[P].count == 4


def test_an_external_count_out_of_reach_is_said() -> None:
    target = service({"prefill": auto(1, 4), "decode": {"scaling": {"mode": "External"}}}, min="1")
    found = step(target, {P: 4, D: 9}, {P: 4})
    assert found[P].count == 4
    assert found[P].held == "scalingPolicy.ratio is not met: see min and max"


def test_scaling_down_moves_both_by_the_smallest_step_the_ratio_has() -> None:
    target = service({"prefill": auto(1, 8), "decode": auto(1, 16)}, min="0.5", max="0.5")
    seen = [(4, 8)]
    for _ in range(4):
        seen.append(numbers(step(target, dict(zip((P, D), seen[-1], strict=True)), {P: 0, D: 0})))
    assert seen == [(4, 8), (3, 6), (2, 4), (1, 2), (1, 2)]


def test_engines_that_do_not_answer_keep_their_role_and_the_ratio_holds_all_the_same() -> None:
    target = service({"prefill": auto(1, 8), "decode": auto(1, 8)}, max="2")
    assert numbers(step(target, {P: 6, D: 1}, {})) == (6, 3)


def test_the_condition_says_what_holds_and_stays_the_same_while_it_does() -> None:
    target = service({"prefill": auto(1, 8), "decode": auto(1, 3)}, max="2")
    first: dict[str, Any] = {}
    for load in (7.0, 8.0):
        seen = world(target, {P: 6, D: 3}, {P: load, D: 3})
        wanted = plan(target, seen, NOW)
        held = {part: one.held for part, one in decide(target, seen, wanted, NOW).items()}
        found = status_of(target, seen, wanted, first, "2026-01-01T00:00:00Z", held=held)
        (condition,) = (c for c in found["conditions"] if c["type"] == "PrefillReady")
        assert condition["status"] == "True"
        assert condition["message"].endswith("scalingPolicy.ratio asks for fewer pods than its target")
        assert not first or found == first
        first = found


@given(
    band=bands,
    prefill=spans,
    decode=spans,
    start=st.tuples(st.integers(1, 13), st.integers(1, 13)),
    load=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_steady_load_ends_inside_the_ratio_and_stays_there(
    band: Band, prefill: Span, decode: Span, start: tuple[int, int], load: tuple[int, int]
) -> None:
    """Never outside min and max, never outside the ratio, and no going up and down for ever."""
    if not band.satisfiable(prefill, decode):
        return
    bounds = {"min": band.least, "max": band.most}
    # As thousandths above and below, so that no pair inside is lost by rounding; the band is read back from them.
    texts = {
        "min": f"{int(bounds['min'] * 1000)}m" if band.least else "",
        "max": f"{-int(-bounds['max'] * 1000 // 1)}m" if band.most is not None else "",
    }
    target = service({"prefill": auto(*prefill), "decode": auto(*decode)}, **{k: v for k, v in texts.items() if v})
    near = Band(
        least=Fraction(int(band.least * 1000), 1000),
        most=None if band.most is None else Fraction(-int(-band.most * 1000 // 1), 1000),
    )
    counts = dict(zip((P, D), start, strict=True))
    seen = []
    for _ in range(40):
        found = numbers(step(target, counts, {P: load[0], D: load[1]}))
        assert prefill[0] <= found[0] <= prefill[1]
        assert decode[0] <= found[1] <= decode[1]
        assert inside(near, *found), found
        if seen and found == seen[-1]:
            return
        seen.append(found)
        counts = dict(zip((P, D), found, strict=True))
    raise AssertionError(f"no rest: {seen}")
