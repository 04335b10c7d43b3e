"""Real router, prefill, decode, Mooncake; a model-free executor whose tokens prove every KV byte.

The executor computes each token from the KV bytes it reads, so a lost, stale or garbled block shows as a wrong token.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from processes import MODEL, Stack, get_json, metric, stack
from tokenizers import Tokenizer

from isthmus_operator.render.pod import GRACE_AFTER_DRAIN_S
from isthmus_runtime.executor.fake import expected_scores, expected_tokens
from isthmus_runtime.request import SamplingParams

pytestmark = pytest.mark.e2e
DEADLINE_S = 60


def text_of(prompt: list[int], count: int, tokenizer: Tokenizer) -> str:
    ids = expected_tokens(prompt, SamplingParams(max_tokens=count, temperature=0.0), count)
    return str(tokenizer.decode(ids, skip_special_tokens=True))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module", params=["direct", "store", "direct, two processes an engine"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    mode, _, apart = request.param.partition(", ")
    args = ("--kv-memory", "256Ki", "--drain-timeout", "5s", "--transfer-timeout", "5s")
    args += ("--api-process", "on" if apart else "off")
    with stack(tmp_path_factory.mktemp(mode), mode, engine_args=args, decodes=2) as running:
        yield running


async def complete(session: aiohttp.ClientSession, url: str, prompt: list[int], count: int) -> tuple[int, str]:
    body = {"model": "test", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        return response.status, answer["choices"][0]["text"] if response.status == 200 else str(answer)


def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S))


def prompts(count: int, seed: int) -> list[list[int]]:
    """Families share prefixes of several blocks, so that caches are hit and blocks are skipped."""
    return [[(seed + i % 3) * 31 + j for j in range(1 + (i * 13) % 90)] for i in range(count)]


async def settled(check: Callable[[], bool], deadline_s: float = 20.0) -> None:
    """Until `check` holds; what it waits for happens in other processes."""
    end = asyncio.get_running_loop().time() + deadline_s
    while not await asyncio.to_thread(check):
        assert asyncio.get_running_loop().time() < end, "not settled in time"
        await asyncio.sleep(0.05)


def nothing_held(service: Stack) -> bool:
    engines = [n for n in service.all if n.startswith(("prefill", "decode"))]
    return all(
        metric(service.url(n), "isthmus_kv_cache_usage_ratio") == 0
        and metric(service.url(n), "isthmus_quarantined_blocks") == 0
        and get_json(service.url(n) + "/info")["running"] == 0
        for n in engines
    )


def test_many_requests_at_once_have_the_right_tokens(service: Stack, tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with client() as session:
            work = prompts(60, seed=1)
            url = service.url("router")
            answers = await asyncio.gather(*(complete(session, url, p, 12) for p in work))
            for prompt, (status, text) in zip(work, answers, strict=True):
                assert (status, text) == (200, text_of(prompt, 12, tokenizer))
        await settled(lambda: nothing_held(service))

    def moved() -> float:
        urls = (service.url("decode0"), service.url("decode1"))
        return sum(metric(url, "isthmus_xfer_prompts_total", source="transferred") for url in urls)

    asyncio.run(main())
    # Nothing went wrong, so nothing was computed twice: not even what many of them put into the pool at once.
    assert moved() >= 60


def test_prompts_are_scored_where_they_are_computed(service: Stack, tokenizer: Tokenizer) -> None:
    """As lm-evaluation-harness asks: prompts of ids in one request, the second time past full prefix caches."""
    work = [[7 * i % 90 + 3 for i in range(length)] for length in (1, 16, 75, 33)]

    async def main() -> None:
        async with client() as session:
            for most in (1, 0):
                body = {"model": "test", "prompt": work, "echo": True, "logprobs": 2, "max_tokens": most,
                        "temperature": 0, "ignore_eos": True}  # fmt: skip
                async with session.post(service.url("router") + "/v1/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    choices = (await response.json())["choices"]
                for prompt, choice in zip(work, choices, strict=True):
                    told = choice["logprobs"]["token_logprobs"]
                    assert told == [None, *(entry.logprob for entry in expected_scores(prompt, 2)), *[0.0] * most]
                    assert choice["text"] == tokenizer.decode(prompt) + text_of(prompt, most, tokenizer)
        await settled(lambda: nothing_held(service))

    asyncio.run(main())


def test_choices_of_one_prompt_take_one_transfer(service: Stack, tokenizer: Tokenizer) -> None:
    prompt = [11 * i % 90 + 3 for i in range(75)]
    decodes = [service.url("decode0"), service.url("decode1")]

    def seen(name: str, **labels: str) -> float:
        return sum(metric(url, name, **labels) for url in decodes)

    async def main() -> list[str]:
        body = {"model": "test", "prompt": prompt, "n": 6, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
        async with client() as session, session.post(service.url("router") + "/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return [choice["text"] for choice in (await response.json())["choices"]]

    before = [seen("isthmus_xfer_prompts_total", source=source) for source in ("transferred", "local")]
    assert asyncio.run(main()) == [text_of(prompt, 9, tokenizer)] * 6
    after = [seen("isthmus_xfer_prompts_total", source=source) for source in ("transferred", "local")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 5]


def test_clients_that_leave_free_everything(service: Stack) -> None:
    async def leave(session: aiohttp.ClientSession, prompt: list[int], after: int) -> None:
        body = {"model": "test", "prompt": prompt, "max_tokens": 4000, "temperature": 0, "ignore_eos": True,
                "stream": True}  # fmt: skip
        response = await session.post(service.url("router") + "/v1/completions", json=body)
        for _ in range(after):
            await response.content.readline()
        response.close()

    async def main() -> None:
        async with client() as session:
            await asyncio.gather(*(leave(session, p, i % 6) for i, p in enumerate(prompts(12, seed=7))))
        await settled(lambda: nothing_held(service))

    asyncio.run(main())


async def under_load(service: Stack, tokenizer: Tokenizer, event: Callable[[], Awaitable[None]]) -> list[int]:
    """Run a load, let `event` happen in its middle; every answer must be right or an error that says where."""
    work = prompts(40, seed=11)
    statuses: list[int] = []
    async with client() as session:

        async def one(index: int, prompt: list[int]) -> None:
            if index == len(work) // 3:
                await event()
            status, text = await complete(session, service.url("router"), prompt, 40)
            statuses.append(status)
            if status == 200:
                assert text == text_of(prompt, 40, tokenizer)
            else:
                assert status in (429, 500, 502, 503, 504), text
                assert "message" in text

        await asyncio.gather(*(one(i, p) for i, p in enumerate(work)))
    assert len(statuses) == len(work)
    return statuses


@pytest.mark.parametrize("victim", ["prefill0", "decode0", "master"])
def test_a_killed_process_strands_nobody_and_the_service_recovers(
    service: Stack, tokenizer: Tokenizer, victim: str
) -> None:
    if victim not in service.all:
        pytest.skip("direct mode has no master")

    async def kill() -> None:
        service.all[victim].kill(signal.SIGKILL)

    async def main() -> None:
        await under_load(service, tokenizer, kill)
        service.all[victim].popen.wait(5)
        service.spawn(victim)
        if victim != "master":
            await asyncio.to_thread(service.ready, victim)

        async def recovered() -> None:
            async with client() as session:
                prompt = list(range(50, 90))
                ok = False
                while not ok:
                    status, text = await complete(session, service.url("router"), prompt, 8)
                    ok = status == 200
                assert text == text_of(prompt, 8, tokenizer)

        await asyncio.wait_for(recovered(), 30)
        await settled(lambda: nothing_held(service), 40)

    asyncio.run(main())


def test_a_frozen_prefill_is_noticed_and_its_requests_are_answered(service: Stack, tokenizer: Tokenizer) -> None:
    async def freeze() -> None:
        service.all["prefill0"].kill(signal.SIGSTOP)

    async def main() -> None:
        try:
            statuses = await under_load(service, tokenizer, freeze)
            assert 200 in statuses
        finally:
            service.all["prefill0"].kill(signal.SIGCONT)
        await settled(lambda: nothing_held(service), 40)

    asyncio.run(main())


def test_sigterm_drains(service: Stack, tokenizer: Tokenizer) -> None:
    async def term() -> None:
        service.all["decode1"].kill(signal.SIGTERM)

    async def main() -> None:
        statuses = await under_load(service, tokenizer, term)
        assert set(statuses) == {200}
        assert await asyncio.to_thread(service.all["decode1"].popen.wait, 20) == 0
        service.spawn("decode1")
        await asyncio.to_thread(service.ready, "decode1")

    asyncio.run(main())


def test_an_engine_whose_master_has_gone_ends_within_its_grace(tmp_path: Path) -> None:
    """As when a whole service is deleted: the master's pod goes at once, and engines have what a pod has after its
    drain. Mooncake's own exit handlers would wait for the master for most of a minute."""
    with stack(tmp_path, "store", engine_args=("--kv-memory", "256Ki", "--drain-timeout", "1s")) as service:
        service.all["master"].kill()
        for name in ("prefill0", "decode0"):
            engine = service.all[name]
            engine.kill(signal.SIGTERM)
            assert engine.popen.wait(1 + GRACE_AFTER_DRAIN_S) == 0, engine.tail()
