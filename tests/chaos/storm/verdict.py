"""What must hold during and after a storm, and the report."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from descriptors import Descriptors
from disk import disk_bytes
from faults import Event
from fleet import Fleet
from load import Outcome
from network import Network

ANSWER_S = 1.0
"""From detection to the client's answer."""
_NEVER_MET = "[Errno 111]"
"""Connection refused: the request came to its engine only after that had gone. Until then it waited for another one,
such as for decode's reservation, so its time from the kill says nothing of how soon a loss is noticed."""
_STAGE = re.compile(r'^isthmus_xfer_failures_total{.*stage="(\w+)".*} (\S+)$', re.MULTILINE)
_IDLE_HTTP = 16
"""Connections between the router and an engine: idle ones are used again."""
_LANES = 4
"""Mooncake's connections to a peer, each way. Those to a process that is gone it keeps, and nobody can end them."""
_MASTER = 8
"""Mooncake's connections to the master."""
_HIDDEN_FROM_CLIENTS = ("clock jump", "no names", "log disk", "slow disk")
"""Faults of a router that break no connection with its clients."""
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (WARNING|ERROR) isthmus_runtime\.router\.pool: (.*)$")


@dataclass(slots=True)
class Report:
    """Counts and violations of one run."""

    violations: list[str] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)

    def row(self, name: str, value: object) -> None:
        self.rows.append((name, str(value)))

    def text(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        lines = [f"  {name:<{width}}  {value}" for name, value in self.rows]
        lines += [f"  VIOLATION: {v}" for v in self.violations[:40]]
        return "\n".join([*lines, f"  {len(self.violations)} violations"])


# ---------------------------------------------------------------------------------------------------------- requests


def judge(outcomes: Sequence[Outcome], events: Sequence[Event], fleet: Fleet, report: Report, lag_s: float) -> None:
    """Every request ended once, in time, with the right tokens or an answer that says where it failed."""
    endings = Counter(o.ending for o in outcomes)
    report.row("requests", len(outcomes))
    report.row("endings", ", ".join(f"{n} {k}" for k, n in endings.most_common()))
    statuses = Counter(f"{o.status} {o.error.get('code')}" for o in outcomes if o.error and o.ending != "lost")
    report.row("failure answers", ", ".join(f"{n} x {k}" for k, n in statuses.most_common()) or "none")
    report.row("stages", dict(Counter(o.error["stage"] for o in outcomes if o.error.get("stage"))))
    left = Counter(o.ask.leaves for o in outcomes if o.ending == "left")
    report.row("clients that left", ", ".join(f"{n} {k}" for k, n in left.most_common()) or "none")
    times = sorted(o.ended - o.began for o in outcomes if o.ending == "ok")
    if times:
        report.row("seconds to a whole answer", _spread(times))
    report.row("longest pause of this process", f"{lag_s:.2f} s")
    routers_gone = [
        (e.began, e.ended) for e in events if e.fault.target == "router" and e.fault.kind not in _HIDDEN_FROM_CLIENTS
    ]
    for o in outcomes:
        where = f"request {o.ask.index} ({o.ending} after {o.ended - o.began:.1f} s)"
        if o.problem:
            report.violations.append(f"{where}: {o.problem}")
        if o.ending == "hung":
            report.violations.append(f"{where}: no end within its bound")
        if o.ending in ("lost", "broken") and not any(b <= o.ended and o.began <= e + 0.5 for b, e in routers_gone):
            report.violations.append(f"{where}: connection lost while the router was well: {o.error.get('message')}")
        if o.error and o.ending in ("refused", "failed"):
            if not (o.error.get("stage") and o.error.get("attempt")):
                report.violations.append(f"{where}: no stage or attempt in {o.error}")
            if o.ending == "refused" and o.status not in (429, 500, 502, 503, 504):
                report.violations.append(f"{where}: HTTP {o.status} {o.error}")
    _answer_times(outcomes, events, fleet, report, lag_s)


def _answer_times(
    outcomes: Sequence[Outcome], events: Sequence[Event], fleet: Fleet, report: Report, lag_s: float
) -> None:
    """From the router's word that it lost an engine (or from the kill itself) to the answers that say the same."""
    noticed: list[float] = []
    killed: list[float] = []
    said = _router_words(fleet)
    for o in outcomes:
        message = o.error.get("message", "")
        if o.ending not in ("refused", "failed"):
            continue
        for name in fleet.engines:
            if fleet.url(name) not in message:
                continue
            before = [t for t, line in said if fleet.url(name) in line and o.began <= t <= o.ended + 0.1]
            # The last word: a request that had not been sent when it was lost may have waited, and met it once more.
            if before and "answered nothing for" in message:
                noticed.append(o.ended - before[-1])
            kills = [e.began for e in events if e.fault.kind == "kill" and e.fault.target == name]
            since = [o.ended - t for t in kills if o.began <= t <= o.ended]
            if since and _NEVER_MET not in message:
                killed.append(since[-1])
    limit = ANSWER_S + lag_s
    for name, times in (("engine found silent to answer", noticed), ("kill -9 to answer", killed)):
        report.row(name, _spread(sorted(times)) if times else "no such answer")
        late = [t for t in times if t > limit]
        if late:
            report.violations.append(f"{name}: {len(late)} over {limit:.2f} s, worst {max(late):.2f} s")


def _router_words(fleet: Fleet) -> list[tuple[float, str]]:
    found = []
    for line in fleet.member["router"].log.read_text(errors="replace").splitlines():
        if match := _STAMP.match(line):
            stamp = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S")) + int(match[2]) / 1e3
            if "silent for" in match[4]:  # the others are of single requests, or suspicions
                found.append((stamp, match[4]))
    return found


def _spread(times: Sequence[float]) -> str:
    def at(share: float) -> float:
        return times[min(len(times) - 1, int(share * len(times)))]

    return f"{len(times)}: p50 {at(0.5):.3f}, p90 {at(0.9):.3f}, p99 {at(0.99):.3f}, max {times[-1]:.3f} s"


# ------------------------------------------------------------------------------------------------------- what is left


class Remains:
    """What the service still holds."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def settle(self, seconds: float, report: Report, when: str) -> None:
        """Until nothing is held; what still is after `seconds` are violations."""
        began = time.monotonic()
        left: list[str] = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while True:
                left = await self.left(session)
                if not left or time.monotonic() - began > seconds:
                    break
                await asyncio.sleep(0.5)
        report.row(f"settled {when}", f"{time.monotonic() - began:.1f} s")
        report.violations.extend(f"{when}, after {seconds:g} s: {what}" for what in left)

    async def left(self, session: aiohttp.ClientSession) -> list[str]:
        """What is held now, in words."""
        found: list[str] = []
        for name in (*self._fleet.engines, "router"):
            try:
                found += await self._of(session, name)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                found.append(f"{name} does not answer: {error!r}")
        if self._fleet.mode == "store":
            try:
                keys = await self.scoped_keys(session)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                found.append(f"master does not answer: {error!r}")
            else:
                if keys:
                    found.append(f"{len(keys)} keys of single attempts are in the pool, first {keys[0]}")
        return found

    async def _of(self, session: aiohttp.ClientSession, name: str) -> list[str]:
        async with session.get(self._fleet.url(name) + "/info") as answer:
            info: dict[str, Any] = await answer.json()
        samples = await self.samples(session, name)
        if name == "router":
            held = {"requests": info["requests"], "in flight": samples["isthmus_router_requests_in_flight"]}
            held |= {f"requests at {e['url']}": e["requests"] for e in info["engines"]}
        else:
            held = {key: info[key] for key in ("running", "waiting")}
            held["kv usage"] = samples["isthmus_kv_cache_usage_ratio"]
            held["quarantined blocks"] = samples["isthmus_quarantined_blocks"]
            held["transfer legs"] = samples["isthmus_xfer_legs"]
        return [f"{name}: {what} is {value:g}" for what, value in held.items() if value]

    async def samples(self, session: aiohttp.ClientSession, name: str) -> Counter[str]:
        """Sums of the samples of each metric."""
        async with session.get(self._fleet.url(name) + "/metrics") as answer:
            text = await answer.text()
        sums: Counter[str] = Counter()
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            if head and not line.startswith("#"):
                sums[head.partition("{")[0]] += float(value)  # type: ignore[assignment]
        return sums

    async def stages(self, session: aiohttp.ClientSession) -> Counter[str]:
        """At which stage transfers ended early, on either side, since the engines' last starts."""
        found: Counter[str] = Counter()
        for name in self._fleet.engines:
            async with session.get(self._fleet.url(name) + "/metrics") as answer:
                for stage, count in _STAGE.findall(await answer.text()):
                    found[stage] += int(float(count))
        return found

    async def scoped_keys(self, session: aiohttp.ClientSession) -> list[str]:
        """Keys in the pool that belong to one attempt, or to the start of an engine."""
        async with session.get(self._fleet.master_metrics + "/get_all_keys") as answer:
            keys = (await answer.text()).split()
        return sorted(key for key in keys if ":partial:" in key or key.startswith(("record:", "probe:")))

    def disk(self, report: Report) -> None:
        """What our processes had to do with the disk since they became ready: they write nothing, ever."""
        members = [self._fleet.member[name] for name in (*self._fleet.engines, "router")]
        moved = {m.name: tuple(a - b for a, b in zip(disk_bytes(m.popen.pid), m.disk, strict=True)) for m in members}
        report.row("disk bytes since ready", ", ".join(f"{n} {r} read {w} written" for n, (r, w) in moved.items()))
        report.violations.extend(f"{n} wrote {w} bytes to a disk" for n, (_, w) in moved.items() if w)

    def descriptors(self) -> dict[str, Descriptors]:
        """What each of our processes has open."""
        return {name: self._fleet.descriptors(name) for name in (*self._fleet.engines, "router")}

    async def descriptors_settle(
        self,
        before: Mapping[str, Descriptors],
        report: Report,
        seconds: float,
        some: Callable[[], Awaitable[object]],
    ) -> None:
        """Until each process has open what it had at first, and connections to those that are there. What it has
        beside after `seconds` has leaked."""
        end = time.monotonic() + seconds
        while True:
            now = self.descriptors()
            leaked = leaks(before, now, self._fleet)
            if not leaked or time.monotonic() > end:
                break
            await asyncio.sleep(2)
            await some()
        report.row("descriptors, before and after", ", ".join(f"{n} {before[n].total}/{now[n].total}" for n in now))
        report.violations.extend(leaked)


def _kinds(mine: Descriptors) -> Counter[str]:
    """Files by name; of a process that was started anew, /proc has its files by another number."""
    found = Counter[str]()
    for kind, count in mine.others.items():
        found[re.sub(r"^/proc/\d+/", "/proc/N/", kind)] += count
    return found


def leaks(before: Mapping[str, Descriptors], now: Mapping[str, Descriptors], fleet: Fleet) -> list[str]:
    """Descriptors that nothing accounts for, in words."""
    found: list[str] = []
    for name, mine in now.items():
        # Mooncake makes its event loops on first use, which an engine may not have had by then; the others did.
        alike = fleet.engines if name in fleet.engines else [name]
        for kind, count in _kinds(mine).items():
            if count > (had := max(_kinds(before[other])[kind] for other in alike)):
                found.append(f"{name} has {count} of {kind}, at first {had}")
        by_peer = Counter(c.peer for c in mine.connections) if fleet.network is not None else {}
        for peer, count in by_peer.items():
            if count > (limit := _limit(name, peer, now, fleet)):
                states = dict(Counter(c.state for c in mine.connections if c.peer == peer))
                found.append(f"{name} has {count} connections with {peer}, {limit} can be accounted for: {states}")
    return found


def _limit(name: str, peer: str, now: Mapping[str, Descriptors], fleet: Fleet) -> int:
    """Connections that `name` may have with `peer`."""
    if "router" in (name, peer) and peer in now:
        # Both ends are there, or a process has one that nobody else knows of.
        return min(_IDLE_HTTP, _between(now[peer], name))
    if peer in fleet.engines:
        gone = sum(end > fleet.member[name].started for end in fleet.member[peer].ends)
        return 2 * _LANES + _LANES * gone
    return _MASTER if peer == "master" else 0


def _between(mine: Descriptors, peer: str) -> int:
    return sum(c.peer == peer for c in mine.connections)


def processes_left(fleet: Fleet, report: Report, network: Network) -> None:
    """Whether anything still runs where the members ran; it is ended here."""
    left = {name: pids for name in fleet.names if (pids := network.pids(name))}
    report.row("processes left", left or "none")
    if left:
        report.violations.append(f"processes are left: {left}")
    for pid in (pid for pids in left.values() for pid in pids):
        os.kill(pid, signal.SIGKILL)
