"""The host side of kv_swap on a GPU, without one: pages in flight and the check of ids, against a fake stream; whole
submissions by every way, by the caller and by the thread, against fake streams whose work runs as late and in as odd an
order as events allow; the line in which they wait, with many threads, also under the sanitizer of threads."""

import shutil
import subprocess
from pathlib import Path

import pytest

import isthmus_kernels

ADDRESSES, THREADS = "address,undefined", "thread"
PROGRAMS = (
    ("fake_cuda", "staging_check", ADDRESSES),
    ("fake_streams", "submit_check", ADDRESSES),
    ("fake_streams", "submit_check", THREADS),
    ("fake_streams", "handover_check", ADDRESSES),
    ("fake_streams", "handover_check", THREADS),
)


@pytest.fixture(scope="module", params=PROGRAMS, ids=lambda program: f"{program[1]}-{program[2]}")
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    where, name, sanitizer = request.param
    folder = Path(__file__).parent / where
    target = tmp_path_factory.mktemp("staging") / name
    sources = Path(isthmus_kernels.__file__).parent
    command = [compiler, "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"]
    command += [f"-I{folder}", f"-I{sources}", str(folder / f"{name}.cpp"), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.slow
def test_every_check(program: Path, seed: int) -> None:
    done = subprocess.run([program, str(seed)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"
