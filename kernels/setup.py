"""Builds the CPU library and, where nvcc is, the CUDA library.

CPU: every op source once per instruction set, linked into one shared object. The choice among the instruction
sets is made at run time (native.py), so one wheel runs on any x86-64-v2 machine.
CUDA: every op source into one shared object with machine code for Hopper, PTX for what comes after it, and the CUDA
run-time library inside. It loads without a driver, and where it runs nothing is compiled.
A missing compiler is not an error: the package then uses its PyTorch implementations.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

PACKAGE = Path("src/isthmus_kernels")
COMMON = ["-std=c++17", "-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
# Plain C entry points: nothing of the C++ run-time library is needed or linked.
COMMON += ["-fno-exceptions", "-fno-rtti", "-Wall"]
# GCC 12 warns about its own AVX-512 header (bug 105593).
COMMON += ["-Wno-maybe-uninitialized"]
LEVELS = {"base": ["-march=x86-64-v2"], "avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
if platform.machine() not in ("x86_64", "AMD64"):
    LEVELS = {"base": []}


# What each library is compiled from, as in native.py.
CPU_SOURCES = ("*/cpu/*.cpp", "cpu/*", "*/*.h")
CUDA_SOURCES = ("*/cuda/*", "cuda/*", "*/*.h")
CUDA = ["-std=c++17", "-O3", "-shared", "-cudart", "static", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"]
# Hopper's own instructions (the matrix units of a warpgroup) exist for sm_90a alone. The PTX, which later devices
# compile, leaves out what is made of them.
CUDA += ["-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_90,code=compute_90"]


def source_digest(patterns: tuple[str, ...]) -> str:
    """What native.py compares with the sources beside it, to notice a library that was built from others."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in PACKAGE.glob(pattern)}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def nvcc() -> list[str] | None:
    """The compiler on the PATH, or else the one that the package nvidia-cuda-nvcc installs; None without either."""
    found = shutil.which("nvcc")
    if found:
        return [found]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        toolkit = Path(folder) / "cu13"
        if (toolkit / "bin/nvcc").exists():
            return [str(toolkit / "bin/nvcc"), f"-L{toolkit / 'lib'}"]
    return None


class BuildLibraries(build_ext):
    """Compile plain shared objects instead of Python modules."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link."""
        if ext.name.endswith("._cuda"):
            self.build_cuda(ext)
        else:
            self.build_levels(ext)

    def build_cuda(self, ext: Extension) -> None:
        """One call of nvcc for all sources."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = f'-DISTHMUS_SOURCES="{source_digest(CUDA_SOURCES)}"'
        command = [*(nvcc() or ()), *CUDA, digest, "-o", str(target), *ext.sources]
        if subprocess.run(command, check=False).returncode:
            raise CompileError("nvcc failed")

    def build_levels(self, ext: Extension) -> None:
        """Each source once per instruction set; a level's entry points carry its name."""

        def compile_one(job: tuple[str, str]) -> list[str]:
            level, source = job
            compiled: list[str] = self.compiler.compile(
                [source],
                output_dir=str(Path(self.build_temp) / level),
                macros=[("ISTHMUS_LEVEL", level)],
                include_dirs=[str(PACKAGE / "cpu")],
                extra_postargs=COMMON + LEVELS[level],
                depends=ext.depends,
            )
            return compiled

        # The slowest first, so that the last one to finish is short.
        jobs = [(level, source) for level in reversed(LEVELS) for source in ext.sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [item for group in pool.map(compile_one, jobs) for item in group]
        objects += self.compiler.compile(
            [str(PACKAGE / "cpu" / "level.cpp"), str(PACKAGE / "cpu" / "pool.cpp")],
            output_dir=self.build_temp,
            macros=[("ISTHMUS_LEVELS", str(len(LEVELS))), ("ISTHMUS_SOURCES", f'"{source_digest(CPU_SOURCES)}"')],
            extra_postargs=["-O2", "-g0", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-Wall"],
        )
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=["-fopenmp", "-pthread"],
            build_temp=self.build_temp,
        )


def extensions() -> list[Extension]:
    """The libraries that can be built here. `optional`: one that does not compile is left out with a warning."""
    if sys.platform != "linux":
        return []
    cpu = Extension(
        "isthmus_kernels._cpu",
        sources=sorted(str(path) for path in PACKAGE.glob("*/cpu/*.cpp")),
        depends=[str(path) for pattern in ("cpu/*.h", "*/*.h") for path in PACKAGE.glob(pattern)],
        py_limited_api=True,
        optional=True,
    )
    cuda = Extension(
        "isthmus_kernels._cuda",
        sources=sorted(str(path) for pattern in ("*/cuda/*.cu", "cuda/*.cu") for path in PACKAGE.glob(pattern)),
        depends=[str(path) for pattern in ("*/cuda/*.cuh", "*/*.h") for path in PACKAGE.glob(pattern)],
        py_limited_api=True,
        optional=True,
    )
    return [cpu, cuda] if nvcc() else [cpu]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildLibraries},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
