"""A node goes away with what runs on it, and comes back: the rest serves, the lost pods are replaced, no other is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from installed import Deployed, Installation, Object, make_namespace, remove_namespace
from operator_world import until
from pods_beside import Client, client_image
from testcluster.cluster import Cluster

pytestmark = pytest.mark.long  # minutes pass until Kubernetes gives a silent node up

NAMESPACE = "node-lost"
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Count from one to ten.")
MAX_TOKENS = 16
# The node controller gives a silent node 50 s, and the pods' tolerations add to it.
NOTICED_S = 180.0
TOLERATED_S = 5


def on_node(name: str) -> Object:
    return {"placement": {"nodeSelector": {"kubernetes.io/hostname": name}}}


def soon_evicted() -> Object:
    """Leave a lost node sooner than after the five minutes that Kubernetes grants."""
    reasons = ("not-ready", "unreachable")
    return {
        "placement": {
            "tolerations": [
                {
                    "key": f"node.kubernetes.io/{reason}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": TOLERATED_S,
                }
                for reason in reasons
            ]
        }
    }


@pytest.fixture(scope="module")
def service(installation: Installation) -> Iterator[Deployed]:
    """examples/direct.yaml with two pods of each role, one on each node; the router and the operator on the node that
    stays."""
    cluster = installation.cluster
    if not cluster.nodes:
        pytest.skip("needs nodes of our own: it cuts one off")
    stays, _ = cluster.nodes
    chosen = f"operator.nodeSelector.kubernetes\\.io/hostname={stays}"
    installation.helm("upgrade", "--set", chosen)
    make_namespace(cluster, NAMESPACE, {})
    one = Deployed(cluster, NAMESPACE)

    def spread(spec: Object) -> None:
        for role in ("prefill", "decode"):
            spec["roles"][role] = {
                "scaling": {"replicas": 2},
                "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
                **soon_evicted(),
            }
        spec["engine"]["kvCache"]["memory"] = "128Mi"
        spec["rollout"] = {"drainTimeout": "30s"}
        spec["router"] |= on_node(stays)

    one.load_example("direct.yaml")
    one.apply(spread)
    one.ready()
    yield one
    remove_namespace(cluster, NAMESPACE)
    installation.helm("upgrade")


@contextmanager
def cut_off(cluster: Cluster, node: str) -> Iterator[None]:
    """Nothing leaves the node and nothing comes in; what runs on it goes on running."""
    rules = "add table inet cut; add chain inet cut {name} {{ type filter hook {name} priority -400; policy drop; }}"
    loop = "add rule inet cut {name} {side}ifname lo accept"
    script = "; ".join(
        [
            *(rules.format(name=name) for name in ("input", "output", "forward")),
            loop.format(name="input", side="i"),
            loop.format(name="output", side="o"),
        ]
    )
    cluster.run_on(node, ["nft", script])
    try:
        yield
    finally:
        cluster.run_on(node, ["nft", "delete table inet cut"])


def on(service: Deployed, node: str) -> list[Object]:
    return [pod for pod in service.pods() if pod["spec"].get("nodeName") == node]


def alive(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}


def test_a_lost_node_is_told_served_around_and_replaced(installation: Installation, service: Deployed) -> None:
    cluster = service.cluster
    stays, lost = cluster.nodes
    client = Client(cluster, NAMESPACE, client_image(installation.images), node=0)
    client.create()
    url = service.get()["status"]["url"]
    answers = client.ask(url, "smollm2", QUESTIONS, MAX_TOKENS)
    kept = alive(on(service, stays))
    gone = alive(on(service, lost))
    assert len(gone) == 2, "one engine of each role was to be there"
    with client.load(url, "smollm2", QUESTIONS, MAX_TOKENS, 2) as load:
        with cut_off(cluster, lost):
            # What ran there when it went ends with an error that says where; what comes after is served.
            load.more(4)
            served = len(load.results)
            load.more(4)
            late = [one for one in load.results[served + load.workers :] if "error" in one]
            assert not late, f"{late}\n{service.describe()}"

            def told() -> bool:
                said = service.conditions()
                roles = {said["PrefillReady"]["status"], said["DecodeReady"]["status"]}
                return roles == {"False"} and said["Available"]["status"] == "True"

            until(told, NOTICED_S, service.describe, every=0.5)
            # The replacements are ready while the lost ones, which no kubelet answers for, still exist.
            until(lambda: service.conditions()["Ready"]["status"] == "True", NOTICED_S, service.describe, every=0.5)
            assert alive(on(service, stays)) >= kept
            assert not alive(on(service, lost)) & gone
        load.more(4)
        cluster.kubectl("wait", "--for=condition=Ready", f"node/{lost}", "--timeout=120s", timeout=150)
        until(lambda: not on(service, lost), 120, service.describe, every=0.5)
        service.ready()
        load.more(4)
    assert alive(service.pods()) >= kept
    for one in load.results:
        if "error" in one:
            assert "stage" in one["error"] and "attempt" in one["error"], f"{one}\n{service.describe()}"
        else:
            assert one["answer"] == answers[one["question"]], one
