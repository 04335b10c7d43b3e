"""The simulated world: engines, a router, a store, clients and whatever goes wrong, from one scenario."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..router.policy import Endpoint, PolicyName, Rules
from ..transfer.backend import TransferBackend
from ..transfer.memory import Faults, MemoryFabric, _Operation
from .client import Client, draw_requests
from .clock import Clock, Violation
from .engine import VirtualEngine
from .faults import Scenario
from .invariants import (
    Oracle,
    check_clean,
    check_engine,
    check_landing,
    check_reading,
    check_record_last,
    check_visible,
)
from .network import Network, NetworkFaults
from .router import VirtualRouter, idle
from .store import SCOPED_TTL_S, Store, StoreOperation, StoreTransfer

RESTART_S = 0.5
SETTLE_S = 6.0
"""After the last client: everything that is bounded by time must be over by then."""
EVENTS_MAX = 400_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run showed."""

    seed: int
    lifetimes: int
    ends: dict[str, int]
    """How requests ended, and how often."""
    steps: int
    virtual_s: float
    facts: dict[str, int]
    """Coverage: preemptions, recomputes, prefix hits, crashes and so on."""


class World:
    """Builds a scenario and runs it to its end, or to the first violation."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.clock = Clock(scenario.seed)
        self.net = Network(self.clock, scenario.network)
        self.fabric = MemoryFabric(
            seed=scenario.seed,
            faults=scenario.transfer,
            bytes_per_s=scenario.link_bytes_per_s,
            record_slots=scenario.record_slots,
        )
        self.oracle = Oracle(len(scenario.windows))
        self.store = Store(
            self.clock,
            scenario.transfer,
            scenario.link_bytes_per_s,
            scenario.store_blocks,
            self.oracle.check_value,
        )
        self.engines: dict[str, VirtualEngine] = {}
        self.facts: Counter[str] = Counter()
        self.steps = 0
        self._epoch = 0
        for number in range(scenario.prefills):
            self._start(f"p{number}", "prefill")
        for number in range(scenario.decodes):
            self._start(f"d{number}", "decode")
        if scenario.odd_fingerprint:
            self._start("odd", "decode")
        self._start_router()
        limits = tuple({e.scheduler.max_model_len for e in self.engines.values()})
        self.clients: list[Client] = []
        self._waiting = scenario.clients
        for at, request in draw_requests(scenario):
            leaves = self.clock.random.expovariate(2.0) if self.clock.chance(scenario.disconnect) else None
            client = Client(self.clock, self.net, request, limits, self._client_over, leaves, scenario.windows)
            for size in {e.block_size for e in self.engines.values()}:
                self.oracle.learn([*request.prompt_token_ids, *client.right], size, request.cache_salt)
            self.clients.append(client)
            self.clock.after(at, client.start)
        self._plan_faults()

    # ------------------------------------------------------------------------------------------------- processes

    def _next_epoch(self) -> str:
        self._epoch += 1
        return f"e{self._epoch}"

    def _start(self, name: str, role: str) -> None:
        engine = VirtualEngine(
            self.clock,
            self.scenario,
            name,
            role,
            self._next_epoch(),
            self._connect,
            self._stepped,
            odd=name == "odd",
        )
        self.engines[name] = engine
        self.net.servers[name] = engine
        if self.scenario.mode == "memory":
            self.fabric.serve_drain(name, engine.loop.is_drained)

    def _connect(self, engine: VirtualEngine) -> TransferBackend:
        def landing(attempt: str, block: int) -> None:
            check_landing(engine, attempt, block)

        if self.scenario.mode == "memory":
            memory = self.fabric.connect(engine.name, engine.epoch)
            memory.on_block_written = landing
            return memory
        return StoreTransfer(self.store, self.scenario.record_slots, landing)

    def _start_router(self) -> None:
        scenario = self.scenario
        rules = Rules(
            policy=PolicyName(scenario.policy),
            disaggregate_above=scenario.disaggregate_above,
            local_without_prefill=scenario.local_without_prefill,
        )
        self.router = VirtualRouter(
            self.clock, self.net, rules, self._next_epoch(), self._discover, early=scenario.early
        )
        self.net.servers["router"] = self.router

    def _discover(self) -> tuple[list[Endpoint], list[Endpoint]]:
        able = [e for e in self.engines.values() if e.up and not e.draining]
        return [e.endpoint for e in able if e.role == "prefill"], [e.endpoint for e in able if e.role == "decode"]

    # ---------------------------------------------------------------------------------------------------- faults

    def _plan_faults(self) -> None:
        scenario, random = self.scenario, self.clock.random
        horizon = scenario.spread_s + 1.0
        for role in scenario.crashes:
            self.clock.after(random.uniform(0, horizon), lambda role=role: self._crash(role))  # type: ignore[misc]
        for _ in range(scenario.scale_downs):
            self.clock.after(random.uniform(0, horizon), self._scale_down)
        for _ in range(scenario.dead_links):
            start = random.uniform(0, horizon)
            self.clock.after(start, lambda: self._set_faults(replace(scenario.transfer, never=1.0, drop=0.0)))
            self.clock.after(start + 0.5, lambda: self._set_faults(scenario.transfer))

    def _set_faults(self, faults: Faults) -> None:
        self.facts["dead links"] += 1
        self.fabric.faults = self.store.faults = faults

    def _calm(self) -> None:
        self.fabric.faults = self.store.faults = Faults()
        self.net.faults = NetworkFaults()

    def _crash(self, role: str) -> None:
        self.facts[f"{role} crashes"] += 1
        if role == "router":
            self.clock.note("fault", "router crashes")
            self.router.crash()
            self.clock.after(RESTART_S * self.clock.random.random(), self._start_router)
            return
        if role == "store":
            self.clock.note("fault", "store master restarts")
            self.store.crash()
            self.clock.after(RESTART_S * self.clock.random.random(), self.store.restart)
            return
        able = [e for e in self.engines.values() if e.up and e.role == role and e.name != "odd"]
        if not able:
            return
        engine = self.clock.random.choice(able)
        self.clock.note("fault", engine.name, "crashes")
        engine.crash()
        engine.backend.close()
        self.clock.after(RESTART_S * self.clock.random.random(), lambda: self._start(engine.name, engine.role))

    def _scale_down(self) -> None:
        able = [e for e in self.engines.values() if e.up and not e.draining and e.name != "odd"]
        if not able:
            return
        engine = self.clock.random.choice(able)
        self.facts["scale-downs"] += 1
        self.clock.note("fault", engine.name, "is told to leave")

        def gone(leaver: VirtualEngine) -> None:
            self.clock.note("fault", leaver.name, "has left")
            self.clock.after(RESTART_S, lambda: self._start(leaver.name, leaver.role))

        engine.drain(self.scenario.drain_timeout_s, gone)

    # ------------------------------------------------------------------------------------------------------- run

    def run(self) -> Outcome:
        """Run to the end. Raises Violation."""
        self._until(lambda: self._waiting == 0)
        self._calm()
        # An operation may be in the air until its request's deadline, and its bytes land later still.
        end = self.clock.now + SETTLE_S + SCOPED_TTL_S + self.scenario.transfer.late_s + max(self.scenario.timeouts_s)
        self._until(lambda: self.clock.now >= end)
        self._check_end()
        return self._outcome()

    def _until(self, done: Callable[[], bool]) -> None:
        for _ in range(EVENTS_MAX):
            if done():
                return
            fabric, own = self.fabric.next_time(), self.clock.next_time()
            if own is None and fabric is None:
                raise Violation("nothing is left to happen")
            if own is None or (fabric is not None and fabric <= own):
                assert fabric is not None
                self.clock.now = max(self.clock.now, fabric)
                self.fabric.advance(fabric)
            else:
                # The fabric reads its own clock when it is called from an event of this one.
                self.fabric.advance(own)
                self.clock.pop()
            for engine in tuple(self.engines.values()):
                if engine.called:
                    engine.poll()
            self._check_transfers()
        raise Violation(f"not over after {EVENTS_MAX} events, at {self.clock.now:.1f} s")

    def _stepped(self, engine: VirtualEngine) -> None:
        self.steps += 1
        check_engine(engine, self.oracle, thorough=self.steps % 4 == 0)
        if self.steps % 64 == 0:
            check_visible(engine, self.oracle)

    def _check_transfers(self) -> None:
        """No page that a transfer may still read or write has been given to somebody else."""
        by_backend = {id(e.backend): e for e in self.engines.values() if e.up}
        moving: list[_Operation | StoreOperation] = [*self.fabric._in_flight.values(), *self.store.operations.values()]
        if not moving:
            return
        check_record_last([(op.attempt, op.record is not None) for op in moving if op.source and not op.cancelled])
        for op in moving:
            if op.cancelled:
                continue
            source = by_backend.get(id(op.source))
            target = by_backend.get(id(op.target))
            if source is not None and op.pieces:
                check_reading(source, op.attempt, op.pieces)
            if target is not None and op.pieces:
                for piece in op.pieces:
                    region = target.executor.kv_region()
                    if self.scenario.mode == "memory":
                        block = (piece.remote_address - region.base) // region.block_stride
                    else:
                        block = piece.block_id
                    check_landing(target, op.attempt, block)

    def _client_over(self, client: Client) -> None:
        self.clock.note("client", client.request.request_id, "ends:", client.outcome)
        self._waiting -= 1

    def _check_end(self) -> None:
        for engine in self.engines.values():
            if engine.up:
                check_clean(engine)
                check_visible(engine, self.oracle)
        if self.router.flights or not idle(self.router.loads):
            raise Violation(f"the router still holds {self.router.flights}, {self.router.loads}")
        if self.store.scoped():
            raise Violation(f"keys of ended attempts are left in the store: {self.store.scoped()}")

    def _outcome(self) -> Outcome:
        facts = Counter(self.facts)
        for engine in self.engines.values():
            stats = engine.scheduler.stats()
            facts["preemptions"] += stats.preemptions
            facts["recomputes"] += stats.recomputes
            facts["prefix hits"] += stats.prefix_hits
            facts["fetched"] += stats.fetch_hits
            facts["fetches failed"] += stats.fetch_failures
            facts["transfers received"] += engine.agent.stats().received
            facts["transfers failed"] += engine.agent.stats().failed
        ends = Counter(client.outcome for client in self.clients)
        return Outcome(self.scenario.seed, len(self.clients), dict(ends), self.steps, self.clock.now, dict(facts))


def run_scenario(scenario: Scenario) -> Outcome:
    """Run one scenario. Raises Violation with the seed, the replay command and the newest trace lines."""
    world = World(scenario)
    try:
        return world.run()
    except Exception as error:
        trace = "\n".join(world.clock.lines(150))
        raise Violation(
            f"seed {scenario.seed} at {world.clock.now:.4f} s: {type(error).__name__}: {error}\n"
            f"replay: isthmus-runtime simulate --proof --seed {scenario.seed}\n{trace}"
        ) from error
