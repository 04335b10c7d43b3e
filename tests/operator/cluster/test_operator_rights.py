"""The operator with no more than the documented rights, in one namespace, with a webhook that answers everything."""

import json
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_world import API, Operator, Service, has_failed, roles, until
from processes import free_port
from simulated_kubelet import Client, Kubelet
from testcluster.cluster import Cluster

from isthmus_operator.shell.rbac import LEASE_RULES, policy_rules

RBAC = "rbac.authorization.k8s.io/v1"


class Narrow(Operator):
    """An operator with its own account, rights and kubeconfig."""

    def __init__(self, cluster: Cluster, folder: Path, namespace: str, *flags: str) -> None:
        account, rules = "operator", policy_rules() + policy_rules(LEASE_RULES)
        subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
        cluster.apply(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}},
            {"apiVersion": RBAC, "kind": "Role", "metadata": {"name": account}, "rules": rules},
            {
                "apiVersion": RBAC,
                "kind": "RoleBinding",
                "metadata": {"name": account},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account},
                "subjects": [subject],
            },
            namespace=namespace,
        )
        token = cluster.kubectl("create", "token", account, "-n", namespace).strip()
        config = yaml.safe_load(cluster.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token}
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        super().__init__(cluster, folder / "operator.log", *flags)
        self._command = [part for part in self._command if not part.startswith("--kubeconfig")]
        self._command += [
            f"--kubeconfig={path}",
            "--namespace-mode=namespace",
            f"--namespace={namespace}",
            "--resync=5",
        ]


