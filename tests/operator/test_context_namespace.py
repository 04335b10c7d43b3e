"""`isthmus status` and `explain` look where kubectl would: in the namespace of the context."""

import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus_operator.__main__ import main
from isthmus_operator.api.v1alpha1 import InferenceService
from isthmus_operator.commands import cluster
from isthmus_operator.plan.observed import Observed
from isthmus_operator.settings import identity
from isthmus_operator.shell.client import default_namespace

EXAMPLE = Path(__file__).parents[2] / "examples" / "direct.yaml"


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
    assert f"kubeconfig {tmp_path / 'nothing'} does not exist" in capsys.readouterr().err


WHOLE = {
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "x",
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {}}],
}


@pytest.mark.parametrize(
    "written",
    [
        b"a: [",
        b"{\0",
        b"\xff\xfe\xfa",
        b"",
        b"words",
        b"- a",
        b"contexts: 4",
        json.dumps(WHOLE | {"clusters": [{"name": "c", "cluster": {"server": 5}}]}).encode(),
        json.dumps(WHOLE | {"users": [{"name": "u", "user": {"client-certificate-data": "a"}}]}).encode(),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_what_is_wrong(
    written: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    path = tmp_path / "config"
    path.write_bytes(written)
    assert main(["status", "svc", "--kubeconfig", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"no usable cluster configuration, kubeconfig {path}: " in line


def test_in_a_pod_it_is_the_pods(monkeypatch: pytest.MonkeyPatch, kubeconfig: Path) -> None:
    monkeypatch.setenv("POD_NAMESPACE", "own")
    assert identity().namespace == "own"
    assert default_namespace() == "own"
    assert default_namespace(str(kubeconfig)) == "team"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("command", ["status", "plan"])
def test_a_kubeconfig_that_is_missing_is_named_and_nothing_else_is_said(
    named: bool, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    path = tmp_path / ("named" if named else ".kube/config")
    what = str(EXAMPLE) if command == "plan" else "svc"
    assert main([command, what, *([f"--kubeconfig={path}"] if named else [])]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(f"isthmus {command}: kubeconfig {path} does not exist")
    assert line.endswith("give --kubeconfig, or set KUBECONFIG")


@pytest.mark.parametrize(("flags", "namespace"), [([], "team"), (["--context=plain"], "default"), (["-n", "x"], "x")])
def test_plan_asks_in_the_namespace_of_the_context_and_reads_standard_input(
    flags: list[str],
    namespace: str,
    kubeconfig: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []

    async def live(arguments: object, service: InferenceService) -> Observed:
        asked.append(service.namespace)
        return Observed()

    monkeypatch.setattr(cluster, "_live", live)
    monkeypatch.setattr("sys.stdin", io.StringIO(EXAMPLE.read_text()))
    assert main(["plan", "-", "--kubeconfig", str(kubeconfig), *flags]) == 0
    assert asked == [namespace]
    assert "start 1" in capsys.readouterr().out


def test_two_files_of_a_plan_cannot_both_be_standard_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-", "--old", "-"]) == 2
    assert "give a file for one of them" in capsys.readouterr().err


def test_a_wrong_file_on_standard_input_is_called_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a: [b"))
    assert main(["validate", "-"]) == 2
    assert "standard input:1:6: not valid YAML" in capsys.readouterr().err
