"""What an engine's metrics tell: counts that it keeps itself, sampled when they are read, and times of each stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from ..metrics import EngineMetrics, MemoryMetrics, RequestMetrics, TransferMetrics
from ..request import TokenChunk
from .seam import EngineStatus


@dataclass(slots=True)
class EngineMeters:
    """Every metric of an engine process over one registry."""

    registry: CollectorRegistry
    model: str
    engine: EngineMetrics = field(init=False)
    requests: RequestMetrics = field(init=False)
    transfer: TransferMetrics = field(init=False)
    memory: MemoryMetrics = field(init=False)
    _seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = EngineMetrics(self.registry, self.model)
        self.requests = RequestMetrics(self.registry, self.model)
        self.transfer = TransferMetrics(self.registry, self.model)
        self.memory = MemoryMetrics(self.registry, self.model)

    def sample(self, engine: EngineStatus) -> None:
        """Take over what the engine tells of itself."""
        stats, blocks = engine.snapshot.stats, engine.snapshot.blocks
        self.engine.running.set(stats.running)
        self.engine.waiting.set(stats.waiting)
        self.engine.kv_usage.set(engine.snapshot.kv_usage)
        self.engine.quarantined_blocks.set(blocks.quarantined)
        listed = engine.adapter_list
        self.engine.adapters.set(len(engine.adapters))
        self.engine.adapter_problems.set(0 if listed is None else len(listed.problems))
        self.engine.no_progress_seconds.set(engine.stalled_s)
        self.engine.prefix_queries.inc(self._grown("queries", stats.prefix_queries))
        self.engine.prefix_hits.inc(self._grown("hits", stats.prefix_hits))
        self.engine.fetch_queries.inc(self._grown("fetch queries", stats.fetch_queries))
        self.engine.fetch_hits.inc(self._grown("fetch hits", stats.fetch_hits))
        self.engine.fetch_failures.inc(self._grown("fetch failures", stats.fetch_failures))
        self.engine.preemptions.inc(self._grown("preemptions", stats.preemptions))
        self.engine.drafted.inc(self._grown("drafted", stats.drafted))
        self.engine.accepted.inc(self._grown("accepted", stats.accepted))
        self.engine.forced.inc(self._grown("forced", stats.forced))
        self.engine.never_fit_rejections.inc(self._grown("never_fit", stats.never_fit))
        for stage, total in engine.transfer_failures.items():
            self.transfer.failed(stage, self._grown(f"failed {stage}", total))
        moved = engine.moved
        late = stats.unknown_events + (0 if moved is None else moved.dropped)
        self.transfer.late_messages.inc(self._grown("late", late))
        self.transfer.legs.set(0 if moved is None else moved.live)
        self.transfer.sent_bytes.inc(0 if moved is None else self._grown("sent", moved.sent_bytes))

    def _grown(self, name: str, total: int) -> int:
        """How much a running total has grown since it was last asked for: what a counter must be increased by."""
        before, self._seen[name] = self._seen.get(name, 0), total
        return total - before


class Observer:
    """Times of one stream, for the request metrics."""

    def __init__(self, meters: EngineMeters, clock: Callable[[], float], prompt_tokens: int) -> None:
        self._meters = meters
        self._clock = clock
        self._start = clock()
        self._last: float | None = None
        meters.requests.prompt_tokens.inc(prompt_tokens)

    def chunk(self, chunk: TokenChunk) -> None:
        """Note one chunk of the stream."""
        requests, now = self._meters.requests, self._clock()
        if chunk.token_ids:
            requests.generation_tokens.inc(len(chunk.token_ids))
            if self._last is None:
                requests.time_to_first_token.observe(now - self._start)
            else:
                requests.inter_token_latency.observe((now - self._last) / len(chunk.token_ids))
            self._last = now
        if chunk.note:
            self._meters.transfer.prompt(chunk.note)
        if chunk.error is not None:
            requests.failed(chunk.error.status, chunk.error.code)
        elif chunk.finish_reason is not None:
            requests.succeeded(chunk.finish_reason.value, now - self._start)
