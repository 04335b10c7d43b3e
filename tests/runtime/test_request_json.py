"""The short way to a request's JSON gives what the long one does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.protocol import WireRequest, request_json
from isthmus_runtime.request import GenerateRequest, SamplingParams

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
requests = st.builds(
    GenerateRequest,
    request_id=st.text(min_size=1, max_size=20),
    prompt_token_ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=20).map(tuple),
    sampling=sampling,
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=st.text(max_size=5),
    timeout_s=st.floats(0.001, 1e6),
)


@given(request=requests)
def test_request_json(request):
    assert request_json(request).decode() == WireRequest.of(request).model_dump_json()
    assert WireRequest.model_validate_json(request_json(request)).to_request() == request
