"""Short storms with a fixed seed, the second not in CI; the long one is `make chaos` (docs/chaos.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

RUNNING_OUT = "few descriptors,little memory,full disk,clock jump,no names"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mode", "minutes", "only"),
    [
        pytest.param("direct", 0.25, "", id="all"),
        pytest.param("store", 0.5, RUNNING_OUT, id="running out", marks=pytest.mark.long),
    ],
)
def test_a_short_storm_breaks_no_guarantee(tmp_path: Path, mode: str, minutes: float, only: str) -> None:
    script = Path(__file__).with_name("run_storm.py")
    argv = [sys.executable, str(script), "--seed", "291", "--minutes", f"{minutes:g}", "--mode", mode]
    argv += ["--only", only, "--out", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["violations"] and int(dict(report["rows"])["requests"]) > 20
