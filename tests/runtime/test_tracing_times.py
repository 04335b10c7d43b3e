"""Times of spans: two clocks are compared, and the thread may be held up between them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from isthmus_runtime.tracing import otlp

STARTED_NS = 1_700_000_000_000_000_000
READING_NS = 100


@pytest.mark.parametrize("held_up", range(9))
def test_a_pause_between_two_clocks_moves_no_span(held_up: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A span that was made of one such time ended before it began, on a machine with more threads than processors."""
    now, readings = 5_000_000_000, 0

    def read() -> int:
        nonlocal now, readings
        now += 20_000_000 if readings == held_up else READING_NS
        readings += 1
        return now

    clocks = SimpleNamespace(
        monotonic_ns=read, monotonic=lambda: read() / 1e9, time_ns=lambda: STARTED_NS + read(), time=None
    )
    monkeypatch.setattr(otlp, "time", clocks)
    found = otlp._wall(4.0)
    assert found is not None and abs(found - (STARTED_NS + 4_000_000_000)) <= READING_NS
