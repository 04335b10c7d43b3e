"""The rollout planner against a cluster that only counts: reaches its goal from anywhere, and keeps its promises on
the way there."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_world import (
    D,
    P,
    W,
    assert_done,
    counts,
    pairs,
    pods,
    ready,
    revisions,
    run,
    service,
    settled,
    step,
    with_pods,
)

from isthmus_operator.api.v1alpha1 import InferenceService
from isthmus_operator.plan.observed import Observed, Pod, Workload
from isthmus_operator.plan.planner import Rollout, plan
from isthmus_operator.plan.rehearse import World
from isthmus_operator.render.names import Component


def test_first_installation_makes_all_pods_at_once() -> None:
    first = plan(service(), Observed(), 0)
    assert sorted(first.counts.values()) == [2, 3]
    assert_done(service(), settled(service()))


def test_what_a_decision_asks_of_its_workloads_does_not_grow_with_the_steps_of_a_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of one pod each, of two and of two hundred: it went through all that there will be."""
    asked = 0
    real = Workload.ready.fget
    assert real is not None

    def ready(workload: Workload) -> int:
        nonlocal asked
        asked += 1
        return real(workload)

    monkeypatch.setattr(Workload, "ready", property(ready))
    counted = []
    for number in (2, 200):
        rollout = {"maxSurge": 1, "maxUnavailable": 0}
        world = settled(service(1, p=number, d=number, rollout=rollout))
        target = service(2, p=number, d=number, rollout=rollout)
        world.apply(target, plan(target, world.seen, world.now))
        world.tick()
        asked = 0
        plan(target, world.seen, world.now)
        counted.append(asked)
    assert counted[0] == counted[1]


@pytest.mark.parametrize(("p", "d"), [(2, 2), (2, 3), (1, 4), (4, 1), (3, 8), (5, 2)])
def test_full_cluster_rolls_without_surge_and_keeps_a_pair(p: int, d: int) -> None:
    """Exactly as many places as pods; no pod waits for a place, and a whole pair is there at every moment."""
    old, new = service(1, p=p, d=d), service(2, p=p, d=d)
    world = settled(old, places=p + d, drain_s=3)

    def check(world: World) -> None:
        assert pods(world.seen, P) <= p
        assert pods(world.seen, D) <= d
        if p > 1 and d > 1:
            assert pairs(world.seen) >= 1, counts(world.seen)
        else:
            assert ready(world.seen, D) >= (1 if d > 1 else 0)

    assert_done(new, run(new, world, check=check))


def test_one_of_each_without_surge_has_a_gap_and_says_so() -> None:
    new = service(2, p=1, d=1)
    world = settled(service(1, p=1, d=1), places=2)
    assert plan(new, world.seen, world.now).gap
    assert_done(new, run(new, world))


def test_one_of_each_with_surge_has_no_gap() -> None:
    rollout = {"rollout": {"maxSurge": 1, "maxUnavailable": 0}}
    new = service(2, p=1, d=1, **rollout)
    world = settled(service(1, p=1, d=1, **rollout))

    def check(world: World) -> None:
        assert pairs(world.seen) >= 1
        assert pods(world.seen, P) <= 2
        assert pods(world.seen, D) <= 2

    assert_done(new, run(new, world, check=check))


def test_prefill_and_decode_move_in_step() -> None:
    new = service(2, p=4, d=8)
    world = settled(service(1, p=4, d=8), places=12, drain_s=2)

    def check(world: World) -> None:
        share = {c: sum(w.ready for w in world.seen.of(c) if w.created > 1000) for c in (P, D)}
        assert abs(share[P] / 4 - share[D] / 8) <= 0.25 + 1e-9

    assert_done(new, run(new, world, check=check))


def test_a_role_local_change_leaves_the_other_role_alone() -> None:
    before = service(1)
    roles = {"prefill": {"scaling": {"replicas": 2}}, "decode": {"scaling": {"replicas": 3}, "engine": {"threads": 2}}}
    after = service(1, roles=roles)
    world = settled(before)
    prefill = world.seen.of(P)
    assert_done(after, run(after, world))
    assert world.seen.of(P) == prefill


