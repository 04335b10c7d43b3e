"""Engines and routers that were ready fail again, new ones never start, and somebody changes his mind all the while:
wherever there are engines that are ready and routers of theirs could be, somebody answers."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from rollout_world import D, P, W, assert_done, service

from isthmus_operator.api.v1alpha1 import InferenceService
from isthmus_operator.plan.observed import Pod, Workload
from isthmus_operator.plan.planner import Plan, Rollout, plan
from isthmus_operator.plan.rehearse import World
from isthmus_operator.plan.routers import unneeded
from isthmus_operator.render.names import Component
from isthmus_operator.render.revision import role_revision

R = Component.ROUTER
Kind = tuple[str, bool]
"""Model, and whether prefill and decode are apart."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a spec asks for."""

    model: str = "a"
    apart: bool = False
    prefills: int = 2
    replicas: int = 4
    routers: int = 2
    queue: int = 7
    image: int = 1
    paused: bool = False
    rollout: tuple[tuple[str, Any], ...] = ()

    @property
    def kind(self) -> Kind:
        return self.model, self.apart

    @property
    def spec(self) -> InferenceService:
        counts = {"prefill": self.prefills, "decode": self.replicas} if self.apart else {"worker": self.replicas}
        return service(
            self.image,
            mode="Disaggregated" if self.apart else "Unified",
            model={"source": {"hostPath": {"path": f"/models/{self.model}"}}},
            roles={part: {"scaling": {"replicas": count}} for part, count in counts.items()},
            router={"replicas": self.routers, "maxQueue": self.queue},
            rollout={"progressDeadline": "60s", **dict(self.rollout), "paused": self.paused},
        )


@dataclass
class Life:
    """A service whose pods fail. `bad`: (component, model) whose pods fail, or never start."""

    asked: Asked
    world: World = field(default_factory=World)
    bad: set[tuple[Component, str]] = field(default_factory=set)
    known: dict[tuple[Component, str], Kind] = field(default_factory=dict)
    taken: list[Plan] = field(default_factory=list)
    """Plans by which, without a fault, nobody answered any more."""

    def __post_init__(self) -> None:
        self.world.becomes_ready = self.starts
        self.go(60)

    def fails(self, pod: Pod) -> bool:
        return (pod.component, self.known[pod.component, pod.revision][0]) in self.bad

    def starts(self, pod: Pod) -> bool:
        """A router does so when it knows an engine of its own."""
        return not self.fails(pod) and (pod.component is not R or self.known[R, pod.revision] in self.engines)

    def strike(self, *bad: tuple[Component, str]) -> None:
        """What is ready of these crashes now."""
        self.bad |= set(bad)

        def struck(workload: Workload) -> Workload:
            down: dict[str, Any] = {"ready": False, "started": False, "changed": self.world.now}
            down |= {"reason": "CrashLoopBackOff"}
            pods = (replace(pod, **down) if pod.ready and self.fails(pod) else pod for pod in workload.pods)
            return replace(workload, pods=tuple(pods))

        seen = self.world.seen
        engines, routers = tuple(map(struck, seen.engines)), tuple(map(struck, seen.routers))
        self.world.seen = replace(seen, engines=engines, routers=routers)

    def evict(self, *parts: Component, rng: random.Random) -> None:
        """One pod drains, as its node does."""
        every = (*self.world.seen.engines, *self.world.seen.routers)
        pods = [pod.name for w in every if w.component in parts for pod in w.live]
        gone = rng.choice(pods) if pods else ""

        def drained(workload: Workload) -> Workload:
            ends = {"ends": self.world.now + 1, "ready": False}
            return replace(
                workload, pods=tuple(replace(pod, **ends) if pod.name == gone else pod for pod in workload.pods)
            )

        seen = self.world.seen
        engines, routers = tuple(map(drained, seen.engines)), tuple(map(drained, seen.routers))
        self.world.seen = replace(seen, engines=engines, routers=routers)

    def go(self, steps: int, seconds: float = 1.0, until: Callable[[], bool] = lambda: False) -> Plan:
        target, asked = self.asked.spec, self.asked
        for part in (R, P, D) if asked.apart else (R, W):
            self.known[part, role_revision(target, part)] = asked.kind
        for _ in range(steps):
            if until():
                break
            answered = self.answered
            wanted = plan(target, self.world.seen, self.world.now)
            self.world.apply(target, wanted)
            self.world.tick(seconds)
            if answered and not self.answered:
                self.taken.append(wanted)
        return plan(target, self.world.seen, self.world.now)

    def edit(self, **changes: Any) -> None:
        self.asked = replace(self.asked, **changes)

    def ready(self, component: Component) -> set[Kind]:
        every = (*self.world.seen.engines, *self.world.seen.routers)
        return {self.known[component, w.revision] for w in every if w.component is component and w.ready}

    @property
    def engines(self) -> set[Kind]:
        """Kinds of which there are engines that answer. A decode pod does so alone."""
        return self.ready(W) | self.ready(D)

    @property
    def answered(self) -> bool:
        return bool(self.ready(R) & self.engines)

    @property
    def could_be(self) -> bool:
        """Whether engines are ready of which there could be routers: of the present spec, or as there were."""
        kinds = {self.known[R, w.revision] for w in self.world.seen.routers} | {self.asked.kind}
        return bool({kind for kind in kinds if (R, kind[0]) not in self.bad} & self.engines)


