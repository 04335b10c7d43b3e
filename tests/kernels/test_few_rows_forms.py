"""How products of few rows are cut for a device: by its multiprocessors, and never beyond its shared memory."""

import pytest

from isthmus_kernels.fp8_linear import triton_impl as fp8
from isthmus_kernels.linear import triton_impl as linear

H200, L4 = (132, 232_448), (58, 101_376)
WEIGHTS = [(1024, 1024), (4096, 4096), (6144, 4096), (24_576, 4096), (4096, 12_288), (25_600, 5120), (75_968, 5120)]


@pytest.mark.parametrize(("processors", "room"), [H200, L4, (20, 65_536)])
@pytest.mark.parametrize(("outputs", "columns"), WEIGHTS)
def test_loads_fit_into_shared_memory(outputs: int, columns: int, processors: int, room: int) -> None:
    _, stages = linear.few_rows_form(outputs, columns, processors, room)
    assert 1 < stages <= 5 and stages * (64 + 16) * 128 * 2 <= room
    piece, _, stages = fp8.few_rows_form(outputs, columns, processors, room)
    assert 1 < stages <= 6 and stages * (64 + 16) * piece <= room


def test_forms_on_an_h200() -> None:
    assert [linear.few_rows_form(*weight, *H200) for weight in WEIGHTS] == [
        (1, 5), (2, 5), (1, 5), (1, 3), (2, 5), (1, 5), (1, 5)
    ]  # fmt: skip
    assert [fp8.few_rows_form(*weight, *H200) for weight in WEIGHTS] == [
        (256, 2, 6), (256, 1, 6), (256, 1, 6), (256, 1, 3), (256, 1, 6), (128, 1, 6), (128, 1, 6)
    ]  # fmt: skip
