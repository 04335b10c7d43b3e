"""A light test cluster of the chart's own: an operator that other tests run would look after its services too."""

from collections.abc import Iterator

import pytest
from kube import light
from testcluster.cluster import Cluster


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """A control plane without nodes; `add_simulated_node` adds some."""
    with light("charts") as running:
        yield running
