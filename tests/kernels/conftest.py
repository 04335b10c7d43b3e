"""One thread by default: threads that wait for each other crawl on a busy machine. Tests ask for more themselves.

Without a card, Triton's kernels are interpreted; this must be said before they are imported.
"""

from collections.abc import Iterator

import pytest
import torch
import triton_interpreter

from isthmus_kernels.testing import threads

if not torch.cuda.is_available():
    triton_interpreter.enable()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield
