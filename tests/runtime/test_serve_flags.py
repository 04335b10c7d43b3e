"""What `isthmus-runtime serve` says to wrong flags: every problem, one line each, before anything starts."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from isthmus_runtime.__main__ import main
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.serve_flags import parse_serve

STORE = ["--transfer-mode", "store", "--store-master", "127.0.0.1:1"]
UNIFIED = ["--role", "unified", "--model", "m"]
DIRECT = ["--model", "m", "--transfer-mode", "direct"]
ROUTER = ["--role", "router", "--model", "m"]


def problems(argv: list[str]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_serve(argv)
    return caught.value.problems


@pytest.mark.parametrize(
    ("argv", "flag", "says"),
    [
        ([*UNIFIED, "--kv-memory", "9" * 400], "--kv-memory", "less than 8Ei"),
        ([*UNIFIED, "--kv-memory", "8388608Ti"], "--kv-memory", "less than 8Ei"),
        ([*UNIFIED, "--queue-timeout", "9" * 400], "--queue-timeout", "up to"),
        ([*UNIFIED, "--max-model-len", "1"], "--max-model-len", "2 or more"),
        ([*UNIFIED, "--tensor-parallel-size", "0"], "--tensor-parallel-size", "1 to 64"),
        ([*UNIFIED, "--tensor-parallel-size", "2", "--executor", "fake"], "--tensor-parallel-size", "--executor fake"),
        (
            [*UNIFIED, "--tensor-parallel-size", "3", "--deterministic", "on"],
            "--deterministic on",
            "NCCL orders the sums of --tensor-parallel-size 3",
        ),
        ([*UNIFIED, "--quantization", "fp8", "--deterministic", "on"], "--deterministic on", "--quantization fp8"),
        (
            ["--role", "decode", "--model", "m", *STORE, "--tensor-parallel-size", "2"],
            "--tensor-parallel-size 2 does not go with --transfer-mode store",
            "use direct",
        ),
        (["--role", "prefill", "--model", "m", "--transfer-mode", "direct", "--task", "embed"], "--task", "unified"),
        ([*UNIFIED, "--port", "80x"], "--port", "0 to 65535"),
        ([*UNIFIED, "--served-model-name", ""], "--served-model-name", "give a name"),
        (["--role", "unified", "--model", ""], "--served-model-name", "--model"),
        ([*ROUTER, "--decode", "h:0"], "--decode", "1 to 65535"),
        ([*ROUTER, "--decode", "h:99999"], "--decode", "1 to 65535"),
        ([*ROUTER, "--decode", "h:\u00b2"], "--decode", "1 to 65535"),
        ([*ROUTER, "--worker", "h:1", "--request-timeout", "9999999h"], "--request-timeout", "up to"),
        ([*UNIFIED, "--api-key-file", "f"], "--api-key-file", "--role router --worker"),
        ([*UNIFIED, "--page", "off"], "--page", "not by --role unified"),
        (["--role", "prefill", *DIRECT, "--reasoning", "think"], "--reasoning", "not by --role prefill"),
        (["--role", "decode", *DIRECT, "--control-tokens", "never"], "--control-tokens", "give it to the router"),
        (["--role", "decode", *DIRECT, "--max-queue", "9"], "--max-queue", "give it to the router"),
        ([*ROUTER, "--worker", "h:1", "--max-model-len", "9"], "--max-model-len", "engines alone"),
        ([*ROUTER, "--worker", "h:1", "--transfer-crc"], "--transfer-crc", "engines alone"),
        (
            ["--role", "decode", "--model", "m", "--transfer-mode", "direct", "--kv-layout", "layer-major"],
            "--kv-layout",
            "use block-major",
        ),
        ([*UNIFIED, "--store-reads", "off"], "--store-reads", "leave it out"),
    ],
)
def test_each_problem_names_the_flag_and_the_limit(argv: list[str], flag: str, says: str) -> None:
    (problem,) = problems(argv)
    assert flag in problem and says in problem


def test_all_problems_at_once() -> None:
    found = problems([*UNIFIED, "--port", "x", "--block-size", "0", "--kv-memory", "y", "--queue-timeout", "0s"])
    assert [p.split()[0].rstrip(":") for p in found] == ["--port", "--block-size", "--kv-memory", "--queue-timeout"]


@pytest.mark.parametrize(
    "argv", [[], ["--role", "chef", "--model", "m"], [*UNIFIED, "--colour", "red"], [*UNIFIED, "--metrics-por", "1"]]
)
def test_the_parser_itself_answers_in_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("isthmus-runtime serve: ") and "--help" in line


def test_a_pool_that_memory_cannot_hold_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--role", "decode", "--model", "m", "--transfer-mode", "direct", "--executor", "fake", "--port", "0"]
    assert main(["serve", *argv, "--kv-memory", "4194304Ti"]) == 2
    assert "lower --kv-memory" in capsys.readouterr().err


def test_a_flag_of_a_newer_operator_says_whose_version_is_too_old(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *UNIFIED, "--of-tomorrow", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--of-tomorrow" in line and version("isthmus-runtime") in line and "images of the operator's version" in line


@pytest.mark.parametrize(
    ("host", "pod", "listens"),
    [
        ("0.0.0.0", "", "0.0.0.0"),
        ("0.0.0.0", "10.0.0.1", "0.0.0.0"),
        ("0.0.0.0", "fd00::1", "::"),
        ("127.0.0.1", "fd00::1", "127.0.0.1"),
    ],
)
def test_all_addresses_are_also_those_of_ipv6_where_the_pods_is_one(
    host: str, pod: str, listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_IP", pod)
    assert parse_serve([*UNIFIED, "--host", host]).server.host == listens
