"""Keys and values in 8-bit floats through real processes: one text whether they stay, are moved or are hit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest
from processes import BIN, Process, free_port, metric, stack
from real_models import smollm2_135m_instruct

pytestmark = pytest.mark.e2e
DEADLINE_S = 240
BEGINNING = "You are one of the editors of a small encyclopedia of rivers and bridges. Answer in one sentence. " * 6
PROMPTS = [f"{BEGINNING[: 150 * (n % 4 + 1)]} Question {n}: how long is bridge {n}?" for n in range(10)]
# A pool of 64 blocks for prompts of up to 9: cached blocks are lost, and requests wait for others' blocks.
ARGS = ("--kv-dtype", "fp8", "--kv-memory", "12Mi", "--max-model-len", "256", "--max-batched-tokens", "48")
ARGS += ("--dtype", "float32", "--threads", "1")


def ask(url: str, prompts: Sequence[str], *, together: bool) -> list[str]:
    async def one(session: aiohttp.ClientSession, prompt: str) -> str:
        body = {"model": "test", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return str(answer["choices"][0]["text"])

    async def main() -> list[str]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
            if together:
                return await asyncio.gather(*(one(session, prompt) for prompt in prompts))
            return [await one(session, prompt) for prompt in prompts]

    return asyncio.run(main())


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2_135m_instruct()


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one engine without a cache of prefixes, and with its KV in another layout, answers to one at a time."""
    port = free_port()
    argv = [str(BIN / "isthmus-runtime"), "serve", "--role", "unified", "--port", str(port), "--model", str(model)]
    argv += ["--served-model-name", "test", "--no-prefix-caching", "--kv-layout", "layer-major", *ARGS]
    process = Process("unified", argv, tmp_path_factory.mktemp("unified") / "log").start()
    try:
        url = f"http://127.0.0.1:{port}"
        process.wait_http(url + "/ready")
        answers = ask(url, PROMPTS, together=False)
        assert ask(url, PROMPTS, together=True) == answers
        return answers
    finally:
        process.stop()


@pytest.mark.parametrize("mode", ["direct", "store"])
def test_answers_are_those_of_one_engine(mode: str, model: Path, alone: list[str], tmp_path: Path) -> None:
    args = (*ARGS, "--transfer-crc", "--transfer-on-failure", "fail")
    with stack(tmp_path, mode, executor="torch", model=model, engine_args=args) as running:
        url = running.url("router")
        assert ask(url, PROMPTS, together=True) == alone
        # Prefixes are hit now, on both sides.
        assert ask(url, PROMPTS, together=True) == alone
        assert metric(running.url("decode0"), "isthmus_xfer_prompts_total", source="recomputed") == 0
        assert metric(running.url("prefill0"), "vllm:prefix_cache_hits_total") > 0
