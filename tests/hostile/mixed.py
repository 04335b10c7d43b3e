"""Everything that is dear, at random and at once, from several addresses, beside an honest client: `--mode mixed`.

A client sends one of the bodies after another: some it leaves in the midst, some answers it reads slowly. What others
wait, what the process takes, and what is left when all have gone is read from outside.
"""

from __future__ import annotations

import gzip
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import log2
from pathlib import Path
from typing import Any

from holding import engine, settled_mib
from measuring import Server, status_kib
from pairs import Dear
from places import Place, places
from search import MOST_BYTES
from values import families, largest, written

CLIENTS, EACH = 8, 4
"""Addresses, and requests that each has at once."""
_PATIENCE_S = 20.0
_SMALL_FIELDS = 3
"""At most, beside what is dear."""
LATE = 0.05
"""Share of others' requests that may wait longer than `watcher.LATE_S`, or be refused."""
_OTHERS, _OTHERS_BYTES = 2, 1 << 16
"""What others have at a time."""
KEPT_MIB = 64.0
"""What a process may have more when all have gone."""


@dataclass(frozen=True)
class Body:
    """One of those that are sent."""

    name: str
    path: str
    packed: bytes


def bodies(dear: Sequence[Dear], count: int, r: random.Random) -> list[Body]:
    """`count` of them: what is dear, mostly at the size that was dearest, one or two of an endpoint together, with a
    few other fields at their largest."""
    found: list[Body] = []
    of: dict[str, list[Dear]] = {}
    numbers: dict[str, list[Place]] = {}
    for one in dear:
        of.setdefault(path := one.place.endpoint.path, []).append(one)
        if path not in numbers:
            numbers[path] = [p for p in places(one.place.endpoint) if p.kind in ("integer", "boolean")]
    while len(found) < count:
        first = r.choice(dear)
        endpoint = first.place.endpoint
        chosen = [first, *r.sample(of[endpoint.path], k=r.randint(0, 1))]
        small = numbers[endpoint.path]
        fields = r.sample(small, k=min(len(small), r.randint(0, _SMALL_FIELDS)))
        names: list[str] = []
        body: dict[str, Any] | None = None
        try:
            for one in chosen:
                size = max(1, int(one.size * r.choice((1.0, 1.0, r.random()))))
                value = families(one.place)[one.family](size, r)
                body = one.place.body(value) if body is None else one.place.put(body, value)
                names.append(f"{one.name}={size}")
            assert body is not None
            for field in fields:
                field.put(body, value := r.choice(largest(field)))
                names.append(f"{'.'.join(field.path)}={value}")
            raw = written(body)
        except (ValueError, RecursionError, OverflowError, TypeError, KeyError, IndexError):
            continue
        if raw and len(raw) <= MOST_BYTES:
            level = 6 if len(raw) < 1 << 20 else 2
            found.append(Body(" + ".join(names), endpoint.path, gzip.compress(raw, level, mtime=0)))
    return found


@dataclass
class Mixed:
    """What came of it."""

    seed: int
    seconds: float
    requests: int
    statuses: Mapping[int, int]
    """0: none; 1: the client left; 2: it waits for its turn when all is over."""
    limit_mib: int
    base_mib: float
    peak_mib: float
    stays_mib: float
    gap_s: float
    others_s: float
    others_wall_s: float
    asked: int
    late: int
    refused: int
    """Of other clients' requests."""
    books: int
    running: int
    """Bytes by the books, and requests at the engine, when all have gone."""
    engines: Mapping[str, int]
    """MiB, of each at most."""
    tracebacks: int
    unanswered: tuple[str, ...]
    """Requests that had no answer, or the answer that there was a fault."""

    @property
    def flags(self) -> str:
        """The bars that it is over."""
        over = (
            ("killed", bool(self.limit_mib) and self.peak_mib > self.limit_mib),
            ("late", self.late > LATE * max(20, self.asked)),
            ("refused", self.refused > LATE * max(20, self.asked)),
            ("stays", self.stays_mib > KEPT_MIB),
            ("books", self.books > _OTHERS_BYTES),
            ("running", self.running > _OTHERS),
            ("tracebacks", self.tracebacks != 0),
            ("unanswered", bool(self.unanswered)),
        )
        return ",".join(name for name, is_over in over if is_over)

    def json(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "flags": self.flags}

    def __str__(self) -> str:
        return (
            f"mixed seed={self.seed} {self.seconds:.0f} s, {self.requests} requests {dict(self.statuses)} "
            f"peak={self.peak_mib:.0f} of {self.limit_mib} base={self.base_mib:.0f} stays={self.stays_mib:.0f} "
            f"gap={self.gap_s:.2f} others={self.others_s:.2f}/{self.others_wall_s:.2f} asked={self.asked} "
            f"late={self.late} refused={self.refused} books={self.books} running={self.running} "
            f"tracebacks={self.tracebacks} engines={dict(self.engines)} {self.flags}"
            + "".join(f"\n  {one}" for one in self.unanswered[:9])
        )