@pytest.mark.parametrize("steps", range(0, 14))
def test_a_revert_at_any_step_is_safe(steps: int) -> None:
    old, new = service(1, p=3, d=3), service(2, p=3, d=3)
    world = settled(old, places=6, drain_s=2)
    for _ in range(steps):
        world.apply(new, plan(new, world.seen, world.now))
        world.tick()
    survivors = {pod.name for w in world.seen.engines if w.created == 1000 for pod in w.live}

    def check(world: World) -> None:
        assert pairs(world.seen) >= 1
        assert ready(world.seen, P) >= 1
        assert pods(world.seen, P) <= 3
        assert pods(world.seen, D) <= 3

    assert_done(old, run(old, world, check=check))
    assert survivors <= {pod.name for w in world.seen.engines for pod in w.live}


def test_burst_edits_start_no_more_pods_than_twice_the_service() -> None:
    """Three edits in quick succession; only the last is rolled out."""
    world = settled(service(1, p=2, d=2), places=4)
    seen: set[str] = set()
    first = {pod.name for w in world.seen.engines for pod in w.pods}
    for version in (2, 3, 4):
        target = service(version, p=2, d=2)
        world.apply(target, plan(target, world.seen, world.now))
        world.tick(0.1)

    def check(world: World) -> None:
        seen.update(pod.name for w in world.seen.engines for pod in w.pods)
        live = {w.pairing for w in world.seen.engines if w.live and w.component is P}
        assert len(live) <= 2

    last = service(4, p=2, d=2)
    assert_done(last, run(last, world, check=check))
    assert len(seen - first) <= 8


def broken(world: World, pairing: str, *, role: Component | None = None) -> None:
    """All pods of a revision crash."""
    engines = tuple(
        replace(
            w,
            pods=tuple(
                replace(p, ready=False, started=False, changed=world.now - 100, reason="CrashLoopBackOff")
                for p in w.pods
            ),
        )
        if w.pairing == pairing and role in (None, w.component)
        else w
        for w in world.seen.engines
    )
    world.seen = replace(world.seen, engines=engines)


@pytest.mark.parametrize("role", [P, D, None])
def test_sick_old_pods_go_first_and_never_block(role: Component | None) -> None:
    """The roll to a good image goes through although old pods crash."""
    old, new = service(1, p=3, d=3), service(2, p=3, d=3)
    world = settled(old, places=6)
    sick = world.seen.engines[0].pairing
    broken(world, sick, role=role)
    world.becomes_ready = lambda pod: not any(pod in w.pods for w in world.seen.engines if w.pairing == sick)
    first = plan(new, world.seen, world.now)
    for (component, revision), count in first.counts.items():
        if revision != first.goals[component].revision and role in (None, component):
            assert count == 0
    assert_done(new, run(new, world))


def test_a_pod_that_is_unready_for_a_moment_is_not_taken_for_sick() -> None:
    world = settled(service(1, p=2, d=2))
    engines = tuple(
        replace(w, pods=tuple(replace(p, ready=False, changed=world.now - 1) for p in w.pods))
        for w in world.seen.engines
    )
    world.seen = replace(world.seen, engines=engines)
    move = plan(service(2, p=2, d=2), world.seen, world.now)
    assert sum(n for (_, r), n in move.counts.items() if r in {w.revision for w in engines}) == 4
    assert move.wake is not None
    assert move.wake <= world.now + 30


def bad_new(world: World, since: float) -> None:
    world.becomes_ready = lambda pod: not any(pod in w.pods for w in world.seen.engines if w.created > since)


def test_a_bad_revision_costs_no_more_than_max_unavailable_and_fails_by_its_deadline() -> None:
    new = service(2, p=4, d=4, rollout={"progressDeadline": "60s"})
    world = settled(service(1, p=4, d=4), places=8)
    bad_new(world, 1000)
    for _ in range(80):
        world.apply(new, plan(new, world.seen, world.now))
        world.tick()
        assert ready(world.seen, P) >= 3
        assert ready(world.seen, D) >= 3
    last = plan(new, world.seen, world.now)
    assert last.state is Rollout.FAILED
    assert "not ready after 60s" in last.waits[0]
    good = service(1, p=4, d=4)
    world.becomes_ready = lambda pod: True
    assert_done(good, run(good, world))