@pytest.fixture
def alone(plane: Cluster, directed: Kubelet, operator: Operator) -> Iterator[Service]:
    """A namespace that no operator looks after: that of the session is stopped meanwhile."""
    operator.stop()
    client = Client(plane)
    directed.close_other_nodes()
    namespace = f"n{time.monotonic_ns()}"
    client("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    try:
        yield Service(client=client, cluster=plane, namespace=namespace, kubelet=directed)
    finally:
        client("DELETE", f"/api/v1/namespaces/{namespace}")
        operator.start()


def test_a_role_is_enough_and_no_secret_is_read(alone: Service, plane: Cluster, tmp_path: Path) -> None:
    narrow = Narrow(plane, tmp_path, alone.namespace)
    narrow.start()
    try:
        alone.apply(roles=roles(1, 1), store={}, transfer={"mode": "Store"})
        alone.ready()
        changed = roles(1, 1)
        changed["decode"] = {"scaling": {"mode": "External"}}
        alone.apply(roles=changed, engine={"image": "engine:2"}, store=None, transfer=None)
        alone.ready()
        until(lambda: not alone.children("statefulsets", group="/apis/apps/v1"), 30)
    finally:
        narrow.stop()
        sys.stderr.write(narrow.log.read_text()[-3000:])
    log = narrow.log.read_text()
    assert "orbidden" not in log, log[-3000:]
    assert not has_failed(log), log[-3000:]
    holder = alone.client("GET", f"/apis/coordination.k8s.io/v1/namespaces/{alone.namespace}/leases/isthmus-operator")
    assert holder["spec"]["holderIdentity"] == ""


def test_a_right_that_is_missing_is_in_the_status_of_every_service(
    alone: Service, plane: Cluster, tmp_path: Path
) -> None:
    """Also of one that was ready, and of one that no operator has ever looked at."""
    narrow = Narrow(plane, tmp_path, alone.namespace)
    narrow.start()
    alone.apply()
    alone.ready()
    narrow.stop()
    role = f"/apis/{RBAC}/namespaces/{alone.namespace}/roles/operator"
    there = alone.client("GET", role)
    rules = [rule for rule in there["rules"] if rule["resources"] != ["pods"]]
    alone.client("PUT", role, there | {"rules": rules})
    second = Service(client=alone.client, cluster=plane, namespace=alone.namespace, name="second")
    second.apply()
    narrow.start()
    assert narrow.process is not None
    try:
        for one in (alone, second):
            assert "pods" in one.reason("Ready", "ReconcileFailed")["message"]
            assert one.condition("Ready")["status"] == "False"
        assert narrow.process.wait(timeout=60) == 1
    finally:
        alone.client.merge(role, {"rules": there["rules"]})
        narrow.stop()
        narrow.start()
    try:
        alone.ready()
        second.ready()
    finally:
        narrow.stop()


def certificate(folder: Path) -> bytes:
    """A self-signed one for 127.0.0.1, as tls.crt and tls.key."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=webhook", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    subprocess.run(command, check=True, capture_output=True)
    return (folder / "tls.crt").read_bytes()


@pytest.fixture
def webhook(alone: Service, plane: Cluster, tmp_path: Path) -> Iterator[Operator]:
    import base64

    bundle, port = certificate(tmp_path), free_port()
    operator = Narrow(
        plane, tmp_path, alone.namespace, f"--webhook-port={port}", f"--webhook-cert-dir={tmp_path}", "--lease-name="
    )
    operator.start()
    name = f"isthmus-{alone.namespace}"
    config = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [
            {
                "name": "inferenceservices.validation.serving.isthmus.dev",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "timeoutSeconds": 10,
                "clientConfig": {
                    "url": f"https://127.0.0.1:{port}/validate",
                    "caBundle": base64.b64encode(bundle).decode(),
                },
                "rules": [
                    {
                        "apiGroups": ["serving.isthmus.dev"],
                        "apiVersions": ["v1alpha1"],
                        "resources": ["inferenceservices"],
                        "operations": ["CREATE", "UPDATE"],
                        "scope": "Namespaced",
                    }
                ],
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": alone.namespace}},
                "matchConditions": [
                    {"name": "is-not-being-deleted", "expression": "!has(object.metadata.deletionTimestamp)"},
                    {
                        "name": "changes-the-spec",
                        "expression": "request.operation == 'CREATE' || object.spec != oldObject.spec",
                    },
                ],
            }
        ],
    }
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    alone.client("POST", path, config)
    try:
        yield operator
    finally:
        operator.stop()
        alone.client("DELETE", f"{path}/{name}")


def post(service: Service, spec: dict[str, Any], *, dry: bool = True) -> tuple[int, str]:
    body = {
        "apiVersion": "serving.isthmus.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "svc"},
        "spec": spec,
    }
    path = f"{API}/namespaces/{service.namespace}/inferenceservices" + ("?dryRun=All" if dry else "")
    try:
        service.client("POST", path, body)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["message"]
    return 201, ""


def test_the_webhook_says_everything_at_once_and_never_stands_in_the_way_of_deletion(
    alone: Service, webhook: Operator
) -> None:
    good = {"model": {"source": {"hostPath": {"path": "/m"}}}, "roles": {"prefill": {}, "decode": {}}}
    bad = good | {
        "rollout": {"drainTimeout": "5s"},
        "store": {"segmentSize": 1024},
        "engine": {"maxModelLen": 100, "kvCache": {"numBlocksOverride": 6}},
    }
    # A server that has not read the configuration yet asks nobody, and takes it.
    until(lambda: post(alone, bad)[0] == 422, 60, lambda: str(post(alone, bad)) + webhook.log.read_text()[-2000:])
    assert post(alone, good)[0] == 201
    _, message = post(alone, bad)
    for path in ("spec.rollout.drainTimeout", "spec.store.segmentSize", "spec.engine.kvCache.numBlocksOverride"):
        assert path in message
    alone.apply()
    alone.ready()
    webhook.stop()
    # With no operator to answer: a change is refused, what does not touch the spec and deletion are not.
    with pytest.raises(urllib.error.HTTPError):
        alone.client.merge(alone.path, {"spec": {"router": {"maxQueue": 5}}})
    alone.client.merge(alone.path, {"metadata": {"labels": {"a": "b"}}})
    alone.client("DELETE", alone.path)
    until(lambda: alone.client.find(alone.path) is None, 20)


def test_two_operators_one_works_and_the_other_takes_over(alone: Service, plane: Cluster, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = Narrow(plane, tmp_path / "a", alone.namespace), Narrow(plane, tmp_path / "b", alone.namespace)
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{alone.namespace}/leases/isthmus-operator"
    first._command = ["env", "POD_NAME=first", *first._command]
    second._command = ["env", "POD_NAME=second", *second._command]

    def holder() -> str:
        found = alone.client.find(lease)
        return str(found["spec"]["holderIdentity"]) if found else ""

    first.start()
    try:
        until(lambda: holder() == "first", 60, lambda: first.log.read_text())
        second.start()
        try:
            alone.apply()
            alone.ready()
            assert "holding lease" not in second.log.read_text()
            first.stop()
            until(lambda: holder() == "second", 30, lambda: second.log.read_text())
            alone.apply(engine={"image": "engine:2"})
            alone.ready()
        finally:
            second.stop()
    finally:
        first.stop()


def test_without_the_crds_it_says_what_to_apply(tmp_path: Path, plane: Cluster) -> None:
    import http.server
    import threading

    class Nothing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b'{"message": "the server could not find the requested resource"}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = yaml.safe_load(plane.kubeconfig.read_text())
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{server.server_address[1]}"}
        (tmp_path / "k").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "isthmus_operator", "operator", f"--kubeconfig={tmp_path / 'k'}"]
        done = subprocess.run(
            [*command, "--metrics-port=0", "--health-port=0"], capture_output=True, text=True, timeout=60, check=False
        )
        server.shutdown()
    assert done.returncode == 2
    assert "apply the files of crds/" in done.stderr
