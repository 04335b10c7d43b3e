"""What stops a rollout, what undoes one, what does neither, and when it is over."""

from dataclasses import replace
from typing import Any

import pytest
from rollout_world import (
    D,
    P,
    W,
    assert_done,
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

from isthmus_operator.api.reasons import Reason
from isthmus_operator.api.v1alpha1 import InferenceService
from isthmus_operator.plan.events import events
from isthmus_operator.plan.observe import conditions, observe
from isthmus_operator.plan.observed import SICK_AFTER_S, UNSCHEDULABLE, EngineFacts, Facts, Observed, Pod
from isthmus_operator.plan.planner import Rollout, plan
from isthmus_operator.plan.rehearse import World
from isthmus_operator.plan.status import status_of
from isthmus_operator.render import engine
from isthmus_operator.render.names import Component, Defaults
from isthmus_operator.render.revision import role_revision

HOUR = 3600.0
NOW = "2026-01-01T00:00:00Z"
ROLLBACK = {"rollout": {"progressDeadline": "5s", "onFailure": "Rollback"}}


def changed_decode(**spec: Any) -> InferenceService:
    """Against `service(1, p=2, d=2)`: another revision of decode, of the same KV layout."""
    decode = {"scaling": {"replicas": 2}, "resources": {"limits": {"cpu": "2"}}}
    return service(1, roles={"prefill": {"scaling": {"replicas": 2}}, "decode": decode}, **spec)


def sick_prefill(world: World, **changes: Any) -> None:
    """One prefill pod is not ready, for two hours now, and stays so."""
    name = world.seen.of(P)[0].pods[0].name
    changes = {"reason": "CrashLoopBackOff", "problem": "container engine is waiting: CrashLoopBackOff"} | changes
    with_pods(world, lambda pod: pod.name == name, ready=False, started=False, changed=world.now - 2 * HOUR, **changes)
    world.becomes_ready = lambda pod: pod.name != name


@pytest.mark.parametrize("on_failure", ["Pause", "Rollback"])
@pytest.mark.parametrize("reason", ["CrashLoopBackOff", UNSCHEDULABLE])
def test_a_sick_pod_of_a_role_that_does_not_change_stops_nothing_and_undoes_nothing(
    on_failure: str, reason: str
) -> None:
    world = settled(service(1, p=2, d=2))
    sick_prefill(world, reason=reason)
    new = changed_decode(rollout={"onFailure": on_failure})
    assert step(new, world, 2).state is Rollout.ROLLING
    run(new, world)
    last = plan(new, world.seen, world.now)
    assert ready(world.seen, D) == pods(world.seen, D) == 2
    assert {w.revision for w in world.seen.of(D)} == {revisions(new)[D]}, "the old one is not kept for a rollback"
    assert not last.failed
    assert last.state is Rollout.FAILED
    assert world.seen.of(P)[0].pods[0].name in last.waits[0]
    with_pods(world, lambda pod: pod.component is D, ready=False, changed=world.now - HOUR)
    assert not plan(new, world.seen, world.now).failed, "this rollout was over"


def test_the_router_stays_as_it_was_when_engines_are_rolled_back() -> None:
    world = settled(service(1))
    (before,) = world.seen.routers
    new = service(2, model={"source": {"hostPath": {"path": "/models/new"}}}, **ROLLBACK)
    bad = set(revisions(new).values())
    world.becomes_ready = lambda pod: pod.revision not in bad
    last = step(new, world, 60)
    assert last.state is Rollout.ROLLED_BACK
    assert last.router == before.revision
    assert world.seen.routers == (before,)
    world.seen = replace(world.seen, routers=())
    assert plan(new, world.seen, world.now).routers, "one that is gone is made all the same"


def half_rolled(target: InferenceService, *, p: int = 2, d: int = 2, steps: int = 3) -> World:
    world = settled(service(1, p=p, d=d))
    step(target, world, steps)
    world.tick(HOUR)
    return world


def test_a_revert_is_not_undone_by_pods_that_cannot_be_made_for_a_moment() -> None:
    new, old = service(2, p=2, d=2, **ROLLBACK), service(1, p=2, d=2, **ROLLBACK)
    world = half_rolled(new)
    back = set(revisions(old).values())
    refused = {"problem": "pods cannot be created: exceeded quota", "problem_since": world.now}
    world.seen = replace(
        world.seen,
        engines=tuple(replace(w, replicas=2, **refused) if w.revision in back else w for w in world.seen.engines),
    )
    first = plan(old, world.seen, world.now)
    assert first.state is Rollout.ROLLING
    assert first.wake == world.now + 6
    late = plan(old, world.seen, world.now + 6)
    assert late.state is Rollout.FAILED, "what it was reverted from is no way back"
    assert "exceeded quota" in late.waits[0]
    assert not late.failed
    world.seen = replace(world.seen, engines=tuple(replace(w, problem="") for w in world.seen.engines))
    assert_done(old, run(old, world))


def test_pods_that_cannot_be_made_are_counted_from_when_they_could_not() -> None:
    target = service(1)
    deployment = engine.deployment(target, D, Defaults(), replicas=1)
    deployment["metadata"] |= {
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "ownerReferences": [{"kind": "InferenceService", "uid": target.uid, "controller": True}],
    }
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    deployment["status"] = {"conditions": [failure | {"lastTransitionTime": "2026-02-01T00:00:00Z"}]}
    (found,) = observe(target, [deployment], Facts(), {}).engines
    assert found.problem == "pods cannot be created: exceeded quota"
    assert found.problem_since - found.created == 31 * 24 * HOUR


def test_a_rollback_takes_all_roles_to_one_revision() -> None:
    """With one prefill pod and four of decode, the second of three revisions has the one and the first most others."""
    world = settled(service(1, p=1, d=4))
    second, third = service(2, p=1, d=4), service(3, p=1, d=4, **ROLLBACK)
    pairing = plan(second, world.seen, world.now).goals[P].pairing
    while not (ready(world.seen, P, pairing) and ready(world.seen, D, pairing)):
        step(second, world)
    assert ready(world.seen, D) > 2 * ready(world.seen, D, pairing)
    bad = set(revisions(third).values())
    world.becomes_ready = lambda pod: pod.revision not in bad
    step(third, world, 40)
    run(third, world)
    assert plan(third, world.seen, world.now).state is Rollout.ROLLED_BACK
    assert pairs(world.seen) == 1
    assert len({w.pairing for w in world.seen.engines if w.replicas}) == 1


@pytest.mark.parametrize("evicted", [True, False])
def test_an_old_pod_that_never_goes_does_not_keep_a_rollout_from_its_end(evicted: bool) -> None:
    """On a node that is gone a pod stops for ever; one that was evicted is kept for people to look at."""
    new = service(2, p=2, d=2)
    world = settled(service(1, p=2, d=2))
    step(new, world)
    (stuck,) = (pod for w in world.seen.of(D) for pod in w.pods if pod.ends is not None)
    stuck = replace(stuck, ends=None if evicted else world.now, failed=evicted)
    keeps = [w.name for w in world.seen.of(D) if stuck.name in {pod.name for pod in w.pods}]

    def comes_back() -> None:
        engines = tuple(
            replace(w, pods=(*(pod for pod in w.pods if pod.name != stuck.name), stuck)) if w.name in keeps else w
            for w in world.seen.engines
        )
        world.seen = replace(world.seen, engines=engines)

    def wait() -> None:
        for _ in range(20):
            step(new, world)
            comes_back()

    wait()
    if not evicted:
        held = plan(new, world.seen, world.now)
        assert held.state is Rollout.ROLLING
        assert held.wake is not None, "nothing may happen until then"
        world.now = held.wake
        wait()
    assert plan(new, world.seen, world.now).state is Rollout.COMPLETE
    assert not {w.name for w in world.seen.engines} & set(keeps)


def bad_router(**spec: Any) -> InferenceService:
    return service(1, router={"image": "router:bad"}, **spec)


def test_a_router_that_does_not_start_is_no_complete_rollout() -> None:
    world = settled(service(1))
    before = status_of(service(1), world.seen, plan(service(1), world.seen, world.now), {}, NOW)
    bad = bad_router(rollout={"progressDeadline": "60s", "onFailure": "Rollback"})
    world.becomes_ready = lambda pod: pod.component is not Component.ROUTER
    last = step(bad, world, 10)
    assert last.state is Rollout.ROLLING
    assert last.wake is not None
    assert any(w.ready for w in world.seen.routers), "the old one serves"
    found = status_of(bad, world.seen, last, before, NOW)
    assert found["revision"]["current"] == before["revision"]["current"] != found["revision"]["updated"]
    late = plan(bad, world.seen, last.wake)
    assert late.state is Rollout.ROLLED_BACK
    engines = world.seen.engines
    world.now = last.wake
    step(bad, world)
    world.becomes_ready = lambda pod: True
    run(bad, world)
    assert world.seen.engines == engines, "there is nothing to send back"
    assert [w.revision for w in world.seen.routers] == [role_revision(service(1), Component.ROUTER)]
    assert_done(service(1), run(service(1), world))


def test_a_new_mode_waits_for_a_router_that_knows_it() -> None:
    world = settled(service(1))
    unified = service(1, mode="Unified", roles={"worker": {"scaling": {"replicas": 2}}})
    world.becomes_ready = lambda pod: pod.component is not Component.ROUTER
    step(unified, world, 30)
    assert {w.revision for w in world.seen.routers} > {role_revision(unified, Component.ROUTER)}
    assert pairs(world.seen) >= 1
    world.becomes_ready = lambda pod: True
    assert_done(unified, run(unified, world))


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("surge", ["25%", 1, 0])
def test_routers_change_when_half_of_the_engines_are_new(replicas: int, surge: object) -> None:
    """They may know another tokenizer, and then give the other engines nothing."""
    of = {"mode": "Unified", "roles": {"worker": {"scaling": {"replicas": replicas}}}}
    rollout = {"maxSurge": surge, "maxUnavailable": 0 if surge else 1}
    world = settled(service(1, **of))
    new = service(2, model={"source": {"hostPath": {"path": "/models/new"}}}, rollout=rollout, **of)
    wanted, seen = role_revision(new, Component.ROUTER), list[tuple[int, int]]()

    def check(world: World) -> None:
        if world.seen.router_of(wanted) is not None and not seen:
            ours = [w for w in world.seen.of(W) if w.revision == revisions(new)[W]]
            seen.append((sum(w.ready for w in ours), ready(world.seen, W)))

    assert_done(new, run(new, world, check=check))
    ((fresh, both),) = seen
    assert 2 * fresh >= both, seen


def test_complete_is_told_when_a_revision_has_arrived_and_not_when_a_pod_is_back() -> None:
    target = service(1, p=2, d=2)
    world = settled(target)

    def look(target: InferenceService, before: dict[str, Any]) -> tuple[dict[str, Any], list[Reason]]:
        current = (before.get("revision") or {}).get("current", "")
        seen = replace(world.seen, conditions=conditions(before), current=current)
        after = status_of(target, seen, plan(target, seen, world.now), before, NOW)
        return after, [event.reason for event in events(before, after)]

    status, told = look(target, {})
    assert Reason.COMPLETE in told
    with_pods(world, lambda pod: pod.component is D, ready=False, reason="CrashLoopBackOff", problem="it crashes")
    status, told = look(target, status)
    # Nothing is rolled out: what is wrong is that pods crash.
    assert status["conditions"][2]["reason"] == "Complete"
    assert status["conditions"][0]["reason"] == "CrashLooping"
    assert Reason.ROLLING_OUT not in {c["reason"] for c in status["conditions"]}
    with_pods(world, lambda pod: pod.component is D, reason="", problem="")
    world.tick()
    status, told = look(target, status)
    assert status["conditions"][2]["reason"] == "Complete"
    assert Reason.COMPLETE not in told
    # An edit that is undone before it has arrived: the end of that is an end, too.
    step(changed_decode(), world)
    status, told = look(changed_decode(), status)
    assert Reason.ROLLOUT_STARTED in told and Reason.COMPLETE not in told
    status, told = look(target, status)
    assert Reason.ROLLOUT_STARTED in told and Reason.COMPLETE not in told
    run(target, world)
    status, told = look(target, status)
    assert told == [Reason.COMPLETE]
    assert look(target, status)[1] == []
    status, told = look(changed_decode(), status)
    run(changed_decode(), world)
    status, told = look(changed_decode(), status)
    assert told == [Reason.COMPLETE]


def stored(version: int = 1, **spec: Any) -> InferenceService:
    return service(version, p=2, d=2, store={}, transfer={"mode": "Store"}, **spec)


@pytest.mark.parametrize("on_failure", ["Pause", "Rollback"])
def test_a_master_that_does_not_start_fails_by_the_deadline(on_failure: str) -> None:
    rollout = {"rollout": {"progressDeadline": "60s", "onFailure": on_failure}}
    world = settled(service(1, p=2, d=2))
    world.becomes_ready = lambda pod: pod.component is not Component.STORE
    last = step(stored(2, **rollout), world, 10)
    assert last.state is Rollout.ROLLING
    assert last.wake is not None
    # First it counts as more than a moment's trouble, then as overdue.
    soon = plan(stored(2, **rollout), world.seen, last.wake)
    assert soon.state is Rollout.ROLLING and soon.wake is not None
    late = plan(stored(2, **rollout), world.seen, soon.wake)
    assert late.state is Rollout.FAILED
    assert "store" in late.waits[0]
    assert not late.failed, "engines have not changed, and would not be better off"
    assert pairs(world.seen) == 2
    world.becomes_ready = lambda pod: True
    assert_done(stored(2, **rollout), run(stored(2, **rollout), world))


def test_a_service_whose_master_is_not_ready_is_not_complete() -> None:
    world = settled(stored())
    assert world.seen.store is not None
    sick = tuple(replace(pod, ready=False, changed=world.now) for pod in world.seen.store.pods)
    world.seen = replace(world.seen, store=replace(world.seen.store, pods=sick))
    assert plan(stored(), world.seen, world.now).state is Rollout.ROLLING
    assert plan(stored(), world.seen, world.now + HOUR).state is Rollout.FAILED
    world.tick()
    assert plan(stored(), world.seen, world.now).state is Rollout.COMPLETE


def test_paused_is_said_whatever_it_holds_up() -> None:
    world = settled(service(1))
    paused = {"rollout": {"paused": True}}
    assert plan(service(1, **paused), world.seen, world.now).state is Rollout.COMPLETE
    assert plan(bad_router(**paused), world.seen, world.now).state is Rollout.PAUSED
    assert plan(service(1, **paused), Observed(), world.now).state is Rollout.PAUSED


def test_independent_roles_change_in_step_where_the_layout_may_change() -> None:
    new = service(2, p=4, d=4, rollout={"strategy": "Independent"})
    world = settled(service(1, p=4, d=4), places=8)
    bad = revisions(new)[P]
    world.becomes_ready = lambda pod: pod.revision != bad
    last = step(new, world, 60)
    assert ready(world.seen, D, last.goals[D].pairing) == 1
    assert "in step although strategy is Independent" in last.waits[-1]
    world.becomes_ready = lambda pod: True

    def check(world: World) -> None:
        assert pairs(world.seen) >= 1

    assert_done(new, run(new, world, check=check))


def test_what_was_rolled_back_tells_of_the_routers_that_serve() -> None:
    world = settled(service(1, p=2, d=2))
    new = service(2, p=2, d=2, model={"source": {"hostPath": {"path": "/models/new"}}}, **ROLLBACK)
    bad = set(revisions(new).values())
    world.becomes_ready = lambda pod: pod.revision not in bad
    last = step(new, world, 60)
    found = {c["type"]: c for c in status_of(new, world.seen, last, {}, NOW)["conditions"]}
    assert found["RouterReady"]["message"] == "router: 2 of 2 pods are ready"
    assert found["Ready"]["reason"] == "RolledBack"


@pytest.mark.parametrize(
    ("prefill", "decode", "available"),
    [("a", "a", "True"), ("a", "b", "False"), ("a", "", "True"), ("", "", "True")],
)
def test_prefill_and_decode_of_two_layouts_answer_nobody_who_must_have_prefill(
    prefill: str, decode: str, available: str
) -> None:
    """In mid-rollout only prefill pods of the one and decode pods of the other revision are ready."""
    target = service(1, p=2, d=2, router={"onPrefillUnavailable": "Reject"})
    world = settled(target)
    engines = tuple(replace(w, pairing=str(w.component)) for w in world.seen.engines)
    layouts = {P: prefill, D: decode}
    facts = {
        pod.name: EngineFacts(fingerprint=layouts[pod.component])
        for w in engines
        for pod in w.pods
        if layouts[pod.component]
    }

    def said(seen: Observed) -> dict[str, Any]:
        found = status_of(target, seen, plan(target, seen, world.now), {}, NOW)["conditions"]
        return next(c for c in found if c["type"] == "Available")

    seen = replace(world.seen, engines=engines, facts=Facts(engines=facts))
    assert said(seen)["status"] == available
    assert available == "True" or "of the KV layout of a decode pod" in said(seen)["message"]
    seen = replace(world.seen, facts=Facts(engines=facts))
    assert said(seen)["status"] == "True", "of one pairing they have one layout"


def crash(world: World, bad: set[str], ready_s: float) -> None:
    """Engines of these revisions that have been ready for so long crash."""

    def after(pod: Pod) -> Pod:
        if pod.revision not in bad or not pod.ready or world.now - pod.changed < ready_s:
            return pod
        down: dict[str, Any] = {"ready": False, "started": False, "reason": "CrashLoopBackOff"}
        return replace(pod, **down, changed=world.now, restarts=pod.restarts + 1)

    engines = (replace(w, pods=tuple(map(after, w.pods))) for w in world.seen.engines)
    world.seen = replace(world.seen, engines=tuple(engines))


@pytest.mark.parametrize("on_failure", ["Pause", "Rollback"])
@pytest.mark.parametrize(("up", "down"), [(1, 40), (20, 40), (20, 100), (60, 60)])
def test_engines_that_crash_again_and_again_do_not_take_the_old_ones_away(on_failure: str, up: int, down: int) -> None:
    """Each time they are ready for a moment."""
    world = settled(service(1, p=4, d=4))
    new = service(2, p=4, d=4, rollout={"progressDeadline": "120s", "onFailure": on_failure})
    bad = set(revisions(new).values())
    world.becomes_ready = lambda pod: pod.revision not in bad or world.now - pod.changed >= down
    states = set()
    for _ in range(600):
        crash(world, bad, up)
        states.add(step(new, world).state)
        assert pairs(world.seen) >= 2
    failed = Rollout.FAILED if on_failure == "Pause" else Rollout.ROLLED_BACK
    assert failed in states and Rollout.COMPLETE not in states
    if on_failure == "Rollback":
        assert pairs(world.seen) == 4
        assert not any(w.replicas for w in world.seen.engines if w.revision in bad)
    else:
        world.becomes_ready = lambda pod: True
        for _ in range(40):
            step(new, world, 10)
        assert_done(new, world)


def test_a_pod_that_crashed_counts_once_it_has_been_ready_for_a_while() -> None:
    new = service(2, p=2, d=2)
    world = settled(service(1, p=2, d=2))
    bad = set(revisions(new).values())
    world.becomes_ready = lambda pod: pod.revision not in bad
    step(new, world, 5)
    with_pods(world, lambda pod: pod.revision in bad, ready=True, started=True, changed=world.now, restarts=1)
    before = plan(new, world.seen, world.now)
    assert {w.replicas for w in world.seen.engines} == set(before.counts.values()) == {1}
    assert before.wake == world.now + SICK_AFTER_S
    assert "it was restarted" in before.waits[0]
    after = plan(new, world.seen, before.wake)
    assert {count for (_, revision), count in after.counts.items() if revision not in bad} == {0}


@pytest.mark.parametrize("changes", [{"started": True}, {"ran": 121.0}, {"restarts": 2}])
def test_restarts_when_a_pod_began_are_not_held_against_it(changes: dict[str, Any]) -> None:
    """It has run since, for longer than the deadline, or fails a probe."""
    world = settled(service(1, p=4, d=4))
    new = service(2, p=4, d=4, rollout={"progressDeadline": "120s", "onFailure": "Rollback"})
    bad = set(revisions(new).values())
    step(new, world, 4)
    world.now += HOUR
    down: dict[str, Any] = {"ready": False, "started": False, "restarts": 3, "ran": 20.0, "changed": world.now - 50}
    with_pods(world, lambda pod: pod.revision in bad, **down | changes)
    assert plan(new, world.seen, world.now).state is Rollout.ROLLING
    with_pods(world, lambda pod: pod.revision in bad, **down)
    assert plan(new, world.seen, world.now).state is Rollout.ROLLED_BACK


def test_crashes_in_a_pause_undo_nothing() -> None:
    world = settled(service(1, p=4, d=4))
    of: dict[str, Any] = {"progressDeadline": "120s", "onFailure": "Rollback"}
    step(service(2, p=4, d=4, rollout=of), world, 4)
    world.now += HOUR
    new = service(2, p=4, d=4, rollout=of | {"paused": True})
    bad = set(revisions(new).values())
    down: dict[str, Any] = {"ready": False, "started": False, "restarts": 9, "changed": world.now}
    with_pods(world, lambda pod: pod.revision in bad, **down)
    assert plan(new, world.seen, world.now).state is Rollout.PAUSED
    assert plan(service(2, p=4, d=4, rollout=of), world.seen, world.now).state is Rollout.ROLLED_BACK