SHAPES = [{}, {"apart": True}, {"apart": True, "prefills": 1, "replicas": 2}, {"apart": True, "prefills": 1}]
SURGES = [{"maxSurge": 0, "maxUnavailable": "25%"}, {"maxSurge": 1, "maxUnavailable": 0}]


EVENTS = ["mode", "count", "pause", "queue", "image", "evict", "well", *["model", "changed"] * 2, *["die"] * 3]


def lived(seed: int, *, one_router: bool = False) -> Life:
    """A life with up to six events, which ends well: no fault is left and nothing is paused."""
    rng = random.Random(seed)
    rollout = {
        "strategy": rng.choice(["Coordinated", "Coordinated", "Independent"]),
        "onFailure": rng.choice(["Pause", "Rollback"]),
        **rng.choice([*SURGES, {"maxSurge": "50%", "maxUnavailable": "25%"}, {"maxSurge": 0, "maxUnavailable": 1}]),
    }
    shape = rng.choice(SHAPES)
    routers = rng.randint(2, 3)
    life = Life(Asked(**shape, routers=1 if one_router else routers, rollout=tuple(rollout.items())))
    for _ in range(rng.randint(1, 6)):
        match rng.choice(EVENTS):
            case "model":
                life.edit(model=rng.choice("abc"))
            case "mode":
                life.edit(apart=not life.asked.apart)
            case "count":
                life.edit(replicas=rng.randint(2, 5))
            case "pause":
                life.edit(paused=not life.asked.paused)
            case "queue":
                life.edit(queue=rng.randint(7, 9))
            case "image":
                life.edit(image=rng.randint(1, 3))
            case "evict":
                life.evict(rng.choice([R, D, W]), rng=rng)
            case "well":
                life.bad.clear()
            case "changed":  # routers have, and a part of the engines
                life.edit(model=rng.choice("abc"))
                life.go(40, until=lambda: life.ready(R) == {life.asked.kind})
                life.strike(*((part, life.asked.model) for part in rng.choice([(R,), (W, P, D)])))
            case "die":
                parts = rng.choice([(R,), (W, D), (W, D), (P,)])
                model = rng.choice([life.asked.model, rng.choice("abc")])
                life.strike(*((part, model) for part in parts))
        steps = rng.choice([0, 1, 2, 3, 5, 8, 12, 16, 20, 40])
        life.go(steps, rng.choice([1.0, 1.0, 1.0, 20.0]))
        assert life.answered or steps < 12 or not life.could_be, f"{seed=}: {life}"
    life.go(80)
    life.go(8, 30.0)  # what is overdue is so by the time alone
    life.go(60)
    assert life.answered or not life.could_be, f"{seed=}: {life}"
    life.bad.clear()
    life.edit(paused=False)
    last = life.go(200)
    assert last.state in (Rollout.COMPLETE, Rollout.ROLLED_BACK), f"{seed=}: {last}"
    assert life.answered and len(life.world.seen.routers) == 1, f"{seed=}: {life.world.seen}"
    assert last.state is Rollout.ROLLED_BACK or life.ready(R) == {life.asked.kind}
    return life


@pytest.mark.parametrize("seed", [4, 14, 23, 36, 42, 47, 51, 54, 58, 65, 80, 135])
def test_somebody_answers_wherever_ready_engines_and_routers_of_theirs_could_be(seed: int) -> None:
    assert not lived(seed).taken


