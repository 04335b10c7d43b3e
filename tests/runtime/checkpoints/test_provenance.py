"""The record of a model's files, and what is found against it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus_runtime.checkpoints import provenance
from isthmus_runtime.checkpoints.provenance import (
    SOURCE_FILE,
    Origin,
    pinned_revision,
    read_provenance,
    record_files,
    verify_files,
)
from isthmus_runtime.commands.model import model_main
from isthmus_runtime.errors import WeightsError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 100)
    record_files(tmp_path, Origin(source="hf://owner/name", revision="main"), commit="c" * 40)
    return tmp_path


def test_what_has_no_commit_is_named_by_its_files(folder: Path) -> None:
    record_files(folder, Origin(source="s3://bucket/prefix"))
    first = pinned_revision(folder)
    assert first.startswith("files:")
    flip(folder / "model.safetensors")
    record_files(folder, Origin(source="s3://bucket/prefix"))
    assert pinned_revision(folder) != first


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_what_was_recorded_is_found_unchanged(folder: Path) -> None:
    assert verify_files(folder) and verify_files(folder, every_byte=True)
    assert pinned_revision(folder) == "c" * 40
    made = read_provenance(folder)
    assert made is not None and sorted(made.files) == ["config.json", "model.safetensors"]
    assert model_main(["verify", str(folder)]) == 0


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte": (lambda f: flip(f / "config.json"), "config.json has SHA-256"),
    "a byte of the weights": (lambda f: flip(f / "model.safetensors"), "model.safetensors has SHA-256"),
    "cut short": (lambda f: os.truncate(f / "model.safetensors", 3), "has 3 bytes, 700 were downloaded"),
    "gone": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "a link": (
        lambda f: ((f / "config.json").rename(f / "other"), (f / "config.json").symlink_to(f / "other")),
        "config.json is missing or not a plain file",
    ),
    "one more": (lambda f: (f / "zzz.safetensors").write_bytes(b"more"), "zzz.safetensors is not among the files"),
    "a broken record": (lambda f: (f / SOURCE_FILE).write_text('{"files": 3}'), "cannot be read"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_named(folder: Path, change: str) -> None:
    make, said = CHANGES[change]
    make(folder)
    with pytest.raises(WeightsError, match=said):
        verify_files(folder)


def test_a_start_does_not_read_large_files_and_the_command_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(provenance, "LARGE_BYTES", 100)
    flip(folder / "model.safetensors")
    assert verify_files(folder)
    assert model_main(["verify", str(folder)]) == 1
    assert "model.safetensors has SHA-256" in capsys.readouterr().err


def test_a_folder_of_ones_own_has_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not verify_files(tmp_path) and pinned_revision(tmp_path) == ""
    assert model_main(["verify", str(tmp_path)]) == 1
    assert "was not fetched" in capsys.readouterr().err
    assert not verify_files(tmp_path / "nowhere")


def test_files_that_lead_out_of_a_folder_of_ones_own_are_refused(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("secret")
    folder = tmp_path / "mounted"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to("config.json")
    assert not verify_files(folder)
    (folder / "chat_template.jinja").symlink_to("../keys.json")
    (folder / "tokenizer.model").symlink_to("/etc/hostname")
    (folder / "round.json").symlink_to("round.json")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(WeightsError) as caught:
        verify_files(folder)
    wrong = ["1_Pooling/config.json", "chat_template.jinja", "round.json", "tokenizer.model"]
    assert [p.split(" ")[0] for p in caught.value.problems] == [str(folder / name) for name in wrong]


def test_the_hub_s_own_cache_is_a_folder_of_links(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "models--o--n" / "blobs", tmp_path / "models--o--n" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    (blobs / "b1").write_text("{}")
    (folder / "config.json").symlink_to("../../blobs/b1")
    assert not verify_files(folder)
    (folder / "tokenizer.json").symlink_to("../../../other")
    with pytest.raises(WeightsError, match=r"tokenizer\.json is a link to"):
        verify_files(folder)


def test_links_and_other_bytes_than_the_source_named_are_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/etc/passwd")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(WeightsError) as caught:
        record_files(tmp_path, Origin(source="hf://o/n"), expected={"model.safetensors": "0" * 64})
    assert "config.json is not a plain file" in caught.value.problems[0]
    assert "its source says 0000" in caught.value.problems[1]
    assert not (tmp_path / SOURCE_FILE).exists()
