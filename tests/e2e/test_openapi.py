"""Real processes called by schemathesis as their OpenAPI documents allow, and as they do not."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import BIN, MODEL, Process, free_port, get_json, until

pytestmark = pytest.mark.e2e

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method,missing_required_header"
)
EXAMPLES = 20
"""Of generated requests for each operation, beside those that cover its schema."""
ENDLESS = "/internal/kv-events"
DEADLINE_S = 240


@pytest.fixture(scope="module", params=["generate", "embed"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of a unified engine that computes nothing, and of a router before it; and the engine's task."""
    tmp = tmp_path_factory.mktemp("openapi")
    engine, router = free_port(), free_port()
    shared = ["--model", str(MODEL), "--served-model-name", "test", "--log-level", "warning"]
    serve = [str(BIN / "isthmus-runtime"), "serve", *shared]
    roles = {
        "engine": [
            "--role",
            "unified",
            "--executor",
            "fake",
            "--port",
            str(engine),
            "--max-model-len",
            "512",
            "--lora-dir",
            str(tmp),
        ],
        "router": [
            "--role",
            "router",
            "--worker",
            f"127.0.0.1:{engine}",
            "--port",
            str(router),
            "--lora-updates",
            "on",
        ],
    }
    roles["engine"] += ["--task", request.param]
    urls = {"engine": f"http://127.0.0.1:{engine}", "router": f"http://127.0.0.1:{router}"}
    with ExitStack() as stack:
        for name, args in roles.items():
            process = Process(name, [*serve, *args], tmp / f"{name}.log").start()
            stack.callback(process.stop)
            process.wait_http(urls[name] + "/ready")
        yield {**urls, "task": request.param}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["router", "engine"])
def test_answers_are_as_documented(service: dict[str, str], role: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("SCHEMATHESIS_SEED") or random.randrange(1 << 32))
    argv = [str(BIN / "schemathesis"), "run", service[role] + "/openapi.json", "--checks", CHECKS]
    argv += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES), "--seed", str(seed)]
    argv += ["--request-timeout", "20", "--suppress-health-check", "all", "--no-color", "--warnings", "off"]
    argv += ["--generation-database", "none", "--exclude-path", ENDLESS]
    if service["task"] == "embed":  # what else there is refuses
        argv += ["--include-path-regex", "embeddings|rerank|score"]
    # 502 to 504 are answers to what was asked for: a timeout of a nanosecond, an engine nobody listens on.
    (tmp_path / "schemathesis.toml").write_text(
        'checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "502", "503", "504"]\n'
    )
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, f"seed {seed} (SCHEMATHESIS_SEED)\n{done.stdout}\n{done.stderr}"
    # Those that the last of its clients have left may be on their way out.
    count = "requests" if role == "router" else "running"
    until(lambda: get_json(service[role] + "/info")[count] == 0, "requests stay")


def test_the_document_names_what_is_served(service: dict[str, str]) -> None:
    router, engine = (get_json(service[role] + "/openapi.json")["paths"] for role in ("router", "engine"))
    assert isinstance(router, dict) and isinstance(engine, dict)
    shared = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}", "/version"}
    shared |= {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"}
    shared |= {"/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"}
    shared |= {"/health", "/ping", "/ready", "/info", "/metrics"}
    shared |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    assert set(router) == shared | {"/accepting", "/status"}
    internal = {
        f"/internal/{name}"
        for name in ("generate", "prefill", "ticket", "commit", "abort", "adapter", "drained", "kv-events")
    }
    assert set(engine) == shared | internal
