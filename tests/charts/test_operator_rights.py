"""The chart's roles against the calls that a running operator makes, as the API server's audit log has them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chart import CHART, NAMESPACE, of_kind, only, render
from operator_world import has_failed
from processes import free_port
from rbac_audit import Right, calls, compare, rights
from testcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

GROUP = "serving.isthmus.dev"
ACCOUNT = "isthmus-operator"
USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
WAIT = "--timeout=110s"
STOP_S = 60.0
OPTIONAL = {
    "monitoring.coreos.com": ("PodMonitor", "podmonitors"),
    "gateway.networking.k8s.io": ("HTTPRoute", "httproutes"),
}
# Rights that this test does not bring about, each with its reason. A reason that is not needed fails the test.
NOT_SEEN_HERE = {
    Right(GROUP, "rolescalers", "patch"): "scaling mode Auto changes the number once engines report load",
}
SERVICE: dict[str, Any] = {
    "apiVersion": f"{GROUP}/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "llama"},
    "spec": {
        "model": {"source": {"hostPath": {"path": "/models/llama"}}},
        "engine": {"image": "none.invalid/engine:1"},
        "roles": {
            "prefill": {},
            "decode": {
                "scaling": {"mode": "Auto", "min": 1, "max": 2, "target": {"metric": "KVCacheUsage", "value": "0.8"}}
            },
        },
        "transfer": {"mode": "Store"},
        "store": {"segmentSize": "64Mi"},
        "router": {"image": "none.invalid/router:1", "expose": {"httpRoute": {"parentRefs": [{"name": "gateway"}]}}},
    },
}
FEWER: dict[str, Any] = {
    "engine": {"image": "none.invalid/engine:2"},
    "roles": {"decode": {"scaling": {"mode": "Static", "replicas": 1, "min": None, "max": None, "target": None}}},
    "transfer": {"mode": "Direct"},
    "store": None,
    "router": {"expose": {"httpRoute": None}},
    "observability": {"podMonitor": "Disabled"},
    "availability": {"pdb": "Disabled"},
    "networkPolicy": "Disabled",
}


def optional_crd(group: str, kind: str, plural: str) -> dict[str, Any]:
    """As much of an optional API as the operator needs to see that it is installed."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    approved = {"api-approved.kubernetes.io": "unapproved, a stand-in for tests"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": approved if group.endswith("k8s.io") else {}},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [version],
        },
    }


