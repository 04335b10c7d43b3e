"""What `restricted` refuses, by path and all at once; and that nothing it lets through is more than it promises."""

import asyncio
import copy
import typing
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml
from chart import violations_of_restricted
from hypothesis import example, given
from hypothesis import strategies as st
from kubernetes.client import models

from isthmus_operator.api import allowed_patch
from isthmus_operator.api.allowed_patch import Fields, Items, Keys, Leaf, Node, OneOf
from isthmus_operator.api.profile import Feature, Profile
from isthmus_operator.api.v1alpha1 import parse, parse_stored
from isthmus_operator.errors import InvalidSpec
from isthmus_operator.plan.admission import admit
from isthmus_operator.render.names import Defaults
from isthmus_operator.render.service import render
from isthmus_operator.shell.budget import Workbench
from isthmus_operator.shell.handlers import review

EXAMPLES = Path(__file__).parents[2] / "examples"
STORE = yaml.safe_load((EXAMPLES / "store.yaml").read_text())
RESTRICTED = Profile()


def changed(**blocks: Any) -> dict[str, Any]:
    """The store example with a claim as its model, and fields by dotted path with `__` for dots."""
    out: dict[str, Any] = copy.deepcopy(STORE)
    out["spec"]["model"]["source"] = {"pvc": {"claimName": "m"}}
    for place, value in blocks.items():
        holder = out["spec"]
        *above, last = place.split("__")
        for name in above:
            holder = holder.setdefault(name, {})
        holder[last] = value
    return out


def paths(manifest: dict[str, Any], profile: Profile = RESTRICTED) -> list[str]:
    """What of it the profile refuses."""
    try:
        admit(manifest, profile)
    except InvalidSpec as error:
        return [problem.path for problem in error.problems if "`restricted`" in problem.message]
    return []


ENGINE = "spec.roles.prefill.podPatch.spec"


def engine(**fields: Any) -> dict[str, Any]:
    """A patch of the prefill engine's container."""
    return {"roles__prefill__podPatch": {"spec": {"containers": [{"name": "engine", **fields}]}}}


def pod(**fields: Any) -> dict[str, Any]:
    return {"roles__prefill__podPatch": {"spec": fields}}


def apart(kind: str, **term: Any) -> dict[str, Any]:
    """An affinity about pods on the same node, of one kind, as a must and as a wish."""
    about = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}, **term}
    wish = {"weight": 1, "podAffinityTerm": about}
    return {
        kind: {
            "requiredDuringSchedulingIgnoredDuringExecution": [about],
            "preferredDuringSchedulingIgnoredDuringExecution": [wish],
        }
    }


