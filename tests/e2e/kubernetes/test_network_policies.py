"""What a service's NetworkPolicies let through, on nodes whose network enforces them (ours: kube-router's firewall).

That the service's own traffic passes is shown by every other test here: they all run with the policies in force.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from installed import Deployed, Installation, make_namespace, remove_namespace
from operator_world import until
from pods_beside import client_image, create_script_pod

CONNECT = """
import concurrent.futures, socket, sys

def connect(target):
    host, port = target.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 3).close()
    except OSError:
        return ""
    return target

with concurrent.futures.ThreadPoolExecutor(64) as pool:
    print(*pool.map(connect, sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def store(installation: Installation) -> Iterator[Deployed]:
    """examples/store.yaml, which has every kind of pod, and a stranger in its namespace."""
    if not installation.cluster.nodes:
        pytest.skip("needs nodes of our own: whether another cluster's network enforces policies is its affair")
    make_namespace(installation.cluster, "policies", {})
    one = Deployed(installation.cluster, "policies")
    one.apply_example("store.yaml")
    image = client_image(installation.images)
    create_script_pod(installation.cluster, one.namespace, image, "client", "sleep", "infinity")
    one.ready()
    yield one
    remove_namespace(installation.cluster, "policies")


def reached(service: Deployed, targets: set[str]) -> set[str]:
    """Those of host:port that the stranger can connect to."""
    said = service.cluster.kubectl(
        "exec", "client", "-n", service.namespace, "--", "python", "-c", CONNECT, *sorted(targets)
    )
    return set(said.split())


def listening(service: Deployed) -> dict[str, set[str]]:
    """role -> host:port of every TCP port that its pods listen on for others."""
    found: dict[str, set[str]] = {}
    for pod in service.pods():
        name, role = pod["metadata"]["name"], pod["metadata"]["labels"]["serving.isthmus.dev/role"]
        table = service.cluster.kubectl("exec", name, "-n", service.namespace, "--", "cat", "/proc/net/tcp")
        for line in table.splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            # 0A: listening; loopback is nobody else's.
            if state == "0A" and address != "0100007F":
                found.setdefault(role, set()).add(f"{pod['status']['podIP']}:{int(port, 16)}")
    return found


def test_a_stranger_reaches_the_router_and_nothing_else(store: Deployed) -> None:
    ports = listening(store)
    assert set(ports) == {"prefill", "decode", "router", "store"}
    # HTTP, and at least one of the transfer engine.
    assert len(ports["prefill"]) >= 2 and len(ports["decode"]) >= 2, ports
    inside = ports["prefill"] | ports["decode"] | ports["store"]
    until(lambda: reached(store, inside) == set(), 60, lambda: reached(store, inside), every=0.5)
    service = f"{store.name}.{store.namespace}.svc:80"
    assert reached(store, {service, *ports["router"]}) >= {service}
    assert store.get()["status"]["transfer"]["effective"] == "TCP"

    store.apply(lambda spec: spec.update(networkPolicy="Disabled"))
    # Without the policies the same connections are made, so it was they that stopped them.
    until(lambda: reached(store, inside) == inside, 60, lambda: (inside, reached(store, inside)), every=0.5)
    store.apply(lambda spec: spec.update(networkPolicy="Auto"))
    until(lambda: reached(store, inside) == set(), 60, lambda: reached(store, inside), every=0.5)
