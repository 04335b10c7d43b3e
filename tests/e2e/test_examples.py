"""What a user does: `isthmus up FILE`, then the official OpenAI client. Tokens must equal those of `transformers`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_reference import MAX_TOKENS, QUESTIONS, greedy_answers
from processes import BIN, MODEL, Process, free_port, running, until

from isthmus_runtime.openai.tokenizer import Tokenizer
from isthmus_runtime.request import Structure
from isthmus_runtime.structured.grammars import Grammars

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return greedy_answers(QUESTIONS, MAX_TOKENS)


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "million": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["town", "port"]},
    },
    "required": ["city", "million", "kind"],
    "additionalProperties": False,
}
STRUCTURED_TOKENS = 80


@pytest.fixture(scope="module")
def structured_reference() -> dict[str, str]:
    grammars = Grammars.load(MODEL, eos_token_ids=Tokenizer.load(MODEL).eos_token_ids)
    guide = Structure("json_schema", json.dumps(SCHEMA))
    return greedy_answers(QUESTIONS, STRUCTURED_TOKENS, lambda: grammars.guide(guide).allowed)


class Service:
    """One `isthmus up`."""

    def __init__(self, process: Process, run_dir: Path, port: int) -> None:
        self.process = process
        self.run_dir = run_dir
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0)

    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "state.json").read_text()))

    def pids(self) -> dict[str, int]:
        return {p["name"]: c["pid"] for p in self.state()["pods"] for c in p["containers"] if c["pid"]}

    def wait_ready(self) -> None:
        self.process.wait_http(f"{self.url}/ready", DEADLINE_S)

    def stream(self, question: str, max_tokens: int = MAX_TOKENS) -> Any:
        return self.client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )

    def ask(self, question: str) -> str:
        text, finishes, usages = "", [], []
        for chunk in self.stream(question):
            if chunk.usage is not None:
                usages.append(chunk.usage)
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if choice.finish_reason:
                    finishes.append(choice.finish_reason)
        assert len(finishes) == 1, f"{len(finishes)} finish chunks"
        assert len(usages) == 1 and usages[0].completion_tokens >= 1
        return text


@contextmanager
def up(example: str, tmp: Path) -> Iterator[Service]:
    port, run_dir = free_port(), tmp / "run"
    argv = [str(BIN / "isthmus"), "up", str(ROOT / "examples" / example), "--model", str(MODEL)]
    process = Process(example, [*argv, "--port", str(port), "--run-dir", str(run_dir)], tmp / "up.log").start()
    service = Service(process, run_dir, port)
    pids: list[int] = []
    try:
        service.wait_ready()
        pids = list(service.pids().values())
        yield service
    finally:
        if (run_dir / "state.json").exists():
            pids += list(service.pids().values())
        process.kill(signal.SIGINT)
        try:
            process.popen.wait(30)
        finally:
            process.stop()
    left = [pid for pid in set(pids) if running(pid)]
    assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="module", params=["direct.yaml", "store.yaml", "unified.yaml"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with up(request.param, tmp_path_factory.mktemp(request.param.removesuffix(".yaml"))) as running:
        yield running


@pytest.mark.timeout(600)
def test_streamed_chat_equals_transformers(service: Service, reference: dict[str, str]) -> None:
    for question, answer in reference.items():
        assert service.ask(question) == answer
        plain = service.client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": question}], max_tokens=MAX_TOKENS, temperature=0
        )
        assert plain.choices[0].message.content == answer


@pytest.mark.timeout(600)
def test_structured_output_equals_transformers_under_the_same_masks(
    service: Service, structured_reference: dict[str, str]
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    for question, answer in structured_reference.items():
        got = service.client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": question}],
            max_tokens=STRUCTURED_TOKENS,
            temperature=0,
            response_format=form,  # type: ignore[arg-type]
        )
        assert got.choices[0].message.content == answer
        assert set(json.loads(answer)) == {"city", "million", "kind"}
    with pytest.raises(openai.BadRequestError, match=r"response_format.*format"):
        form["json_schema"]["schema"] = {"type": "string", "format": "none such"}  # type: ignore[index]
        service.client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "x"}],
            response_format=form,  # type: ignore[arg-type]
        )


@pytest.mark.timeout(600)
def test_a_repetition_penalty_equals_that_of_transformers(service: Service) -> None:
    """It needs every token of prompt and output, on decode too, which computed neither the prompt nor the first."""
    want = greedy_answers(QUESTIONS[:1], MAX_TOKENS, repetition_penalty=1.3)
    for question, answer in want.items():
        got = service.client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": question}],
            max_tokens=MAX_TOKENS,
            temperature=0,
            extra_body={"repetition_penalty": 1.3},
        )
        assert got.choices[0].message.content == answer


@pytest.mark.timeout(600)
def test_killing_any_process_in_mid_stream_ends_the_request_and_the_service_recovers(
    service: Service, reference: dict[str, str]
) -> None:
    question = QUESTIONS[0]
    for victim in sorted(service.pids()):
        # What was killed before may have taken others with it, which are on their way back.
        until(lambda victim=victim: victim in service.pids(), f"{victim} does not come back")  # type: ignore[misc]
        stream = service.stream("Tell me a long story about a canal.", max_tokens=300)
        next(iter(stream))
        os.kill(service.pids()[victim], signal.SIGKILL)
        started = time.monotonic()
        ended = "broken"
        try:
            for chunk in stream:
                if chunk.choices and chunk.choices[0].finish_reason:
                    ended = chunk.choices[0].finish_reason
        except (openai.APIError, openai.APIConnectionError) as error:
            ended = f"error: {error}"
        except Exception as error:  # the transport breaks when the router itself was killed
            assert victim.startswith("router"), f"{victim}: {error!r}"
            ended = "connection lost"
        assert ended != "broken", f"killing {victim}: the stream just stopped"
        assert time.monotonic() - started < DEADLINE_S
        service.wait_ready()
        deadline = time.monotonic() + DEADLINE_S
        answer = ""
        while time.monotonic() < deadline and answer != reference[question]:
            try:
                answer = service.ask(question)
            except openai.APIError:
                service.wait_ready()
        assert answer == reference[question], f"after killing {victim}"


def test_wrong_requests_name_the_parameter(service: Service) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        service.client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        service.client.completions.create(model="smollm2", prompt=[5] * 3000, max_tokens=1)
    assert "2047" in str(caught.value) and "3000" in str(caught.value)
    with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
        service.client.completions.create(model="smollm2", prompt="x", frequency_penalty=2.5)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: text.replace("mode: Disaggregated", "mode: Sideways"), ["spec.mode", "Sideways"]),
        (lambda text: text.replace("blockSize: 16", "blokSize: 16"), ["blokSize", "blockSize"]),
        (lambda text: text + "\n  : [", ["not valid YAML"]),
    ],
)
def test_a_wrong_file_is_refused_with_its_field(tmp_path: Path, edit: Any, words: list[str]) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(edit((ROOT / "examples" / "direct.yaml").read_text()))
    done = subprocess.run([BIN / "isthmus", "up", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
