"""Quantities, durations and counts as Kubernetes means them."""

from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_operator.api.fields import CountOrPercent, Duration, Quantity
from isthmus_operator.api.limits import too_large
from isthmus_operator.api.problems import show
from isthmus_operator.errors import BadFile
from isthmus_operator.files import load


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("500m", Decimal("0.5")), ("1k", 1000), ("1Ki", 1024), ("1.5Gi", 3 * 2**29), ("2e3", 2000), (7, 7)],
)
def test_quantity_value(text: object, value: object) -> None:
    assert Quantity.parse(text).value == value


@pytest.mark.parametrize("text", ["", "1 Gi", "1gi", "Gi", "-1", "1GiB", True, None, 1.5])
def test_not_a_quantity(text: object) -> None:
    with pytest.raises(ValueError, match="a quantity"):
        Quantity.parse(text)


@given(st.integers(min_value=0, max_value=2**50))
def test_canonical_quantity_is_the_same_for_the_same_number(number: int) -> None:
    assert Quantity.parse(f"{number}Ki").canonical == Quantity.parse(number * 1024).canonical


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1h30m", 5400), ("250ms", 0.25), ("1.5m", 90)])
def test_duration_seconds(text: str, seconds: float) -> None:
    assert Duration.parse(text).seconds == seconds


@pytest.mark.parametrize("text", ["", "0s", "30", "5 m", "1d", "-1s", 30, None])
def test_not_a_duration(text: object) -> None:
    with pytest.raises(ValueError, match="a duration"):
        Duration.parse(text)


@pytest.mark.parametrize(
    ("text", "total", "up", "down"), [("25%", 10, 3, 2), ("0%", 5, 0, 0), ("100%", 5, 5, 5), (2, 9, 2, 2)]
)
def test_count_or_percent(text: object, total: int, up: int, down: int) -> None:
    share = CountOrPercent.parse(text)
    assert (share.of(total, round_up=True), share.of(total, round_up=False)) == (up, down)


def test_a_value_that_refers_to_itself_many_times_over_is_shown_shortened() -> None:
    """Five hundred bytes of YAML took all memory before its text was cut."""
    value: list[object] = ["x"]
    for _ in range(60):
        value = [value, value]
    shown = show(value)
    assert len(shown) == 80 and shown.startswith("[" * 61) and shown.endswith("...")
    assert show({"a": [1, "ü"]}) == '{"a": [1, "ü"]}'
    value.append(value)
    assert show(value).endswith("...") and show({date(2026, 1, 1): 1, "a": 2}) == '{"a": 2}'


def test_a_key_that_is_no_text_is_named() -> None:
    (problem,) = too_large({"model": {date(2026, 1, 1): 1}})
    assert (problem.path, problem.fix) == ("spec.model", "quote it") and "2026-01-01" in problem.message


def test_a_file_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("[" * 20_000)
    with pytest.raises(BadFile, match=r"f\.yaml:1:101: .*nested too deeply, in more than 100 levels"):
        load(str(tmp_path / "f.yaml"))


@pytest.mark.parametrize("value", ["2026-13-45", "9" * 5000, "!!timestamp x"])
def test_a_value_that_yaml_takes_for_another_and_cannot_read_is_named(tmp_path: Path, value: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(f"model: {value}\n")
    with pytest.raises(BadFile, match=r"f\.yaml:1:8: .*") as caught:
        load(str(path))
    assert len(str(caught.value)) < 600
