"""Wall clocks of single processes that jump, by a small library that is loaded into them (`jump.c`)."""

from __future__ import annotations

import mmap
import shutil
import subprocess
from pathlib import Path


def able() -> bool:
    """Whether there is a compiler for the library."""
    return shutil.which("cc") is not None


class Clocks:
    """The clocks of `names`, all right at first. Files are made in `folder`."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._library = folder / "jump.so"
        source = Path(__file__).with_name("jump.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", self._library, source], check=True, timeout=60)
        self._files = {name: folder / f"{name}.clock" for name in names}
        for file in self._files.values():
            file.write_bytes(bytes(8))

    def environment(self, name: str) -> dict[str, str]:
        """What a member is started with."""
        return {"LD_PRELOAD": str(self._library), "ISTHMUS_CHAOS_CLOCK": str(self._files[name])}

    def set(self, name: str, seconds: int) -> None:
        """How far the clock of a member is ahead of the machine's, or behind."""
        with self._files[name].open("r+b") as file, mmap.mmap(file.fileno(), 8) as page:
            page[:] = (seconds * 1_000_000_000).to_bytes(8, "little", signed=True)
