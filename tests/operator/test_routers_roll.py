"""Routers of a revision give engines of another one nothing, where the tokenizer or the mode differs: through rollouts
and back there is always a router with engines of its own, where the counts leave room for both."""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from rollout_world import assert_done, run, service, settled, step, with_pods

from isthmus_operator.api.v1alpha1 import InferenceService
from isthmus_operator.plan.observed import SICK_AFTER_S, Facts, Pod, Word
from isthmus_operator.plan.planner import Plan, Rollout, plan
from isthmus_operator.plan.rehearse import World
from isthmus_operator.plan.status import status_of
from isthmus_operator.render.names import Component
from isthmus_operator.render.revision import pairing, role_revision

R = Component.ROUTER
NOW = "2026-11-30T00:00:00Z"


def of_model(name: str, *, replicas: int, routers: int = 2, pair: bool = False, **rollout: Any) -> InferenceService:
    roles = {"prefill": {"scaling": {"replicas": replicas}}, "decode": {"scaling": {"replicas": replicas}}}
    unified: dict[str, Any] = {"mode": "Unified", "roles": {"worker": {"scaling": {"replicas": replicas}}}}
    return service(
        1,
        model={"source": {"hostPath": {"path": f"/models/{name}"}}},
        router={"replicas": routers},
        rollout={"progressDeadline": "60s", **rollout},
        **({"roles": roles} if pair else unified),
    )


def answers(world: World, models: Iterable[InferenceService]) -> bool:
    """Whether a router is ready, and each that is has engines of its own."""
    found = []
    for model in models:
        router = world.seen.router_of(role_revision(model, R))
        if router is not None and router.ready:
            parts = {w.component for w in world.seen.engines}
            engines = [
                sum(w.ready for w in world.seen.of(part) if w.pairing == pairing(model)) for part in sorted(parts)
            ]
            found.append(bool(engines) and all(engines))
    return bool(found) and all(found)


def all_of(world: World, model: InferenceService) -> bool:
    routers = {w.revision for w in world.seen.routers if w.ready}
    return routers == {role_revision(model, R)} and {w.pairing for w in world.seen.engines if w.ready} == {
        pairing(model)
    }


@pytest.mark.parametrize("pair", [False, True])
def test_a_rollback_takes_routers_back_that_have_changed(pair: bool) -> None:
    old = of_model("llama", replicas=4, pair=pair)
    new = of_model("qwen", replicas=4, pair=pair, onFailure="Rollback")
    world = settled(old)

    def last_never_starts(pod: Pod) -> bool:
        seen = [p for w in world.seen.of(pod.component) if w.pairing == pairing(new) for p in w.live]
        return pod.component is R or pod.revision == role_revision(old, pod.component) or sum(p.ready for p in seen) < 3

    world.becomes_ready = last_never_starts
    changed = False

    def check(world: World) -> None:
        nonlocal changed
        changed = changed or not any(w.ready for w in world.seen.routers if w.revision == role_revision(old, R))
        assert answers(world, (old, new))

    run(new, world, check=check)
    for _ in range(9):  # what is overdue is so by the time alone
        world.now += 61
        run(new, world, check=check)
    assert changed, "routers had not changed when it failed"
    assert plan(new, world.seen, world.now).state is Rollout.ROLLED_BACK
    assert all_of(world, old)
    assert len(world.seen.routers) == 1, "the one that failed is not needed any more"


@pytest.mark.parametrize(("replicas", "surge"), [(1, 1), (3, 0), (4, 1), (4, 2)])
@pytest.mark.parametrize("back", ["Pause", "Rollback"])
def test_old_engines_stay_while_no_new_router_is_ready(replicas: int, surge: int, back: str) -> None:
    """For want of a node, of quota, or of the tokenizer."""
    rollout = {"maxSurge": surge, "maxUnavailable": 0 if surge else 1}
    old, new = of_model("llama", replicas=replicas), of_model("qwen", replicas=replicas, **rollout, onFailure=back)
    world = settled(old)
    world.becomes_ready = lambda pod: pod.revision != role_revision(new, R)

    def check(world: World) -> None:
        assert answers(world, [old])

    run(new, world, check=check)
    world.now += 61
    assert plan(new, world.seen, world.now).state is (Rollout.FAILED if back == "Pause" else Rollout.ROLLED_BACK)
    run(new, world, check=check)
    assert all_of(world, old) or back == "Pause"
    world.becomes_ready = lambda pod: True
    if back == "Pause":
        assert_done(new, run(new, world, check=lambda world: answers(world, (old, new)) or pytest.fail("nobody")))
        assert all_of(world, new)