def test_rollback_returns_to_what_served_and_stays_there() -> None:
    rollout = {"progressDeadline": "60s", "onFailure": "Rollback"}
    new = service(2, p=2, d=2, rollout=rollout)
    world = settled(service(1, p=2, d=2), places=4)
    old = {w.revision for w in world.seen.engines}
    bad_new(world, 1000)
    run(new, world)
    for _ in range(70):
        world.apply(new, plan(new, world.seen, world.now))
        world.tick()
    run(new, world)
    last = plan(new, world.seen, world.now)
    assert last.state is Rollout.ROLLED_BACK
    assert last.failed
    assert {w.revision for w in world.seen.engines} == old
    assert (ready(world.seen, P), ready(world.seen, D)) == (2, 2)
    fixed = service(3, p=2, d=2, rollout=rollout)
    world.becomes_ready = lambda pod: True
    assert_done(fixed, run(fixed, world))


def test_rollback_of_one_of_each_works_although_the_old_pods_are_gone() -> None:
    rollout = {"progressDeadline": "60s", "onFailure": "Rollback"}
    new = service(2, p=1, d=1, rollout=rollout)
    world = settled(service(1, p=1, d=1), places=2)
    bad_new(world, 1000)
    for _ in range(80):
        world.apply(new, plan(new, world.seen, world.now))
        world.tick()
    assert pairs(world.seen) == 1


def test_paused_changes_nothing_until_it_is_not() -> None:
    world = settled(service(1))
    paused = service(2, rollout={"paused": True})
    before = counts(world.seen)
    run(paused, world)
    assert counts(world.seen) == before
    assert "paused" in plan(paused, world.seen, world.now).waits[0]
    assert_done(service(2), run(service(2), world))


def test_recreate_stops_all_before_it_starts_any() -> None:
    new = service(2, rollout={"strategy": "Recreate"})
    world = settled(service(1), drain_s=3)

    def check(world: World) -> None:
        assert len({w.pairing for w in world.seen.engines if w.pods}) <= 1

    assert_done(new, run(new, world, check=check))


def test_independent_roles_do_not_wait_for_each_other() -> None:
    role = {"scaling": {"replicas": 2}, "engine": {"threads": 2}}
    new = service(1, roles={"prefill": role, "decode": role}, rollout={"strategy": "Independent"})
    world = settled(service(1, p=2, d=2), places=4)
    bad = plan(new, world.seen, world.now).goals[P].revision
    world.becomes_ready = lambda pod: pod.revision != bad
    run(new, world, steps=60)
    assert all(pod.ready for w in world.seen.of(D) for pod in w.pods)
    assert len([w for w in world.seen.of(D) if w.pods]) == 1


def test_store_comes_before_engines_and_goes_after_them() -> None:
    """As the pods see it, without traffic."""
    direct, store = service(1), service(1, transfer={"mode": "Store"}, store={})
    world = settled(direct, places=5)
    first = plan(store, world.seen, world.now)
    assert first.store
    assert first.counts == {(w.component, w.revision): w.replicas for w in world.seen.engines}
    assert "master is not ready" in first.waits[0]

    def pooled_needs_master(world: World) -> None:
        if any(w.pooled and w.pods for w in world.seen.engines):
            assert world.seen.store is not None

    assert_done(store, run(store, world, check=pooled_needs_master))
    assert_done(direct, run(direct, world, check=pooled_needs_master))
    assert world.seen.store is None


def test_a_new_mode_serves_before_the_old_roles_leave() -> None:
    world = settled(service(1))
    unified = service(1, mode="Unified", roles={"worker": {"scaling": {"replicas": 2}}})

    def check(world: World) -> None:
        assert pairs(world.seen) >= 1 or ready(world.seen, W) >= 1

    assert_done(unified, run(unified, world, check=check))
    assert not world.seen.of(P)


