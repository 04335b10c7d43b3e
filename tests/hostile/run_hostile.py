"""What is the dearest request? A search over every field of every public endpoint: `make hostile`.

    python tests/hostile/run_hostile.py --kind router --task generate [--only TEXT] [--seconds 400] [--out FILE]

A row is one body: its id says where in it the value is and of which family, and `--only ID` sends its sizes again.
Costs are read from outside. Where others use the machine, bars on time count processor time of the server alone
(watcher.py). `--mode pairs` puts the dearest rows of a search (`--rows`) together with each other field, `held` looks
at what they hold while they wait for an engine (`later`: after their first token), `crowd` sends many of each at once,
and `mixed` everything at random. Exit status 1: a row is over a
bar twice in a row.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import holding  # noqa: E402
import mixed  # noqa: E402
from measuring import Cost, Server, serving  # noqa: E402
from pairs import Dear, dearest, pairs, tried  # noqa: E402
from places import ENDPOINTS, Place, places  # noqa: E402
from search import Row, body_of, search  # noqa: E402
from values import families  # noqa: E402

MODEL = Path(os.environ.get("ISTHMUS_CACHE", "~/.cache/isthmus")).expanduser() / "models/smollm2-135m-instruct"
_AGAIN_S = 2.0


def confirmed(server: Server, place: Place, row: Row, seed: int) -> Row:
    """The same once more, where it was over a bar; the cheaper of both."""
    family = row.id.rpartition("/")[2]
    raw = body_of(place, family, row.size, seed)
    time.sleep(_AGAIN_S)
    again = Row(row.id, row.size, server.measure(place.endpoint.path, raw, packed=True))
    cheaper(again, row.cost)
    return again


def cheaper(row: Row, other: Cost) -> None:
    """`row` with the less of both costs: what else the machine does is no request's."""
    for name in ("gap_s", "cpu_s", "others_s", "peak_mib", "stays_mib", "refused"):
        setattr(row.cost, name, min(getattr(row.cost, name), getattr(other, name)))


def table(rows: list[Row]) -> str:
    """The dearest first, by each measure."""
    lines = []
    for title, key in (
        ("loop gap, s", lambda r: r.cost.gap_s),
        ("CPU, s", lambda r: r.cost.cpu_s),
        ("CPU, s a kB sent", lambda r: r.cost.cpu_s / max(0.1, r.cost.wire / 1000) if r.cost.cpu_s > 0.1 else 0),
        ("others wait, s", lambda r: r.cost.others_s),
        ("peak, MiB", lambda r: r.cost.peak_mib),
        ("stays, MiB", lambda r: r.cost.stays_mib),
    ):
        lines.append(f"--- {title}")
        seen: set[str] = set()
        for row in sorted(rows, key=key, reverse=True):
            if row.id in seen or len(seen) == 6:
                continue
            seen.add(row.id)
            lines.append(f"{key(row):9.3f}  {line(row)}")
    return "\n".join(lines)


def line(row: Row) -> str:
    """A row."""
    c = row.cost
    return (
        f"{row.id} n={row.size} {c.status} body={c.body} wire={c.wire} answer={c.answer} "
        f"wall={c.wall_s:.2f} cpu={c.cpu_s:.2f} beside={c.beside_s:.2f} gap={c.gap_s:.3f} "
        f"others={c.others_s:.2f}/{c.others_wall_s:.2f} "
        f"peak={c.peak_mib:.0f} stays={c.stays_mib:.0f} {row.flags}"
    )


def chosen(task: str, only: str) -> list[tuple[Place, str]]:
    """Places and families."""
    found = []
    for endpoint in ENDPOINTS:
        if endpoint.task != task:
            continue
        for place in places(endpoint):
            for family in families(place):
                if any(one in f"{place.name}/{family}" for one in only.split(",")):
                    found.append((place, family))
    return found


