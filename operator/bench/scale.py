"""`make bench-operator`: the operator with hundreds of services, on a real API server, in one run on one machine.

etcd, API server, controller manager and scheduler are real; kwok plays the pods; all answer /info like an engine. The
operator is its own process with its documented rights, its lease and its default settings. What it wrote and when is
read from the API server's audit log. Exit status 1 when a bar is missed.

    python operator/bench/scale.py [--services 500] [--steady 100] [--rate 0.5] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "cluster"), str(Path(__file__).parent)]

from audit import AuditLog, Request, counted  # noqa: E402
from testcluster import cli, cluster, settings  # noqa: E402
from testcluster.binaries import MissingBinariesError  # noqa: E402
from world import API, USER, Client, Operator, Pods, call_webhook, furnish, own_address, until  # noqa: E402

NAMESPACES = [f"team{number}" for number in range(10)]
NODES = 2
QUIET_S = 10.0
IDLE_S = 60.0
SETTLE_S = 5.0
TOUCHED = 20
APPLY_BAR_S = 2.0
MEMORY_BAR_MIB = 350.0
RESYNC_BAR_S = 30.0
PATIENCE_S = 1800.0
Key = tuple[str, str]
Object = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. `bar`: what `value` must be at most; None for what is only told."""

    what: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def passed(self) -> bool:
        return self.bar is None or self.value <= self.bar


def manifest(key: Key) -> Object:
    """A service of two engine roles and a router, with nothing special."""
    return {
        "apiVersion": "serving.isthmus.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": key[1], "namespace": key[0]},
        "spec": {
            "model": {"source": {"hostPath": {"path": "/models/m"}}},
            "engine": {"image": "none.invalid/engine:1"},
            "roles": {"prefill": {}, "decode": {}},
            "router": {"image": "none.invalid/router:1"},
        },
    }


