"""What a model directory is served for, and what of sentence-transformers' files is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_config import CONFIG

from isthmus_runtime.errors import ConfigError
from isthmus_runtime.models.pooling import Pooling, PoolingKind, read_task
from isthmus_runtime.request import ServedTask

TYPES = ["Transformer", "Pooling", "Normalize"]
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
LAST = {"pooling_mode_lasttoken": True}


def directory(root: Path, types: list[str] = TYPES, pooling: object = LAST, **config: Any) -> Path:
    root.joinpath("config.json").write_text(json.dumps({**CONFIG, **config}))
    modules = [{"idx": i, "path": "", "type": f"sentence_transformers.models.{t}"} for i, t in enumerate(types)]
    root.joinpath("modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        root.joinpath("1_Pooling").mkdir()
        root.joinpath("1_Pooling/config.json").write_text(json.dumps(pooling))
    return root


def test_auto_follows_the_files(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text(json.dumps(CONFIG))
    assert read_task(tmp_path).task == ServedTask()
    assert read_task(tmp_path, "score").task == ServedTask(kind="score")
    # A plain decoder that is told to embed: the last token's state, of length 1.
    embeds = read_task(tmp_path, "embed")
    assert (embeds.task.kind, embeds.task.dimensions, embeds.task.shorter) == ("embed", 64, False)
    assert embeds.pooling == Pooling(PoolingKind.LAST, True)
    served = read_task(directory(tmp_path, TYPES[:2], MEAN))
    assert served.pooling == Pooling(PoolingKind.MEAN, False) and served.pooling.needs_every_state
    assert read_task(tmp_path, "generate").pooling is None
    # As `model fetch` leaves it.
    tmp_path.joinpath("1_Pooling/config.json").rename(tmp_path / "1_Pooling.json")
    assert read_task(tmp_path) == served


@pytest.mark.parametrize(
    ("config", "shorter", "lengths"),
    [
        ({}, False, ()),
        ({"model_type": "qwen3"}, True, ()),
        ({"model_type": "qwen3", "is_matryoshka": False}, False, ()),
        ({"is_matryoshka": True}, True, ()),
        ({"matryoshka_dimensions": [32, 16]}, True, (16, 32)),
    ],
)
def test_which_models_vectors_may_be_cut(
    tmp_path: Path, config: dict[str, Any], shorter: bool, lengths: tuple[int, ...]
) -> None:
    task = read_task(directory(tmp_path, **config)).task
    assert (task.shorter, task.lengths) == (shorter, lengths)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"types": ["Transformer", "Pooling", "Dense", "Normalize"]}, "Dense, Normalize are not supported; known: "),
        ({"types": ["Pooling"]}, "modules Pooling are not supported"),
        ({"pooling": None}, r"1_Pooling/config.json is missing: it says which states make a vector"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "pooling_mode_max_tokens is not supported; known: one of"),
        ({"pooling": {**LAST, **MEAN}}, "pooling_mode_lasttoken, pooling_mode_mean_tokens is not supported"),
        ({"pooling": {}}, "no mode is not supported"),
        ({"pooling": {**LAST, "include_prompt": False}}, "include_prompt false is not supported"),
        ({"matryoshka_dimensions": [65]}, r"matryoshka_dimensions is \[65\], expected numbers from 1 to 64"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    directory(tmp_path, **change)
    with pytest.raises(ConfigError, match=problem):
        read_task(tmp_path)


def test_every_problem_is_told(tmp_path: Path) -> None:
    directory(tmp_path, ["Dense"], {"pooling_mode_max_tokens": True, "include_prompt": False})
    with pytest.raises(ConfigError) as raised:
        read_task(tmp_path)
    assert len(raised.value.problems) == 3


@pytest.mark.parametrize("text", ["{}", "[1]", "nonsense"])
def test_modules_that_are_no_list_of_objects(tmp_path: Path, text: str) -> None:
    directory(tmp_path)
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ConfigError, match=r"modules\.json"):
        read_task(tmp_path)
