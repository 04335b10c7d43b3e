"""What answers tell of their prompts (echo, log-probabilities), and what choices of one prompt share."""

from __future__ import annotations

import json
import threading
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import pytest
from aiohttp import ClientSession
from engine_stack import engine
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient, RateLimitError
from serving import served

from isthmus_runtime.executor.fake import FakeExecutor, expected_scores, expected_tokens
from isthmus_runtime.openai import answer, job_bounds
from isthmus_runtime.openai.app import BODIES, ApiConfig, OpenAiApi, add_openai_routes
from isthmus_runtime.openai.prompts import echo_of_ids, echo_of_text
from isthmus_runtime.openai.sse import CompletionFormat
from isthmus_runtime.protocol.request import request_parts
from isthmus_runtime.request import FinishReason, SamplingParams, TokenChunk, TokenLogprobs
from isthmus_runtime.serving.app import make_app
from isthmus_runtime.serving.in_flight import InFlight
from isthmus_runtime.sharing.budget import Budget

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class Counting(FakeExecutor):
    """Counts the tokens that it computes."""

    computed = 0

    def run(self, plan):
        self.computed += plan.num_tokens
        return super().run(plan)


@pytest.fixture
def stack(tokenizer):
    """`async with stack(...) as api`: the API over an engine whose model is a function of its KV bytes."""

    @asynccontextmanager
    async def start(**options):
        executor, in_flight = Counting(257, 4), InFlight()
        with engine(num_blocks=257, executor=executor, **options) as backend:
            app = make_app("test", bodies=BODIES, max_body_bytes=1 << 20)
            add_openai_routes(
                app, OpenAiApi(backend, tokenizer, ApiConfig(served_names=("tiny",)), in_flight=in_flight)
            )
            async with served(app, in_flight=in_flight) as port:
                url = f"http://127.0.0.1:{port}/v1"
                plain = DefaultAsyncHttpxClient(verify=False)  # no certificates, which it takes 40 ms to read
                client = AsyncOpenAI(base_url=url, api_key="x", max_retries=0, http_client=plain)
                yield SimpleNamespace(client=client, url=url, executor=executor, engine=backend.engine)
                await client.close()

    return start


async def post(url, path, **body):
    async with ClientSession() as session, session.post(f"{url}/{path}", json={"model": "tiny", **body}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


def test_a_batch_of_prompts_is_scored_as_lm_eval_asks(run, stack, tokenizer):
    prompts = [tokenizer.encode(text) for text in ("The quick brown fox", "größer 🙂 than the sea", "STOP")]

    async def main():
        async with stack() as api:
            for _ in range(2):  # the second time all of it is in the prefix cache
                got = await post(
                    api.url, "completions", prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0
                )
                assert [choice["index"] for choice in got["choices"]] == [0, 1, 2]
                for choice, ids in zip(got["choices"], prompts, strict=True):
                    told, expected = choice["logprobs"], expected_scores(ids, 1)
                    assert len({len(column) for column in told.values()} | {len(ids) + 1}) == 1
                    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
                    assert told["token_logprobs"][1:-1] == [entry.logprob for entry in expected]
                    for token, top, entry in zip(
                        told["tokens"][1:-1], told["top_logprobs"][1:-1], expected, strict=True
                    ):
                        assert top[token] == entry.logprob or len(top) == 1
                        assert max(top.values()) == 0.0, "the likeliest of the fake model"
                    assert choice["text"].startswith(tokenizer.decode(ids))
                    assert told["text_offset"][0] == 0 and told["text_offset"][-1] == len(tokenizer.decode(ids))
                    assert told["text_offset"] == sorted(told["text_offset"])
            assert got["usage"]["prompt_tokens"] == sum(map(len, prompts)) and got["usage"]["completion_tokens"] == 3

    run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_echo(run, stack, tokenizer, stream, logprobs, max_tokens):
    prompt = "Wooden boats cross the narrow strip"
    ids = tokenizer.encode(prompt)

    async def main():
        async with stack() as api:
            asked = dict(prompt=prompt, echo=True, logprobs=logprobs, max_tokens=max_tokens)
            extra = {"stream_options": {"include_usage": True}} if stream else {}
            got = await api.client.completions.create(model="tiny", temperature=0, stream=stream, **asked, **extra)
            chunks = [chunk async for chunk in got] if stream else [got]
            usage = chunks[-1].usage
            choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
            tokens = expected_tokens(ids, GREEDY, max_tokens)
            assert "".join(choice.text for choice in choices) == prompt + tokenizer.decode(tokens)
            assert choices[-1].finish_reason == ("stop" if {0, 2} & set(tokens) else "length")
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), len(tokens))
            told = [choice.logprobs for choice in choices if choice.logprobs is not None]
            if logprobs is None:
                assert not told
                return
            values = [value for part in told for value in part.token_logprobs]
            assert values == [None, *(entry.logprob for entry in expected_scores(ids, 0)), *[0.0] * len(tokens)]
            offsets = [offset for part in told for offset in part.text_offset]
            shown = [token for part in told for token in part.tokens]
            assert offsets == sorted(offsets) and len(offsets) == len(values) == len(shown)
            for token, begin in zip(shown[: len(ids)], offsets, strict=False):
                assert prompt[begin:].startswith(token)

    run(main())


