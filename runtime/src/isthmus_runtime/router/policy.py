"""Which engines take a request. Pure: the live engines, their loads and the request in; a choice or a refusal out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

EXPECTED_OUTPUT_TOKENS = 256
"""What an answer is taken to need when loads are compared: `max_tokens` is a limit, mostly far above its length."""

HIT_WEIGHT = 4.0
"""What a cached prompt token is worth, in tokens of outstanding work. Outstanding work is mostly KV that is held and
decoded at leisure, while a missing token is computed before the first answer: it weighs more. In `sim/routing.py` hit
rate and waiting time both improve up to here, and evenness is lost above."""

ROOM_SHARE = 0.75
"""Of decode's KV blocks. Nearer to full, its word is waited for before a prompt is computed."""

UNPAIRED = "none"
"""Transfer mode of an engine that moves no KV."""


class PolicyName(StrEnum):
    """How one of several possible engines is picked."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOAD = "least-load"
    PREFIX_AWARE = "prefix-aware"
    """By load and by the prefix cache as this router guesses it: what it has sent where."""
    KV_AWARE = "kv-aware"
    """By load and by the prefix cache as engines report it."""

    @property
    def by_prefix(self) -> bool:
        """Whether prefix caches count."""
        return self in (PolicyName.PREFIX_AWARE, PolicyName.KV_AWARE)


class Reason(StrEnum):
    """Why a request goes where it goes."""

    PAIR = "pair"
    SHORT_PROMPT = "short-prompt"
    NO_PREFILL = "prefill-unavailable"
    LONG_PROMPT = "long-prompt"
    """For prefill engines, of which each has a limit of its own."""
    UNIFIED = "unified"
    SHARED_PROMPT = "shared-prompt"


class Refusal(StrEnum):
    """Why no engine takes a request."""

    NO_DECODE = "no-decode"
    NO_PREFILL = "no-prefill"
    NO_COMPATIBLE_PREFILL = "no-compatible-prefill"
    LONG_PROMPT = "long-prompt"
    NO_ADAPTER = "no-adapter"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An engine that takes new requests, as its own /info reports it."""

    url: str
    fingerprint: str
    """KV layout and engine KV ABI: only equal ones understand each other's blocks."""
    mode: str = UNPAIRED
    """Transfer mode; a pair needs the same."""
    epoch: str = ""
    """Changes with each start of the process."""
    block_size: int = 0
    """Tokens per KV block; 0: not known."""
    blocks: int = 0
    """KV blocks that requests can hold; 0: not known."""
    adapters: frozenset[str] = frozenset()
    """Digests of the low-rank adapters that it has."""
    tokenizer: str = ""
    """Digest of the tokenizer by which it takes prompts as text; empty: it takes ids alone."""
    begins_early: bool = False
    """It knows of prompts that are begun before their tickets."""
    max_model_len: int = 0
    """Most tokens of a prompt and what is generated; 0: not known."""


class Load(NamedTuple):
    """What this router has outstanding at an engine."""

    requests: int = 0
    tokens: int = 0

    def plus(self, requests: int, tokens: int) -> Load:
        """The load after a change."""
        return Load(self.requests + requests, self.tokens + tokens)


@dataclass(frozen=True, slots=True)
class Fleet:
    """All engines that take new requests. Made by `fleet` when the set changes, not for each request."""

    prefill: tuple[Endpoint, ...] = ()
    decode: tuple[Endpoint, ...] = ()
    """Decode, or unified engines."""
    peers: Mapping[tuple[str, str], tuple[Endpoint, ...]] = field(default_factory=dict)
    """(fingerprint, mode) -> prefill engines."""
    unified: bool = False

    @property
    def longest_prefill(self) -> int:
        """Most tokens of a prompt that a prefill engine takes; 0: not known."""
        limits = [engine.max_model_len for engine in self.prefill]
        return max(limits) - 1 if limits and all(limits) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The router's settings that bear on a choice."""

    policy: PolicyName = PolicyName.LEAST_LOAD
    disaggregate_above: int = 0
    """Prompts of at most this many tokens are computed on decode."""
    local_without_prefill: bool = True
    """Compute on decode when no prefill engine can take the prompt; else refuse."""


@dataclass(slots=True, kw_only=True)
class Facts:
    """What is known of a request, and of the engines' prefix caches with respect to it. Nobody
    changes it: to freeze as many fields would take longer than to set them."""

    prompt_tokens: int
    max_tokens: int
    turn: int
    """Counts requests: rotates equals."""
    excluded: frozenset[str] = frozenset()
    """Engines that failed this request already."""
    cached: Mapping[str, int] = field(default_factory=dict)
    """Engine URL -> leading prompt tokens in its prefix cache; absent: none."""
    adapter: str = ""
    """Digest of the low-rank adapter that it asks for; empty: none."""
    holder: str = ""
    """The engine that generates another choice of the same prompt, and so has its KV."""

    @property
    def decode_tokens(self) -> int:
        """Load on the decode engine, nothing being cached."""
        return self.prompt_tokens + min(self.max_tokens, EXPECTED_OUTPUT_TOKENS)

    def missing(self, url: str, tokens: int) -> int:
        """`tokens` of load without what the engine has in its cache already, at least 1."""
        return max(1, tokens - self.cached.get(url, 0))