class Bench:
    """One run: the phases in order, each adding rows."""

    def __init__(self, api: Client, operator: Operator, audit: AuditLog) -> None:
        self.api = api
        self.operator = operator
        self.audit = audit
        self.sent: dict[Key, float] = {}
        self.created: dict[Key, dict[str, float]] = {}
        self.rows: list[Row] = []
        self.details: Object = {}

    def add(self, what: str, value: float, unit: str, bar: float | None = None) -> None:
        row = Row(what=what, value=round(value, 3), unit=unit, bar=bar)
        self.rows.append(row)
        self.show(row)

    def show(self, row: Row) -> None:
        verdict = "" if row.bar is None else f"<= {row.bar:g}  {'ok' if row.passed else 'MISSED'}"
        print(f"{row.what:<66}{row.value:>10g} {row.unit:<6}{verdict}", flush=True)

    def read(self) -> list[Request]:
        """The operator's news, and from them which children there are."""
        news = self.audit.news()
        for request in news:
            if request.creates:
                times = self.created.setdefault(request.service, {})
                times[f"{request.resource}/{request.name}"] = request.at
        return news

    async def apply(self, number: int) -> Key:
        """One service, and when it was asked for."""
        key = NAMESPACES[number % len(NAMESPACES)], f"s{number}"
        self.sent[key] = time.time()
        await self.api("POST", f"{API}/namespaces/{key[0]}/inferenceservices", manifest(key))
        return key

    async def all_ready(self, count: int) -> bool:
        self.read()
        found = await self.operator.metrics()
        return found.get('isthmus_operator_services{ready="true"}', 0) >= count

    async def reconciles(self) -> float:
        found = await self.operator.metrics()
        return sum(value for name, value in found.items() if name.startswith("isthmus_operator_reconciles_total"))

    async def quiet(self) -> None:
        """Until the operator has written nothing for a while."""
        last = time.monotonic()

        def silent() -> bool:
            nonlocal last
            if any(request.writes for request in self.read()):
                last = time.monotonic()
            return time.monotonic() - last > QUIET_S

        await until(silent, PATIENCE_S, "the operator writes on and on")

    def children(self) -> int:
        """How many children a service has: as many as most have."""
        return Counter(len(times) for times in self.created.values()).most_common(1)[0][0]

    def delays(self, keys: Iterable[Key]) -> list[float]:
        """From the request that made a service to its last child, of each."""
        count = self.children()
        found = []
        for key in keys:
            times = sorted(self.created.get(key, {}).values())
            if len(times) < count:
                raise SystemExit(f"{'/'.join(key)} has {len(times)} children, others {count}")
            found.append(times[count - 1] - self.sent[key])
        return found

    # ---------------------------------------------------------------------------------------------------- phases

    async def burst(self, count: int) -> None:
        """All at once."""
        begin, cpu, before = time.monotonic(), self.operator.cpu_s(), await self.reconciles()
        numbers = iter(range(count))

        async def worker() -> None:
            for number in numbers:
                await self.apply(number)

        await asyncio.gather(*(worker() for _ in range(8)))
        self.add(f"burst: {count} services accepted by the API server", time.monotonic() - begin, "s")
        await until(lambda: self.all_ready(count), PATIENCE_S, "not all services are ready")
        total = time.monotonic() - begin
        await self.quiet()
        last = max(max(times.values()) for times in self.created.values())
        self.add(f"burst: all {count * self.children()} children created", last - min(self.sent.values()), "s")
        self.add("burst: all services ready", total, "s")
        done = await self.reconciles() - before
        spent = self.operator.cpu_s() - cpu
        self.add("burst: CPU time of the operator", spent, "s")
        self.add("burst: CPU time per service", spent / count * 1e3, "ms")
        self.add("burst: CPU time per reconcile", spent / done * 1e3, "ms")
        self.add("burst: reconciles per service", done / count, "")

    async def idle(self) -> None:
        """A minute in which nothing happens, so that every service is looked at once or so."""
        await self.quiet()
        cpu, before = self.operator.cpu_s(), await self.reconciles()
        await asyncio.sleep(IDLE_S)
        requests = self.read()
        done = await self.reconciles() - before
        spent = self.operator.cpu_s() - cpu
        writes = [request for request in requests if request.writes]
        self.details["idle"] = counted(requests)
        self.add(f"idle for {IDLE_S:.0f} s: writes", len(writes), "", 0)
        self.add("idle: reads and lease renewals", len(requests) - len(writes), "")
        self.add("idle: reconciles", done, "")
        self.add("idle: CPU time per reconcile", spent / max(1.0, done) * 1e3, "ms")
        self.add("idle: CPU of the operator", spent / IDLE_S * 100, "%")

    async def touch(self) -> None:
        """Pods turn unready and ready again, and children get a foreign label: status writes per event."""
        await self.quiet()
        pods = await self.api.metadata("/api/v1/pods")
        first: dict[Key, Object] = {}
        for pod in pods:
            if pod["labels"].get("serving.isthmus.dev/role") == "decode":
                first.setdefault((pod["namespace"], pod["labels"]["serving.isthmus.dev/service"]), pod)
        chosen = dict(list(first.items())[:TOUCHED])
        worst = 0
        for status in ("False", "True"):
            for pod in chosen.values():
                body = {"status": {"conditions": [{"type": "Ready", "status": status}]}}
                path = f"/api/v1/namespaces/{pod['namespace']}/pods/{pod['name']}/status"
                await self.api("PATCH", path, body, **{"Content-Type": "application/strategic-merge-patch+json"})
            writes = await self.status_writes(len(chosen))
            worst = max(worst, *writes.values())
        self.add("status writes per pod that turns unready or ready, at most", worst, "", 1)
        for namespace, name in chosen:
            path = f"/api/v1/namespaces/{namespace}/services/{name}-decode"
            body = {"metadata": {"annotations": {"note": "x"}}}
            await self.api("PATCH", path, body, **{"Content-Type": "application/merge-patch+json"})
        await asyncio.sleep(SETTLE_S)
        writes = [request for request in self.read() if request.writes]
        self.add("writes per child that got a foreign annotation", len(writes) / len(chosen), "", 0)

    async def status_writes(self, expected: int) -> Counter[Key]:
        """Per service, until each was written and some time after."""
        found: Counter[Key] = Counter()

        def written() -> bool:
            for request in self.read():
                if request.writes and request.subresource == "status":
                    found[request.service] += 1
            return len(found) >= expected

        await until(written, 60, f"{expected} status writes")
        await asyncio.sleep(SETTLE_S)
        written()
        return found

    async def steady(self, first: int, count: int, rate: float) -> None:
        """One service after another while the others exist."""
        await self.quiet()
        cpu, before = self.operator.cpu_s(), await self.reconciles()
        begin = time.monotonic()
        keys = []
        for number in range(count):
            await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))
            keys.append(await self.apply(first + number))
        await until(lambda: self.all_ready(first + count), PATIENCE_S, "not all services are ready")
        await self.quiet()
        done = await self.reconciles() - before
        spent = self.operator.cpu_s() - cpu
        delays = sorted(self.delays(keys))
        self.details["steady"] = {"rate": rate, "seconds": delays}
        self.add(f"steady, {rate:g} a second: apply -> all children, p50", statistics.median(delays), "s")
        ninety_nine = statistics.quantiles(delays, n=100, method="inclusive")[98]
        self.add(f"steady, {rate:g} a second: apply -> all children, p99", ninety_nine, "s", APPLY_BAR_S)
        self.add(f"steady, {rate:g} a second: apply -> all children, worst", delays[-1], "s")
        self.add("steady: CPU time per reconcile", spent / done * 1e3, "ms")

    async def restart(self, count: int) -> None:
        """SIGTERM, then a new process."""
        await self.quiet()
        before = await self.versions()
        await self.operator.stop()
        self.read()
        begin = time.monotonic()
        self.operator.start()
        ready = await until(self.operator.ready, 120, "the operator watches")

        async def looked() -> bool:
            found = await self.operator.metrics()
            done = found.get('isthmus_operator_reconciles_total{result="done"}', 0)
            return done >= count and found["isthmus_operator_queue_depth"] == 0

        await until(looked, 600, "every service was looked at")
        self.add("restart: until it watches everything", ready, "s")
        self.add("restart: until every service was looked at", time.monotonic() - begin, "s", RESYNC_BAR_S)
        self.add("restart: CPU time of the operator until then", self.operator.cpu_s(), "s")
        await asyncio.sleep(SETTLE_S)
        writes = [request for request in self.read() if request.writes]
        self.details["restart"] = counted(writes)
        self.add("restart: writes", len(writes), "", 0)
        after = await self.versions()
        changed = {uid for uid in before.keys() | after.keys() if before.get(uid) != after.get(uid)}
        self.add(f"restart: of {len(before)} pods and Deployments, changed", len(changed), "", 0)

    async def versions(self) -> dict[str, tuple[str, int]]:
        """uid -> resource version and generation."""
        found = [*await self.api.metadata("/api/v1/pods"), *await self.api.metadata("/apis/apps/v1/deployments")]
        return {one["uid"]: (one["resourceVersion"], one.get("generation", 0)) for one in found}

    def memory(self, when: str, count: int) -> None:
        self.add(f"memory {when}, {count} services: now", self.operator.memory_mib("VmRSS"), "MiB", MEMORY_BAR_MIB)
        self.add(f"memory {when}, {count} services: peak", self.operator.memory_mib("VmHWM"), "MiB", MEMORY_BAR_MIB)


