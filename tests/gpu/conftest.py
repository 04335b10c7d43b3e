"""Says in capitals, in the summary, that the tests here were skipped."""

import pytest
import torch


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped and not torch.cuda.is_available():
        terminalreporter.write_line(f"{len(skipped)} GPU TESTS DID NOT RUN: there is no CUDA device", red=True)