@pytest.mark.parametrize("seed", [4, 14, 23, 36, 42])
def test_one_router_is_as_good(seed: int) -> None:
    assert not lived(seed, one_router=True).taken


def changed_over(back: str, shape: dict[str, Any], surge: dict[str, Any], paused: bool = False) -> Life:
    """Routers have all gone to model b; engines of a are there still."""
    life = Life(Asked(**shape, rollout=tuple((surge | {"onFailure": back}).items())))
    life.edit(model="b")
    kinds = (("a", life.asked.apart), ("b", life.asked.apart))
    life.go(100, until=lambda: life.ready(R) == {kinds[1]} and kinds[0] in life.engines)
    assert life.ready(R) == {kinds[1]} and kinds[0] in life.engines
    life.edit(paused=paused)
    return life


@pytest.mark.parametrize("surge", SURGES)
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize(("back", "paused"), [("Pause", False), ("Rollback", False), ("Pause", True)])
def test_where_new_engines_fail_routers_go_back(
    back: str, paused: bool, shape: dict[str, Any], surge: dict[str, Any]
) -> None:
    life = changed_over(back, shape, surge, paused)
    life.strike((W, "b"), (P, "b"), (D, "b"))
    life.go(8)
    assert life.answered and ("a", life.asked.apart) in life.ready(R)
    life.go(30)
    assert life.ready(R) == {("a", life.asked.apart)}, "none stays without engines"
    late = life.go(1, 100.0)
    ends = Rollout.PAUSED if paused else Rollout.FAILED if back == "Pause" else Rollout.ROLLED_BACK
    assert late.state is ends
    life.go(60)
    assert life.answered and not life.taken
    life.bad.clear()
    life.edit(paused=False)
    if back == "Pause":
        life.go(100)
        assert_done(life.asked.spec, life.world)
        assert life.ready(R) == {life.asked.kind}


@pytest.mark.parametrize("surge", SURGES)
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("back", ["Pause", "Rollback"])
def test_where_new_routers_fail_old_ones_come_back(back: str, shape: dict[str, Any], surge: dict[str, Any]) -> None:
    life = changed_over(back, shape, surge)
    life.strike((R, "b"))
    life.go(8)
    assert life.answered
    assert any(not pod.ready for w in life.world.seen.routers for pod in w.live), "the new ones are tried all the while"
    late = life.go(1, 100.0)
    assert late.state is (Rollout.FAILED if back == "Pause" else Rollout.ROLLED_BACK)
    life.go(60)
    assert life.answered and not life.taken
    life.bad.clear()
    last = life.go(100)
    assert last.state is (Rollout.COMPLETE if back == "Pause" else Rollout.ROLLED_BACK)
    assert life.engines == life.ready(R) == {("b" if back == "Pause" else "a", life.asked.apart)}


@pytest.mark.parametrize("surge", SURGES)
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("back", ["Pause", "Rollback"])
@pytest.mark.parametrize("wait", [0, 1, 2])
def test_old_routers_come_back_also_where_others_that_fail_are_between(
    wait: int, back: str, shape: dict[str, Any], surge: dict[str, Any]
) -> None:
    """They were edited once more, and then those of before and after the edit fail."""
    life = changed_over(back, shape, surge)
    life.edit(queue=8)
    life.go(wait)
    assert ("a", life.asked.apart) in life.engines
    life.strike((R, "b"))
    life.go(8)
    assert life.answered
    life.go(60, 30.0)
    assert life.answered and not life.taken


@pytest.mark.parametrize("surge", SURGES)
def test_routers_of_which_none_starts_are_each_tried_and_do_not_change_places(surge: dict[str, Any]) -> None:
    """In the midst of a rollout that is paused."""
    life = Life(Asked(rollout=tuple(surge.items())))
    life.edit(model="b")
    life.go(100, until=lambda: {("a", False), ("b", False)} == life.ready(R) == life.engines)
    life.edit(paused=True)
    life.strike((R, "a"), (R, "b"))
    life.go(40)
    routers = life.world.seen.routers
    assert [w.replicas > 0 for w in routers] == [True, True]
    life.go(40)
    assert life.world.seen.routers == routers, "no pod is replaced for nothing"
    life.bad = {(R, "b")}
    life.go(5)
    assert life.answered


