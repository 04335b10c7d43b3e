"""Images are built from packages whose hashes are written down, at the versions that everything else uses."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".ci"))

import hashes  # noqa: E402

STALE = "run `make hashes` and commit what it writes"
PINS = {
    canonicalize_name(pin.name): str(pin.specifier)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for pin in [Requirement(line)]
}


def locked(name: str) -> dict[str, Requirement]:
    """Package -> its line, each with hashes."""
    entries = re.sub(r"\s*\\\n\s*", " ", (hashes.HASHES / f"{name}.txt").read_text()).splitlines()
    found = {}
    for entry in entries:
        pin, *sums = entry.split(" --hash=")
        assert sums and all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in sums), pin
        found[canonicalize_name(Requirement(pin).name)] = Requirement(pin)
    return found


@pytest.mark.parametrize("name", hashes.needs())
def test_every_package_of_an_image_is_pinned_as_everywhere_and_has_its_hashes(name: str) -> None:
    pins = locked(name)
    for need in map(Requirement, hashes.needs()[name]):
        assert canonicalize_name(need.name) in pins, f"{need.name} is not in .ci/hashes/{name}.txt; {STALE}"
        assert next(iter(pins[canonicalize_name(need.name)].specifier)).version in need.specifier, STALE
    for package, pin in pins.items():
        # What only another system needs is nowhere installed.
        if package in PINS and (pin.marker is None or pin.marker.evaluate()):
            assert str(pin.specifier) == PINS[package], f"{package} in .ci/hashes/{name}.txt; {STALE}"


@pytest.mark.parametrize("name", hashes.needs())
def test_no_index_is_named(name: str) -> None:
    text = (hashes.HASHES / f"{name}.txt").read_text()
    assert "://" not in text and "index-url" not in text and "#" not in text


def test_no_image_installs_a_package_without_its_hash() -> None:
    for dockerfile in ("operator/Dockerfile", "runtime/Dockerfile"):
        for command in re.findall(r"pip [^;&]*install [^;&]*", (ROOT / dockerfile).read_text()):
            chosen_elsewhere = "TORCH_INDEX" in command
            assert "--require-hashes" in command or "--no-index" in command or chosen_elsewhere, command
