"""States from which a service must come back by itself, or by a revert: each of them once stayed for ever."""

from dataclasses import replace
from typing import Any

import pytest
from rollout_world import W, assert_done, run, service, settled, step

from isthmus_operator.api.reasons import Reason
from isthmus_operator.api.v1alpha1 import InferenceService, parse
from isthmus_operator.plan.autoscale import STEADY_S, decide
from isthmus_operator.plan.events import events
from isthmus_operator.plan.observed import EngineFacts, Facts
from isthmus_operator.plan.planner import Rollout, plan
from isthmus_operator.plan.rehearse import World
from isthmus_operator.render.names import Component
from isthmus_operator.render.revision import role_revision


def stored(version: int, **rollout: Any) -> InferenceService:
    spec = {"store": {"segmentSize": "1Gi", "master": {}}, "transfer": {"mode": "Store"}}
    return service(version, p=2, d=2, rollout={"progressDeadline": "10m"} | rollout, **spec)


def bad(target: InferenceService) -> set[str]:
    """Revisions of everything that runs its image."""
    return {role_revision(target, part) for part in (Component.STORE, Component.PREFILL, Component.DECODE)}


def ready_engines(world: World) -> int:
    return sum(w.ready for w in world.seen.engines)


@pytest.mark.parametrize("strategy", ["Recreate", "Coordinated"])
def test_a_rollback_finds_the_master_it_needs(strategy: str) -> None:
    """An image that does not run never reaches the master, also where all old engines stop first."""
    before = stored(1, strategy=strategy)
    after = stored(2, strategy=strategy, onFailure="Rollback")
    world = settled(before)
    of_before = role_revision(before, Component.STORE)
    unfit = bad(after)
    world.becomes_ready = lambda pod: pod.revision not in unfit
    last = step(after, world, 600, 2.0)
    assert last.state is Rollout.ROLLED_BACK, last
    assert world.seen.store is not None
    assert (world.seen.store.revision, world.seen.store.ready) == (of_before, 1)
    assert ready_engines(world) == 4
    assert_done(before, run(before, world))


def test_nothing_is_rolled_back_to_engines_that_have_no_master() -> None:
    after = stored(2, onFailure="Rollback")
    world = settled(stored(1))
    world.becomes_ready = lambda pod: False
    step(after, world, 2)
    assert world.seen.store is not None
    lost = tuple(replace(pod, ready=False, changed=world.now) for pod in world.seen.store.pods)
    world.seen = replace(world.seen, store=replace(world.seen.store, pods=lost))
    assert step(after, world, 600, 2.0).state is Rollout.FAILED
    world.becomes_ready = lambda pod: True
    assert_done(after, run(after, world))


def test_a_master_lost_in_the_middle_of_a_rollout_is_made_of_the_new_spec() -> None:
    """The old image cannot be pulled any more, the old engines need a master as much as the new ones."""
    before, after = stored(1), stored(2)
    world = settled(before)
    gone, engines = role_revision(before, Component.STORE), bad(after) - {role_revision(after, Component.STORE)}
    world.becomes_ready = lambda pod: pod.revision != gone and pod.revision not in engines
    step(after, world, 3)
    assert world.seen.store is not None
    lost = tuple(replace(pod, ready=False, changed=world.now) for pod in world.seen.store.pods)
    world.seen = replace(world.seen, store=replace(world.seen.store, pods=lost))
    step(after, world, 3)
    assert world.seen.store.revision == gone
    step(after, world, 30, 2.0)
    assert world.seen.store is not None and world.seen.store.revision == role_revision(after, Component.STORE)
    world.becomes_ready = lambda pod: pod.revision != gone
    assert_done(after, run(after, world))


