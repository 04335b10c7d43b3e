"""A coarse model of a prefill/decode cluster: two events a request instead of one a token.

Not the core's code: `proof` is for that. What it keeps of the design: decode reserves room for prompt and output
first, then prefill computes prompts one after another, KV moves while it computes, and decode runs everything it
holds as one batch. A decode engine shares itself equally among its requests: with V(t) the tokens each of them has
received, dV/dt = 1 / step time, and a request that joined at V ends at V + its output length. Exact as long as step
time changes only when a request joins or leaves.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .hardware import StepModel
from .traces import HASH_BLOCK, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is simulated. Engines are of `steps.tp` GPUs each."""

    steps: StepModel
    prefills: int
    decodes: int
    link_bytes_per_s: float = 25e9
    """KV transfer out of one prefill engine."""
    link_latency_s: float = 0.002
    chunk_tokens: int = 2048
    """What is sent last is not hidden behind compute."""
    cache: str = "local"
    """Where prefixes are kept: none, local (each prefill engine's own pool) or pool (shared)."""
    pool_tokens: int = 50_000_000
    pool_bytes_per_s: float = 20e9
    """Reading the shared pool, per engine."""
    max_batch: int = 256

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return (self.prefills + self.decodes) * self.steps.tp


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

    @property
    def requests(self) -> int:
        """All of them."""
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


class _Decode:
    """One decode engine as a shared processor."""

    __slots__ = (
        "at",
        "batch",
        "busy",
        "context",
        "ends",
        "free",
        "held",
        "number",
        "queued",
        "step",
        "version",
        "virtual",
        "waiting",
    )

    def __init__(self, number: int, tokens: int) -> None:
        self.number = number
        self.free = tokens
        self.held = 0
        """Requests with reserved room."""
        self.queued = 0
        """Tokens that the waiting requests will need."""
        self.waiting: deque[TraceRequest] = deque()
        self.ends: list[tuple[float, float, int, int, float]] = []
        """(V at the end, time it joined, output tokens, reserved tokens, time to first token)."""
        self.batch = 0
        self.context = 0.0
        self.virtual = 0.0
        self.at = 0.0
        self.step = 0.0
        self.busy = 0.0
        self.version = 0

    @property
    def key(self) -> tuple[int, int]:
        """Least is best: orders engines by room."""
        return self.queued - self.free, self.number

    def advance(self, now: float) -> None:
        """Bring V to `now`."""
        if self.batch:
            gained = (now - self.at) / self.step
            self.virtual += gained
            self.context += gained * self.batch
            self.busy += now - self.at
        self.at = now


_JOIN, _END = 1, 2