async def run(arguments: argparse.Namespace) -> int:
    ours = settings.load()
    cli.sweep(ours)
    pods = Pods(own_address())
    answers = not arguments.silent and bool(pods.address) and await pods.start()
    if not answers and not arguments.silent:
        print(f"ports 8000 and 8001 of {pods.address or 'this machine'} are taken: no pod answers", file=sys.stderr)
    folder = cli.session_folder(ours, "bench")
    try:
        plane = cluster.start_control_plane(ours, folder, follow=True, pod_address=pods.address if answers else "")
    except MissingBinariesError as error:
        print(f"bench-operator: {error}", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="bench-operator-") as scratch:
            kubeconfig = await asyncio.to_thread(furnish, plane, Path(scratch), NODES, NAMESPACES)
            port = await asyncio.to_thread(call_webhook, plane, Path(scratch))
            return await measure(arguments, plane, kubeconfig, port, Path(scratch))
    finally:
        pods.stop()
        await asyncio.to_thread(plane.close)


async def measure(
    arguments: argparse.Namespace, plane: cluster.Cluster, kubeconfig: Path, webhook_port: int, scratch: Path
) -> int:
    assert plane.folder is not None
    count = arguments.services
    async with Client(plane) as api:
        operator = Operator(kubeconfig, scratch, webhook_port, api.session)
        bench = Bench(api, operator, AuditLog(plane.folder / "audit.log", USER))
        operator.start()
        try:
            await until(operator.ready, 120, "the operator watches")
            path = f"{API}/namespaces/{NAMESPACES[0]}/inferenceservices?dryRun=All"
            body = manifest((NAMESPACES[0], "first"))
            await until(lambda: api.accepts("POST", path, body), 60, "the webhook answers")
            await bench.burst(count)
            bench.memory("after the burst", count)
            await bench.idle()
            await bench.touch()
            await bench.steady(count, arguments.steady, arguments.rate)
            every = count + arguments.steady
            bench.memory("of the first process", every)
            await bench.restart(every)
            bench.memory("after the restart", every)
        finally:
            await operator.stop()
            complaints = operator.complaints()
            for line in complaints[:20]:
                print(line, file=sys.stderr)
    bench.add("warnings and errors in the operator's log", len(complaints), "", 0)
    missed = [row for row in bench.rows if not row.passed]
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"\n{platform.platform()}, {os.cpu_count()} CPUs, load {load}; {len(missed)} of the bars missed")
    if arguments.json:
        report = {
            "machine": platform.platform(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "rows": [asdict(row) | {"passed": row.passed} for row in bench.rows],
            **bench.details,
        }
        arguments.json.write_text(json.dumps(report, indent=1))
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="The operator at scale")
    parser.add_argument("--services", type=int, default=500)
    parser.add_argument("--steady", type=int, default=100, help="services applied one by one beside them")
    parser.add_argument("--rate", type=float, default=0.5, help="of those, how many a second")
    parser.add_argument("--silent", action="store_true", help="no pod answers when the operator asks it about itself")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
