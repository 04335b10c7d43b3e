"""Scores of pairs of texts: POST /v1/rerank (Cohere's and Jina's form) and /v1/score (vLLM's).

A model that is served to embed scores by the cosine of two vectors; one that is served to score says "yes" or "no" to a
question about the pair, and the score is how likely its yes is, of the two (Qwen3-Reranker, arXiv:2506.05176).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import exp, sqrt
from os import urandom
from time import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import EngineFailed, InvalidRequest
from ..request import GenerateRequest, SamplingParams, ServedTask, TokenChunk
from ..sharing.threads_in_turns import go_on
from .batches import Batch
from .bodies import hints, json_object, parsed
from .chat import Conversation
from .embeddings import PromptUsage, VectorRequests, check_numbers, numbers
from .plan import Planner
from .tokenizer import Tokenizer, TooManyTokens

MAX_PAIRS = 2048
MAX_TOKENS = 1 << 23
"""Most tokens of all prompts of one request, 64 MiB of them. A body has fewer, but a model that is served to score gets
the query once for each document."""
MAX_CHARACTERS = 1 << 24
"""The same of their texts, which are tokenised one by one, as a query ends where its document begins."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What Qwen3-Reranker was trained to be told where a request says nothing else."""
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)

_Text = Annotated[str, Field(min_length=1)]


class Document(BaseModel):
    """A document as an object."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    text: _Text


class _Pairs(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, json_schema_extra=hints({}))

    model: str = ""
    """Empty: the one that is served."""
    instruction: str = Field(default=INSTRUCTION, min_length=1)
    """What makes a document a good one, for a model that is served to score."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=2**31)
    """Of an embedding model: keep the last so many tokens of a text; -1: as many as fit."""
    cache_salt: str = Field(default="", max_length=256)
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)


class RerankRequest(_Pairs):
    """POST /v1/rerank."""

    query: _Text
    documents: Annotated[list[_Text | Document], Field(min_length=1, max_length=MAX_PAIRS)]
    top_n: int | None = Field(default=None, ge=0)
    """How many are told, the best ones; none or 0: all."""
    return_documents: bool = True
    max_tokens_per_doc: int | None = Field(default=None, ge=1, lt=2**31)
    """A document of more tokens is refused: none is cut without the client's knowing."""

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return [d if isinstance(d, str) else d.text for d in self.documents]


class ScoreRequest(_Pairs):
    """POST /v1/score: each text of `text_2` with the one of `text_1`, or with that at its place."""

    text_1: _Text | Annotated[list[_Text], Field(min_length=1, max_length=MAX_PAIRS)]
    text_2: _Text | Annotated[list[_Text], Field(min_length=1, max_length=MAX_PAIRS)]

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs: as many as texts in `text_2`. InvalidRequest where the lists do not go together."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"text_1: {len(first)} texts for {len(second)} of text_2; give one, or as many", param="text_1"
            )
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


class RankedDocument(BaseModel):
    """One document's place."""

    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(BaseModel):
    """Answer of /v1/rerank, the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage


class Score(BaseModel):
    """The score of one pair."""

    object: Literal["score"]
    index: int
    score: float


class Scores(BaseModel):
    """Answer of /v1/score, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


_Read = Callable[[Sequence[TokenChunk]], list[float]]
"""The pairs' scores out of the prompts' last chunks."""