MUST, WISH = "requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution"
SECRET = {"secretRef": {"name": "s"}}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"model__source": {"hostPath": {"path": "/etc"}}}, ["spec.model.source.hostPath.path"]),
    (
        {
            "model": {
                "source": {"huggingFace": {"repo": "a/b"}},
                "cache": {"hostPath": {"path": "/var/lib/kubelet"}},
            }
        },
        ["spec.model.cache.hostPath.path"],
    ),
    (
        {"transfer__transport": "RDMA", "transfer__rdma": {"hostNetwork": True}},
        ["spec.transfer.rdma", "spec.transfer.rdma.hostNetwork"],
    ),
    ({"transfer__transport": "RDMA"}, ["spec.transfer.transport"]),
    (
        {
            "transfer__transport": "NVLink",
            "transfer__locality": {"topologyKey": "kubernetes.io/hostname", "enforcement": "Required"},
        },
        ["spec.transfer.transport"],
    ),
    ({"router__expose__service": {"type": "LoadBalancer"}}, ["spec.router.expose.service.type"]),
    ({"router__expose__service": {"type": "NodePort"}}, ["spec.router.expose.service.type"]),
    (
        {"router__expose__httpRoute": {"parentRefs": [{"name": "own"}, {"name": "g", "namespace": "other"}]}},
        ["spec.router.expose.httpRoute.parentRefs[1].namespace"],
    ),
    (
        {"roles__prefill__placement": {"priorityClassName": "system-node-critical"}},
        ["spec.roles.prefill.placement.priorityClassName"],
    ),
    (
        {"router__placement": {"affinity": apart("podAntiAffinity", namespaceSelector={})}},
        [
            f"spec.router.placement.affinity.podAntiAffinity.{WISH}[0].podAffinityTerm.namespaceSelector",
            f"spec.router.placement.affinity.podAntiAffinity.{MUST}[0].namespaceSelector",
        ],
    ),
    (
        pod(affinity=apart("podAffinity", namespaces=["default", "other"])),
        [
            f"{ENGINE}.affinity.podAffinity.{WISH}[0].podAffinityTerm.namespaces",
            f"{ENGINE}.affinity.podAffinity.{MUST}[0].namespaces",
        ],
    ),
    (pod(hostNetwork=True), [f"{ENGINE}.hostNetwork"]),
    (pod(hostPID=True, hostIPC=True), [f"{ENGINE}.hostIPC", f"{ENGINE}.hostPID"]),
    (pod(serviceAccountName="admin"), [f"{ENGINE}.serviceAccountName"]),
    (pod(automountServiceAccountToken=True), [f"{ENGINE}.automountServiceAccountToken"]),
    (pod(volumes=[{"name": "v", "hostPath": {"path": "/"}}]), [f"{ENGINE}.volumes[0].hostPath"]),
    (pod(volumes=[{"name": "v", "secret": {"secretName": "s"}}]), [f"{ENGINE}.volumes[0].secret"]),
    (
        pod(volumes=[{"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]),
        [f"{ENGINE}.volumes[0].projected"],
    ),
    (
        pod(containers=[{"name": "sidecar", "image": "x"}]),
        [f"{ENGINE}.containers[0].image", f"{ENGINE}.containers[0].name"],
    ),
    (pod(initContainers=[{"name": "model-fetch", "image": "x"}]), [f"{ENGINE}.initContainers"]),
    (pod(securityContext={"runAsUser": 0}), [f"{ENGINE}.securityContext.runAsUser"]),
    (pod(securityContext={"runAsNonRoot": None}), [f"{ENGINE}.securityContext.runAsNonRoot"]),
    (pod(securityContext=None), [f"{ENGINE}.securityContext"]),
    (pod(securityContext={"sysctls": []}), [f"{ENGINE}.securityContext.sysctls"]),
    (pod(securityContext={"$patch": "delete"}), [f"{ENGINE}.securityContext.$patch"]),
    (pod(securityContext={"$patch": "replace"}), [f"{ENGINE}.securityContext.$patch"]),
    (engine(securityContext={"privileged": True}), [f"{ENGINE}.containers[0].securityContext.privileged"]),
    (
        engine(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
        [f"{ENGINE}.containers[0].securityContext.capabilities"],
    ),
    (
        engine(securityContext={"allowPrivilegeEscalation": 0}),
        [f"{ENGINE}.containers[0].securityContext.allowPrivilegeEscalation"],
    ),
    (engine(envFrom=[SECRET]), [f"{ENGINE}.containers[0].envFrom"]),
    (
        engine(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]),
        [f"{ENGINE}.containers[0].env[0].valueFrom.secretKeyRef"],
    ),
    # The folder of a node is read-only by its mount alone.
    (engine(volumeMounts=[{"name": "model", "mountPath": "/again"}]), [f"{ENGINE}.containers[0].volumeMounts[0].name"]),
    (
        engine(volumeMounts=[{"mountPath": "/models", "readOnly": False}]),
        [f"{ENGINE}.containers[0].volumeMounts[0].name"],
    ),
    (pod(volumes=[{"name": "model", "emptyDir": {}}]), [f"{ENGINE}.volumes[0].name"]),
    (engine(ports=[{"containerPort": 1, "hostPort": 1}]), [f"{ENGINE}.containers[0].ports"]),
    (engine(lifecycle={"preStop": {"httpGet": {"host": "10.0.0.1"}}}), [f"{ENGINE}.containers[0].lifecycle"]),
    (
        engine(livenessProbe={"httpGet": {"host": "10.0.0.1"}, "periodSeconds": 5}),
        [f"{ENGINE}.containers[0].livenessProbe.httpGet"],
    ),
    (engine(**{"$patch": "delete"}), [f"{ENGINE}.containers[0].$patch"]),
    ({"roles__prefill__podPatch": {"$patch": "replace"}}, ["spec.roles.prefill.podPatch.$patch"]),
    (
        {"router__podPatch": {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "host"}}}},
        ["spec.router.podPatch.metadata.annotations.k8s.v1.cni.cncf.io/networks"],
    ),
    (
        {"store__master": {"managed": {"podPatch": {"metadata": {"labels": {"serving.isthmus.dev/role": "router"}}}}}},
        ["spec.store.master.managed.podPatch.metadata.labels.serving.isthmus.dev/role"],
    ),
]


