"""One thread by default: threads that wait for each other crawl on a busy machine. Tests ask for more themselves."""

from collections.abc import Iterator

import pytest

from isthmus_kernels.testing import threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield
