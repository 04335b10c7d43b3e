"""The short way to a request's JSON gives what the long one does, and routers get on with engines of other versions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus_runtime.protocol.info import EngineInfo, KvInfo, TransferInfo
from isthmus_runtime.protocol.request import MANY_ALLOWED, WireRequest, request_parts
from isthmus_runtime.request import GenerateRequest, PromptText, SamplingParams, Structure, WrittenIds, tokenised

sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10**6),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.001, 1),
    top_k=st.integers(0, 100),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.lists(st.integers(0, 10**6), max_size=3).map(tuple),
    logprobs=st.integers(-1, 20),
)
prompts = st.builds(
    PromptText, text=st.text(min_size=1, max_size=20), special=st.booleans(), room=st.integers(2, 10**6)
)
by_ids = st.builds(dict, prompt_token_ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=20).map(tuple))
requests = st.builds(
    lambda prompt, **rest: GenerateRequest(**prompt, **rest),
    by_ids | st.builds(dict, prompt=prompts),
    request_id=st.text(min_size=1, max_size=20),
    sampling=sampling,
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=st.text(max_size=5),
    timeout_s=st.floats(0.001, 1e6),
    structure=st.none() | st.builds(Structure, kind=st.just("regex"), text=st.text(max_size=5)),
)


def sent(request):
    return b"".join(request_parts(request))


@given(request=requests)
def test_request_json(request):
    assert sent(request).decode() == WireRequest.of(request).model_dump_json(exclude_defaults=True)
    assert WireRequest.model_validate_json(sent(request)).to_request() == request


def allowing(ids, request_id="r"):
    sampling = SamplingParams(max_tokens=3, allowed_token_ids=tuple(ids))
    return GenerateRequest(request_id=request_id, prompt_token_ids=(1,), sampling=sampling)


@given(ids=st.sets(st.integers(0, 5000), min_size=MANY_ALLOWED - 2, max_size=MANY_ALLOWED + 3))
@settings(max_examples=30)
def test_many_ids_that_are_allowed_go_as_a_mask(ids):
    request = allowing(sorted(ids))
    raw = sent(request)
    assert json.loads(raw) == json.loads(WireRequest.of(request).model_dump_json(exclude_defaults=True))
    assert WireRequest.model_validate_json(raw).to_request() == request
    assert ("allowed" in json.loads(raw)) == (len(ids) > MANY_ALLOWED)


def test_a_vocabulary_of_allowed_ids_is_small_and_there_once():
    """For each of 128 choices it was 330 KB on the wire, and 1.8 MB in each of two engines."""
    bodies = [sent(allowing(range(50_000), f"r-{i}")) for i in range(3)]
    assert max(map(len, bodies)) < 9_000
    found = [WireRequest.model_validate_json(body).to_request().sampling.allowed_token_ids for body in bodies]
    assert found[0] == tuple(range(50_000)) and all(ids is found[0] for ids in found)


@pytest.mark.parametrize("allowed", ["AAA", "!!!!", "AAAA", "AQ==" * 100_000])
def test_a_mask_that_is_none_is_named(allowed):
    body = {"request_id": "r", "prompt_token_ids": [1], "sampling": {"max_tokens": 3}, "allowed": allowed}
    with pytest.raises(ValidationError, match=r"allowed|base64|padding"):
        WireRequest.model_validate(body)
    with pytest.raises(ValidationError, match="be empty beside"):
        sampling = {"max_tokens": 3, "allowed_token_ids": [1]}
        WireRequest.model_validate({**body, "allowed": "AQ==", "sampling": sampling})


@pytest.mark.parametrize("prompt", [{}, {"prompt_token_ids": []}, {"prompt_token_ids": [1], "prompt": "text"}], ids=str)
def test_a_prompt_comes_in_one_form(prompt):
    if "prompt" in prompt:
        prompt = {**prompt, "prompt": {"text": "t", "special": True, "room": 9}}
    with pytest.raises(ValidationError, match="prompt"):
        WireRequest.model_validate({"request_id": "r", "sampling": {"max_tokens": 3}, **prompt})


@pytest.mark.parametrize(("most", "left"), [(3, 3), (7, 7), (8, 7), (100, 7)])
def test_the_answer_has_what_the_prompt_leaves(most, left):
    prompt = PromptText(text="t", special=True, room=10)
    request = GenerateRequest(request_id="r", sampling=SamplingParams(max_tokens=most), prompt=prompt)
    sampling = SamplingParams(max_tokens=left)
    assert tokenised(request, [4, 5, 6]) == GenerateRequest(
        request_id="r", prompt_token_ids=(4, 5, 6), sampling=sampling
    )


def test_a_plain_request_has_no_field_that_an_older_engine_would_refuse():
    sampling = SamplingParams(max_tokens=3, seed=5, stop_token_ids=(2,))
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=sampling)
    assert json.loads(sent(request)) == {
        "request_id": "r",
        "prompt_token_ids": [1],
        "sampling": {"max_tokens": 3, "seed": 5, "stop_token_ids": [2]},
    }


def test_what_a_newer_engine_tells_beyond_what_we_know_is_passed_over():
    info = EngineInfo(
        role="decode",
        model="/m",
        served_names=("m",),
        fingerprint="f",
        kv=KvInfo(
            block_size=4, physical_blocks=9, usable_blocks=8, bytes_per_block=32, max_model_len=64, layout_digest="d"
        ),
        transfer=TransferInfo(),
        version="9",
    )
    told = info.model_dump() | {"new": 1}
    told["kv"]["new"] = told["transfer"]["new"] = {"a": 1}
    assert EngineInfo.model_validate(told) == info


def test_ids_that_are_written_once_are_a_part_by_themselves():
    ids = WrittenIds.of(range(5))
    first, second = (
        GenerateRequest(request_id=r, prompt_token_ids=ids, sampling=SamplingParams(max_tokens=1)) for r in "ab"
    )
    assert request_parts(first)[1] is request_parts(second)[1] == b"[0,1,2,3,4]"
    assert WireRequest.model_validate_json(sent(second)).to_request() == second
    assert ids.ends == (0, 4) and ids.ends is ids.ends
    assert WrittenIds.of(()).json == b"[]"


def test_ids_go_on_as_they_were_written():
    ids = WrittenIds((1, 20, 300))
    ids.json = b"[1,20,300]"
    for sampling in (SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, allowed_token_ids=tuple(range(1000)))):
        written = GenerateRequest(request_id="r", prompt_token_ids=ids, sampling=sampling, cache_salt="s")
        plain = replace(written, prompt_token_ids=tuple(ids))
        assert json.loads(sent(written)) == json.loads(sent(plain))
        assert WireRequest.model_validate_json(sent(written)).to_request() == plain
