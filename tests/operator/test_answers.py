"""Objects that are large, or small and full, as the operator reads them: what is left of them, and what they cost."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from isthmus_operator.api.v1alpha1 import parse, parse_stored
from isthmus_operator.errors import InvalidSpec
from isthmus_operator.plan.observe import observe
from isthmus_operator.plan.observed import Facts
from isthmus_operator.plan.ownership import differs, may_write, owned, was_made_by_us
from isthmus_operator.render.names import Component, Defaults
from isthmus_operator.render.service import render
from isthmus_operator.shell import answers
from isthmus_operator.shell.answers import HEAVY, SMALL, Body, Reader, cut, told, weight

EXAMPLE = yaml.safe_load((Path(__file__).parents[2] / "examples" / "direct.yaml").read_text())
EXAMPLE["metadata"] |= {"namespace": "ns", "uid": "u", "generation": 1}
SERVICE = parse(EXAMPLE)
DENSE = [{}] * 200_000
"""600 KB as JSON, 14 MB as dictionaries."""


def policy(number: int = 0) -> dict[str, Any]:
    labels = {"serving.isthmus.dev/service": "svc", **{f"example.com/{n}": "x" for n in range(10)}}
    meta = {"name": f"n{number}", "namespace": "ns", "uid": f"u{number}", "resourceVersion": "7", "labels": labels}
    return {"metadata": meta, "spec": {"ingress": DENSE}}


def decoded(text: str, *, ends: Sequence[int] = ()) -> Any:
    """In pieces that end at these bytes."""
    raw, body = text.encode(), Body()
    for begin, end in pairwise([0, *sorted(min(one, len(raw)) for one in ends), len(raw)]):
        body.feed(raw[begin:end])
    return body.end()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


TEXTS = st.text(alphabet='"\\{}[]a<\U0001f642', max_size=12)
"""What could be mistaken for marks."""


@given(
    value=VALUES
    | st.fixed_dictionaries({"items": st.lists(TEXTS | st.fixed_dictionaries({"x": TEXTS | VALUES}))})
    | st.fixed_dictionaries({"items": VALUES | st.lists(VALUES), "kind": st.text(), "z": VALUES}),
    indent=st.sampled_from([None, 1]),
    ascii=st.booleans(),
    ends=st.lists(st.integers(min_value=0, max_value=200), max_size=20),
)
def test_a_body_is_read_as_json_reads_it(value: Any, indent: int | None, ascii: bool, ends: list[int]) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert decoded(text, ends=ends) == json.loads(text)


@given(cut_at=st.integers(min_value=0, max_value=60), insert=st.sampled_from(["", "]", "}", ",", "x"]))
def test_what_is_not_json_is_told(cut_at: int, insert: str) -> None:
    whole = '{"kind": "PodList", "items": [{"a": [1]}, {"b": "c"}], "x": {}}'
    text = whole[:cut_at] + insert
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError):
            decoded(text)
    else:
        assert decoded(text) == expected


def test_of_a_heavy_item_its_identity_is_left_and_others_stay_whole() -> None:
    light = {"metadata": {"name": "l", "labels": {"a": "b"}}, "spec": {"ingress": [{}]}}
    text = json.dumps({"kind": "NetworkPolicyList", "items": [policy(), light], "metadata": {}})
    heavy, whole = decoded(text)["items"]
    assert whole == light
    kept = policy()["metadata"] | {"labels": {"serving.isthmus.dev/service": "svc"}, "ownerReferences": []}
    assert heavy == {"metadata": kept}


def test_an_entry_of_managed_fields_needs_no_name() -> None:
    """The API server takes one without, and one such object must not stop the operator."""
    entry = {"apiVersion": "networking.k8s.io/v1", "fieldsType": "FieldsV1", "fieldsV1": {}}
    heavy = policy()
    heavy["metadata"]["managedFields"] = [entry, {**entry, "operation": "Update"}]
    (item,) = decoded(json.dumps({"kind": "NetworkPolicyList", "items": [heavy]}))["items"]
    event = json.loads(told(json.dumps({"type": "ADDED", "object": {**heavy, "kind": "NetworkPolicy"}}).encode()))
    for one in (item, event["object"]):
        assert one["metadata"]["name"] == "n0" and "spec" not in one
    light = {**EXAMPLE, "metadata": {**EXAMPLE["metadata"], "managedFields": [entry]}}
    assert owned(light) == {} and not was_made_by_us(light)


def test_an_event_with_a_heavy_object_is_cut_and_another_is_not_touched() -> None:
    line = json.dumps({"type": "ADDED", "object": policy()}).encode()
    event = json.loads(told(line))
    assert event["type"] == "ADDED"
    assert event["object"]["metadata"]["uid"] == "u0"
    assert "spec" not in event["object"]
    usual = b'{"type":  "ADDED", "object": {"metadata": {}}}'
    assert told(usual) == usual


@pytest.mark.parametrize(("took_s", "again"), [(0.0, True), (240.0, False)])
def test_a_watch_that_told_nothing_for_minutes_goes_on_from_its_place(
    monkeypatch: pytest.MonkeyPatch, took_s: float, again: bool
) -> None:
    times = [0.0, took_s]
    monkeypatch.setattr(answers, "perf_counter", lambda: times.pop(0))

    class Nothing:
        async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
            for part in ():
                yield part

    async def main() -> list[bytes]:
        return [line async for line in answers._Lines(Nothing()).iter_chunked(1)]  # type: ignore[arg-type]

    assert bool(asyncio.run(main())) is again


@pytest.mark.slow
def test_a_page_of_full_objects_takes_the_room_of_one() -> None:
    text = json.dumps({"kind": "NetworkPolicyList", "items": [policy(number) for number in range(10)]})
    gc.collect()
    tracemalloc.start()
    try:
        json.loads(json.dumps(policy()))
        one = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        found = decoded(text)
        ten = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found["items"]) == 10
    assert one > 10 * 1024 * 1024, "what this is about"
    assert ten < 2 * one


def test_a_page_of_objects_that_are_written_at_length_takes_the_room_of_one() -> None:
    """The API server writes `<` as six bytes, and one letter beyond U+FFFF makes four of each character of a text."""
    spec = {"x": "<" * 100_000 + "\U0001f642"}
    item = json.dumps({"metadata": {"name": "n", "uid": "u"}, "spec": spec}, ensure_ascii=False)
    raw = ('{"kind": "DeploymentList", "items": [' + ", ".join([item.replace("<", r"\u003c")] * 20) + "]}").encode()
    gc.collect()
    tracemalloc.start()
    try:
        body = Body()
        for at in range(0, len(raw), 50_000):
            body.feed(raw[at : at + 50_000])
        found = body.end()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [len(one["spec"]["x"]) for one in found["items"]] == [100_001] * 20
    kept = 20 * 4 * 100_000
    assert peak < kept + len(raw) / 2, "the page was never whole"


def test_large_answers_are_read_one_after_the_other_and_small_ones_at_once() -> None:
    class Stream:
        def __init__(self, size: int) -> None:
            self.parts: asyncio.Queue[bytes] = asyncio.Queue()
            self.parts.put_nowait(b" " * size)

        def end(self) -> None:
            self.parts.put_nowait(b"{}")
            self.parts.put_nowait(b"")

        async def iter_any(self) -> AsyncIterator[bytes]:
            while part := await self.parts.get():
                yield part

    async def main() -> None:
        reader = Reader()
        first, second, small = Stream(SMALL + 1), Stream(SMALL + 1), Stream(SMALL - 2)
        reading = [asyncio.create_task(reader.read(cast(Any, one))) for one in (first, second, small)]
        small.end()
        assert await reading[2] == {}
        second.end()
        third = asyncio.create_task(reader.read(cast(Any, small)))
        small.end()
        assert await third == {}
        assert not reading[1].done(), "it waits for its turn"
        first.end()
        assert await asyncio.gather(*reading) == [{}] * 3

    asyncio.run(main())


@pytest.mark.parametrize("spec", [
    {"roles": {"worker": {"podPatch": {"spec": {"volumes": [{"name": f"v{n}"} for n in range(60_000)]}}}}},
    {"model": {f"f{n}": [] for n in range(60_000)}},
    {"roles": {"worker": {"podPatch": {"spec": {f"a{n}": [[0] * 99] * 9 for n in range(100)}}}}},
])  # fmt: skip
def test_a_heavy_service_is_refused_as_too_large(spec: dict[str, Any]) -> None:
    body = {**EXAMPLE, "spec": spec}
    assert weight(json.dumps(body)) > HEAVY
    left = cut(body, "InferenceService", weight(json.dumps(body)))
    assert weight(json.dumps(left)) < HEAVY
    with pytest.raises(InvalidSpec, match=r"more than \d+ items|more than \d+ fields|too many values"):
        parse_stored(left)


def made(kind: str) -> list[dict[str, Any]]:
    return [one for one in render(SERVICE, Defaults()) if one["kind"] == kind]


def test_children_that_somebody_has_filled_are_ours_and_are_put_right() -> None:
    for manifest in (*made("Deployment"), *made("NetworkPolicy"), *made("Service")):
        full = {**manifest, "spec": {**manifest["spec"], "more": DENSE}}
        left = cut(full, manifest["kind"], weight(json.dumps(full)))
        assert weight(json.dumps(left)) < 16 * 1024
        assert may_write(manifest, left)
        assert differs(manifest, left)


def test_a_filled_workload_is_seen_as_one_and_metadata_alone_costs_it_nothing_else() -> None:
    (manifest,) = [one for one in made("Deployment") if one["metadata"]["name"].startswith(f"{SERVICE.name}-decode")]
    manifest["spec"]["template"]["spec"]["imagePullSecrets"] = DENSE
    found = observe(SERVICE, [cut(manifest, "Deployment", weight(json.dumps(manifest)))], Facts(), {})
    (engine,) = found.engines
    assert (engine.component, engine.replicas) == (Component.DECODE, manifest["spec"]["replicas"])
    assert engine.revision == manifest["spec"]["selector"]["matchLabels"]["serving.isthmus.dev/revision"]
    del manifest["spec"]["template"]["spec"]["imagePullSecrets"]
    labels = manifest["metadata"]["labels"]
    full = {**manifest, "metadata": manifest["metadata"] | {"labels": labels | {f"l{n}": "" for n in range(50_000)}}}
    left = cut(full, "Deployment", weight(json.dumps(full)))
    assert left["metadata"]["labels"] == labels
    assert left["spec"] == manifest["spec"]


def test_an_object_that_is_heavy_by_its_content_is_cut_without_writing_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each edit of it cost the event loop as much again as reading it."""
    line = json.dumps({"type": "MODIFIED", "object": policy()}).encode()
    longest, dumps = 0, json.dumps

    def noted(value: Any, **how: Any) -> str:
        nonlocal longest
        text = dumps(value, **how)
        longest = max(longest, len(text))
        return text

    monkeypatch.setattr(json, "dumps", noted)
    assert b"ingress" not in told(line)
    assert longest < 10_000
