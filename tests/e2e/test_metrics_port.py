"""Real processes with a port of their own for metrics and probes: it opens nothing else, and answers until the end."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import BIN, MODEL, Process, free_port, get_json, metric

pytestmark = pytest.mark.e2e


def status(url: str, body: object = None) -> int:
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_who_may_scrape_may_do_nothing_else(tmp_path: Path) -> None:
    ports = {name: (free_port(), free_port()) for name in ("unified", "router")}

    def start(role: str, *flags: str) -> Process:
        port, apart = ports[role]
        argv = [
            str(BIN / "isthmus-runtime"),
            "serve",
            "--role",
            role,
            "--port",
            str(port),
            "--metrics-port",
            str(apart),
        ]
        argv += ["--model", str(MODEL), "--served-model-name", "test", *flags]
        return Process(role, argv, tmp_path / f"{role}.log").start()

    with ExitStack() as exits:
        engine = start("unified", "--executor", "fake", "--kv-memory", "256Ki")
        exits.callback(engine.stop)
        router = start("router", "--worker", f"127.0.0.1:{ports['unified'][0]}", "--page", "off")
        exits.callback(router.stop)
        for role, process in (("unified", engine), ("router", router)):
            process.wait_http(f"http://127.0.0.1:{ports[role][1]}/ready")
        for port, apart in ports.values():
            own, theirs = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{apart}"
            body = {"model": "test", "prompt": [1, 2, 3], "max_tokens": 2}
            assert status(f"{own}/v1/completions", body) == 200
            assert status(f"{own}/metrics") == 404
            for path in ("/health", "/ready"):
                assert status(own + path) == status(theirs + path) == 200
            assert get_json(f"{theirs}/info")
            assert metric(theirs, "python_info") >= 0
            for path in ("/v1/completions", "/internal/generate", "/internal/abort"):
                assert status(theirs + path, body) == 404
            assert status(f"{theirs}/v1/models") == 404
        assert metric(f"http://127.0.0.1:{ports['unified'][1]}", "vllm:request_success_total") == 2
        for path in ("/info", "/", "/page.js", "/status"):  # not for clients; switched off
            assert status(f"http://127.0.0.1:{ports['router'][0]}{path}") == 404
        assert status(f"http://127.0.0.1:{ports['router'][1]}/accepting") == 200
        again = start("unified", "--executor", "fake")
        assert again.popen.wait(60) == 2
        assert f"--port {ports['unified'][0]}" in again.tail()
