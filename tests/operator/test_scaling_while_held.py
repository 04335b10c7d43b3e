"""The number of pods of a role follows its spec, its scale or its target also while a rollout is held up or failed, and
while pods that have nothing to do with it are not ready."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_world import D, P, assert_done, pairs, ready, revisions, run, service, step, with_pods

from isthmus_operator.api.v1alpha1 import InferenceService
from isthmus_operator.plan.autoscale import STEADY_S, decide
from isthmus_operator.plan.observe import observe
from isthmus_operator.plan.observed import UNSCHEDULABLE, EngineFacts, Facts, Observed
from isthmus_operator.plan.planner import Rollout, plan
from isthmus_operator.plan.rehearse import World
from isthmus_operator.render.names import Component

EXTERNAL = {"scaling": {"mode": "External"}}
AUTO = {"scaling": {"mode": "Auto", "min": 1, "max": 6, "target": {"metric": "QueuedRequests", "value": 1}}}


def scaled(version: int, *, prefill: dict[str, Any] | None = None, **rollout: Any) -> InferenceService:
    """Two prefill pods, and as many of decode as its scale says."""
    roles = {"prefill": prefill or {"scaling": {"replicas": 2}}, "decode": EXTERNAL}
    return service(version, roles=roles, rollout={"progressDeadline": "5s", "maxUnavailable": 1} | rollout)


def ask(world: World, count: int) -> None:
    world.seen = replace(world.seen, scales={D: count})


def of(world: World, target: InferenceService) -> int:
    """Replicas of decode of the revision of a spec."""
    revision = revisions(target)[D]
    return sum(w.replicas for w in world.seen.of(D) if w.revision == revision)


def failed_world(new: InferenceService, count: int = 3) -> World:
    """The new revision does not start; its rollout has stopped."""
    world = World()
    ask(world, count)
    run(scaled(1), world)
    bad = set(revisions(new).values())
    world.becomes_ready = lambda pod: pod.revision not in bad
    assert step(new, world, 30).state is Rollout.FAILED
    return world


def test_a_failed_rollout_scales_what_serves() -> None:
    old, new = scaled(1), scaled(2)
    world = failed_world(new)
    assert (of(world, old), of(world, new)) == (2, 1)
    for count, expected in ((10, 9), (4, 3), (2, 1), (1, 1), (5, 4)):
        ask(world, count)
        last = step(new, world, 5)
        assert last.state is Rollout.FAILED
        assert (of(world, old), of(world, new)) == (expected, 1)
    ask(world, 0)
    assert step(new, world, 5).waits, "prefill has not started either"
    assert not sum(w.replicas for w in world.seen.of(D))
    ask(world, 4)
    world.becomes_ready = lambda pod: True
    assert_done(new, run(new, world))
    assert ready(world.seen, D) == 4


def test_with_room_for_more_a_failed_rollout_keeps_all_that_serve() -> None:
    surge = {"maxSurge": 1, "maxUnavailable": 0}
    old, new = scaled(1), scaled(2, **surge)
    world = failed_world(new)
    assert (of(world, old), of(world, new)) == (3, 1)
    ask(world, 2)
    step(new, world, 5)
    assert (of(world, old), of(world, new)) == (2, 1)


@pytest.mark.parametrize("count", [0, 1, 2, 6])
def test_a_paused_rollout_scales_what_serves(count: int) -> None:
    world = World()
    ask(world, 3)
    run(scaled(1), world)
    paused = scaled(2, paused=True)
    ask(world, count)
    last = run(paused, world)
    assert (of(last, scaled(1)), of(last, paused)) == (count, 0)
    assert plan(paused, world.seen, world.now).state is Rollout.PAUSED


def test_a_rollout_paused_half_way_keeps_pairs_of_both_revisions() -> None:
    world = World()
    ask(world, 4)
    run(scaled(1, prefill=EXTERNAL), world)
    world.seen = replace(world.seen, scales={P: 4, D: 4})
    run(scaled(1, prefill=EXTERNAL), world)
    new = scaled(2, prefill=EXTERNAL)
    step(new, world, 5)
    held = scaled(2, prefill=EXTERNAL, paused=True)
    run(held, world)
    for count in (9, 2):
        world.seen = replace(world.seen, scales={P: count, D: count})
        run(held, world)
        assert sum(w.replicas for w in world.seen.of(D)) == sum(w.replicas for w in world.seen.of(P)) == count
        assert pairs(world.seen) == count
        assert len({w.pairing for w in world.seen.engines if w.replicas}) == 2


def stored(d: int) -> InferenceService:
    return service(1, p=2, d=d, store={})


def without_master(world: World, gone: bool = True) -> None:
    assert world.seen.store is not None
    pods = tuple(replace(pod, ready=not gone) for pod in world.seen.store.pods)
    world.seen = replace(world.seen, store=replace(world.seen.store, pods=pods))
    world.becomes_ready = lambda pod: not gone or pod.component is not Component.STORE


def test_roles_are_scaled_and_rolled_on_while_the_master_is_away() -> None:
    world = run(stored(2), World())
    without_master(world)
    run(stored(5), world)
    assert ready(world.seen, D) == 5
    new = service(2, p=2, d=5, store={})
    before = {w.name: w.replicas for w in world.seen.engines}
    # Where the master is away and no new engine has started it is brought to the present spec; until it is ready:
    assert "master is not ready" in step(new, world, 5).waits[0]
    assert {w.name: w.replicas for w in world.seen.engines if w.name in before} == before
    without_master(world, gone=False)
    step(new, world, 3)
    without_master(world)
    step(new, world, 40)
    assert {w.revision for w in world.seen.of(D) if w.replicas} == {revisions(new)[D]}


def test_a_role_at_zero_starts_when_the_master_is_there() -> None:
    world = run(stored(0), World())
    without_master(world)
    assert "master is not ready" in step(stored(2), world, 5).waits[0]
    assert not ready(world.seen, D)
    without_master(world, gone=False)
    assert_done(stored(2), run(stored(2), world))


def automatic(version: int = 1, *, prefill: int = 2, **rollout: Any) -> InferenceService:
    roles = {"prefill": {"scaling": {"replicas": prefill}}, "decode": AUTO}
    return service(version, roles=roles, rollout={"progressDeadline": "5s"} | rollout)


def wish(target: InferenceService, world: World, queued: float) -> int:
    """What Auto makes of so many queued requests at each ready decode pod."""
    pods = [pod.name for w in world.seen.of(D) for pod in w.live if pod.ready]
    facts = Facts(engines={name: EngineFacts(fingerprint="f", queued=queued) for name in pods})
    seen = replace(world.seen, facts=facts)
    return decide(target, seen, plan(target, seen, world.now), world.now)[D].count


def automatic_world() -> World:
    world = World()
    ask(world, 2)
    run(automatic(), world)
    world.now += 2 * STEADY_S
    return world


def test_a_pod_of_another_role_that_is_not_ready_does_not_stop_auto() -> None:
    world = automatic_world()
    with_pods(world, lambda pod: pod.component is P, ready=False, changed=world.now)
    assert wish(automatic(), world, 50) == 6
    with_pods(world, lambda pod: pod.component is P, changed=world.now - 3600)
    assert plan(automatic(), world.seen, world.now).state is Rollout.FAILED
    assert wish(automatic(), world, 50) == 6
    assert wish(automatic(), world, 0) == 1


def test_auto_counts_ready_pods_and_waits_for_those_that_start() -> None:
    world = automatic_world()
    ask(world, 4)
    world.becomes_ready = lambda pod: False
    step(automatic(), world, 2)
    assert wish(automatic(), world, 3) == 6, "two ready pods with three each"
    assert wish(automatic(), world, 0.5) == 4, "the new ones have not even loaded the model"
    world.now += 2 * STEADY_S
    assert wish(automatic(), world, 0.5) == 4, "some load for longer than others"
    with_pods(world, lambda pod: not pod.ready, reason=UNSCHEDULABLE, problem="no node has room for it")
    assert wish(automatic(), world, 0.5) == 3, "and these do not come"


def test_auto_rests_while_a_rollout_moves_and_not_when_it_stands() -> None:
    world = automatic_world()
    new = automatic(2)
    bad = set(revisions(new).values())
    world.becomes_ready = lambda pod: pod.revision not in bad
    step(new, world, 3)
    assert wish(new, world, 50) == 2
    assert wish(automatic(2, paused=True), world, 50) > 2
    step(new, world, 30)
    assert wish(new, world, 50) > 2
    back = automatic(2, onFailure="Rollback")
    step(back, world, 30)
    assert plan(back, world.seen, world.now).state is Rollout.ROLLED_BACK
    assert wish(back, world, 50) == 6


@given(
    old=st.integers(0, 6),
    new=st.integers(0, 6),
    ready_new=st.integers(0, 6),
    count=st.integers(0, 8),
    surge=st.integers(0, 2),
)
def test_what_is_held_comes_to_rest_with_the_count_it_should_have(
    old: int, new: int, ready_new: int, count: int, surge: int
) -> None:
    """Whatever mixture it is held in: enough pods are asked for, one that serves stays, nothing goes up and down."""
    world = World()
    ask(world, old)
    run(scaled(1), world)
    rollout = {"maxSurge": surge, "maxUnavailable": 0 if surge else 1}
    target = scaled(2, paused=True, **rollout)
    bad = plan(scaled(2), Observed(), 0).goals[D].revision
    world.becomes_ready = lambda pod: pod.revision != bad or int(pod.name.rsplit("-", 1)[1]) % 6 < ready_new
    made = plan(scaled(2), Observed(scales={D: new}), 0)
    made_world = World(now=world.now)
    made_world.apply(scaled(2), made)
    world.seen = replace(world.seen, engines=(*world.seen.engines, *made_world.seen.of(D)))
    ask(world, count)
    served = ready(world.seen, D)
    run(target, world)
    asked = sum(w.replicas for w in world.seen.of(D))
    assert asked >= count
    assert asked == 0 or count > 0
    assert ready(world.seen, D) >= min(served, count, 1)
    assert max((w.replicas for w in world.seen.of(D)), default=0) <= max(count, 0)


@pytest.mark.parametrize("strategy", ["Recreate", "Coordinated"])
@pytest.mark.parametrize("surge", [0, 2])
@pytest.mark.parametrize("scaling", [EXTERNAL, AUTO])
@pytest.mark.parametrize("steps", range(6))
def test_a_scale_begins_with_what_was_wanted_and_not_with_what_a_rollout_has_left(
    strategy: str, surge: int, scaling: dict[str, Any], steps: int
) -> None:
    """A role is given to an autoscaler, or its RoleScaler is deleted, at any moment of a rollout."""
    rollout = {"strategy": strategy, "maxSurge": surge, "maxUnavailable": 1}
    static = {"prefill": {"scaling": {"replicas": 2}}, "decode": {"scaling": {"replicas": 4}}}
    world = World(drain_s=2)
    run(service(1, roles=static, rollout=rollout), world)
    step(service(2, roles=static, rollout=rollout), world, steps)
    given_away = service(2, roles=static | {"decode": scaling}, rollout=rollout)
    for _ in range(4):
        assert plan(given_away, world.seen, world.now).goals[D].count == 4
        step(given_away, world)
    ask(world, 5)
    step(given_away, world)
    # Deleted by hand.
    world.seen = replace(world.seen, scales={})
    assert plan(given_away, world.seen, world.now).goals[D].count == 5
    assert plan(given_away, replace(world.seen, wanted={D: 0}), world.now).goals[D].count == (
        0 if scaling is EXTERNAL else 1
    )


def test_what_was_wanted_is_read_from_the_status() -> None:
    target = service(1, roles={"prefill": {}, "decode": EXTERNAL})
    status = {"roles": {"prefill": {"desired": 1}, "decode": {"desired": 3, "ready": 0}, "router": {"desired": 9}}}
    seen = observe(target, [], Facts(), status)
    assert seen.wanted == {P: 1, D: 3}
    assert plan(target, seen, 0.0).goals[D].count == 3
    assert plan(target, observe(target, [], Facts(), {}), 0.0).goals[D].count == 1
