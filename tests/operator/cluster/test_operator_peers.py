"""What the operator hands to pods, and what a real API server signs, as the runtime reads them."""

import json
from pathlib import Path

import pytest
from operator_world import Service, roles, until

from isthmus_runtime.credentials import Credentials
from isthmus_runtime.errors import AccessDenied


def test_a_token_of_this_cluster_is_taken_and_one_for_another_service_is_not(service: Service, tmp_path: Path) -> None:
    service.apply(roles=roles(1, 1))
    service.ready()
    (trust,) = service.children("configmaps")
    (pod, *_) = [p for p in service.children("pods") if p["metadata"]["labels"]["serving.isthmus.dev/role"] == "decode"]
    (volume,) = (v["projected"] for v in pod["spec"]["volumes"] if v["name"] == "peers")
    wanted = volume["sources"][0]["serviceAccountToken"]

    def token(audience: str, namespace: str = service.namespace) -> str:
        flags = (f"--audience={audience}", f"--duration={wanted['expirationSeconds']}s")
        return service.cluster.kubectl("create", "token", "default", "-n", namespace, *flags).strip()

    (tmp_path / "trust.json").write_text(trust["data"]["trust.json"])
    (tmp_path / "token").write_text(token(wanted["audience"]))
    credentials = Credentials(str(tmp_path))
    assert credentials.problem() == ""
    credentials.check(credentials.authorization())
    assert json.loads(trust["data"]["trust.json"])["required"]
    for stranger in (token("another"), token(wanted["audience"], "kube-system")):
        with pytest.raises(AccessDenied):
            credentials.check(f"Bearer {stranger}")


def test_keys_that_somebody_took_away_come_back(service: Service) -> None:
    service.apply(roles=roles(1, 1))
    service.ready()
    (trust,) = service.children("configmaps")
    path = f"/api/v1/namespaces/{service.namespace}/configmaps/{trust['metadata']['name']}"
    service.client("DELETE", path)
    until(lambda: [c for c in service.children("configmaps") if c["data"] == trust["data"]], 30)
