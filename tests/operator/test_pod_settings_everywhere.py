"""Placement and podPatch reach every pod of a service, the store's master too, and change nothing where not used."""

from typing import Any

from isthmus_operator.api.v1alpha1 import parse
from isthmus_operator.render.names import Component, Defaults
from isthmus_operator.render.pod import merge
from isthmus_operator.render.revision import role_revision
from isthmus_operator.render.service import render

TOLERATION = {"key": "dedicated", "operator": "Equal", "value": "serving", "effect": "NoSchedule"}
PLATFORM_USER = {
    "spec": {
        "securityContext": {"$patch": "replace", "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    }
}
SETTINGS = {
    "placement": {
        "nodeSelector": {"pool": "serving"},
        "tolerations": [TOLERATION],
        "priorityClassName": "high",
    },
    "podPatch": PLATFORM_USER,
    "resources": {"limits": {"memory": "2Gi"}},
}


def service(settings: dict[str, Any], **spec: Any) -> Any:
    master = {"managed": settings} if settings else {}
    return parse(
        {
            "apiVersion": "serving.isthmus.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "svc"},
            "spec": {
                "model": {"source": {"hostPath": {"path": "/models/m"}}},
                "roles": {"prefill": settings, "decode": settings},
                "router": settings,
                "store": {"segmentSize": "64Mi", "master": master},
                "transfer": {"mode": "Store"},
                **spec,
            },
        }
    )


def pods(settings: dict[str, Any], **spec: Any) -> dict[str, dict[str, Any]]:
    """Pod specs by workload."""
    made = render(service(settings, **spec), Defaults())
    found = {m["metadata"]["name"]: m["spec"]["template"]["spec"] for m in made if "template" in m.get("spec", {})}
    assert len(found) == 4
    return found


def test_every_pod_may_be_placed_and_patched() -> None:
    for name, pod in pods(SETTINGS).items():
        assert pod["nodeSelector"] == {"pool": "serving"}, name
        assert pod["tolerations"] == [TOLERATION], name
        assert pod["priorityClassName"] == "high", name
        assert pod["containers"][0]["resources"]["limits"]["memory"] == "2Gi", name
        # Where the platform chooses the user (OpenShift), none is asked for; the rest of Pod Security stays.
        assert pod["securityContext"].keys() == {"runAsNonRoot", "seccompProfile"}, name
        assert "$patch" not in str(pod)


def test_the_master_is_patched_by_its_containers_name() -> None:
    patch = {"spec": {"containers": [{"name": "master", "env": [{"name": "GLOG_v", "value": "1"}]}]}}
    (master,) = (pod for name, pod in pods({"podPatch": patch}).items() if name.endswith("-store"))
    (container,) = (c for c in master["containers"] if c["name"] == "master")
    assert {"name": "GLOG_v", "value": "1"} in container["env"]
    assert container["command"] == ["mooncake_master"]


def test_directives_of_a_strategic_merge_patch_take_away_what_kubectl_apply_would_keep() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3, "volumes": [{"name": "x"}, {"name": "y"}]}
    patch = {
        "a": {"$patch": "replace", "c": 4},
        "d": {"$patch": "delete"},
        "e": {"$patch": "replace", "f": {"$patch": "delete"}, "g": 5},
        "volumes": [{"name": "x", "$patch": "delete"}, {"name": "unknown", "$patch": "delete"}, {"name": "z"}],
    }
    assert merge(base, patch) == {"a": {"c": 4}, "e": {"g": 5}, "volumes": [{"name": "y"}, {"name": "z"}]}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3, "volumes": [{"name": "x"}, {"name": "y"}]}


def test_a_master_without_settings_is_what_it_was() -> None:
    (plain,) = (pod for name, pod in pods({}).items() if name.endswith("-store"))
    assert plain.keys() == {
        "automountServiceAccountToken",
        "enableServiceLinks",
        "terminationGracePeriodSeconds",
        "securityContext",
        "containers",
        "volumes",
    }


def test_its_revision_is_that_of_what_is_said() -> None:
    settings = {"resources": {"limits": {"memory": "2Gi"}}}
    before = role_revision(service(settings), Component.STORE)
    assert role_revision(service(settings | {"placement": {}, "podPatch": {}}), Component.STORE) == before
    assert role_revision(service(settings | {"podPatch": PLATFORM_USER}), Component.STORE) != before


def test_engines_in_the_nodes_network_may_reach_the_master() -> None:
    def ingress(**rdma: Any) -> list[dict[str, Any]]:
        made = render(service({}, transfer={"mode": "Store", "transport": "RDMA", "rdma": rdma}), Defaults())
        (policy,) = (m for m in made if m["kind"] == "NetworkPolicy" and m["metadata"]["name"].endswith("-engines"))
        return list(policy["spec"]["ingress"])

    open_to_all = [rule for rule in ingress(hostNetwork=True) if "from" not in rule]
    assert open_to_all == [{"ports": [{"protocol": "TCP", "port": 50051}]}]
    assert all("from" in rule for rule in ingress())
