"""What must hold during and after a storm, and the report."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from faults import Event
from fleet import Fleet
from load import Outcome
from network import Network

ANSWER_S = 1.0
"""From detection to the client's answer."""
_GROWTH = 16
"""Descriptors a process may have more than at first: idle connections."""
_KEPT = 6
"""Descriptors that an engine may keep for each restart of another."""
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (WARNING|ERROR) isthmus_runtime\.router\.pool: (.*)$")
_LEGS = ("kv_transfer_failed", "engine_failed")


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
    times = sorted(o.ended - o.began for o in outcomes if o.ending == "ok")
    if times:
        report.row("seconds to a whole answer", _spread(times))
    report.row("longest pause of this process", f"{lag_s:.2f} s")
    routers_gone = [(e.began, e.ended) for e in events if e.fault.target == "router"]
    for o in outcomes:
        where = f"request {o.ask.index} ({o.ending} after {o.ended - o.began:.1f} s)"
        if o.problem:
            report.violations.append(f"{where}: {o.problem}")
        if o.ending == "hung":
            report.violations.append(f"{where}: no end within its bound")
        if o.ending in ("lost", "broken") and not any(b <= o.ended and o.began <= e + 0.5 for b, e in routers_gone):
            report.violations.append(f"{where}: connection lost while the router was well: {o.error.get('message')}")
        if o.error and o.ending in ("refused", "failed"):
            if o.error.get("code") in _LEGS and not (o.error.get("stage") and o.error.get("attempt")):
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
            if before and "answered nothing for" in message:
                noticed.append(o.ended - before[0])
            kills = [e.began for e in events if e.fault.kind == "kill" and e.fault.target == name]
            since = [o.ended - t for t in kills if o.began <= t <= o.ended]
            if since:
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

    async def scoped_keys(self, session: aiohttp.ClientSession) -> list[str]:
        """Keys in the pool that belong to one attempt."""
        async with session.get(self._fleet.master_metrics + "/get_all_keys") as answer:
            keys = (await answer.text()).split()
        return sorted(key for key in keys if ":partial:" in key or key.startswith("record:"))

    def descriptors(self) -> dict[str, int]:
        """Open descriptors of each of our processes."""
        return {name: self._fleet.member[name].descriptors for name in (*self._fleet.engines, "router")}

    async def descriptors_settle(
        self,
        before: dict[str, int],
        restarts: int,
        report: Report,
        seconds: float,
        some: Callable[[], Awaitable[object]],
    ) -> None:
        """Idle connections close after half a minute, when there are requests; what is left then has leaked.

        Mooncake keeps its pooled connections to an engine that ended, in CLOSE-WAIT: a few for each restart.
        """
        allowed = {n: _GROWTH + (0 if n == "router" else _KEPT * restarts) for n in before}
        end = time.monotonic() + seconds
        while True:
            now = self.descriptors()
            grown = {n: now[n] - before[n] for n in now if now[n] > before[n] + allowed[n]}
            if not grown or time.monotonic() > end:
                break
            await asyncio.sleep(2)
            await some()
        report.row("descriptors, before and after", ", ".join(f"{n} {before[n]}/{now[n]}" for n in now))
        for name, more in grown.items():
            held = self._fleet.sockets(name)
            report.violations.append(f"{name} has {more} descriptors more than at first; its connections: {held}")


def processes_left(fleet: Fleet, report: Report, network: Network) -> None:
    """Whether anything still runs where the members ran; it is ended here."""
    left = {name: pids for name in fleet.names if (pids := network.pids(name))}
    report.row("processes left", left or "none")
    if left:
        report.violations.append(f"processes are left: {left}")
    for pid in (pid for pids in left.values() for pid in pids):
        os.kill(pid, signal.SIGKILL)
