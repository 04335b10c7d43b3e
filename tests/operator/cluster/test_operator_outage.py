"""An API server that is away for a while: the operator stays, changes nothing, and goes on when it is back."""

import json
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from cut_proxy import CutProxy
from operator_world import Operator, Service, has_failed, roles, until
from processes import free_port
from testcluster.cluster import Cluster

OUTAGE_S = 20.0


@pytest.fixture
def proxy(plane: Cluster) -> Iterator[CutProxy]:
    host, _, port = plane.server.removeprefix("https://").rpartition(":")
    one = CutProxy((host, int(port)))
    with one.running():
        yield one


@pytest.fixture
def cut_off(
    plane: Cluster, proxy: CutProxy, operator: Operator, service: Service, tmp_path: Path
) -> Iterator[Operator]:
    """An operator that reaches the API server through `proxy`; that of the session is stopped meanwhile."""
    operator.stop()
    config = yaml.safe_load(plane.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    certificate(tmp_path)
    flags = ["--resync=5", f"--webhook-port={free_port()}", f"--webhook-cert-dir={tmp_path}"]
    one = Operator(replace(plane, kubeconfig=path), tmp_path / "operator.log", *flags)
    one.start()
    try:
        yield one
    finally:
        proxy.mend()
        one.stop()
        operator.start()
        assert not has_failed(one.log.read_text())


def certificate(folder: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=webhook", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    subprocess.run(command, check=True, capture_output=True)


def flag(operator: Operator, name: str) -> str:
    return next(part for part in operator._command if part.startswith(f"{name}=")).partition("=")[2]


def admitted(operator: Operator, body: dict[str, Any]) -> bool:
    """What its webhook says to a new object."""
    context = ssl.create_default_context(cafile=f"{flag(operator, '--webhook-cert-dir')}/tls.crt")
    kind = {"group": "serving.isthmus.dev", "version": "v1alpha1", "kind": "InferenceService"}
    resource = {"group": "serving.isthmus.dev", "version": "v1alpha1", "resource": "inferenceservices"}
    asked = {"uid": "1", "kind": kind, "resource": resource, "operation": "CREATE", "userInfo": {}, "object": body}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked}
    request = urllib.request.Request(
        f"https://127.0.0.1:{flag(operator, '--webhook-port')}/validate",
        json.dumps(review).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        return bool(json.load(answer)["response"]["allowed"])


def standing(service: Service) -> dict[str, str]:
    """Everything that was made of the service, by uid, with who wrote it when."""
    kinds = {"deployments": "/apis/apps/v1", "services": "/api/v1", "pods": "/api/v1"}
    kinds |= {"poddisruptionbudgets": "/apis/policy/v1", "networkpolicies": "/apis/networking.k8s.io/v1"}
    found = {}
    for kind, group in kinds.items():
        for child in service.children(kind, group=group):
            ours = [m["time"] for m in child["metadata"]["managedFields"] if m["manager"] == "isthmus-operator"]
            leaving = child["metadata"].get("deletionTimestamp", "")
            found[child["metadata"]["uid"]] = f"{kind}/{child['metadata']['name']} {ours} {leaving}"
    return found


def alive(operator: Operator) -> bool:
    assert operator.process is not None
    return operator.process.poll() is None


def test_an_outage_of_twenty_seconds_is_outlived_and_nothing_is_changed_for_it(
    service: Service, proxy: CutProxy, cut_off: Operator
) -> None:
    service.apply(roles=roles(2, 2))
    service.ready()
    until(lambda: len(service.deployments()) == 3, 20)
    before, begin = standing(service), datetime.now(UTC)
    process = cut_off.process
    proxy.cut()
    end = time.monotonic() + OUTAGE_S
    until(lambda: "not working until it is held again" in cut_off.log.read_text(), 60, cut_off.log.read_text)
    until(lambda: time.monotonic() > end, OUTAGE_S)
    assert alive(cut_off), cut_off.log.read_text()
    assert admitted(cut_off, service.get())
    assert not admitted(cut_off, {**service.get(), "spec": {**service.spec, "roles": {}}})
    proxy.mend()
    until(lambda: cut_off.log.read_text().count("holding lease") == 2, 60, cut_off.log.read_text)
    # Two resyncs.
    end = time.monotonic() + 11
    until(lambda: time.monotonic() > end, 20)
    assert standing(service) == before
    assert not service.writes_since(begin)
    prefill = {pod["metadata"]["uid"] for pod in service.pods("prefill")}
    changed = roles(2, 2)
    changed["decode"]["resources"] = {"limits": {"cpu": "2"}}
    service.apply(roles=changed)
    service.ready()
    assert {pod["metadata"]["uid"] for pod in service.pods("prefill")} == prefill
    assert cut_off.process is process and alive(cut_off)


@pytest.mark.parametrize("refuse", [True, False], ids=["refused", "silent"])
def test_one_that_starts_in_an_outage_waits_for_its_end(
    service: Service, proxy: CutProxy, cut_off: Operator, refuse: bool
) -> None:
    service.apply()
    service.ready()
    before = standing(service)
    cut_off.stop()
    proxy.cut(refuse=refuse)
    told = cut_off.log.read_text().count("cannot start yet")
    cut_off.start()
    until(lambda: cut_off.log.read_text().count("cannot start yet") > told, 60, cut_off.log.read_text)
    assert alive(cut_off)
    holding = cut_off.log.read_text().count("holding lease")
    proxy.mend()
    until(lambda: cut_off.log.read_text().count("holding lease") > holding, 60, cut_off.log.read_text)
    service.apply(router={"maxQueue": 77})
    service.ready()
    kept = {uid: what for uid, what in before.items() if "router" not in what}
    assert {uid: what for uid, what in standing(service).items() if "router" not in what} == kept