@pytest.mark.parametrize("surge", SURGES)
def test_routers_that_have_begun_to_change_do_not_step_back_for_a_failed_probe(surge: dict[str, Any]) -> None:
    """Of all new engines at once."""
    life = Life(Asked(rollout=tuple(surge.items())))
    life.edit(model="b")
    life.go(60, until=lambda: {("a", False), ("b", False)} == life.ready(R))
    new = role_revision(life.asked.spec, R)
    before = life.world.seen.router_of(new)

    def failed(workload: Workload) -> Workload:
        if life.known[W, workload.revision] != ("b", False):
            return workload
        pods = (replace(pod, ready=False, changed=life.world.now) for pod in workload.pods)
        return replace(workload, pods=tuple(pods))

    seen = life.world.seen
    wanted = plan(life.asked.spec, replace(seen, engines=tuple(map(failed, seen.engines))), life.world.now)
    assert before is not None and wanted.routers[new] >= before.replicas


def test_the_only_router_does_not_wait_for_room_when_it_has_no_engine() -> None:
    """Of a quota that has room for one."""
    life = Life(Asked(replicas=1, routers=1, rollout=tuple(SURGES[0].items())))

    def starts(pod: Pod) -> bool:
        routers = sum(len(w.pods) for w in life.world.seen.routers)
        return life.starts(pod) and (pod.component is not R or routers == 1)

    life.world.becomes_ready = starts
    life.edit(model="b")
    life.go(40)
    assert life.answered
    assert_done(life.asked.spec, life.world)


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("unavailable", [0, 1])
@pytest.mark.parametrize("image", [2, 3])
def test_of_old_engines_those_stay_that_routers_know(image: int, unavailable: int, apart: bool, paused: bool) -> None:
    """On the way to another model another image of it is asked for, as soon as routers have begun to change."""
    surge = {"maxSurge": 1, "maxUnavailable": unavailable}
    for steps in range(2, 8):
        life = Life(Asked(apart=apart, prefills=1, replicas=1, rollout=tuple(surge.items())))
        life.edit(model="b")
        life.go(steps)
        life.edit(paused=paused)
        life.go(6 if paused else 0)
        life.edit(image=image)
        life.go(4)
        life.edit(paused=False)
        life.go(40)
        assert not life.taken, f"after {steps} looks"
        assert_done(life.asked.spec, life.world)


@pytest.mark.parametrize("back", ["Pause", "Rollback"])
@pytest.mark.parametrize("routers", [1, 2])
def test_a_change_of_routers_alone_fails_as_one_of_engines_does(routers: int, back: str) -> None:
    life = Life(Asked(routers=routers, rollout=tuple((SURGES[0] | {"onFailure": back}).items())))
    before, engines = life.world.seen.routers, life.world.seen.engines
    old = {w.revision for w in before}
    life.world.becomes_ready = lambda pod: pod.component is not R or pod.revision in old
    life.edit(queue=8)
    life.go(10)
    assert life.answered
    late = life.go(1, 100.0)
    assert late.state is (Rollout.FAILED if back == "Pause" else Rollout.ROLLED_BACK)
    assert "router" in late.waits[0] if back == "Pause" else late.failed
    life.go(30)
    assert life.world.seen.engines == engines, "they have nothing to do with it"
    if back == "Rollback":
        assert life.answered
        assert [(w.revision, w.ready) for w in life.world.seen.routers] == [(w.revision, w.ready) for w in before]
    life.world.becomes_ready = lambda pod: True
    life.edit(queue=9)
    life.go(50)
    assert_done(life.asked.spec, life.world)


@pytest.mark.parametrize("drain", [1.0, 20.0])
@pytest.mark.parametrize("decodes", [2, 3, 5])
def test_an_old_decode_stays_while_old_routers_are_all_there_are(decodes: int, drain: float) -> None:
    """A prefill pod that has no room beside it goes first; decode answers without it."""
    life = Life(Asked(apart=True, prefills=1, replicas=decodes, rollout=tuple(SURGES[0].items())))
    life.world.drain_s = drain
    life.edit(model="b")
    life.go(200)
    assert not life.taken, life.taken
    assert_done(life.asked.spec, life.world)


