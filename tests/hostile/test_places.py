"""The search itself: that it knows every field, what it makes of them, and when it says that one is dear."""

from __future__ import annotations

import gzip
import json
import random
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import mixed
from measuring import Cost
from pairs import dearest, pairs
from places import ENDPOINTS, places
from run_hostile import chosen
from search import CPU_S, LOOP_GAP_S, Row, body_of, search
from values import families, written

from isthmus_runtime.errors import InvalidRequest
from isthmus_runtime.openai import anthropic, responses
from isthmus_runtime.openai.app import BODIES
from isthmus_runtime.openai.as_sent import Names
from isthmus_runtime.openai.bodies import parsed
from isthmus_runtime.openai.embeddings import EmbeddingsRequest
from isthmus_runtime.openai.ranking import RerankRequest, ScoreRequest
from isthmus_runtime.openai.schema import chat_request, completion_request

OPEN = {
    "metadata",
    "chat_template_kwargs",
    "response_format.json_schema.schema",
    "structured_outputs.json",
    "messages.*.tool_calls.*.function.arguments",
    "tools.*.function.parameters",
}
"""Of a chat and of a completion: what may hold any JSON."""
REFUSED = {
    "/responses:stream_options.continuous_usage_stats:boolean",
    "/responses:input[].type:literal",
    "/responses:input[].summary:any",
}
"""Places where nothing is taken: the usage is told once there, and of a reasoning alone no conversation is made."""


def _parse(path: str, data: dict) -> None:
    match path:
        case "/v1/chat/completions":
            chat_request(data).conversation()
        case "/v1/completions":
            completion_request(data).prompts()
        case "/v1/responses":
            chat_request(responses.as_chat(data, Names().note)).conversation()
        case "/v1/messages" | "/v1/messages/count_tokens":
            chat_request(anthropic.as_chat(data, Names().note, counting=path.endswith("tokens"))).conversation()
        case "/v1/embeddings":
            parsed(EmbeddingsRequest, data, {})
        case "/v1/rerank":
            parsed(RerankRequest, data, {})
        case "/v1/score":
            parsed(ScoreRequest, data, {}).pairs()


def test_every_model_of_a_body_is_searched_with_all_of_its_fields() -> None:
    assert {endpoint.model for endpoint in ENDPOINTS} == set(BODIES)
    for endpoint in ENDPOINTS:
        found = {place.path[0] for place in places(endpoint)}
        names = {field.alias or name for name, field in endpoint.model.model_fields.items()}
        assert names <= found, endpoint.path


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if "completions" in e.path], ids=lambda e: e.path)
def test_what_may_hold_anything_is_known(endpoint) -> None:
    """A new one has a shape in `SHAPES` where the code looks into it, or is added here."""
    found = {".".join(place.path) for place in places(endpoint) if place.kind == "any"}
    assert found - {"prompt"} <= OPEN


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: e.path)
def test_each_place_can_be_filled_and_some_value_of_it_is_taken(endpoint) -> None:
    never = set()
    for place in places(endpoint):
        taken = False
        for family in families(place):
            for size in (1, 2):
                raw = body_of(place, family, size, 0)
                assert raw, f"{place.name}/{family}"
                with suppress(InvalidRequest):
                    _parse(endpoint.path, {name: value for name, value in json.loads(raw).items() if value is not None})
                    taken = True
        if not taken:
            never.add(place.name)
    # What is made of an object whose fields are known has others; some values are refused whatever they are.
    assert {name for name in never if not name.endswith(":object")} <= REFUSED


def _place(name: str):
    return next(place for endpoint in ENDPOINTS for place in places(endpoint) if place.name == name)


def test_sizes_grow_until_one_is_refused_and_close_in_on_the_edge() -> None:
    place, sent = _place("/chat/completions:messages[].content:string"), []

    def send(raw: bytes) -> Cost:
        content = json.loads(raw)["messages"][0]["content"]
        sent.append(len(content))
        return Cost(200 if len(content) <= 70_000 else 400, len(raw), len(raw))

    rows = list(search(place, "letter", send, 0))
    taken, refused = (max(r.size for r in rows if r.cost.status == 200), [r for r in rows if r.cost.status == 400])
    assert 70_000 / 4 < taken <= 70_000 and min(r.size for r in refused) <= 4 * 70_000
    assert max(sent) > 10 << 20, "what is far beyond the edge is sent once, too"
    assert sent[0] == 1 and all(row.id.endswith("content:string/letter") for row in rows)


