"""The check that `helm test` runs, against a real HTTP server that plays the API server."""

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from chart import CHART

from isthmus_operator.api.v1alpha1 import parse
from isthmus_operator.errors import InvalidSpec

Answer = tuple[int, dict[str, Any]]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("installation", CHART / "checks" / "installation.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def validated(body: dict[str, Any]) -> Answer:
    """What the API server with our webhook would say. CEL words a missing role in its own way."""
    try:
        parse(body, namespace="ns")
    except InvalidSpec as error:
        return 422, {"kind": "Status", "message": f"{error}; mode Unified needs role worker"}
    return 201, body


@contextmanager
def api_server(answer: Callable[[dict[str, Any]], Answer], seen: list[tuple[str, str]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def reply(self, status: int, body: dict[str, Any]) -> None:
            seen.append((self.command, self.path))
            assert self.headers["Authorization"] == "Bearer the-token"
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.reply(200, {"kind": "APIResourceList", "resources": [{"name": "inferenceservices"}]})

        def do_POST(self) -> None:
            self.reply(*answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    module = load()
    (tmp_path / "token").write_text("the-token\n")
    monkeypatch.setattr(module.ssl, "create_default_context", lambda **_: None)

    def run(server: str, webhook: str = "webhook") -> int:
        ask = module.ask
        with monkeypatch.context() as patch:
            patch.setattr(module, "ask", lambda path, body: ask(path, body, server, str(tmp_path)))
            return int(module.main("team-a", webhook))

    return run


def test_a_good_installation_passes_and_stores_nothing(
    check: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, str]] = []
    with api_server(validated, seen) as server:
        assert check(server) == 0, capsys.readouterr().out
    posts = [path for method, path in seen if method == "POST"]
    assert len(posts) == 3
    for path in posts:
        assert path == "/apis/serving.isthmus.dev/v1alpha1/namespaces/team-a/inferenceservices?dryRun=All"


def test_without_the_webhook_its_rules_are_not_asked_for(check: Callable[..., int]) -> None:
    seen: list[tuple[str, str]] = []
    with api_server(validated, seen) as server:
        assert check(server, "no-webhook") == 0
    assert len([path for method, path in seen if method == "POST"]) == 2


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda body: (201, body), id="accepts all"),
        pytest.param(lambda body: (403, {"message": "forbidden"}), id="no right"),
        pytest.param(lambda body: (500, {"message": "failed calling webhook: connection refused"}), id="no operator"),
        pytest.param(lambda body: (422, {"message": "spec.rollout.drainTimeout role worker"}), id="refuses all"),
    ],
)
def test_a_broken_installation_fails(
    check: Callable[..., int], answer: Callable[[dict[str, Any]], Answer], capsys: pytest.CaptureFixture[str]
) -> None:
    with api_server(answer, []) as server:
        assert check(server) == 1
    assert "FAILED" in capsys.readouterr().out


def test_an_unreachable_server_fails(check: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with api_server(validated, []) as server:
        pass
    assert check(server) == 1
    assert "refused" in capsys.readouterr().out


def test_each_bad_service_has_one_problem_and_it_is_the_one_asked_for() -> None:
    problems = []
    for _, _, body, accepted, _ in load().checks("ns", with_webhook=True):
        if body is None:
            continue
        if accepted:
            parse(body, namespace="ns")
            continue
        with pytest.raises(InvalidSpec) as raised:
            parse(body, namespace="ns")
        problems.append({problem.path for problem in raised.value.problems})
    assert problems == [{"spec.roles.worker", "spec.roles.prefill", "spec.roles.decode"}, {"spec.rollout.drainTimeout"}]