def test_choices_of_a_prompt_compute_it_once(run, stack):
    """Of a prompt of 40 tokens the others compute what is behind its last full block, and at least one token."""

    async def main():
        async with stack(max_num_seqs=16, max_batched_tokens=512) as api:
            prompt = [i % 90 + 3 for i in range(42)]
            for n, again in ((1, 0), (8, 7 * 2)):
                before = api.executor.computed
                await post(api.url, "completions", prompt=[n, *prompt[1:]], n=n, max_tokens=1)
                assert api.executor.computed - before == len(prompt) + again
            got = await post(api.url, "completions", prompt=prompt, n=3, max_tokens=4, temperature=1, seed=5)
            expected = [expected_tokens(prompt, SamplingParams(max_tokens=4, seed=5 + i), 4) for i in range(3)]
            again = await post(
                api.url, "completions", prompt=prompt, n=3, max_tokens=4, temperature=1, seed=5, return_token_ids=True
            )
            assert [choice["token_ids"] for choice in again["choices"]] == expected
            assert [choice["text"] for choice in again["choices"]] == [choice["text"] for choice in got["choices"]]

    run(main())


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_prompt_logprobs_in_the_form_of_vllm(run, stack, path):
    async def main():
        async with stack() as api:
            if path == "completions":
                what = {"prompt": "The quick brown fox"}
            else:
                what = {"messages": [{"role": "user", "content": "The quick brown fox"}]}
            got = await post(api.url, path, **what, n=2, max_tokens=2, prompt_logprobs=2, return_token_ids=True)
            holders = got["choices"] if path == "completions" else [got]
            for holder in holders:
                expected = expected_scores(holder["prompt_token_ids"], 2)
                assert holder["prompt_logprobs"][0] is None
                assert len(holder["prompt_logprobs"]) == len(expected) + 1
                for values, entry in zip(holder["prompt_logprobs"][1:], expected, strict=True):
                    own = values[str(entry.token_id)]
                    assert (own["logprob"], own["rank"]) == (entry.logprob, entry.rank)
                    assert {str(i) for i, _ in entry.top} | {str(entry.token_id)} == set(values)
                    for rank, (i, logprob) in enumerate(entry.top, 1):
                        if i != entry.token_id:
                            assert (values[str(i)]["logprob"], values[str(i)]["rank"]) == (logprob, rank)
            assert "prompt_logprobs" not in json.dumps(await post(api.url, path, **what, max_tokens=2))

    run(main())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"echo": 1}, "echo"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["x"] * 30, "best_of": 5}, "prompt"),
        ({"prompt": [[5] * 120] * 128, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [[5] * 120] * 128, "echo": True, "logprobs": 20}, "logprobs"),
        # Each choice tells all of its prompt.
        ({"prompt": [5] * 120, "prompt_logprobs": 20, "n": 128}, "prompt_logprobs"),
        ({"prompt": [5] * 120, "prompt_logprobs": 9, "echo": True, "logprobs": 9, "n": 110}, "prompt_logprobs"),
        ({"prompt": [5] * 120, "echo": True, "logprobs": 20, "n": 128, "stream": True}, "logprobs"),
    ],
)
def test_what_cannot_be_told_is_refused(run, stack, body, param):
    async def main():
        async with stack() as api:
            with pytest.raises(BadRequestError) as caught:
                await api.client.completions.create(model="tiny", extra_body={"prompt": "x", **body}, prompt="x")
            assert caught.value.param == param

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_repeated_prompts_are_bounded_over_all_choices(run, stack, monkeypatch, stream):
    monkeypatch.setattr(job_bounds, "MAX_ECHO", 44)

    async def main():
        async with stack() as api:
            asked = dict(model="tiny", prompt="Wooden boats", echo=True, max_tokens=0, stream=stream)
            await api.client.completions.create(**asked, n=3)
            with pytest.raises(BadRequestError) as caught:
                await api.client.completions.create(**asked, n=4)
            assert caught.value.param == "echo" and "12 characters" in caught.value.message

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_scores_of_a_long_prompt_are_written_beside_the_event_loop(run, stack, monkeypatch, stream):
    monkeypatch.setattr(answer, "_MANY_SCORES", 20)
    threads = set()
    inner = CompletionFormat._with_prompt

    def noted(*args):
        threads.add(threading.current_thread())
        return inner(*args)

    monkeypatch.setattr(CompletionFormat, "_with_prompt", noted)

    async def main():
        async with stack() as api:
            asked = dict(model="tiny", echo=True, logprobs=1, max_tokens=1, stream=stream)
            for length in (10, 40):
                threads.clear()
                got = await api.client.completions.create(prompt=[5] * length, **asked)
                chunks = [chunk async for chunk in got] if stream else [got]
                told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
                assert sum(len(part.tokens) for part in told) == length + 1
                (thread,) = threads
                assert (thread is threading.current_thread()) == (length == 10)

    run(main())


