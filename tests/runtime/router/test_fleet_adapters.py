"""A change of an adapter goes to every engine that is ready; it can be repeated until all have done it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isthmus_runtime.errors import EngineFailed, InvalidRequest, Overloaded, RequestError, UnknownModel
from isthmus_runtime.protocol import AdapterCall
from isthmus_runtime.router.adapters import FleetAdapters


class Engines:
    """A pool and its links: engines by URL, with what each of them answers."""

    def __init__(self, **answers: Exception | None) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def statuses(self) -> list[Any]:
        return [SimpleNamespace(url=url, state="ready") for url in self.answers]

    def ask_again(self) -> None:
        pass

    async def adapter(self, url: str, call: AdapterCall) -> None:
        self.asked.append(url)
        answer = self.answers[url]
        if answer is not None:
            raise answer

    def change(self, path: str | None) -> None:
        fleet = FleetAdapters(cast(Any, self), cast(Any, self))
        asyncio.run(fleet.change("sql", path))
        assert self.asked == list(self.answers)


GONE = UnknownModel("lora_name: no adapter 'sql' is loaded")


def test_unloading_is_repeated_until_all_have_done_it() -> None:
    Engines(a=None, b=None).change(None)
    with pytest.raises(EngineFailed, match=r"1 of 2 engines failed.*engine b was lost: gone"):
        Engines(a=None, b=OSError("gone")).change(None)
    Engines(a=GONE, b=None).change(None)
    with pytest.raises(UnknownModel, match="no adapter 'sql'"):
        Engines(a=GONE, b=GONE).change(None)
    with pytest.raises(EngineFailed, match="1 of 3 engines failed"):
        Engines(a=GONE, b=Overloaded("busy"), c=None).change(None)


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ({"a": InvalidRequest("no folder"), "b": InvalidRequest("no folder")}, InvalidRequest),
        ({"a": None, "b": InvalidRequest("no folder")}, EngineFailed),
        ({"a": TimeoutError(), "b": InvalidRequest("no folder")}, EngineFailed),
        ({}, Overloaded),
    ],
)
def test_loading(answers: dict[str, Exception | None], error: type[RequestError]) -> None:
    with pytest.raises(error) as raised:
        Engines(**answers).change("sql")
    assert type(raised.value) is error
