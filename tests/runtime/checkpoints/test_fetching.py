"""`model fetch`: whole or not at all, once for all who share a folder, and never more than it should."""

import errno
import hashlib
import json
import os
import time
from functools import partial
from pathlib import Path

import pytest
from tiny_config import CONFIG

from isthmus_runtime.checkpoints.fetching import in_place
from isthmus_runtime.checkpoints.provenance import SOURCE_FILE, Origin, record_files
from isthmus_runtime.checkpoints.s3 import read_credentials
from isthmus_runtime.commands.model import model_main
from isthmus_runtime.errors import WeightsError

ORIGIN = Origin(source="hf://o/m", revision="v1")
DIGEST = hashlib.sha256(b"hf://o/m@v1").hexdigest()[:8]


def write(folder: Path, *, weights: bool) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if weights:
        (folder / "model.safetensors").write_bytes(b"x")


def test_a_folder_that_is_there_is_not_downloaded_again(tmp_path: Path) -> None:
    calls: list[Path] = []

    def download(folder: Path) -> None:
        calls.append(folder)
        write(folder, weights=True)

    for _ in range(2):
        in_place(tmp_path / "o" / "m", ORIGIN, print, download, weights=True)
    assert len(calls) == 1
    assert [p.name for p in (tmp_path / "o").iterdir()] == ["m"]


def test_who_is_slower_takes_what_the_faster_one_put_there(tmp_path: Path) -> None:
    out = tmp_path / "m"

    def download(folder: Path) -> None:
        out.mkdir()
        write(out, weights=True)
        write(folder, weights=True)

    in_place(out, ORIGIN, print, download, weights=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_broken_download_leaves_nothing(tmp_path: Path) -> None:
    def download(folder: Path) -> None:
        write(folder, weights=False)

    with pytest.raises(WeightsError, match="no safetensors"):
        in_place(tmp_path / "m", ORIGIN, print, download, weights=True)
    assert list(tmp_path.iterdir()) == []
    in_place(tmp_path / "m", ORIGIN, print, download, weights=False)
    with pytest.raises(WeightsError, match="does not hold a complete model"):
        in_place(tmp_path / "m", ORIGIN, print, download, weights=True)


def test_a_failed_download_is_gone_on_with_by_its_own_name_only(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "part").write_bytes(b"half")
        raise WeightsError("cut off")

    def rest(folder: Path) -> None:
        assert (folder / "part").read_bytes() == b"half"
        (folder / "part").unlink()
        write(folder, weights=True)

    out = tmp_path / "m"
    for name in ("pod-a", "pod-b"):
        with pytest.raises(WeightsError, match="cut off"):
            in_place(out, ORIGIN, print, broken, weights=True, resume_as=name)
    in_place(out, ORIGIN, print, rest, weights=True, resume_as="pod-a")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".m.pod-b.{DIGEST}.partial", "m"]


