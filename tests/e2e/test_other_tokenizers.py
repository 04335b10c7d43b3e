"""A rollout to a model with another tokenizer, as its routers and engines stand in its midst: each router's requests
are answered by engines of its own model, whichever are there."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import BIN, MODEL, Process, free_port, get_json

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEADLINE_S = 60.0


def with_other_ids(folder: Path) -> Path:
    """The model's files, with a tokenizer in which every word has another id."""
    folder.mkdir()
    for path in Path(MODEL).glob("*.json"):
        if path.name != "isthmus-source.json":
            shutil.copy(path, folder)
    made = json.loads((folder / "tokenizer.json").read_text())
    vocab, kept = made["model"]["vocab"], {token["content"] for token in made["added_tokens"]}
    words = [word for word in vocab if word not in kept]
    vocab |= dict(zip(words, [vocab[word] for word in reversed(words)], strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(made))
    return folder


def answer(url: str, prompt: str) -> tuple[int, str]:
    body = {"model": "test", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as found:
            return found.status, json.loads(found.read())["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return error.code, ""


@pytest.mark.parametrize("policy", ["round-robin", "prefix-aware"])
def test_a_router_is_answered_by_engines_of_its_own_model(tmp_path: Path, policy: str) -> None:
    models = {"old": Path(MODEL), "new": with_other_ids(tmp_path / "model")}
    engines = {name: f"127.0.0.1:{free_port()}" for name in models}
    routers = {name: f"http://127.0.0.1:{free_port()}" for name in models}
    with ExitStack() as stack:

        def start(name: str, model: Path, url: str, *more: str) -> Callable[[], object]:
            argv = [str(BIN / "isthmus-runtime"), "serve", "--model", str(model), "--served-model-name", "test", *more]
            process = Process(name, [*argv, "--port", url.rpartition(":")[2]], tmp_path / f"{name}.log").start()
            stack.callback(process.stop)
            process.wait_http(f"{url}/ready")
            return process.stop

        fake = ["--role", "unified", "--executor", "fake", "--max-model-len", "512"]
        stop = {name: start(f"engine-{name}", models[name], f"http://{engines[name]}", *fake) for name in models}
        both = ["--role", "router", "--policy", policy, "--worker", ",".join(engines.values())]
        for name, url in routers.items():
            start(f"router-{name}", models[name], url, *both)
        prompts = [f"{number} bridges of two seas" for number in range(6)]
        said = {name: [answer(f"http://{engine}", prompt) for prompt in prompts] for name, engine in engines.items()}
        assert all(status == 200 for answers in said.values() for status, _ in answers)
        assert not set(said["old"]) & set(said["new"])
        for name, url in routers.items():
            assert [answer(url, prompt) for prompt in prompts] == said[name]
        for name, url in routers.items():
            others = {one["url"] for one in get_json(f"{url}/info")["engines"] if "another tokenizer" in one["reason"]}
            told = {one["url"] for one in get_json(f"{url}/info")["engines"] if one["other_tokenizer"]}
            assert told == others == {f"http://{engine}" for of, engine in engines.items() if of != name}
        stop["old"]()
        assert answer(routers["old"], prompts[0])[0] in (502, 503), "the new engine has no answer for it"
        assert [answer(routers["new"], prompt) for prompt in prompts] == said["new"]