class Choice(NamedTuple):
    """Where the request goes. `prefill` None: decode computes the prompt."""

    prefill: Endpoint | None
    decode: Endpoint
    reason: Reason


def fleet(prefill: Iterable[Endpoint], decode: Iterable[Endpoint], *, unified: bool = False) -> Fleet:
    """Sort engines for `choose`."""
    peers: dict[tuple[str, str], list[Endpoint]] = {}
    givers = tuple(prefill)
    for endpoint in givers:
        if endpoint.mode == UNPAIRED:
            continue
        peers.setdefault((endpoint.fingerprint, endpoint.mode), []).append(endpoint)
    return Fleet(givers, tuple(decode), {k: tuple(v) for k, v in peers.items()}, unified)


def choose(rules: Rules, engines: Fleet, loads: Mapping[str, Load], facts: Facts) -> Choice | Refusal:
    """Pick a pair of equal fingerprint and transfer mode, or decode alone where the rules say so."""
    decode = _allowed(engines.decode, facts)
    if not decode:
        return Refusal.NO_ADAPTER if engines.decode and facts.adapter else Refusal.NO_DECODE
    for engine in decode if facts.holder else ():
        if engine.url == facts.holder:
            return Choice(None, engine, Reason.SHARED_PROMPT)
    if engines.unified:
        return Choice(None, _pick(rules, decode, loads, facts), Reason.UNIFIED)
    if facts.prompt_tokens <= rules.disaggregate_above:
        return Choice(None, _pick(rules, decode, loads, facts), Reason.SHORT_PROMPT)
    paired = [d for d in decode if _peers(engines, d, facts)]
    if paired:
        chosen = _pick(rules, paired, loads, facts)
        return Choice(_pick(rules, _peers(engines, chosen, facts), loads, facts), chosen, Reason.PAIR)
    too_long = 0 < engines.longest_prefill < facts.prompt_tokens
    if rules.local_without_prefill:
        reason = Reason.LONG_PROMPT if too_long else Reason.NO_PREFILL
        return Choice(None, _pick(rules, decode, loads, facts), reason)
    if too_long:
        return Refusal.LONG_PROMPT
    return Refusal.NO_COMPATIBLE_PREFILL if _allowed(engines.prefill, facts) else Refusal.NO_PREFILL


def has_room(decode: Endpoint, outstanding: Load, tokens: int, *, usage: float) -> bool:
    """Whether decode will reserve for `tokens` more at once, as far as a router can know: by what it has `outstanding`
    there and, for what others have, by the last probe (`usage`: share of KV blocks).

    Where it will, prefill begins without waiting for it. A prompt is computed in vain where this is wrong.
    """
    room = decode.blocks * decode.block_size
    return room > 0 and max(outstanding.tokens, usage * room) + tokens <= ROOM_SHARE * room


def _allowed(engines: Sequence[Endpoint], facts: Facts) -> Sequence[Endpoint]:
    if facts.adapter:
        engines = [e for e in engines if facts.adapter in e.adapters]
    return [e for e in engines if e.url not in facts.excluded] if facts.excluded else engines


def _peers(engines: Fleet, decode: Endpoint, facts: Facts) -> Sequence[Endpoint]:
    peers = _allowed(engines.peers.get((decode.fingerprint, decode.mode), ()), facts)
    if all(facts.prompt_tokens < e.max_model_len for e in peers):  # mostly
        return peers
    return [e for e in peers if not 0 < e.max_model_len <= facts.prompt_tokens]


_IDLE = Load()


def _pick(rules: Rules, engines: Sequence[Endpoint], loads: Mapping[str, Load], facts: Facts) -> Endpoint:
    """The engine of lowest cost, the next in turn among equals.

    cost = outstanding tokens - HIT_WEIGHT x cached prompt tokens, then outstanding requests. A cached prefix attracts
    until its engine is that much busier than another, so a prefix that everybody shares still spreads.
    """
    count = len(engines)
    start = facts.turn % count
    if rules.policy is PolicyName.ROUND_ROBIN or count == 1:
        return engines[start]
    weight = HIT_WEIGHT if rules.policy.by_prefix else 0.0
    cached = facts.cached

    def cost(engine: Endpoint) -> tuple[float, int]:
        load = loads.get(engine.url, _IDLE)
        return load.tokens - weight * cached.get(engine.url, 0), load.requests

    best = engines[start]
    lowest = cost(best)
    for i in range(start + 1, start + count):
        candidate = engines[i % count]
        if (found := cost(candidate)) < lowest:
            best, lowest = candidate, found
    return best