def of(roles: dict[str, int], mode: str, routers: int) -> InferenceService:
    return parse(
        {
            "apiVersion": "serving.isthmus.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "svc", "namespace": "ns", "uid": "u"},
            "spec": {
                "mode": mode,
                "model": {"source": {"hostPath": {"path": "/m"}}},
                "engine": {"image": "e:1"},
                "router": {"replicas": routers},
                "roles": {name: {"scaling": {"replicas": count}} for name, count in roles.items()},
            },
        }
    )


@pytest.mark.parametrize(("prefill", "routers"), [(2, 0), (0, 1), (0, 0)])
def test_a_mode_change_ends_where_a_part_is_scaled_to_zero(prefill: int, routers: int) -> None:
    unified = of({"worker": 2}, "Unified", routers)
    both = of({"prefill": prefill, "decode": 2}, "Disaggregated", routers)
    world = settled(unified)
    assert_done(both, run(both, world))
    assert_done(unified, run(unified, world))


def test_auto_takes_no_pod_away_that_still_loads_however_long_it_takes() -> None:
    target = of({"worker": 1}, "Unified", 1)
    scaling = {"mode": "Auto", "min": 1, "max": 8, "target": {"metric": "QueuedRequests", "value": 10}}
    target = service(1, mode="Unified", roles={"worker": {"scaling": scaling}})
    world = World()
    world.seen = replace(world.seen, scales={W: 4})
    run(target, world)
    (workers,) = world.seen.engines
    begun = world.now
    loading = tuple(
        replace(pod, ready=number == 0, started=number == 0, changed=begun) for number, pod in enumerate(workers.pods)
    )
    facts = Facts(engines={loading[0].name: EngineFacts(fingerprint="f", queued=15)})
    late = begun + 3 * STEADY_S

    def wish(pods: Any) -> int:
        seen = replace(world.seen, engines=(replace(workers, pods=pods),), facts=facts)
        return decide(target, seen, plan(target, seen, late), late)[W].count

    assert wish(loading) == 4
    # What has a problem may never load, and is no reason to keep the rest.
    stuck = tuple(pod if pod.ready else replace(pod, reason="X", problem="cannot start") for pod in loading)
    assert wish(stuck) == 3


def test_what_was_made_in_the_same_second_is_gone_back_to() -> None:
    """A service that is edited within a second of its creation: the API's times tell no order."""
    before = service(1, p=2, d=2)
    after = service(2, p=2, d=2, rollout={"progressDeadline": "5s", "onFailure": "Rollback"})
    world = settled(before)
    unfit = bad(after)
    world.becomes_ready = lambda pod: pod.revision not in unfit
    step(after, world, 2)
    at = world.now
    world.seen = replace(world.seen, engines=tuple(replace(w, created=at) for w in world.seen.engines))
    assert step(after, world, 30).state is Rollout.ROLLED_BACK
    assert ready_engines(world) == 4


@pytest.mark.parametrize(
    ("strategy", "replicas", "surge", "told"),
    [("Recreate", 1, 0, True), ("Recreate", 2, 0, False), ("Recreate", 1, 1, False), ("Coordinated", 1, 0, False)],
)
def test_the_only_router_goes_first_where_that_is_asked_for_and_not_in_silence(
    strategy: str, replicas: int, surge: int, told: bool
) -> None:
    rollout = {"strategy": strategy, "maxSurge": surge, "maxUnavailable": 1}
    old, new = (
        service(1, router={"replicas": replicas, "disaggregateAbove": above}, rollout=rollout) for above in (0, 9)
    )
    world = settled(old)
    assert [event.reason for event in events({}, {}, plan(old, world.seen, world.now))] == []
    wanted = plan(new, world.seen, world.now)
    found = [event.message for event in events({}, {}, wanted) if event.reason is Reason.CAPACITY_GAP]
    assert len(found) == told
    assert all("the only router" in message for message in found)
    least = 2

    def check(world: World) -> None:
        nonlocal least
        least = min(least, sum(w.ready for w in world.seen.routers))

    assert not plan(new, run(new, world, check=check).seen, world.now).alone
    assert (least == 0) == told
