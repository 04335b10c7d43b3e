"""The full form: containers on two nodes, joined by Services, names and the pod network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from operator_world import until
from testcluster.cluster import Cluster
from testcluster.images import BUSYBOX_IMAGE, write_busybox_image

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

IMAGE = BUSYBOX_IMAGE


def pod(name: str, node: str, script: str, **extra: object) -> dict[str, Any]:
    container = {"name": "main", "image": IMAGE, "command": ["sh", "-c", script], **extra}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
        },
    }


def finished(cluster: Cluster, name: str, namespace: str = "default") -> str:
    """Wait until the pod has ended, see that it succeeded, and return its log."""
    ended = "--for=jsonpath={.status.containerStatuses[0].state.terminated.exitCode}"
    cluster.kubectl("wait", ended, f"pod/{name}", "-n", namespace, "--timeout=90s")
    log = cluster.kubectl("logs", name, "-n", namespace)
    state = cluster.get("pod", name, "-n", namespace)["status"]["containerStatuses"][0]["state"]
    assert state["terminated"]["exitCode"] == 0, log
    return log


@pytest.fixture(scope="module")
def busy(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The cluster with a small image in it."""
    if not cluster.nodes:
        pytest.skip("a user's own cluster: these tests are about ours")
    archive: Path = tmp_path_factory.mktemp("image") / "busybox.tar"
    cluster.import_image(write_busybox_image(archive, IMAGE, command=["/bin/sh"], user="65534"))
    return cluster


@pytest.fixture(scope="module")
def web(busy: Cluster) -> Iterator[Cluster]:
    """A Deployment on node 1 that answers with its host's name, and its Service."""
    labels = {"app": "web"}
    script = "mkdir /tmp/www && hostname > /tmp/www/index.html && exec httpd -f -p 8080 -h /tmp/www"
    container = {
        "name": "main",
        "image": IMAGE,
        "command": ["sh", "-c", script],
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "50m", "memory": "16Mi"}, "limits": {"cpu": "200m", "memory": "32Mi"}},
    }
    template = {
        "nodeSelector": {"kubernetes.io/hostname": "node1"},
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
    }
    busy.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "web"},
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": template},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web"},
            "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": "http"}]},
        },
    )
    busy.kubectl("wait", "--for=condition=Available", "deployment/web", "--timeout=120s")
    yield busy
    busy.kubectl("delete", "deployment/web", "service/web", "--ignore-not-found")
    busy.kubectl("wait", "--for=delete", "pod", "-l", "app=web", "--timeout=60s")


def test_both_nodes_are_ready_with_gpus(busy: Cluster) -> None:
    nodes = {node["metadata"]["name"]: node["status"] for node in busy.get("nodes")["items"]}
    assert sorted(nodes) == ["node1", "node2"]
    assert {status["allocatable"]["nvidia.com/gpu"] for status in nodes.values()} == {"4"}


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_service_answers_by_name_from_a_pod(web: Cluster, node: str) -> None:
    name = f"client-{node}"
    connect = "exec 3<>/dev/tcp/web.default.svc.cluster.local/80"
    script = f"bash -c '{connect}; echo GET / HTTP/1.0 >&3; echo >&3; cat <&3'"
    web.apply(pod(name, node, script))
    assert finished(web, name).splitlines()[-1].startswith("web-")
    web.kubectl("delete", f"pod/{name}")


def test_service_is_reached_from_outside(web: Cluster) -> None:
    address = web.get("service", "web")["spec"]["clusterIP"]
    with web.forward(address, 80) as port, urlopen(f"http://127.0.0.1:{port}/", timeout=20) as answer:
        assert answer.read().startswith(b"web-")


def test_headless_service_names_every_pod(web: Cluster) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "peers"},
        "spec": {"clusterIP": "None", "selector": {"app": "web"}, "ports": [{"port": 8080}]},
    }
    web.apply(service)
    web.kubectl("wait", "--for=create", "endpointslice", "-l", "kubernetes.io/service-name=peers", "--timeout=60s")
    ready = "--for=jsonpath={.endpoints[1].conditions.ready}=true"
    web.kubectl("wait", ready, "endpointslice", "-l", "kubernetes.io/service-name=peers", "--timeout=60s")
    web.apply(pod("resolver", "node2", "nslookup peers.default.svc.cluster.local"))
    said = finished(web, "resolver")
    addresses = {one["status"]["podIP"] for one in web.get("pods", "-l", "app=web")["items"]}
    assert len(addresses) == 2
    assert all(address in said for address in addresses)
    web.kubectl("delete", "pod/resolver", "service/peers")


def test_pod_uses_its_token_against_the_api_server(busy: Cluster) -> None:
    folder = "/var/run/secrets/kubernetes.io/serviceaccount"
    script = f"cat {folder}/namespace; echo; cat {folder}/token; echo; ls {folder}"
    busy.apply(pod("token", "node2", script))
    namespace, token, *files = finished(busy, "token").split()
    assert namespace == "default"
    assert files == ["ca.crt", "namespace", "token"]
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
    status = busy.kubectl("create", "-f", "-", "-o", "jsonpath={.status.user.username}", manifest=review)
    assert status == "system:serviceaccount:default:default"
    busy.kubectl("delete", "pod/token")


def test_pod_with_a_gpu_runs(busy: Cluster) -> None:
    busy.apply(pod("gpu", "node1", "id -u", resources={"limits": {"nvidia.com/gpu": 1}}))
    assert finished(busy, "gpu").strip() == "65534"
    busy.kubectl("delete", "pod/gpu")


def test_command_runs_in_a_container(web: Cluster) -> None:
    (first, _) = web.get("pods", "-l", "app=web")["items"]
    name = first["metadata"]["name"]
    assert web.kubectl("exec", name, "--", "hostname").strip() == name


def test_deleted_deployment_takes_its_containers_along(busy: Cluster) -> None:
    busy.apply(pod("short", "node1", "sleep 1000"))
    busy.kubectl("wait", "--for=condition=Ready", "pod/short", "--timeout=90s")
    tasks = [busy.ctr_path, "--namespace=k8s.io", "tasks", "list", "--quiet"]
    before = busy.run_on("node1", tasks).split()
    busy.kubectl("delete", "pod/short", "--timeout=60s")
    # The pod's container and its sandbox.
    until(lambda: len(set(before) - set(busy.run_on("node1", tasks).split())) == 2, 60)


PROBES = {
    "operator": "import kopf, kubernetes.aio, isthmus_operator",
    "router": "import importlib.util as u, isthmus_runtime; assert u.find_spec('torch') is None",
    "engine": "import torch, mooncake.engine, isthmus_kernels, isthmus_runtime",
}


@pytest.mark.parametrize("role", sorted(PROBES))
def test_image_runs_under_the_restricted_level(busy: Cluster, images: dict[str, str], role: str) -> None:
    """As a user who is not root, on a read-only file system, in a namespace that enforces it, on the other node."""
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    busy.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "restricted", "labels": level}})
    busy.kubectl("wait", "--for=create", "serviceaccount/default", "-n", "restricted", "--timeout=60s")
    script = f"import json; {PROBES[role]}; print(len(json.load(open('/sbom.json'))['components']))"
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    probe = pod(f"image-{role}", "node2", "", image=images[role], command=["python", "-c", script])
    probe["spec"]["containers"][0]["securityContext"] = security
    busy.apply(probe, namespace="restricted")
    log = finished(busy, f"image-{role}", "restricted")
    assert int(log.splitlines()[-1]) > 100
    busy.kubectl("delete", f"pod/image-{role}", "-n", "restricted")