def test_the_token_that_ends_a_completion_has_its_entry(run, serve):
    """Clients that score texts count entries from the end: there is one for each generated token."""

    async def main():
        async with serve(lambda request: [10, 11, 2]) as api:
            (choice,) = (await post(f"{api.url}/v1", "completions", prompt="x", logprobs=0))["choices"]
            assert choice["logprobs"]["tokens"][-1] == "<|im_end|>" and len(choice["logprobs"]["tokens"]) == 3
            assert "<|im_end|>" not in choice["text"] and choice["finish_reason"] == "stop"
            assert choice["logprobs"]["text_offset"][-1] == len(choice["text"])

    run(main())


def test_the_best_of_several_are_the_likeliest_by_token(run, serve):
    def script(request):
        number = request.sampling.seed - 100
        assert request.sampling.logprobs == 0
        yield TokenChunk((40 + number,), (TokenLogprobs(40 + number, -1.0),))
        # Longer texts are less likely in sum, not by token.
        more = number % 3
        for i in range(more):
            yield TokenChunk(
                (60,), (TokenLogprobs(60, -0.1 * (number + 1)),), FinishReason.LENGTH if i == more - 1 else None
            )
        if not more:
            yield TokenChunk((), (), FinishReason.LENGTH)

    async def main():
        async with serve(script) as api:
            body = {"prompt": ["x", "y"], "n": 2, "best_of": 5, "seed": 100, "return_token_ids": True}
            got = await post(f"{api.url}/v1", "completions", **body)
            # Means: -1, -0.6, -0.533, -1, -0.75.
            assert [choice["token_ids"][0] for choice in got["choices"]] == [42, 41, 42, 41]
            assert [choice["index"] for choice in got["choices"]] == [0, 1, 2, 3]
            assert all(choice["logprobs"] is None for choice in got["choices"])
            assert got["usage"]["completion_tokens"] == 2 * (1 + 2 + 3 + 1 + 2)
            groups = [request.prompt_group for request in api.backend.requests]
            assert len(set(groups)) == 2 and sorted(map(groups.count, set(groups))) == [5, 5]

    run(main())


@pytest.mark.parametrize("prompt", [" lazy dog" * 1000, [40] * 3000])
def test_choices_of_a_long_prompt_go_to_engines_with_one_text_of_it(run, serve, prompt):
    async def main():
        async with serve(lambda request: [10, 2]) as api:
            api.backend.max_model_len = 1 << 14
            for more in ({"n": 3}, {}):
                await post(f"{api.url}/v1", "completions", prompt=prompt, max_tokens=1, **more)
            *of_three, alone = api.backend.requests
            texts = [request_parts(request)[1] for request in of_three]
            assert texts[0] is texts[1] is texts[2]
            assert json.loads(texts[0]) == list(of_three[0].prompt_token_ids) == list(alone.prompt_token_ids)
            assert len(alone.prompt_token_ids) > 1024 and len(request_parts(alone)) == 1

    run(main())