def _send(port: int, host: str, body: Body, r: random.Random, until: float) -> int:
    """One request: its status, as of `Mixed`."""
    manner = r.random()
    leaves = time.monotonic() + r.random() * 3 if manner < 0.15 else until + _PATIENCE_S
    slowly = 0.15 <= manner < 0.3
    head = (
        f"POST {body.path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
        f"Content-Length: {len(body.packed)}\r\nConnection: close\r\n\r\n"
    )
    status = 0
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 10, source_address=(host, 0)) as connection:
        if slowly:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        with suppress(OSError):  # refused by its head, which is said before all of it is read
            connection.sendall(head.encode() + body.packed)
        connection.settimeout(0.2)
        while True:
            now = time.monotonic()
            if now > leaves:
                return 1 if manner < 0.15 else status or 2
            if slowly and now > until:
                slowly = False
            try:
                data = connection.recv(256 if slowly else 1 << 18)
            except TimeoutError:
                continue
            if not data:
                return status
            if not status:
                status = int(data[9:12])
            if slowly:
                time.sleep(0.02)
    return status


def mixed(server: Server, behind: int, what: Sequence[Body], *, seconds: float, seed: int, limit_mib: int) -> Mixed:
    """Send them for so long."""
    trim = Path(f"{server.books}.trim")
    trim.touch()
    base = settled_mib(server)
    trim.unlink()
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")
    server.tell("reset")
    until = time.monotonic() + seconds
    statuses: Counter[int] = Counter()
    unanswered: list[str] = []

    def client(number: int) -> None:
        r = random.Random(f"{seed} {number}")
        while time.monotonic() < until:
            body = r.choice(what)
            status = _send(server.port, f"127.0.1.{1 + number % CLIENTS}", body, r, until)
            statuses[status] += 1
            if status in (0, 500):
                unanswered.append(f"{status} {body.name}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS * EACH)]
    for thread in threads:
        thread.start()
    r = random.Random(f"{seed} engine")
    while time.monotonic() < until and server.popen.poll() is None:
        time.sleep(0.5)
        if behind:
            engine(behind, r.choice(("go", "go", "go", "later", "hold")))
            time.sleep(0.3)
            engine(behind, "go")
    told = server.tell("tell") if server.popen.poll() is None else {}
    for thread in threads:
        thread.join()
    peak = status_kib(server.pid, "VmHWM") / 1024
    ended = server.popen.poll() is not None
    trim.touch()
    stays = 0.0 if ended else settled_mib(server) - base
    time.sleep(1.5)
    running = engine(behind, "go") if behind else sum(one.requests() for one in server.engines if not ended)
    engines = {one.role: status_kib(one.popen.pid, "VmHWM") >> 10 for one in server.engines}
    trim.unlink()
    log = "".join(file.read_text() for file in server.log.parent.glob("*.log"))
    others = [told[name] for name in ("short", "long") if name in told]
    return Mixed(
        seed=seed,
        seconds=seconds,
        requests=statuses.total(),
        statuses=dict(sorted(statuses.items())),
        limit_mib=limit_mib,
        base_mib=base,
        peak_mib=peak,
        stays_mib=stays,
        gap_s=told["gap"][1] if told else -1.0,
        others_s=max((one[1] for one in others), default=-1.0),
        others_wall_s=max((one[0] for one in others), default=-1.0),
        asked=sum(one[3] for one in others),
        late=sum(one[4] for one in others),
        refused=sum(one[2] for one in others),
        books=server.held(),
        running=running,
        engines=engines,
        tracebacks=log.count("Traceback (most recent"),
        unanswered=("the server has ended",) * ended + tuple(unanswered),
    )


def of_rows(rows: Sequence[Mapping[str, Any]], of: Mapping[str, Any], r: random.Random, most: int) -> list[Dear]:
    """What to draw from: of each id of a search the largest that was answered and the dearest that was not."""
    best: dict[tuple[str, bool], Mapping[str, Any]] = {}
    for row in rows:
        key = row["id"], row["status"] == 200
        if row["id"] in of and (key not in best or _dear(row) > _dear(best[key])):
            best[key] = row
    chosen = sorted(best.values(), key=_dear, reverse=True)
    return [Dear(*of[row["id"]], row["size"]) for row in [*chosen[:most], *r.sample(chosen, min(most, len(chosen)))]]


def _dear(row: Mapping[str, Any]) -> float:
    """More of anything: seconds, a tenth of a gibibyte, a megabyte of an answer."""
    return float(row["cpu_s"] + 4 * row["gap_s"] + row["peak_mib"] / 100 + row["answer"] / (1 << 20))


def without_rows(of: Mapping[str, Any], r: random.Random, most: int, up_to: int = 1 << 22) -> list[Dear]:
    """The same without a search: any place at any size up to `up_to`."""
    names = [name for name, (place, _) in of.items() if place.kind not in ("boolean", "literal")]
    return [Dear(*of[name], int(2 ** r.uniform(2, log2(up_to)))) for name in r.choices(names, k=2 * most)]


def write(file: Path, what: Sequence[Body]) -> None:
    """The names of what is sent, to look at."""
    file.write_text("".join(json.dumps([body.name, body.path, len(body.packed)]) + "\n" for body in what))
