"""Line budget: no source file over 600 lines; tests and generated files are exempt. Called by `make size`."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

LIMIT = 600
SMELL = 400
SUFFIXES = {".py", ".cpp", ".h", ".cu", ".cuh"}


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = [Path(name) for name in listed.split("\0") if name]
    lines = {
        path: len(path.read_text(encoding="utf-8").splitlines())
        for path in paths
        if path.suffix in SUFFIXES and path.is_file()
    }
    sources = {path: count for path, count in lines.items() if path.parts[0] != "tests"}
    large = sorted((count, path) for path, count in sources.items() if count > SMELL)
    for count, path in reversed(large):
        print(f"{count:6} {path}" + (f"  over the limit of {LIMIT}" if count > LIMIT else ""))
    totals: Counter[str] = Counter()
    for path, count in lines.items():
        totals[path.parts[0]] += count
    print("lines: " + ", ".join(f"{part} {count}" for part, count in sorted(totals.items())))
    return 1 if any(count > LIMIT for count, _ in large) else 0


if __name__ == "__main__":
    sys.exit(main())
