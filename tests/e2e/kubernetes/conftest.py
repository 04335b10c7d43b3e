"""The project as users install it: images on the nodes, the chart by helm, and a pod with the openai client.

On a user's own cluster (`make e2e KUBECONFIG=...`) the images must be there for it to pull, the model in MODEL on
every node, and E2E_CLIENT_IMAGE must name an image with Python and the openai package.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import MODEL, SYSTEM, Installation, remove_namespace
from processes import MODEL as MODEL_HERE
from testcluster.cluster import Cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def installation(cluster: Cluster, images: dict[str, str]) -> Iterator[Installation]:
    """The chart, installed in a namespace that enforces Pod Security "restricted"."""
    cluster.show_folder(MODEL_HERE, Path(MODEL))
    one = Installation(cluster, images)
    try:
        one.install()
        yield one
    finally:
        one.uninstall()
        remove_namespace(cluster, SYSTEM)