def simulate(cluster: Cluster, trace: Sequence[TraceRequest], slo: Slo) -> Report:
    """Run a trace. Linear in requests, up to logarithms; deterministic."""
    steps, report = cluster.steps, Report()
    decodes = [_Decode(n, steps.kv_tokens) for n in range(cluster.decodes)]
    prefill_free = [(0.0, n) for n in range(cluster.prefills)]
    shared = _Lru(cluster.pool_tokens // HASH_BLOCK)
    own = [_Lru(steps.kv_tokens // HASH_BLOCK) for _ in range(cluster.prefills)]
    by_room = [d.key for d in decodes]
    heap: list[tuple[float, int, int, int, float, int]] = []
    kv_bytes = steps.model.kv_bytes_per_token

    def admit(decode: _Decode, request: TraceRequest, now: float) -> None:
        """Room is reserved: compute the prompt on the prefill engine that is free first, then join the batch."""
        decode.free -= request.input_tokens + request.output_tokens
        decode.held += 1
        free_at, number = heapq.heappop(prefill_free)
        length, cached = request.input_tokens, 0
        if cluster.cache != "none":
            lru = shared if cluster.cache == "pool" else own[number]
            cached = min(lru.hits(request.hash_ids) * HASH_BLOCK, length - 1)
            lru.use(request.hash_ids)
        took = steps.prefill_s(length - cached, cached)
        if cluster.cache == "pool":
            took += cached * kv_bytes / cluster.pool_bytes_per_s
        start = max(now, free_at)
        heapq.heappush(prefill_free, (start + took, number))
        moving = length * kv_bytes / cluster.link_bytes_per_s
        last = min(length, cluster.chunk_tokens) * kv_bytes / cluster.link_bytes_per_s
        joins = start + took + max(moving - took, last) + cluster.link_latency_s
        report.prefill_busy_s += took
        report.prompt_tokens += length
        report.hit_tokens += cached
        heapq.heappush(heap, (joins, _JOIN, decode.number, length, joins - request.at_s, request.output_tokens))

    def replan(decode: _Decode) -> None:
        """The batch changed: a new step time, and a new time at which the next request ends."""
        decode.version += 1
        if decode.batch:
            decode.step = steps.decode_s(decode.batch, decode.context)
            due = decode.at + max(0.0, decode.ends[0][0] - decode.virtual) * decode.step
            heapq.heappush(heap, (due, _END, decode.number, decode.version, 0.0, 0))

    def fits(decode: _Decode, request: TraceRequest) -> bool:
        return decode.held < cluster.max_batch and decode.free >= request.input_tokens + request.output_tokens

    def finish(decode: _Decode, now: float) -> None:
        _, joined, output, reserved, ttft = heapq.heappop(decode.ends)
        decode.batch -= 1
        decode.context -= reserved
        decode.free += reserved
        decode.held -= 1
        if decode.batch == 0:
            decode.context = 0.0
        itl = (now - joined) / (output - 1) if output > 1 else 0.0
        _record(report, slo, ttft, itl if output > 1 else None)
        while decode.waiting and fits(decode, decode.waiting[0]):
            request = decode.waiting.popleft()
            decode.queued -= request.input_tokens + request.output_tokens
            admit(decode, request, now)
        heapq.heappush(by_room, decode.key)

    def happen(until: float) -> None:
        while heap and heap[0][0] <= until:
            now, kind, number, extra, ttft, output = heapq.heappop(heap)
            decode = decodes[number]
            if kind == _END and extra != decode.version:
                continue
            decode.advance(now)
            report.span_s = max(report.span_s, now)
            if kind == _JOIN:
                report.output_tokens += output
                decode.batch += 1
                decode.context += extra + 1
                end = decode.virtual + max(0, output - 1)
                heapq.heappush(decode.ends, (end, now, output, extra + output, ttft))
            else:
                finish(decode, now)
            replan(decode)

    for request in trace:
        happen(request.at_s)
        if request.input_tokens + request.output_tokens > steps.kv_tokens:
            report.never_fit += 1
            continue
        decode = _roomiest(decodes, by_room)
        if decode.waiting or not fits(decode, request):
            decode.waiting.append(request)
            decode.queued += request.input_tokens + request.output_tokens
        else:
            admit(decode, request, request.at_s)
        heapq.heappush(by_room, decode.key)
    happen(float("inf"))
    report.decode_busy_s = sum(d.busy for d in decodes)
    return report


def _roomiest(decodes: Sequence[_Decode], by_room: list[tuple[int, int]]) -> _Decode:
    """The engine with the most unreserved tokens; entries that are out of date are dropped on the way."""
    while by_room:
        entry = heapq.heappop(by_room)
        if entry == decodes[entry[1]].key:
            return decodes[entry[1]]
    raise AssertionError("every engine has an entry: one is pushed whenever its room changes")


def _record(report: Report, slo: Slo, ttft: float, itl: float | None) -> None:
    report.ttft.append(ttft)
    if itl is not None:
        report.itl.append(itl)
    report.good += ttft <= slo.ttft_s and (itl is None or itl <= slo.itl_s)
