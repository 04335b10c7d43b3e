"""What `cluster.py images` and `load` say when they cannot do what they are asked for."""

from pathlib import Path

import pytest
from testcluster import cli, image_build, settings
from testcluster.image_build import DEBIAN_BASE, IMAGES, Builder, ImageError

FAILS = Builder(name="docker", build=("sh", "-c", "echo lookup docker.io: no such host; exit 1", "--"), save=("false",))


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> settings.Settings:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    found = settings.load()
    (found.cache / "images").mkdir(parents=True)
    return found


@pytest.mark.parametrize(
    ("base", "named"), [(image_build.BASE, True), ("mirror.test/python", True), (DEBIAN_BASE, False)]
)
def test_a_build_that_fails_names_the_way_without_a_registry(ours: settings.Settings, base: str, named: bool) -> None:
    with pytest.raises(ImageError, match="no such host") as caught:
        image_build.build_one(ours, FAILS, IMAGES[0], base)
    assert ("make images BASE=debootstrap" in str(caught.value)) is named


def test_load_needs_a_cluster_that_is_up(ours: settings.Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["load"]) == 1
    assert capsys.readouterr().err == "cluster: no full cluster of `make cluster-up` is up\n"
