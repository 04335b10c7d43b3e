"""The light form: real control plane, simulated nodes."""

import json

import pytest
from testcluster.cluster import Cluster
from testcluster.commands import CommandError

pytestmark = [pytest.mark.light_cluster, pytest.mark.timeout(600)]

NODE = "gpu-node"


def deployment(name: str, replicas: int, *, gpus: int = 0, image: str = "none.invalid/none:1") -> dict[str, object]:
    labels = {"app": name}
    container = {"name": "main", "image": image, "resources": {"limits": {"nvidia.com/gpu": gpus}} if gpus else {}}
    # Other tests have nodes of their own in this cluster.
    spec = {"containers": [container], "nodeSelector": {"kubernetes.io/hostname": NODE}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


@pytest.fixture(scope="module")
def simulated(control_plane: Cluster) -> Cluster:
    control_plane.add_simulated_node(NODE, gpus=4)
    control_plane.kubectl("uncordon", NODE)
    control_plane.kubectl("wait", "--for=condition=Ready", f"node/{NODE}", "--timeout=100s")
    return control_plane


def test_pods_run_on_simulated_nodes(simulated: Cluster) -> None:
    simulated.apply(deployment("web", 2))
    simulated.kubectl("wait", "--for=condition=Available", "deployment/web", "--timeout=100s")
    pods = simulated.get("pods", "-l", "app=web")["items"]
    assert [pod["spec"]["nodeName"] for pod in pods] == [NODE, NODE]


def test_pods_that_ask_for_more_gpus_than_there_are_stay_pending(simulated: Cluster) -> None:
    simulated.apply(deployment("greedy", 3, gpus=2))
    simulated.kubectl("wait", "--for=jsonpath={.status.readyReplicas}=2", "deployment/greedy", "--timeout=100s")
    simulated.kubectl("wait", "--for=jsonpath={.status.unavailableReplicas}=1", "deployment/greedy", "--timeout=100s")
    pods = simulated.get("pods", "-l", "app=greedy")["items"]
    (pending,) = [pod for pod in pods if pod["status"]["phase"] == "Pending"]
    condition = next(one for one in pending["status"]["conditions"] if one["type"] == "PodScheduled")
    assert "Insufficient nvidia.com/gpu" in condition["message"]
    simulated.kubectl("delete", "deployment/greedy", "--wait=false")


def test_garbage_collector_deletes_what_an_owner_leaves(simulated: Cluster) -> None:
    simulated.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}})
    owner = simulated.get("configmap", "owner")["metadata"]["uid"]
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner}
    child = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "child", "ownerReferences": [reference]}}
    simulated.apply(child)
    simulated.kubectl("delete", "configmap", "owner")
    simulated.kubectl("wait", "--for=delete", "configmap/child", "--timeout=100s")


def test_access_rules_are_enforced(simulated: Cluster) -> None:
    simulated.kubectl("create", "serviceaccount", "nobody")
    answer = "--as=system:serviceaccount:default:nobody"
    with pytest.raises(CommandError, match="no"):
        simulated.kubectl("auth", "can-i", "get", "secrets", answer)
    assert json.loads(simulated.kubectl("get", "--raw", "/version"))["major"] == "1"