def test_a_new_mode_takes_the_place_of_the_old_one_on_a_full_cluster() -> None:
    world = settled(service(1, p=1, d=1), places=2)
    unified = service(1, mode="Unified", roles={"worker": {"scaling": {"replicas": 2}}})
    assert_done(unified, run(unified, world))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_scaling_without_a_rollout_is_one_step(count: int) -> None:
    world = settled(service(1))
    scaled = service(1, p=count)
    assert plan(scaled, world.seen, world.now).counts[P, world.seen.of(P)[0].revision] == count
    assert_done(scaled, run(scaled, world))


def test_external_counts_come_from_the_scale_and_are_kept_without_one() -> None:
    roles = {"prefill": {"scaling": {"mode": "External"}}, "decode": {"scaling": {"replicas": 3}}}
    world = settled(service(1, p=4))
    external = service(1, roles=roles)
    assert plan(external, world.seen, world.now).goals[P].count == 4
    world.seen = replace(world.seen, scales={P: 2})
    assert plan(external, world.seen, world.now).goals[P].count == 2


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Any state: up to three revisions a role, pods in any condition, replicas that do not match them."""
    world = World(places=None)
    engines = []
    for component in (P, D):
        for version in draw(st.lists(st.sampled_from([1, 2, 3]), unique=True, max_size=3)):
            there = plan(service(version), Observed(), 0)
            revision = there.goals[component].revision
            pairing = there.goals[component].pairing
            found = []
            for index in range(draw(st.integers(0, 4))):
                kind = draw(st.sampled_from(["ready", "starting", "sick", "ailing", "stopping"]))
                found.append(
                    Pod(
                        name=f"{component}-{version}-{index}",
                        component=component,
                        revision=revision,
                        created=500.0,
                        changed=world.now - (100 if kind == "sick" else 1),
                        ready=kind == "ready",
                        started=kind in ("ready", "sick", "ailing"),
                        ends=world.now + 5 if kind == "stopping" else None,
                    )
                )
            engines.append(
                Workload(
                    name=f"svc-{component}-{revision}",
                    component=component,
                    revision=revision,
                    replicas=draw(st.integers(0, 5)),
                    created=float(version),
                    pairing=pairing,
                    pods=tuple(found),
                )
            )
    world.seen = Observed(engines=tuple(engines))
    return world


rollouts = st.sampled_from(
    [{}, {"maxSurge": 1}, {"maxSurge": "50%", "maxUnavailable": 0}, {"maxUnavailable": "100%"}, {"maxUnavailable": 1}]
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(world=worlds(), p=st.integers(0, 4), d=st.integers(1, 5), rollout=rollouts, edits=st.lists(st.integers(1, 4)))
def test_from_any_state_and_any_edits_the_goal_is_reached_within_the_bounds(
    world: World, p: int, d: int, rollout: dict[str, Any], edits: list[int]
) -> None:
    for version in (*edits, 4):
        target = service(version, p=p, d=d, rollout=rollout)

        def check(before: Observed, target: InferenceService = target) -> None:
            goals = plan(target, before, world.now).goals
            for component, goal in goals.items():
                floor = min(ready_kept(before, component), max(0, goal.count - goal.max_unavailable))
                assert ready_kept(world.seen, component) >= floor, (component, counts(before), counts(world.seen))

        for _ in range(400 if version == 4 else 3):
            before = world.seen
            world.apply(target, plan(target, world.seen, world.now))
            check(before)
            world.tick()
            if world.seen == before and not world.busy:
                break
    assert_done(target, world)


def ready_kept(seen: Observed, component: Component) -> int:
    """Ready pods that stay when controllers act on the replicas as they are."""
    return sum(w.ready for w in seen.of(component))


def test_a_new_pod_that_stops_and_holds_a_place_is_what_is_waited_for() -> None:
    """Its node drains, or is lost."""
    rollout = {"maxSurge": 1, "maxUnavailable": 0}
    world = settled(service(1, p=2, d=2, rollout=rollout))
    new = service(2, p=2, d=2, rollout=rollout)
    fresh = revisions(new)[D]
    while not any(w.ready for w in world.seen.of(D) if w.revision == fresh):
        step(new, world)
    with_pods(world, lambda pod: pod.revision == fresh, ready=False, ends=world.now + 900)
    waits = step(new, world, 3).waits
    assert any(wait.startswith("decode: ") and "stopping" in wait for wait in waits), waits
