"""A coarse model of a cluster: a few events a request instead of one a token.

Not the core's code: `proof` is for that. What it keeps of the design: decode reserves room for prompt and output
first, then a prefill engine computes the prompt by steps, KV moves while it computes, and decode joins the request to
its batch. Unified engines do both. How an engine passes time is in `fluid.py`, what its steps take in `hardware.py`
(a roofline) or `measured.py` (fitted to a bench run).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..config import SchedulerConfig
from .fluid import NEVER, FluidEngine, Job
from .hardware import Steps
from .traces import HASH_BLOCK, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is simulated. Engines are of `steps.tp` GPUs each."""

    steps: Steps
    prefills: int = 0
    decodes: int = 0
    unified: int = 0
    """Engines that compute prompts and generate, instead of the two kinds above."""
    request_s: float = 0.0
    """Of each request outside the engines: client, router, tokenising, hops."""
    link_bytes_per_s: float = 25e9
    """KV transfer out of one prefill engine."""
    link_latency_s: float = 0.002
    chunk_tokens: int = 2048
    """Most tokens of one step. What is computed last is also sent last: it is not hidden behind compute."""
    max_step_s: float = SchedulerConfig().max_step_s
    """Longest step beside a request that generates (`engine.maxStepTime`)."""
    cache: str = "local"
    """Where prefixes are kept: none, local (each engine's own pool) or pool (shared)."""
    pool_tokens: int = 50_000_000
    pool_bytes_per_s: float = 20e9
    """Reading the shared pool, per engine."""
    max_batch: int = 256

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return (self.prefills + self.decodes + self.unified) * self.steps.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits in seconds; a request is good when it meets both."""

    ttft_s: float
    itl_s: float


@dataclass(slots=True)
class Report:
    """Per-request results and totals. Times in seconds."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    """Mean over a request's tokens after the first; requests with one token have none and count as good."""
    good: int = 0
    never_fit: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    prefill_busy_s: float = 0.0
    decode_busy_s: float = 0.0
    span_s: float = 0.0

    def record(self, slo: Slo, ttft: float, itl: float | None) -> None:
        """A request has ended."""
        self.ttft.append(ttft)
        if itl is not None:
            self.itl.append(itl)
        self.good += ttft <= slo.ttft_s and (itl is None or itl <= slo.itl_s)

    @property
    def requests(self) -> int:
        """All requests."""
        return len(self.ttft) + self.never_fit

    @property
    def attainment(self) -> float:
        """Share of requests within the SLO."""
        return self.good / max(1, self.requests)


class _Lru:
    """Hash ids in use order."""

    __slots__ = ("_capacity", "_ids")

    def __init__(self, blocks: int) -> None:
        self._capacity = blocks
        self._ids: OrderedDict[int, None] = OrderedDict()

    def hits(self, ids: Sequence[int]) -> int:
        """Leading ids that are there."""
        known = self._ids
        for index, hash_id in enumerate(ids):
            if hash_id not in known:
                return index
        return len(ids)

    def use(self, ids: Iterable[int]) -> None:
        """Make ids the most recently used."""
        known = self._ids
        for hash_id in ids:
            if hash_id in known:
                known.move_to_end(hash_id)
            else:
                known[hash_id] = None
        while len(known) > self._capacity:
            known.popitem(last=False)


_PROMPT, _CHANGE, _SENT = range(3)
_SAME_S = 1e-9
"""Times this close are one."""