OTHERS = [
    Origin(source="hf://o/m", revision="v2"),
    Origin(source="s3://o/m"),
    Origin(source="s3://o/m", store="https://other.example"),
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize("mine", [ORIGIN, Origin(source="s3://o/m", store="https://one.example r1")], ids=str)
def test_the_model_of_another_source_is_not_taken_for_ones_own(tmp_path: Path, mine: Origin, other: Origin) -> None:
    out = tmp_path / "m"

    def download(origin: Origin, folder: Path) -> None:
        write(folder, weights=True)
        record_files(folder, origin)

    def slowly(folder: Path) -> None:
        in_place(out, other, print, partial(download, other), weights=True)
        download(mine, folder)

    for step in (slowly, partial(download, mine)):
        with pytest.raises(WeightsError) as raised:
            in_place(out, mine, print, step, weights=True)
        assert f"holds {other}, and {mine} is asked for" in str(raised.value)
        assert [p.name for p in tmp_path.iterdir()] == ["m"]
    in_place(out, other, print, partial(download, other), weights=True)
    # A record of the time before servers were recorded says nothing of them.
    record = json.loads((out / SOURCE_FILE).read_text())
    del record["store"]
    (out / SOURCE_FILE).write_text(json.dumps(record))
    if (mine.source, mine.revision) == (other.source, other.revision):
        in_place(out, mine, print, partial(download, mine), weights=True)
    else:
        with pytest.raises(WeightsError, match="is asked for"):
            in_place(out, mine, print, partial(download, mine), weights=True)


def test_nobody_goes_on_with_what_was_downloaded_of_another_source(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "part").write_bytes(b"half")
        raise WeightsError("cut off")

    for origin in (ORIGIN, *OTHERS):
        with pytest.raises(WeightsError, match="cut off"):
            in_place(tmp_path / "m", origin, print, broken, weights=True, resume_as="pod")


def test_what_a_lost_pod_left_goes_after_a_day(tmp_path: Path) -> None:
    for name, hours in (("old", 25.0), ("busy", 25.0), ("new", 1.0)):
        folder = tmp_path / f".m.{name}.partial"
        folder.mkdir()
        (folder / "piece").write_bytes(b"x")
        then = time.time() - 3600 * hours
        for path in (folder / "piece", folder):
            os.utime(path, (then, then))
    (tmp_path / ".m.busy.partial" / "piece").touch()
    told: list[str] = []
    in_place(tmp_path / "m", ORIGIN, told.append, lambda folder: write(folder, weights=True), weights=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".m.busy.partial", ".m.new.partial", "m"]
    assert any(".m.old.partial" in one for one in told)


def test_wrong_files_are_not_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no safetensors"):
        in_place(tmp_path / "m", ORIGIN, print, lambda f: write(f, weights=False), weights=True, resume_as="pod")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named() -> None:
    """As a folder that the kubelet made, which is root's. Nobody makes a folder in /sys."""
    with pytest.raises(WeightsError, match=f"/sys/isthmus.*user {os.geteuid()}.*must be able to write to /sys/isthmus"):
        in_place(Path("/sys/isthmus/m"), ORIGIN, print, partial(write, weights=True), weights=True)


def test_credentials_come_from_a_mounted_secret(tmp_path: Path) -> None:
    (tmp_path / "accessKeyId").write_text("id\n")
    with pytest.raises(WeightsError, match="secretAccessKey"):
        read_credentials(tmp_path)
    (tmp_path / "secretAccessKey").write_text("key\n")
    access = read_credentials(tmp_path, region="r")
    assert (access.access_key_id, access.secret_access_key, access.region) == ("id", "key", "r")


@pytest.mark.parametrize("source", ["o/n", "hf://", "s3://bucket", "ftp://x/y"])
def test_a_source_of_no_known_kind_is_refused(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert model_main(["fetch", source, str(tmp_path / "m")]) == 1
    assert "hf://owner/name" in capsys.readouterr().err


def full(folder: Path) -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", str(folder / "model.safetensors"))


def test_a_full_disk_is_told_as_that(tmp_path: Path) -> None:
    def download(folder: Path) -> None:
        try:
            raise full(folder)
        except OSError as error:
            raise RuntimeError("a client's own words for it") from error

    with pytest.raises(WeightsError, match=r"no space is left for m .* make the volume larger"):
        in_place(tmp_path / "m", ORIGIN, print, download, weights=True, resume_as="here")


def test_a_full_disk_is_cleared_of_what_nobody_downloads(tmp_path: Path) -> None:
    """Of any model; not of what a pod is busy with, and what this one has got so far stays too."""
    folders = {
        name: tmp_path / f".{name}.partial" for name in ("m.gone", "other.gone", "other.busy", f"m.here.{DIGEST}")
    }
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "part").write_bytes(b"x")
        if not name.endswith("busy"):
            for path in (folder / "part", folder):
                os.utime(path, (time.time() - 1000,) * 2)
    tries: list[bool] = []

    def download(folder: Path) -> None:
        tries.append((folder / "part").exists())
        if len(tries) == 1:
            raise full(folder)
        write(folder, weights=True)

    in_place(tmp_path / "m", ORIGIN, print, download, weights=True, resume_as="here")
    assert tries == [True, True]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.busy.partial", "m"]
