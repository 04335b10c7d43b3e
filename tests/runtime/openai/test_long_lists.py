"""Long lists of numbers of a body are read in pieces, and the body is the same as if it were read whole."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from isthmus_runtime.errors import InvalidRequest
from isthmus_runtime.openai import bodies, long_lists
from isthmus_runtime.openai.bodies import json_object
from isthmus_runtime.openai.long_lists import LongLists


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in small."""
    monkeypatch.setattr(long_lists, "_LONG", 8)
    monkeypatch.setattr(long_lists, "_PIECE", 11)
    monkeypatch.setattr(bodies, "_MANY_ITEMS", 3)


def some(r: random.Random, depth: int) -> Any:
    match r.randrange(7 if depth else 4):
        case 0:
            return r.choice(["[1,2,3,4,5,6]", "a", '"[', "\\", "1,2,3,4,5,6,7,8", ""])
        case 1 | 2:
            return r.choices([0, 7, 10**30, 12], k=r.randrange(30))
        case 3:
            return r.choice([None, True, 1.5, -3])
        case 4:
            return {r.choice("abc"): some(r, depth - 1) for _ in range(r.randrange(4))}
        case _:
            return [some(r, depth - 1) for _ in range(r.randrange(5))]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("separators", [(",", ":"), (" ,\n", " : ")])
def test_a_body_is_the_same_as_read_whole(separators: tuple[str, str]) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    r = random.Random(seed)
    found = 0
    for _ in range(500):
        data = {"a": some(r, 3), "b": some(r, 3)}
        body = json.dumps(data, separators=separators).encode()
        found += len(LongLists(body))
        assert json_object(body) == data
    assert found > 500


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "body",
    [
        b'{"a": [1, 2, 3, 4, 5, 6, 7, 8,]}',
        b'{"a": [1, 2, 3, 4,, 5, 6, 7, 8]}',
        b'{"a": [1, 2, 3, 4, 05, 6, 7, 8]}',
        b'{"a": [1, 2, 3, 4, 5 6, 7, 8]}',
        b'{"a": [, 1, 2, 3, 4, 5, 6, 7]}',
        b'{"a": [1, 2, 3, 4, 5, 6, 7, 8',
        b'{"a": [1, 2, 3, 4, 5, 6, 7, 8]',
    ],
)
def test_what_is_no_list_is_refused_as_ever(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the body is not valid JSON"):
        json_object(body)


@pytest.mark.usefixtures("short")
def test_of_two_of_a_name_the_last_is_meant() -> None:
    assert json_object(b'{"a": [1, 2, 3, 4, 5], "a": [6, 7, 8, 9, 10], "b": "[1, 2, 3, 4, 5]"}') == {
        "a": [6, 7, 8, 9, 10],
        "b": "[1, 2, 3, 4, 5]",
    }


@pytest.mark.parametrize("values", [b"1.5,", b"-1,", b"[1],1,1,1,1,1,1,1,1,"], ids=["floats", "signs", "short lists"])
def test_many_values_that_are_no_ids_are_refused_unread(values: bytes) -> None:
    body = b'{"prompt": "x", "metadata": {"a": [%b0]}}' % (values * (800_000 // values.count(b",")))
    with pytest.raises(InvalidRequest, match="commas outside of long lists of token ids"):
        json_object(body)


def test_others_run_while_a_million_ids_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call of the library reads more than a piece of them."""
    sizes: list[int] = []
    inner = long_lists.from_json
    monkeypatch.setattr(long_lists, "from_json", lambda raw, **options: sizes.append(len(raw)) or inner(raw, **options))
    ids = list(range(1_000_000))
    for prompt in (ids, [ids[at : at + 500] for at in range(0, len(ids), 500)]):
        assert json_object(json.dumps({"prompt": prompt}).encode()) == {"prompt": prompt}
    assert max(sizes) < 1 << 17 and len(sizes) > 2000
