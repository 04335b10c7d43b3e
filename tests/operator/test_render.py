"""Rendering: golden files for the examples, and the promises that hold for every service."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus_operator.api.allowed_patch import is_rendered
from isthmus_operator.api.crd import to_yaml
from isthmus_operator.api.v1alpha1 import InferenceService, parse
from isthmus_operator.render import adapters, router
from isthmus_operator.render.names import Component, Defaults, child_name
from isthmus_operator.render.pod import merge
from isthmus_operator.render.revision import pairing, role_revision, service_revision
from isthmus_operator.render.service import render

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
SHARED: dict[str, Any] = {
    "mode": "Disaggregated",
    "model": {"source": {"hostPath": {"path": "/models/m"}}},
    "roles": {"prefill": {}, "decode": {}},
}


def service(name: str = "svc", **spec: Any) -> InferenceService:
    return parse(
        {
            "apiVersion": "serving.isthmus.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": "ns"},
            "spec": SHARED | spec,
        }
    )


def by_kind(manifests: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == kind}


def pod_of(manifests: list[dict[str, Any]], role: str) -> dict[str, Any]:
    (found,) = (
        m["spec"]["template"]
        for m in manifests
        if m["kind"] in ("Deployment", "StatefulSet") and m["metadata"]["labels"]["serving.isthmus.dev/role"] == role
    )
    return found


@pytest.mark.parametrize("name", ["direct", "store", "unified"])
def test_golden(name: str) -> None:
    """`make golden` rewrites these files."""
    example = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())
    text = "---\n".join(to_yaml(manifest) for manifest in render(parse(example), Defaults()))
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.write_text(text)
    assert file.read_text() == text


def test_longest_name_leaves_every_name_and_label_within_63() -> None:
    everything = service("a" * 40, store={}, transfer={"mode": "Store"})
    for manifest in render(everything, Defaults()):
        assert len(manifest["metadata"]["name"]) <= 63
        template = manifest["spec"].get("template", {"metadata": {"labels": {}}})
        for value in (*manifest["metadata"]["labels"].values(), *template["metadata"]["labels"].values()):
            assert len(value) <= 63


def test_cut_names_differ_when_only_their_ends_do() -> None:
    long = "x" * 60
    names = {child_name(long, "prefill"), child_name(long, "decode"), child_name(long + "y", "prefill")}
    assert len(names) == 3
    assert all(len(name) <= 63 for name in names)


def test_services_select_their_pods_across_revisions_and_no_other() -> None:
    manifests = render(service(store={}), Defaults())
    for svc in by_kind(manifests, "Service").values():
        role = svc["spec"]["selector"]["serving.isthmus.dev/role"]
        for other in ("prefill", "decode", "router", "store"):
            labels = pod_of(manifests, other)["metadata"]["labels"]
            assert (svc["spec"]["selector"].items() <= labels.items()) == (role == other)
    assert "serving.isthmus.dev/revision" not in by_kind(manifests, "Service")["svc-prefill"]["spec"]["selector"]


def test_a_store_is_what_creates_the_master() -> None:
    assert not by_kind(render(service(), Defaults()), "StatefulSet")
    assert list(by_kind(render(service(store={}), Defaults()), "StatefulSet")) == ["svc-store"]
    external = service(store={"master": {"external": {"address": "mc.other:50051"}}})
    manifests = render(external, Defaults())
    assert not by_kind(manifests, "StatefulSet")
    args = pod_of(manifests, "decode")["spec"]["containers"][0]["args"]
    assert args[args.index("--store-master") + 1] == "mc.other:50051"


def test_replicas_are_left_out_where_an_autoscaler_owns_them() -> None:
    roles = {"prefill": {"scaling": {"mode": "External"}}, "decode": {"scaling": {"replicas": 0}}}
    deployments = {
        m["metadata"]["labels"]["serving.isthmus.dev/role"]: m["spec"]
        for m in by_kind(render(service(roles=roles), Defaults()), "Deployment").values()
    }
    assert "replicas" not in deployments["prefill"]
    assert deployments["decode"]["replicas"] == 0


def test_grace_outlasts_the_drain_and_startup_has_its_budget() -> None:
    pod = pod_of(render(service(rollout={"drainTimeout": "5m"}), Defaults()), "prefill")["spec"]
    assert pod["terminationGracePeriodSeconds"] > 300
    startup = pod["containers"][0]["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


@pytest.mark.parametrize("role", ["prefill", "decode", "router", "store"])
def test_pods_meet_pod_security_restricted(role: str) -> None:
    pod = pod_of(render(service(store={}), Defaults()), role)["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod.get("hostNetwork")
    assert not pod["automountServiceAccountToken"]
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_rdma_adds_the_device_and_the_one_capability_to_engines_only() -> None:
    manifests = render(service(transfer={"transport": "RDMA", "rdma": {"resourceName": "rdma/x"}}), Defaults())
    engine = pod_of(manifests, "decode")["spec"]["containers"][0]
    assert engine["resources"]["limits"]["rdma/x"] == "1"
    assert engine["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert "add" not in pod_of(manifests, "router")["spec"]["containers"][0]["securityContext"]["capabilities"]


def test_engines_accept_only_their_own_service_and_clients_reach_the_router() -> None:
    policies = by_kind(render(service(store={}), Defaults()), "NetworkPolicy")
    engines = policies["svc-engines"]["spec"]
    assert engines["podSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode", "worker", "store"]
    assert engines["ingress"] == [{"from": [{"podSelector": {"matchLabels": {"serving.isthmus.dev/service": "svc"}}}]}]
    assert policies["svc-router"]["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8000}]}]


@pytest.mark.parametrize(
    ("source", "volume", "fetches"),
    [
        ({"pvc": {"claimName": "c", "path": "a/b"}}, "persistentVolumeClaim", False),
        ({"oci": {"image": "models/m:1"}}, "image", False),
        ({"huggingFace": {"repo": "o/n"}}, "emptyDir", True),
        ({"s3": {"uri": "s3://b/p"}}, "emptyDir", True),
    ],
)
def test_model_sources(source: dict[str, Any], volume: str, fetches: bool) -> None:
    manifests = render(service(model={"source": source}), Defaults())
    for role in ("prefill", "router"):
        pod = pod_of(manifests, role)["spec"]
        assert volume in next(v for v in pod["volumes"] if v["name"] == "model")
        container = pod["containers"][0]
        mount = next(m for m in container["volumeMounts"] if m["name"] == "model")
        assert mount["readOnly"]
        path = container["args"][container["args"].index("--model") + 1]
        assert path.startswith(mount["mountPath"])
        if fetches:
            (init,) = pod["initContainers"]
            assert init["args"][:2] == ["model", "fetch"]
            assert init["args"][3] == path
            assert ("--tokenizer-only" in init["args"]) == (role == "router")
        else:
            assert "initContainers" not in pod


def test_what_differs_has_a_folder_of_its_own_in_a_cache() -> None:
    def folder(source: dict[str, Any]) -> str:
        (init,) = pod_of(render(service(model={"source": source}), Defaults()), "decode")["spec"]["initContainers"]
        return str(init["args"][3])

    hub = [{"huggingFace": {"repo": "o/m", "revision": one}} for one in ("main", "a_b", "a/b")]
    stores = [{"endpoint": "https://a"}, {"endpoint": "https://b"}, {"endpoint": "https://b", "region": "r"}]
    s3 = [{"s3": {"uri": "s3://o/m", **one}} for one in ({}, *stores)]
    found = [folder(source) for source in (*hub, *s3)]
    assert found[:2] + found[3:4] == ["/models/o/m@main", "/models/o/m@a_b", "/models/o/m"]
    assert len(set(found)) == len(found)


def test_secrets_are_mounted_by_reference() -> None:
    hub = {"huggingFace": {"repo": "o/n", "tokenSecretRef": {"name": "hf", "key": "t"}}}
    auth = {"auth": {"apiKeySecretRef": {"name": "keys", "key": "k"}}}
    manifests = render(service(model={"source": hub}, router=auth), Defaults())
    assert not by_kind(manifests, "Secret")
    router = pod_of(manifests, "router")["spec"]
    assert {v["secret"]["secretName"] for v in router["volumes"] if "secret" in v} == {"hf", "keys"}
    assert "--api-key-file" in router["containers"][0]["args"]


def test_tenants_are_mounted_by_reference() -> None:
    auth = {"auth": {"tenantsSecretRef": {"name": "tenants", "key": "tenants.json"}}}
    router = pod_of(render(service(router=auth), Defaults()), "router")["spec"]
    secrets = [v["secret"] for v in router["volumes"] if "secret" in v]
    assert [(s["secretName"], s["items"]) for s in secrets] == [("tenants", [{"key": "tenants.json", "path": "key"}])]
    args = router["containers"][0]["args"]
    assert "--api-key-file" not in args and args[args.index("--tenants-file") + 1] == "/etc/isthmus/auth/key"


def test_the_secret_of_a_pool_is_mounted_in_engines_and_moves_their_revision() -> None:
    plain = service(transfer={"mode": "Store"}, store={})
    keyed = service(transfer={"mode": "Store"}, store={"secretRef": {"name": "pool", "key": "k"}})
    manifests = render(keyed, Defaults())
    assert not by_kind(manifests, "Secret")
    for component in (Component.PREFILL, Component.DECODE):
        spec = pod_of(manifests, component.value)["spec"]
        (volume,) = (v for v in spec["volumes"] if v["name"] == "store-secret")
        assert volume["secret"]["secretName"] == "pool" and volume["secret"]["items"][0]["key"] == "k"
        (mount,) = (m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "store-secret")
        args = spec["containers"][0]["args"]
        assert args[args.index("--store-secret-file") + 1].startswith(mount["mountPath"])
        assert role_revision(plain, component) != role_revision(keyed, component)
    assert pairing(plain) != pairing(keyed)
    assert "--store-secret-file" not in str(render(plain, Defaults()))


def test_a_role_local_change_moves_only_that_revision() -> None:
    before = service()
    after = service(roles={"prefill": {}, "decode": {"resources": {"limits": {"cpu": 2}}}})
    assert role_revision(before, Component.PREFILL) == role_revision(after, Component.PREFILL)
    assert role_revision(before, Component.ROUTER) == role_revision(after, Component.ROUTER)
    assert role_revision(before, Component.DECODE) != role_revision(after, Component.DECODE)
    assert service_revision(before) != service_revision(after)


@pytest.mark.parametrize(
    "same",
    [
        {"engine": {"kvCache": {"blockSize": 16}}, "transfer": {}},
        {"roles": {"prefill": {"scaling": {"replicas": 7}}, "decode": {"scaling": {"mode": "External"}}}},
        {"rollout": {"maxSurge": 1, "drainTimeout": "2m"}},
        {"router": {"replicas": 3, "expose": {"service": {"type": "NodePort"}}}},
        {"networkPolicy": "Disabled"},
    ],
)
def test_what_does_not_change_a_pod_does_not_change_the_revision(same: dict[str, Any]) -> None:
    assert service_revision(service(**same)) == service_revision(service())


def test_equal_quantities_are_one_revision() -> None:
    one, other = ({"kvCache": {"memory": text}} for text in ("1Gi", "1024Mi"))
    assert service_revision(service(engine=one)) == service_revision(service(engine=other))


def test_revisions_are_pinned() -> None:
    """If this fails, an operator upgrade would restart every pod of every service: keep the canonical form instead."""
    assert role_revision(service(), Component.PREFILL) == "49e72f1d"
    assert role_revision(service(), Component.ROUTER) == "5852f508"


def lora(name: str, **source: Any) -> dict[str, Any]:
    return {"name": name, "source": source}


def with_adapters(*adapters: dict[str, Any]) -> InferenceService:
    return service(model=SHARED["model"] | {"adapters": list(adapters)})


CLAIM = {"claimName": "c"}


def test_adapters_are_a_list_and_a_mount_of_each_volume() -> None:
    """What an engine reads at the mounted path is where the source lies."""
    claims = [lora("sql", pvc=CLAIM | {"path": "a/sql"}), lora("chat", pvc=CLAIM | {"path": "a/chat"})]
    found = with_adapters(*claims, lora("own", hostPath={"path": "/srv/own"}), lora("art", oci={"image": "i:1"}))
    manifests = render(found, Defaults())
    (entries,) = (m["data"].values() for m in manifests if m["kind"] == "ConfigMap")
    (text,) = entries
    listed = {one["name"]: one["path"] for one in json.loads(text)}
    for role in ("prefill", "decode"):
        spec = pod_of(manifests, role)["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        (engine,) = spec["containers"]
        mounts = [m for m in engine["volumeMounts"] if m["name"].startswith("adapters")]
        assert all(m["readOnly"] for m in mounts)
        folders = {m["mountPath"]: volumes[m["name"]] for m in mounts}
        places = {}
        for name, path in listed.items():
            (top,) = (folder for folder in folders if path == folder or path.startswith(f"{folder}/"))
            places[name] = (folders[top], path.removeprefix(top).lstrip("/"))
        assert places["sql"][0] is places["chat"][0] and places["sql"][0]["persistentVolumeClaim"]["claimName"] == "c"
        assert [places[name][1] for name in ("sql", "chat", "own", "art")] == ["a/sql", "a/chat", "", ""]
        assert places["own"][0]["hostPath"]["path"] == "/srv/own" and places["art"][0]["image"]["reference"] == "i:1"
        file = engine["args"][engine["args"].index("--lora-file") + 1]
        assert "configMap" in folders[os.path.dirname(file)] and os.path.basename(file).startswith("adapters-")
    assert "--lora-file" not in pod_of(manifests, "router")["spec"]["containers"][0]["args"]
    assert "adapters" not in str(render(service(), Defaults()))


def test_on_one_machine_the_list_names_folders_as_they_are() -> None:
    node = {"path": "/srv"}
    found = with_adapters(lora("own", hostPath=node), lora("sql", hostPath=node | {"subPath": "a/sql"}))
    (text,) = adapters.config_map(found, "p", mounted=False)["data"].values()
    assert {one["name"]: one["path"] for one in json.loads(text)} == {"own": "/srv", "sql": "/srv/a/sql"}
    (text,) = adapters.config_map(found, "p")["data"].values()
    assert adapters.digest(found) == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_adapters_come_and_go_without_a_new_pod_but_for_a_new_mount() -> None:
    def revisions(*adapters: dict[str, Any]) -> tuple[str, str]:
        found = with_adapters(*adapters)
        return role_revision(found, Component.DECODE), role_revision(found, Component.ROUTER)

    none, one = revisions(), revisions(lora("a", pvc=CLAIM))
    assert none[0] == role_revision(service(), Component.DECODE)
    assert one[0] != none[0], "slots on the device are made at the start"
    for same in (
        [lora("b", pvc=CLAIM)],
        [lora("a", pvc=CLAIM | {"path": "a"}), lora("b", pvc=CLAIM | {"path": "b"})],
        [lora("b", pvc=CLAIM | {"path": "b"}), lora("a", pvc=CLAIM | {"path": "c"})],
    ):
        assert revisions(*same) == one
    node = [lora(name, hostPath={"path": "/srv", "subPath": name}) for name in "ab"]
    assert revisions(node[0]) == revisions(*node) != one
    assert revisions(node[0], lora("a2", pvc=CLAIM)) == revisions(lora("a2", pvc=CLAIM), node[1])
    assert {revisions(*listed)[1] for listed in ([], [lora("a", pvc=CLAIM)], node)} == {none[1]}, "a router changes"


def test_a_model_on_several_ranks() -> None:
    found = service(
        mode="Unified",
        engine={"parallelism": {"tensor": 2}},
        roles={"worker": {"resources": {"limits": {"nvidia.com/gpu": 2}}}},
    )
    pod = pod_of(render(found, Defaults()), "worker")["spec"]
    (engine,) = pod["containers"]
    assert engine["args"][engine["args"].index("--tensor-parallel-size") + 1] == "2"
    assert {"name": "shm", "mountPath": "/dev/shm"} in engine["volumeMounts"], "NCCL needs more than 64 MiB of it"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]
    assert all(is_rendered(volume["name"]) for volume in pod["volumes"]), "patches may use none of them"
    pair = render(service(engine={"parallelism": {"tensor": 3}}), Defaults())
    for role in ("prefill", "decode"):
        args = pod_of(pair, role)["spec"]["containers"][0]["args"]
        assert args[args.index("--tensor-parallel-size") + 1] == "3"
    one = service(engine={"parallelism": {"tensor": 1}})
    assert service_revision(one) == service_revision(service())
    assert "--tensor-parallel-size" not in str(render(one, Defaults()))
    assert "/dev/shm" not in str(render(one, Defaults()))


def test_pod_patch_is_a_strategic_merge_applied_last() -> None:
    patch = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "containers": [{"name": "engine", "env": [{"name": "X", "value": "1"}]}, {"name": "side", "image": "s"}],
            "tolerations": [{"operator": "Exists"}],
        },
    }
    template = pod_of(render(service(roles={"prefill": {"podPatch": patch}, "decode": {}}), Defaults()), "prefill")
    engine, side = template["spec"]["containers"]
    assert {"name": "X", "value": "1"} in engine["env"]
    assert engine["args"]
    assert side == {"name": "side", "image": "s"}
    assert template["metadata"]["annotations"] == {"a": "b"}
    assert template["spec"]["tolerations"] == [{"operator": "Exists"}]


def test_merge_removes_by_null_and_leaves_its_inputs_alone() -> None:
    base = {"a": {"b": 1, "c": 2}, "env": [{"name": "X", "value": "1"}]}
    assert merge(base, {"a": {"b": None}, "env": [{"name": "X", "value": "2"}]}) == {
        "a": {"c": 2},
        "env": [{"name": "X", "value": "2"}],
    }
    assert base == {"a": {"b": 1, "c": 2}, "env": [{"name": "X", "value": "1"}]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}}),
        (
            {"limits": {"memory": "128Mi"}},
            {"requests": {"cpu": "100m"}, "limits": {"cpu": "2", "memory": "128Mi"}},
        ),
        (
            {"requests": {"cpu": 4}, "limits": {"x/y": 1}},
            {"requests": {"memory": "256Mi", "cpu": "4"}, "limits": {"memory": "1Gi", "x/y": "1"}},
        ),
    ],
)
def test_a_router_has_resources_whatever_is_left_out(given: dict[str, Any], expected: dict[str, Any]) -> None:
    manifest = router_of(router={"resources": given})
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == expected
    for init in manifest["spec"]["template"]["spec"].get("initContainers", ()):
        assert init["resources"]["limits"].keys() <= {"cpu", "memory"}


@pytest.mark.parametrize(("surge", "rolling"), [(0, (0, 1)), ("0%", (0, 1)), (1, (1, 0)), ("50%", (1, 0))])
def test_routers_keep_to_the_surge_of_rollouts(surge: object, rolling: tuple[int, int]) -> None:
    manifest = router_of(rollout={"maxSurge": surge, "maxUnavailable": 1})
    assert manifest["spec"]["replicas"] == 2
    found = manifest["spec"]["strategy"]["rollingUpdate"]
    assert (found["maxSurge"], found["maxUnavailable"]) == rolling


@pytest.mark.parametrize(("strategy", "rolling"), [("Coordinated", (1, 0)), ("Recreate", (0, 1))])
def test_the_only_router_is_replaced_by_a_surge_unless_old_pods_are_to_stop_first(
    strategy: str, rolling: tuple[int, int]
) -> None:
    manifest = router_of(router={"replicas": 1}, rollout={"strategy": strategy})
    found = manifest["spec"]["strategy"]["rollingUpdate"]
    assert (found["maxSurge"], found["maxUnavailable"]) == rolling


def router_of(**spec: Any) -> dict[str, Any]:
    return router.deployment(service(**spec), Defaults())
