"""spec.rollout.minReady: an old engine pod goes for a new one that has been ready for so long."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_world import D, P, W, assert_done, counts, ready, revisions, service, settled, step, with_pods

from isthmus_operator.plan.observed import SICK_AFTER_S
from isthmus_operator.plan.planner import Rollout, plan
from isthmus_operator.plan.rehearse import World, rehearse

LEAST_S = 90.0
assert LEAST_S > 2 * SICK_AFTER_S, "longer than a pod may flicker"
SURGES: list[dict[str, Any]] = [{}, {"maxSurge": 1, "maxUnavailable": 0}, {"maxUnavailable": 2}]


def _services(p: int, d: int, **rollout: Any) -> Any:
    return [service(v, p=p, d=d, rollout={"minReady": f"{LEAST_S:g}s", **rollout}) for v in (1, 2)]


def _young(world: World) -> int:
    return sum(pod.ready and world.now - pod.changed < LEAST_S for w in world.seen.engines for pod in w.live)


@pytest.mark.parametrize("rollout", SURGES)
@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 3)])
def test_each_step_waits_for_pods_to_have_been_ready(rollout: dict[str, Any], p: int, d: int) -> None:
    old, new = _services(p, d, **rollout)
    world = settled(old)
    world.now += LEAST_S
    mine = set(revisions(new).values())
    waited = 0
    for _ in range(2000):
        wanted = plan(new, world.seen, world.now)
        if wanted.state is Rollout.COMPLETE and not wanted.delete:
            break
        before = {w.name: w.replicas for w in world.seen.engines if w.revision not in mine}
        world.apply(new, wanted)
        fewer = [w for w in world.seen.engines if w.name in before and w.replicas < before[w.name]]
        if fewer and any(pod.ready for w in world.seen.engines if w.revision in mine for pod in w.live):
            # Every pod of the role's step has been ready for long, or the step is another role's.
            assert all(
                world.now - pod.changed >= LEAST_S
                for w in world.seen.engines
                if w.revision in mine and w.component in {one.component for one in fewer}
                for pod in w.live
                if pod.ready
            )
        if _young(world) and any(before.values()):
            waited += 1
            assert wanted.wake is not None and wanted.wake > world.now
        world.tick()
    assert_done(new, world)
    assert waited >= LEAST_S - 2 or (p, d) == (1, 1)


def test_one_that_fails_before_takes_no_further_old_pod_with_it() -> None:
    old, new = _services(2, 3)
    world = settled(old)
    world.now += LEAST_S
    mine = set(revisions(new).values())
    for _ in range(5):
        step(new, world, 40)
        with_pods(world, lambda pod: pod.revision in mine and pod.ready, ready=False, changed=world.now)
    assert {part: ready(world.seen, part) for part in (P, D)} == {P: 1, D: 2}, counts(world.seen)
    step(new, world, int(20 * LEAST_S))
    assert_done(new, world)


def test_routers_follow_at_once_where_only_new_engines_are_left() -> None:
    """And stay there for longer than a pod may flicker, while the old one ends its work."""
    extra: dict[str, Any] = {"mode": "Unified", "roles": {"worker": {"scaling": {"replicas": 1}}}}
    rollout = {"rollout": {"minReady": f"{LEAST_S:g}s", "maxSurge": 1}}
    source = {"model": {"source": {"hostPath": {"path": "/models/other"}}}}
    old, new = service(1, **extra, **rollout), service(2, **extra, **rollout, **source)
    world = settled(old, drain_s=300)
    world.now += LEAST_S
    goal = plan(new, world.seen, world.now).router
    while ready(world.seen, W) < 2:
        step(new, world)
    former = world.seen.engines[0].revision
    with_pods(world, lambda pod: pod.revision == former, ready=False, ends=world.now + 300)
    step(new, world, 5)
    for _ in range(int(LEAST_S)):
        there = world.seen.router_of(goal)
        assert there is not None and there.ready > 0
        step(new, world)
    step(new, world, 400)
    assert_done(new, world)


def test_routers_that_have_begun_to_change_do_not_go_back_for_a_moment_of_a_new_engine() -> None:
    extra: dict[str, Any] = {"mode": "Unified", "roles": {"worker": {"scaling": {"replicas": 2}}}}
    rollout = {"rollout": {"minReady": f"{LEAST_S:g}s"}}
    source = {"model": {"source": {"hostPath": {"path": "/models/other"}}}}
    old, new = service(1, **extra, **rollout), service(2, **extra, **rollout, **source)
    world = settled(old)
    world.now += LEAST_S
    goal = plan(new, world.seen, world.now).router
    while (mine := world.seen.router_of(goal)) is None or not mine.ready:
        step(new, world)
    begun = mine.replicas
    with_pods(world, lambda pod: pod.revision in revisions(new).values(), changed=world.now)
    for _ in range(int(LEAST_S) + 5):
        step(new, world)
        there = world.seen.router_of(goal)
        assert there is not None and there.replicas >= begun
    step(new, world, 400)
    assert_done(new, world)


def test_a_rehearsal_comes_to_the_end() -> None:
    old, new = _services(2, 3)
    world = settled(old)
    world.now += LEAST_S
    began = world.now
    steps = [wanted.counts for wanted, _ in rehearse(new, world)]
    assert not world.unfinished
    assert_done(new, world)
    assert steps and world.now - began > 2 * LEAST_S


def test_without_it_nothing_waits() -> None:
    old, new = service(1), service(2)
    world = settled(old)
    step(new, world, 40)
    assert_done(new, world)
