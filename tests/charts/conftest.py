"""A light test cluster of the chart's own: an operator that other tests run would look after its services too."""

from collections.abc import Iterator

import pytest
from kube import need
from testcluster import cli, settings
from testcluster import cluster as clusters
from testcluster.binaries import FAST
from testcluster.cluster import Cluster


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """A control plane without nodes; `add_simulated_node` adds some."""
    ours = settings.load()
    need(ours, FAST)
    cli.sweep(ours)
    running = clusters.start_control_plane(ours, cli.session_folder(ours, "charts"), follow=True)
    try:
        yield running
    finally:
        running.close()
