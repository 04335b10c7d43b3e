"""Pools of threads that run before they are needed."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from isthmus_runtime.threads import running_pool


def test_all_threads_run_from_the_start_and_none_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_pool(3, "helpers") as pool:
        assert sum(thread.name.startswith("helpers_") for thread in threading.enumerate()) == 3

        def never(self: threading.Thread) -> None:
            raise AssertionError(f"{self.name} is made while there is work")

        monkeypatch.setattr(threading.Thread, "start", never)
        meeting = threading.Barrier(3)
        busy: list[Future[Any]] = [pool.submit(meeting.wait, 10) for _ in range(3)]
        assert sorted(done.result(10) for done in busy) == [0, 1, 2]
