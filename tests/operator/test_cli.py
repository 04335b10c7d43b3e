"""`isthmus` as a user meets it: output, errors and exit codes. No traceback for anything a user can write."""

import argparse
import io
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from isthmus_operator.__main__ import main
from isthmus_operator.errors import UserError
from isthmus_operator.local import up as up_module
from isthmus_operator.local.console import Console

ROOT = Path(__file__).parents[2]
DIRECT = ROOT / "examples" / "direct.yaml"


def test_validate_says_valid_and_the_revision(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(DIRECT)]) == 0
    assert f"{DIRECT}: valid; revision " in capsys.readouterr().out


def test_render_prints_documents_that_kubectl_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(DIRECT), "-n", "team"]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert {d["metadata"]["namespace"] for d in documents} == {"team"}
    assert main(["render", str(DIRECT), "-n", "team", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["items"] == documents


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("isthmus ")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (None, ["no such file"]),
        ("", ["holds 0 resources"]),
        ("- 1\n", ["document 1 is not a mapping"]),
        ("kind: Pod\n", ["kind 'Pod'", "InferenceService"]),
        ("a: [1\nb", [":2:", "not valid YAML"]),
        ("kind: InferenceService\nspec: {}\nspec: {}\n", [":3:1", "'spec' is there twice"]),
        ("kind: InferenceService\n", ["apiVersion", "metadata.name", "spec.model.source", "spec.roles.prefill"]),
        ("kind: InferenceService\n---\nkind: InferenceService\n", ["holds 2 resources"]),
        ("kind: InferenceService\nspec: {mod: x}\n", ["spec.mod: is not a field", "did you mean mode?"]),
        ("\x00", ["not valid YAML"]),
    ],
)
@pytest.mark.parametrize("command", ["validate", "render", "up"])
def test_what_is_wrong_is_said_without_a_traceback(
    text: str | None, pieces: list[str], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.yaml"
    if text is not None:
        file.write_text(text)
    assert main([command, str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"isthmus {command}: ")
    for piece in pieces:
        assert piece in error


def test_up_names_a_busy_port_and_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert main(["up", str(DIRECT), "--model", str(tmp_path), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1" in error
    assert "--port" in error


@pytest.fixture
def own_log() -> Iterator[None]:
    """What a test sets of the root log is not there for others, nor a handler that writes where pytest captured."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.mark.parametrize(
    ("flag", "others"),
    [
        ("--metrics-port", ["--health-port=0"]),
        ("--health-port", ["--metrics-port=0"]),
        ("--webhook-port", ["--webhook-cert-dir=/certs", "--metrics-port=0", "--health-port=0"]),
    ],
)
def test_the_operator_names_a_busy_port_and_the_flag(
    flag: str, others: list[str], capsys: pytest.CaptureFixture[str], own_log: None
) -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert main(["operator", f"{flag}={port}", *others]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"isthmus operator: {flag} {port}: cannot listen on 0.0.0.0 port {port}: ")


def test_up_names_a_missing_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(DIRECT), "--model", "/nowhere/at all"]) == 2
    assert "--model '/nowhere/at all' is neither a folder" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1])
def test_up_imports_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    program = tmp_path / "isthmus-runtime"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nmkdir -p "$5/own"\necho "$5/own"\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setattr(up_module, "find_program", lambda name: str(tmp_path / name))
    file = tmp_path / "tiny-Q4.gguf"
    file.write_bytes(b"GGUF")
    manifest, console = {"spec": {"model": {"source": {}}}}, Console(io.StringIO(), quiet=True)
    if status:
        with pytest.raises(UserError, match=r"tiny-Q4\.gguf could not be imported"):
            up_module.with_local_model(manifest, str(file), tmp_path / "models", console)
    else:
        made = up_module.with_local_model(manifest, str(file), tmp_path / "models", console)
        assert made["spec"]["model"]["source"] == {"hostPath": {"path": str(tmp_path / "models" / "own")}}
    under = str(tmp_path / "models")
    assert (tmp_path / "asked").read_text().split() == ["model", "import", str(file), "--under", under]


def test_up_says_how_to_import_without_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up_module, "find_program", lambda name: None)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (tmp_path / "x.bin").write_bytes(b"")
    console = Console(io.StringIO(), quiet=True)
    for name, said in (("x.gguf", "isthmus-runtime model import .*x.gguf --under .*models"), ("x.bin", "GGUF file")):
        with pytest.raises(UserError, match=said):
            up_module.with_local_model({"spec": {}}, str(tmp_path / name), tmp_path / "models", console)


def test_up_finds_the_example_model_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    folder = tmp_path / "models" / "smollm2-135m-instruct"
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        arguments = ["up", str(DIRECT), "--port", str(holder.getsockname()[1])]
        folder.mkdir(parents=True)
        # The busy port ends the run after the model has been looked for.
        assert main(arguments) == 2
    assert f"using {folder}" in capsys.readouterr().out


def test_a_bad_flag_is_refused() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["up", str(DIRECT), "--port", "70000"])
    assert caught.value.code == 2


def test_a_reader_that_leaves_early_is_no_error() -> None:
    shown = subprocess.run(
        f"{sys.executable} -m isthmus_operator render {DIRECT} | head -n 1",
        shell=True,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.stdout == "apiVersion: networking.k8s.io/v1\n"
    assert "Traceback" not in shown.stderr


def test_a_run_folder_that_is_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (there := tmp_path / "file").write_text("")
    model = tmp_path / "model"
    model.mkdir()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    assert main(["up", str(DIRECT), "--model", str(model), "--run-dir", str(there), "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("isthmus up: ") and str(there) in error and error.count("\n") == 1


def test_a_run_folder_that_is_full_is_named(tmp_path: Path) -> None:
    """By a limit on the size of files, of which a write says as little as on a full disk."""
    (model := tmp_path / "model").mkdir()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    options = ["--model", str(model), "--run-dir", str(tmp_path / "run"), "--port", str(port)]
    program = [sys.executable, "-m", "isthmus_operator", "up", str(DIRECT), *options]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 0; exec "$@"', "-", *program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done
    assert f"run folder {tmp_path / 'run'}: File too large" in done.stderr and "Traceback" not in done.stderr


def test_what_ends_the_operator_has_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def times_out(arguments: argparse.Namespace) -> int:
        raise TimeoutError

    monkeypatch.setattr("isthmus_operator.commands.run_operator.run_operator", times_out)
    with pytest.raises(TimeoutError):
        main(["operator"])


def test_a_terminal_of_few_letters_shows_the_others_as_numbers() -> None:
    out = io.TextIOWrapper(written := io.BytesIO(), encoding="ascii")
    Console(out, quiet=False).log("router", "café 中")
    assert written.getvalue() == b"router     | caf\\xe9 \\u4e2d\n"
