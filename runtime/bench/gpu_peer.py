"""The peer's column of the GPU's table: vLLM's own run on this card where it is there, else what was recorded.

vLLM's modules never share a process with ours: `gpu_peer_vllm.py` runs in a process of its own, after our engine of the
same model has given its memory back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from gpu_table import RECORDED_BY, ROWS, START, Row, say

_SCRIPT = Path(__file__).with_name("gpu_peer_vllm.py")
_LOOK_S = 60.0
_UNKNOWN: tuple[None, None] = (None, None)
"""Of a model that was never measured."""
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Nothing is sampled here, and its sampler by FlashInfer would have to be compiled.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@dataclass(frozen=True)
class Peer:
    """A way to run vLLM."""

    python: str
    path: str = ""
    """PYTHONPATH instead of this process's; empty: none."""

    def environment(self) -> dict[str, str]:
        """This process's, without our modules."""
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # noqa: TID251
        return {**_SETTINGS, **own, **({"PYTHONPATH": self.path} if self.path else {})}

    def server(self, model: Path, name: str, port: int, *, max_model_len: int, fraction: float) -> list[str]:
        """The command that serves the files of `model` over HTTP, as our engine beside it does."""
        argv = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        argv += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), "--dtype", "auto"]
        argv += ["--max-model-len", str(max_model_len), "--gpu-memory-utilization", str(fraction)]
        argv += ["--max-num-seqs", "256", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
        return [*argv, "--generation-config", "vllm"]

    def there(self) -> bool:
        """Whether it can import vLLM; vLLM itself is not imported, which takes long."""
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        found = subprocess.run([self.python, "-c", look], env=self.environment(), timeout=_LOOK_S, check=False)
        return found.returncode == 0


def find_peer(named: str) -> Peer | None:
    """Of `--peer`: `auto` (this interpreter, if it has vLLM), `none`, an interpreter, or folders for PYTHONPATH.

    Raises ValueError where one was named and has no vLLM.
    """
    if named == "none":
        return None
    if named == "auto":
        found = Peer(sys.executable, os.environ.get("PYTHONPATH", ""))  # noqa: TID251
        return found if found.there() else None
    found = Peer(named) if Path(named).is_file() else Peer(sys.executable, named)
    if not found.there():
        how = "this interpreter" if Path(named).is_file() else f"{sys.executable} with this PYTHONPATH"
        raise ValueError(f"--peer {named!r}: {how} cannot import vllm; name one that can, auto, or none")
    return found


@dataclass(frozen=True)
class Figure:
    """One number of the peer."""

    value: float
    recorded: bool
    """Whether it is of an earlier run on another card."""

    def __str__(self) -> str:
        return f"{self.value:g}*" if self.recorded else f"{self.value:.1f}"


@dataclass
class Figures:
    """What the peer does on one model."""

    model: str
    version: str = ""
    """Of the vLLM that ran; empty: none did."""
    why_not: str = ""
    """Why rows are recorded ones."""
    start_s: float | None = None
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By row, what `gpu_peer_vllm.py` wrote."""

    def start(self) -> Figure | None:
        """Seconds from its process's start to ready. None: it did not run, and no figure of this model is recorded."""
        if self.start_s is not None:
            return Figure(self.start_s, False)
        return Figure(START[self.model][0], True) if self.model in START else None

    def of(self, row: Row) -> Figure | None:
        """Median of its repeats in the row's unit. None as for `start`."""
        if (ran := self.rows.get(row.name)) is not None:
            return Figure(median(ran["values"]), False)
        return Figure(row.known[self.model][0], True) if self.model in row.known else None

    def about(self) -> list[str]:
        """Where the figures are from."""
        run = [f"peer: vLLM {self.version}, on this card after ours"] if self.version else []
        recorded = f"*: {RECORDED_BY}" if self.model in START else "no figure of the peer is recorded"
        return run + ([f"{recorded}; {self.why_not}"] if self.why_not else [])


def table(ours: dict[str, Any], peer: Figures) -> list[str]:
    """The rows of one model that ran (`gpu.py` has them by name), beside the peer, the computed limit and our bar. Adds
    the peer's figures to them."""
    lines = [f"{peer.model:32} {'ours':>10} {'peer':>9} {'limit':>9} {'bar':>9}  ours/peer  to bar"]
    start, bar = peer.start(), START.get(peer.model, _UNKNOWN)[1]
    ours["peer"] = {"vllm": peer.version, "why_not": peer.why_not, **_told(start, "start_s", "recorded")}
    ready = ours["start_s"]
    ratio = None if start is None else start.value / ready
    lines.append(_line("start to ready, s", ready, start, None, bar, ratio, bar is None or ready <= bar))
    for row in ROWS:
        ran = ours["rows"].get(row.name)
        if ran is None:
            continue
        title, figure = f"{row.title}, {row.unit}", peer.of(row)
        _, limit, bar = row.known.get(peer.model, (None, *_UNKNOWN))
        ran |= {**_told(figure, "peer", "peer_recorded"), "limit": limit, "bar": bar}
        ran["peer_values"] = peer.rows.get(row.name, {}).get("values", [])
        if "values" not in ran:
            lines.append(f"{title:32} FAILED: {ran['error']}")
            continue
        value = median(ran["values"])
        quick = "  [quick: fewer tokens out]" if ran["output_len"] != row.output_len else ""
        ratio = None if figure is None else row.better(value, figure.value)
        met = bar is None or row.better(value, bar) >= 1
        lines.append(_line(title, value, figure, limit, bar, ratio, met) + quick)
    return [*lines, *peer.about()]


def _told(figure: Figure | None, value: str, recorded: str) -> dict[str, Any]:
    """A figure for the JSON, by the names given."""
    return {value: None, recorded: None} if figure is None else {value: figure.value, recorded: figure.recorded}


def _line(
    title: str,
    value: float,
    peer: Figure | None,
    limit: float | None,
    bar: float | None,
    ratio: float | None,
    met: bool,
) -> str:
    """A row; what is not known is left empty."""
    beside = f"{'' if peer is None else str(peer):>9} {'' if limit is None else format(limit, 'g'):>9}"
    against = f"{'' if bar is None else format(bar, 'g'):>9}  {'' if ratio is None else f'{ratio:.2f}x':>9}"
    return f"{title:32} {value:>10.1f} {beside} {against}  {'' if bar is None else 'met' if met else 'short'}".rstrip()


def measure(peer: Peer | None, model: str, flags: Sequence[str], timeout_s: float) -> Figures:
    """Run vLLM's rows. What it could not be made to do is told in `why_not`, and never fails our own table."""
    found = Figures(model)
    if peer is None:
        found.why_not = "vLLM was not run (--peer says which one to take)"
        return found
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peer.json"
        argv = [peer.python, str(_SCRIPT), "--model", model, "--json", str(out), *flags]
        say(f"bench: {' '.join(argv)}")
        # vLLM has processes of its own, which go with it.
        process = subprocess.Popen(argv, env=peer.environment(), start_new_session=True)
        try:
            code = process.wait(timeout_s)
            found.why_not = f"vLLM's process ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            found.why_not = f"vLLM had not ended after {timeout_s:.0f} s (--peer-timeout)"
        finally:
            _end(process)
        if out.is_file():
            wrote = json.loads(out.read_text())
            found.version, found.start_s, found.rows = wrote["version"], wrote["start_s"], wrote["rows"]
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
