"""The host side of kv_swap on a GPU, without one: pages in flight and the check of ids, against a fake stream."""

import shutil
import subprocess
from pathlib import Path

import pytest

import isthmus_kernels

FAKE = Path(__file__).parent / "fake_cuda"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    target = tmp_path_factory.mktemp("staging") / "staging_check"
    sources = Path(isthmus_kernels.__file__).parent
    command = [compiler, "-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command += [f"-I{FAKE}", f"-I{sources}", str(FAKE / "staging_check.cpp"), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


@pytest.mark.parametrize("seed", range(5))
def test_pages_and_ids(program: Path, seed: int) -> None:
    done = subprocess.run([program, str(seed)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"