class Ranker:
    """Makes batches of pairs. Called from several threads."""

    def __init__(
        self,
        planner: Planner,
        vectors: VectorRequests,
        tokenizer: Tokenizer,
        task: Callable[[], ServedTask],
        timeout_s: float,
    ) -> None:
        self._planner = planner
        self._vectors = vectors
        self._tokenizer = tokenizer
        self._task = task
        self._timeout_s = timeout_s

    def rerank(self, body: bytes) -> Batch:
        """A body of /v1/rerank. Raises RequestError."""
        request = parsed(RerankRequest, json_object(body), {})
        texts = request.texts
        if request.max_tokens_per_doc is not None:
            self._check_documents(texts, request.max_tokens_per_doc)

        def tell(scores: Sequence[float], head: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
            ranked = sorted(range(len(scores)), key=lambda number: -scores[number])[: request.top_n or None]
            results = [
                {"index": number, "relevance_score": scores[number]}
                | ({"document": {"text": texts[number]}} if request.return_documents else {})
                for number in ranked
            ]
            return {**head, "results": results, "usage": usage}

        pairs = [(request.query, text) for text in texts]
        repeated = sum(map(len, texts)) if request.return_documents else 0
        return self._batch(request, "rerank-", pairs, "documents", tell, repeated)

    def score(self, body: bytes) -> Batch:
        """A body of /v1/score. Raises RequestError."""
        request = parsed(ScoreRequest, json_object(body), {})

        def tell(scores: Sequence[float], head: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
            data = [{"object": "score", "index": number, "score": score} for number, score in enumerate(scores)]
            return {**head, "object": "list", "created": int(time()), "data": data, "usage": usage}

        return self._batch(request, "score-", request.pairs(), "text_2", tell)

    def _check_documents(self, texts: Sequence[str], most: int) -> None:
        for number, text in enumerate(texts):
            if len(text.encode()) <= most:
                continue  # a token is a byte or more
            try:
                self._tokenizer.encode_alone(text, most)
            except TooManyTokens as e:
                raise InvalidRequest(
                    f"documents[{number}]: {e}, more than max_tokens_per_doc, which is {most}, and documents are not "
                    "cut; shorten it",
                    param=f"documents[{number}]",
                ) from e
            go_on()

    def _batch(
        self,
        request: _Pairs,
        prefix: str,
        pairs: list[tuple[str, str]],
        param: str,
        tell: Callable[[Sequence[float], dict[str, Any], dict[str, int]], dict[str, Any]],
        repeated: int = 0,
    ) -> Batch:
        limit = self._planner.served.admit(request.model, "embed", "score")
        answer_id = prefix + urandom(16).hex()
        make = self._cosines if self._task().kind == "embed" else self._judged
        requests, read = make(request, answer_id, pairs, limit, param)
        head = {"id": answer_id, "model": self._planner.served.named(request.model)}

        def told(chunks: Sequence[TokenChunk], tokens: int) -> Iterator[bytes]:
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            yield json.dumps(tell(read(chunks), head, usage)).encode()

        held = len(requests) * self._task().dimensions
        return Batch(answer_id=answer_id, requests=requests, tell=told, numbers=held, characters=repeated)

    def _cosines(
        self, request: _Pairs, answer_id: str, pairs: list[tuple[str, str]], limit: int, param: str
    ) -> tuple[tuple[GenerateRequest, ...], _Read]:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        check_numbers(len(texts), self._task().dimensions, param)
        places = {text: number for number, text in enumerate(texts)}
        prompts = [self._planner.prompt_ids(text, limit, request.truncate_prompt_tokens, param) for text in texts]
        requests = self._vectors.of(answer_id, prompts, priority=request.priority, cache_salt=request.cache_salt)
        numbered = [(places[first], places[second]) for first, second in pairs]
        return requests, partial(_cosines_of, numbered)

    def _judged(
        self, request: _Pairs, answer_id: str, pairs: list[tuple[str, str]], limit: int, param: str
    ) -> tuple[tuple[GenerateRequest, ...], _Read]:
        if request.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens: would cut the question in front of a document; remove it, or shorten the "
                "documents",
                param="truncate_prompt_tokens",
            )
        characters = sum(len(query) + len(document) for query, document in pairs) + len(pairs) * len(
            request.instruction
        )
        if characters > MAX_CHARACTERS:
            raise InvalidRequest(
                f"{param}: {len(pairs)} pairs are {characters} characters, with the query in each of them, and at most "
                f"{MAX_CHARACTERS} are allowed; send several requests",
                param=param,
            )
        yes, no = self._word("yes"), self._word("no")
        prompts: list[tuple[int, ...]] = []
        tokens = 0
        for pair in pairs:
            prompts.append(self._planner.bounded(self._question(request.instruction, *pair), limit, param))
            tokens += len(prompts[-1])
            if tokens > MAX_TOKENS:
                raise InvalidRequest(
                    f"{param}: the first {len(prompts)} of {len(pairs)} pairs are more than {MAX_TOKENS} tokens, with "
                    "the query in each of them; send several requests",
                    param=param,
                )
        requests = tuple(
            GenerateRequest(
                request_id=f"{answer_id}-{number}",
                prompt_token_ids=ids,
                sampling=SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=(yes, no), logprobs=2),
                priority=request.priority,
                cache_salt=request.cache_salt,
                timeout_s=self._timeout_s,
            )
            for number, ids in enumerate(prompts)
        )
        return requests, partial(_likelihoods_of, yes, no)

    def _question(self, instruction: str, query: str, document: str) -> Conversation:
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        thinks = self._tokenizer.knows("enable_thinking")
        return Conversation(
            messages=[{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}],
            kwargs={"enable_thinking": False} if thinks else {},
        )

    def _word(self, word: str) -> int:
        ids = self._tokenizer.encode_alone(word)
        if len(ids) != 1:
            raise InvalidRequest(
                f"model: {word!r} is {len(ids)} tokens of its vocabulary; a model that scores has one for it",
                param="model",
            )
        return ids[0]


def _cosines_of(pairs: Sequence[tuple[int, int]], chunks: Sequence[TokenChunk]) -> list[float]:
    # Two vectors at a time: as numbers of Python's, those of a large request would take half a gigabyte.
    lengths: list[float] = []
    for chunk in chunks:
        lengths.append(sqrt(sum(entry * entry for entry in numbers(chunk))) or 1.0)
        go_on()
    found: list[float] = []
    unpacked, vector = -1, tuple[float, ...]()
    for first, second in pairs:
        if first != unpacked:
            unpacked, vector = first, numbers(chunks[first])
        product = sum(a * b for a, b in zip(vector, numbers(chunks[second]), strict=True))
        found.append(max(-1.0, min(1.0, product / (lengths[first] * lengths[second]))))  # but for rounding, it is
        go_on()
    return found


def _likelihoods_of(yes: int, no: int, chunks: Sequence[TokenChunk]) -> list[float]:
    found = []
    for chunk in chunks:
        told = dict(chunk.logprobs[0].top) if chunk.logprobs else {}
        if not {yes, no} <= told.keys():
            raise EngineFailed("the engine told no log-probabilities of yes and no")
        found.append(exp(told[yes]) / (exp(told[yes]) + exp(told[no])))
    return found
