"""`isthmus status` and `explain` look where kubectl would: in the namespace of the context."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus_operator.__main__ import main
from isthmus_operator.settings import identity
from isthmus_operator.shell.client import default_namespace


class Server(http.server.BaseHTTPRequestHandler):
    """Has a service `svc` in every namespace, whose URL names it."""

    def do_GET(self) -> None:
        namespace = self.path.split("/namespaces/")[1].split("/")[0]
        body = {"metadata": {"name": "svc", "namespace": namespace, "generation": 1}, "status": {"url": namespace}}
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        contexts = [("work", {"namespace": "team"}), ("plain", {}), ("other", {"namespace": "elsewhere"})]
        config = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": n, "context": {"cluster": "c", "user": "u"} | more} for n, more in contexts],
            "current-context": "work",
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(config))
        yield path
        server.shutdown()


@pytest.mark.parametrize(
    ("flags", "namespace"),
    [([], "team"), (["--context=plain"], "default"), (["--context=other"], "elsewhere"), (["-n", "x"], "x"),
     (["--context=other", "-n", "x"], "x")],
)  # fmt: skip
@pytest.mark.parametrize("command", ["status", "explain"])
def test_the_namespace_is_the_contexts_unless_given(
    command: str, flags: list[str], namespace: str, kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([command, "svc", "--kubeconfig", str(kubeconfig), "-o", "text", *flags])
    if command == "status":
        assert capsys.readouterr().out.startswith(f"{namespace}/svc  {namespace}")
    else:
        assert "no operator has looked at generation 1" in capsys.readouterr().out


def test_a_file_that_is_none_is_named_by_the_connection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    assert default_namespace(str(tmp_path / "nothing")) == "default"
    assert main(["status", "svc", "--kubeconfig", str(tmp_path / "nothing")]) == 1
    assert "no usable cluster configuration" in capsys.readouterr().err


def test_in_a_pod_it_is_the_pods(monkeypatch: pytest.MonkeyPatch, kubeconfig: Path) -> None:
    monkeypatch.setenv("POD_NAMESPACE", "own")
    assert identity().namespace == "own"
    assert default_namespace() == "own"
    assert default_namespace(str(kubeconfig)) == "team"