@pytest.mark.parametrize("surge", SURGES)
def test_a_pause_with_fewer_routers_keeps_the_one_that_is_ready(surge: dict[str, Any]) -> None:
    life = Life(Asked(routers=3, rollout=tuple(surge.items())))
    old = {w.revision for w in life.world.seen.routers}
    life.world.becomes_ready = lambda pod: pod.component is not R or pod.revision in old or fewer_ready(life, old)
    life.edit(queue=8)
    life.go(10)
    down: dict[str, Any] = {"ready": False, "started": False, "changed": life.world.now}
    routers = (
        w if w.revision in old else replace(w, pods=tuple(replace(pod, **down) for pod in w.pods))
        for w in life.world.seen.routers
    )
    life.world.becomes_ready = lambda pod: False
    life.world.seen = replace(life.world.seen, routers=tuple(routers))
    assert life.answered
    life.edit(paused=True, routers=1)
    life.go(5)
    assert life.answered


@pytest.mark.parametrize("back", ["Pause", "Rollback"])
@pytest.mark.parametrize("steps", [5, 8, 11, 40])
@pytest.mark.parametrize("model", ["a", "b"])
def test_routers_know_engines_of_their_model_whatever_their_image(model: str, steps: int, back: str) -> None:
    """To another model, and on the way to another image of either, which does not start."""
    life = Life(Asked(rollout=tuple((SURGES[0] | {"onFailure": back}).items())))
    life.edit(model="b")
    life.go(steps)
    life.edit(model=model, image=2)
    broken = role_revision(life.asked.spec, W)
    life.world.becomes_ready = lambda pod: pod.revision != broken and life.starts(pod)
    life.go(20)
    late = life.go(1, 100.0)
    assert late.state is (Rollout.FAILED if back == "Pause" else Rollout.ROLLED_BACK)
    life.go(60)
    assert life.answered and not life.taken
    assert back == "Pause" or life.ready(R) == life.engines


def test_routers_of_engines_that_an_earlier_operator_made_stay() -> None:
    """Those do not say of which model they are, and their routers' label names a later pairing."""
    life = changed_over("Pause", SHAPES[0], SURGES[0])
    seen = life.world.seen
    (old,) = (w for w in seen.routers if life.known[R, w.revision][0] == "a")
    assert not old.replicas
    engines = tuple(
        replace(w, model="", pairing="of-before") if life.known[w.component, w.revision][0] == "a" else w
        for w in seen.engines
    )
    seen = replace(seen, engines=engines, routers=tuple(replace(w, pods=()) if w is old else w for w in seen.routers))
    counts = {w.revision: w.replicas for w in seen.routers}
    goal = role_revision(life.asked.spec, R)
    assert unneeded(goal, seen, counts, over=False, now=life.world.now) == ()
    assert unneeded(goal, seen, counts, over=True, now=life.world.now) == (old.name,)


@pytest.mark.parametrize("paused", [False, True])
def test_decode_pods_that_answer_alone_have_routers(paused: bool) -> None:
    """Those of before have failed, and prefill pods do not start."""
    life = Life(Asked(apart=True, rollout=tuple(SURGES[0].items())))
    life.edit(model="b")
    life.strike((D, "a"), (P, "b"))
    life.go(20)
    life.edit(paused=paused)
    life.go(20)
    assert life.answered


@pytest.mark.parametrize("back", ["Pause", "Rollback"])
def test_what_changes_while_there_should_be_no_engines_does_not_fail(back: str) -> None:
    """Routers are not ready before they know an engine."""
    life = Life(Asked(rollout=tuple((SURGES[0] | {"onFailure": back}).items())))
    life.edit(replicas=0)
    life.go(20)
    life.edit(model="b")
    life.go(20)
    assert life.go(5, 100.0).state is Rollout.ROLLING
    life.edit(replicas=2)
    life.go(60)
    assert_done(life.asked.spec, life.world)
    assert life.answered and life.ready(R) == {("b", False)}


@pytest.mark.parametrize("replicas", [0, 2])
def test_a_pause_holds_routers_also_while_there_are_no_engines(replicas: int) -> None:
    life = Life(Asked(rollout=tuple(SURGES[0].items())))
    life.edit(replicas=0)
    life.go(20)
    before = life.world.seen.routers
    life.edit(model="b", paused=True)
    life.go(20)
    assert life.world.seen.routers == before
    life.edit(replicas=replicas)
    life.go(20)
    assert life.world.seen.routers == before
    assert life.answered is (replicas > 0), "what is paused serves"
    life.edit(replicas=2, paused=False)
    life.go(80)
    assert_done(life.asked.spec, life.world)