@pytest.mark.parametrize("seed", [*range(8), 121, 123, 137, 327])
def test_somebody_answers_whatever_fails_and_whoever_changes_his_mind(seed: int) -> None:
    rng = random.Random(seed)
    replicas, pair, surge = rng.randint(1, 5), rng.random() < 0.5, rng.randint(0, 2)
    if replicas == 1:
        surge = max(1, surge)  # else there is no room for two
    rollout = {"maxSurge": surge, "maxUnavailable": rng.randint(0 if surge else 1, 1)}
    models = [
        of_model(name, replicas=replicas, routers=rng.randint(2, 3), pair=pair, **rollout, onFailure=back)
        for name, back in (("a", "Pause"), ("b", rng.choice(["Pause", "Rollback"])), ("c", "Rollback"))
    ]
    world = settled(models[0])
    for target in rng.choices(models, k=3):
        bad = {part: rng.random() < 0.3 for part in Component}
        cap = rng.randint(0, replicas)
        new = {role_revision(target, part) for part in Component if part not in (Component.STORE, *absent(target))}

        def starts(pod: Pod, bad: dict[Component, bool] = bad, cap: int = cap, new: set[str] = new) -> bool:
            there = [p for w in world.seen.of(pod.component) if w.revision in new for p in w.live if p.ready]
            return pod.revision not in new or not bad[pod.component] or len(there) < cap

        world.becomes_ready = starts
        for _ in range(rng.choice([3, 8, 200])):
            step(target, world, seconds=rng.choice([1.0, 1.0, 1.0, 20.0]))
            assert answers(world, models), f"{seed=} {replicas=} {pair=} {rollout=}"
    world.becomes_ready = lambda pod: True
    last = models[rng.randrange(3)]
    for _ in range(300):
        step(last, world)
        assert answers(world, models), f"{seed=}"
    done = plan(last, world.seen, world.now)
    assert done.state in (Rollout.COMPLETE, Rollout.ROLLED_BACK), (seed, done)
    assert len(world.seen.routers) == 1


def absent(target: InferenceService) -> list[Component]:
    roles = target.spec.roles
    found = {Component.PREFILL: roles.prefill, Component.DECODE: roles.decode, Component.WORKER: roles.worker}
    return [part for part, role in found.items() if role is None]


def test_routers_change_one_at_a_time() -> None:
    rollout = {"maxSurge": 1}
    old, new = (service(1, router={"replicas": 3, "maxQueue": most}, rollout=rollout) for most in (7, 8))
    world = settled(old)

    def check(world: World) -> None:
        assert sum(w.ready for w in world.seen.routers) >= 3
        assert sum(w.replicas for w in world.seen.routers) <= 4

    assert_done(new, run(new, world, check=check))


def test_without_surge_no_more_routers_are_asked_for_than_there_should_be() -> None:
    rollout = {"maxSurge": 0, "maxUnavailable": 1}
    old, new = (service(1, router={"replicas": 3, "maxQueue": most}, rollout=rollout) for most in (7, 8))
    world = settled(old)

    def check(world: World) -> None:
        assert sum(w.replicas for w in world.seen.routers) <= 3
        assert sum(w.ready for w in world.seen.routers) >= 2

    assert_done(new, run(new, world, check=check))


def available(target: InferenceService, world: World, wanted: Plan, facts: Facts) -> tuple[str, str]:
    found = status_of(target, replace(world.seen, facts=facts), wanted, {}, NOW)["conditions"]
    return next((c["status"], c["message"]) for c in found if c["type"] == "Available")


def test_engines_that_no_router_takes_make_nothing_available() -> None:
    target = of_model("a", replicas=2)
    world = settled(target)
    pods = [replace(pod, ip=f"10.0.0.{at}") for at, pod in enumerate(pod for w in world.seen.engines for pod in w.pods)]
    world.seen = replace(world.seen, engines=(replace(world.seen.engines[0], pods=tuple(pods)),))
    wanted = plan(target, world.seen, world.now)
    assert available(target, world, wanted, Facts())[0] == "True", "nobody has asked"
    revision = world.seen.routers[0].revision
    one = Facts(routers={revision: {pods[0].ip: Word.TAKEN}})
    assert available(target, world, wanted, one)[0] == "True"
    none = Facts(routers={revision: {pod.ip: Word.NOT_NOW for pod in pods}})
    status, message = available(target, world, wanted, none)
    assert status == "False" and "none of 2 engines" in message


