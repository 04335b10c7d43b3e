"""One service at a time: observe -> plan -> render -> apply -> status. Level-based; knows nothing of watches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ..api.choices import ScalingMode
from ..api.profile import PERMISSIVE, Profile
from ..api.reasons import Reason
from ..api.v1alpha1 import API_VERSION, InferenceService, parse_stored
from ..errors import ApiError, InvalidSpec, OverBudget, Refused
from ..plan import autoscale
from ..plan.autoscale import Decision
from ..plan.contests import Contests
from ..plan.decision import Decision as Decided
from ..plan.decision import decide
from ..plan.desired import Name, name_of
from ..plan.events import Event, contested, events, healed, overridden, scaled
from ..plan.observe import is_child, observe, unknown_makers
from ..plan.observed import Facts, Observed
from ..plan.ownership import set_by_us
from ..plan.planner import Plan
from ..plan.status import Status, failed_status, invalid_status, status_of
from ..render import engine, scaler
from ..render.names import Component, Defaults, is_engine
from ..render.service import components
from .apply import NOBODY, Applier
from .budget import Workbench
from .cache import MOST_OF_SERVICES, Cache, Children, Key
from .client import FORBIDDEN, TOO_SLOW, Api
from .kept import SERVICE
from .known_facts import KnownFacts
from .telemetry import Metrics

Object = dict[str, Any]
_log = logging.getLogger(__name__)
AUTO_PERIOD_S = 15.0
ADAPTERS_PERIOD_S = 15.0
"""No object changes when an engine has read its list, or has loaded what it could not load before."""
LIGHT = 4 * 1024 * 1024
"""What the children of a service weigh that is looked at beside others; of more there is one at a time. Somebody has
filled them: what a spec asks for weighs less, but for hundreds of pods."""
HEAVY_S = 60.0
"""How long such a run may take, so that others' have their turn however slow the API server is with its objects."""
ROUNDS = 3
"""Of finding the service's objects that have lost their labels: the first finds what made its pods, the second what
is wanted beside that."""
EVERYWHERE = ""
"""In place of a namespace: all of them."""
_FAILURES = (Reason.RECONCILE_FAILED, Reason.NAME_TAKEN, Reason.INTERNAL_ERROR, Reason.OVER_BUDGET)


