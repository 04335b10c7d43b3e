"""The local runner with real processes: start, restart, stop, and no orphan whatever ends it."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from isthmus_operator.local.addresses import Addresses
from isthmus_operator.local.process import Policy

pytestmark = pytest.mark.slow  # starts processes, and waits for deadlines to pass

HERE = Path(__file__).parent
DEADLINE_S = 60.0
PROBES: dict[str, Any] = {"startup": {}, "readiness": {"path": "/ready"}, "liveness": {}}


class Run:
    """A supervisor process and what it says."""

    def __init__(self, run_dir: Path, pods: list[dict[str, Any]], **policy: float) -> None:
        plan = {"run_dir": str(run_dir), "pods": pods, "policy": {"first_backoff_s": 0.05} | policy}
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "run_pods.py"), json.dumps(plan)],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._unread: list[str] = []
        self._partial = b""

    def _next_line(self) -> str | None:
        """The next line; None at the end of the output. Fails at the deadline."""
        assert self.process.stdout is not None
        while not self._unread:
            ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
            assert ready, f"nothing more within {DEADLINE_S} s after:\n" + "\n".join(self.lines)
            chunk = os.read(self.process.stdout.fileno(), 65536)
            if not chunk:
                return None
            *whole, self._partial = (self._partial + chunk).split(b"\n")
            self._unread += [line.decode() for line in whole]
        self.lines.append(self._unread.pop(0))
        return self.lines[-1]

    def until(self, text: str) -> str:
        """Reads output up to the line that holds `text`."""
        while True:
            line = self._next_line()
            assert line is not None, f"the output ended without {text!r}:\n" + "\n".join(self.lines)
            if text in line:
                return line

    def state(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "state.json").read_text())

    def pod(self, name: str) -> dict[str, Any]:
        return next(pod["containers"][0] for pod in self.state()["pods"] if pod["name"] == name)

    def finish(self) -> int:
        while self._next_line() is not None:
            pass
        return self.process.wait(timeout=DEADLINE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def begin(pods: list[dict[str, Any]], **policy: float) -> Run:
        runs.append(Run(tmp_path / f"run{len(runs)}", pods, **policy))
        return runs[-1]

    yield begin
    for run in runs:
        run.process.kill()
        run.process.wait()
        assert run.process.stdout is not None
        run.process.stdout.close()


_addresses = Addresses()
_numbers = count()


def server(role: str, *flags: str, **more: Any) -> dict[str, Any]:
    name = f"{role}-{next(_numbers)}"
    # Not the router's fixed address: tests run side by side.
    address = _addresses.take(name, "prefill", [8001])
    argv = [sys.executable, "-I", str(HERE / "pod_server.py"), address, "8001", *flags]
    return {"name": name, "role": role, "address": address, "argv": argv, **PROBES, **more}


def wait_gone(pid: int) -> None:
    """Returns when the process has ended; fails at the deadline."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([descriptor], [], [], DEADLINE_S)
        assert ended, f"process {pid} is still there"
    finally:
        os.close(descriptor)


def test_starts_all_reports_state_and_stops_on_one_interrupt(start: Any) -> None:
    pods = [server("store", env={"WHO": "me"}), server("prefill"), server("router")]
    run = start(pods)
    run.until("ALL READY")
    state = run.state()
    assert state["ready"]
    assert state["pid"] == run.process.pid
    assert [pod["role"] for pod in state["pods"]] == ["store", "prefill", "router"]
    containers = [pod["containers"][0] for pod in state["pods"]]
    assert {c["state"] for c in containers} == {"Running"}
    assert "env me" in Path(containers[0]["log"]).read_text()
    assert any(line.startswith(f"{pods[0]['name']:<10} | env me") for line in run.lines)
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 0
    for c in containers:
        wait_gone(c["pid"])
    after = run.state()
    assert not after["ready"]
    assert {pod["containers"][0]["state"] for pod in after["pods"]} == {"Exited"}


