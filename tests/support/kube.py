"""Clusters as pytest fixtures, session-scoped, each started when the first test asks for it.

    control_plane  API server, controller manager, scheduler and simulated nodes on loopback; any user, seconds
    cluster        two nodes that run containers (root), or the cluster of E2E_KUBECONFIG, or the one of
                   `make cluster-up` if it is up

Both skip, saying so, where the programs are not built; with ISTHMUS_REQUIRE_CLUSTER=1 they fail instead.
"""

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from testcluster import cli, image_build, settings
from testcluster import cluster as clusters
from testcluster.binaries import FAST, FULL, MissingBinariesError, find
from testcluster.cluster import Cluster
from testcluster.launch import StartError
from testcluster.settings import Settings

GPUS = 4


class ClusterTestsSkippedWarning(UserWarning):
    """Tests against Kubernetes did not run."""


@contextmanager
def light(name: str) -> Iterator[Cluster]:
    """A control plane without nodes, in a folder of that name."""
    ours = settings.load()
    need(ours, FAST)
    cli.sweep(ours)
    running = clusters.start_control_plane(ours, cli.session_folder(ours, name), follow=True)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """A control plane without nodes; `add_simulated_node` adds some."""
    with light("light") as running:
        yield running


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster whose nodes run containers, with GPUS extended resources `nvidia.com/gpu` on each node of ours."""
    ours = settings.load()
    if ours.kubeconfig is not None:
        yield clusters.external(ours, ours.kubeconfig)
        return
    need(ours, FULL)
    attached = clusters.attach(ours, cli.default_folder(ours))
    if attached is not None and attached.nodes:  # the light form runs no containers
        yield attached
        return
    cli.sweep(ours)
    try:
        clusters.require_host()
    except StartError as error:
        missing(ours, str(error))
    running = clusters.start_cluster(ours, cli.session_folder(ours, "full"), follow=True, gpus=GPUS)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> dict[str, str]:
    """The project's images, loaded into every node of ours: `operator`, `router`, `engine` -> reference.

    A user's own cluster must already be able to pull them.
    """
    ours = settings.load()
    version = image_build.version()
    names = {"operator": "isthmus-operator", "router": "isthmus-router", "engine": "isthmus-engine-for-tests"}
    if not cluster.nodes:
        names["engine"] = "isthmus-engine"
        return {role: f"{name}:{version}" for role, name in names.items()}
    absent = [name for name in names.values() if not image_build.archive(ours, name).is_file()]
    if absent:
        missing(ours, f"no image {', '.join(absent)}; run 'make images-for-tests'")
    for name in names.values():
        cluster.import_image(image_build.archive(ours, name))
    return {role: f"{name}:{version}" for role, name in names.items()}


def need(ours: Settings, programs: tuple[str, ...]) -> None:
    """Skip or fail the test unless `programs` are built."""
    try:
        find(ours, programs)
    except MissingBinariesError as error:
        missing(ours, str(error))
    if shutil.which("openssl") is None:
        missing(ours, "no openssl on PATH, which makes its certificates")


def missing(ours: Settings, what: str) -> None:
    if ours.required:
        pytest.fail(f"ISTHMUS_REQUIRE_CLUSTER is set, but {what}")
    with warnings.catch_warnings():
        # Shown in the run's summary; it must not turn the skip into a failure.
        warnings.simplefilter("always")
        warnings.warn(f"KUBERNETES TESTS DID NOT RUN: {what}", ClusterTestsSkippedWarning, stacklevel=2)
    pytest.skip(f"KUBERNETES TESTS DID NOT RUN: {what}")
