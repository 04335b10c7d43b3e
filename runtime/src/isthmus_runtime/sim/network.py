"""HTTP calls between client, router and engines in virtual time, with what a network does to them.

An exchange is one request and its streamed answer. Each direction keeps its order, as TCP does; between exchanges
anything may overtake anything. A request may be lost (the caller sees a connection error), delivered twice (a proxy
that retried; the copy's answer goes nowhere and its connection closes some time later), or delayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .clock import Clock

LOST_AFTER_S = 0.4
"""When the caller of a lost request learns that its connection broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFaults:
    """Probabilities (0 to 1) per message."""

    lose: float = 0.0
    """A request never arrives; its caller gets a connection error."""
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.5
    reset: float = 0.0
    """A connection breaks while a line of the answer is on its way."""


class Server(Protocol):
    """Whoever answers calls."""

    up: bool

    def serve(self, exchange: Exchange, body: object) -> None:
        """Handle one request; answer through the exchange."""


class Exchange:
    """One request and its answer. `on_item` and `on_end` belong to the caller, `on_close` to the server."""

    __slots__ = ("_down_at", "_net", "_on_end", "_on_item", "_up_at", "client_open", "on_close", "server_open")

    def __init__(self, net: Network, on_item: Callable[[object], None], on_end: Callable[[str], None]) -> None:
        self._net = net
        self._on_item = on_item
        self._on_end = on_end
        self.on_close: Callable[[], None] | None = None
        self.client_open = True
        self.server_open = True
        self._down_at = self._up_at = 0.0

    def push(self, item: object) -> None:
        """Server: one line of the answer."""
        if not self.server_open:
            return
        self._down(lambda: self._on_item(item))
        if self._net.clock.chance(self._net.faults.reset):
            self._net.clock.note("net", "connection reset")
            self.end("connection reset")
            if self.on_close is not None:
                self._net.clock.after(self._net.latency(), self.on_close)

    def end(self, problem: str = "") -> None:
        """Server: the answer is over; `problem` when the connection broke instead."""
        if not self.server_open:
            return
        self.server_open = False
        self._down(lambda: self._ended(problem))

    def close(self) -> None:
        """Caller: hang up. Nothing is delivered to the caller any more."""
        if not self.client_open:
            return
        self.client_open = False

        def arrive() -> None:
            if self.server_open:
                self.server_open = False
                if self.on_close is not None:
                    self.on_close()

        self._up_at = max(self._up_at, self._net.clock.now + self._net.latency())
        self._net.clock.at(self._up_at, arrive)

    def fail(self, problem: str, delay_s: float) -> None:
        """Network: the request never arrived."""
        self.server_open = False
        self._net.clock.after(delay_s, lambda: self._ended(problem))

    def _ended(self, problem: str) -> None:
        if self.client_open:
            self.client_open = False
            self._on_end(problem)

    def _down(self, deliver: Callable[[], None]) -> None:
        clock = self._net.clock

        def arrive() -> None:
            if self.client_open:
                deliver()

        self._down_at = max(self._down_at, clock.now + self._net.latency())
        clock.at(self._down_at, arrive)


class Network:
    """Names of processes and the calls between them."""

    def __init__(self, clock: Clock, faults: NetworkFaults) -> None:
        self.clock = clock
        self.faults = faults
        self.servers: dict[str, Server] = {}

    def latency(self) -> float:
        """One way, seconds."""
        late = self.faults.delay_s if self.clock.chance(self.faults.delay) else 0.0
        return 0.0002 + 0.001 * self.clock.random.random() + late * self.clock.random.random()

    def call(
        self,
        name: str,
        body: object,
        on_item: Callable[[object], None],
        on_end: Callable[[str], None],
        *,
        reliable: bool = False,
    ) -> Exchange:
        """Send a request to the process `name`. `reliable`: neither lost nor doubled (a client's own connection)."""
        exchange = Exchange(self, on_item, on_end)
        if not reliable and self.clock.chance(self.faults.lose):
            self.clock.note("net", "lost", type(body).__name__, "to", name)
            exchange.fail("connection timed out", LOST_AFTER_S)
            return exchange
        self._deliver(name, exchange, body)
        if not reliable and self.clock.chance(self.faults.duplicate):
            self.clock.note("net", "doubled", type(body).__name__, "to", name)
            copy = Exchange(self, lambda item: None, lambda problem: None)
            self._deliver(name, copy, body)
            self.clock.after(self.clock.random.random() * 2 * self.faults.delay_s, copy.close)
        return exchange

    def _deliver(self, name: str, exchange: Exchange, body: object) -> None:
        def arrive() -> None:
            server = self.servers.get(name)
            if server is None or not server.up:
                exchange.end("connection refused")
            elif exchange.server_open:
                server.serve(exchange, body)

        # A hang-up never overtakes its own request.
        exchange._up_at = self.clock.now + self.latency()
        self.clock.at(exchange._up_at, arrive)


def peer_url(name: str) -> str:
    """A process's name as the address of a peer, as calls between engines must have it; empty for none."""
    return f"http://[{name.encode().hex()}]:1" if name else ""


def peer_name(url: str) -> str:
    """The name in such an address."""
    return bytes.fromhex(url[len("http://[") : -len("]:1")]).decode()
