"""Says in capitals, in the summary, that the tests here were skipped.

They import kernels before those of tests/kernels do, so the interpreter has to be told here, too.
"""

import pytest
import torch
import triton_interpreter

from isthmus_kernels import cuda_library

if not torch.cuda.is_available():
    triton_interpreter.enable()


@pytest.fixture
def cuda_kernels() -> None:
    """For tests of the CUDA kernels: they are compiled, and for this card."""
    torch.manual_seed(7)
    assert cuda_library.library() is not None, "nvcc is among the development tools: install the kernels again"
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is made of instructions of compute capability 9.0")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped and not torch.cuda.is_available():
        terminalreporter.write_line(f"{len(skipped)} GPU TESTS DID NOT RUN: there is no CUDA device", red=True)
