"""From a kill to the answers that tell of it: which requests a storm measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
_JUDGE = """
import json, sys
from types import SimpleNamespace
from faults import Event
from load import Outcome, make_ask
from schedule import Fault
from verdict import Report, judge

member = SimpleNamespace(log=SimpleNamespace(read_text=lambda errors: ""))
fleet = SimpleNamespace(engines=["prefill0"], url=lambda name: "http://10.0.0.1:8000", member={"router": member})
error = {"message": "prefill engine http://10.0.0.1:8000 was lost: " + sys.argv[1], "stage": "prefill", "attempt": "a"}
outcome = Outcome(make_ask(1, 0), began=10.0, ended=16.0, ending="refused", status=502, error=error)
report = Report()
judge([outcome], [Event(Fault(0.0, "kill", "prefill0", 1.0), 11.0)], fleet, report, 1.0)
print(json.dumps(report.violations))
"""


def _violations(cause: str) -> list[str]:
    path = [str(HERE / "storm"), str(HERE.parent / "support")]
    program = f"import sys; sys.path[:0] = {path!r}\n{_JUDGE}"
    done = subprocess.run(
        [sys.executable, "-c", program, cause], capture_output=True, text=True, timeout=60, check=True
    )
    found: list[str] = json.loads(done.stdout)
    return found


def test_a_broken_connection_is_told_of_in_time() -> None:
    assert _violations("[Errno 104] Connection reset by peer") == [
        "kill -9 to answer: 1 over 2.00 s, worst 5.00 s",
    ]


def test_who_found_the_port_closed_came_after_the_kill() -> None:
    assert _violations("[Errno 111] Connection refused") == []
