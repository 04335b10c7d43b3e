"""/v1/embeddings, /v1/rerank and /v1/score: forms, limits, refusals, tenants; with the clients users have."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import shutil
import struct

import aiohttp
import openai
import pytest
from api_calls import client
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from isthmus_runtime.errors import EngineFailed, Overloaded
from isthmus_runtime.openai import ranking
from isthmus_runtime.openai.batches import WIDTH
from isthmus_runtime.openai.embeddings import numbers
from isthmus_runtime.openai.ranking import INSTRUCTION
from isthmus_runtime.openai.tenants_file import TenantsFile
from isthmus_runtime.openai.tokenizer import Tokenizer
from isthmus_runtime.request import FinishReason, ServedTask, TokenChunk, TokenLogprobs
from isthmus_runtime.sharing.budget import Budget

EMBEDS = ServedTask(kind="embed", dimensions=4, shorter=True)
SCORES = ServedTask(kind="score")


def packed(*values):
    return struct.pack(f"<{len(values)}f", *values)


def vector_of(ids, dimensions=0):
    entries = (len(ids), 1.0 / 3, -2.5e-8, sum(ids))
    return entries[: dimensions or None]


def embed(request):
    assert request.sampling.max_tokens == 1
    vector = packed(*vector_of(request.prompt_token_ids, request.pooling.dimensions))
    return [TokenChunk(finish_reason=FinishReason.STOP, vector=vector, cached_tokens=2)]


class Counted:
    """Embeds, and counts the requests that run at once."""

    def __init__(self):
        self.now = self.most = 0

    def script(self, request):
        self.now += 1
        self.most = max(self.most, self.now)
        gate = asyncio.Event()
        asyncio.get_running_loop().call_later(0.001, gate.set)
        yield gate
        self.now -= 1
        yield from embed(request)


async def post(api, path, body, key="any"):
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.post(api.url + path, json=body) as answer:
        return answer.status, await answer.json()


def test_every_form_of_input(serve, run, tokenizer):
    async def main():
        async with serve(embed) as api, client(api) as c:
            api.backend.task = EMBEDS
            for given_, ids in (
                ("two seas", [tokenizer.encode("two seas")]),
                (["two", "seas"], [tokenizer.encode("two"), tokenizer.encode("seas")]),
                ([5, 6, 7], [[5, 6, 7]]),
                ([[5], [6, 7]], [[5], [6, 7]]),
            ):
                got = await c.embeddings.create(model="tiny", input=given_)  # asks for base64
                plain = await c.embeddings.create(model="tiny", input=given_, encoding_format="float")
                for answer in (got, plain):
                    assert [e.index for e in answer.data] == list(range(len(ids)))
                    for entry, prompt in zip(answer.data, ids, strict=True):
                        assert entry.object == "embedding"
                        assert packed(*entry.embedding) == packed(*vector_of(prompt))
                    total = sum(map(len, ids))
                    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (total, total)
                    assert (answer.model, answer.object) == ("tiny", "list")
            assert api.metric("isthmus_request_success_total") == 12
            status, body = await post(api, "/v1/embeddings", {"input": "x", "encoding_format": "base64"})
            assert status == 200
            assert struct.unpack("<4f", base64.b64decode(body["data"][0]["embedding"]))[0] == 1
            status, body = await post(api, "/v1/embeddings", {"input": [1] * 300, "truncate_prompt_tokens": -1})
            assert (status, body["usage"]["prompt_tokens"]) == (200, 255)

    run(main())


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({}, "input", "input: required"),
        ({"input": []}, "input", "input: must be a string"),
        ({"input": [1, "a"]}, "input", "input: must be a string"),
        ({"input": ""}, "input", "input: is empty"),
        ({"input": ["a", ""]}, "input", "input: is empty"),
        ({"input": [1] * 256}, "input", "input: the prompt is too long: 256 tokens, but"),
        ({"input": [99999]}, "input", "input: token id 99999 is not in the vocabulary"),
        ({"input": ["a"] * 2049}, "input", "input: 2049 inputs, a request may have 2048"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format: "),
        ({"input": "a", "dimensions": 5}, "dimensions", "dimensions: 5 is not possible; allowed: 1 to 4"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions: "),
        ({"input": "a", "normalize": False}, "normalize", "normalize: not supported; remove it or set it to true"),
        ({"input": "a", "temperature": 1}, "temperature", "temperature: unknown parameter; remove it"),
        ({"input": "a", "user": 1}, "user", "user: must be a string"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "input", "input: is empty; give at least one token"),
        ({"input": "a", "model": "big"}, "model", "model: 'big' is not served here"),
    ],
)
def test_what_is_refused(serve, run, body, param, text):
    async def main():
        async with serve(embed) as api:
            api.backend.task = EMBEDS
            status, answer = await post(api, "/v1/embeddings", body)
            assert status == (404 if param == "model" else 400), answer
            assert answer["error"]["param"] == param and text in answer["error"]["message"], answer
            assert not api.backend.requests

    run(main())


def test_what_asks_for_nothing_is_let_through(serve, run):
    async def main():
        async with serve(embed) as api:
            api.backend.task = EMBEDS
            more = {"user": "me", "normalize": True, "add_special_tokens": True, "metadata": {}, "dimensions": None}
            status, _ = await post(api, "/v1/embeddings", {"input": "a", **more})
            assert status == 200

    run(main())


@pytest.mark.parametrize(
    ("task", "allowed", "refused"),
    [
        (EMBEDS, [1, 3, 4], {5: "1 to 4"}),
        (ServedTask(kind="embed", dimensions=4, shorter=True, lengths=(2, 3)), [2, 3, 4], {1: "2, 3"}),
        (ServedTask(kind="embed", dimensions=4), [4], {3: "4: the model's config.json has neither is_matryoshka"}),
    ],
)
def test_dimensions(serve, run, task, allowed, refused):
    async def main():
        async with serve(embed) as api, client(api) as c:
            api.backend.task = task
            for dimensions in allowed:
                got = await c.embeddings.create(model="tiny", input="a", dimensions=dimensions)
                assert len(got.data[0].embedding) == dimensions
                assert api.backend.requests[-1].pooling.dimensions == dimensions
            for dimensions, text in refused.items():
                with pytest.raises(openai.BadRequestError, match=text):
                    await c.embeddings.create(model="tiny", input="a", dimensions=dimensions)

    run(main())


def test_an_answer_that_would_be_too_large(serve, run):
    async def main():
        async with serve(embed) as api:
            api.backend.task = ServedTask(kind="embed", dimensions=1 << 20, shorter=True)
            status, answer = await post(api, "/v1/embeddings", {"input": ["a"] * 5})
            assert status == 400 and "5 vectors of 1048576 numbers are more than 4194304" in answer["error"]["message"]
            body = {"query": "q", "documents": ["a", "b", "c", "d", "the"]}
            status, answer = await post(api, "/v1/rerank", body)
            assert status == 400 and "6 vectors of 1048576 numbers are more than 4194304" in answer["error"]["message"]
            assert not api.backend.requests

    run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", {"input": ["a", "b"]}), ("/v1/rerank", {"query": "a", "documents": ["b"]})],
)
@pytest.mark.parametrize(
    ("name", "left", "text"),
    [("numbers", 7, "8 numbers of vectors: requests that"), ("tokens", 1, "2 tokens of prompts: requests")],
)
def test_what_all_requests_hold_has_a_budget(serve, run, budgets, path, body, name, left, text):
    """In which small ones are not counted, so that nobody keeps them out."""

    async def main():
        budget = getattr(budgets, name)
        async with serve(embed) as api:
            api.backend.task = EMBEDS
            with budget.holding(budget.most - left):
                status, answer = await post(api, path, body)
                assert status == 200, answer
                api.backend.requests.clear()
                budget.small = 0
                status, answer = await post(api, path, body)
                assert status == 429 and text in answer["error"]["message"], answer
                assert not api.backend.requests
            status, _ = await post(api, path, body)
            assert status == 200 and budget.held == 0

    run(main())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"])
def test_a_model_that_generates_refuses_by_name(serve, run, path):
    async def main():
        bodies = {"embeddings": {"input": "a"}, "rerank": {"query": "q", "documents": ["d"]}}
        body = bodies.get(path.rpartition("/")[2], {"text_1": "a", "text_2": "b"})
        async with serve(embed) as api:
            status, answer = await post(api, path, body)
            assert status == 400 and answer["error"]["param"] == "model"
            assert "model: tiny is served with --task generate, and this needs embed" in answer["error"]["message"]
            assert "it answers /v1/chat/completions" in answer["error"]["message"]
            assert not api.backend.requests

    run(main())


@pytest.mark.parametrize(("task", "routes"), [(EMBEDS, "/v1/embeddings"), (SCORES, "/v1/rerank and /v1/score")])
def test_a_model_that_does_not_generate_refuses_by_name(serve, run, task, routes):
    async def main():
        chat = {"messages": [{"role": "user", "content": "a"}]}
        async with serve(embed) as api:
            api.backend.task = task
            for path, body in (
                ("/v1/completions", {"prompt": "a"}),
                ("/v1/chat/completions", chat),
                ("/v1/responses", {"input": "a"}),
                ("/v1/messages", {**chat, "max_tokens": 3}),
            ):
                status, answer = await post(api, path, body)
                assert status == 400, answer
                assert f"--task {task.kind}, and this needs generate; it answers {routes}" in str(answer)
            status, _ = await post(api, "/tokenize", {"prompt": "a"})
            assert status == 200 and not api.backend.requests

    run(main())


def test_inputs_run_side_by_side_but_not_all_at_once(serve, run):
    async def main():
        counted = Counted()
        async with serve(counted.script) as api, client(api) as c:
            api.backend.task = EMBEDS
            got = await c.embeddings.create(model="tiny", input=[[i % 90 + 1] * (i % 7 + 1) for i in range(300)])
            assert [e.embedding[0] for e in got.data] == [i % 7 + 1 for i in range(300)]
            assert 1 < counted.most <= WIDTH
            assert len(api.backend.requests) == 300

    run(main())


@pytest.mark.parametrize("as_chunk", [False, True])
def test_the_first_failure_ends_all(serve, run, as_chunk):
    async def main():
        error = Overloaded("no room", status=429)
        forever = asyncio.Event()

        def script(request):
            if len(request.prompt_token_ids) == 2:
                return [TokenChunk(finish_reason=FinishReason.ERROR, error=error) if as_chunk else error]
            return [forever]

        async with serve(script) as api:
            api.backend.task = EMBEDS
            status, answer = await post(api, "/v1/embeddings", {"input": [[1], [1, 2], [3], [4]]})
            assert status == 429 and "no room" in answer["error"]["message"]
            assert len(api.backend.ended) == len(api.backend.requests), "none runs on"

    run(main())


def test_a_client_that_leaves_ends_its_prompts(serve, run):
    async def main():
        forever = asyncio.Event()
        async with serve(lambda request: [forever]) as api:
            api.backend.task = EMBEDS
            call = asyncio.create_task(post(api, "/v1/embeddings", {"input": ["a", "b"]}))
            await api.backend.started.wait()
            call.cancel()
            await api.backend.closed.wait()
            while len(api.backend.ended) < 2:
                api.backend.closed.clear()
                await api.backend.closed.wait()

    run(main())


@pytest.mark.parametrize("vector", [b"", packed(1.0, math.nan), packed(math.inf)])
def test_what_is_no_vector_is_an_error(serve, run, vector):
    async def main():
        async with serve(lambda request: [TokenChunk(finish_reason=FinishReason.STOP, vector=vector)]) as api:
            api.backend.task = EMBEDS
            status, answer = await post(api, "/v1/embeddings", {"input": "a"})
            assert status == 500 and "the engine gave" in answer["error"]["message"]

    run(main())


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_nine_digits_keep_every_number(values):
    chunk = TokenChunk(vector=packed(*values))
    assert packed(*json.loads(json.dumps([float(f"{v:.9g}") for v in numbers(chunk)]))) == chunk.vector


# ------------------------------------------------------------------------------------------------------------ ranking


def judge(yes, no):
    def script(request):
        assert request.sampling.allowed_token_ids == (yes, no) and request.sampling.logprobs == 2
        assert request.sampling.max_tokens == 1 and request.pooling is None
        odds = -float(len(request.prompt_token_ids)) / 50
        top = ((no, math.log1p(-math.exp(odds))), (yes, odds))
        return [TokenChunk((no,), (TokenLogprobs(no, top[0][1], top),), FinishReason.LENGTH)]

    return script


@pytest.fixture(scope="module")
def words(tmp_path_factory, model_dir):
    """A tokenizer with one token for each word, and the words' ids."""
    root = tmp_path_factory.mktemp("words") / "model"
    shutil.copytree(model_dir, root)
    raw = HfTokenizer.from_file(str(root / "tokenizer.json"))
    raw.add_tokens([AddedToken("yes", normalized=False), AddedToken("no", normalized=False)])
    raw.save(str(root / "tokenizer.json"))
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps({**config, "vocab_size": raw.get_vocab_size()}))
    return Tokenizer.load(root), raw.token_to_id("yes"), raw.token_to_id("no")