# ----------------------------------------------------------------------------------------------- pauses and modes


def in_mode(unified: bool, replicas: int, **rollout: Any) -> InferenceService:
    return of_model("a", replicas=replicas, pair=not unified, progressDeadline="60s", **rollout)


def someone(world: World) -> bool:
    """Whether a router has engines of its mode and model, whichever revision they are of."""
    for routers in (w for w in world.seen.routers if w.ready):
        parts = (Component.PREFILL, Component.DECODE) if routers.pairs else (Component.WORKER,)
        if all(any(w.ready and w.pairing == routers.pairing for w in world.seen.of(part)) for part in parts):
            return True
    return False


def answered_by_decode(world: World) -> bool:
    """`someone` where decode answers alone (`Local`)."""
    every = [(w.pairs, w.pairing) for w in world.seen.routers if w.ready]
    parts = {True: Component.DECODE, False: Component.WORKER}
    return any(w.ready and w.pairing == pairing for pairs, pairing in every for w in world.seen.of(parts[pairs]))


@pytest.mark.parametrize("strategy", ["Recreate", "Coordinated"])
def test_a_pause_does_not_leave_engines_to_routers_of_another_model(strategy: str) -> None:
    rollout = {"strategy": strategy, "maxSurge": 0, "maxUnavailable": 1}
    old, new = (of_model(name, replicas=1, **rollout) for name in ("a", "b"))
    paused = of_model("b", replicas=1, **rollout, paused=True)
    world = settled(old)
    while any(w.replicas for w in world.seen.engines if w.pairing == pairing(old)):
        step(new, world)
    run(paused, world)
    assert someone(world)


def test_a_pause_holds_routers_that_change_alone() -> None:
    old, new = (service(1, router={"maxQueue": most}, rollout={"paused": most == 8}) for most in (7, 8))
    world = settled(old)
    before = world.seen.routers
    run(new, world)
    assert world.seen.routers == before


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("back", ["Pause", "Rollback"])
def test_a_mode_whose_pods_find_no_place_takes_a_part_of_the_others(unified: bool, back: str) -> None:
    replicas = 4
    old, new = in_mode(unified, replicas), in_mode(not unified, replicas, onFailure=back)
    world = settled(old, places=8)
    world.places = sum(len(w.live) for w in world.seen.engines)
    known = {role_revision(old, part) for part in Component if part not in (Component.STORE, *absent(old))}
    world.fits = lambda pod: pod.revision in known
    run(new, world, check=lambda world: someone(world) or pytest.fail("nobody answers"))
    assert sum(w.ready for w in world.seen.engines) >= (2 if unified else 6)
    world.now += 61
    assert plan(new, world.seen, world.now).state is (Rollout.FAILED if back == "Pause" else Rollout.ROLLED_BACK)
    run(new, world, check=lambda world: someone(world) or pytest.fail("nobody answers"))
    if back == "Rollback":
        assert sum(w.ready for w in world.seen.engines) == (4 if unified else 8)
        assert plan(new, world.seen, world.now).state is Rollout.ROLLED_BACK
    world.fits = lambda pod: True
    assert_done(old, run(old, world, check=lambda world: someone(world) or pytest.fail("nobody answers")))
    assert {w.component for w in world.seen.engines} == {w.component for w in settled(old).seen.engines}


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("places", [0, 1, 3])
def test_a_mode_comes_on_a_full_cluster_and_somebody_answers(unified: bool, places: int) -> None:
    old, new = in_mode(unified, 4), in_mode(not unified, 2)
    world = settled(old)
    world.places = sum(len(w.live) for w in world.seen.engines) + places
    assert_done(new, run(new, world, check=lambda world: someone(world) or pytest.fail("nobody answers")))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("changes", [{"ready": False}, {"restarts": 1}])