@pytest.mark.parametrize("strategy", ["Recreate", "Coordinated"])
@pytest.mark.parametrize("apart", [True, False])
def test_a_rollback_goes_to_a_mode_that_had_routers(apart: bool, strategy: str) -> None:
    """Two edits, one right after the other: of the first there are engines, and never were routers."""
    rollout = SURGES[0] | {"onFailure": "Rollback", "strategy": strategy}
    life = Life(Asked(apart=apart, rollout=tuple(rollout.items())))
    life.edit(apart=not apart)
    life.go(1)
    life.strike((R, "b"), (W, "b"), (D, "b"), (P, "b"))
    life.edit(model="b")
    life.go(20)
    late = life.go(1, 100.0)
    assert late.state is Rollout.ROLLED_BACK
    life.go(60)
    assert life.answered
    assert life.ready(R) == life.engines == {("a", apart)}


@pytest.mark.parametrize("surge", SURGES)
@pytest.mark.parametrize("steps", range(1, 9))
def test_a_change_of_mode_is_not_rolled_back_to_engines_that_never_had_routers(
    steps: int, surge: dict[str, Any]
) -> None:
    """In the midst of a change to another model the mode changes, and its workers never start. Of the one prefill pod
    nothing of the former model is left, so all of the pair that there could be is of the model without routers."""
    rollout = (surge | {"onFailure": "Rollback"}).items()
    life = Life(Asked(apart=True, prefills=1, replicas=3, rollout=tuple(rollout)))
    life.edit(model="b")
    life.go(steps)
    assert life.answered
    life.bad.add((W, "b"))
    life.edit(apart=False)
    for _ in range(300):
        life.go(1)
        assert life.answered, f"nobody answers: engines {life.engines}, routers {life.ready(R)}"
    life.bad.clear()
    life.edit(image=2)
    life.go(200)
    assert_done(life.asked.spec, life.world)


@pytest.mark.parametrize("places", [None, 5])
@pytest.mark.parametrize("surge", SURGES)
@pytest.mark.parametrize(("apart", "last"), [(True, D), (True, R), (False, W)])
def test_a_mode_that_is_rolled_back_serves_until_the_one_before_does(
    apart: bool, last: Component, surge: dict[str, Any], places: int | None
) -> None:
    """Its last pod, or one of two routers, never starts; what there was before has gone, or the most of it."""
    life = Life(Asked(apart=not apart, rollout=tuple((surge | {"onFailure": "Rollback"}).items())))
    life.world.places = places
    before = life.engines
    life.edit(apart=apart)
    new = role_revision(life.asked.spec, last)

    def starts(pod: Pod) -> bool:
        every = (*life.world.seen.engines, *life.world.seen.routers)
        there = sum(w.ready for w in every if w.revision == new)
        asked = life.asked.routers if last is R else life.asked.replicas
        return life.starts(pod) and (pod.revision != new or there < asked - 1) and life.world.now - pod.created >= 5

    life.world.becomes_ready = starts
    life.go(100)
    assert not life.taken
    late = life.go(1, 100.0)
    assert late.state is Rollout.ROLLED_BACK
    late = life.go(120)
    assert life.answered and not life.taken, life.taken
    assert late.state is Rollout.ROLLED_BACK and life.engines == life.ready(R) == before
    assert not any(w.pods for w in life.world.seen.engines if life.known[w.component, w.revision] not in before)
    life.go(20, 100.0)
    assert life.engines == before, "it is not tried again"
    life.world.becomes_ready, life.world.places = life.starts, None
    life.edit(image=2)
    life.go(150)
    assert_done(life.asked.spec, life.world)
    assert not life.taken


@pytest.mark.parametrize("model", ["a", "ab"])
def test_edits_whose_routers_never_start_leave_no_pile_of_workloads(model: str) -> None:
    life = Life(Asked(rollout=tuple(SURGES[0].items())))
    (first,) = life.world.seen.routers
    life.world.becomes_ready = lambda pod: pod.component is not R or pod.revision == first.revision
    for edit in range(20):
        life.edit(queue=100 + edit, model=model[edit % len(model)])
        life.go(6)
        assert life.answered
        assert len(life.world.seen.routers) <= 1 + 2 * len(model), "one for each of engines, and those that are tried"
    life.edit(queue=7, model="a")
    life.go(60)
    assert_done(life.asked.spec, life.world)
    assert [w.revision for w in life.world.seen.routers] == [first.revision]


def fewer_ready(life: Life, old: set[str]) -> bool:
    """Whether no new router is ready yet."""
    return not any(w.ready for w in life.world.seen.routers if w.revision not in old)