def test_the_store_is_ready_before_others_start(start: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    store, engine = server("store", "--ready-when", str(gate)), server("decode")
    run = start([store, engine])
    run.until("listening")
    # The engine has not been started, so a progress line is about the store alone.
    assert store["name"] in run.until("starting,")
    assert run.pod(engine["name"])["state"] == "Waiting"
    gate.touch()
    run.until("ALL READY")
    order = [line for line in run.lines if "listening" in line]
    assert [line.split()[0] for line in order] == [store["name"], engine["name"]]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphan_however_the_supervisor_dies(start: Any, number: signal.Signals) -> None:
    pods = [server("prefill", "--grandchild"), server("decode")]
    run = start(pods)
    run.until("ALL READY")
    pids = [run.pod(pod["name"])["pid"] for pod in pods]
    said = next(line for line in run.lines if "grandchild" in line)
    pids.append(int(said.split()[-1]))
    run.process.send_signal(number)
    run.finish()
    for pid in pids:
        wait_gone(pid)


def test_no_orphan_when_the_guard_dies_too(start: Any) -> None:
    pod = server("decode")
    run = start([pod])
    run.until("ALL READY")
    pid, supervisor = run.pod(pod["name"])["pid"], run.process.pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    (guard,) = (int(c) for c in children if b"guard.py" in Path(f"/proc/{c}/cmdline").read_bytes())
    # Both at once, as the kernel would when memory is short: the supervisor is stopped while its guard goes.
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(guard, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    run.finish()
    wait_gone(pid)


def test_a_killed_process_comes_back_and_its_restart_is_counted(start: Any) -> None:
    pod = server("decode", "--grandchild")
    run = start([pod])
    run.until("ALL READY")
    first = run.pod(pod["name"])
    grandchild = int(next(line for line in run.lines if "grandchild" in line).split()[-1])
    os.kill(first["pid"], signal.SIGKILL)
    assert "SIGKILL; restart 1 in 0.05 s" in run.until("restart 1")
    wait_gone(grandchild)
    run.until("listening")
    second = run.pod(pod["name"])
    assert second["pid"] != first["pid"]
    assert (second["restarts"], second["lastExit"]) == (1, -9)


def test_a_crash_loop_before_readiness_ends_the_run_with_the_one_cause(start: Any) -> None:
    broken = server("decode")
    broken["argv"] = [sys.executable, "-c", "import sys; print('no such tensor: wq'); sys.exit(3)"]
    other = server("prefill")
    run = start([other, broken])
    cause = run.until("CANNOT START")
    assert run.finish() == 1
    assert broken["name"] in cause
    assert "exit code 3 3 times in a row" in cause
    assert any("    no such tensor: wq" in line for line in run.lines)
    assert any("full log:" in line for line in run.lines)
    assert run.pod(other["name"])["state"] == "Exited"


def test_refused_arguments_are_not_tried_again(start: Any) -> None:
    broken = server("decode")
    broken["argv"] = [sys.executable, "-c", "import sys; sys.exit('--kv-memory: too big') if 0 else sys.exit(2)"]
    run = start([broken])
    assert "exit code 2." in run.until("CANNOT START")
    assert run.finish() == 1
    assert not any("restart 1" in line for line in run.lines)
    assert any("hint: it refused its arguments" in line for line in run.lines)


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(start: Any) -> None:
    pod = server("decode", "--ignore-term", grace_s=0.2)
    run = start([pod])
    run.until("ALL READY")
    run.process.send_signal(signal.SIGINT)
    run.until("did not exit within its grace period of 0.2 s")
    assert run.finish() == 0


def test_a_second_interrupt_kills(start: Any) -> None:
    pod = server("decode", "--ignore-term", grace_s=3600.0)
    run = start([pod])
    run.until("ALL READY")
    pid = run.pod(pod["name"])["pid"]
    run.process.send_signal(signal.SIGINT)
    run.until("once more to kill")
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 0
    wait_gone(pid)


def test_a_failing_liveness_probe_restarts(start: Any, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    alive.touch()
    # Liveness asks /ready, which this server answers with 503 once the file is gone.
    probe = {"path": "/ready", "period_s": 0.05, "failure_threshold": 2}
    pod = server("decode", "--ready-when", str(alive), readiness={}, liveness=probe)
    run = start([pod])
    run.until("ALL READY")
    alive.unlink()
    assert "status 503" in run.until("its liveness probe failed 2 times")
    run.until("restart 1")
    alive.touch()
    run.until("listening")


def test_a_missed_startup_budget_restarts_and_then_gives_up(start: Any) -> None:
    pod = server("decode", startup={"path": "/health", "port": 9, "period_s": 0.05, "failure_threshold": 2})
    run = start([pod], give_up_after=2)
    assert "nothing listens yet" in run.until("did not start in 0.1 s")
    run.until("CANNOT START")
    assert run.finish() == 1


def test_init_containers_run_first_and_their_failure_is_the_cause(start: Any, tmp_path: Path) -> None:
    made = tmp_path / "fetched"
    fetch = {"argv": [sys.executable, "-c", f"open({str(made)!r}, 'w').close()"]}
    good = server("decode", "--ready-when", str(made), init=[fetch])
    run = start([good])
    run.until("ALL READY")
    bad = server("decode", init=[{"argv": [sys.executable, "-c", "import sys; sys.exit('hub: 404')"]}])
    run = start([bad])
    assert f"{bad['name']}/main could not start" in run.until("CANNOT START")
    assert run.finish() == 1
    assert any("hub: 404" in line for line in run.lines)


def test_backoff_doubles_up_to_thirty_seconds() -> None:
    assert [Policy().backoff_s(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert Policy().backoff_s(10_000) == 30
