"""Shared by every test: the hypothesis profile, how threads wait, what the garbage collector passes over, sockets that
are left open, clusters (kube.py) and which worker has one, and skipping `gpu` tests without a GPU."""

import gc
import os
import threading
from collections.abc import Generator, Iterator
from typing import Any

# Before torch is loaded, for this process and all that tests start. OpenMP's threads spin for milliseconds at the end
# of each operation; where there are more of them than cores they take the cores from those they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import fastapi.dependencies.models
import pytest
from hypothesis import settings
from kube import cluster as cluster
from kube import control_plane as control_plane
from kube import images as images
from left_open import none_left_open

MOST_THREADS = 500
"""FastAPI remembers the last thousands of routes, and so the applications that they are of, each of which has dozens of
threads. A process has one; tests make hundreds."""

FIRST_CONTROL_PLANE = ("tests/operator/cluster/test_operator_blackbox.py", "tests/cluster/test_light_cluster.py")
SECOND_CONTROL_PLANE = ("tests/operator/cluster/",)

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
        # A look at the youngest objects after 700 of them takes one part in twenty of all the time.
        gc.set_threshold(10_000)
        gc.enable()


@pytest.fixture(autouse=True)
def nothing_is_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """The collector finds a socket that a test leaves in the time of another, which fails for it. Where tests share
    what runs beside them, that opens some, too."""
    if any(request.node.get_closest_marker(name) for name in ("slow", "e2e", "light_cluster", "cluster", "gpu")):
        yield
        return
    with none_left_open():
        yield
    _let_go_of_frames(request.node)
    _threads.end()


def _let_go_of_frames(item: pytest.Item) -> None:
    """An error that is a parameter of a test lives as long as its module, and with it the frames that raised it: of two
    dozen of them each kept an application with all its threads."""
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        if isinstance(value, BaseException):
            value.__traceback__ = value.__context__ = None


class _Threads:
    """Of the applications that tests have made."""

    def __init__(self) -> None:
        self._stayed = 0  # after the last look for garbage, or fewer since: another one would not end them, in 0.2 s

    def end(self) -> None:
        """Those of applications that are garbage, once there are many."""
        running = threading.active_count()
        self._stayed = min(self._stayed, running)
        if running - self._stayed <= MOST_THREADS:
            return
        for cached in vars(fastapi.dependencies.models).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
        gc.collect()
        self._stayed = threading.active_count()


_threads = _Threads()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """By `--dist loadfile` two workers have all tests of a control plane, which runs to the end: with its operator it
    takes a sixth of a core also where nobody asks it anything, and every worker would start its own. One worker alone
    would be at them longer than the others at all else."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class TwoControlPlanes(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(FIRST_CONTROL_PLANE):
                return "first control plane"
            return "second control plane" if nodeid.startswith(SECOND_CONTROL_PLANE) else super()._split_scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            """The heaviest of what is left, so that no long file is the last. A test that starts services takes about
            ten times as long as another."""

            def weight(scope: str) -> int:
                return len(self.workqueue[scope]) * (10 if "e2e/" in scope or "control plane" in scope else 1)

            self.workqueue.move_to_end(max(self.workqueue, key=weight), last=False)
            super()._assign_work_unit(node)

    return TwoControlPlanes(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in gpu_tests:
            item.add_marker(skip)
