"""How much of the prompts each routing policy finds in the engines' prefix caches, on a trace.

The real policy and the real prefix indexes of `router/`, in front of engines that are reduced to what matters here: an
LRU prefix cache, and a queue of prompts computed one after another at a fixed rate. Several routers share the engines,
as replicas do: what one of them has sent, another can only learn from the engines' events.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..router.policy import Choice, Endpoint, Facts, Load, PolicyName, Rules, choose, fleet
from ..router.prefixes import EXPECTED_PROMPTS, Prefixes, SentPrefixes, StoredBlocks, cached_tokens
from .traces import HASH_BLOCK, TraceRequest

EVENTS_ONLY = "kv-aware, events only"
ORACLE = "oracle"
"""One endless cache that all engines share: no policy can do better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingWorld:
    """What the trace is routed over."""

    engines: int = 4
    routers: int = 2
    cache_tokens: int = 400_000
    """KV that one engine keeps for reuse."""
    prefill_tokens_s: float = 8000.0
    decode_tokens_s: float = 40.0
    """Of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingResult:
    """One policy on one trace."""

    policy: str
    hit_rate: float
    """Prompt tokens found in the chosen engine's cache / all prompt tokens."""
    imbalance: float
    """Tokens computed by the busiest engine / the mean of all; 1 is even."""
    mean_wait_s: float
    """Arrival to the end of the prompt's computation."""


class _RoutedEngine:
    def __init__(self, url: str, capacity: int) -> None:
        self.url = url
        self.computed = 0
        self.free_at = 0.0
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit(self, ids: Sequence[int]) -> int:
        for count, h in enumerate(ids):
            if h not in self._blocks:
                return count
        return len(ids)

    def store(self, ids: Sequence[int]) -> list[str]:
        """Use and add blocks, the first of a prefix last to be evicted; returns the changes as events tell them."""
        changes = [f"+{h:x}" for h in ids if h not in self._blocks]
        for h in reversed(ids):
            self._blocks[h] = None
            self._blocks.move_to_end(h)
        while len(self._blocks) > self._capacity:
            gone, _ = self._blocks.popitem(last=False)
            changes.append(f"-{gone:x}")
        return changes


def route(
    trace: Sequence[TraceRequest], policy: PolicyName, world: RoutingWorld, *, expected_prompts: int = EXPECTED_PROMPTS
) -> RoutingResult:
    """Send every request of the trace through the policy; nothing is random. `expected_prompts`: of `StoredBlocks`."""
    capacity = max(1, world.cache_tokens // HASH_BLOCK)
    engines = {f"e{i}": _RoutedEngine(f"e{i}", capacity) for i in range(world.engines)}
    endpoints = [Endpoint(url, "f", block_size=HASH_BLOCK, blocks=capacity) for url in engines]
    live = fleet((), endpoints, unified=True)
    position = dict.fromkeys(engines, 0)
    stored = [StoredBlocks(expected_prompts) for _ in range(world.routers)] if policy is PolicyName.KV_AWARE else []
    for view in stored:
        for url in engines:
            view.apply(url, reset=True, previous=0, following=0, changes=())
    views: Sequence[Prefixes] = stored or [SentPrefixes() for _ in range(world.routers)]
    loads: list[dict[str, Load]] = [{} for _ in range(world.routers)]
    due: list[tuple[float, int, str, Sequence[str], int, int]] = []
    """(time, number, engine, changes that it reports then, router whose load ends then or -1, its tokens)"""
    hits = total = 0
    waited = 0.0
    for number, request in enumerate(trace):
        while due and due[0][0] <= request.at_s:
            _, _, url, changes, router, tokens = heapq.heappop(due)
            if router >= 0:
                loads[router][url] = loads[router][url].plus(-1, -tokens)
                continue
            for view in stored:
                view.apply(url, reset=False, previous=position[url], following=position[url] + 1, changes=changes)
            position[url] += 1
        router = number % world.routers
        facts = Facts(
            prompt_tokens=request.input_tokens,
            max_tokens=request.output_tokens,
            turn=number // world.routers,
            cached=cached_tokens(views[router], endpoints, {HASH_BLOCK: request.hash_ids}) if policy.by_prefix else {},
        )
        choice = choose(Rules(policy=policy), live, loads[router], facts)
        assert isinstance(choice, Choice), "every engine takes requests"
        engine = engines[choice.decode.url]
        views[router].sent(choice.decode, request.hash_ids)
        # As of its turn: by then, all that was sent to the engine before is computed.
        found = min(engine.hit(request.hash_ids) * HASH_BLOCK, request.input_tokens - 1)
        changes = engine.store(request.hash_ids)
        missing = request.input_tokens - found
        hits, total = hits + found, total + request.input_tokens
        engine.computed += missing
        engine.free_at = max(engine.free_at, request.at_s) + missing / world.prefill_tokens_s
        waited += engine.free_at - request.at_s
        load = facts.missing(engine.url, facts.decode_tokens)
        loads[router][engine.url] = loads[router].get(engine.url, Load()).plus(1, load)
        heapq.heappush(due, (engine.free_at, 2 * number, engine.url, changes, -1, 0))
        end = engine.free_at + request.output_tokens / world.decode_tokens_s
        heapq.heappush(due, (end, 2 * number + 1, engine.url, (), router, load))
    computed = [engine.computed for engine in engines.values()]
    return RoutingResult(
        policy=policy.value,
        hit_rate=hits / total,
        imbalance=max(computed) / (sum(computed) / len(computed)),
        mean_wait_s=waited / len(trace),
    )


def oracle(trace: Sequence[TraceRequest]) -> RoutingResult:
    """The bound: every leading block that any earlier request had is a hit, wherever it ran."""
    seen: set[int] = set()
    hits = total = 0
    for request in trace:
        run = next((i for i, h in enumerate(request.hash_ids) if h not in seen), len(request.hash_ids))
        hits += min(run * HASH_BLOCK, request.input_tokens - 1)
        total += request.input_tokens
        seen.update(request.hash_ids)
    return RoutingResult(policy=ORACLE, hit_rate=hits / total, imbalance=1.0, mean_wait_s=0.0)


def compare(trace: Sequence[TraceRequest], world: RoutingWorld) -> list[RoutingResult]:
    """Every policy on one trace, KV-aware also by events alone, and the oracle last."""
    rows = [route(trace, policy, world) for policy in PolicyName]
    alone = route(trace, PolicyName.KV_AWARE, world, expected_prompts=0)
    return [*rows, replace(alone, policy=EVENTS_ONLY), oracle(trace)]
