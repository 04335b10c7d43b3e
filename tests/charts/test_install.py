"""The chart on a real API server: installation, upgrade, what the webhook spares, rights, uninstallation.

Nodes are simulated, so the operator's pods count as ready and answer nothing: exactly what an operator that is down
looks like to the API server.
"""

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from chart import CHART, NAMESPACE, RELEASE, helm
from operator_world import until
from testcluster.cluster import Cluster
from testcluster.commands import CommandError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CRD = "inferenceservices.serving.isthmus.dev"
SERVICE: dict[str, Any] = {
    "apiVersion": "serving.isthmus.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "llama"},
    "spec": {
        "model": {"source": {"hostPath": {"path": "/models/llama"}}},
        "roles": {"prefill": {}, "decode": {}},
    },
}
WITHOUT_WEBHOOK = ("--set", "webhook.enabled=false")
WITH_WEBHOOK = ("--set", "webhook.enabled=true", "--set", "webhook.timeoutSeconds=1")


def make_namespace(cluster: Cluster, name: str) -> None:
    """A namespace that takes only pods of Pod Security "restricted"."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})


def helm_do(cluster: Cluster, action: str, *options: str, namespace: str = NAMESPACE) -> str:
    chart = () if action == "uninstall" else (str(CHART),)
    return cluster.helm(
        action, RELEASE, *chart, "--namespace", namespace, "--wait", "--timeout", "120s", *options, timeout=180
    )


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    program = helm()
    control_plane: Cluster = request.getfixturevalue("control_plane")
    control_plane.helm_path = program
    control_plane.add_simulated_node("chart-node")
    control_plane.kubectl("wait", "--for=condition=Ready", "node/chart-node", "--timeout=60s")
    make_namespace(control_plane, NAMESPACE)
    return control_plane


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Cluster]:
    """The chart with its defaults but for the webhook, which each test turns on when it wants it."""
    # Other tests on this cluster may have applied the CRDs already.
    helm_do(cluster, "install", *WITHOUT_WEBHOOK, "--take-ownership")
    yield cluster
    helm_do(cluster, "uninstall", "--ignore-not-found")


def secret_data(cluster: Cluster) -> Any:
    return cluster.get("secret", "isthmus-webhook-generated", "-n", NAMESPACE)["data"]


def test_restricted_namespace_takes_the_operator(release: Cluster) -> None:
    status = release.get("deployment", "isthmus-operator", "-n", NAMESPACE)["status"]
    assert status["readyReplicas"] == 1
    conditions = {c["type"]: c["status"] for c in release.get("crd", CRD)["status"]["conditions"]}
    assert conditions["Established"] == "True"


@pytest.mark.parametrize(
    ("allowed", "verb", "resource", "namespace"),
    [
        (True, "list", CRD, "default"),
        (True, "create", "deployments.apps", "default"),
        (True, "create", "leases.coordination.k8s.io", NAMESPACE),
        (True, "update", "leases.coordination.k8s.io/isthmus-operator", NAMESPACE),
        (False, "update", "leases.coordination.k8s.io/other", NAMESPACE),
        (False, "create", "leases.coordination.k8s.io", "default"),
        (False, "get", "secrets", NAMESPACE),
        (False, "list", "secrets", "default"),
        (False, "update", CRD, "default"),
        (False, "create", "rolebindings.rbac.authorization.k8s.io", "default"),
        (False, "create", "pods", "default"),
        (False, "create", "pods/exec", "default"),
    ],
)
def test_rights_of_the_operator(release: Cluster, allowed: bool, verb: str, resource: str, namespace: str) -> None:
    account = f"--as=system:serviceaccount:{NAMESPACE}:isthmus-operator"
    question = ("auth", "can-i", verb, resource, "-n", namespace, account)
    if allowed:
        assert release.kubectl(*question).strip() == "yes"
    else:
        with pytest.raises(CommandError, match="no"):
            release.kubectl(*question)


def test_users_roles_reach_inference_services(release: Cluster) -> None:
    def may(role: str, verb: str, *what: str) -> bool:
        question = ("auth", "can-i", verb, *(what or (CRD,)), "-n", "default", f"--as=test-{role}")
        try:
            return release.kubectl(*question).strip() == "yes"
        except CommandError as error:
            assert str(error).endswith("no"), error
            return False

    for role, verb in (("view", "list"), ("edit", "create")):
        release.kubectl("create", "rolebinding", f"test-{role}", f"--clusterrole={role}", f"--user=test-{role}")
        # The controller manager aggregates roles on its own time.
        until(lambda role=role, verb=verb: may(role, verb), 60)
    assert may("edit", "list")
    assert not may("view", "create")
    scale = ("rolescalers.serving.isthmus.dev", "--subresource=scale")
    assert may("edit", "get", *scale) and may("edit", "patch", *scale) and may("view", "get", *scale)
    assert not may("view", "patch", *scale)


def test_an_operator_that_is_down_holds_up_new_specs_only(release: Cluster) -> None:
    release.apply(SERVICE)
    helm_do(release, "upgrade", *WITH_WEBHOOK)
    release.kubectl("label", CRD, "llama", "team=a")
    release.kubectl("annotate", CRD, "llama", "note=b")
    release.kubectl("patch", CRD, "llama", "--subresource=status", "--type=merge", '--patch={"status":{"url":"u"}}')
    with pytest.raises(CommandError, match="failed calling webhook"):
        release.kubectl("patch", CRD, "llama", "--type=merge", '--patch={"spec":{"router":{"replicas":3}}}')
    with pytest.raises(CommandError, match="failed calling webhook"):
        release.apply({**SERVICE, "metadata": {"name": "second"}})
    # A finalizer keeps it there with deletionTimestamp set; taking the finalizer off must pass as well.
    release.kubectl("patch", CRD, "llama", "--type=merge", '--patch={"metadata":{"finalizers":["example.com/x"]}}')
    release.kubectl("delete", CRD, "llama", "--wait=false")
    release.kubectl("patch", CRD, "llama", "--type=merge", '--patch={"metadata":{"finalizers":null}}')
    release.kubectl("wait", "--for=delete", f"{CRD}/llama", "--timeout=60s")


def test_an_upgrade_keeps_the_certificate_until_it_is_due(release: Cluster) -> None:
    helm_do(release, "upgrade", *WITH_WEBHOOK)
    first = secret_data(release)
    helm_do(release, "upgrade", *WITH_WEBHOOK)
    assert secret_data(release) == first
    due = "serving.isthmus.dev/renew-after=1"
    release.kubectl("annotate", "secret", "isthmus-webhook-generated", "-n", NAMESPACE, "--overwrite", due)
    helm_do(release, "upgrade", *WITH_WEBHOOK, "--force-conflicts")
    renewed = secret_data(release)
    assert renewed != first
    (configuration,) = [
        item
        for item in release.get("validatingwebhookconfigurations")["items"]
        if item["metadata"]["name"].startswith("isthmus-")
    ]
    # Both, until the operator has read the new certificate.
    trusted = base64.b64decode(configuration["webhooks"][0]["clientConfig"]["caBundle"])
    assert base64.b64decode(first["ca.crt"]) in trusted and base64.b64decode(renewed["ca.crt"]) in trusted


def test_uninstalling_leaves_the_crd_and_the_services(release: Cluster) -> None:
    held = '--patch={"spec":{"holderIdentity":"a pod","leaseDurationSeconds":15}}'
    release.kubectl("patch", "lease", "isthmus-operator", "-n", NAMESPACE, "--type=merge", held)
    helm_do(release, "upgrade", *WITHOUT_WEBHOOK)
    lease = release.get("lease", "isthmus-operator", "-n", NAMESPACE)
    assert lease["spec"]["holderIdentity"] == "a pod", "an upgrade takes it from nobody"
    release.apply(SERVICE)
    helm_do(release, "uninstall")
    assert release.get(CRD, "llama")["metadata"]["name"] == "llama"
    for kind in ("deployments", "serviceaccounts", "networkpolicies", "roles", "rolebindings", "leases"):
        left = [item["metadata"]["name"] for item in release.get(kind, "-n", NAMESPACE)["items"]]
        assert [name for name in left if name.startswith("isthmus")] == []
    helm_do(release, "install", *WITHOUT_WEBHOOK)
    assert release.get(CRD, "llama")["spec"]["roles"].keys() == {"prefill", "decode"}
    release.kubectl("delete", CRD, "llama")


def test_one_namespace_needs_no_right_outside_it(release: Cluster) -> None:
    make_namespace(release, "team-a")
    release.kubectl(
        "create", "rolebinding", "installer", "--clusterrole=cluster-admin", "--user=installer", "-n", "team-a"
    )
    values = str(CHART / "ci" / "namespaced-values.yaml")
    helm_do(release, "install", "--values", values, "--kube-as-user", "installer", namespace="team-a")
    account = "--as=system:serviceaccount:team-a:isthmus-operator"
    assert release.kubectl("auth", "can-i", "list", CRD, "-n", "team-a", account).strip() == "yes"
    with pytest.raises(CommandError, match="no"):
        release.kubectl("auth", "can-i", "list", CRD, "-n", "default", account)
    helm_do(release, "uninstall", "--kube-as-user", "installer", namespace="team-a")


def test_two_teams_share_an_operator_that_has_rights_to_nothing_else(release: Cluster) -> None:
    for team in ("team-a", "team-b"):
        make_namespace(release, team)
    helm_do(release, "uninstall", "--ignore-not-found")
    # The CRDs stayed.
    values = str(CHART / "ci" / "several-namespaces-values.yaml")
    helm_do(release, "install", "--values", values, "--set", "webhook.failurePolicy=Ignore")
    account = f"--as=system:serviceaccount:{NAMESPACE}:isthmus-operator"
    for team in ("team-a", "team-b"):
        assert release.kubectl("auth", "can-i", "create", "deployments.apps", "-n", team, account).strip() == "yes"
    for elsewhere in ("default", NAMESPACE):
        with pytest.raises(CommandError, match="no"):
            release.kubectl("auth", "can-i", "list", CRD, "-n", elsewhere, account)
    helm_do(release, "upgrade", "--values", values, "--set-json", 'watch.namespaces=["team-b"]')
    with pytest.raises(CommandError, match="no"):
        release.kubectl("auth", "can-i", "list", CRD, "-n", "team-a", account)