@pytest.mark.parametrize("blocks,expected", REFUSED, ids=[one[1][-1].removeprefix("spec.") for one in REFUSED])
def test_what_reaches_beyond_a_namespace_is_refused_by_its_path(blocks: dict[str, Any], expected: list[str]) -> None:
    assert sorted(paths(changed(**blocks))) == sorted(expected)
    assert paths(changed(**blocks), Profile(restricted=False)) == []


@pytest.mark.parametrize("term", [{}, {"namespaces": []}, {"namespaces": ["default"]}, {"namespaceSelector": None}])
def test_pods_of_the_own_namespace_may_be_kept_apart(term: dict[str, Any]) -> None:
    affinity = apart("podAntiAffinity", **term)
    assert paths(changed(router__placement={"affinity": affinity}, **pod(affinity=affinity))) == []


def test_everything_is_named_at_once_beside_other_mistakes() -> None:
    manifest = changed(
        **pod(hostNetwork=True), router__expose__service={"type": "NodePort"}, model__servedNames=["a", "a"]
    )
    with pytest.raises(InvalidSpec) as caught:
        parse_stored(manifest, RESTRICTED)
    assert [problem.path for problem in caught.value.problems] == [
        "spec.model.servedNames[1]",
        f"{ENGINE}.hostNetwork",
        "spec.router.expose.service.type",
    ]


def test_what_the_installation_allows_passes() -> None:
    profile = Profile(
        host_paths=("/models",),
        writable_host_paths=("/cache",),
        gateway_namespaces=("gateways",),
        allow=frozenset(Feature),
    )
    route = {"parentRefs": [{"name": "g", "namespace": "gateways"}, {"name": "g", "namespace": "default"}]}
    blocks: dict[str, Any] = {
        "model__source": {"hostPath": {"path": "/models/a/b"}},
        "transfer__transport": "RDMA",
        "transfer__rdma": {"hostNetwork": True},
        "router__expose": {"service": {"type": "LoadBalancer"}, "httpRoute": route},
    }
    assert paths(changed(**blocks), profile) == []
    cached = {"source": {"huggingFace": {"repo": "a/b"}}, "cache": {"hostPath": {"path": "/cache"}}}
    assert paths(changed(model=cached), profile) == []


@pytest.mark.parametrize(
    "path", ["/models2/a", "/models/../etc", "/models/./a", "/models//a", "/mod", "/cache/a", "/", "/models/a/.."]
)
def test_a_folder_is_below_the_allowed_one_or_refused(path: str) -> None:
    profile = Profile(host_paths=("/models",), writable_host_paths=("/cache",))
    with pytest.raises(InvalidSpec):
        admit(changed(model__source={"hostPath": {"path": path}}), profile)


@pytest.mark.parametrize(
    "path", ["/cache/a", "/cache/", "/cache/../cache", "/ca", "/own/{namespace}", "/own/b", "/own"]
)
def test_a_cache_is_a_whole_folder_that_is_listed(path: str) -> None:
    """What is below a folder that pods write may be a link, which the node would follow to mount it."""
    profile = Profile(writable_host_paths=("/cache", "/own/{namespace}"))

    def cached(path: str) -> dict[str, Any]:
        return changed(model={"source": {"huggingFace": {"repo": "a/b"}}, "cache": {"hostPath": {"path": path}}})

    for right in ("/cache", "/own/default"):
        assert paths(cached(right), profile) == []
    with pytest.raises(InvalidSpec, match=r"spec\.model\.cache\.hostPath\.path"):
        admit(cached(path), profile)


