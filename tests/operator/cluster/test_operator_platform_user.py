"""A platform that chooses the user of pods (OpenShift): the patch that docs/install.md names, as kubectl sends it."""

import json

import pytest
import yaml
from operator_world import ROOT, Service, roles

SECURITY = {"$patch": "replace", "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
PATCH = {"spec": {"securityContext": SECURITY}}
CHOSEN = {"runAsUser", "runAsGroup", "fsGroup"}


def test_the_patch_of_the_documentation_is_this_one() -> None:
    section = (ROOT / "docs" / "install.md").read_text().partition("## OpenShift")[2].partition("\n## ")[0]
    shown = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])
    assert [part["podPatch"] for part in (*shown["roles"].values(), shown["router"])] == [PATCH] * 3
    assert shown["store"]["master"]["managed"]["podPatch"] == PATCH


@pytest.mark.parametrize("how", ["apply", "apply --server-side"])
@pytest.mark.parametrize("when", ["created", "updated"])
def test_pods_ask_for_no_user(service: Service, how: str, when: str) -> None:
    def apply() -> None:
        body = {
            "apiVersion": "serving.isthmus.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "svc"},
            "spec": service.spec,
        }
        service.cluster.kubectl(*how.split(), "-n", service.namespace, "-f", "-", manifest=body)

    patched = roles(1, 1)
    for role in patched.values():
        role["podPatch"] = PATCH
    plain = {
        "model": {"source": {"hostPath": {"path": "/models/m"}}},
        "engine": {"image": "engine:1"},
        "store": {"segmentSize": "64Mi"},
        "transfer": {"mode": "Store"},
    }
    if when == "updated":
        service.spec = plain | {"roles": roles(1, 1)}
        apply()
        service.ready()
    service.spec = plain | {"roles": patched, "router": {"podPatch": PATCH}}
    service.spec["store"] = {"segmentSize": "64Mi"} | {"master": {"managed": {"podPatch": PATCH}}}
    apply()
    service.ready()
    live = [pod for pod in service.pods() if not pod["metadata"].get("deletionTimestamp")]
    assert len(live) == 5  # one of each, and two routers
    asked = {pod["metadata"]["name"]: CHOSEN & pod["spec"]["securityContext"].keys() for pod in live}
    assert not any(asked.values()), json.dumps(service.get()["spec"])
