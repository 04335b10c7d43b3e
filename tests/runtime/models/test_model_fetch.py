"""`model fetch`: whole or not at all, once for all who share a folder, and never more than it should."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from isthmus_runtime.errors import WeightsError
from isthmus_runtime.model_cli import model_main
from isthmus_runtime.models import s3
from isthmus_runtime.models.fetching import in_place
from isthmus_runtime.models.s3 import S3Access, fetch_s3, read_credentials

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


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
        in_place(tmp_path / "o" / "m", print, download, weights=True)
    assert len(calls) == 1
    assert [p.name for p in (tmp_path / "o").iterdir()] == ["m"]


def test_who_is_slower_takes_what_the_faster_one_put_there(tmp_path: Path) -> None:
    out = tmp_path / "m"

    def download(folder: Path) -> None:
        out.mkdir()
        write(out, weights=True)
        write(folder, weights=True)

    in_place(out, print, download, weights=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_broken_download_leaves_nothing(tmp_path: Path) -> None:
    def download(folder: Path) -> None:
        write(folder, weights=False)

    with pytest.raises(WeightsError, match="no safetensors"):
        in_place(tmp_path / "m", print, download, weights=True)
    assert list(tmp_path.iterdir()) == []
    in_place(tmp_path / "m", print, download, weights=False)
    with pytest.raises(WeightsError, match="holds no whole model"):
        in_place(tmp_path / "m", print, download, weights=True)


def test_s3_without_boto3_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(WeightsError, match=r"isthmus-runtime\[s3\]"):
        fetch_s3("s3://b/p", tmp_path / "m", print, S3Access())


def test_only_plain_wanted_names_are_taken_from_a_bucket() -> None:
    class Pages:
        def paginate(self, **wanted: str) -> list[dict[str, Any]]:
            assert wanted == {"Bucket": "b", "Prefix": "p/", "Delimiter": "/"}
            names = ["p/config.json", "p/model.safetensors", "p/", "p/x.bin", "p/evil.py", "p/../up.json", "p/a/b.json"]
            return [{"Contents": [{"Key": name} for name in names]}, {}]

    class Client:
        def get_paginator(self, name: str) -> Pages:
            return Pages()

    assert s3._names(Client(), "b", "p/", ("*.json", "*.safetensors")) == ["config.json", "model.safetensors"]


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
