"""An embedding model behind a router, real processes: vectors equal transformers', and who cannot serve it says so."""

from __future__ import annotations

import json
import shutil
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
from processes import BIN, MODEL, Process, free_port, get_json, metric
from tokenizers import Tokenizer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
HIDDEN = 48
TEXTS = ["Two seas and a narrow strip of land.", "A fox.", "Zwei Meere, eine Landenge. " * 20, "A fox."]


def build(directory: Path) -> Any:
    """A random Qwen3 with SmolLM2's tokenizer, as sentence-transformers saves embedding models; transformers' model."""
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen3Model(
        transformers.Qwen3Config(
            vocab_size=Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab_size(),
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            initializer_range=0.3,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
    ).eval()
    model.save_pretrained(directory, safe_serialization=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, directory)
    types = ("Transformer", "Pooling", "Normalize")
    modules = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(types)]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return model


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
    model = build(folder)
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
    info = get_json(service.engine + "/info")
    assert (info["running"], info["waiting"], info["load"]["kv_usage"]) == (0, 0, 0.0)  # type: ignore[index]
    assert info["task"]["kind"] == "embed"  # type: ignore[index]
    assert metric(service.engine, "isthmus_request_success_total") - before == len(TEXTS)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_that_moves_kv_refuses_the_model(service: Service, role: str) -> None:
    argv = [str(BIN / "isthmus-runtime"), "serve", "--role", role, "--transfer-mode", "direct", "--port", "0"]
    done = subprocess.run(
        [*argv, "--model", str(service.folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert f"is an embedding model, which --role {role} cannot serve" in done.stderr
