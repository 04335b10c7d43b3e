"""Prefill and decode of three ranks each: every rank's KV arrives in its counterpart, and one that is lost ends all."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import BIN, Process, free_port, get_json, metric, running, until
from real_models import smollm2_135m_instruct

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RANKS = 3
DEADLINE_S = 60.0
LONG = "Numbers from one on: " + " ".join(str(number) for number in range(1, 90)) + " and so"
PROMPTS = ("The capital of France is", "def fibonacci(n):", LONG)


class Service(NamedTuple):
    """Its processes, and where they answer."""

    prefill: Process
    decode: Process
    url: str
    prefill_url: str
    decode_url: str


def serve(tmp: Path, name: str, *flags: str) -> tuple[Process, str]:
    port = free_port()
    argv = [str(BIN / "isthmus-runtime"), "serve", "--port", str(port), "--model", str(smollm2_135m_instruct())]
    process = Process(name, [*argv, "--served-model-name", "test", *flags], tmp / f"{name}.log").start()
    return process, f"http://127.0.0.1:{port}"


def engine(tmp: Path, role: str, ranks: int, *more: str) -> tuple[Process, str]:
    """Steps of few tokens, so that prompts take several, the first of which draw nothing."""
    flags = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--kv-memory", "32Mi", "--max-model-len", "512")
    flags += ("--max-batched-tokens", "96", "--tensor-parallel-size", str(ranks), *more)
    return serve(tmp, f"{role}{ranks}", "--role", role, *flags)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers of one rank that computes alone."""
    process, url = engine(tmp_path_factory.mktemp("alone"), "unified", 1)
    try:
        process.wait_http(f"{url}/ready")
        return [complete(url, prompt) for prompt in PROMPTS]
    finally:
        process.stop()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    tmp_path = tmp_path_factory.mktemp("pair")
    direct = ("--transfer-mode", "direct", "--transfer-transport", "tcp", "--transfer-on-failure", "fail")
    with ExitStack() as ends:
        prefill, prefill_url = engine(tmp_path, "prefill", RANKS, *direct)
        ends.callback(prefill.stop)
        decode, decode_url = engine(tmp_path, "decode", RANKS, *direct)
        ends.callback(decode.stop)
        engines = ("--prefill", prefill_url[7:], "--decode", decode_url[7:], "--on-prefill-unavailable", "reject")
        router, url = serve(tmp_path, "router", "--role", "router", *engines)
        ends.callback(router.stop)
        for process, address in ((prefill, prefill_url), (decode, decode_url), (router, url)):
            process.wait_http(f"{address}/ready")
        yield Service(prefill, decode, url, prefill_url, decode_url)


def complete(url: str, prompt: str, tokens: int = 24) -> str:
    body = {"model": "test", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        return str(json.load(response)["choices"][0]["text"])


def test_decode_goes_on_with_the_kv_of_all_ranks(service: Service, expected: list[str]) -> None:
    assert [complete(service.url, prompt) for prompt in PROMPTS] == expected
    # Again, with the first blocks in decode's cache: fewer are sent.
    assert [complete(service.url, prompt) for prompt in PROMPTS] == expected
    sent = metric(service.prefill_url, "isthmus_xfer_sent_bytes_total")
    block = get_json(f"{service.prefill_url}/info")["kv"]["bytes_per_block"]  # type: ignore[index]
    assert sent > 0 and sent % (RANKS * block) == 0, "a rank has sent less than another"
    for url in (service.prefill_url, service.decode_url):
        until(lambda url=url: metric(url, "isthmus_kv_cache_usage_ratio") == 0, "blocks are held")


def followers(process: Process) -> list[int]:
    found: list[int] = []
    for listed in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with suppress(OSError):  # of a thread that has ended
            found += map(int, listed.read_text().split())
    return found


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=DEADLINE_S):
            return True
    except urllib.error.HTTPError as answer:
        answer.close()
        return False


def test_a_lost_rank_ends_what_runs_and_the_rest_end_with_their_engine(service: Service) -> None:
    """The last test of the service."""
    lost = followers(service.decode)
    assert len(lost) == RANKS - 1
    os.kill(lost[-1], signal.SIGKILL)
    with pytest.raises(urllib.error.HTTPError) as answer:
        complete(service.url, PROMPTS[0])
    with answer.value:
        assert answer.value.code in (502, 503)
    until(lambda: not healthy(service.decode_url), "health stays green")
    well = followers(service.prefill)
    service.decode.stop()
    assert service.prefill.stop() == 0, service.prefill.tail()
    until(lambda: not any(map(running, lost + well)), "ranks outlived their engines")
    assert "a rank ended with status" not in service.prefill.log.read_text(), "a rank did not end by itself"