@dataclass(slots=True, kw_only=True)
class Controller:
    """What a reconcile needs. `clock` gives seconds since the epoch, `steady` such as are never set.

    unread: namespace, or EVERYWHERE, -> why something that is watched may not be read there, so that nothing is known
    for certain
    """

    api: Api
    cache: Cache
    facts: KnownFacts
    defaults: Defaults
    metrics: Metrics
    unread: Mapping[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    steady: Callable[[], float] = time.monotonic
    profile: Profile = PERMISSIVE
    contests: Contests = field(default_factory=Contests)
    bench: Workbench = field(default_factory=Workbench)

    def is_heavy(self, key: Key) -> bool:
        """Whether a run of it that begins now holds so much that there may be no other such run."""
        return self.cache.children(key).weight > LIGHT

    async def reconcile(self, key: Key) -> float | None:
        """Bring one service nearer to its spec; when to look again at the latest, or None. Its children are those that
        there are when this begins.

        Whatever keeps it from that is in the status when this raises, unless the API server answers nobody: no service
        is ready that was not looked at. Raises Refused for what the API server refuses, and OverBudget; anything else
        is a defect.
        """
        if self.cache.left_out(key):
            await self._left_out(key)
            return None
        body = self.cache.service(key)
        if body is None or body["metadata"].get("deletionTimestamp"):
            return None
        before: Status = body.get("status") or {}
        make = self.cache.children(key)
        bench = partial(self.bench.run, key)
        applier = Applier(self.api, lambda verb, written: self._written(key, verb, written), bench)
        try:
            return await self._timely(key, body, before, applier, make)
        except InvalidSpec as error:
            after = invalid_status(error, before, body["metadata"]["generation"], self._stamp())
            await self._report(applier, body, before, after, events(before, after))
            return None
        except ApiError as error:
            if error.status in NOBODY or isinstance(error, Refused):
                raise
            await self._failed(applier, body, before, Reason.RECONCILE_FAILED, str(error))
            raise Refused([error]) from error
        except OverBudget as error:
            await self._failed(applier, body, before, Reason.OVER_BUDGET, f"the spec {error}; make it smaller")
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            await self._failed(applier, body, before, Reason.INTERNAL_ERROR, message)
            raise

    async def _left_out(self, key: Key) -> None:
        """Tell a service that there is no room for it, over the status that it has."""
        body = await self.api.named(API_VERSION, SERVICE, *key)
        if body is None or body["metadata"].get("deletionTimestamp"):
            return
        applier = Applier(
            self.api, lambda verb, written: self._written(key, verb, written), partial(self.bench.run, key)
        )
        message = (
            f"the services of namespace {key[0]} take more than the {MOST_OF_SERVICES} bytes (compressed) that they may"
            " have together: delete some, or make their specs smaller"
        )
        await self._failed(applier, body, body.get("status") or {}, Reason.OVER_BUDGET, message)

    async def _failed(self, applier: Applier, body: Object, before: Status, reason: Reason, message: str) -> None:
        after = failed_status(reason, message, before, body["metadata"]["generation"], self._stamp())
        try:
            await self._report(applier, body, before, after, events(before, after))
        except ApiError as error:
            # The first failure is the one to go on with.
            _log.warning("%s/%s: no status: %s", body["metadata"]["namespace"], body["metadata"]["name"], error)

    async def _timely(self, key: Key, body: Object, before: Status, applier: Applier, make: Children) -> float | None:
        try:
            async with asyncio.timeout(HEAVY_S if make.weight > LIGHT else None) as timer:
                return await self._reconcile(key, body, before, applier, make)
        except TimeoutError as error:
            if not timer.expired():
                raise
            # Told in the status: where the API server is slow for good, nothing else says why nothing happens.
            raise ApiError(TOO_SLOW, f"took longer than {HEAVY_S:g} s over the service's many objects") from error

    async def _reconcile(
        self, key: Key, body: Object, before: Status, applier: Applier, make: Children
    ) -> float | None:
        service = await self.bench.run(key, partial(parse_stored, body, self.profile))
        if why := self.unread.get(key[0]) or self.unread.get(EVERYWHERE):
            raise ApiError(FORBIDDEN, why)
        found = await self._find(key, service, before, applier, make)
        if found is None:
            return None
        decision, children, there = found
        seen, wanted, exact = decision.seen, decision.wanted, decision.exact
        settled = before.get("observedGeneration") == service.generation
        said = {c.type: c.reason for c in seen.conditions}
        refused = said.get("Ready") in _FAILURES
        complete = settled and said.get("Progressing") == Reason.COMPLETE and not refused
        changes = await applier.run(
            exact,
            there,
            settled=settled,
            complete=complete,
            skipped=before.get("skipped", ()),
            left_alone=self.contests.left_alone(key, self.steady()),
            futile=self.contests.futile(key),
        )
        scaling: dict[Component, Decision] = {}
        if _auto(service):
            scaling = await self.bench.run(key, partial(autoscale.decide, service, seen, wanted, self.clock()))
        held = {part: decision.held for part, decision in scaling.items()}
        after = status_of(
            service,
            seen,
            wanted,
            before,
            self._stamp(),
            held=held,
            skipped=changes.missing,
            refused=changes.refused,
            left_out=changes.left_out,
        )
        single, many = self.contests.put_right(key, changes.healed, self.steady())
        news = events(before, after, wanted if changes.applied else None) + healed(single) + contested(many)
        news += overridden(self.contests.left(key, changes.futile))
        await self._report(applier, body, before, after, news)
        news = await self._scales(key, applier, service, seen, scaling, children)
        await self._report(applier, body, after, after, news)
        if changes.refused:
            raise Refused(changes.refused)
        return self._again(key, service, wanted, after)

    async def _find(
        self, key: Key, service: InferenceService, before: Status, applier: Applier, make: Children
    ) -> tuple[Decided, list[Object], dict[Name, Object | None]] | None:
        """What is decided, the service's objects, and what stands under the names of those that are wanted; None: its
        pods were not asked yet."""
        now = self.clock()
        children, known = await self.bench.run(key, partial(_look, service, make))
        there: dict[Name, Object | None] = {name_of(child): child for child in children}
        asked: list[Object] | None = None
        for _ in range(ROUNDS):
            facts = await self._facts(key, service, known)
            if facts is None:
                return None
            work = partial(_decide, service, children, facts, before, self.defaults, now)
            decision, makers = await self.bench.run(key, work)
            # Whoever may make pods says what has made them, and behind the first there would always be further ones.
            asked = makers if asked is None else asked
            named = set(there)
            there = await applier.standing((*decision.exact.apply, *decision.exact.create, *asked), there, service)
            # Somebody has taken their labels off, by which they are watched: no reason to act as if they were gone.
            bare = [one for name, one in there.items() if one and name not in named and is_child(service, one)]
            if not bare:
                break
            children += bare
            known = await self.bench.run(key, partial(observe, service, children, Facts(), {}))
        return decision, children, there

    async def _facts(self, key: Key, service: InferenceService, known: Observed) -> Facts | None:
        pods = [pod for workload in (*known.engines, *known.routers) for pod in workload.pods]
        return await self.facts.read(key, pods, load=bool(_auto(service)))

    async def _report(self, applier: Applier, body: Object, before: Status, after: Status, news: list[Event]) -> None:
        if _filled(after) != _filled(before):
            await applier.status(body, after)
        for event in news:
            await self._tell(applier, body, event)

    async def _tell(self, applier: Applier, body: Object, event: Event) -> None:
        """Write an Event. Objects are reconciled even in a cluster that accepts no Events."""
        where = f"{body['metadata']['namespace']}/{body['metadata']['name']}"
        _log.info("%s: %s: %s", where, event.reason.value, event.message)
        try:
            await applier.event(
                body, warning=event.warning, reason=event.reason.value, message=event.message, at=self._stamp()
            )
        except ApiError as error:
            _log.warning("%s: no Event: %s", where, error)

    async def _scales(
        self,
        key: Key,
        applier: Applier,
        service: InferenceService,
        seen: Observed,
        scaling: dict[Component, Decision],
        children: list[Object],
    ) -> list[Event]:
        """Tell autoscalers how many pods there are, and be the autoscaler where the spec says Auto. A number that is
        neither the one that was last planned nor the one that is to be was set by somebody else."""
        left_alone, foreign = self.contests.left_alone(key, self.steady()), []
        live = {name_of(child): child for child in children if is_child(service, child)}
        news = []
        for component in components(service):
            if not is_engine(component) or engine.role_of(service, component).scaling.mode is ScalingMode.STATIC:
                continue
            pods = sum(len(w.live) for w in seen.of(component))
            status = scaler.scaler_status(service, component, replicas=pods)
            there = live.get(name_of(status))
            if there is None:
                continue
            if {key: (there.get("status") or {}).get(key) for key in status["status"]} != status["status"]:
                await applier.scaler_status(there, status)
            decision, before = scaling.get(component), there["spec"]["replicas"]
            if decision is None or decision.count == before or name_of(status) in left_alone:
                continue
            await applier.scale(there, scaler.role_scaler(service, component, replicas=decision.count))
            # The status may be behind: it is read before the number is written.
            if seen.wanted.get(component, before) == before or set_by_us(there, "spec", "replicas"):
                news.append(scaled(component, before, decision))
            else:
                foreign.append(name_of(status))
        single, many = self.contests.put_right(key, foreign, self.steady())
        return news + healed(single) + contested(many)

    def _again(self, key: Key, service: InferenceService, wanted: Plan, after: Status) -> float | None:
        now = self.steady()
        times = [until - now for until in self.contests.left_alone(key, now).values()]
        if wanted.wake is not None:
            times.append(max(0.0, wanted.wake - self.clock()))
        if _auto(service):
            times.append(AUTO_PERIOD_S)
        if any(c["type"] == "AdaptersReady" and c["status"] == "False" for c in after["conditions"]):
            times.append(ADAPTERS_PERIOD_S)
        return min(times, default=None)

    def _written(self, key: Key, verb: str, body: Object) -> None:
        self.metrics.written(verb, body["kind"])
        self.cache.written(key, verb, body)

    def _stamp(self) -> str:
        return datetime.fromtimestamp(self.clock(), UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _look(service: InferenceService, make: Children) -> tuple[list[Object], Observed]:
    """What is there of a service, and what is seen in it without asking anybody."""
    children = make()
    return children, observe(service, children, Facts(), {})


def _decide(
    service: InferenceService, children: list[Object], facts: Facts, status: Status, defaults: Defaults, now: float
) -> tuple[Decided, list[Object]]:
    """What is wanted, and what has made pods that is not among `children`."""
    return decide(service, children, facts, status, defaults, now), unknown_makers(service, children)


def _filled(value: Any) -> Any:
    """Without what is empty: the API server adds defaults to a status that was written, which is not a difference."""
    if isinstance(value, dict):
        inner = {key: _filled(item) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item not in ("", None, {}, [])}
    return [_filled(item) for item in value] if isinstance(value, list) else value


def _auto(service: InferenceService) -> list[str]:
    engines = [part for part in components(service) if is_engine(part)]
    return [part for part in engines if engine.role_of(service, part).scaling.mode is ScalingMode.AUTO]
