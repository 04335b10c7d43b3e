"""Pods that are unready for an instant, one or all of them, in every state of a rollout: a probe that times out under
load, a node that the control plane does not reach for a moment. They serve all the while."""

import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rollout_world import D, P, assert_done, revisions, run, service, settled, with_pods

from isthmus_operator.api.v1alpha1 import InferenceService
from isthmus_operator.plan.desired import master_may_change
from isthmus_operator.plan.observed import SICK_AFTER_S, Pod
from isthmus_operator.plan.planner import Plan, Rollout, plan
from isthmus_operator.plan.rehearse import World
from isthmus_operator.render.names import Component
from isthmus_operator.render.revision import role_revision

NODES = 3
Well = dict[tuple[Component, str], set[str]]
"""Component and pairing -> names of the pods that serve."""


def well(world: World, sick: Set[str]) -> Well:
    found: Well = {}
    for workload in world.seen.engines:
        names = {pod.name for pod in workload.live if (pod.ready or pod.started) and pod.name not in sick}
        found.setdefault((workload.component, workload.pairing), set()).update(names)
    return found


def pairs(found: Well) -> int:
    return sum(min(len(found.get((part, one), ())) for part in (P, D)) for one in {pairing for _, pairing in found})


def look(
    target: InferenceService, world: World, flickering: Set[str], *, ago: float = 1.0, sick: Set[str] = frozenset()
) -> Plan:
    """The operator looks while pods flicker, Kubernetes does what it asks for, and they are ready again.

    Asserts that the pods that served before and still do are as many as the budget allows.
    """
    before = well(world, sick)
    with_pods(world, lambda p: p.name in flickering and p.ready, ready=False, changed=world.now - ago)
    wanted = plan(target, world.seen, world.now)
    world.apply(target, wanted)
    world.tick()
    after = {key: names & well(world, sick).get(key, set()) for key, names in before.items()}
    for part, goal in wanted.goals.items():
        had, has = (sum(len(names) for (role, _), names in found.items() if role is part) for found in (before, after))
        assert has >= min(had, max(0, goal.count - goal.max_unavailable)), f"{part}: {had} to {has} of {goal.count}"
    room = all(goal.count + goal.max_surge > 1 for goal in wanted.goals.values())
    assert not room or pairs(after) >= min(1, pairs(before)), f"no pair is left: {before} to {after}"
    return wanted


def names(world: World) -> list[str]:
    return [pod.name for w in world.seen.engines for pod in w.live if pod.ready]


def subsets(items: list[str]) -> Iterator[set[str]]:
    for size in range(len(items) + 1):
        yield from map(set, itertools.combinations(items, size))


def copy(world: World) -> World:
    return replace(world, names=itertools.count(1000))


@pytest.mark.parametrize("rollout", [{}, {"maxSurge": 1, "maxUnavailable": 0}, {"maxUnavailable": 2}, {"maxSurge": 1}])
@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 2), (1, 3), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_whichever_pods_flicker_in_whatever_state_of_a_rollout(p: int, d: int, rollout: dict[str, Any]) -> None:
    old, new = (service(version, p=p, d=d, rollout=rollout) for version in (1, 2))
    world = settled(old, drain_s=2)
    states = 0
    while plan(new, world.seen, world.now).state is not Rollout.COMPLETE:
        for flickering in subsets(names(world)):
            other = copy(world)
            look(new, other, flickering)
            look(new, other, set(names(other)))
        look(new, world, set())
        states += 1
        assert states < 50
    assert_done(new, run(new, world))
    assert states >= 4


def test_a_whole_service_that_flickers_loses_nothing_at_all() -> None:
    world = settled(service(1, p=2, d=2), places=4)
    before = well(world, set())
    wanted = look(service(2, p=2, d=2), world, set(names(world)))
    assert {key: found for key, found in well(world, set()).items() if found} == before
    assert wanted.wake == world.now - 2.0 + SICK_AFTER_S


def test_one_that_flickers_does_not_go_in_place_of_one_that_is_sick() -> None:
    """Kubernetes removes unready pods first: while one of two is having a moment, nothing says which it would be."""
    world = settled(service(1, p=3, d=3), places=6)
    first, second, _ = (pod.name for pod in world.seen.of(P)[0].pods)
    for started in (True, False):
        for sick, flickering in ((first, second), (second, first)):
            other = copy(world)
            other.becomes_ready = lambda pod, sick=sick: pod.name != sick  # type: ignore[misc]
            with_pods(other, lambda p, one=sick: p.name == one, ready=False, started=started, changed=900.0)  # type: ignore[misc]
            look(service(2, p=3, d=3), other, {flickering}, sick={sick})
            look(service(2, p=3, d=3), other, set(), sick={sick})
            assert sick not in {pod.name for w in other.seen.engines for pod in w.live}


def test_a_paused_service_is_scaled_by_the_revision_that_serves_though_it_flickers() -> None:
    paused: dict[str, Any] = {"rollout": {"paused": True}}
    new = service(2, p=4, d=4, **paused)
    world = settled(service(1, p=4, d=4))
    while not all(w.ready == w.replicas > 0 for w in world.seen.engines) or len(world.seen.engines) < 4:
        look(service(2, p=4, d=4), world, set())
    old = {w.name: w.replicas for w in world.seen.engines if w.revision not in revisions(new).values()}
    assert set(old.values()) == {3}
    look(
        service(2, p=6, d=6, **paused), world, {pod.name for w in world.seen.engines if w.name in old for pod in w.live}
    )
    assert {w.replicas for w in world.seen.engines if w.name in old} == {5}
    assert {w.replicas for w in world.seen.engines if w.name not in old} == {1}


