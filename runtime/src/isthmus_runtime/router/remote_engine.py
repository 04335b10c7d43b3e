"""One engine as the router knows it: what it said last, whether it takes requests, and who holds on to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..protocol.info import AdapterInfo, EngineInfo
from .own_time import OwnTime
from .policy import UNPAIRED, Endpoint, Load, has_room
from .rates import Rates

FleetRole = Literal["prefill", "decode", "unified"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine as GET /info of the router shows it."""

    url: str
    role: FleetRole
    state: str
    reason: str
    requests: int
    fingerprint: str
    other_tokenizer: bool
    """It takes no requests for as long as this router and it run: its model has another tokenizer."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the last probe of one engine said."""

    role: FleetRole
    ready: bool
    info: EngineInfo | None
    """None: it has not answered yet."""
    tokens_per_s: float
    sent_bytes_per_s: float


def _nobody_waits(reason: str) -> None:
    pass


class Hold:
    """A hold on one engine by one request: counts as load, and is notified when the engine is lost."""

    __slots__ = ("_engine", "_on_lost", "_tokens", "lost")

    def __init__(self, engine: RemoteEngine, tokens: int, on_lost: Callable[[str], None]) -> None:
        self._engine = engine
        self._tokens = tokens
        self._on_lost = on_lost
        self.lost = ""
        """Why the engine is considered lost; empty while it is not."""

    def heard(self) -> None:
        """The engine has said something on behalf of the request: however late it answers probes, it is there."""
        self._engine.heard()

    def lose(self, reason: str) -> None:
        """The engine is gone. Told once."""
        if not self.lost:
            self.lost = reason
            self._on_lost(reason)

    def release(self) -> None:
        """The request has left the engine. Idempotent."""
        self._on_lost = _nobody_waits  # what it belongs to would refer to itself, until the collector comes by
        self._engine.release(self, self._tokens)


class RemoteEngine:
    """One address. Changed by `EnginePool` alone, on the event loop: mostly by the task that watches it."""

    def __init__(self, url: str, role: FleetRole, loads: dict[str, Load], own: OwnTime) -> None:
        """`own`: the router's time."""
        self.url = url
        self.role = role
        self.info: EngineInfo | None = None
        self.problem = "not asked yet"
        """Why it takes no requests; empty when it does."""
        self.has_served = False
        """It has taken requests, or could have."""
        self.listed = True
        """Whether name resolution still returns it."""
        self.failures = 0
        self._own = own
        self.last_answer = own.now
        """When it was last heard of, be it by a probe or by a token."""
        self.wake = asyncio.Event()
        self.probes = self.answered = 0
        """Begun, and ended, so far."""
        self.probed = asyncio.Condition()
        """Notified when one has ended."""
        self.holds: set[Hold] = set()
        self.shown: tuple[Endpoint, int, tuple[AdapterInfo, ...]] | None = None
        """`known()` as the fleet has it: a contact may fail while a probe that succeeds is on its way."""
        self.follower: asyncio.Task[None] | None = None
        """Follows its KV events."""
        self.has_events = True
        self.rates = Rates()
        self._loads = loads

    @property
    def silent_s(self) -> float:
        """How long nothing has been heard of it."""
        return self._own.now - self.last_answer

    def heard(self) -> None:
        """Note that it has said something."""
        self.last_answer = self._own.now

    @property
    def routable(self) -> bool:
        return self.listed and not self.problem and self.info is not None

    def tells(self, vocabulary: str) -> bool:
        """Whether it has said that its model's tokenizer is the one of this digest."""
        return self.info is not None and vocabulary in (self.info.vocabulary, self.info.tokenizer)

    def tells_another(self, vocabulary: str) -> bool:
        """Whether it has said that its model's tokenizer is another than the one of this digest."""
        return self.info is not None and self.info.vocabulary != "" and not self.tells(vocabulary)

    def has_answered(self, number: int) -> bool:
        """Whether the probe of that number, counted from 1, has ended, or a later one."""
        return self.answered >= number

    async def tell_probed(self) -> None:
        """The newest probe has ended, and what it found is known to the pool."""
        async with self.probed:
            self.answered = self.probes
            self.probed.notify_all()

    def hold(self, tokens: int, on_lost: Callable[[str], None]) -> Hold:
        hold = Hold(self, tokens, on_lost)
        self.holds.add(hold)
        self._loads[self.url] = self._loads.get(self.url, Load()).plus(1, tokens)
        return hold

    def release(self, hold: Hold, tokens: int) -> None:
        if hold in self.holds:
            self.holds.discard(hold)
            self._loads[self.url] = self._loads[self.url].plus(-1, -tokens)
            if not self.listed:
                self.wake.set()  # lets the watch end with the last request

    def endpoint(self) -> Endpoint:
        assert self.info is not None
        transfer = self.info.transfer
        mode = transfer.mode if transfer.ready else UNPAIRED
        kv = self.info.kv
        adapters = frozenset(adapter.digest for adapter in self.info.adapters)
        return Endpoint(
            self.url,
            self.info.fingerprint,
            mode,
            transfer.epoch,
            kv.block_size,
            kv.usable_blocks,
            adapters,
            self.info.tokenizer,
            self.info.begins_early,
            kv.max_model_len,
        )

    def has_room(self, tokens: int) -> bool:
        """Whether it will reserve for `tokens` more at once, as `policy.has_room` means it."""
        if self.info is None or not self.routable:
            return False
        load, outstanding = self.info.load, self._loads.get(self.url, Load())
        return has_room(self.endpoint(), outstanding, tokens, usage=load.kv_usage)

    def known(self) -> tuple[Endpoint, int, tuple[AdapterInfo, ...]] | None:
        """What the fleet shows of this engine; None: it takes no requests."""
        if not self.routable or self.info is None:
            return None
        return self.endpoint(), self.info.kv.max_model_len, self.info.adapters
