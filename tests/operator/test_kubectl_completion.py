"""`kubectl isthmus` completed by kubectl: the program it runs, and what that says."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from testcluster import settings
from testcluster.binaries import FAST, MissingBinariesError, find

from isthmus_operator.commands.completion import ANYTHING, NO_FILES, candidates, kubectl
from isthmus_operator.commands.parser import build_parser

PROJECT = Path(__file__).parents[2] / "operator" / "pyproject.toml"
COMMANDS = ["up", "render", "validate", "plan", "status", "explain", "operator", "completion", "version"]


@pytest.mark.parametrize(
    ("line", "words", "more"),
    [
        ("", [*COMMANDS, "--help"], NO_FILES),
        ("st", ["status"], NO_FILES),
        ("nothing ", [], NO_FILES),
        ("status ", [], NO_FILES),
        ("status svc --k", ["--kubeconfig"], NO_FILES),
        ("status svc --kubeconfig ", [], ANYTHING),
        ("status svc -o ", ["text", "json"], NO_FILES),
        ("status svc --output=j", ["--output=json"], NO_FILES),
        ("status svc more", [], NO_FILES),
        ("validate ", [], ANYTHING),
        ("render -o json ", [], ANYTHING),
        ("render service.yaml --quiet", [], NO_FILES),
        ("up service.yaml --q", ["--quiet"], NO_FILES),
        ("up --quiet ", [], ANYTHING),
        ("completion z", ["zsh"], NO_FILES),
        ("operator --log-level ", ["debug", "info", "warning", "error"], NO_FILES),
    ],
)
def test_what_may_come_next(line: str, words: list[str], more: int) -> None:
    assert candidates(line.split(" "), build_parser()) == (words, more)


def test_no_word_is_an_empty_one() -> None:
    assert candidates([], build_parser()) == candidates([""], build_parser())


def test_the_program_that_kubectl_looks_for_is_installed() -> None:
    scripts = tomllib.loads(PROJECT.read_text())["project"]["scripts"]
    assert scripts["kubectl_complete-isthmus"] == f"{kubectl.__module__}:{kubectl.__name__}"


def test_kubectl_completes_it(tmp_path: Path) -> None:
    """As a shell asks kubectl; the programs are in PATH, as `pip install` puts them there."""
    try:
        program = find(settings.load(), FAST)["kubectl"]
    except MissingBinariesError as error:
        pytest.skip(f"no kubectl: {error}")
    for name, entry in tomllib.loads(PROJECT.read_text())["project"]["scripts"].items():
        module, _, function = entry.partition(":")
        path = tmp_path / name
        path.write_text(f"#!{sys.executable} -P\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def ask(*words: str) -> list[str]:
        command = [program, "__complete", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
        return done.stdout.splitlines()

    assert ask("isthm")[0].startswith("isthmus")
    assert ask("isthmus", "") == [*COMMANDS, "--help", f":{NO_FILES}"]
    assert ask("isthmus", "status", "svc", "-o", "") == ["text", "json", f":{NO_FILES}"]
    assert ask("isthmus", "validate", "") == [f":{ANYTHING}"]
