"""A router that passes prompts on as text, before a real unified engine: it answers as the engine itself does, which
tokenises what clients send it."""

from __future__ import annotations

import json
import random
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from processes import BIN, MODEL, Process, free_port, get_json, metric

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEADLINE_S = 60.0
WORDS = ["The", " bridge", " of", " two", " seas", "\n", "  ", " é", " 日本", " <|im_end|>", "<|im_start|>user", " 42."]
IDS = re.compile(rb'(?<=[-_"])[0-9a-f]{24,32}(?=[-"])|(?<="created":)\d+')


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Of a router and of the engine behind it. Nothing is cached: both ways compute the same steps."""
    tmp, ports = tmp_path_factory.mktemp("text"), {"engine": free_port(), "router": free_port()}
    args = {
        "engine": ["--role", "unified", "--dtype", "float32", "--threads", "1", "--max-model-len", "512"],
        "router": ["--role", "router", "--policy", "round-robin", "--worker", f"127.0.0.1:{ports['engine']}"],
    }
    args["engine"] += ["--kv-memory", "256Mi", "--no-prefix-caching", "--device", "cpu"]
    with ExitStack() as stack:
        for name, more in args.items():
            argv = [str(BIN / "isthmus-runtime"), "serve", *more, "--port", str(ports[name]), "--model", str(MODEL)]
            process = Process(name, [*argv, "--served-model-name", "test"], tmp / f"{name}.log").start()
            stack.callback(process.stop)
            process.wait_http(f"http://127.0.0.1:{ports[name]}/ready")
        yield f"http://127.0.0.1:{ports['router']}", f"http://127.0.0.1:{ports['engine']}"


def answer(url: str, path: str, body: dict[str, object]) -> tuple[int, bytes]:
    """Status and body, without ids and times."""
    request = urllib.request.Request(f"{url}/v1/{path}", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as found:
            return found.status, IDS.sub(b"#", found.read())
    except urllib.error.HTTPError as error:
        return error.code, IDS.sub(b"#", error.read())


def some_request(r: random.Random) -> tuple[str, dict[str, object]]:
    """A path and a body."""
    text = "".join(r.choices(WORDS, k=r.randint(1, 25)))
    body: dict[str, object] = {"model": "test", "seed": r.randrange(100), "temperature": r.choice([0, 0.8])}
    body["max_tokens"] = r.choice([1, 4, 8, 60])
    for name, value in (("min_tokens", 2), ("stop", ["e"]), ("n", 2), ("truncate_prompt_tokens", 4)):
        if r.random() < 0.1:
            body[name] = value
    if r.random() < 0.3:
        body["response_format"] = {"type": "json_object"}
    if r.random() < 0.5:
        return "completions", {**body, "prompt": text, **({"logprobs": 2} if r.random() < 0.3 else {})}
    if r.random() < 0.3:
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    return "chat/completions", {**body, "messages": [{"role": "user", "content": text}]}


def test_answers_are_those_of_the_engine(urls: tuple[str, str]) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    r, router, engine = random.Random(seed), *urls
    assert get_json(f"{engine}/info")["tokenizer"]
    statuses = []
    before = metric(router, "isthmus_router_prompt_tokens_total")
    for _ in range(20):
        path, body = some_request(r)
        found = answer(router, path, body)
        assert found == answer(engine, path, body), (path, body)
        statuses.append(found[0])
    assert statuses.count(200) > 5
    assert metric(router, "isthmus_router_prompt_tokens_total") > before
