"""Pure: a cluster that only counts, to run a plan to its end without one. Behind `isthmus plan`, and in tests.

It does what Kubernetes' controllers do with replicas (remove pods that are not ready first, then the youngest), gives
each pod a place while there are any, and lets it become ready one step later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..api.choices import Mode
from ..api.fields import Duration
from ..api.v1alpha1 import InferenceService
from ..render import mooncake
from ..render.names import Component, child_name, is_engine
from ..render.revision import model_digest, pairing, role_revision, service_revision
from .desired import master_may_change
from .observed import UNSCHEDULABLE, Observed, Pod, Workload
from .planner import Key, Plan, Rollout, plan


def _always(pod: Pod) -> bool:
    return True


@dataclass(slots=True)
class World:
    """Workloads of one service and the time.

    places:  engine pods that fit, stopping ones included; None: any number
    drain_s: how long a stopping pod stays
    becomes_ready: whether a pod that has started ever is ready, of any component
    fits: whether there is a node for an engine pod at all, where there are `places`
    """

    seen: Observed = field(default_factory=Observed)
    now: float = 1000.0
    places: int | None = None
    drain_s: float = 1.0
    becomes_ready: Callable[[Pod], bool] = _always
    fits: Callable[[Pod], bool] = _always
    names: Iterator[int] = field(default_factory=itertools.count)
    unfinished: int = 0
    """Steps after which its last rehearsal was given up; 0: it came to its end."""

    def apply(self, service: InferenceService, wanted: Plan) -> None:
        """Do what a plan says, as the operator would."""
        kept = [w for w in self.seen.engines if w.name not in wanted.delete]
        there = {(w.component, w.revision) for w in kept}
        made = [self._made(service, key) for key in wanted.counts if key not in there and key not in self._gone(wanted)]
        engines = tuple(replace(w, replicas=wanted.counts.get(_key(w), w.replicas)) for w in (*kept, *made))
        self.seen = replace(
            self.seen,
            engines=engines,
            routers=self._routers(service, wanted),
            store=self._store(service, wanted),
            failed=wanted.failed,
            updated=service_revision(service),
            current=service_revision(service) if wanted.state is Rollout.COMPLETE else self.seen.current,
            wanted=self.seen.wanted | {part: goal.count for part, goal in wanted.goals.items()} | wanted.had,
        )

    def tick(self, seconds: float = 1.0) -> None:
        """Time passes: pods end, are made, get a place, and become ready."""
        self.now += seconds
        resized = [self._resized(_without_ended(w, self.now)) for w in self.seen.engines]
        free = None
        if self.places is not None:
            free = self.places - sum(pod.reason != UNSCHEDULABLE for w in resized for pod in w.pods)
        routers = self._grown([self._resized(_without_ended(w, self.now)) for w in self.seen.routers], None)
        engines = self._grown(resized, free)
        self.seen = replace(self.seen, engines=engines, routers=routers, store=self._up(self.seen.store))

    def _grown(self, workloads: Sequence[Workload], free: int | None) -> tuple[Workload, ...]:
        grown = []
        for workload in workloads:
            pods = []
            for pod in workload.pods:
                if pod.ends is not None or pod.ready:
                    pods.append(pod)
                elif pod.reason == UNSCHEDULABLE:
                    placed = free is not None and free > 0 and self.fits(pod)
                    free = free - 1 if free is not None and placed else free
                    pods.append(replace(pod, reason="", problem="") if placed else pod)
                elif self.becomes_ready(pod):
                    pods.append(replace(pod, ready=True, started=True, changed=self.now))
                else:
                    pods.append(pod)
            grown.append(replace(workload, pods=tuple(pods)))
        return tuple(grown)

    @property
    def busy(self) -> bool:
        """Whether pods are stopping, so that something will still happen."""
        return any(pod.ends is not None for w in (*self.seen.engines, *self.seen.routers) for pod in w.pods)

    def counts_at(self, least: Duration | None) -> float:
        """When all engines that are ready have been so for `least`."""
        if least is None:
            return self.now
        return max((p.changed + least.seconds for w in self.seen.engines for p in w.live if p.ready), default=self.now)

    def _gone(self, wanted: Plan) -> set[Key]:
        return {_key(w) for w in self.seen.engines if w.name in wanted.delete}

    def _made(self, service: InferenceService, key: Key) -> Workload:
        component, revision = key
        return Workload(
            name=child_name(service.name, component.value, revision),
            component=component,
            revision=revision,
            replicas=0,
            created=self.now,
            pairing=pairing(service),
            model=model_digest(service),
            pooled=mooncake.is_managed(service),
            image=service.spec.engine.image or "",
        )

    def _store(self, service: InferenceService, wanted: Plan) -> Workload | None:
        store = self.seen.store
        if not wanted.store:
            return None
        if not mooncake.is_managed(service) or not master_may_change(service, wanted, self.seen, self.now):
            return store
        return Workload(
            name=child_name(service.name, Component.STORE.value),
            component=Component.STORE,
            revision=role_revision(service, Component.STORE),
            replicas=1,
            created=store.created if store is not None else self.now,
            image=service.spec.engine.image or "",
            pods=store.pods if store is not None else (),
        )

    def _routers(self, service: InferenceService, wanted: Plan) -> tuple[Workload, ...]:
        kept = [w for w in self.seen.routers if w.name not in wanted.delete]
        known = {w.revision for w in self.seen.routers}
        present = role_revision(service, Component.ROUTER)
        made = [self._made(service, (Component.ROUTER, present))] if present in wanted.routers.keys() - known else []
        mode = service.spec.mode is Mode.DISAGGREGATED
        return tuple(
            replace(w, pairing=pairing(service), pairs=mode, replicas=wanted.routers[present])
            if w.revision == present and present in wanted.routers
            else replace(w, replicas=wanted.routers.get(w.revision, w.replicas))
            for w in (*kept, *made)
        )

    def _up(self, single: Workload | None) -> Workload | None:
        """A master's old pod goes first."""
        if single is None:
            return None
        made = [
            Pod(
                name=f"{single.name}-{next(self.names)}",
                component=single.component,
                revision=single.revision,
                created=self.now,
                changed=self.now,
            )
            for _ in range(single.replicas - len(single.fresh.pods))
        ]
        fresh = [
            replace(pod, ready=True, started=True, changed=self.now)
            if not pod.ready and self.becomes_ready(pod)
            else pod
            for pod in (*single.fresh.pods, *made)[: single.replicas]
        ]
        return replace(single, pods=tuple(fresh))

    def _resized(self, workload: Workload) -> Workload:
        live = sorted(workload.live, key=lambda pod: (pod.ready, pod.reason != UNSCHEDULABLE, -pod.created))
        surplus = max(0, len(live) - workload.replicas)
        ends = {pod.name for pod in live[:surplus]}
        pods = [
            replace(pod, ends=self.now + self.drain_s, ready=False)
            if pod.name in ends and pod.reason != UNSCHEDULABLE
            else pod
            for pod in workload.pods
            if not (pod.name in ends and pod.reason == UNSCHEDULABLE)
        ]
        for _ in range(workload.replicas - len(live)):
            pods.append(
                Pod(
                    name=f"{workload.name}-{next(self.names)}",
                    component=workload.component,
                    revision=workload.revision,
                    created=self.now,
                    changed=self.now,
                    reason=UNSCHEDULABLE if self.places is not None and is_engine(workload.component) else "",
                )
            )
        return replace(workload, pods=tuple(pods))


def _key(workload: Workload) -> Key:
    return workload.component, workload.revision


def _without_ended(workload: Workload, now: float) -> Workload:
    left = tuple(pod for pod in workload.pods if pod.ends is None or pod.ends > now)
    return workload if len(left) == len(workload.pods) else replace(workload, pods=left)


def rehearse(service: InferenceService, world: World, *, limit: int = 2000) -> Iterator[tuple[Plan, World]]:
    """Plans and lets them happen until nothing is left to do; each yield is one change. At most `limit` steps, after
    which the world is `unfinished`."""
    world.unfinished = 0
    for _ in range(limit):
        wanted = plan(service, world.seen, world.now)
        before = world.seen
        world.apply(service, wanted)
        if world.seen != before:
            yield wanted, world
        world.tick()
        if world.seen == before and not world.busy:
            at = world.counts_at(service.spec.rollout.min_ready)
            if world.now >= at:
                return
            world.now = at
    world.unfinished = limit
