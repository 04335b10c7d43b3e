"""What compiled CUDA code tells without a card: that its layouts hold, and what its machine code is made of."""

import shutil
import subprocess
from pathlib import Path

import pytest

import isthmus_kernels
from isthmus_kernels import native

SOURCES = Path(isthmus_kernels.__file__).parent


def check_layout(source: Path, folder: Path) -> None:
    """Compile `source`, which includes a kernel's layout header in `folder` and run it: undefined behaviour fails."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    program = folder / source.stem
    command = [compiler, "-std=c++17", "-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all", "-Wall", "-Werror"]
    subprocess.run([*command, f"-I{SOURCES}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def hopper_code(name: str) -> list[str]:
    """The machine code (SASS) of each compiled kernel with `name` in its mangled name that uses Hopper's products."""
    triton = pytest.importorskip("triton")
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    library = native.find(SOURCES, "_cuda")
    if library is None or not dump.exists():
        pytest.skip("needs the compiled library, and cuobjdump, which Triton brings")
    code = subprocess.run([dump, "--dump-sass", str(library)], capture_output=True, text=True, check=True).stdout
    kernels = [part for part in code.split("Function : ") if name in part.split("\n", 1)[0]]
    return [part for part in kernels if "HGMMA" in part]


def assert_in_registers(kernel: str) -> None:
    """A value that does not fit into registers goes through local memory, which costs a product half of its speed."""
    assert " LDL" not in kernel and " STL" not in kernel
