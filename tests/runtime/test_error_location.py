"""Every error that ends a request says where: stage and attempt, over every hop, and for each request its own."""

from __future__ import annotations

import pytest
from engine_world import World, request

from isthmus_runtime.engine.sequence import Kind
from isthmus_runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    NeverFits,
    Overloaded,
    RequestError,
    TransferFailed,
    error_from_json,
)

KINDS = (Overloaded, TransferFailed, DeadlineExceeded, Cancelled, EngineFailed)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_located_once_and_survives_the_hop(kind: type[RequestError]) -> None:
    error = kind("why")
    found = error.located("sending", "a-1")
    assert (found.stage, found.attempt, found.message, found.status) == ("sending", "a-1", "why", error.status)
    assert error.stage is None and error.attempt is None, "one error may end many requests"
    assert type(found) is kind and found.located("decode", "a-2").to_json() == found.to_json()
    again = error_from_json(found.status, found.to_json())
    assert type(again) is kind and again.to_json() == found.to_json() and again.status == found.status


def test_a_retry_delay_is_kept() -> None:
    found = Overloaded("full", status=429, retry_after_s=7.5).located("admission", "a")
    assert (found.status, found.retry_after_s) == (429, 7.5)
    assert error_from_json(429, found.to_json()).retry_after_s == 7.5


@pytest.mark.parametrize("kind", [InvalidRequest, NeverFits])
def test_what_the_client_asked_for_has_no_place(kind: type[InvalidRequest]) -> None:
    error = kind("prompt: too long", param="prompt")
    found = error.located("admission", "a")
    assert found.to_json() == error.to_json() and "stage" not in found.to_json()
    assert type(found) is kind and found is not error, "it is raised from the error"


def test_one_error_that_ends_everything_names_each_attempt() -> None:
    world = World()
    for sid, kind in (("a", Kind.RECEIVE), ("b", Kind.RECEIVE), ("local", Kind.LOCAL)):
        world.add(request(sid, [1, 2, 3, 4, 5], 9), kind=kind, attempt="" if kind is Kind.LOCAL else sid)
    world.turn()
    world.take(world.scheduler.abort_all(EngineFailed("the engine is shutting down")))
    errors = {sid: world.ends[sid][-1].error for sid in ("a", "b", "local")}
    assert {sid: (e.stage, e.attempt) for sid, e in errors.items() if e is not None} == {
        "a": ("receiving", "a"),
        "b": ("receiving", "b"),
        "local": ("running", None),
    }


def test_a_deadline_names_stage_and_attempt() -> None:
    world = World()
    world.add(request("a", [1, 2, 3, 4, 5], 9), kind=Kind.RECEIVE, attempt="a")
    world.turn()
    world.take(world.scheduler.tick(1e9))
    error = world.ends["a"][-1].error
    assert isinstance(error, DeadlineExceeded) and (error.stage, error.attempt) == ("receiving", "a")
