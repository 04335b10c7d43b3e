"""What an installed package holds beside its compiled libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from isthmus_kernels import native

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def test_no_sources_are_installed(tmp_path: Path) -> None:
    """A library whose sources lie beside it is compared with them, and some of them alone look like others: the images'
    engines then computed without their compiled kernels."""
    egg, built = f"--egg-base={tmp_path}", tmp_path / "built"
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", egg, "build_py", f"--build-lib={built}"],
        cwd=KERNELS,
        check=True,
        capture_output=True,
        timeout=120,
    )
    package = built / "isthmus_kernels"
    assert (package / "native.py").is_file() and (package / "py.typed").is_file()
    for patterns in (native.CPU_SOURCES, native.CUDA_SOURCES):
        assert native.source_digest(package, patterns) is None