class _Run:
    """One simulation. Events are (time, order, kind, engine, job or the engine's version)."""

    def __init__(self, cluster: Cluster, slo: Slo) -> None:
        self.cluster, self.slo, self.report = cluster, slo, Report()
        self._steps = steps = cluster.steps
        budget, longest = cluster.chunk_tokens, cluster.max_step_s
        self._kv_tokens, self._kv_bytes = steps.kv_tokens, steps.kv_bytes_per_token
        generating = range(cluster.decodes or cluster.unified)
        self.engines = [FluidEngine(n, steps, budget, longest, self._first, self._end) for n in generating]
        """Those that generate."""
        self.prefills = [
            FluidEngine(n, steps, budget, longest, self._computed, self._end) for n in range(cluster.prefills)
        ]
        for engine in self.prefills:
            engine.slowed = steps.prefill_slowed
        self._prefill_free = [(0.0, n) for n in range(cluster.prefills)]
        """(when its prompts are computed if none comes, number): a heap."""
        count = cluster.prefills or cluster.unified
        self._shared = _Lru(cluster.pool_tokens // HASH_BLOCK)
        self._own = [_Lru(steps.kv_tokens // HASH_BLOCK) for _ in range(count)]
        self._by_room = [e.key for e in self.engines]
        self._heap: list[tuple[float, int, int, FluidEngine, Job | int]] = []
        self._order = 0

    # ------------------------------------------------------------------------------------------------------ arrivals

    def arrive(self, request: TraceRequest) -> None:
        """A request at its time, after all that happens before."""
        now = request.at_s + self.cluster.request_s
        self.happen(now)
        if request.input_tokens + request.output_tokens > self._kv_tokens:
            self.report.never_fit += 1
            return
        engine = self._roomiest()
        if engine.waiting or not self._fits(engine, request):
            engine.waiting.append(request)
            engine.queued += request.input_tokens + request.output_tokens
        else:
            self._admit(engine, request, now)
        heapq.heappush(self._by_room, engine.key)

    def _roomiest(self) -> FluidEngine:
        """The engine with the most unreserved tokens; entries that are out of date are dropped on the way."""
        while self._by_room:
            entry = heapq.heappop(self._by_room)
            if entry == self.engines[entry[1]].key:
                return self.engines[entry[1]]
        raise AssertionError("every engine has an entry: one is pushed whenever its room changes")

    def _fits(self, engine: FluidEngine, request: TraceRequest) -> bool:
        return engine.held < self.cluster.max_batch and engine.free >= request.input_tokens + request.output_tokens

    def _admit(self, engine: FluidEngine, request: TraceRequest, now: float) -> None:
        """Room is reserved: the prompt goes to the prefill engine that is free first, or is computed here."""
        engine.free -= request.input_tokens + request.output_tokens
        engine.held += 1
        job = Job(request, engine, 0 if self.prefills else request.output_tokens - 1)
        self.report.prompt_tokens += request.input_tokens
        if not self.prefills:
            self._at(now + self._look_up(job, engine.number), _PROMPT, engine, job)
            return
        free_at, number = heapq.heappop(self._prefill_free)
        at = now + self._look_up(job, number)
        length, new = request.input_tokens, request.input_tokens - job.cached
        took = self._steps.prefill_s(new, new * (job.cached + new / 2))
        heapq.heappush(self._prefill_free, (max(at, free_at) + took, number))
        byte_s = self._kv_bytes / self.cluster.link_bytes_per_s
        shown = max(length * byte_s - took, min(length, self.cluster.chunk_tokens) * byte_s)
        job.moving_s = shown + self.cluster.link_latency_s
        job.prefill = number
        self._at(at, _PROMPT, self.prefills[number], job)

    def _look_up(self, job: Job, number: int) -> float:
        """What the prefix cache spares, and from now on holds; the seconds it takes to read it from a pool."""
        if self.cluster.cache == "none":
            return 0.0
        ids = job.request.hash_ids
        lru = self._shared if self.cluster.cache == "pool" else self._own[number]
        job.cached = min(lru.hits(ids) * HASH_BLOCK, job.request.input_tokens - 1)
        lru.use(ids)
        self.report.hit_tokens += job.cached
        return job.cached * self._kv_bytes / self.cluster.pool_bytes_per_s if self.cluster.cache == "pool" else 0.0

    # -------------------------------------------------------------------------------------------------------- events

    def happen(self, until: float) -> None:
        """Everything up to a time."""
        heap, pop, push = self._heap, heapq.heappop, heapq.heappush
        while heap and heap[0][0] <= until:
            now, _, kind, engine, what = pop(heap)
            if kind == _CHANGE:
                if what != engine.version:
                    continue
                engine.planned = NEVER
            else:
                assert isinstance(what, Job)
                if kind == _PROMPT:
                    engine.prompt(what, now)
                else:
                    engine.receive(what, now, self._steps.received_s(what.request.input_tokens))
            self.report.span_s = now
            while (due := engine.due()) <= now + _SAME_S:
                engine.change(now)
            if due < engine.planned:
                # An event that comes too early only looks again: later plans need no new one.
                engine.planned = due
                engine.version = version = engine.version + 1
                self._order = order = self._order + 1
                push(heap, (due, order, _CHANGE, engine, version))

    def _at(self, at: float, kind: int, engine: FluidEngine, job: Job) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, kind, engine, job))

    def _computed(self, job: Job, now: float) -> None:
        """A prefill engine has computed a prompt; its last blocks leave."""
        self._at(now + job.moving_s, _SENT, job.engine, job)

    def _first(self, job: Job, now: float) -> None:
        job.first_s = now
        self.report.output_tokens += job.request.output_tokens
        if job.request.output_tokens == 1:
            self._end(job, now)

    def _end(self, job: Job, now: float) -> None:
        request, engine = job.request, job.engine
        engine.free += request.input_tokens + request.output_tokens
        engine.held -= 1
        ttft = job.first_s - request.at_s
        itl = (now - job.first_s) / (request.output_tokens - 1) if request.output_tokens > 1 else None
        self.report.record(self.slo, ttft, itl)
        while engine.waiting and self._fits(engine, engine.waiting[0]):
            request = engine.waiting.popleft()
            engine.queued -= request.input_tokens + request.output_tokens
            self._admit(engine, request, now)
        heapq.heappush(self._by_room, engine.key)


def simulate(cluster: Cluster, trace: Sequence[TraceRequest], slo: Slo) -> Report:
    """Run a trace. Linear in requests, up to logarithms; deterministic."""
    assert bool(cluster.unified) != bool(cluster.prefills and cluster.decodes), "unified engines, or the two kinds"
    run = _Run(cluster, slo)
    for request in trace:
        run.arrive(request)
    run.happen(NEVER)
    run.report.prefill_busy_s = sum(e.busy for e in run.prefills)
    run.report.decode_busy_s = sum(e.busy for e in run.engines)
    return run.report
