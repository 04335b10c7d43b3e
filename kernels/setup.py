"""Builds the CPU library: every op source once per instruction set, linked into one shared object.

The choice among the instruction sets is made at run time (native.py), so one wheel runs on any x86-64-v2
machine. A missing compiler is not an error: the package then uses its PyTorch implementations.
"""

import hashlib
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGE = Path("src/isthmus_kernels")
COMMON = ["-std=c++17", "-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
# Plain C entry points: nothing of the C++ run-time library is needed or linked.
COMMON += ["-fno-exceptions", "-fno-rtti", "-Wall"]
# GCC 12 warns about its own AVX-512 header (bug 105593).
COMMON += ["-Wno-maybe-uninitialized"]
LEVELS = {"base": ["-march=x86-64-v2"], "avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
if platform.machine() not in ("x86_64", "AMD64"):
    LEVELS = {"base": []}


def source_digest() -> str:
    """What native.py compares with the sources beside it, to notice a library that was built from others."""
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.glob("*/cpu/*.cpp"), *PACKAGE.glob("cpu/*")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class BuildLevels(build_ext):
    """Compile the sources once per instruction set instead of once."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link; each level's entry points carry its name."""

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
            macros=[("ISTHMUS_LEVELS", str(len(LEVELS))), ("ISTHMUS_SOURCES", f'"{source_digest()}"')],
            extra_postargs=["-O2", "-g0", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-Wall"],
        )
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=["-fopenmp", "-pthread"],
            build_temp=self.build_temp,
        )


setup(
    ext_modules=[
        Extension(
            "isthmus_kernels._cpu",
            sources=sorted(str(path) for path in PACKAGE.glob("*/cpu/*.cpp")),
            depends=[str(path) for path in PACKAGE.glob("cpu/*.h")],
            py_limited_api=True,
            optional=True,
        )
    ]
    if sys.platform == "linux"
    else [],
    cmdclass={"build_ext": BuildLevels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
