"""kv_swap beside its peers and the measured link: `make bench-kernels [ARGS='--json FILE --quick']`.

Peers, over the same ids: cudaMemcpyBatchAsync of every fragment, a loop of cudaMemcpyAsync, and a gather (scatter) on
the GPU with one copy of consecutive host blocks. Every row is checked for exactness before it is timed.
GB/s: bytes over the time between events on the device, the median of several runs; the device is busy with something
else for the first 4 ms of a submission, so that this is the rate of the copies alone. `end to end` is by the host's
clock, from the call to the last byte, with nothing else to do: the CPU writes the descriptors of the copy engine, and
that takes longer than the copies.
"""

import argparse
import ctypes
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from beside_step import BYTES, DIRECTIONS, DecodeStep, plain_copies
from torch import Tensor

from isthmus_kernels import dispatch
from isthmus_kernels.kv_swap.geometry import Direction
from isthmus_kernels.kv_swap.swap import Done, KvSwap

GIB = 1 << 30
_CYCLES = 8_000_000  # about 4 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement."""

    what: str
    direction: str
    gbps: float
    end_to_end: float = 0.0
    submit_us: float = 0.0
    share: float = 0.0
    note: str = ""


@dataclass(slots=True)
class Report:
    """What was measured, and the ceilings it is compared with (GB/s, by direction)."""

    link: dict[str, float]
    rows: list[Row] = field(default_factory=list)

    def add(self, what: str, direction: str, times: "Times", nbytes: int, note: str = "") -> Row:
        """Append and print a row."""
        gbps = nbytes / times.device / 1e9
        row = Row(
            what=what,
            direction=direction,
            gbps=round(gbps, 1),
            end_to_end=round(nbytes / times.wall / 1e9, 1),
            submit_us=round(times.submit * 1e6, 1),
            share=round(gbps / self.link[direction], 3),
            note=note,
        )
        self.rows.append(row)
        print(
            f"{what:58} {direction:4} {row.gbps:7.1f} GB/s {row.share:6.1%}  end to end {row.end_to_end:6.1f}"
            f"  submit {row.submit_us:9.1f} us  {note}",
            flush=True,
        )
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Median seconds of a submission: on the device, on the host, from call to completion."""

    device: float
    submit: float
    wall: float


def timed(submit: Callable[[], Any], runs: int = 7) -> Times:
    """Run `submit`, which leaves its work ordered before the current stream, several times in either way."""
    device, host, wall = [], [], []
    for i in range(runs + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(_CYCLES)
        start.record()
        submit()
        end.record()
        end.synchronize()
        begin = time.perf_counter()
        submit()
        submitted = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        if i:
            device.append(start.elapsed_time(end) / 1e3)
            host.append(submitted - begin)
            wall.append(done - begin)
    return Times(device=statistics.median(device), submit=statistics.median(host), wall=statistics.median(wall))


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """A pool and a pinned host buffer, and ids that move about BYTES."""

    pool: Tensor
    host: Tensor
    pool_ids: Tensor
    host_ids: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of one swap."""
        return len(self.pool_ids) * self.pool[0].numel()