def test_rerank_asks_the_model_for_yes_or_no(serve, run, words):
    async def main():
        used, yes, no = words
        documents = ["the lazy dog jumps over seas", "dog", {"text": "the dog <|im_end|>"}]
        async with serve(judge(yes, no), used=used) as api:
            api.backend.task, api.backend.max_model_len = SCORES, 4000
            status, got = await post(api, "/v1/rerank", {"model": "tiny", "query": "a dog?", "documents": documents})
            assert status == 200, got
            lengths = [len(r.prompt_token_ids) for r in api.backend.requests]
            scores = [math.exp(-n / 50) for n in lengths]
            order = sorted(range(3), key=lambda i: -scores[i])
            assert [r["index"] for r in got["results"]] == order
            assert [r["relevance_score"] for r in got["results"]] == pytest.approx([scores[i] for i in order])
            assert got["results"][0]["document"] == {"text": "dog"}
            assert got["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
            assert got["id"].startswith("rerank-") and got["model"] == "tiny"
            prompt = used.pieces_with(None).join(api.backend.requests[0].prompt_token_ids)
            assert prompt.startswith("<|im_start|>system\nJudge whether the Document meets the requirements")
            asked = f"user\n<Instruct>: {INSTRUCTION}\n<Query>: a dog?\n<Document>: {documents[0]}<|im_end|>\n"
            assert prompt.endswith(f"{asked}<|im_start|>assistant\n")
            ends = [r.prompt_token_ids.count(used.control_id("<|im_end|>")) for r in api.backend.requests]
            assert ends == [2, 2, 2], "text of a document is text"
            body = {"query": "a dog?", "documents": documents, "top_n": 1, "return_documents": False}
            status, got = await post(api, "/rerank", body | {"instruction": "Find dogs."})
            assert [set(r) for r in got["results"]] == [{"index", "relevance_score"}]
            assert "<Instruct>: Find dogs.\n" in used.pieces_with(None).join(api.backend.requests[-1].prompt_token_ids)
            for most in (len(used.encode_alone(documents[0])), 4096):
                status, got = await post(api, "/rerank", body | {"max_tokens_per_doc": most})
                assert status == 200, got

    run(main())


def test_a_query_is_not_repeated_without_end(serve, run, words, monkeypatch):
    async def main():
        used, yes, no = words
        monkeypatch.setattr(ranking, "MAX_TOKENS", 1000)
        async with serve(judge(yes, no), used=used) as api:
            api.backend.task, api.backend.max_model_len = SCORES, 4000
            status, got = await post(api, "/v1/rerank", {"query": "the dog " * 30, "documents": ["a"] * 500})
            assert status == 400 and "of 500 pairs are more than 1000 tokens" in got["error"]["message"], got
            assert not api.backend.requests
            status, got = await post(api, "/v1/rerank", {"query": "the dog", "documents": ["a"]})
            assert status == 200, got

    run(main())


def test_pairs_are_bounded_by_their_characters_before_any_is_tokenised(serve, run, words, monkeypatch):
    """Of a text that is slow to tokenise a token may be eighty letters."""

    async def main():
        used, yes, no = words
        monkeypatch.setattr(ranking, "MAX_CHARACTERS", 20_000)
        async with serve(judge(yes, no), used=used) as api:
            api.backend.task, api.backend.max_model_len = SCORES, 4000
            asked = []
            monkeypatch.setattr(used, "chat", lambda *a, chat=used.chat, **k: asked.append(1) or chat(*a, **k))
            status, got = await post(api, "/v1/rerank", {"query": "the dog " * 30, "documents": ["a"] * 100})
            assert status == 400 and "100 pairs are 31500 characters, with the query" in got["error"]["message"], got
            assert not asked
            status, got = await post(api, "/v1/rerank", {"query": "the dog " * 30, "documents": ["a"] * 10})
            assert status == 200 and len(asked) == 10, got

    run(main())


def test_score_pairs_one_with_many_and_each_with_its_own(serve, run, words):
    async def main():
        used, yes, no = words
        async with serve(judge(yes, no), used=used) as api:
            api.backend.task, api.backend.max_model_len = SCORES, 4000
            for first, second, pairs in (
                ("a", "b", 1),
                ("a", ["b", "the dog"], 2),
                (["a", "the dog"], ["b", "seas"], 2),
            ):
                api.backend.requests.clear()
                status, got = await post(api, "/score", {"text_1": first, "text_2": second})
                assert status == 200 and got["object"] == "list" and len(api.backend.requests) == pairs
                scores = [math.exp(-len(r.prompt_token_ids) / 50) for r in api.backend.requests]
                assert [d["score"] for d in got["data"]] == pytest.approx(scores)
                assert [(d["index"], d["object"]) for d in got["data"]] == [(i, "score") for i in range(pairs)]
            status, got = await post(api, "/score", {"text_1": ["a", "b"], "text_2": ["b", "c", "d"]})
            assert status == 400 and "text_1: 2 texts for 3 of text_2; give one, or as many" in str(got)

    run(main())


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/rerank", {"query": "q"}, "documents: required"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents: "),
        ("/v1/rerank", {"query": "", "documents": ["d"]}, "query: "),
        ("/v1/rerank", {"query": "q", "documents": [3]}, "documents.0"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "max_chunks_per_doc": 3}, "max_chunks_per_doc: unknown"),
        ("/v1/rerank", {"query": "q", "documents": ["the dog " * 2000]}, "documents: "),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "max_tokens_per_doc": 0}, "max_tokens_per_doc: "),
        ("/v1/rerank", {"query": "q", "documents": ["d", "dog " * 90], "max_tokens_per_doc": 80}, "documents[1]: "),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "truncate_prompt_tokens": 3}, "would cut the question"),
        ("/v1/score", {"text_1": "a"}, "text_2: required"),
    ],
)
def test_what_ranking_refuses(serve, run, words, path, body, text):
    async def main():
        async with serve(judge(*words[1:]), used=words[0]) as api:
            api.backend.task, api.backend.max_model_len = SCORES, 4000
            status, got = await post(api, path, body)
            assert status == 400 and text in got["error"]["message"], got
            assert not api.backend.requests

    run(main())


