"""Listings of files: what is taken, and names that are refused by name."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.checkpoints.fetching import MODEL_FILES, TOKENIZER_FILES
from isthmus_runtime.checkpoints.names import MAX_FILES, choose_files
from isthmus_runtime.errors import WeightsError

HONEST = ["config.json", "model.safetensors", "tokenizer.json", "README.md", "onnx/model.onnx", "pytorch_model.bin"]


def test_files_of_the_top_folder_that_match_are_taken() -> None:
    assert choose_files(HONEST, MODEL_FILES, source="s") == ["config.json", "model.safetensors", "tokenizer.json"]
    assert choose_files([*HONEST, "sub/config.json"], TOKENIZER_FILES, source="s") == ["config.json", "tokenizer.json"]
    ours = ["isthmus-source.json", "isthmus-import.json", "1_Pooling.json"]
    assert choose_files(ours, MODEL_FILES, source="s") == []


@pytest.mark.parametrize(
    "name",
    [
        *("../../x", "../x.json", "sub/../../x.json", "sub/..", "./x.json", "sub//x.json", "/etc/x.json", "~/x.json"),
        *("C:\\x.json", "C:x.json", "..\\x.json", "x\0.json", "x\n.json", ""),
        *("x" * 250 + ".json", "é" * 120 + ".json", "a/" * 600 + "x.json", "Config.json"),
    ],
)
def test_names_that_could_be_written_elsewhere_are_refused_wanted_or_not(name: str) -> None:
    with pytest.raises(WeightsError, match="hf://o/n lists"):
        choose_files([*HONEST, name], MODEL_FILES, source="hf://o/n")


@given(st.lists(st.text(st.sampled_from("ab./\\:~ C\0é"), max_size=12), max_size=6), st.permutations(HONEST))
def test_what_is_taken_is_written_into_the_folder_and_nowhere_else(odd: list[str], honest: list[str]) -> None:
    patterns = ("*",)
    try:
        taken = choose_files([*odd, *honest], patterns, source="s")
    except WeightsError:
        return
    for name in taken:
        assert Path("/folder", name).parent == Path("/folder") and name not in (".", "..")
        assert PurePosixPath(name).name == name
        assert not PureWindowsPath(name).drive and not PureWindowsPath(name).is_absolute()
    assert len({name.casefold() for name in taken}) == len(taken)


def test_a_refusal_quotes_names_harmlessly_and_not_all_of_a_long_list() -> None:
    with pytest.raises(WeightsError) as caught:
        choose_files([f"../{i}\x1b[2J" for i in range(100)], MODEL_FILES, source="s")
    assert len(caught.value.problems) == 9 and "92 more" in caught.value.problems[-1]
    assert all(problem.isprintable() for problem in caught.value.problems)
    with pytest.raises(WeightsError, match=f"at most {MAX_FILES}"):
        choose_files([f"{i}.json" for i in range(MAX_FILES + 1)], MODEL_FILES, source="s")
