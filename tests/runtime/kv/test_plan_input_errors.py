"""Wrong inputs and files of the `kv-plan` command: every problem at once, by field path, never a traceback."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from isthmus_runtime.errors import PlanError
from isthmus_runtime.kv.groups import LayerSpec
from isthmus_runtime.kv.plan import KvPlanInput, kv_plan_main, plan, plan_from_json

CASES = json.loads((Path(__file__).parent / "kv_plan_cases.json").read_text())
GOOD: dict[str, Any] = CASES[0]["input"]


def problems(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        plan_from_json({**copy.deepcopy(GOOD), **changes})
    assert caught.value.code == "invalid_input"
    return caught.value.problems


def spec(**changes: Any) -> list[list[dict[str, Any]]]:
    merged = {**GOOD["workers"][0][0], **changes}
    return [[{name: value for name, value in merged.items() if value is not ...}]]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"workers": spec(kind="ring")}, "workers[0][0].kind"),
        ({"workers": spec(kind=["full"])}, "workers[0][0].kind"),
        ({"workers": spec(kind=...)}, "workers[0][0].kind"),
        ({"workers": spec(kv_heads=-3)}, "workers[0][0].kv_heads"),
        ({"workers": spec(layers=0)}, "workers[0][0].layers"),
        ({"workers": spec(layers=10**9)}, "workers[0][0].layers"),
        ({"workers": spec(head_dim=...)}, "workers[0][0].head_dim"),
        ({"workers": spec(head_dim=True)}, "workers[0][0].head_dim"),
        ({"workers": spec(block_size=float("nan"))}, "workers[0][0].block_size"),
        ({"workers": spec(block_size="16")}, "workers[0][0].block_size"),
        ({"workers": spec(dtype="int3")}, "workers[0][0].dtype"),
        ({"workers": spec(dtype={})}, "workers[0][0].dtype"),
        ({"workers": spec(kind="sliding")}, "workers[0][0].window"),
        ({"workers": spec(window=128)}, "workers[0][0].window"),
        ({"workers": spec(kind="mla")}, "workers[0][0].width"),
        ({"workers": []}, "workers"),
        ({"workers": [[]]}, "workers[0]"),
        ({"workers": [[7]]}, "workers[0][0]"),
        ({"workers": {"0": []}}, "workers"),
        ({"available_bytes": []}, "available_bytes"),
        ({"available_bytes": [1, 2]}, "available_bytes"),
        ({"available_bytes": 5}, "available_bytes"),
        ({"available_bytes": [-1]}, "available_bytes[0]"),
        ({"available_bytes": [1.5]}, "available_bytes[0]"),
        ({"available_bytes": [2**63]}, "available_bytes[0]"),
        ({"available_bytes": [10**5000]}, "available_bytes[0]"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": None}, "max_model_len"),
        ({"max_model_len": float("inf")}, "max_model_len"),
        ({"num_blocks_override": 0}, "num_blocks_override"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens"),
        ({"batches_in_flight": 0}, "batches_in_flight"),
        ({"auto_fit": "yes"}, "auto_fit"),
        ({"name": 3}, "name"),
        ({"num_block_override": 32}, "num_block_override"),
    ],
)
def test_a_problem_is_named_by_its_path(changes: dict[str, Any], path: str) -> None:
    found = problems(**changes)
    assert path in [problem.split(":")[0] for problem in found]


def test_all_problems_come_at_once() -> None:
    found = problems(workers=spec(kv_heads=-1, dtype="x"), available_bytes=[-1], max_model_len=0)
    assert [problem.split(":")[0] for problem in found] == [
        "max_model_len",
        "workers[0][0].kv_heads",
        "workers[0][0].dtype",
        "available_bytes[0]",
    ]


@pytest.mark.parametrize("missing", ["workers", "available_bytes", "max_model_len", "max_num_batched_tokens"])
def test_a_missing_field_is_named(missing: str) -> None:
    obj = {name: value for name, value in GOOD.items() if name != missing}
    with pytest.raises(PlanError, match=f"{missing}: missing"):
        plan_from_json(obj)


@pytest.mark.parametrize("obj", [None, 3, "x", [], float("nan")])
def test_an_input_that_is_no_object(obj: object) -> None:
    with pytest.raises(PlanError, match="must be an object"):
        plan_from_json(obj)


def test_optional_fields_have_defaults() -> None:
    short = {name: GOOD[name] for name in ("workers", "available_bytes", "max_model_len", "max_num_batched_tokens")}
    assert plan_from_json(short)["num_blocks"] == 2048


def test_records_are_checked_like_files() -> None:
    wrong = LayerSpec(kind="full", layers=0, kv_heads=1, head_dim=1, block_size=16, dtype="bf16")
    with pytest.raises(PlanError) as caught:
        plan(KvPlanInput(ranks=((wrong,),), available_bytes=(-1,), max_model_len=1, max_num_batched_tokens=1))
    assert caught.value.code == "invalid_input"
    assert len(caught.value.problems) == 2


def run(tmp_path: Path, text: str | bytes) -> int:
    path = tmp_path / "plan.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return kv_plan_main(str(path))


def test_command_answers_one_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in (CASES[0], {"input": GOOD}, GOOD):
        assert run(tmp_path, json.dumps(form)) == 0
        out, err = capsys.readouterr()
        assert json.loads(out) == CASES[0]["expect"]
        assert err == ""


def test_command_answers_a_list_and_explains_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, json.dumps(CASES)) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == [case["expect"] for case in CASES]
    assert len(err.splitlines()) == sum(not case["expect"]["ok"] for case in CASES)
    assert "[1] seed-override-32-reject: max_model_len 16384 does not fit" in err


@pytest.mark.parametrize(
    "text",
    ["", "{", "nope", b"\xff\xfe\x00", "[" * 100_000, "1" * 5000, '{"workers": NaN}', "null", '[{"input": null}]'],
    ids=["empty", "cut", "word", "binary", "deep", "digits", "nan", "null", "null-input"],
)
def test_command_refuses_unreadable_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert run(tmp_path, text) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kv-plan: ")


def test_command_refuses_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kv_plan_main(str(tmp_path / "absent.json")) == 2
    assert "absent.json" in capsys.readouterr().err


def test_command_names_every_wrong_case_by_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {**GOOD, "max_model_len": -1}
    assert run(tmp_path, json.dumps([CASES[0], {"input": bad}, bad])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "[1].input.max_model_len: " in err
    assert "[2].max_model_len: " in err


def test_an_empty_list_is_an_empty_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "[]") == 0
    assert json.loads(capsys.readouterr().out) == []