def flat(fragment: int, memory: Tensor, pinned: Tensor, order: str = "random") -> Buffers:
    """Blocks of one fragment: scattered on both sides."""
    pool, host = memory.view(-1)[: GIB // fragment * fragment].view(-1, fragment), pinned
    host = host.view(-1)[: GIB // fragment * fragment].view(-1, fragment)
    pool_ids, host_ids = draw(len(pool), BYTES // fragment, order), draw(len(host), BYTES // fragment, order)
    return Buffers(pool=pool, host=host, pool_ids=pool_ids, host_ids=host_ids)


def layer_major(fragment: int, layers: int, memory: Tensor, pinned: Tensor) -> Buffers:
    """Blocks of 2 x layers fragments, scattered in the pool and contiguous on the host."""
    blocks = GIB // (fragment * 2 * layers)
    size = blocks * fragment * 2 * layers
    pool = memory.view(-1)[:size].view(2 * layers, blocks, fragment).permute(1, 0, 2)
    host = pinned.view(-1)[:size].view(blocks, 2 * layers, fragment)
    count = BYTES // (fragment * 2 * layers)
    return Buffers(pool=pool, host=host, pool_ids=draw(blocks, count), host_ids=draw(blocks, count))


def draw(blocks: int, count: int, order: str = "random") -> Tensor:
    """Ids of `count` blocks out of `blocks`."""
    if order == "random":
        return torch.randperm(blocks)[:count]
    if order == "runs of 8":
        return (torch.randperm(blocks // 8)[: count // 8, None] * 8 + torch.arange(8)).flatten()
    rising = torch.arange(count)
    return rising.flip(0) if order == "descending" else rising


def call(swap: KvSwap, direction: Direction, buffers: Buffers) -> Callable[[], None]:
    """Return a submission of the swap that the current stream waits for."""
    run = swap.swap_in if direction == "in" else swap.swap_out
    return lambda: run(buffers.pool_ids, buffers.host_ids).wait()


def exact(run: Callable[[], None], direction: Direction, buffers: Buffers) -> None:
    """Poison the destination, run, and compare."""
    to, ids = (buffers.pool, buffers.pool_ids) if direction == "in" else (buffers.host, buffers.host_ids)
    to.fill_(0x5A)
    run()
    torch.cuda.synchronize()
    want = (buffers.host[buffers.host_ids] if direction == "in" else buffers.pool[buffers.pool_ids.cuda()]).cuda()
    assert torch.equal(to[ids.cuda() if to.is_cuda else ids].cuda(), want), f"{direction}: the copy is wrong"


def memcpy_loop(buffers: Buffers, direction: Direction) -> Callable[[], None]:
    """One cudaMemcpyAsync for each fragment, called through ctypes (about 1 us a call more than from C)."""
    copy = ctypes.CDLL("libcudart.so.13").cudaMemcpyAsync
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    size = buffers.pool.shape[-1]
    pool = (buffers.pool.data_ptr() + buffers.pool_ids * buffers.pool.stride(0)).tolist()
    host = (buffers.host.data_ptr() + buffers.host_ids * buffers.host.stride(0)).tolist()
    to, source, kind = (pool, host, 1) if direction == "in" else (host, pool, 2)

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for a, b in zip(to, source, strict=True):
            copy(a, b, size, kind, stream)

    return run


def staged(buffers: Buffers, direction: Direction) -> Callable[[], None]:
    """Gather into staging and one copy out, or one copy in and scatter; the host blocks must be consecutive."""
    count = len(buffers.pool_ids)
    staging = torch.empty((count, *buffers.pool.shape[1:]), dtype=torch.uint8, device="cuda")
    host, ids = buffers.host[:count], buffers.pool_ids.cuda()

    def run() -> None:
        if direction == "in":
            staging.copy_(host, non_blocking=True)
            buffers.pool.index_copy_(0, ids, staging)
        else:
            torch.index_select(buffers.pool, 0, ids, out=staging)
            host.copy_(staging, non_blocking=True)

    return run


def ceilings(memory: Tensor, pinned: Tensor) -> dict[str, float]:
    """GB/s of one pinned copy of BYTES, each way and both ways at once."""
    a, b = memory.view(-1)[:BYTES], pinned.view(-1)[:BYTES]
    c, d = memory.view(-1)[BYTES : 2 * BYTES], pinned.view(-1)[BYTES : 2 * BYTES]
    side = torch.cuda.Stream()

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        a.copy_(b, non_blocking=True)
        with torch.cuda.stream(side):
            d.copy_(c, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    return {
        "in": BYTES / timed(lambda: a.copy_(b, non_blocking=True), 15).device / 1e9,
        "out": BYTES / timed(lambda: b.copy_(a, non_blocking=True), 15).device / 1e9,
        "both": 2 * BYTES / timed(both, 15).device / 1e9,
    }


FORMS: dict[str, dict[str, Any]] = {"": {}, ", as fast as it goes": {"spare_multiprocessors": False}}


def sizes(report: Report, memory: Tensor, pinned: Tensor, quick: bool) -> None:
    """Fragment sizes, both layouts, each way, with the peers."""
    kib = (4, 8, 16, 32, 64) if quick else (0.5, 2, 4, 8, 16, 18, 24, 32, 64, 128)
    for size in kib:
        fragment = int(size * 1024)
        for name, buffers in (
            (f"scattered {size:g} KiB", flat(fragment, memory, pinned)),
            (f"layer-major {size:g} KiB, 32 layers", layer_major(fragment, 32, memory, pinned)),
        ):
            for direction in DIRECTIONS:
                for form, options in FORMS.items():
                    swap = dispatch.kv_swap(buffers.pool, buffers.host, **options)
                    run = call(swap, direction, buffers)
                    exact(run, direction, buffers)
                    report.add(name + form, direction, timed(run), buffers.nbytes)
                    swap.close()
                if size >= 4 and (name.startswith("scattered") or not quick):
                    engine = dispatch.kv_swap(buffers.pool, buffers.host, engine_from=1, rows_from=1 << 60)
                    peer = call(engine, direction, buffers)
                    report.add(f"  {name}: cudaMemcpyBatchAsync", direction, timed(peer, 3), buffers.nbytes)
                    engine.close()
                if size >= 4 and name.startswith("scattered"):
                    loop = memcpy_loop(buffers, direction)
                    report.add("  memcpy loop", direction, timed(loop, 2), buffers.nbytes)
                if size in (4, 16, 64):
                    one = staged(buffers, direction)
                    report.add(f"  {name}: gather + one copy", direction, timed(one, 5), buffers.nbytes)


def orders(report: Report, memory: Tensor, pinned: Tensor) -> None:
    """Orders of ids, odd sizes, and whole blocks that the copy engine takes."""
    for order in ("random", "runs of 8", "descending", "consecutive"):
        buffers = flat(16384, memory, pinned, order)
        for direction in DIRECTIONS:
            run = call(dispatch.kv_swap(buffers.pool, buffers.host), direction, buffers)
            exact(run, direction, buffers)
            report.add(f"scattered 16 KiB, {order} ids", direction, timed(run), buffers.nbytes)
    for fragment in (656, 576 * 16, 656 * 16, 5000, 1002):
        buffers = layer_major(fragment, 30, memory, pinned)
        for direction, (form, options) in itertools.product(DIRECTIONS, FORMS.items()):
            swap = dispatch.kv_swap(buffers.pool, buffers.host, **options)
            run = call(swap, direction, buffers)
            exact(run, direction, buffers)
            report.add(f"layer-major {fragment} B, 30 layers{form}", direction, timed(run), buffers.nbytes)
            swap.close()
    for mib in (0.25, 0.5, 1, 2.25):
        buffers = flat(int(mib * (1 << 20)), memory, pinned)
        for direction in DIRECTIONS:
            run = call(dispatch.kv_swap(buffers.pool, buffers.host), direction, buffers)
            report.add(f"block-major blocks of {mib:g} MiB", direction, timed(run), buffers.nbytes)


def both_ways(report: Report, memory: Tensor, pinned: Tensor) -> None:
    """One swap each way at once, over halves of the buffers."""
    for name, fragment in (("8 KiB", 8192), ("32 KiB", 32768), ("2 MiB blocks", 2 << 20)):
        half = GIB // 2
        up = flat_half(fragment, memory.view(-1)[:half], pinned.view(-1)[:half])
        down = flat_half(fragment, memory.view(-1)[half:], pinned.view(-1)[half:])
        for multiprocessors in (1, 2, 4):
            counts = dict.fromkeys(DIRECTIONS, multiprocessors)
            options = {"spare_multiprocessors": False, "multiprocessors": counts}
            swaps = [dispatch.kv_swap(b.pool, b.host, **options) for b in (up, down)]

            def run(swaps: list[KvSwap] = swaps, up: Buffers = up, down: Buffers = down) -> None:
                first = swaps[0].swap_in(up.pool_ids, up.host_ids)
                second = swaps[1].swap_out(down.pool_ids, down.host_ids, after=None)
                first.wait()
                second.wait()

            report.add(
                f"both ways, {name}, {multiprocessors} + {multiprocessors} SMs", "both", timed(run), 2 * up.nbytes
            )


def flat_half(fragment: int, memory: Tensor, pinned: Tensor) -> Buffers:
    """As `flat`, over half of the memory."""
    pool, host = memory.view(-1, fragment), pinned.view(-1, fragment)
    count = BYTES // fragment
    return Buffers(pool=pool, host=host, pool_ids=draw(len(pool), count), host_ids=draw(len(host), count))


def submission(report: Report, memory: Tensor, pinned: Tensor) -> None:
    """What a swap of 1,000 blocks x 32 layers (16 KiB) costs the thread that asks for it, ids as int32 tensors.

    One after the other, as a busy engine makes them: a thread that has just slept until the device was done takes
    several times as long for anything.
    """
    blocks = GIB // (16384 * 64)
    pool = memory.view(-1)[: blocks * 64 * 16384].view(64, blocks, 16384).permute(1, 0, 2)
    host = pinned.view(-1)[: blocks * 64 * 16384].view(blocks, 64, 16384)
    ids = torch.randperm(blocks)[:1000].int()
    forms: dict[str, dict[str, Any]] = {**FORMS, ", kernels alone": {"rows_from": 1 << 60}}
    for count, (form, options) in itertools.product((1, 1000), forms.items()):
        swap = dispatch.kv_swap(pool, host, **options)
        part = Buffers(pool=pool, host=host, pool_ids=ids[:count], host_ids=ids[:count].flip(0).contiguous())
        for direction in DIRECTIONS:
            times = timed(call(swap, direction, part), 21)
            run = swap.swap_in if direction == "in" else swap.swap_out
            spans = []
            for _ in range(32):
                begin = time.perf_counter()
                done = run(part.pool_ids, part.host_ids)
                spans.append(time.perf_counter() - begin)
            done.synchronize()
            note = f"back to back: median {statistics.median(spans) * 1e6:.1f} us, best {min(spans) * 1e6:.1f} us"
            report.add(f"{count} blocks x 32 layers of 16 KiB{form}", direction, times, part.nbytes, note)


def under_load(memory: Tensor, pinned: Tensor) -> list[dict[str, Any]]:
    """How much a full-rate swap slows a decode step down, what rate the swap keeps, and the same of plain copies."""
    step = DecodeStep()
    results = plain_copies(step, memory, pinned)
    forms = {**FORMS, ", kernels alone": {"spare_multiprocessors": False, "stage_bytes": 0}}
    for size, direction, (form, options) in itertools.product((4096, 16384, 2 << 20), DIRECTIONS, forms.items()):
        if options and size > 1 << 20:
            continue
        buffers = flat(size, memory, pinned) if size > 1 << 20 else layer_major(size, 32, memory, pinned)
        swap = dispatch.kv_swap(buffers.pool, buffers.host, **options)
        run = swap.swap_in if direction == "in" else swap.swap_out
        begin = torch.cuda.Event()
        begin.record()
        begin.synchronize()

        def submit(run: Callable[..., Done] = run, ids: Buffers = buffers, after: Done = begin) -> Done:
            return run(ids.pool_ids, ids.host_ids, after=after)

        results.append(step.beside(f"{size >> 10} KiB {direction}{form}", submit, buffers.nbytes))
        swap.close()
    return results


SECTIONS = ("sizes", "orders", "both", "submission", "load")


def main() -> None:
    """Measure, print, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write all numbers to this file")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which of them; default: all")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench-kernels: no CUDA device")
    torch.manual_seed(0)
    memory = torch.randint(0, 256, (GIB,), dtype=torch.uint8, device="cuda")
    pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    pinned.copy_(memory)
    link = ceilings(memory, pinned)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("link: " + ", ".join(f"{name} {gbps:.1f} GB/s" for name, gbps in link.items()))
    report = Report(link)
    sections = args.sections.split(",")
    if unknown := set(sections) - set(SECTIONS):
        raise SystemExit(f"bench-kernels: --sections: no section is called {', '.join(sorted(unknown))}")
    if "sizes" in sections:
        sizes(report, memory, pinned, args.quick)
    if "orders" in sections:
        orders(report, memory, pinned)
    if "both" in sections:
        both_ways(report, memory, pinned)
    if "submission" in sections:
        submission(report, memory, pinned)
    load = under_load(memory, pinned) if "load" in sections else []
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"link": link, "rows": [asdict(row) for row in report.rows], "load": load}, file, indent=1)


if __name__ == "__main__":
    main()
