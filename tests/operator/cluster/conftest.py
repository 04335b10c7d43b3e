"""A real control plane, a kubelet that the test directs, and the operator as a process."""

import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
from operator_world import ROOT, Operator, Service, has_failed
from simulated_kubelet import Client, Kubelet, always_ready, kubelet
from testcluster.cluster import Cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.light_cluster)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def plane(control_plane: Cluster) -> Cluster:
    """The control plane with our CRDs, applied client-side as a user would."""
    for name in ("inferenceservice", "rolescaler"):
        control_plane.kubectl("apply", "-f", str(ROOT / "crds" / f"{name}.yaml"))
    control_plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    return control_plane


@pytest.fixture(scope="session")
def directed(plane: Cluster) -> Iterator[Kubelet]:
    with kubelet(plane, gpus=4) as one:
        yield one


@pytest.fixture(scope="session")
def operator(plane: Cluster, directed: Kubelet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """The one operator of the session; a test that stops it starts it again."""
    one = Operator(plane, tmp_path_factory.mktemp("operator") / "operator.log", "--resync=5")
    one.start()
    try:
        yield one
    finally:
        one.stop()
        text = one.log.read_text()
        sys.stderr.write(text[-4000:])
        assert not has_failed(text)


@pytest.fixture
def service(plane: Cluster, directed: Kubelet, operator: Operator, request: pytest.FixtureRequest) -> Iterator[Service]:
    """A namespace of its own; every pod is ready at once unless the test directs otherwise."""
    client = Client(plane)
    directed.close_other_nodes()
    namespace = f"t{time.monotonic_ns()}"
    client("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    directed.behave = always_ready
    try:
        yield Service(client=client, cluster=plane, namespace=namespace, kubelet=directed)
    finally:
        directed.behave = always_ready
        try:
            client("DELETE", f"/api/v1/namespaces/{namespace}")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
