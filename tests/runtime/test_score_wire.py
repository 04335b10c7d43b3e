"""Scores of prompts between engines and routers: in pieces or whole, what is read is what was written."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.errors import Cancelled
from isthmus_runtime.protocol import scores as score_wire
from isthmus_runtime.protocol.calls import PrefillAnswer
from isthmus_runtime.protocol.lines import parse_line, parse_prefill_answer, prefill_answer_json, token_line
from isthmus_runtime.request import FinishReason, TokenChunk, TokenLogprobs

number = st.sampled_from([-math.inf, -0.0, -1e-300, -12.5]) | st.floats(-100, 0)
ids = st.integers(0, 2**31)
entry = st.builds(TokenLogprobs, ids, number, st.lists(st.tuples(ids, number), max_size=3).map(tuple), ids)


@given(st.lists(entry, max_size=40), st.integers(0, 200), st.text(max_size=30))
def test_what_is_read_is_what_was_written(scores: list[TokenLogprobs], long: int, text: str) -> None:
    error = Cancelled(text + '"p":[[],1]]')
    chunk = TokenChunk(
        (1, 2),
        tuple(one._replace(rank=0) for one in scores[:2]),
        FinishReason.ABORT,
        error,
        3,
        "local",
        tuple(scores),
        b"\0\0\0\0",
    )
    answer = PrefillAnswer(attempt="a", num_tokens=41, cached_tokens=2, prompt_logprobs=tuple(scores))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_wire, "LONG", long)
        patch.setattr(score_wire, "_ENTRIES", 3)
        found = parse_line(token_line(chunk))
        assert isinstance(found, TokenChunk)
        assert found._replace(error=None) == chunk._replace(error=None)
        assert found.error is not None and found.error.message == error.message
        assert parse_prefill_answer(prefill_answer_json(answer)) == answer
        assert PrefillAnswer.model_validate_json(prefill_answer_json(answer)) == answer


def test_no_piece_of_a_long_answer_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds up every other thread while it is read or written."""
    scores = tuple(TokenLogprobs(i, -0.125, ((i, -0.125),) * 20, 1) for i in range(5000))
    read, written = list[int](), list[int]()
    from_json, to_json = score_wire.from_json, score_wire.to_json

    def note(data: bytes) -> object:
        read.append(len(data))
        return from_json(data)

    def noted(value: object, **options: object) -> bytes:
        written.append(len(made := to_json(value, **options)))  # type: ignore[arg-type]
        return made

    monkeypatch.setattr(score_wire, "from_json", note)
    monkeypatch.setattr(score_wire, "to_json", noted)
    answer = PrefillAnswer(attempt="a", num_tokens=5001, prompt_logprobs=scores)
    assert parse_prefill_answer(prefill_answer_json(answer)) == answer
    assert len(written) > 9 and len(read) > 9
    line = token_line(TokenChunk((1,), prompt_logprobs=scores))
    assert parse_line(line) == TokenChunk((1,), prompt_logprobs=scores)
    assert len(line) > 20 * score_wire.LONG
    assert max(read) < 2 * score_wire.LONG and max(written) < 8 * score_wire.LONG


@pytest.mark.parametrize("damage", [b"[[", b"]]", b",1]", b"0.125"])
def test_damage_is_refused(damage: bytes) -> None:
    scores = tuple(TokenLogprobs(i, -0.125, ((i, -0.125),), 1) for i in range(5000))
    line = token_line(TokenChunk((1,), prompt_logprobs=scores))
    for at in (len(line) // 2, len(line) - 40):
        with pytest.raises((ValueError, TypeError)):
            parse_line(line[:at] + damage * 2 + line[at:])
