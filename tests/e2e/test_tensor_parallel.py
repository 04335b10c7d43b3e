"""An engine of three ranks, a process each: the tokens of one rank, and all of them end together."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from lora_adapters import save_adapter
from processes import BIN, Process, free_port, running, until
from real_models import smollm2_135m_instruct

from isthmus_runtime.models.registry import read_model_spec

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time, in a village far away, there lived")
DEADLINE_S = 60.0


def engine(tmp: Path, ranks: int, *more: str) -> tuple[Process, str]:
    """SmolLM2, whose nine heads three ranks share."""
    port = free_port()
    argv = [str(BIN / "isthmus-runtime"), "serve", "--role", "unified", "--port", str(port)]
    argv += ["--model", str(smollm2_135m_instruct()), "--served-model-name", "test", "--device", "cpu"]
    argv += ["--dtype", "float32", "--threads", "1", "--kv-memory", "64Mi", "--max-model-len", "512"]
    argv += ["--tensor-parallel-size", str(ranks), *more]
    return Process(f"tp{ranks}", argv, tmp / f"tp{ranks}.log").start(), f"http://127.0.0.1:{port}"


def post(url: str, body: dict[str, object]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        return bytes(response.read())


def complete(url: str, prompt: str, tokens: int = 24, model: str = "test") -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return str(json.loads(post(f"{url}/v1/completions", body))["choices"][0]["text"])


def children(pid: int) -> list[int]:
    """The rank processes of an engine."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # of a thread that has ended
            found += [int(child) for child in listed.read_text().split()]
    return [child for child in found if b"\0rank\0" in command(child)]


def command(pid: int) -> bytes:
    """A process's command line; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def unhealthy(url: str) -> str:
    """What /health answers with 503; empty while it is well."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=DEADLINE_S):
            return ""
    except urllib.error.HTTPError as answer:
        with answer:
            assert answer.code == 503
            return answer.read().decode()


def test_three_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    answers = []
    for ranks in (1, 3):
        process, url = engine(tmp_path, ranks)
        try:
            process.wait_http(f"{url}/ready")
            followers = children(process.pid)
            assert len(followers) == ranks - 1
            with urllib.request.urlopen(f"{url}/info", timeout=DEADLINE_S) as told:
                assert json.load(told)["rank_sums"] == ("gloo" if ranks > 1 else "")
            # Steps of the same sizes come again: what was captured of the first must not leave the exchange out.
            answers.append([complete(url, prompt) for prompt in PROMPTS for _ in range(2)])
        finally:
            status = process.stop()
        assert status == 0, process.tail()
        assert "a rank ended with status" not in process.log.read_text(), "a rank did not end by itself"
        until(lambda pids=followers: not any(map(running, pids)), "ranks outlived their engine")
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == len(PROMPTS)


def test_adapters_of_three_ranks(tmp_path: Path) -> None:
    """One from the start, one that comes and goes as they run."""
    shapes = read_model_spec(smollm2_135m_instruct()).tensor_shapes()
    for seed, name in enumerate(("one", "two")):
        save_adapter(tmp_path / name, shapes, seed=seed, size=0.02)
    answers = []
    for ranks in (1, 3):
        process, url = engine(tmp_path, ranks, "--lora", f"one={tmp_path / 'one'}", "--lora-dir", str(tmp_path))
        try:
            process.wait_http(f"{url}/ready")
            found = [complete(url, PROMPTS[0], model=name) for name in ("test", "one")]
            post(f"{url}/v1/load_lora_adapter", {"lora_name": "two", "lora_path": "two"})
            found += [complete(url, PROMPTS[0], model=name) for name in ("test", "one", "two")]
            post(f"{url}/v1/unload_lora_adapter", {"lora_name": "two"})
            found.append(complete(url, PROMPTS[0], model="one"))
            answers.append(found)
        finally:
            status = process.stop()
        assert status == 0, process.tail()
    assert answers[0] == answers[1]
    assert answers[0][:2] == answers[0][2:4] and len(set(answers[0])) == 3


@pytest.mark.parametrize("lost", ["follower", "first"])
def test_a_lost_rank_ends_the_engine(lost: str, tmp_path: Path) -> None:
    """A follower's death fails what runs, and health; the first rank's death ends the others."""
    process, url = engine(tmp_path, 3)
    try:
        process.wait_http(f"{url}/ready")
        followers = children(process.pid)
        os.kill(followers[0] if lost == "follower" else process.pid, signal.SIGKILL)
        if lost == "first":
            until(lambda: not any(map(running, followers)), "ranks outlived the first")
            return
        # At once, though nothing runs that would miss it.
        until(lambda: "rank-1 has ended" in unhealthy(url), "health stays green")
        with pytest.raises(urllib.error.HTTPError) as answer:
            complete(url, PROMPTS[0])
        with answer.value:
            assert answer.value.code >= 500
        assert "a rank of this engine is lost" in unhealthy(url)
    finally:
        process.stop()
    until(lambda: not any(map(running, followers)), "ranks outlived their engine")