def test_a_search_ends_where_a_body_is_dear_enough() -> None:
    rows = list(
        search(_place("/chat/completions:user:string"), "letter", lambda raw: Cost(200, 1, 1, cpu_s=len(raw) / 100), 0)
    )
    assert rows[-1].cost.cpu_s > CPU_S and len(rows) < 8


@pytest.mark.parametrize(
    ("cost", "flags"),
    [
        (Cost(200, 1, 1), ""),
        (Cost(200, 1, 1, gap_s=2 * LOOP_GAP_S), "gap"),
        (Cost(0, 1, 1, cpu_s=2 * CPU_S), "cpu,silent"),
        (Cost(500, 1, 1, refused=1, peak_mib=1000, stays_mib=100, others_s=3), "others,refused,peak,stays,500"),
    ],
)
def test_bars(cost, flags) -> None:
    assert Row("x", 1, cost).flags == flags


def test_values_are_the_same_for_a_seed() -> None:
    place = _place("/chat/completions:messages[].content:string")
    assert body_of(place, "words", 999, 7) == body_of(place, "words", 999, 7) != body_of(place, "words", 999, 8)


def test_what_python_would_not_make_is_written_as_it_is() -> None:
    place = _place("/chat/completions:chat_template_kwargs:any")
    make = families(place)["deep"]
    assert written({"a": make(50_000, random.Random(0))}).count(b"{") == 50_001


def test_pairs_put_a_dear_value_beside_each_other_field() -> None:
    place, other = _place("/chat/completions:user:string"), _place("/chat/completions:n:integer")
    of = {f"{place.name}/letter": (place, "letter")}
    row = Row(f"{place.name}/letter", 64, Cost(200, 100, 100, cpu_s=1.0)).json()
    (dear,) = dearest([row, {**row, "status": 400, "size": 512}], of, 3)
    made = {name: make(size) for name, make, size, _ in pairs([dear])}
    body = json.loads(made[f"{place.name}/letter + {other.name}=128"])
    assert body["n"] == 128 and body["user"] == "a" * 64
    assert not any("messages:array" in name for name in made if "messages" in place.path)


def test_a_mixture_is_the_same_for_a_seed_and_fits_the_api() -> None:
    of = {f"{place.name}/{family}": (place, family) for place, family in chosen("generate", "messages[].content:,/n:")}
    rows = [{"id": name, "size": 50, "status": 200, "cpu_s": 1, "gap_s": 0, "peak_mib": 0, "answer": 0} for name in of]
    first, second = (mixed.bodies(mixed.of_rows(rows, of, r, 9), 12, r) for r in (random.Random(3), random.Random(3)))
    assert first == second and len({body.name for body in first}) > 6
    for body in first:
        assert json.loads(gzip.decompress(body.packed)).keys() >= {"max_tokens"}, body.name
    anything = mixed.bodies(mixed.without_rows(of, random.Random(4), 9, 99), 5, random.Random(4))
    assert len(anything) == 5 and anything != first[:5]


def test_bars_of_a_mixture() -> None:
    calm = dict(seed=1, seconds=9, requests=9, statuses={}, limit_mib=1024, base_mib=99, peak_mib=900, stays_mib=9)
    calm |= dict(
        gap_s=0.1, others_s=0.1, others_wall_s=0.1, asked=100, late=4, refused=3, books=0, running=0, engines={}
    )
    found = mixed.Mixed(**calm, tracebacks=0, unanswered=())
    assert found.flags == ""
    worse = replace(found, peak_mib=1025, late=6, refused=50, stays_mib=99, books=1 << 20, running=3, tracebacks=1)
    assert replace(worse, unanswered=("x",)).flags == "killed,late,refused,stays,books,running,tracebacks,unanswered"