@pytest.mark.parametrize("proven", [False, True])
def test_a_master_that_flickers_is_not_replaced_under_the_engines_that_use_it(proven: bool) -> None:
    extra: dict[str, Any] = {"transfer": {"mode": "Store"}}
    old = service(1, store={}, **extra)
    new = service(
        2, store={"segmentSize": "8Gi", "master": {"managed": {"resources": {"limits": {"cpu": 3}}}}}, **extra
    )
    world = settled(old)
    if proven:
        for _ in range(3):
            look(new, world, set())
    store = world.seen.store
    assert store is not None
    flickering = tuple(replace(pod, ready=False, changed=world.now - 1) for pod in store.pods)
    seen = replace(world.seen, store=replace(store, pods=flickering))
    assert store.revision != role_revision(new, Component.STORE)
    assert not master_may_change(new, plan(new, seen, world.now), seen, world.now)


def test_scaling_down_while_all_flicker_does_not_leave_the_one_that_is_sick() -> None:
    world = run(service(p=1, d=4), World())
    sick = names(world)[-1]
    assert "decode" in sick
    with_pods(world, lambda pod: pod.name == sick, ready=False, changed=world.now - SICK_AFTER_S)
    target = service(p=1, d=1)
    wanted = look(target, world, set(names(world)), sick={sick})
    assert wanted.counts[D, wanted.goals[D].revision] == 4
    assert wanted.wake is not None and wanted.wake - world.now <= SICK_AFTER_S
    assert_done(target, run(target, world))


@dataclass
class Walk:
    """An InferenceService that is edited, and pods that are sick."""

    policy: dict[str, Any]
    version: int = 1
    p: int = 2
    d: int = 2
    paused: bool = False
    sick: set[str] = field(default_factory=set)

    @property
    def target(self) -> InferenceService:
        return service(self.version, p=self.p, d=self.d, rollout={**self.policy, "paused": self.paused})


edits = st.one_of(
    st.tuples(st.just("version"), st.integers(1, 3)),
    st.tuples(st.just("p"), st.integers(1, 5)),
    st.tuples(st.just("d"), st.integers(1, 5)),
    st.tuples(st.just("paused"), st.booleans()),
    st.tuples(st.just("sick"), st.integers(0, 9)),
    st.tuples(st.just("well"), st.just(0)),
)
flickers = st.one_of(
    st.just("all"), st.sampled_from([P.value, D.value]), st.integers(0, NODES - 1), st.sets(st.integers(0, 9))
)


def chosen(world: World, which: Any) -> set[str]:
    """All pods, those of a role, those of a node, or some."""
    pods: list[Pod] = [pod for w in world.seen.engines for pod in w.live if pod.ready]
    if which == "all":
        return {pod.name for pod in pods}
    if isinstance(which, str):
        return {pod.name for pod in pods if pod.component.value == which}
    if isinstance(which, int):
        return {pod.name for pod in pods if int(pod.name.rsplit("-", 1)[1]) % NODES == which}
    return {pod.name for at, pod in enumerate(pods) if at % 10 in which}


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    policy=st.sampled_from([{}, {"maxSurge": 1, "maxUnavailable": 0}, {"maxSurge": "50%"}, {"maxUnavailable": "100%"}]),
    on_failure=st.sampled_from(["Pause", "Rollback"]),
    counts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    walk=st.lists(st.tuples(edits, st.lists(flickers, max_size=5), st.floats(0, SICK_AFTER_S - 0.1)), max_size=10),
)
@example(
    policy={"maxSurge": 1, "maxUnavailable": 0},
    on_failure="Pause",
    counts=(3, 1),
    walk=[(("p", 1), [], 0.0), (("paused", True), [], 0.0), (("sick", 2), [], 0.0), (("version", 2), ["all"], 0.0)],
)
def test_flickering_costs_no_more_than_the_budget_whatever_else_happens(
    policy: dict[str, Any],
    on_failure: str,
    counts: tuple[int, int],
    walk: list[tuple[tuple[str, Any], list[Any], float]],
) -> None:
    now = Walk({**policy, "onFailure": on_failure}, p=counts[0], d=counts[1])
    world = run(now.target, World(drain_s=2))
    world.becomes_ready = lambda pod: pod.name not in now.sick
    for (kind, value), looks, ago in walk:
        if kind == "sick":
            pods = [pod.name for w in world.seen.engines for pod in w.live]
            now.sick |= {name for at, name in enumerate(pods) if at % 10 == value}
            with_pods(world, lambda pod: pod.name in now.sick, ready=False, changed=world.now - SICK_AFTER_S)
        elif kind == "well":
            now.sick.clear()
        else:
            setattr(now, kind, value)
        for which in looks:
            wanted = look(now.target, world, chosen(world, which), ago=ago, sick=now.sick)
            assert wanted.state not in (Rollout.FAILED, Rollout.ROLLED_BACK)
    now.sick.clear()
    now.paused = False
    assert_done(now.target, run(now.target, world))