def begun(args: argparse.Namespace) -> list[Dear]:
    """The dearest of a search."""
    of = {f"{place.name}/{family}": (place, family) for place, family in chosen(args.task, "")}
    rows = [row for row in holding.read(args.rows) if args.only.partition(" + ")[0] in row["id"]]
    return dearest(rows, of, args.most)


def started(args: argparse.Namespace, folder: str, **more: Any) -> Any:
    """The server."""
    settings = dict(kind=args.kind, task=args.task, max_model_len=args.max_model_len, text=args.text)
    settings["executor"] = args.executor
    return serving(Path(folder), args.model, **settings, processors=args.processors, **more)


def keep(args: argparse.Namespace, rows: Iterable[Any]) -> None:
    """In the file."""
    if args.out is not None:
        with args.out.open("a") as out:
            out.writelines(json.dumps(row.json()) + "\n" for row in rows)


def in_pairs(args: argparse.Namespace) -> int:
    """Two fields at once."""
    until, rows, left = time.monotonic() + args.seconds, [], 0
    done = set() if args.out is None else {row["id"] for row in holding.read(args.out)}
    wanted = [one for one in pairs(begun(args)) if args.only in one[0] and one[0] not in done]
    random.Random(args.seed).shuffle(wanted)
    with tempfile.TemporaryDirectory() as folder, started(args, folder) as (server, _):
        for name, make, size, dear in wanted:
            if time.monotonic() > until:
                left += 1
                continue
            send = partial(server.measure, dear.place.endpoint.path, packed=True)
            mine = list(tried(name, make, size, send))
            for row in mine:
                if row.flags:
                    time.sleep(_AGAIN_S)
                    cheaper(row, send(make(row.size)))
                if row.flags:
                    print(f"OVER {line(row)} {row.cost.said[:200]}", flush=True)
            rows += mine
            keep(args, mine)
    print(table(rows))
    print(f"{len(rows)} requests, {left} left")
    return int(any(row.flags for row in rows))


def holding_many(args: argparse.Namespace) -> int:
    """What is held while requests wait."""
    until, left, over = time.monotonic() + args.seconds, 0, False
    when = "later" if args.mode == "later" else "hold"
    done = set() if args.out is None else {row["id"] for row in holding.read(args.out)}
    with tempfile.TemporaryDirectory() as folder, started(args, folder) as (server, behind):
        for dear in begun(args):
            if time.monotonic() > until or dear.name in done:
                left += dear.name not in done
                continue
            raw = body_of(dear.place, dear.family, dear.size, args.seed)
            found = holding.held(server, behind, dear.name, dear.place.endpoint.path, raw, gzip.compress(raw, 6), when)
            print(found, flush=True)
            keep(args, [found])
            over |= bool(found.flags)
    print(f"{left} left")
    return int(over)


def in_crowds(args: argparse.Namespace) -> int:
    """Many of the same at once, where memory is short."""
    over = False
    rows = [row for row in holding.read(args.rows) if args.only in row["id"]]
    of = {f"{place.name}/{family}": (place, family) for place, family in chosen(args.task, "")}
    best: dict[str, Any] = {}
    for row in sorted(rows, key=lambda row: -row["peak_mib"]):
        if row["id"] in of:
            best.setdefault(row["id"], row)
    with tempfile.TemporaryDirectory() as folder, started(args, folder, limit_mib=args.limit_mib) as (server, _):
        for name, row in list(best.items())[: args.most]:
            place, family = of[name]
            sent = gzip.compress(body_of(place, family, row["size"], args.seed), 6)
            found = holding.crowd(server, name, place.endpoint.path, sent, count=args.crowd, limit_mib=args.limit_mib)
            print(f"{found} wire={len(sent)}", flush=True)
            keep(args, [found])
            over |= bool(found.flags)
    return int(over)


