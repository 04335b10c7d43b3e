"""Prints a CycloneDX 1.5 list of what an image holds: Python distributions and Debian packages.

Run in the image at build time, by the Python whose distributions are meant. Standard library only.
"""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

DPKG_FORMAT = "${Package}\t${Version}\t${Architecture}\n"


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: sbom.py IMAGE VERSION", file=sys.stderr)
        return 2
    image, version = sys.argv[1:]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": image, "version": version}},
        "components": [*python_components(), *debian_components()],
    }
    json.dump(document, sys.stdout, indent=1)
    print()
    return 0


def python_components() -> list[dict[str, object]]:
    """The distributions that this interpreter can import, once each."""
    found = {(one.name, one.version): one for one in importlib.metadata.distributions()}
    return [python_component(one) for _, one in sorted(found.items())]


def python_component(one: importlib.metadata.Distribution) -> dict[str, object]:
    name = one.name.lower().replace("_", "-")
    entry: dict[str, object] = {
        "type": "library",
        "name": one.name,
        "version": one.version,
        "purl": f"pkg:pypi/{quote(name)}@{quote(one.version)}",
    }
    # Most give an SPDX expression; some paste the whole text, which helps nobody here.
    text = one.metadata.get("License-Expression") or one.metadata.get("License") or ""
    if text and "\n" not in text and len(text) < 80:
        entry["licenses"] = [{"license": {"name": text}}]
    return entry


def debian_components() -> list[dict[str, object]]:
    """The installed packages; none on an image that is not Debian's."""
    if not Path("/var/lib/dpkg/status").exists():
        return []
    listed = subprocess.run(["dpkg-query", "-W", "-f", DPKG_FORMAT], check=True, capture_output=True, text=True).stdout
    rows = [line.split("\t") for line in listed.splitlines()]
    return [
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}",
        }
        for name, version, architecture in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
