"""Adapters through real processes: prefill and decode apart, by OpenAI's client, loaded and unloaded as it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from config_mount import swap
from lora_adapters import ATTENTION, MLP, save_adapter
from processes import MODEL, Stack, free_port, get_json, metric, stack, until
from tokenizers import Tokenizer
from tokens import Issuer, write

from isthmus_runtime.executor.fake import expected_tokens
from isthmus_runtime.models.registry import read_model_spec
from isthmus_runtime.request import SamplingParams

pytestmark = pytest.mark.e2e
PROMPT = list(range(100, 190))
TEXTS = ("The capital of France is", "Once upon a time there was a small bridge between two large islands, and")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def client(service: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=service.url("router") + "/v1", api_key="none", max_retries=0, timeout=60)


def folder(parent: Path, name: str, text: str) -> str:
    """What the model-free executor takes for an adapter; its digest."""
    (parent / name).mkdir(exist_ok=True)
    (parent / name / "adapter_model.safetensors").write_text(text)
    return sha256(sha256(text.encode()).digest()).hexdigest()[:32]


@pytest.fixture(scope="module", params=["direct", "store"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    tmp = tmp_path_factory.mktemp(request.param)
    folder(tmp, "first", "first")
    args = ("--kv-memory", "256Ki", "--drain-timeout", "5s", "--transfer-timeout", "5s")
    args += ("--lora", f"one={tmp / 'first'}", "--lora-dir", str(tmp), "--max-loras", "2")
    with stack(
        tmp, request.param, engine_args=args, router_args=("--lora-updates", "on", "--policy", "kv-aware"), decodes=2
    ) as running:
        yield running


def complete(service: Stack, model: str, count: int = 12) -> str:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": count, "extra_body": {"ignore_eos": True}}
    return client(service).completions.create(model=model, prompt=PROMPT, **options).choices[0].text


def expected(tokenizer: Tokenizer, digest: str, count: int = 12) -> str:
    sampling = SamplingParams(max_tokens=count, temperature=0.0)
    ids = expected_tokens(PROMPT, sampling, count, adapter=digest)
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def change(service: Stack, verb: str, **body: object) -> str:
    return str(client(service).post(f"/{verb}_lora_adapter", body=body, cast_to=str))


def test_loaded_and_unloaded_while_others_run(service: Stack, tokenizer: Tokenizer) -> None:
    first = folder(service.tmp, "first", "first")
    second, other = folder(service.tmp, "second", "second"), folder(service.tmp, "other", "other")
    found = {model.id: model.to_dict().get("parent") for model in client(service).models.list()}
    assert found == {"test": None, "one": "test"}
    with pytest.raises(openai.NotFoundError, match="'two' is not served here; served: test, one"):
        complete(service, "two")
    change(service, "load", lora_name="two", lora_path="second")
    with ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(complete, service, model) for model in ("test", "one", "two") * 3]
        answers = [one.result() for one in asked]
    assert answers == [expected(tokenizer, digest) for digest in ("", first, second)] * 3
    before = metric(service.url("decode0"), "isthmus_xfer_prompts_total", source="recomputed")
    assert before == 0, "some KV did not move"
    with pytest.raises(openai.BadRequestError, match="load_inplace"):
        change(service, "load", lora_name="two", lora_path="other")
    change(service, "load", lora_name="two", lora_path="other", load_inplace=True)
    assert complete(service, "two") == expected(tokenizer, other)
    change(service, "unload", lora_name="two")
    with pytest.raises(openai.NotFoundError):
        complete(service, "two")
    with pytest.raises(openai.NotFoundError, match="no adapter 'two' is loaded"):
        change(service, "unload", lora_name="two")
    with pytest.raises(openai.BadRequestError, match="no folder"):
        change(service, "load", lora_name="three", lora_path="../..")
    assert {model.id for model in client(service).models.list()} == {"test", "one"}


def test_where_peers_know_each_other_adapters_are_the_routers_alone(tmp_path: Path) -> None:
    """Engines with the real executor have no routes that ask for no key; the router's reach them all the same."""
    shapes = read_model_spec(MODEL).tensor_shapes()
    save_adapter(tmp_path / "one", shapes, seed=0, rank=8, targets=ATTENTION[:1], size=0.02)
    issuer, peers = Issuer(), tmp_path / "peers"
    write(peers, token=issuer.token(), trust=issuer.trust())
    flags = ("--peer-credentials", str(peers))
    args = ("--dtype", "float32", "--device", "cpu", "--kv-memory", "64Mi", "--lora-dir", str(tmp_path), *flags)
    service = Stack(tmp_path, "none", executor="torch", engine_args=args, prefills=0, decodes=0)
    service.ports = {"unified0": free_port(), "router": free_port()}
    service.router_args = ("--worker", f"127.0.0.1:{service.ports['unified0']}", "--lora-updates", "on", *flags)
    with ExitStack() as exits:
        for name in service.ports:
            exits.callback(service.spawn(name).stop)
        service.ready(*service.ports)
        shown = {}
        for name in service.ports:
            paths = get_json(service.url(name) + "/openapi.json")["paths"]
            assert isinstance(paths, dict) and "/v1/completions" in paths
            shown[name] = {path for path in paths if "lora" in path}
        assert shown == {"unified0": set(), "router": {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}}
        engine = openai.OpenAI(base_url=service.url("unified0") + "/v1", api_key="none", max_retries=0, timeout=60)
        with pytest.raises(openai.NotFoundError):
            engine.post("/load_lora_adapter", body={"lora_name": "one", "lora_path": "one"}, cast_to=str)
        change(service, "load", lora_name="one", lora_path="one")
        assert len(complete(service, "one")) > 0
        change(service, "unload", lora_name="one")