def test_offsets_where_tokens_make_more_text_than_there_was(tokenizer):
    """A token that begins every text stands before the first character, as does a space that a tokenizer adds."""
    ids = [1, *tokenizer.encode("größer 🙂")]
    echo = echo_of_text("größer 🙂", ids, tokenizer.pieces_with(None), offsets=True)
    assert echo.text == "größer 🙂" and echo.offsets[:2] == (0, 0)
    without = echo_of_ids(ids[1:], tokenizer.pieces, offsets=True)
    assert without == type(echo)(echo.text, echo.offsets[1:])
    assert echo_of_ids(ids, tokenizer.pieces, offsets=False).offsets == ()


@pytest.mark.parametrize("stream", [False, True])
def test_ids_of_many_long_prompts_are_written_beside_the_event_loop(run, stack, monkeypatch, stream):
    monkeypatch.setattr(answer, "_MANY_IDS", 60)
    threads = set()
    method = "first" if stream else "whole"
    inner = getattr(CompletionFormat, method)

    def noted(*args):
        threads.add(threading.current_thread())
        return inner(*args)

    monkeypatch.setattr(CompletionFormat, method, noted)

    async def main():
        async with stack() as api:
            asked = dict(model="tiny", prompt=[5] * 20, max_tokens=1, stream=stream)
            for n in (3, 4):
                threads.clear()
                got = await api.client.completions.create(**asked, n=n, extra_body={"return_token_ids": True})
                chunks = [chunk async for chunk in got] if stream else [got]
                every = [choice.model_dump().get("prompt_token_ids") for chunk in chunks for choice in chunk.choices]
                told = [ids for ids in every if ids]
                assert told == [[5] * 20] * n
                (thread,) = threads
                assert (thread is threading.current_thread()) == (n == 3)

    run(main())


def test_scores_of_all_requests_have_one_budget(run, stack, budgets):
    """Each may be small, and hundreds of them gigabytes: who finds no room is told to come again."""
    budget = budgets.scores
    budget.small, busy = 0, budget.most - 50

    async def main():
        async with stack() as api:
            asked = dict(model="tiny", prompt=[5] * 40, max_tokens=1)
            with budget.holding(busy):
                with pytest.raises(RateLimitError, match="80 log-probabilities of prompts") as caught:
                    await api.client.completions.create(**asked, extra_body={"prompt_logprobs": 1})
                assert str(busy) in caught.value.message and caught.value.response.headers["retry-after"]
                await api.client.completions.create(**asked)
                await api.client.completions.create(**asked, extra_body={"prompt_logprobs": 0})
                assert budget.held == busy
            await api.client.completions.create(**asked, extra_body={"prompt_logprobs": 1})
            assert budget.held == 0
            with pytest.raises(BadRequestError):  # by the engine, after it was counted
                await api.client.completions.create(
                    **asked | {"max_tokens": 100}, extra_body={"prompt_logprobs": 1, "priority": 1 << 40}
                )
            assert budget.held == 0

    run(main())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_scores_that_a_stream_has_told_leave_their_room_to_others(run, stack, budgets, n, stream):
    """It told them with its first words, and kept their room, and the scores, for as long as it went on."""
    held = []

    class Noted(Budget):
        @contextmanager
        def _holding(self, count, who, end):
            with super()._holding(count, who, end) as told:

                def noted():
                    told()
                    held.append((count, self.held))

                yield noted
                held.append("ends")

    budget = budgets.scores = Noted(1000, 500, "scores")

    async def main():
        async with stack() as api:
            asked = dict(model="tiny", prompt=[5] * 40, max_tokens=20, n=n, echo=True, logprobs=1)
            answer = await api.client.completions.create(**asked, stream=stream)
            if stream:
                assert [chunk async for chunk in answer]
            assert budget.held == 0
            assert held == ([(40 * 2 * n, 0)] if stream else []) + ["ends"]

    run(main())
