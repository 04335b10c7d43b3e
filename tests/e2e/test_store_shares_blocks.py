"""Many prompts that begin alike, and caches too small for them: blocks of the pool have many writers and readers."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import aiohttp
import pytest
from processes import Stack, metric, stack
from real_models import smollm2_135m_instruct

pytestmark = pytest.mark.e2e
DEADLINE_S = 240
CONCURRENT, ROUNDS = 24, 2
BEGINNING = "You are one of the editors of a small encyclopedia of rivers and bridges. Answer in one sentence. " * 12


def test_no_request_fails_for_blocks_that_another_one_stored(tmp_path: Path) -> None:
    """In bfloat16 KV computed in another batch rounds otherwise; what was stored first is as good as one's own."""

    async def ask(session: aiohttp.ClientSession, url: str, number: int) -> tuple[int, str]:
        prompt = f"{BEGINNING[: 240 * (number % 5 + 1)]} Question {number % 12}: how long is bridge {number % 12}?"
        body = {"model": "test", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            return response.status, await response.text()

    async def rounds(url: str) -> list[tuple[int, str]]:
        answers: list[tuple[int, str]] = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
            for _ in range(ROUNDS):
                answers += await asyncio.gather(*(ask(session, url, number) for number in range(CONCURRENT)))
        return answers

    args = ("--kv-memory", "64Mi", "--max-model-len", "512", "--threads", "1", "--transfer-on-failure", "fail")
    args += ("--dtype", "bfloat16", "--max-batched-tokens", "96")
    model = smollm2_135m_instruct()
    with stack(tmp_path, "store", executor="torch", model=model, engine_args=args, prefills=2) as running:
        answers = asyncio.run(rounds(running.url("router")))
        failed = [text for status, text in answers if status != 200]
        assert not failed, f"{len(failed)} of {len(answers)}: {failed[0]}"
        assert metric(running.url("decode0"), "isthmus_xfer_prompts_total", source="transferred") == len(answers)


def ask_through(running: Stack, prefill: int, prompt: str) -> tuple[str, int]:
    """The answer of a router that knows one of the prefill engines alone, and its cached tokens."""
    running.all["router"].stop()
    running.ports["prefill0"], running.prefills = running.ports[f"prefill{prefill}"], 1
    running.spawn("router")
    running.ready("router")
    running._wait_paired()
    body = {"model": "test", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"{running.url('router')}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        answer = json.load(response)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_what_one_prefill_engine_has_computed_another_reads(tmp_path: Path) -> None:
    args = ("--kv-memory", "64Mi", "--max-model-len", "512", "--threads", "1", "--dtype", "float32")
    model, prompt = smollm2_135m_instruct(), f"{BEGINNING} Question: how long is a bridge?"
    with stack(tmp_path, "store", executor="torch", model=model, engine_args=args, prefills=2) as running:
        second = running.url("prefill1")
        right, cached = ask_through(running, 0, prompt)
        assert cached == 0
        asked = metric(running.url("prefill0"), "isthmus_external_prefix_cache_queries_total")
        assert asked >= 64, "the first one asked the pool, too"
        text, cached = ask_through(running, 1, prompt)
        assert text == right
        assert cached == asked == metric(second, "isthmus_external_prefix_cache_hits_total")
        assert metric(second, "vllm:prefix_cache_hits_total") == cached
