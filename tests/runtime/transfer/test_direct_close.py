"""A transfer that is stuck inside Mooncake does not hold up the end of its process."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus_runtime.interfaces.transport import KvRegion
from isthmus_runtime.transfer.backend import Effective
from isthmus_runtime.transfer.direct import DirectTransfer
from isthmus_runtime.transfer.native_engine import NativeEngine


@pytest.mark.parametrize("stuck", ["", "thread", "helper"])
def test_close_has_a_deadline(caplog: pytest.LogCaptureFixture, stuck: str) -> None:
    transfer = DirectTransfer(host="127.0.0.1", epoch="e")
    freed: list[int] = []
    began, never = threading.Event(), threading.Event()

    def sticks() -> None:
        began.set()
        never.wait()

    parts: Any = transfer
    engine = SimpleNamespace(unregister_memory=freed.append)
    parts._native = NativeEngine(engine, "127.0.0.1:1", frozenset(), Effective("tcp", 0.0))
    parts._region = KvRegion(base=4096, num_blocks=2, block_bytes=64, block_stride=64, layout_digest="d")
    if stuck == "thread":
        parts._writes.start(engine)
        parts._writes.call(sticks)
    if stuck == "helper":
        parts._peers._threads.submit(sticks)
    # What has not begun is cancelled, and nothing is stuck: a busy machine showed that.
    assert not stuck or began.wait(20)
    closing = threading.Thread(target=transfer.close, args=(0.2 if stuck else 20.0,), daemon=True)
    closing.start()
    closing.join(20)
    ended = not closing.is_alive()
    never.set()
    assert ended, "close still waits"
    # What may still be read by a transfer is not taken from it.
    assert bool(freed) is not bool(stuck)
    told = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told) == bool(stuck)
