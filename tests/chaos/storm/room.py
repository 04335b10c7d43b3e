"""A file system with room for next to nothing, for processes that meet a full disk."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

_SIZE = "64k"


class FullDisk:
    """Mounted at `folder`, which is made. The caller is in a mount namespace of its own. Full until `free`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "chaos", folder], check=True, timeout=20)
        (folder / "log").touch()
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def entering(self) -> list[str]:
        """The command prefix that starts a program with its log, working directory and temporary files here."""
        home = 'cd "$0" && export HOME="$0" TMPDIR="$0" XDG_CACHE_HOME="$0" && exec "$@" >>log 2>&1'
        return ["sh", "-c", home, str(self._folder)]

    def free(self) -> None:
        """Make room."""
        (self._folder / "filler").unlink()

    def keep_log(self, log: Path) -> None:
        """Append what could be logged here to `log`."""
        with log.open("ab") as out, (self._folder / "log").open("rb") as found:
            shutil.copyfileobj(found, out)