@pytest.mark.parametrize(
    "other", ["/a", "/a/b", "/a/b/c", "/a/{namespace}", "/{namespace}/b", "/{namespace}", "/a/x{namespace}"]
)
def test_folders_that_pods_write_lie_beside_all_others(other: str) -> None:
    for folders in (
        {"host_paths": (other,), "writable_host_paths": ("/a/b",)},
        {"writable_host_paths": ("/a/b", other)},
        {"writable_host_paths": (other, "/a/b")},
    ):
        with pytest.raises(ValueError, match="beside each other"):
            Profile(**folders)
    Profile(host_paths=("/a/b", "/a/b/c"), writable_host_paths=("/a/bb", "/b/{namespace}"))


@pytest.mark.parametrize("example", ["direct", "store", "unified"])
def test_the_examples_need_their_folder_and_nothing_else(example: str) -> None:
    manifest = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())
    assert paths(manifest) == ["spec.model.source.hostPath.path"]
    assert paths(manifest, Profile(host_paths=("/var/lib/isthmus/models",))) == []


@pytest.mark.parametrize("key", ["serving.isthmus.dev/role", "sidecar.istio.io/inject", "pod-template-hash", "a.b/c"])
def test_labels_that_others_act_on_are_refused_and_plain_ones_pass(key: str) -> None:
    label = {"metadata": {"labels": {key: "x"}}}
    assert paths(changed(router__podPatch=label)) == [f"spec.router.podPatch.metadata.labels.{key}"]
    assert paths(changed(router__podPatch={"metadata": {"labels": {"team": "x"}}})) == []


