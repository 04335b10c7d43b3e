"""Runs a benchmark as the ranks of one host, a process each, as an engine that serves has them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_arguments(parser: ArgumentParser) -> None:
    """What `run` tells a process: `rank` (-1: it is none), of how many, and the file `meeting` for `ranks.join`."""
    parser.add_argument("--rank", type=int, default=-1, help=SUPPRESS)
    parser.add_argument("--of", type=int, default=1, help=SUPPRESS)
    parser.add_argument("--meeting", default="", help=SUPPRESS)


def run(script: str, flags: Sequence[str], size: int, limit_s: float) -> dict[str, Any]:
    """The JSON object that is the first rank's last line; its other lines are printed.

    Raises SystemExit when a process fails, or when it prints and more than `limit_s` seconds have passed.
    """
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, script, *flags, "--of", str(size), "--meeting", str(Path(folder) / "meeting"), "--rank"]
        first = subprocess.Popen([*argv, "0"], stdout=subprocess.PIPE, text=True)
        started = [first, *(subprocess.Popen([*argv, str(rank)]) for rank in range(1, size))]
        try:
            last, end = "", time.monotonic() + limit_s
            assert first.stdout is not None
            for line in first.stdout:
                last = line
                if not line.startswith("{"):
                    print(line, end="", flush=True)
                if time.monotonic() > end:
                    raise SystemExit(f"bench: {size} ranks took more than {limit_s:.0f} s")
            status = [process.wait(60) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait(30)
        if any(status) or not last.startswith("{"):
            raise SystemExit(f"bench: the processes of {size} ranks ended with {status}")
        return dict(json.loads(last))
