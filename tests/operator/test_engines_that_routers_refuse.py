"""A branch moves, and the tokenizer behind it is another: engines that start later have it, and routers that started
before give them nothing. No engine that routers know goes for one that they refuse."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from rollout_world import D, P, W, assert_done, service

from isthmus_operator.api.v1alpha1 import InferenceService
from isthmus_operator.plan.observed import Facts, Pod, Word, Workload
from isthmus_operator.plan.planner import Plan, Rollout, plan
from isthmus_operator.plan.refusals import LOOK_S
from isthmus_operator.plan.rehearse import World
from isthmus_operator.plan.status import status_of
from isthmus_operator.render.names import Component
from isthmus_operator.render.revision import role_revision

R = Component.ROUTER
SURGES = [{"maxSurge": 0, "maxUnavailable": 1}, {"maxSurge": 1, "maxUnavailable": 0}, {"maxSurge": "50%"}]
NOW = "2026-11-30T00:00:00Z"


@dataclass
class Branch:
    """A service of a model at the hub. Routers are ready while they know an engine, and say what they do with each.

    look_s: how long after a pod has become ready routers know of it
    probed: routers' probes do not fail
    made:   pod -> tokenizer, that of the model's revision when the pod was made
    """

    apart: bool = False
    replicas: int = 4
    routers: int = 2
    image: int = 1
    queue: int = 7
    revision: str = "main"
    rollout: dict[str, Any] = field(default_factory=dict)
    look_s: float = 0.0
    tells: bool = True
    probed: bool = True
    hub: dict[str, str] = field(default_factory=lambda: {"main": "first"})
    made: dict[str, str] = field(default_factory=dict)
    of: dict[str, str] = field(default_factory=dict)
    world: World = field(default_factory=World)
    lost: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world.becomes_ready = lambda pod: pod.component is not R
        self.go(40)

    @property
    def spec(self) -> InferenceService:
        counts = {"prefill": self.replicas, "decode": self.replicas} if self.apart else {"worker": self.replicas}
        return service(
            self.image,
            mode="Disaggregated" if self.apart else "Unified",
            model={"source": {"huggingFace": {"repo": "owner/name", "revision": self.revision}}},
            roles={part: {"scaling": {"replicas": count}} for part, count in counts.items()},
            router={"replicas": self.routers, "maxQueue": self.queue},
            rollout={"progressDeadline": "60s", **self.rollout},
        )

    def go(self, looks: int, seconds: float = 1.0) -> Plan:
        target = self.spec
        for part in (P, D, R) if self.apart else (W, R):
            self.of[role_revision(target, part)] = self.revision
        for _ in range(looks):
            answered, wanted = self.answered, plan(target, self.world.seen, self.world.now)
            self.world.apply(target, wanted)
            self.world.tick(seconds)
            self.looked()
            if answered and not self.answered:
                self.lost.append(wanted)
        return plan(target, self.world.seen, self.world.now)

    def looked(self) -> None:
        """Pods have the tokenizer that there was when they were made, routers know engines, and the operator asks."""
        seen = self.world.seen
        for workload in (*seen.engines, *seen.routers):
            for pod in workload.pods:
                self.made.setdefault(pod.name, self.hub[self.of[pod.revision]])
        engines = tuple(
            replace(w, pods=tuple(replace(pod, ip=f"ip-{pod.name}") for pod in w.pods)) for w in seen.engines
        )
        routers = tuple(replace(w, pods=tuple(map(self._router, w.pods))) for w in seen.routers)
        self.world.seen = replace(seen, engines=engines, routers=routers)
        said = [pod for w in routers for pod in sorted(reversed(w.live), key=lambda pod: pod.ready) if pod.started]
        facts = {pod.revision: self._words(pod) for pod in said}  # of each revision a ready one, if there is one
        self.world.seen = replace(self.world.seen, facts=Facts(routers=facts if self.tells else {}))

    def _router(self, pod: Pod) -> Pod:
        known = self.probed and pod.ends is None and self.made[pod.name] in self.tokenizers
        return pod if known is pod.ready else replace(pod, ready=known, started=True, changed=self.world.now)

    def _words(self, router: Pod) -> dict[str, Word]:
        looked = [
            pod
            for w in self.world.seen.engines
            for pod in w.live
            if pod.ready and self.world.now - max(pod.changed, router.changed) >= self.look_s
        ]
        same = self.made[router.name]
        return {pod.ip: Word.TAKEN if self.made[pod.name] == same else Word.OTHER for pod in looked}

    @property
    def tokenizers(self) -> set[str]:
        """Of engines that answer. A decode pod does so alone."""
        parts = (D,) if self.apart else (W,)
        return {self.made[p.name] for w in self.world.seen.engines if w.component in parts for p in w.live if p.ready}

    @property
    def answered(self) -> bool:
        return any(pod.ready for w in self.world.seen.routers for pod in w.live)

    def moves(self, tokenizer: str = "second") -> None:
        self.hub["main"] = tokenizer
        self.hub[tokenizer] = tokenizer
        self.hub["first"] = "first"

    def restart(self) -> None:
        """All routers, as `kubectl rollout restart` does: an old one goes when a new one is ready."""
        old = {pod.name for w in self.world.seen.routers for pod in w.live}
        while old:
            (one, *_) = sorted(old)

            def gone(workload: Workload, one: str = one) -> Workload:
                return replace(workload, pods=tuple(pod for pod in workload.pods if pod.name != one))

            self.world.seen = replace(self.world.seen, routers=tuple(map(gone, self.world.seen.routers)))
            old.discard(one)
            self.go(5)


@pytest.mark.parametrize(("replicas", "look_s"), [(1, 3.0), (4, 0.0), (4, 3.0)])
@pytest.mark.parametrize("surge", SURGES)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("back", ["Pause", "Rollback"])
def test_no_engine_goes_for_one_that_routers_refuse(
    back: str, apart: bool, surge: dict[str, Any], replicas: int, look_s: float
) -> None:
    if replicas == 1 and surge["maxSurge"] == 0:
        surge = SURGES[1]  # else there is no room for two
    one = Branch(apart=apart, replicas=replicas, look_s=look_s, rollout=surge | {"onFailure": back})
    one.moves()
    one.image = 2
    stopped = one.go(40)
    assert one.answered and not one.lost
    assert stopped.state is Rollout.ROLLING
    assert any("another tokenizer" in wait and "spec.model.source" in wait for wait in stopped.waits), stopped.waits
    assert told(one, "DecodeReady" if apart else "WorkerReady")[:2] == ("False", "AnotherTokenizer")
    late = one.go(60)
    assert late.state is (Rollout.FAILED if back == "Pause" else Rollout.ROLLED_BACK)
    one.go(60)
    assert one.answered and not one.lost
    one.revision = "second"
    one.go(150)
    assert not one.lost
    assert_done(one.spec, one.world)
    assert one.tokenizers == {"second"}


@pytest.mark.parametrize("apart", [False, True])
def test_routers_that_are_restarted_know_the_new_engines(apart: bool) -> None:
    one = Branch(apart=apart, rollout=SURGES[1])
    one.moves()
    one.image = 2
    one.go(20)
    one.restart()
    one.go(80)
    assert not one.lost
    assert_done(one.spec, one.world)


@pytest.mark.parametrize(
    ("moved", "tells", "changes"),
    [
        *((False, tells, {"image": 2}) for tells in (False, True)),
        *((moved, tells, {"image": 2, "queue": 8}) for moved in (False, True) for tells in (False, True)),
        *((moved, tells, {"revision": "second"}) for moved in (False, True) for tells in (False, True)),
    ],
)
@pytest.mark.parametrize("surge", SURGES)
@pytest.mark.parametrize("apart", [False, True])
def test_what_routers_take_or_do_not_tell_holds_nothing_up(
    apart: bool, surge: dict[str, Any], moved: bool, tells: bool, changes: dict[str, Any]
) -> None:
    """Also a branch that has moved where routers change too: new ones know the new engines."""
    one = Branch(apart=apart, rollout=surge, look_s=2.0, tells=tells)
    one.moves("second" if moved else "first")
    one.hub["second"] = "second"
    for name, value in changes.items():
        setattr(one, name, value)
    one.go(150)
    assert_done(one.spec, one.world)
    assert not one.lost


def test_a_probe_of_the_only_router_that_fails_takes_no_engine() -> None:
    """What it said before goes on to hold."""
    one = Branch(routers=1)
    one.moves()
    one.image = 2
    one.go(20)
    held = [w.ready for w in one.world.seen.engines]
    for _ in range(5):
        for one.probed in (False, True):
            one.go(6)
    assert [w.ready for w in one.world.seen.engines] == held and one.answered


def test_an_engine_counts_though_routers_never_look_at_it() -> None:
    """Its address is none that they find."""
    one = Branch(rollout=SURGES[1], look_s=1e9)
    one.image = 2
    one.go(4 * int(LOOK_S + 4))
    assert_done(one.spec, one.world)


def test_the_operator_looks_again_at_engines_that_routers_have_not_looked_at() -> None:
    one = Branch(rollout=SURGES[1], look_s=5.0)
    one.image = 2
    while not any(w.ready for w in one.world.seen.engines if w.revision == role_revision(one.spec, W)):
        one.go(1)
    wanted = plan(one.spec, one.world.seen, one.world.now)
    assert wanted.wake == one.world.now + 1
    assert any("have not taken it yet" in wait for wait in wanted.waits)


def test_engines_that_were_replaced_one_by_one_are_told_of() -> None:
    """No rollout is under way."""
    one = Branch()
    one.moves()
    (workers,) = one.world.seen.engines
    one.world.seen = replace(one.world.seen, engines=(replace(workers, pods=workers.pods[1:]),))
    found = one.go(5)
    status, reason, message = told(one, "WorkerReady")
    assert (status, reason) == ("False", "AnotherTokenizer") and "3 of 4" in message
    assert told(one, "Available")[0] == "True"
    assert found.counts == {(W, workers.revision): 4}


def told(one: Branch, condition: str) -> tuple[str, str, str]:
    wanted = plan(one.spec, one.world.seen, one.world.now)
    found = status_of(one.spec, one.world.seen, wanted, {}, NOW)["conditions"]
    return next((c["status"], c["reason"], c["message"]) for c in found if c["type"] == condition)


@pytest.mark.parametrize("seed", range(12))
def test_somebody_answers_through_edits_of_a_branch_that_moves(seed: int) -> None:
    lived(seed)


def lived(seed: int) -> None:
    rng = random.Random(seed)
    one = Branch(
        apart=rng.random() < 0.5,
        replicas=rng.randint(2, 5),
        routers=rng.randint(1, 3),
        look_s=rng.choice([0.0, 1.0, 3.0]),
        rollout=rng.choice(SURGES) | {"onFailure": rng.choice(["Pause", "Rollback"])},
    )
    one.hub["first"] = "first"
    for number in range(rng.randint(1, 5)):
        match rng.choice(["move", "image", "image", "queue", "revision", "count", "restart"]):
            case "move":
                one.moves(f"tokenizer-{number}")
            case "image":
                one.image = rng.randint(1, 4)
            case "queue":
                one.queue = rng.randint(7, 9)
            case "revision":
                one.revision = rng.choice(sorted(one.hub))
            case "count":
                one.replicas = rng.randint(2, 5)
            case "restart":
                one.restart()
        one.go(rng.choice([1, 2, 3, 5, 8, 12, 30, 60]), rng.choice([1.0, 1.0, 1.0, 20.0]))
        assert not one.lost, f"{seed=}: {one.lost[0]}"
    one.hub["last"] = "last"
    one.revision = "last"
    one.go(300)
    assert not one.lost, f"{seed=}: {one.lost[0]}"
    assert_done(one.spec, one.world)