def test_a_patch_may_bring_and_mount_volumes_of_its_own() -> None:
    patch = pod(
        volumes=[{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
        containers=[{"name": "engine", "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}],
    )
    assert paths(changed(**patch)) == []


def test_no_other_volume_is_rendered() -> None:
    sources: list[dict[str, Any]] = [
        {"source": {"hostPath": {"path": "/m"}}},
        {"source": {"oci": {"image": "x"}}},
        {"source": {"huggingFace": {"repo": "a/b", "tokenSecretRef": {"name": "s", "key": "k"}}}},
        {"source": {"s3": {"uri": "s3://b/p", "credentialsSecretRef": {"name": "s"}}}},
    ]
    found = set()
    for model in sources:
        secret = {"name": "s", "key": "k"}
        model["adapters"] = [{"name": "a", "source": {"hostPath": {"path": "/a"}}}]
        manifest = changed(model=model, router__auth={"apiKeySecretRef": secret}, store__secretRef=secret)
        for made in render(parse(manifest), Defaults()):
            template = made["spec"].get("template", {}) if "spec" in made else {}
            found |= {volume["name"] for volume in template.get("spec", {}).get("volumes", ())}
    assert all(allowed_patch.is_rendered(name) for name in found)
    (of_adapter,) = found - allowed_patch.RENDERED_VOLUMES
    assert found | {"shm"} >= allowed_patch.RENDERED_VOLUMES, "that of several ranks is in test_render"
    # Folders of the node, too: a patch may neither mount them once more nor put something else there.
    mount = {"name": of_adapter, "mountPath": "/x"}
    patch = pod(volumes=[{"name": of_adapter}], containers=[{"name": "engine", "volumeMounts": [mount]}])
    assert len(paths(changed(**patch))) == 2


def test_the_folders_of_adapters_are_among_the_allowed_ones() -> None:
    adapters = [
        {"name": name, "source": {"hostPath": {"path": path}}} for name, path in (("a", "/models/a"), ("b", "/b"))
    ]
    manifest = changed(model__adapters=adapters, model__source={"pvc": {"claimName": "c"}})
    assert paths(manifest, Profile(host_paths=("/models",))) == ["spec.model.adapters[1].source.hostPath.path"]


def test_the_documented_patch_for_openshift_passes() -> None:
    context = {"$patch": "replace", "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert paths(changed(**pod(securityContext=context))) == []


# ------------------------------------------------------------------------------- every field that Kubernetes knows


def fields_of(model: str) -> dict[str, str]:
    """Field -> type of a model of the API client."""
    found = getattr(models, model)
    return {found.attribute_map[name]: kind for name, kind in found.openapi_types.items()}


def known(node: Node) -> set[str]:
    return set(node.known) if isinstance(node, Fields) else set()


def test_the_list_of_what_is_allowed_names_only_fields_that_there_are() -> None:
    template = allowed_patch.allowed_patch("engine")
    assert isinstance(template, Fields)
    spec = template.known["spec"]
    assert isinstance(spec, Fields)
    assert known(spec) <= set(fields_of("V1PodSpec"))
    containers = spec.known["containers"]
    assert isinstance(containers, Items)
    assert known(containers.each) <= set(fields_of("V1Container"))
    volumes = spec.known["volumes"]
    assert isinstance(volumes, Items)
    assert known(volumes.each) <= set(fields_of("V1Volume"))


@pytest.mark.parametrize("model,wrap", [
    ("V1PodSpec", lambda one: pod(**one)),
    ("V1Container", lambda one: engine(**one)),
    ("V1Volume", lambda one: pod(volumes=[{"name": "v", **one}])),
    ("V1SecurityContext", lambda one: engine(securityContext=one)),
    ("V1PodSecurityContext", lambda one: pod(securityContext=one)),
    ("V1ObjectMeta", lambda one: {"roles__prefill__podPatch": {"metadata": one}}),
    ("V1EnvVar", lambda one: engine(env=[{"name": "A", **one}])),
    ("V1EnvVarSource", lambda one: engine(env=[{"name": "A", "valueFrom": one}])),
    ("V1VolumeMount", lambda one: engine(volumeMounts=[{"mountPath": "/a", **one}])),
    ("V1ResourceRequirements", lambda one: engine(resources=one)),
    ("V1Probe", lambda one: engine(livenessProbe=one)),
    ("V1ConfigMapVolumeSource", lambda one: pod(volumes=[{"name": "v", "configMap": one}])),
    ("V1EmptyDirVolumeSource", lambda one: pod(volumes=[{"name": "v", "emptyDir": one}])),
])  # fmt: skip
def test_every_field_of_pods_is_allowed_on_purpose_or_refused(model: str, wrap: Any) -> None:
    harmless = {
        "V1PodSpec": {
            *("affinity", "containers", "dnsConfig", "enableServiceLinks", "hostAliases", "imagePullSecrets"),
            *("nodeSelector", "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints", "volumes"),
            "securityContext",
        },
        "V1Container": {
            *("env", "imagePullPolicy", "livenessProbe", "name", "readinessProbe", "resources", "securityContext"),
            *("startupProbe", "volumeMounts"),
        },
        "V1Volume": {"configMap", "downwardAPI", "emptyDir", "name", "persistentVolumeClaim"},
        "V1SecurityContext": {
            *("allowPrivilegeEscalation", "readOnlyRootFilesystem", "runAsGroup", "runAsNonRoot", "runAsUser"),
            "seccompProfile",
        },
        "V1PodSecurityContext": {
            *("fsGroup", "fsGroupChangePolicy", "runAsGroup", "runAsNonRoot", "runAsUser", "seccompProfile"),
            "supplementalGroups",
        },
        "V1ObjectMeta": {"annotations", "labels"},
        "V1EnvVar": {"name", "value", "valueFrom"},
        "V1EnvVarSource": {"fieldRef", "resourceFieldRef"},
        "V1VolumeMount": {"mountPath", "name", "readOnly", "subPath"},
        "V1ResourceRequirements": {"limits", "requests"},
        "V1Probe": {
            *("failureThreshold", "initialDelaySeconds", "periodSeconds", "successThreshold", "timeoutSeconds"),
        },
        "V1ConfigMapVolumeSource": {"defaultMode", "items", "name", "optional"},
        "V1EmptyDirVolumeSource": {"medium", "sizeLimit"},
    }[model]
    for field in fields_of(model):
        refused = paths(changed(**wrap({field: {"x": "y"}})))
        assert any(path.endswith(f".{field}") for path in refused) or field in harmless, field
    assert harmless <= set(fields_of(model))


values = st.sampled_from(
    [None, True, False, 0, 1, 5, "x", "RuntimeDefault", "replace", "delete", "engine", "tmp", "model"]
)


def sample(node: Node) -> st.SearchStrategy[Any]:
    """Values near what a node allows."""
    if isinstance(node, Fields):
        extra = {"$patch": values, "privileged": values, "hostPath": st.just({"path": "/"})}
        return st.fixed_dictionaries({}, optional={name: sample(inner) for name, inner in node.known.items()} | extra)
    if isinstance(node, Items):
        return st.lists(sample(node.each), max_size=2)
    if isinstance(node, Keys):
        return st.dictionaries(
            st.sampled_from(["cpu", "a.b/c", "serving.isthmus.dev/role", "$patch"]), values, max_size=2
        )
    if isinstance(node, OneOf):
        return st.sampled_from([*node.values, None, True, False, 1])
    return st.just({}) if node is Leaf.ANYTHING else values


@pytest.mark.parametrize(
    "patch",
    [
        {"$patch": "replace", "spec": {}},
        {"metadata": {"$patch": "replace"}},
        {"metadata": {"$patch": "delete"}},
        {"metadata": {"labels": None}},
        {"metadata": {"labels": {"$patch": "replace"}}},
        {"metadata": {"labels": {"$patch": "delete", "a": "b"}}},
        {"metadata": {"labels": {"serving.isthmus.dev/role": "decode"}}},
        {"metadata": {"labels": {"serving.isthmus.dev/uid": None}}},
    ],
)
def test_no_profile_lets_a_patch_take_the_labels_by_which_pods_are_found(patch: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match=r"podPatch\S*: .*labels to add, without those that begin with serving"):
        admit(changed(roles__prefill__podPatch=patch), Profile(restricted=False))


@pytest.mark.parametrize(
    "spec",
    [
        {"$patch": "replace"},
        {"$patch": "delete"},
        {"containers": None},
        {"containers": {"$patch": "delete"}},
        {"containers": [{"name": "sidecar"}, {"name": "engine", "$patch": "delete"}]},
    ],
)
def test_no_profile_lets_a_patch_take_the_container_that_a_pod_is_for(spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match=r"podPatch\.spec\S*: .*(would remove the container|a list of containers)"):
        admit(changed(roles__prefill__podPatch={"spec": spec}), Profile(restricted=False))


@given(patch=sample(allowed_patch.allowed_patch("engine")))
@example(patch={"metadata": {"labels": {"$patch": "replace"}}})
def test_no_patch_that_passes_gives_a_pod_more_than_pod_security_restricted(patch: dict[str, Any]) -> None:
    try:
        service = admit(changed(roles__prefill__podPatch=patch), RESTRICTED)
    except InvalidSpec:
        return
    for manifest in render(service, Defaults()):
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            template = manifest["spec"]["template"]
            assert violations_of_restricted(template["spec"]) == []
            assert not template["spec"].get("serviceAccountName")
            labels = manifest["spec"]["selector"]["matchLabels"]
            assert labels.items() <= template["metadata"]["labels"].items()


# ----------------------------------------------------------------------------------------------- where it is enforced


def test_the_webhook_refuses_and_a_file_alone_does_not() -> None:
    manifest = changed(**pod(hostNetwork=True))
    with pytest.raises(kopf.AdmissionError, match=r"podPatch\.spec\.hostNetwork"):
        asyncio.run(review(Workbench(), RESTRICTED, kopf.Body(typing.cast(Any, manifest)), warnings=[]))
    asyncio.run(review(Workbench(), Profile(restricted=False), kopf.Body(typing.cast(Any, manifest)), warnings=[]))
    parse(manifest)


@pytest.mark.parametrize("mode, warned", [("Direct", ["spec.store: engines with transfer.mode Direct"]), ("Store", [])])
def test_the_webhook_warns_of_a_store_that_nobody_uses(mode: str, warned: list[str]) -> None:
    """It is admitted: an edit of the mode alone passes by there."""
    warnings: list[str] = []
    body = kopf.Body(typing.cast(Any, changed(store={"segmentSize": "64Mi"}, transfer={"mode": mode})))
    asyncio.run(review(Workbench(), RESTRICTED, body, warnings=warnings))
    assert [text[: len(begin)] for text, begin in zip(warnings, warned, strict=True)] == warned
