"""Manifests to processes: names, mounts, environment and ports, without starting anything."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import pytest

from isthmus_operator.api.v1alpha1 import InferenceService, parse
from isthmus_operator.errors import UserError
from isthmus_operator.local.pods import Pod, translate
from isthmus_operator.local.up import made_objects
from isthmus_operator.render.names import Defaults
from isthmus_operator.render.service import render

SPEC: dict[str, Any] = {
    "model": {"source": {"hostPath": {"path": "/data/m"}}},
    "roles": {"prefill": {"scaling": {"replicas": 2}}, "decode": {}},
    "transfer": {"mode": "Store"},
    "store": {},
    "router": {"replicas": 1},
}


def parsed(**spec: Any) -> InferenceService:
    return parse(
        {
            "apiVersion": "serving.isthmus.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "svc", "namespace": "ns"},
            "spec": SPEC | spec,
        }
    )


def pods(objects: dict[tuple[str, str], dict[str, Any]] | None = None, port: int = 8000, **spec: Any) -> dict[str, Pod]:
    service = parsed(**spec)
    taken: dict[str, Sequence[int]] = {}

    def take(pod: str, role: str, ports: Sequence[int]) -> str:
        taken[pod] = ports
        return "127.0.0.1" if role == "router" else f"10.0.0.{len(taken)}"

    found = translate(
        render(service, Defaults()), run_dir="/run/x", take_address=take, ports={"router": port}, objects=objects or {}
    )
    return {pod.name: pod for pod in found}


def value(pod: Pod, flag: str) -> str:
    argv = pod.containers[0].argv
    return argv[argv.index(flag) + 1]


def test_adapters_are_listed_where_they_are_on_this_machine() -> None:
    sources = {name: {"hostPath": {"path": "/srv/adapters", "subPath": name}} for name in ("a", "b")}
    listed = [{"name": name, "source": source} for name, source in sources.items()]
    model = {"source": {"hostPath": {"path": "/data/m"}}, "adapters": listed}
    service = parsed(model=model)
    found = pods(made_objects(service, render(service, Defaults())), model=model)["decode-0"]
    assert found.needs == ("/data/m", "/srv/adapters")
    entries = json.loads(found.files[value(found, "--lora-file")])
    assert {one["name"]: one["path"] for one in entries} == {"a": "/srv/adapters/a", "b": "/srv/adapters/b"}


def test_service_names_become_the_addresses_of_their_pods() -> None:
    found = pods()
    assert list(found) == ["store-0", "prefill-0", "prefill-1", "decode-0", "router-0"]
    assert value(found["router-0"], "--prefill") == "10.0.0.2:8001,10.0.0.3:8001"
    assert value(found["router-0"], "--decode") == "10.0.0.4:8001"
    assert value(found["decode-0"], "--store-master") == "10.0.0.1:50051"


@pytest.mark.parametrize("form", ["", ".NS", ".NS.svc", ".NS.svc.cluster.local"])
def test_names_of_services_are_known_in_all_their_forms_and_others_left(form: str) -> None:
    name = "svc-decode" + form.replace("NS", parsed().namespace)
    given = {
        "a": f"{name}:8001",
        "b": f"x{name}:8001",
        "c": f"{name}:80010",
        "d": f"{name}:80",
        "e": "svc-decode.x:8001",
    }
    found = pods(engine={"extraArgs": given})["prefill-0"]
    assert {flag: value(found, f"--{flag}") for flag in given} == given | {"a": "10.0.0.4:8001"}


def test_every_pod_listens_on_its_own_address() -> None:
    found = pods()
    assert value(found["prefill-1"], "--host") == "10.0.0.3"
    assert "--rpc_address=10.0.0.1" in found["store-0"].containers[0].argv
    assert found["prefill-1"].containers[0].env["POD_IP"] == "10.0.0.3"
    assert found["prefill-1"].containers[0].env["POD_NAME"] == "prefill-1"


def test_the_router_moves_to_the_port_that_was_asked_for() -> None:
    router = pods(port=9999)["router-0"]
    assert value(router, "--port") == "9999"
    assert value(router, "--metrics-port") == "0"  # on the same one
    assert router.containers[0].ports == {"http": 9999, "metrics": 9999}
    readiness = router.containers[0].readiness
    assert readiness is not None
    assert readiness.port == 9999


def test_mounted_paths_become_paths_of_this_machine() -> None:
    decode = pods()["decode-0"]
    assert value(decode, "--model") == "/data/m"
    assert decode.needs == ("/data/m",)
    assert decode.containers[0].env["HOME"] == "/run/x/pods/decode-0/volumes/tmp"
    assert "/run/x/pods/decode-0/volumes/tmp" in decode.folders


def test_probes_and_grace_are_those_of_the_manifest() -> None:
    decode = pods(rollout={"drainTimeout": "60s"})["decode-0"]
    assert decode.grace_s == 75
    startup, readiness = decode.containers[0].startup, decode.containers[0].readiness
    assert startup is not None
    assert readiness is not None
    assert (startup.path, startup.port) == ("/health", 9003)
    assert startup.period_s * startup.failure_threshold == 1800
    assert readiness.path == "/ready"


AUTH = {"auth": {"apiKeySecretRef": {"name": "keys", "key": "k"}}}


def test_a_secret_of_the_same_file_is_mounted() -> None:
    secret = {"data": {"k": base64.b64encode(b"s3cret").decode()}}
    router = pods({("Secret", "keys"): secret}, router=AUTH)["router-0"]
    path = value(router, "--api-key-file")
    assert router.files == {path: b"s3cret"}


def test_a_missing_secret_is_named_with_the_fix() -> None:
    with pytest.raises(UserError, match=r"router-0: Secret keys is not in the file; add it"):
        pods(router=AUTH)


def test_a_missing_key_of_a_secret_is_named() -> None:
    with pytest.raises(UserError, match=r"Secret keys has no key k"):
        pods({("Secret", "keys"): {"stringData": {"other": "1"}}}, router=AUTH)


@pytest.mark.parametrize("key", ["../../.profile", "/etc/x", "..", "a/b", "a\0", ""])
def test_a_key_that_is_a_path_is_refused_as_a_cluster_would(key: str) -> None:
    """It named a file anywhere on the machine, which was replaced."""
    with pytest.raises(UserError, match="Secret keys has the key"):
        pods({("Secret", "keys"): {"stringData": {"k": "1", key: "x"}}}, router=AUTH)


@pytest.mark.parametrize("volume", [
    {"name": "v", "configMap": {"name": "m", "items": [{"key": "k", "path": "../../../x"}]}},
    {"name": "v", "projected": {"sources": [{"configMap": {"name": "m", "items": [{"key": "k", "path": "/x"}]}}]}},
    {"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "../x"}}]}},
    {"name": "../../x", "emptyDir": {}},
])  # fmt: skip
def test_a_volume_does_not_lead_out_of_its_folder(volume: dict[str, Any]) -> None:
    patch = {"spec": {"volumes": [volume]}}
    with pytest.raises(UserError, match="of a volume leads out of it"):
        pods({("ConfigMap", "m"): {"data": {"k": "1"}}}, router={"podPatch": patch})


def test_a_volume_that_only_a_cluster_has_is_refused_with_the_fix() -> None:
    with pytest.raises(UserError, match=r"persistentVolumeClaim, which this machine does not have; .*--model"):
        pods(model={"source": {"pvc": {"claimName": "c"}}})


def test_environment_references_to_config_maps_are_resolved() -> None:
    patch = {
        "spec": {
            "containers": [
                {
                    "name": "engine",
                    "env": [
                        {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "a"}}},
                        {"name": "B", "value": "$(A)-$(POD_IP)"},
                    ],
                }
            ]
        }
    }
    roles = {"prefill": {}, "decode": {"podPatch": patch}}
    env = pods({("ConfigMap", "c"): {"data": {"a": "1"}}}, roles=roles)["decode-0"].containers[0].env
    assert env["A"] == "1"
    assert env["B"] == "1-10.0.0.3"


@pytest.mark.parametrize(
    ("kind", "content", "told"),
    [
        ("ConfigMap", {"data": {"b": "1"}}, "ConfigMap c has no key 'a'; it has b"),
        ("Secret", {"data": {"a": "!!!"}}, "Secret c has values that are not base64"),
        ("Secret", {"data": {"a": 5}}, "Secret c has values that are not base64"),
        ("Secret", {"data": {"a": "//79"}}, "the key 'a' of Secret c is not UTF-8"),
    ],
)
def test_a_variable_that_is_none_is_told(kind: str, content: dict[str, Any], told: str) -> None:
    ref = {"configMapKeyRef" if kind == "ConfigMap" else "secretKeyRef": {"name": "c", "key": "a"}}
    patch = {"spec": {"containers": [{"name": "engine", "env": [{"name": "A", "valueFrom": ref}]}]}}
    with pytest.raises(UserError, match=told):
        pods({(kind, "c"): content}, roles={"prefill": {}, "decode": {"podPatch": patch}})


def test_texts_of_users_reach_processes_as_they_are() -> None:
    names = ["$(POD_IP)", "a$$b", "$$(HOME)", "c$d"]
    model = {"source": {"s3": {"uri": "s3://b/$(POD_NAME)", "region": "-r"}}, "servedNames": names}
    decode = pods(model=model, engine={"extraArgs": {"trace-endpoint": "$(HOME)"}})["decode-0"]
    argv = decode.containers[0].argv
    assert [argv[at + 1] for at, one in enumerate(argv) if one == "--served-model-name"] == names
    assert value(decode, "--trace-endpoint") == "$(HOME)"
    assert value(decode, "--model").endswith("/b/$(POD_NAME)")
    assert {"s3://b/$(POD_NAME)", "--s3-region=-r"} <= {*decode.init[0].argv}
    assert decode.init[0].argv[-1] == "decode-0"


def test_downloads_go_through_an_init_container() -> None:
    model = {"source": {"huggingFace": {"repo": "o/n"}}, "cache": {"hostPath": {"path": "/cache"}}}
    decode = pods(model=model)["decode-0"]
    assert decode.init[0].argv == (
        *("isthmus-runtime", "model", "fetch", "hf://o/n@main", "/cache/o/n@main"),
        *("--deadline", "1800s", "--resume-as", "decode-0"),
    )
    assert value(decode, "--model") == "/cache/o/n@main"
    assert "/cache" in decode.folders