def test_a_vocabulary_without_yes_cannot_score(serve, run):
    async def main():
        async with serve(embed) as api:
            api.backend.task, api.backend.max_model_len = SCORES, 4000
            status, got = await post(api, "/v1/rerank", {"query": "q", "documents": ["d"]})
            assert status == 400 and "'yes' is" in got["error"]["message"]

    run(main())


def test_an_embedding_model_ranks_by_cosines(serve, run, tokenizer):
    async def main():
        vectors = {"q": (3.0, 0.0), "same": (1.0, 0.0), "half": (1.0, math.sqrt(3)), "other": (0.0, 2.0)}

        def script(request):
            vector = vectors[tokenizer.decode(request.prompt_token_ids)]
            return [TokenChunk(finish_reason=FinishReason.STOP, vector=packed(*vector))]

        async with serve(script) as api:
            api.backend.task = EMBEDS
            documents = ["other", "same", "half", "same"]
            status, got = await post(api, "/v1/rerank", {"query": "q", "documents": documents})
            assert status == 200, got
            assert [r["index"] for r in got["results"]] == [1, 3, 2, 0]
            assert [r["relevance_score"] for r in got["results"]] == pytest.approx([1, 1, 0.5, 0], abs=1e-6)
            assert len(api.backend.requests) == 4, "each text once"
            status, got = await post(api, "/v1/score", {"text_1": ["q", "other"], "text_2": ["half", "other"]})
            assert [d["score"] for d in got["data"]] == pytest.approx([0.5, 1.0])

    run(main())


