"""Services and a cluster that only counts, for tests of the rollout planner; and what may happen to its pods."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from isthmus_operator.api.v1alpha1 import InferenceService, parse
from isthmus_operator.plan.observed import Observed, Pod
from isthmus_operator.plan.planner import Plan, Rollout, plan
from isthmus_operator.plan.rehearse import World
from isthmus_operator.render.names import Component

P, D, W = Component.PREFILL, Component.DECODE, Component.WORKER


def service(version: int = 1, *, p: int = 2, d: int = 3, **spec: Any) -> InferenceService:
    """Version n runs image n."""
    roles = {"prefill": {"scaling": {"replicas": p}}, "decode": {"scaling": {"replicas": d}}}
    return parse(
        {
            "apiVersion": "serving.isthmus.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "svc", "namespace": "ns", "uid": "u"},
            "spec": {
                "model": {"source": {"hostPath": {"path": "/models/m"}}},
                "engine": {"image": f"engine:{version}"},
                "roles": roles,
            }
            | spec,
        }
    )


def ready(seen: Observed, component: Component, pairing: str | None = None) -> int:
    found = [w for w in seen.of(component) if pairing is None or w.pairing == pairing]
    return sum(pod.ready for w in found for pod in w.live)


def pods(seen: Observed, component: Component) -> int:
    """Those that take place, stopping ones included."""
    return sum(not pod.failed for w in seen.of(component) for pod in w.pods)


def pairs(seen: Observed) -> int:
    return sum(min(ready(seen, P, k), ready(seen, D, k)) for k in {w.pairing for w in seen.engines})


def run(target: InferenceService, world: World, *, steps: int = 400, check: Any = None) -> World:
    """Until nothing changes any more; `check` sees every state."""
    for _ in range(steps):
        before = world.seen
        world.apply(target, plan(target, world.seen, world.now))
        if check:
            check(world)
        world.tick()
        if check:
            check(world)
        if world.seen == before and not world.busy:
            return world
    raise AssertionError(f"no rest after {steps} steps: {counts(world.seen)}")


def counts(seen: Observed) -> dict[str, int]:
    return {f"{w.component}-{w.pairing}": w.replicas for w in seen.engines}


def settled(target: InferenceService, **world: Any) -> World:
    return run(target, World(**world))


def assert_done(target: InferenceService, world: World) -> None:
    last = plan(target, world.seen, world.now)
    assert last.state is Rollout.COMPLETE, (last, counts(world.seen))
    assert not last.delete
    assert all(w.revision == last.goals[w.component].revision for w in world.seen.engines)
    for component, goal in last.goals.items():
        assert ready(world.seen, component) == pods(world.seen, component) == goal.count


def step(target: InferenceService, world: World, times: int = 1, seconds: float = 1.0) -> Plan:
    """`times` looks of the operator; the plan of the next."""
    for _ in range(times):
        world.apply(target, plan(target, world.seen, world.now))
        world.tick(seconds)
    return plan(target, world.seen, world.now)


def with_pods(world: World, pick: Callable[[Pod], bool], **changes: Any) -> None:
    """Something happens to some engine pods."""
    world.seen = replace(
        world.seen,
        engines=tuple(
            replace(w, pods=tuple(replace(pod, **changes) if pick(pod) else pod for pod in w.pods))
            for w in world.seen.engines
        ),
    )


def revisions(target: InferenceService) -> dict[Component, str]:
    """Of the engine roles."""
    goals = plan(target, Observed(), 0).goals
    return {component: goal.revision for component, goal in goals.items()}