def test_the_last_of_a_mode_stays_though_it_flickers(changes: dict[str, Any], unified: bool, replicas: int) -> None:
    """Pods of the new mode find no place."""
    surge = {"maxSurge": 1, "maxUnavailable": 0}
    old, new = in_mode(unified, replicas, **surge), in_mode(not unified, replicas, **surge)
    world = settled(old)
    world.places = sum(len(w.live) for w in world.seen.engines)
    step(new, world, 6)
    assert answered_by_decode(world)
    part = Component.WORKER if unified else Component.DECODE
    with_pods(world, lambda pod: pod.component is part and pod.ready, changed=world.now, **changes)
    names = {pod.name for w in world.seen.engines if w.component is part for pod in w.live}
    wanted = plan(new, world.seen, world.now)
    assert wanted.wake is not None and wanted.wake <= world.now + SICK_AFTER_S
    world.apply(new, wanted)
    with_pods(world, lambda pod: pod.name in names, ready=True)
    for _ in range(20):
        step(new, world)
        assert answered_by_decode(world)


@pytest.mark.parametrize(("workers", "pairs"), [(3, 2), (3, 3), (4, 4), (4, 6)])
def test_roles_of_a_mode_that_has_no_room_for_all_share_what_there_is(workers: int, pairs: int) -> None:
    """Prefill does not take every place."""
    surge = {"maxSurge": 0, "maxUnavailable": 1}
    old, new = in_mode(True, workers, **surge), in_mode(False, pairs, **surge)
    world = settled(old)
    world.places = workers
    for _ in range(120):
        step(new, world)
        assert someone(world)
    assert sum(w.ready for w in world.seen.engines if w.component is not Component.WORKER) >= 2
    world.places = 2 * pairs
    assert_done(new, run(new, world))


@pytest.mark.parametrize("surge", [0, 1])
@pytest.mark.parametrize(
    ("workers", "prefills", "decodes"), [(4, 3, 1), (4, 2, 2), (4, 1, 3), (3, 2, 1), (2, 1, 1), (6, 5, 1)]
)
def test_a_mode_of_unlike_roles_comes_on_the_places_of_the_one_before(
    workers: int, prefills: int, decodes: int, surge: int
) -> None:
    """Decode first, which answers alone: of two workers one goes for it, and the last for prefill."""
    rollout = {"maxSurge": surge, "maxUnavailable": 1 - surge}
    old = in_mode(True, workers, **rollout)
    new = service(
        1,
        p=prefills,
        d=decodes,
        model={"source": {"hostPath": {"path": "/models/a"}}},
        router={"replicas": 2},
        rollout={"progressDeadline": "60s", **rollout},
    )
    world = settled(old, places=workers)
    world.becomes_ready = lambda pod: pod.component is R or world.now - pod.created >= 10
    for _ in range(200):
        step(new, world)
        assert answered_by_decode(world)
    assert_done(new, world)


@pytest.mark.parametrize("surge", [0, 1])
@pytest.mark.parametrize(("workers", "places", "pairs"), [(4, 3, 1), (4, 2, 1), (6, 4, 2)])
def test_a_mode_comes_where_there_was_no_room_for_all_of_the_one_before(
    workers: int, places: int, pairs: int, surge: int
) -> None:
    """A worker that had no place gives none up, and none is waited for in return."""
    rollout = {"maxSurge": surge, "maxUnavailable": 1 - surge}
    old, new = in_mode(True, workers, **rollout), in_mode(False, pairs, **rollout)
    world = World(places=places)
    step(old, world, 20)
    assert sum(w.ready for w in world.seen.engines) == places
    world.becomes_ready = lambda pod: pod.component is R or world.now - pod.created >= 10
    for _ in range(150):
        step(new, world)
        assert answered_by_decode(world)
    assert_done(new, world)


@pytest.mark.parametrize("after", [20, 60])
@pytest.mark.parametrize("surge", [0, 1])
@pytest.mark.parametrize(("workers", "places", "pairs", "back"), [(4, 4, 4, True), (6, 4, 4, True), (8, 4, 2, False)])
def test_a_mode_that_has_no_room_is_left_again(
    workers: int, places: int, pairs: int, back: bool, surge: int, after: int
) -> None:
    """An edit that was a mistake, and its revert: what it asked for and never got is waited for by nobody."""
    rollout = {"maxSurge": surge, "maxUnavailable": 1 - surge}
    one, other = in_mode(True, workers, **rollout), in_mode(False, pairs, **rollout)
    old, new = (one, other) if back else (other, one)
    world = World(places=places)
    step(old, world, 20)
    world.becomes_ready = lambda pod: pod.component is R or world.now - pod.created >= 10
    step(new, world, after)
    for _ in range(200):
        step(old, world)
        assert answered_by_decode(world)
    assert not [w for w in world.seen.engines if w.replicas and w.pairing != pairing(old)]
    assert sum(w.ready for w in world.seen.engines if w.pairing == pairing(old)) == places
