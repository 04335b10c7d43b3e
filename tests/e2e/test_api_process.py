"""An engine of two processes: it answers as one does, and whichever ends takes the other with it and says why."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import pytest
from processes import BIN, MODEL, Process, free_port, metric, running, until
from real_models import smollm2_135m_instruct

from isthmus_operator.render.pod import GRACE_AFTER_DRAIN_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEADLINE_S = 60.0


def engine(tmp: Path, *flags: str, model: Path = MODEL, name: str = "engine") -> tuple[Process, str]:
    port = free_port()
    argv = [str(BIN / "isthmus-runtime"), "serve", "--role", "unified", "--port", str(port), "--model", str(model)]
    argv += ["--served-model-name", "test", *flags]
    return Process(name, argv, tmp / f"{name}.log").start(), f"http://127.0.0.1:{port}"


@contextmanager
def fake(tmp: Path, *flags: str) -> Iterator[tuple[Process, str, int]]:
    """One with a fake executor in a process of its own, and that process's id."""
    process, url = engine(tmp, "--executor", "fake", "--api-process", "on", "--drain-timeout", "20s", *flags)
    try:
        process.wait_http(f"{url}/ready")
        yield process, url, engine_of(process)
    finally:
        process.stop()


def engine_of(process: Process) -> int:
    """The engine process of an API process."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (found,) = [int(child) for child in children if b"\0engine\0" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return found


def request(url: str, **body: object) -> urllib.request.Request:
    made = urllib.request.Request(f"{url}/v1/completions", json.dumps({"model": "test", **body}).encode())
    made.add_header("content-type", "application/json")
    return made


def complete(url: str, **body: object) -> str:
    with urllib.request.urlopen(request(url, temperature=0, **body), timeout=DEADLINE_S) as response:
        return str(json.load(response)["choices"][0]["text"])


def end_of_stream(url: str, tokens: int, begun: Callable[[], object] = lambda: None) -> str:
    """How one stream ends: `done`, the error in it, the status that it was refused with, or a connection that broke."""
    ends: list[str] = []
    try:
        with urllib.request.urlopen(
            request(url, prompt=[5, 6, 7], max_tokens=tokens, stream=True, ignore_eos=True), timeout=DEADLINE_S
        ) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    begun()
                if b'"error"' in line:
                    ends.append("error: " + json.loads(line[6:])["error"]["code"])
                elif line.startswith(b"data: [DONE]") and not ends:
                    ends.append("done")
    except urllib.error.HTTPError as error:
        ends.append(f"status {error.code}")
    except (OSError, HTTPException):  # the second: in the middle of a chunk
        ends.append("broken")
    assert len(ends) <= 1, f"one end, and only one: {ends}"
    return ends[0] if ends else "broken"


def test_two_processes_answer_as_one_does(tmp_path: Path) -> None:
    """Greedy text of a real model, text under a grammar, and metrics; SIGTERM lets a stream come to its end."""
    answers = []
    for mode in ("off", "on"):
        process, url = engine(
            tmp_path,
            *("--api-process", mode, "--device", "cpu", "--dtype", "float32", "--threads", "1"),
            *("--kv-memory", "64Mi", "--max-model-len", "512"),
            model=smollm2_135m_instruct(),
            name=mode,
        )
        try:
            process.wait_http(f"{url}/ready")
            free = complete(url, prompt="The capital of France is", max_tokens=16)
            guided = complete(url, prompt="A colour:", max_tokens=8, structured_outputs={"choice": ["red", "green"]})
            answers.append((free, guided))
            until(lambda url=url: metric(url, "isthmus_prefix_cache_queries_total") > 0, "metrics of the engine")  # type: ignore[misc]
            if mode == "on":
                other = engine_of(process)
                begun, ends = threading.Event(), []
                stream = threading.Thread(target=lambda: ends.append(end_of_stream(url, 40, begun.set)))  # noqa: B023
                stream.start()
                assert begun.wait(DEADLINE_S)
                process.kill(signal.SIGTERM)
                stream.join(DEADLINE_S)
                assert ends == ["done"]
                assert process.popen.wait(DEADLINE_S) == 0, process.tail()
                assert not running(other), "the engine process outlives the API process"
        finally:
            assert process.stop() == 0, process.tail()
    assert answers[0] == answers[1]
    log = (tmp_path / "on.log").read_text()
    assert "INFO engine process: " in log and "INFO API process: " in log


@pytest.mark.parametrize("number", range(3))
def test_the_end_of_the_engine_process_ends_each_request_once(tmp_path: Path, number: int) -> None:
    """Killed at some moment, while streams run and others arrive."""
    print("seed", seed := random.randrange(1 << 30))
    rng = random.Random(seed)
    with fake(tmp_path, "--max-num-seqs", "8", "--max-model-len", "8192") as (process, url, other):
        ends: list[str] = []
        begun = threading.Event()
        clients = [threading.Thread(target=lambda: ends.append(end_of_stream(url, 8000, begun.set))) for _ in range(12)]
        for client in clients[:6]:
            client.start()
        assert begun.wait(DEADLINE_S)
        late = threading.Timer(rng.random() * 0.3, os.kill, (other, signal.SIGKILL))
        late.start()
        for client in clients[6:]:
            client.start()
        for client in clients:
            client.join(DEADLINE_S)
        assert len(ends) == len(clients)
        # A client that comes when the port is closed is refused by the kernel.
        allowed = {"error: engine_lost", "status 502", "status 503", "broken"}
        assert set(ends) <= allowed and "error: engine_lost" in ends, ends
        assert process.popen.wait(DEADLINE_S) == 1
        assert "the engine process was ended by SIGKILL (out of memory, if nobody sent it)" in process.tail()


def test_the_end_of_the_api_process_ends_the_engine_process(tmp_path: Path) -> None:
    with fake(tmp_path) as (process, url, other):
        begun = threading.Event()
        ends: list[str] = []
        stream = threading.Thread(target=lambda: ends.append(end_of_stream(url, 8000, begun.set)))
        stream.start()
        assert begun.wait(DEADLINE_S)
        process.kill()
        until(lambda: not running(other), "an orphan")
        stream.join(DEADLINE_S)
        assert ends == ["broken"]
        assert "the API process has ended" in process.tail() and "so this process ends" in process.tail()


def test_an_engine_process_that_stands_still_makes_health_red(tmp_path: Path) -> None:
    def health() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=DEADLINE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    with fake(tmp_path, "--no-progress-timeout", "2s") as (_, url, other):
        assert health()[0] == 200
        os.kill(other, signal.SIGSTOP)
        try:
            until(lambda: "the engine process has said nothing for" in health()[1], "it stays green")
            assert health()[0] == 503
        finally:
            os.kill(other, signal.SIGCONT)
        until(lambda: health()[0] == 200, "it stays red")


@pytest.mark.parametrize("stands", ["engine", "neither"])
def test_both_processes_end_within_what_pods_have_after_their_drain(tmp_path: Path, stands: str) -> None:
    """The kubelet would kill them otherwise, and peers would take that for a crash."""
    with fake(tmp_path) as (process, _, other):
        if stands == "engine":
            os.kill(other, signal.SIGSTOP)
        process.popen.terminate()
        status = process.popen.wait(GRACE_AFTER_DRAIN_S)
        assert status == (1 if stands == "engine" else 0), process.tail()
        assert ("has not ended within" in process.tail()) == (stands == "engine")
        until(lambda: not running(other), "an orphan")


def test_a_start_that_cannot_be_is_told_with_its_reason_and_status(tmp_path: Path) -> None:
    process, _ = engine(tmp_path, "--executor", "fake", "--api-process", "on", "--kv-memory", "100")
    assert process.popen.wait(DEADLINE_S) == 2
    assert "the engine process could not start; its last lines say why" in process.tail()
    assert "CRITICAL engine process: " in process.tail()


_TELLS_FROZEN = """
import gc
import os
import threading


def look(event=threading.Event(), folder=os.environ["TOLD"]):
    while not (count := gc.get_freeze_count()):
        event.wait(0.02)
    with open(f"{folder}/{os.getpid()}.new", "w") as told:
        told.write(str(count))
    os.replace(f"{folder}/{os.getpid()}.new", f"{folder}/{os.getpid()}")


threading.Thread(target=look, daemon=True).start()
"""


def test_the_collector_of_both_processes_leaves_alone_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, code = tmp_path / "told", tmp_path / "code"
    told.mkdir()
    code.mkdir()
    (code / "sitecustomize.py").write_text(_TELLS_FROZEN)
    monkeypatch.setenv("PYTHONPATH", str(code))
    monkeypatch.setenv("TOLD", str(told))
    with fake(tmp_path) as (process, _, engine_pid):
        for pid in (process.pid, engine_pid):
            until((told / str(pid)).exists, f"process {pid} looks at all that it has")
            assert int((told / str(pid)).read_text()) > 10_000
