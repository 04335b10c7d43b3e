"""Shared by every test: the hypothesis profile, how threads wait, what the garbage collector passes over, clusters
(kube.py), and skipping `gpu` tests without a GPU."""

import gc
import os
from collections.abc import Generator

# Before torch is loaded, for this process and all that tests start. OpenMP's threads spin for milliseconds at the end
# of each operation; where there are more of them than cores they take the cores from those they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import settings
from kube import cluster as cluster
from kube import control_plane as control_plane
from kube import images as images

# No per-example deadline: a busy machine is not a failing test. The blob reproduces a failure.
settings.register_profile("isthmus", deadline=None, print_blob=True)
settings.load_profile("isthmus")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays to the end: garbage is looked for in what tests make."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in gpu_tests:
            item.add_marker(skip)
