"""The network of a full cluster: a switch in the control plane's namespace, one cable to each node.

    control plane 10.0.0.1 --- br0 --+-- eth0 10.0.0.11 node1, pods 10.244.1.0/24
                                     +-- eth0 10.0.0.12 node2, pods 10.244.2.0/24

Nothing of it is in the caller's network namespace, so clusters share no address and no port.
"""

from collections.abc import Sequence

from testcluster.commands import run
from testcluster.node import Node

CONTROL_PLANE = "10.0.0.1"


def enter(pid: int) -> list[str]:
    """The command prefix that runs a program in the network namespace of `pid`.

    `ip netns exec` would remount /sys as well, and hide the cgroups.
    """
    return ["nsenter", f"--net=/proc/{pid}/ns/net", "--"]


def connect(control_plane: int, nodes: Sequence[tuple[Node, int]]) -> None:
    """Lay cables and routes between the network namespaces of these processes."""
    hub = [f"link add br0 type bridge\nlink set br0 up\naddr add {CONTROL_PLANE}/24 dev br0"]
    for node, pid in nodes:
        hub.append(f"link add {node.name} master br0 type veth peer name eth0 netns {pid}\nlink set {node.name} up")
        hub.append(f"route add {node.pod_cidr} via {node.address}")
    batch(control_plane, hub)
    for node, pid in nodes:
        spoke = [f"addr add {node.address}/24 dev eth0\nlink set eth0 up\nroute add default via {CONTROL_PLANE}"]
        spoke += [f"route add {other.pod_cidr} via {other.address}" for other, _ in nodes if other is not node]
        batch(pid, spoke)


def batch(pid: int, lines: Sequence[str]) -> None:
    """Run `ip` commands in the network namespace of `pid`; raises CommandError."""
    run([*enter(pid), "ip", "-batch", "-"], label="the cluster's network", text="\n".join(lines) + "\n")
