"""Says in capitals, in the summary, that the tests here were skipped.

They import kernels before those of tests/kernels do, so the interpreter has to be told here, too.
"""

import pytest
import torch
import triton_interpreter

if not torch.cuda.is_available():
    triton_interpreter.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped and not torch.cuda.is_available():
        terminalreporter.write_line(f"{len(skipped)} GPU TESTS DID NOT RUN: there is no CUDA device", red=True)