@contextmanager
def operator(cluster: Cluster, folder: Path, *flags: str) -> Iterator[None]:
    """A process with the account's own token."""
    token = cluster.kubectl("create", "token", ACCOUNT, "-n", NAMESPACE).strip()
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--flatten", "-o", "json"))
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(json.dumps(config))
    kubeconfig.chmod(0o600)
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": NAMESPACE, "POD_NAME": "operator"}
    program = [sys.executable, "-P", "-m", "isthmus_operator", "operator", "--resync=2", "--profile=permissive"]
    program += ["--metrics-host=127.0.0.1", f"--metrics-port={free_port()}", "--health-port=0", *flags]
    with (folder / "operator.log").open("w") as log:
        process = subprocess.Popen(program, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            sys.stderr.write((folder / "operator.log").read_text()[-4000:])
    text = (folder / "operator.log").read_text()
    assert process.returncode == 0 and not has_failed(text)


def name_of_router(cluster: Cluster, namespace: str) -> str:
    """Its Deployment, which is named by its revision."""
    return cluster.kubectl("get", "deployment", "-n", namespace, f"-l={GROUP}/role=router", "-o=name").strip()


def test_the_operator_has_the_rights_it_uses_and_no_other(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    manifests = [m for m in render() if m["metadata"].get("annotations", {}).get("helm.sh/hook") != "test"]
    cluster: Cluster = request.getfixturevalue("control_plane")
    assert cluster.folder is not None
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    crds = of_kind(manifests, "CustomResourceDefinition")
    cluster.apply(*crds, *(optional_crd(group, *names) for group, names in OPTIONAL.items()))
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", WAIT)
    accounts = of_kind(manifests, "ServiceAccount", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
    cluster.apply(*accounts, namespace=NAMESPACE)
    cluster.add_simulated_node("rights-node")
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "rights"}})

    def wait(what: str, *names: str) -> None:
        # One by one: --for=create ends at once when one of several is there.
        for name in names:
            cluster.kubectl("wait", "-n", "rights", f"--for={what}", name, WAIT)

    monitor, route = (f"{plural}.{group}/llama" for group, (_, plural) in OPTIONAL.items())
    with operator(cluster, tmp_path):
        cluster.apply(SERVICE, namespace="rights")
        wait("create", "statefulset/llama-store", monitor, route, f"rolescalers.{GROUP}/llama-decode")
        wait("jsonpath={.status.selector}", f"rolescalers.{GROUP}/llama-decode")
        wait("condition=Available", name_of_router(cluster, "rights"))
        patch = json.dumps({"spec": FEWER})
        cluster.kubectl(
            "patch", f"inferenceservices.{GROUP}", "llama", "-n", "rights", "--type=merge", f"--patch={patch}"
        )
        wait("delete", "statefulset/llama-store", "service/llama-store", monitor, route)
        wait("delete", f"rolescalers.{GROUP}/llama-decode", "pdb/llama-router", "networkpolicy/llama-router")
        # Old engines' Deployments go when the rollout is over.
        wait(
            "jsonpath={.status.conditions[?(@.type=='Progressing')].reason}=Complete",
            f"inferenceservices.{GROUP}/llama",
        )
    cluster.kubectl("delete", "namespace", "rights", "--wait=false")

    granted = [
        role
        for role in of_kind(manifests, "Role", "ClusterRole")
        if role["metadata"]["name"].endswith(("-operator", "-lease"))
    ]
    log = (cluster.folder / "audit.log").read_text().splitlines()
    assert str(compare(rights(granted), calls(log, USER), NOT_SEEN_HERE)) == "minimal"


def test_one_operator_serves_two_teams_with_a_role_in_each(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    manifests = [
        m
        for m in render(CHART / "ci" / "several-namespaces-values.yaml")
        if m["metadata"].get("annotations", {}).get("helm.sh/hook") != "test"
    ]
    cluster: Cluster = request.getfixturevalue("control_plane")
    teams = ["team-a", "team-b"]
    for name in (NAMESPACE, *teams, "nobodys"):
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    cluster.apply(*of_kind(render(), "CustomResourceDefinition"))
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", WAIT)
    # Roles of another test on this cluster would hide what is missing in these.
    for kind in ("clusterrolebinding", "clusterrole"):
        cluster.kubectl("delete", kind, f"isthmus-{NAMESPACE}-operator", "--ignore-not-found")
    for manifest in of_kind(manifests, "ServiceAccount", "Role", "RoleBinding"):
        cluster.apply(manifest, namespace=manifest["metadata"]["namespace"])
    args = only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    service = {**SERVICE, "spec": {**SERVICE["spec"], "router": {"image": "none.invalid/router:1"}}}
    with operator(cluster, tmp_path, *(arg for arg in args if arg.startswith("--namespace"))):
        for name in ("nobodys", *teams):
            cluster.apply(service, namespace=name)
        for team in teams:
            what = f"inferenceservices.{GROUP}/llama"
            cluster.kubectl("wait", "-n", team, "--for=condition=Progressing", what, WAIT)
            assert name_of_router(cluster, team)
        assert "status" not in cluster.get(f"inferenceservices.{GROUP}", "llama", "-n", "nobodys")
    assert "orbidden" not in (tmp_path / "operator.log").read_text()
    for name in ("nobodys", *teams):
        cluster.kubectl("delete", "namespace", name, "--wait=false")
