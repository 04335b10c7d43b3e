"""One run: service up, storm, calm, checks, service down, report."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import aiohttp
import clock
from disk import Disk, controller
from faults import Injector
from fleet import Fleet
from load import Load
from names import NameServer
from network import HUB, Network
from processes import BIN, MODEL
from schedule import plan
from verdict import Remains, Report, judge, processes_left

_SETTLE_S = {"direct": 30.0, "store": 100.0}
"""In store mode prefill removes the keys of attempts whose decode was lost a minute after their timeout."""


def main(argv: list[str], *, network: bool) -> int:
    """Exit status of the run."""
    parser = argparse.ArgumentParser(prog="run_storm.py", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of faults and requests; default: a new one, printed")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--mode", choices=["direct", "store"], default="direct")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--out", type=Path, default=None, help="folder for logs and the report; default: a new one")
    parser.add_argument("--crc", action="store_true", help="engines check a checksum of every prompt's KV")
    parser.add_argument(
        "--only", default="", help="comma-separated kinds of faults, to look for the cause of something"
    )
    parser.add_argument("--plan", action="store_true", help="print the schedule and end")
    args = parser.parse_args(argv)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    out = args.out or Path(tempfile.mkdtemp(prefix=f"isthmus-chaos-{seed}-"))
    out.mkdir(parents=True, exist_ok=True)
    if args.plan:
        names = Fleet(out, args.mode, None).names
        able = _able(args.mode, network=network, disk=controller() is not None)
        print("\n".join(map(str, plan(seed, args.minutes * 60, names, able, _kinds(args)))))
        return 0
    print(f"chaos: make chaos SEED={seed} MINUTES={args.minutes:g} MODE={args.mode}    logs in {out}", flush=True)
    return asyncio.run(_run(args, seed, out, network))


def _kinds(args: argparse.Namespace) -> list[str]:
    return [word.strip() for word in args.only.split(",") if word.strip()]


def _able(mode: str, *, network: bool, disk: bool) -> list[str]:
    """What kinds of faults may need, of this machine and mode."""
    had = {"network": network, "disk": disk, "clock": clock.able(), "store": mode == "store"}
    return [name for name, has in had.items() if has]


async def _run(args: argparse.Namespace, seed: int, out: Path, with_network: bool) -> int:
    report = Report()
    mode, seconds = args.mode, args.minutes * 60
    names = [*(["master"] if mode == "store" else []), "prefill0", "prefill1", "decode0", "decode1", "router"]
    network = Network(names) if with_network else None
    root = controller()
    if root is None:
        print("chaos: NO SLOW DISK: it needs a control group hierarchy for block devices", file=sys.stderr)
    disk = None if root is None else Disk(root, [out, MODEL, BIN])
    if not clock.able():
        print("chaos: NO CLOCK JUMPS: they need a C compiler", file=sys.stderr)
    fleet = Fleet(out, mode, network, ["--transfer-crc"] if args.crc else [], clocks=clock.able())
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        if network is not None:
            network.up()
        fleet.copy_model()
        await _storm(fleet, seed, args, report, out, disk)
    except (OSError, aiohttp.ClientError) as error:
        # A member that ends while its remains are looked at is what the report is for.
        report.violations.append(
            f"the storm was not judged to its end: {error!r}; ended by themselves: {fleet.ended()}"
        )
    finally:
        statuses = fleet.close()
        if disk is not None:
            disk.down()
        if network is not None:
            processes_left(fleet, report, network)
            network.down()
    report.row("exit statuses", statuses)
    ours = {n: s for n, s in statuses.items() if n != "master" and s != 0}
    if ours:
        report.violations.append(f"ended with a status other than 0: {ours}")
    print(f"chaos: seed {seed}, {seconds / 60:g} min, {mode}\n{report.text()}", flush=True)
    body = {"seed": seed, "mode": mode, "seconds": seconds, "rows": report.rows, "violations": report.violations}
    (out / "report.json").write_text(json.dumps(body, indent=1))
    return 1 if report.violations else 0


async def _storm(
    fleet: Fleet, seed: int, args: argparse.Namespace, report: Report, out: Path, disk: Disk | None
) -> None:
    seconds = args.minutes * 60
    injector, remains = Injector(fleet, disk), Remains(fleet)
    load = Load(fleet.url("router"), seed, args.rate)
    if fleet.network is not None:
        injector.names = NameServer(fleet.network.address)
        await injector.names.start(HUB)
    for name in fleet.names:
        fleet.member[name].start()
        if name == "master":
            await injector.ready(name)
    for name in (*fleet.engines, "router"):
        await injector.ready(name)
    for outcome in await load.some(24):
        if outcome.ending != "ok" or outcome.problem:
            report.violations.append(f"before the storm: {outcome.ending} {outcome.problem} {outcome.error}")
    before = remains.descriptors()

    able = _able(fleet.mode, network=fleet.network is not None, disk=disk is not None)
    faults = plan(seed, seconds, fleet.names, able, _kinds(args))
    stop = asyncio.Event()
    loading = asyncio.create_task(load.run(stop))
    began = time.monotonic()
    await injector.run(faults)
    await asyncio.sleep(max(0.0, seconds - (time.monotonic() - began)))
    stop.set()
    await loading

    for name in fleet.names:
        await _well(injector, name)
    if fleet.mode == "store":
        await injector.free_the_pool()
    await remains.settle(_SETTLE_S[fleet.mode], report, "after the storm")
    # Mooncake may still have connections in its pool that a fault has broken: the first write on one fails.
    await load.some(24)
    after = len(load.outcomes)
    recovered = await load.some(12)
    for outcome in recovered:
        if outcome.ending != "ok" or outcome.problem:
            report.violations.append(f"after the storm: {outcome.ending} {outcome.problem} {outcome.error}")
    await remains.settle(20.0, report, "at the end")
    with (out / "requests.jsonl").open("w") as lines:
        for outcome in load.outcomes:
            lines.write(json.dumps(asdict(outcome)) + "\n")
    judge(load.outcomes[:after], injector.events, fleet, report, load.lag_s)
    report.violations.extend(injector.problems)
    await remains.descriptors_settle(before, report, 60.0, lambda: load.some(4))
    remains.disk(report)
    kinds = sorted({e.fault.kind for e in injector.events})
    report.row(
        "faults",
        f"{len(injector.events)}: "
        + ", ".join(f"{sum(e.fault.kind == k for e in injector.events)} {k}" for k in kinds),
    )
    report.row("large bodies to members without memory", dict(injector.large_bodies) or "none")
    report.row("members without memory that were started again", injector.given_up)
    if injector.names is not None:
        report.row("names asked for in vain", injector.names.unanswered)
    injector.keep_logs()
    async with aiohttp.ClientSession() as session:
        samples = await remains.samples(session, "router")
        report.row("transfers that ended early, by stage", dict(await remains.stages(session)))
    report.row(
        "router since its last start",
        ", ".join(
            f"{key.removeprefix('isthmus_router_')} {samples[key]:g}"
            for key in (
                "isthmus_router_retries_total",
                "isthmus_router_leg_failures_total",
                "isthmus_router_prompts_total",
            )
        ),
    )


async def _well(injector: Injector, name: str) -> None:
    try:
        await injector.ready(name)
    except Exception as error:
        injector.problems.append(f"{name} after the storm: {error}")


if __name__ == "__main__":
    sys.exit("run tests/chaos/run_storm.py")
