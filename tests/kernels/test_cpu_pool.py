"""The threads of the CPU library on processors that others use too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from isthmus_kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled library is not built")

# Results are checked all the while.
CROWDED = """
import os, sys, time
import torch
from isthmus_kernels import dispatch, native
from isthmus_kernels import dispatch_weights
os.sched_setaffinity(0, {int(p) for p in sys.argv[2:]})
torch.set_num_threads(int(sys.argv[1]))
weight = dispatch_weights.pack(torch.randn(3072, 576, generator=torch.Generator().manual_seed(1)))
x = torch.randn(40, 576, generator=torch.Generator().manual_seed(2))
want = dispatch.linear(x, weight)
end = time.monotonic() + 60
while native.threads_present() >= int(sys.argv[1]):
    assert time.monotonic() < end, "no thread gave way"
    assert torch.equal(dispatch.linear(x, weight), want)
for _ in range(200):
    assert torch.equal(dispatch.linear(x, weight), want)
"""
HOG = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("threads", [2, 5])
def test_a_thread_whose_processor_others_need_gives_way(threads: int) -> None:
    """Beside a process that never rests: a helper that it interrupts would hold up every loop."""
    processors = [str(p) for p in sorted(os.sched_getaffinity(0))[:2]]
    hog = subprocess.Popen([sys.executable, "-c", HOG, processors[-1]], stdout=subprocess.PIPE)
    try:
        assert hog.stdout is not None and hog.stdout.readline()
        subprocess.run([sys.executable, "-c", CROWDED, str(threads), *processors], check=True, timeout=100)
    finally:
        hog.kill()
        hog.communicate()
