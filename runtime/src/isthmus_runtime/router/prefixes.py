"""What engines have in their prefix caches, as the router knows it. Pure; hashes are those of `kv/keys.py`.

`SentPrefixes` guesses from what was sent where; `StoredBlocks` follows the engines' own events. Both hold the first 8
bytes of each hash as a number: a wrong match would cost a detour, never a wrong answer, and takes 2^32 blocks to find.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

from ..kv.keys import block_hashes, extra_keys
from ..request import GenerateRequest
from .policy import Endpoint, PolicyName

MAX_BLOCKS = 1 << 16
"""Hashes remembered per engine, about 100 bytes each."""
EXPECTED_PROMPTS = 32
"""How many of the last prompts sent to an engine count as cached there before it reports them. A bound on what is
believed without word from the engine; one that was never stored costs a detour."""


def short(block_hash: bytes) -> int:
    """A block hash as it is held here."""
    return int.from_bytes(block_hash[:8], "big")


def prompt_hashes(request: GenerateRequest, block_size: int) -> list[int]:
    """Hashes of the prompt's full blocks, equal to the engine's own."""
    return [short(h) for h in block_hashes(request.prompt_token_ids, block_size, extra=extra_keys(request))]


class Prefixes(Protocol):
    """Who has which blocks."""

    def hit(self, url: str, hashes: Sequence[int]) -> int:
        """Leading blocks of `hashes` that the engine has."""

    def sent(self, engine: Endpoint, hashes: Sequence[int]) -> None:
        """A prompt with these blocks was sent to the engine."""

    def forget(self, url: str) -> None:
        """The engine was lost or started anew: its cache is empty."""


class SentPrefixes:
    """Least recently used blocks of each engine are forgotten, the end of a prefix before its beginning, as engines
    evict them. Generated tokens are not known here, so the answers of earlier turns count as missing."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        """`max_blocks`: bound for each engine, where its own cache is not smaller."""
        self._max_blocks = max_blocks
        self._engines: dict[str, OrderedDict[int, None]] = {}

    def hit(self, url: str, hashes: Sequence[int]) -> int:
        """Leading blocks of `hashes` that were sent to the engine and are remembered."""
        return _run(self._engines.get(url, ()), hashes)

    def sent(self, engine: Endpoint, hashes: Sequence[int]) -> None:
        """Remember a prompt."""
        known = self._engines.setdefault(engine.url, OrderedDict())
        for h in reversed(hashes):
            known[h] = None
            known.move_to_end(h)
        bound = min(self._max_blocks, engine.blocks or self._max_blocks)
        while len(known) > bound:
            known.popitem(last=False)

    def forget(self, url: str) -> None:
        """Drop all that is known of the engine."""
        self._engines.pop(url, None)


_NONE: Container[int] = frozenset()


class EventGap(ValueError):
    """Events of an engine are missing; a new snapshot is needed."""


class StoredBlocks:
    """The engines' caches by their own events, and what was sent there and is not reported yet: prompts with a common
    beginning often come close together. Never more blocks than an engine has, beside those of the expected prompts."""

    def __init__(self, expected_prompts: int = EXPECTED_PROMPTS) -> None:
        """`expected_prompts`: see EXPECTED_PROMPTS; 0: events only."""
        self._engines: dict[str, set[int]] = {}
        self._at: dict[str, int] = {}
        self._expected: dict[str, OrderedDict[int, int]] = {}
        """URL -> hash -> number of the last prompt sent with it, in order of these."""
        self._sent: dict[str, int] = {}
        self._expected_prompts = expected_prompts

    def hit(self, url: str, hashes: Sequence[int]) -> int:
        """Leading blocks of `hashes` that the engine has reported, or is expected to."""
        stored, expected = self._engines.get(url, _NONE), self._expected.get(url, _NONE)
        for count, h in enumerate(hashes):
            if h not in stored and h not in expected:
                return count
        return len(hashes)

    def sent(self, engine: Endpoint, hashes: Sequence[int]) -> None:
        """Expect what of a prompt is not stored yet; not of engines that report nothing, they may keep no cache."""
        stored = self._engines.get(engine.url)
        if stored is None or not self._expected_prompts:
            return
        expected = self._expected.setdefault(engine.url, OrderedDict())
        number = self._sent[engine.url] = self._sent.get(engine.url, 0) + 1
        for h in hashes:
            if h not in stored:
                expected[h] = number
                expected.move_to_end(h)
        while expected and next(iter(expected.values())) <= number - self._expected_prompts:
            expected.popitem(last=False)

    def apply(self, url: str, *, reset: bool, previous: int, following: int, changes: Iterable[str]) -> None:
        """Follow one line of an engine's event stream.

        Args:
            reset: the line begins a snapshot: what was known is dropped.
            previous, following: number of events before and after the line.
            changes: `+` or `-` and the hash in hex, in order.

        Raises:
            EventGap: `previous` is not where the last line ended.
            ValueError: a change is not understood.
        """
        if reset:
            self._engines[url] = set()
            self._expected.pop(url, None)
        elif self._at.get(url) != previous:
            raise EventGap(f"events continue at {previous}, expected {self._at.get(url)}")
        blocks, expected = self._engines[url], self._expected.get(url)
        for change in changes:
            number = int(change[1:], 16)
            if expected:
                expected.pop(number, None)
            if change[0] == "+":
                blocks.add(number)
            elif change[0] == "-":
                blocks.discard(number)
            else:
                raise ValueError(f"a change begins with {change[0]!r}, expected + or -")
        self._at[url] = following

    def forget(self, url: str) -> None:
        """Drop all that is known of the engine."""
        self._engines.pop(url, None)
        self._expected.pop(url, None)
        self._at.pop(url, None)


def cached_tokens(
    prefixes: Prefixes, engines: Iterable[Endpoint], hashes: Mapping[int, Sequence[int]]
) -> dict[str, int]:
    """URL -> leading prompt tokens in the engine's cache, for those that have some. `hashes`: by block size."""
    found = {}
    for engine in engines:
        if blocks := prefixes.hit(engine.url, hashes.get(engine.block_size, ())):
            found[engine.url] = blocks * engine.block_size
    return found


def make_prefixes(policy: PolicyName) -> SentPrefixes | StoredBlocks | None:
    """What `policy` knows of the engines' caches; None: it does not ask."""
    if policy is PolicyName.PREFIX_AWARE:
        return SentPrefixes()
    return StoredBlocks() if policy is PolicyName.KV_AWARE else None


def _run(known: Container[int], hashes: Sequence[int]) -> int:
    """Leading members of `hashes` that are in `known` (a set, or the keys of a map)."""
    for count, h in enumerate(hashes):
        if h not in known:
            return count
    return len(hashes)
