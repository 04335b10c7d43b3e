"""Token ids of a body go on as they were written, where that is certain."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from isthmus_runtime.openai.bodies import ids_as_written, json_object
from isthmus_runtime.openai.schema import parse_completion
from isthmus_runtime.request import WrittenIds


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), ("\n,\t", " :\r\n ")])
def test_ids_are_those_of_the_body_and_written_without_white_space(separators: tuple[str, str]):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    r = random.Random(seed)
    for _ in range(50):
        ids = r.choices([*range(200), 10**30], k=r.randrange(1, 40))
        fields = [("prompt", ids), ("user", "a [1,2] {"), ("metadata", {"a": "[3]"}), ("stop", ["]"]), ("n", 1)]
        body = json.dumps(dict(r.sample(fields, k=len(fields))), separators=separators).encode()
        (found,) = parse_completion(body).prompts()
        assert isinstance(found, WrittenIds)
        assert found == tuple(ids)
        assert found.json == json.dumps(ids, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (b'{"prompt": "text"}', "text"),
        (b'{"prompt": ["[1]"]}', ["[1]"]),
        (b'{"prompt": [[1, 2], [3]]}', [[1, 2], [3]]),
        (b'{"prompt": [1, -2]}', [1, -2]),
        (b'{"prompt": [1, 2.0]}', [1, 2.0]),
        (b'{"prompt": [1, 2e1]}', [1, 20.0]),
        (b'{"prompt": [1, true]}', [1, True]),
        (b'{"prompt": [ ]}', []),
        (b'{"prompt": null}', None),
        (b'{"prompts": [1]}', None),
        # Which of several is meant is the parser's to say.
        (b'{"prompt": [1], "prompt": [2]}', [2]),
        (b'{"metadata": {"prompt": [1]}, "prompt": [2]}', [2]),
        (b'{"prompt": [2], "metadata": {"prompt": [1]}}', [2]),
        (b'{"user": "prompt", "prompt": [2]}', [2]),
        (b'{"metadata": {"prompt": [1]}, "pr\\u006fmpt": [2]}', [2]),
        (b'{"user": "\\"prompt\\": [1]", "prompt": [2]}', [2]),
    ],
)
def test_what_is_not_certain_is_left_to_the_parser(body: bytes, prompt: Any):
    data = json_object(body)
    assert data.get("prompt") == prompt
    assert ids_as_written(body, data, "prompt") is None
