"""Makes the scheduled faults happen, and undoes them."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from disk import Disk, disk_bytes, enter, forget_pages
from fleet import Fleet, Member
from load import REQUEST_TIMEOUT_S
from names import NameServer
from network import Network
from room import FullDisk
from schedule import Fault

READY_S = 60.0
_LARGE, _CROWD = 6, 50
_LARGE_BODY = json.dumps({"model": "test", "prompt": "word " * 1_500_000, "max_tokens": 1}).encode()
_SLOW_DISK, _SLOW_START = 4 << 10, 1 << 20
"""Bytes a second: none to speak of, and some seconds for a tokenizer."""
_DRAIN_S = 15.0
_FULL_S = 3.0
"""How long a member serves beside a full disk."""
_JUMPS = (-26 * 3600, -3600, -2, 2, 3600, 26 * 3600)
"""Seconds, ahead or behind."""


class Broken(Exception):
    """A member did not do what it must."""


@dataclass(slots=True)
class Event:
    """A fault that happened. Times are time.time(); `ended` is when the victim was well again."""

    fault: Fault
    began: float
    healed: float = 0.0
    ended: float = 0.0


class Injector:
    """Runs a schedule. Its own failures, and members that do not come back, are in `problems`."""

    def __init__(self, fleet: Fleet, disk: Disk | None) -> None:
        self._disk = disk
        self.names: NameServer | None = None
        self.large_bodies: Counter[int | str] = Counter()
        """How those ended that were sent to members without memory."""
        self.given_up = 0
        """Members that a want of memory has ended."""
        self._full: list[tuple[FullDisk, Member]] = []
        self.events: list[Event] = []
        self.problems: list[str] = []
        self._fleet = fleet
        self._busy: dict[str, asyncio.Lock] = {}
        self._hog = Path(__file__).with_name("pool_hog.py")

    async def run(self, faults: list[Fault]) -> None:
        """Start each fault at its time; returns when the last has ended."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(max(0.0, fault.start_s - (time.monotonic() - began)))
                group.create_task(self._one(fault))

    async def _one(self, fault: Fault) -> None:
        # A victim of an earlier fault that still starts again is left alone until it is well.
        async with self._busy.setdefault(fault.target, asyncio.Lock()):
            event = Event(fault, time.time())
            self.events.append(event)
            print(f"    {fault}", flush=True)
            await self._happen(fault, event)

    async def _happen(self, fault: Fault, event: Event) -> None:
        try:
            await getattr(self, "_" + fault.kind.replace(" ", "_").replace("-", "_"))(fault, event)
        except (Broken, RuntimeError, OSError, TimeoutError) as error:
            self.problems.append(f"{fault}: {error}")
        event.ended = time.time()
        event.healed = event.healed or event.ended

    # ---------------------------------------------------------------------------------------------------- processes

    async def _kill(self, fault: Fault, event: Event) -> None:
        member = self._fleet.member[fault.target]
        if member.popen.poll() is not None:
            self.problems.append(f"{fault.target} had ended by itself with status {member.popen.returncode}")
        event.began = time.time()
        member.send(signal.SIGKILL)
        await asyncio.to_thread(member.popen.wait, 10)
        await self._start_again(fault, event)

    async def _drain(self, fault: Fault, event: Event) -> None:
        member = self._fleet.member[fault.target]
        member.send(signal.SIGTERM)
        try:
            status = await asyncio.to_thread(member.popen.wait, _DRAIN_S)
        except Exception as error:
            member.popen.kill()
            await asyncio.to_thread(member.popen.wait, 10)
            raise Broken(f"{fault.target} did not end within {_DRAIN_S:g} s of SIGTERM") from error
        finally:
            if member.popen.poll() is not None:
                await self._start_again(fault, event)
        if status != 0:
            raise Broken(f"{fault.target} ended with status {status} after SIGTERM")

    async def _start_again(self, fault: Fault, event: Event, prefix: Sequence[str] = ()) -> None:
        await asyncio.sleep(fault.seconds)
        event.healed = time.time()
        self._fleet.member[fault.target].start(prefix)
        await self.ready(fault.target)

    async def ready(self, name: str) -> None:
        """Until the member takes requests. An engine that cannot start for want of its master is started again."""
        end = time.monotonic() + READY_S
        member = self._fleet.member[name]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while time.monotonic() < end:
                if not member.alive:
                    if self._fleet.mode != "store" or name not in self._fleet.engines:
                        raise Broken(f"{name} ended with status {member.popen.returncode} while starting")
                    member.start()
                if await self._answers(session, name):
                    member.disk = disk_bytes(member.popen.pid)
                    return
                await asyncio.sleep(0.1)
        raise Broken(f"{name} is not ready {READY_S:g} s after its start")

    async def _answers(self, session: aiohttp.ClientSession, name: str) -> bool:
        try:
            if name == "master":
                _, writer = await asyncio.open_connection(self._fleet.host(name), self._fleet.port[name])
                writer.close()
                return True
            async with session.get(self._fleet.url(name) + "/ready") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _freeze(self, fault: Fault, event: Event) -> None:
        member = self._fleet.member[fault.target]
        member.send(signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        member.send(signal.SIGCONT)

    async def _log_disk(self, fault: Fault, event: Event) -> None:
        member = self._fleet.member[fault.target]
        member.writable.clear()
        await asyncio.sleep(fault.seconds)
        member.writable.set()

    async def _few_descriptors(self, fault: Fault, event: Event) -> None:
        pid = self._fleet.member[fault.target].popen.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        # The bound is on the number that a descriptor gets, the lowest free one: a closed one may be opened again.
        highest = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(highest + 1, before[1]), before[1]))
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            with suppress(ProcessLookupError):  # the victim of another fault meanwhile
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    async def _little_memory(self, fault: Fault, event: Event) -> None:
        member = self._fleet.member[fault.target]
        pid = member.popen.pid
        before = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (_address_space(pid), before[1]))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(fault.seconds))
                for _ in range(_LARGE if fault.target != "master" else 0):
                    group.create_task(self._large_body(fault))
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_AS, before)
        event.healed = time.time()
        if member.popen.poll() is None and await self._is_well(fault.target):
            return
        # Who cannot go on must end, or say that it is not well: then it is started again, as by a kubelet.
        self.given_up += 1
        member.send(signal.SIGKILL)
        await asyncio.to_thread(member.popen.wait, 10)
        member.start()
        await self.ready(fault.target)

    async def _crowd(self, fault: Fault, event: Event) -> None:
        """It has to live through it, and to be calm again when they are gone."""
        popen = self._fleet.member[fault.target].popen
        await asyncio.gather(*(self._large_body(fault) for _ in range(_CROWD)))
        end = time.monotonic() + READY_S
        while await self._memory(fault.target) != "calm":
            if popen.poll() is not None or time.monotonic() > end:
                self.problems.append(f"{fault}: its memory is not calm again, status {popen.poll()}")
                return
            await asyncio.sleep(0.1)

    async def _memory(self, name: str) -> str:
        """How near to its limit it says that it is; empty where it says nothing."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(self._fleet.url(name) + "/health") as answer:
                    return str((await answer.json())["memory"])
        return ""

    async def _large_body(self, fault: Fault) -> None:
        """Ask for memory: what a process has free already would do for the requests of the load."""
        path = "/v1/completions" if fault.target == "router" else "/internal/prefill"
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                async with session.post(self._fleet.url(fault.target) + path, data=_LARGE_BODY) as answer:
                    self.large_bodies[answer.status] += 1
            except TimeoutError:
                self.problems.append(f"{fault}: a large body got no answer in {REQUEST_TIMEOUT_S:g} s")
            except (aiohttp.ClientError, OSError):
                self.large_bodies["connection ended"] += 1

    async def _is_well(self, name: str) -> bool:
        """Whether it says that it is healthy; that of the master nobody knows."""
        if name == "master":
            return True
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            try:
                async with session.get(self._fleet.url(name) + "/health") as answer:
                    return answer.status == 200
            except (aiohttp.ClientError, OSError, TimeoutError):
                return False

    async def _clock_jump(self, fault: Fault, event: Event) -> None:
        assert self._fleet.clocks is not None
        self._fleet.clocks.set(fault.target, _JUMPS[int(fault.seconds * 1000) % len(_JUMPS)])
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            self._fleet.clocks.set(fault.target, 0)

    async def _no_names(self, fault: Fault, event: Event) -> None:
        assert self.names is not None
        self.names.failing[fault.target] = ("silent", "servfail")[int(fault.seconds * 1000) % 2]
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            del self.names.failing[fault.target]

    async def _full_disk(self, fault: Fault, event: Event) -> None:
        member = self._fleet.member[fault.target]
        member.send(signal.SIGKILL)
        await asyncio.to_thread(member.popen.wait, 10)
        disk = FullDisk(self._fleet.model.with_name(f"{fault.target}-full-{len(self._full)}"))
        self._full.append((disk, member))
        try:
            await self._start_again(fault, event, disk.entering())
            await asyncio.sleep(_FULL_S)
        finally:
            disk.free()

    def keep_logs(self) -> None:
        """What members logged on disks that were full."""
        for disk, member in self._full:
            disk.keep_log(member.log)

    async def _slow_disk(self, fault: Fault, event: Event) -> None:
        assert self._disk is not None
        pid = self._fleet.member[fault.target].popen.pid
        group = self._disk.group(fault.target, _SLOW_DISK)
        self._disk.put(pid, group)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            self._disk.put(pid, None)
            self._disk.remove(group)

    async def _slow_start(self, fault: Fault, event: Event) -> None:
        assert self._disk is not None
        member = self._fleet.member[fault.target]
        group = self._disk.group(fault.target, _SLOW_START)  # first: without one, nobody would start it again
        try:
            member.send(signal.SIGKILL)
            await asyncio.to_thread(member.popen.wait, 10)
            forget_pages(self._fleet.model)
            await self._start_again(fault, event, enter(group))
        finally:
            self._disk.put(member.popen.pid, None)
            self._disk.remove(group)

    # ------------------------------------------------------------------------------------------------------ network

    @property
    def _network(self) -> Network:
        assert self._fleet.network is not None
        return self._fleet.network

    async def _isolate(self, fault: Fault, event: Event) -> None:
        others = [name for name in self._fleet.names if name != fault.target]
        await asyncio.to_thread(self._network.cut, fault.target, others)
        await self._heal_after(fault)

    async def _cut(self, fault: Fault, event: Event) -> None:
        await asyncio.to_thread(self._network.cut, fault.target, [fault.peer])
        await self._heal_after(fault)

    async def _one_way_cut(self, fault: Fault, event: Event) -> None:
        await asyncio.to_thread(lambda: self._network.cut(fault.target, [fault.peer], both_ways=False))
        await self._heal_after(fault)

    async def _reset(self, fault: Fault, event: Event) -> None:
        await asyncio.to_thread(self._network.start_reset, fault.target)
        await self._heal_after(fault)

    async def _throttle(self, fault: Fault, event: Event) -> None:
        await asyncio.to_thread(self._network.throttle, fault.target, 64 if fault.seconds < 4 else 256)
        await self._heal_after(fault)

    async def _delay(self, fault: Fault, event: Event) -> None:
        delay_ms = int(20 + fault.seconds * 1000 % 280)
        proxy = await asyncio.to_thread(self._network.start_delay, fault.target, delay_ms, 200)
        try:
            # Only new connections go through the proxy, so the old ones end here.
            await asyncio.to_thread(self._network.start_reset, fault.target)
            await asyncio.sleep(0.1)
            await asyncio.to_thread(self._network.stop_reset, fault.target)
            await self._heal_after(fault)
        finally:
            proxy.kill()
            await asyncio.to_thread(proxy.communicate)

    async def _heal_after(self, fault: Fault) -> None:
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            await asyncio.to_thread(self._network.heal, fault.target)

    # ------------------------------------------------------------------------------------------------------- pool

    async def _full_store(self, fault: Fault, event: Event) -> None:
        await self._hog_the_pool("fill", fault.seconds)

    async def _evicting_store(self, fault: Fault, event: Event) -> None:
        await self._hog_the_pool("churn", fault.seconds)

    async def _hog_the_pool(self, what: str, seconds: float) -> None:
        argv = [sys.executable, str(self._hog), self._fleet.here, self._fleet.address("master"), what, str(seconds)]
        null = asyncio.subprocess.DEVNULL
        hog = await asyncio.create_subprocess_exec(*argv, stdout=null, stderr=null)
        try:
            async with asyncio.timeout(seconds + 20):
                await hog.wait()
        except TimeoutError:
            pass  # the master is the victim of another fault
        finally:
            if hog.returncode is None:
                hog.kill()
                await hog.wait()

    async def free_the_pool(self) -> None:
        """Remove what a hog that lost its master may have left."""
        argv = [sys.executable, str(self._hog), self._fleet.here, self._fleet.address("master"), "free", "0"]
        null = asyncio.subprocess.DEVNULL
        hog = await asyncio.create_subprocess_exec(*argv, stdout=null, stderr=null)
        async with asyncio.timeout(30):
            if await hog.wait():
                self.problems.append("the pool could not be freed of what filled it")


def _address_space(pid: int) -> int:
    """Bytes that a process has mapped."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