def test_tenants(serve, run, tmp_path, tokenizer):
    async def main():
        path = tmp_path / "tenants.json"
        key = "key-of-team-a-0001"
        path.write_text(json.dumps({"tenants": [{"name": "team-a", "keys": [key], "concurrency": 2, "priority": 5}]}))
        counted = Counted()
        async with serve(counted.script, tenants=TenantsFile(str(path), 0.0)) as api:
            api.backend.task = EMBEDS
            status, _ = await post(api, "/v1/embeddings", {"input": ["a"] * 9}, "nobody")
            assert status == 401
            status, _ = await post(api, "/v1/embeddings", {"input": ["a"] * 9, "cache_salt": "s"}, key)
            assert status == 200 and counted.most == 2
            assert {r.priority for r in api.backend.requests} == {5}
            assert all(len(r.cache_salt) == 64 for r in api.backend.requests)
            assert (
                api.metric('isthmus_router_tenant_tokens_total{kind="prompt",model_name="tiny",tenant="team-a"}') == 9
            )

    run(main())


def test_an_engine_that_breaks_off_is_an_error(serve, run):
    async def main():
        async with serve(lambda request: []) as api:
            api.backend.task = EMBEDS
            status, got = await post(api, "/v1/embeddings", {"input": "a"})
            assert status == EngineFailed("x").status and "ended without a finish reason" in got["error"]["message"]

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_gives_way_in_a_budget_is_told_so(serve, run, budgets, stream):
    async def main():
        budget, go = Budget(150, 100, "things"), asyncio.Event()
        budgets.tokens = budget
        async with serve(lambda request: [5, go]) as api, aiohttp.ClientSession() as http:
            body = {"prompt": [1] * 90, "max_tokens": 9, "stream": stream, "model": "tiny"}
            asked = asyncio.create_task(http.post(f"{api.url}/v1/completions", json=body))
            answer = await asked if stream else None
            if answer is not None:
                await answer.content.readuntil(b"\n\n")
            await api.backend.started.wait()
            assert budget.held == 90
            with budget.holding(61, "another", lambda error: None):
                async with answer or await asked as answer:
                    assert answer.status == (200 if stream else 429)
                    text = (await answer.read()).decode()
                assert text.count("90 things: requests that run") == 1 and text.count('"error"') == 1
                assert budget.held == 61
            await api.backend.closed.wait()
            assert api.backend.ended == ["closed"] and budget.held == 0

    run(main())


def test_long_prompts_of_generations_have_the_same_budget(serve, run, budgets):
    async def main():
        budget = budgets.tokens
        budget.small = 3
        async with serve(lambda request: [5]) as api:
            with budget.holding(budget.most - 7):
                for prompt, expected in (([1, 2, 3], 200), ([1, 2, 3, 4], 200), ([[1, 2, 3, 4]] * 2, 429)):
                    body = {"prompt": prompt, "max_tokens": 1, "n": 2}
                    status, answer = await post(api, "/v1/completions", body)
                    assert status == expected, answer
            assert budget.held == 0

    run(main())
