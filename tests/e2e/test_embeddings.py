"""An embedding model behind a router, real processes: vectors equal transformers', and who cannot serve it says so."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from embedding_model import HIDDEN, write_embedding_model
from processes import BIN, Process, free_port, get_json, metric, until
from tokenizers import Tokenizer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
TEXTS = ["Two seas and a narrow strip of land.", "A fox.", "Zwei Meere, eine Landenge. " * 20, "A fox."]


@dataclass(frozen=True)
class Service:
    """Where engine and router are, and what says what they must answer."""

    router: str
    engine: str
    folder: Path
    model: Any
    tokenizer: Tokenizer

    @torch.no_grad()
    def expected(self, text: str, dimensions: int = HIDDEN) -> np.ndarray[Any, Any]:
        ids = self.tokenizer.encode(text).ids
        state = self.model(torch.tensor([ids])).last_hidden_state[0, -1].double()[:dimensions]
        found: np.ndarray[Any, Any] = (state / state.norm()).numpy()
        return found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder, logs = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("logs")
    model = write_embedding_model(folder)
    ports = {"engine": free_port(), "router": free_port()}
    args = {
        "engine": ["--role", "unified", "--dtype", "float32", "--kv-memory", "64Mi", "--max-batched-tokens", "64"],
        "router": ["--role", "router", "--worker", f"127.0.0.1:{ports['engine']}"],
    }
    with ExitStack() as stack:
        for name, more in args.items():
            argv = [str(BIN / "isthmus-runtime"), "serve", *more, "--port", str(ports[name])]
            argv += ["--model", str(folder), "--served-model-name", "test"]
            process = Process(name, argv, logs / f"{name}.log").start()
            stack.callback(process.stop)
            process.wait_http(f"http://127.0.0.1:{ports[name]}/ready")
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        yield Service(urls["router"], urls["engine"], folder, model, tokenizer)


@pytest.mark.parametrize("where", ["router", "engine"])
def test_vectors_equal_transformers(service: Service, where: str) -> None:
    with openai.OpenAI(base_url=f"{getattr(service, where)}/v1", api_key="none", max_retries=0) as client:
        for dimensions in (HIDDEN, 8):
            got = client.embeddings.create(model="test", input=TEXTS, dimensions=dimensions)
            for text, entry in zip(TEXTS, got.data, strict=True):
                np.testing.assert_allclose(entry.embedding, service.expected(text, dimensions), atol=2e-5)
        assert got.data[1].embedding == got.data[3].embedding
        many = client.embeddings.create(model="test", input=[f"Text number {i}." for i in range(150)])
        assert [entry.index for entry in many.data] == list(range(150))
        np.testing.assert_allclose(many.data[149].embedding, service.expected("Text number 149."), atol=2e-5)
        with pytest.raises(openai.BadRequestError, match="is served with --task embed, and this needs generate"):
            client.completions.create(model="test", prompt="x")


def test_all_blocks_come_back_and_requests_are_counted(service: Service) -> None:
    before = metric(service.engine, "isthmus_request_success_total")
    with openai.OpenAI(base_url=f"{service.router}/v1", api_key="none", max_retries=0) as client:
        client.embeddings.create(model="test", input=TEXTS)

    def idle() -> bool:
        info: Any = get_json(service.engine + "/info")
        assert info["task"]["kind"] == "embed"
        return (info["running"], info["waiting"], info["load"]["kv_usage"]) == (0, 0, 0.0)

    until(idle, "something is still held")
    assert metric(service.engine, "isthmus_request_success_total") - before == len(TEXTS)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_that_moves_kv_refuses_the_model(service: Service, role: str) -> None:
    argv = [str(BIN / "isthmus-runtime"), "serve", "--role", role, "--transfer-mode", "direct", "--port", "0"]
    done = subprocess.run(
        [*argv, "--model", str(service.folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert f"is an embedding model, which --role {role} cannot serve" in done.stderr
