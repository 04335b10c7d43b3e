"""Writes .ci/hashes/*.txt: every package that an image is built from, with its version from constraints.txt and the
hashes of its files, for `pip install --require-hashes`. Run by `make hashes` when a dependency or a pin changes.

One file an image, and two of the tools that build them. They hold no address of an index: whichever a build uses must
serve the same files.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HASHES = ROOT / ".ci" / "hashes"
OLDEST_PYTHON = "3.11"
TOOLS = {"tools": ["hatchling", "editables"], "engine-tools": ["setuptools>=77", "wheel", "nvidia-cuda-nvcc"]}
"""What builds our own distributions, and the kernels."""


def needs() -> dict[str, list[str]]:
    """File -> what is asked for; the rest follows from it."""
    operator, runtime = (
        tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"] for name in ("operator", "runtime")
    )
    engine = [need for need in runtime["optional-dependencies"]["engine"] if not need.startswith("isthmus")]
    router = [*runtime["dependencies"], *runtime["optional-dependencies"]["tracing"]]
    return {**TOOLS, "operator": operator["dependencies"], "router": router, "engine": [*router, *engine]}


def main() -> None:
    HASHES.mkdir(exist_ok=True)
    for name, wanted in needs().items():
        command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--no-header"]
        command += ["--no-annotate", "--generate-hashes", "--universal", f"--python-version={OLDEST_PYTHON}"]
        command += ["--constraint", str(ROOT / "constraints.txt"), "--output-file", str(HASHES / f"{name}.txt"), "-"]
        subprocess.run(command, input="\n".join(wanted), text=True, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
