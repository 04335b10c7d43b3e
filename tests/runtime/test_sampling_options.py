"""A sampling option is written down once: the API, the wire and the executor's rows have all of them."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from isthmus_runtime.executor.adjustments import AdjustedRows
from isthmus_runtime.executor.sampling_rows import SamplingRows
from isthmus_runtime.openai.schema import parse_chat, parse_completion
from isthmus_runtime.protocol.request import WireRequest, request_parts
from isthmus_runtime.request import GenerateRequest, SamplingOptions, SamplingParams

# Another value than the default for each option.
DRAWN: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25}
OTHER = DRAWN | PENALTIES
PARAMS = SamplingParams(**OTHER, max_tokens=3, seed=5, stop_token_ids=(1,), logprobs=2)


def test_every_option_is_tried_here() -> None:
    assert {field.name for field in fields(SamplingOptions)} == set(OTHER)


@pytest.mark.parametrize(
    ("parse", "body"), [(parse_completion, {"prompt": "x"}), (parse_chat, {"messages": [{"role": "user"}]})]
)
def test_the_api_takes_each_option_and_resolves_the_others(parse: Any, body: dict[str, Any]) -> None:
    defaults = SamplingOptions(**OTHER)
    for name in OTHER:
        own = getattr(SamplingOptions(), name)
        request = parse(json.dumps({"model": "m", **body, name: own}).encode())
        assert request.sampling(defaults) == {**OTHER, name: own}
    assert parse(json.dumps({"model": "m", **body, "top_k": -1}).encode()).sampling(defaults)["top_k"] == 0


def test_the_wire_carries_each_option_within_its_bounds() -> None:
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=PARAMS)
    sent = json.loads(b"".join(request_parts(request)))
    assert WireRequest.model_validate(sent).to_request() == request
    for name, value in (
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", "x"),
        ("seed", 2**63),
        ("new", 1),
    ):
        with pytest.raises(ValidationError, match=name):
            WireRequest.model_validate({**sent, "sampling": {**asdict(PARAMS), name: value}})


def test_the_executor_keeps_each_option_that_is_not_off() -> None:
    rows = SamplingRows(2)
    rows.set(1, PARAMS)
    found, wanted = rows.of(np.array([1]))
    assert {name: found[name].tolist() for name in DRAWN} == {name: [value] for name, value in DRAWN.items()}
    assert (found["seeds"].tolist(), wanted.tolist()) == ([5], [2])
    rows.set(1, replace(PARAMS, top_k=0, top_p=1.0, min_p=0.0))
    assert set(rows.of(np.array([1]))[0]) == {"temperature", "seeds"}


def test_the_executor_keeps_each_penalty_that_is_not_off() -> None:
    rows, at = AdjustedRows(), (np.array([1]), np.array([9]))
    rows.set(1, PARAMS, 4)
    found = rows.of(*at)
    assert found is not None
    assert [column.tolist() for column in found.penalties] == [[0], [1], [4], [9], [1.25], [-0.5], [0.5]]
    rows.set(1, replace(PARAMS, **{name: getattr(SamplingOptions(), name) for name in PENALTIES}), 4)
    assert rows.of(*at) is None


def test_a_temperature_beyond_fp32_is_as_hot_as_fp32_gets() -> None:
    rows = SamplingRows(1)
    rows.set(0, replace(PARAMS, temperature=1e300))
    found, _ = rows.of(np.array([0]))
    assert np.isfinite(found["temperature"]).all() and found["temperature"][0] > 1e38