def in_a_mixture(args: argparse.Namespace) -> int:
    """Everything at once."""
    r, over = random.Random(args.seed), False
    of = {f"{place.name}/{family}": (place, family) for place, family in chosen(args.task, args.only)}
    until = time.monotonic() + args.seconds
    for seed in range(args.seed, args.seed + args.most):
        if time.monotonic() > until - 60:
            break
        r = random.Random(seed)
        dear = mixed.of_rows(holding.read(args.rows), of, r, 80) if args.rows else mixed.without_rows(of, r, 80)
        what = mixed.bodies(dear, args.bodies, r)
        with (
            tempfile.TemporaryDirectory() as folder,
            started(args, folder, limit_mib=args.limit_mib) as (server, behind),
        ):
            found = mixed.mixed(server, behind, what, seconds=args.mixed, seed=seed, limit_mib=args.limit_mib)
            print(found, flush=True)
            if found.tracebacks or found.flags:
                print(server.log.read_text()[-3000:], flush=True)
        keep(args, [found])
        over |= bool(found.flags)
    return int(over)


def main() -> int:
    """0: nothing is over a bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("router", "unified", "pair"), default="router")
    parser.add_argument("--task", choices=("generate", "embed", "score"), default="generate")
    parser.add_argument("--only", default="", help="rows whose id has this in it, or one of several with commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="K/N: the K-th of N parts of all")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--executor", choices=("fake", "torch"), default="fake", help="of unified engines and pairs")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--out", type=Path, help="all rows as lines of JSON, appended; ids that it has are left out")
    parser.add_argument("--mode", choices=("search", "pairs", "held", "later", "crowd", "mixed"), default="search")
    parser.add_argument("--rows", type=Path, help="of a search before: what pairs, held and crowd begin with")
    parser.add_argument("--most", type=int, default=6, help="of its dearest, by each measure")
    parser.add_argument("--text", action="store_true", help="the engine behind a router takes texts")
    parser.add_argument(
        "--processors", type=int, default=0, help="that the server believes to have; a node's, in a pod"
    )
    parser.add_argument("--limit-mib", type=int, default=1024, help="of crowd")
    parser.add_argument("--mixed", type=float, default=60.0, help="seconds of a mixture; --most of them, a seed each")
    parser.add_argument("--bodies", type=int, default=100, help="of a mixture, made before it begins")
    parser.add_argument("--crowd", type=int, default=24, help="requests at once")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers have sessions of their own, and end with us
    print(f"hostile: seed {args.seed}", flush=True)
    if args.mode != "search":
        modes = {
            "pairs": in_pairs,
            "held": holding_many,
            "later": holding_many,
            "crowd": in_crowds,
            "mixed": in_a_mixture,
        }
        return modes[args.mode](args)
    wanted = chosen(args.task, args.only)
    part, of = map(int, args.part.split("/"))
    wanted = wanted[part::of]
    random.Random(args.seed).shuffle(wanted)
    if args.out is not None and args.out.exists():
        done = {row["id"] for row in holding.read(args.out)}
        wanted = [(place, family) for place, family in wanted if f"{place.name}/{family}" not in done]
    until = time.monotonic() + args.seconds
    rows: list[Row] = []
    left = 0
    with tempfile.TemporaryDirectory() as folder, started(args, folder) as (server, _):
        for place, family in wanted:
            if time.monotonic() > until:
                left += 1
                continue
            send = partial(server.measure, place.endpoint.path, packed=True)
            mine = []
            for found in search(place, family, send, args.seed):
                row = confirmed(server, place, found, args.seed) if found.flags else found
                if row.flags:
                    print(f"OVER {line(row)} {row.cost.said[:200]}", flush=True)
                mine.append(row)
                if server.popen.poll() is not None:
                    print(f"ENDED by {line(row)}\n{server.log.read_text()[-2000:]}")
                    return 1
            rows += mine
            keep(args, mine)
    print(table(rows))
    print(f"{len(rows)} requests, {len(wanted) - left} of {len(wanted)} searches, {left} left")
    return int(any(row.flags for row in rows))


if __name__ == "__main__":
    sys.exit(main())