@pytest.mark.parametrize("apart", ["on", "off"])
def test_a_mounted_list_is_followed(apart: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """By engines that run and by one that starts later; what one cannot load, probes and metrics tell."""
    first, second = folder(tmp_path, "first", "first"), folder(tmp_path, "second", "second")
    listed = tmp_path / "mount"

    def change(**names: str) -> None:
        entries = [{"name": name, "path": str(tmp_path / path)} for name, path in names.items()]
        swap(listed, "adapters.json", json.dumps(entries))

    change(one="first")
    args = ("--kv-memory", "256Ki", "--drain-timeout", "5s", "--api-process", apart)
    args += ("--lora-file", str(listed / "adapters.json"))
    with stack(tmp_path, "direct", engine_args=args) as service:

        def names() -> set[str]:
            return {model.id for model in client(service).models.list()}

        assert names() == {"test", "one"}
        change(one="second", two="first", three="missing")
        for engine in ("prefill0", "decode0"):
            url = service.url(engine)

            def followed(url: str = url) -> bool:
                # The second is told when the list has been gone through, and the first before.
                return (metric(url, "isthmus_adapters"), metric(url, "isthmus_adapter_problems")) == (2, 1)

            until(followed, f"{engine} has not followed")
            told = get_json(url + "/info")["adapter_list"]
            assert isinstance(told, dict) and told["listed"] == 3
            assert [problem["name"] for problem in told["problems"]] == ["three"]
        until(lambda: names() == {"test", "one", "two"}, "the router has not followed")
        until(lambda: complete(service, "one") == expected(tokenizer, second), "one is still its former content")
        assert complete(service, "two") == expected(tokenizer, first)
        assert metric(service.url("decode0"), "isthmus_xfer_prompts_total", source="recomputed") == 0
        service.all["decode0"].stop()
        service.spawn("decode0")
        service.ready("decode0")
        until(lambda: names() == {"test", "one", "two"}, "the router does not know the new engine")
        assert complete(service, "two") == expected(tokenizer, first)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["direct", "store"])
def test_real_weights_equal_merged_ones(mode: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    import transformers

    shapes = read_model_spec(MODEL).tensor_shapes()
    plain = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    prompts = [tokenizer.encode(text).ids for text in TEXTS]

    def greedy() -> list[str]:
        answers = []
        for ids in prompts:
            with torch.no_grad():
                out = plain.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12, min_new_tokens=12)
            answers.append(tokenizer.decode(out[0, len(ids) :].tolist(), skip_special_tokens=True))
        return answers

    want = {"test": greedy()}
    weights = dict(plain.named_parameters())
    for seed, (name, targets) in enumerate({"one": ATTENTION + MLP, "two": ATTENTION[:2]}.items()):
        added = save_adapter(tmp_path / name, shapes, seed=seed, rank=8, targets=targets, size=0.02)
        with torch.no_grad():
            for tensor, delta in added.items():
                weights[tensor] += delta
            want[name] = greedy()
            for tensor, delta in added.items():
                weights[tensor] -= delta
    assert len({tuple(answers) for answers in want.values()}) == 3
    args = ("--dtype", "float32", "--device", "cpu", "--kv-memory", "64Mi", "--max-batched-tokens", "16")
    args += ("--lora", f"one={tmp_path / 'one'}", "--lora", f"two={tmp_path / 'two'}")
    with stack(tmp_path, mode, executor="torch", engine_args=args) as service, ThreadPoolExecutor(6) as pool:
        for _ in range(2):  # the second time from prefix caches
            asked = {
                (name, number): pool.submit(
                    client(service).completions.create,
                    model=name,
                    prompt=ids,
                    temperature=0,
                    max_tokens=12,
                    extra_body={"ignore_eos": True},
                )
                for name in want
                for number, ids in enumerate(prompts)
            }
            for (name, number), answer in asked.items():
                assert answer.result().choices[0].text == want[name][number], (name, number)
        moved = metric(service.url("decode0"), "isthmus_xfer_prompts_total", source="transferred")
        assert moved > 0
