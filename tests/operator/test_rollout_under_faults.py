"""Rollouts while nodes are cut off, pods crash, revisions do not start, specs are edited and reverted, counts change.

A node that is cut off makes its pods unready; they serve all the while and come back.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_world import D, P, assert_done, ready, revisions, run, service, settled, step, with_pods

from isthmus_operator.api.v1alpha1 import InferenceService
from isthmus_operator.plan.observed import Pod, Workload
from isthmus_operator.plan.planner import Plan, Rollout, plan
from isthmus_operator.plan.rehearse import World
from isthmus_operator.plan.rollout import lingering
from isthmus_operator.render.names import Component, is_engine

NODES = 3


@functools.cache
def spec(
    version: int, p: int, d: int, local: bool, rollout: tuple[tuple[str, Any], ...], *, store: bool = False
) -> InferenceService:
    """Version n runs image n; `local`: with a change of decode alone."""
    decode: dict[str, Any] = {"scaling": {"replicas": d}} | ({"engine": {"threads": 2}} if local else {})
    roles = {"prefill": {"scaling": {"replicas": p}}, "decode": decode}
    stored: dict[str, Any] = {"store": {}} if store else {}
    return service(version, roles=roles, rollout={"progressDeadline": "60s"} | dict(rollout), **stored)


@dataclass
class Faulty:
    """A cluster in which things break."""

    world: World = field(default_factory=World)
    cut: set[int] = field(default_factory=set)
    crashing: set[str] = field(default_factory=set)
    bad: set[str] = field(default_factory=set)
    down: set[Component] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.world.becomes_ready = lambda pod: not self.is_cut(pod) and not self.is_broken(pod)

    def is_cut(self, pod: Pod) -> bool:
        return is_engine(pod.component) and number(pod) % NODES in self.cut

    def is_broken(self, pod: Pod) -> bool:
        return pod.name in self.crashing or pod.revision in self.bad or pod.component in self.down

    def strike(self) -> None:
        """What is cut off or broken becomes unready."""
        now = self.world.now
        with_pods(self.world, lambda pod: pod.ready and self.is_cut(pod), ready=False, changed=now)
        crash: dict[str, Any] = {"ready": False, "started": False, "changed": now, "reason": "CrashLoopBackOff"}
        with_pods(self.world, lambda pod: pod.name in self.crashing and (pod.ready or pod.started), **crash)
        seen, down = self.world.seen, self.down
        store = _all_down(seen.store, now) if seen.store and Component.STORE in down else seen.store
        routers = tuple(_all_down(w, now) for w in seen.routers) if Component.ROUTER in down else seen.routers
        self.world.seen = replace(seen, store=store, routers=routers)

    def evict(self, index: int) -> None:
        """A pod has ended for good, and is kept for people to look at; its controller makes another."""
        pods = [pod.name for w in self.world.seen.engines for pod in w.live]
        gone = {name for at, name in enumerate(pods) if at % 10 == index}
        with_pods(self.world, lambda pod: pod.name in gone, failed=True, ready=False, changed=self.world.now)

    def linger(self) -> None:
        """What stops now takes longer than it may."""
        with_pods(self.world, lambda pod: pod.ends is not None, ends=self.world.now + 90)

    def serves(self, workload: Workload) -> int:
        """Pods that serve and stay when the controllers have acted, were the network to come back."""
        well = sum(pod.ready or (pod.started and self.is_cut(pod)) for pod in workload.live)
        return min(workload.replicas, well)

    def act(self, target: InferenceService) -> Plan:
        """One look of the operator, which is not allowed to take what the strategy does not let it take."""
        before = {part: self.counted(part) for part in (P, D)}
        store = self.world.seen.store
        idle = {w.name for w in self.world.seen.engines if w.replicas == 0}
        wanted = plan(target, self.world.seen, self.world.now)
        self.world.apply(target, wanted)
        for part, goal in wanted.goals.items():
            (serve, held), (serves, holds) = before[part], self.counted(part)
            assert serves >= min(serve, max(0, goal.count - goal.max_unavailable)), f"{part}: {serve} to {serves}"
            assert holds <= max(held, goal.count + goal.max_surge), f"{part}: {held} to {holds} of {goal.count}"
        if store is None or store.ready == 0:
            known = {w.name for w in self.world.seen.engines if w.replicas > 0 and w.pooled}
            assert not known & idle, "an engine starts after its master"
        return wanted

    def counted(self, part: Component) -> tuple[int, int]:
        """Pods of a role that serve, and places that they hold or are about to."""
        found = self.world.seen.of(part)
        stopping = sum(lingering(w.pods, self.world.now) for w in found)
        return sum(map(self.serves, found)), stopping + sum(max(w.replicas, len(w.live)) for w in found)


def _all_down(workload: Workload, now: float) -> Workload:
    pods = (replace(pod, ready=False, changed=now) if pod.ready else pod for pod in workload.pods)
    return replace(workload, pods=tuple(pods))


def number(pod: Pod) -> int:
    return int(pod.name.rsplit("-", 1)[1])


def is_revert(target: InferenceService, world: World) -> bool:
    """Whether what a spec asks for is what has been there longest."""
    wanted = revisions(target)
    oldest = {part: min(world.seen.of(part), key=lambda w: w.created, default=None) for part in wanted}
    return all(one is not None and one.revision == wanted[part] for part, one in oldest.items())


faults = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, NODES - 1)),
    st.tuples(st.just("cut"), st.just(-1)),
    st.tuples(st.just("join"), st.just(0)),
    st.tuples(st.just("crash"), st.integers(0, 9)),
    st.tuples(st.just("recover"), st.just(0)),
    st.tuples(st.just("bad"), st.integers(1, 3)),
    st.tuples(st.just("version"), st.integers(1, 3)),
    st.tuples(st.just("local"), st.booleans()),
    st.tuples(st.just("p"), st.integers(1, 5)),
    st.tuples(st.just("d"), st.integers(1, 5)),
    st.tuples(st.just("paused"), st.booleans()),
    st.tuples(st.just("down"), st.sampled_from([Component.ROUTER, Component.STORE])),
    st.tuples(st.just("up"), st.just(0)),
    st.tuples(st.just("evict"), st.integers(0, 9)),
    st.tuples(st.just("linger"), st.just(0)),
    st.tuples(st.just("store"), st.booleans()),
)
rollouts = st.sampled_from(
    [{}, {"maxSurge": 1, "maxUnavailable": 0}, {"maxSurge": "50%"}, {"maxUnavailable": "50%"}, {"maxUnavailable": 1}]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rollout=rollouts,
    strategy=st.sampled_from(["Coordinated", "Independent"]),
    on_failure=st.sampled_from(["Pause", "Rollback"]),
    counts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    events=st.lists(st.tuples(faults, st.integers(0, 4), st.sampled_from([1.0, 1.0, 20.0, 70.0])), max_size=16),
)
def test_no_fault_makes_the_operator_take_more_than_it_may_and_every_rollout_ends(
    rollout: dict[str, Any],
    strategy: str,
    on_failure: str,
    counts: tuple[int, int],
    events: list[tuple[tuple[str, Any], int, float]],
) -> None:
    policy = {**rollout, "strategy": strategy, "onFailure": on_failure}
    now: dict[str, Any] = {
        "version": 1,
        "p": counts[0],
        "d": counts[1],
        "local": False,
        "paused": False,
        "store": False,
    }

    def target() -> InferenceService:
        extra = {**policy, "paused": now["paused"]}
        return spec(now["version"], now["p"], now["d"], now["local"], tuple(extra.items()), store=now["store"])

    cluster = Faulty()
    run(target(), cluster.world)
    reverted = False
    for (kind, value), steps, seconds in events:
        if kind == "cut":
            cluster.cut |= set(range(NODES)) if value < 0 else {value}
        elif kind == "join":
            cluster.cut.clear()
        elif kind == "crash":
            pods = [pod.name for w in cluster.world.seen.engines for pod in w.live]
            cluster.crashing |= {name for index, name in enumerate(pods) if index % 10 == value}
        elif kind == "down":
            cluster.down.add(value)
        elif kind == "up":
            cluster.down.clear()
        elif kind == "evict":
            cluster.evict(value)
        elif kind == "linger":
            cluster.linger()
        elif kind == "recover":
            cluster.crashing.clear()
            cluster.bad.clear()
        elif kind == "bad":
            cluster.bad |= set(revisions(spec(value, 1, 1, now["local"], (), store=now["store"])).values()) - {
                pod.revision for w in cluster.world.seen.engines for pod in w.pods if pod.started
            }
        else:
            now[kind] = value
            if kind in ("version", "local", "store"):
                reverted = is_revert(target(), cluster.world)
        for _ in range(steps):
            cluster.strike()
            wanted = cluster.act(target())
            assert not (reverted and wanted.state is Rollout.ROLLED_BACK)
            cluster.world.tick(seconds)
    cluster.cut.clear()
    cluster.crashing.clear()
    cluster.bad.clear()
    cluster.down.clear()
    now["paused"] = False
    run(target(), cluster.world, check=lambda world: None)
    last = plan(target(), cluster.world.seen, cluster.world.now)
    assert (last.goals[P].count, last.goals[D].count) == (now["p"], now["d"])
    if last.state is Rollout.ROLLED_BACK:
        assert on_failure == "Rollback"
        assert not reverted
        assert len({w.pairing for w in cluster.world.seen.engines if w.replicas}) == 1
        assert (ready(cluster.world.seen, P), ready(cluster.world.seen, D)) == (now["p"], now["d"])
    else:
        assert_done(target(), cluster.world)


@pytest.mark.parametrize("steps", range(8))
def test_nodes_that_are_cut_off_for_a_minute_lose_no_more_pods_than_a_step_takes(steps: int) -> None:
    """Eight engines in mid-rollout, all unready at once, as when the control plane cannot reach them."""
    old, new = service(1, p=4, d=4), service(2, p=4, d=4)
    cluster = Faulty(settled(old))
    step(new, cluster.world, steps)
    names = {pod.name for w in cluster.world.seen.engines for pod in w.live if pod.started}
    cluster.cut |= set(range(NODES))
    for _ in range(60):
        cluster.strike()
        cluster.act(new)
        cluster.world.tick()
    left = {pod.name for w in cluster.world.seen.engines for pod in w.live} & names
    for part in (P, D):
        assert len([pod for w in cluster.world.seen.of(part) for pod in w.live if pod.name in left]) >= 3
    cluster.cut.clear()
    assert_done(new, run(new, cluster.world))


def test_a_role_that_leaves_keeps_its_pods_while_they_are_cut_off() -> None:
    cluster = Faulty(settled(service(1, p=2, d=2)))
    unified = service(1, mode="Unified", roles={"worker": {"scaling": {"replicas": 2}}})
    cluster.cut |= set(range(NODES))
    for _ in range(60):
        cluster.strike()
        step(unified, cluster.world)
    assert {part: sum(w.replicas for w in cluster.world.seen.of(part)) for part in (P, D)} == {P: 2, D: 2}
    cluster.cut.clear()
    assert_done(unified, run(unified, cluster.world))


def test_pods_that_were_unready_for_long_go_before_ready_ones() -> None:
    old, new = service(1, p=4, d=4), service(2, p=4, d=4)
    world = settled(old, places=8)
    sick = {w.pods[0].name for w in world.seen.engines}
    with_pods(world, lambda pod: pod.name in sick, ready=False, changed=world.now - 31)
    world.becomes_ready = lambda pod: pod.name not in sick
    step(new, world)
    assert not sick & {pod.name for w in world.seen.engines for pod in w.live}
    assert (ready(world.seen, P), ready(world.seen, D)) == (3, 3)


def test_the_network_of_one_component_does_not_matter_to_the_other() -> None:
    """A prefill role that is away as a whole: decode is rolled as far as a step goes, and no farther."""
    old, new = service(1, p=4, d=4), service(2, p=4, d=4)
    world = settled(old)
    world.becomes_ready = lambda pod: pod.component is not Component.PREFILL
    with_pods(world, lambda pod: pod.component is P, ready=False, changed=world.now)
    step(new, world, 60)
    assert sum(w.replicas for w in world.seen.of(P) if w.revision != revisions(new)[P]) == 3
    assert ready(world.seen, D) == 4
    world.becomes_ready = lambda pod: True
    world.seen = replace(world.seen, failed="")
    assert_done(new, run(new, world))
