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


# What the helper may run on is told after loops that it was woken for.
APART = """
import os, sys, time
import torch
from isthmus_kernels import dispatch, dispatch_weights
usable = {int(p) for p in sys.argv[1:]}
child = os.fork() if len(usable) > 1 else -1
if child == 0:  # the same on one of them, without importing it all again
    usable = {min(usable)}
os.sched_setaffinity(0, usable)
torch.set_num_threads(2)
weight, x = torch.randn(3072, 576), torch.randn(1, 576)
before = set(os.listdir("/proc/self/task"))
weight = dispatch_weights.pack(weight)
end = time.monotonic() + 60
while True:
    dispatch.linear(x, weight)
    (helper,) = set(os.listdir("/proc/self/task")) - before
    found = os.sched_getaffinity(int(helper))
    if found < usable or len(usable) == 1:
        break
    assert time.monotonic() < end, found
    time.sleep(0.01)
assert len(found) == max(1, len(usable) - 1), found
assert os.sched_getaffinity(0) == usable
assert child < 1 or os.waitpid(child, 0)[1] == 0, "on one processor"
"""


def test_a_helper_runs_beside_its_caller_not_in_turns_with_it() -> None:
    """Linux may place a thread that is woken on its waker's processor while another one is idle."""
    processors = [str(p) for p in sorted(os.sched_getaffinity(0))[:2]]
    subprocess.run([sys.executable, "-c", APART, *processors], check=True, timeout=100)
