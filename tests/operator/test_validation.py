"""Every rule: a bad value leads to the field's path and to a message with the value, what is allowed and the fix."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus_operator.api.v1alpha1 import parse
from isthmus_operator.errors import InvalidSpec, Problem

EXAMPLES = Path(__file__).parents[2] / "examples"
AUTO = {"scaling": {"mode": "Auto", "min": 1, "max": 4, "target": {"metric": "QueuedRequests", "value": 4}}}
RATIO = "spec/scalingPolicy/ratio/prefillPerDecode"
NEAR_NODE = {"topologyKey": "kubernetes.io/hostname", "enforcement": "Required"}


def base(mode: str = "Disaggregated") -> dict[str, Any]:
    roles: dict[str, Any] = {"prefill": {}, "decode": {}} if mode == "Disaggregated" else {"worker": {}}
    return {
        "apiVersion": "serving.isthmus.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "svc"},
        "spec": {"mode": mode, "model": {"source": {"hostPath": {"path": "/models/m"}}}, "roles": roles},
    }


def with_values(manifest: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Sets dotted paths; None removes."""
    out = copy.deepcopy(manifest)
    for path, value in values.items():
        *parents, last = path.split("/")
        holder = out
        for part in parents:
            holder = holder.setdefault(part, {})
        if value is None:
            holder.pop(last, None)
        else:
            holder[last] = value
    return out


def problems(manifest: dict[str, Any]) -> list[Problem]:
    with pytest.raises(InvalidSpec) as caught:
        parse(manifest)
    return list(caught.value.problems)


def adapters(*listed: dict[str, Any]) -> dict[str, Any]:
    return {"spec/model/adapters": list(listed)}


LORA = {"pvc": {"claimName": "c", "path": "a"}}

# (changes to a valid manifest, path of the only problem, pieces its text must hold)
BAD: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"apiVersion": "serving.isthmus.dev/v1"}, "apiVersion", ["serving.isthmus.dev/v1alpha1"]),
    ({"kind": "InferenceServices"}, "kind", ['"InferenceServices"', "InferenceService"]),
    ({"specs": {}}, "specs", ["did you mean spec?"]),
    ({"metadata/name": "a" * 41}, "metadata.name", ["41 characters", "40 or fewer"]),
    ({"metadata/name": "Svc"}, "metadata.name", ['"Svc"', "lower-case"]),
    ({"metadata/name": "1svc"}, "metadata.name", ["beginning with a letter"]),
    ({"metadata/name": "a-prefill"}, "metadata.name", ["-prefill", "children"]),
    ({"metadata/name": None}, "metadata.name", ["is missing"]),
    ({"metadata/name": "svc\n"}, "metadata.name", ["lower-case"]),
    ({"spec/mode": "disaggregated"}, "spec.mode", ["Disaggregated | Unified", "did you mean Disaggregated?"]),
    ({"spec/model/source": {}}, "spec.model.source", ["exactly one of", "hostPath"]),
    ({"spec/model/source/pvc": {"claimName": "c"}}, "spec.model.source", ["pvc, hostPath", "exactly one"]),
    ({"spec/model/source/hostPath/path": "~/m"}, "spec.model.source.hostPath.path", ['"~/m"', "absolute path"]),
    ({"spec/model/source": {"huggingFace": {}}}, "spec.model.source.huggingFace.repo", ["is missing"]),
    ({"spec/model/source": {"huggingFace": {"repo": "x"}}}, "spec.model.source.huggingFace.repo", ["owner/name"]),
    ({"spec/model/source": {"huggingFace": {"repo": "../x"}}}, "spec.model.source.huggingFace.repo", ["owner/name"]),
    (
        {"spec/model/source": {"pvc": {"claimName": "c", "path": "../../etc"}}},
        "spec.model.source.pvc.path",
        ["leads out", "without `..`"],
    ),
    ({"spec/model/source": {"s3": {"uri": "s3://b/../x"}}}, "spec.model.source.s3.uri", ["leads out", "without `..`"]),
    ({"spec/model/source": {"s3": {"uri": "http://b"}}}, "spec.model.source.s3.uri", ["s3://bucket/prefix"]),
    ({"spec/model/cache": {"emptyDir": {}}}, "spec.model.cache", ["mounted, not downloaded", "remove it"]),
    ({"spec/model/servedNames": ["a", "a"]}, "spec.model.servedNames[1]", ['"a"', "twice"]),
    ({"spec/model/servedNames": ["a", " "]}, "spec.model.servedNames[1]", ["blank", "can be read"]),
    ({"spec/model/servedNames": ["a\x1b[2J"]}, "spec.model.servedNames[0]", ["printed", "can be read"]),
    (adapters({"name": "a\nb", "source": LORA}), "spec.model.adapters[0].name", ["printed", "rename it"]),
    ({"spec/engine/maxModelLen": 1}, "spec.engine.maxModelLen", ["2"]),
    ({"spec/rollout/drainTimeout": "8785h"}, "spec.rollout.drainTimeout", ["8784h"]),
    ({"spec/model/servedNames": "a"}, "spec.model.servedNames", ["a list"]),
    (adapters({"name": "a"}), "spec.model.adapters[0].source", ["names no source", "pvc, oci, hostPath"]),
    (
        adapters({"name": "a", "source": {"pvc": {"claimName": "c"}, "oci": {"image": "i"}}}),
        "spec.model.adapters[0].source",
        ["2 sources (pvc, oci)"],
    ),
    (adapters({"source": LORA}), "spec.model.adapters[0].name", ["is missing"]),
    (adapters({"name": "", "source": LORA}), "spec.model.adapters[0].name", ["1"]),
    (adapters({"name": "a", "source": LORA}, {"name": "a", "source": LORA}), "spec.model.adapters[1].name", ["twice"]),
    (
        adapters({"name": "m", "source": LORA}) | {"spec/model/servedNames": ["m"]},
        "spec.model.adapters[0].name",
        ["servedNames", "rename it"],
    ),
    (adapters({"name": "svc", "source": LORA}), "spec.model.adapters[0].name", ["name of the model", "servedNames"]),
    (
        adapters({"name": "a", "source": {"pvc": {"claimName": "c", "path": "a/../../b"}}}),
        "spec.model.adapters[0].source.pvc.path",
        ['"a/../../b"', "inside the volume"],
    ),
    (
        adapters({"name": "a", "source": {"hostPath": {"path": "/a", "subPath": ".."}}}),
        "spec.model.adapters[0].source.hostPath.subPath",
        ["inside the volume"],
    ),
    (adapters(*({"name": f"n{i}", "source": LORA} for i in range(65))), "spec.model.adapters", ["64"]),
    (
        {
            "spec/engine/parallelism": {"tensor": 2},
            "spec/transfer": {"mode": "Store"},
            "spec/store": {"segmentSize": "1Gi"},
        },
        "spec.engine.parallelism.tensor",
        ["transfer mode Store", "mode Direct"],
    ),
    ({"spec/engine/parallelism": {"tensor": 65}}, "spec.engine.parallelism.tensor", ["64 or less"]),
    (
        {"spec/engine/extraArgs": {"tensor-parallel-size": "2"}},
        "spec.engine.extraArgs.tensor-parallel-size",
        ["set by the resource itself"],
    ),
    ({"spec/router/auth": {}}, "spec.router.auth", ["no keys", "apiKeySecretRef, tenantsSecretRef"]),
    (
        {"spec/router/auth": {f"{kind}SecretRef": {"name": "n", "key": "k"} for kind in ("apiKey", "tenants")}},
        "spec.router.auth",
        ["two kinds of keys", "exactly one"],
    ),
    ({"spec/roles/decode": None}, "spec.roles.decode", ["missing", "add decode"]),
    ({"spec/roles/worker": {}}, "spec.roles.worker", ["mode Disaggregated", "mode: Unified"]),
    ({"spec/roles/decode/scaling": {"replicas": -1}}, "spec.roles.decode.scaling.replicas", ["-1", "0 or more"]),
    ({"spec/roles/decode/scaling": {"replicas": "2"}}, "spec.roles.decode.scaling.replicas", ["remove the quotes"]),
    ({"spec/roles/decode/scaling": {"replcas": 2}}, "spec.roles.decode.scaling.replcas", ["did you mean replicas?"]),
    (
        {"spec/roles/decode/scaling": {"mode": "External", "replicas": 2}},
        "spec.roles.decode.scaling.replicas",
        ["mode External", "autoscaler"],
    ),
    ({"spec/roles/decode/scaling": {"min": 1}}, "spec.roles.decode.scaling.min", ["mode Static"]),
    (
        {"spec/roles/decode/scaling": {"mode": "Auto", "min": 1, "max": 3}},
        "spec.roles.decode.scaling.target",
        ["missing with mode Auto"],
    ),
    (
        {
            "spec/roles/decode/scaling": {
                "mode": "Auto",
                "min": 4,
                "max": 3,
                "target": {"metric": "KVCacheUsage", "value": "800m"},
            }
        },
        "spec.roles.decode.scaling.min",
        ["4 is above max", "3 or less"],
    ),
    ({"spec/roles/decode/engine": {"dtype": "float32"}}, "spec.roles.decode.engine.dtype", ["set spec.engine.dtype"]),
    (
        {"spec/roles/decode/engine": {"kvCache": {"blockSize": 32}}},
        "spec.roles.decode.engine.kvCache.blockSize",
        ["set spec.engine.kvCache.blockSize"],
    ),
    (
        {"spec/roles/decode/resources": {"requests": {"cpu": 2}, "limits": {"cpu": "500m"}}},
        "spec.roles.decode.resources.requests.cpu",
        ['"2"', "500m or less"],
    ),
    ({"spec/router/resources": {"limits": {"memory": "2 GB"}}}, "spec.router.resources.limits.memory", ["512Mi"]),
    (
        {"spec/roles/decode/resources": {"limits": {"memory": "2Gi"}}, "spec/engine/kvCache": {"memory": "2Gi"}},
        "spec.roles.decode.resources.limits.memory",
        ["KV pool 2Gi"],
    ),
    ({"spec/router/placement": {"tolerations": ["x"]}}, "spec.router.placement.tolerations[0]", ["a mapping"]),
    ({"spec/engine/kvCache": {"blockSize": 0}}, "spec.engine.kvCache.blockSize", ["0 is out", "1 or more"]),
    ({"spec/engine/kvCache": {"gpuMemoryFraction": 1.5}}, "spec.engine.kvCache.gpuMemoryFraction", ["1.0 or less"]),
    (
        {"spec/engine/kvCache": {"memory": "1Gi", "gpuMemoryFraction": 0.5}},
        "spec.engine.kvCache.gpuMemoryFraction",
        ["contradicts memory"],
    ),
    ({"spec/engine/kvCache": {"memory": 0}}, "spec.engine.kvCache.memory", ['"0"', "1 byte"]),
    (
        {"spec/engine": {"maxModelLen": 100, "kvCache": {"numBlocksOverride": 6}}},
        "spec.engine.kvCache.numBlocksOverride",
        ["96 tokens", "7 or more"],
    ),
    ({"spec/engine/extraArgs": {"block-size": "32"}}, "spec.engine.extraArgs.block-size", ["flags that have no field"]),
    ({"spec/engine/extraArgs": {"--x": "1"}}, "spec.engine.extraArgs.--x", ["without dashes"]),
    ({"spec/router/extraArgs": {"--x": "1"}}, "spec.router.extraArgs.--x", ["without dashes"]),
    ({"spec/router/extraArgs": {"max-queue": "9"}}, "spec.router.extraArgs.max-queue", ["flags that have no field"]),
    ({"spec/engine/queueTimeout": 30}, "spec.engine.queueTimeout", ["90s or 1h30m"]),
    ({"spec/transfer/timeout": "0s"}, "spec.transfer.timeout", ['"0s"', "above zero"]),
    ({"spec/transfer/mode": "Store"}, "spec.store", ["transfer mode Store", "add store"]),
    ({"spec/transfer/transport": "NVLink"}, "spec.transfer.locality", ["one node", "kubernetes.io/hostname"]),
    (
        {"spec/transfer": {"transport": "NVLink", "locality": NEAR_NODE, "rdma": {}}},
        "spec.transfer.rdma",
        ["transport NVLink"],
    ),
    ({"spec/transfer": {"transport": "RDMA", "fallback": "AllowTCP"}}, "spec.transfer.fallback", ["never replaced"]),
    (
        {"spec/store": {"segmentSize": "4Gi"}, "spec/roles/prefill/resources": {"limits": {"memory": "4Gi"}}},
        "spec.store.segmentSize",
        ['"4Gi"', "limit 4Gi of prefill", "less than 4Gi"],
    ),
    ({"spec/store": {"segmentSize": 1024}}, "spec.store.segmentSize", ["1Mi or more"]),
    ({"spec/store": {"replicas": 3}}, "spec.store.replicas", ["3 copies", "2 or less"]),
    (
        {"spec/store": {"master": {"managed": {}, "external": {"address": "h:1"}}}},
        "spec.store.master",
        ["one of managed, external"],
    ),
    ({"spec/store": {"master": {"external": {"address": "h"}}}}, "spec.store.master.external.address", ["host:port"]),
    ({"spec/store": {"master": {"external": {"address": "-h:1"}}}}, "spec.store.master.external.address", ["dash"]),
    ({"spec/router": {"replicas": "1"}}, "spec.router.replicas", ["whole number"]),
    ({"spec/router": {"policy": "Random"}}, "spec.router.policy", ["RoundRobin | LeastLoad"]),
    ({"spec/router": {"expose": {"service": {"port": 70000}}}}, "spec.router.expose.service.port", ["65535 or less"]),
    ({"spec/rollout": {"maxUnavailable": 0}}, "spec.rollout.maxUnavailable", ["lets no pod", "maxUnavailable: 1"]),
    ({"spec/rollout": {"maxUnavailable": "0%"}}, "spec.rollout.maxUnavailable", ["lets no pod ever change"]),
    ({"spec/rollout": {"maxSurge": "101%"}}, "spec.rollout.maxSurge", ["0% to 100%"]),
    ({"spec/rollout": {"drainTimeout": "10s"}}, "spec.rollout.drainTimeout", ["before a transfer may", "30s or more"]),
    ({"spec": []}, "spec", ["a mapping"]),
    (
        {RATIO: {}, "spec/roles/decode": AUTO},
        "spec.scalingPolicy.ratio.prefillPerDecode",
        ["sets no bound", "min, max or both"],
    ),
    (
        {RATIO: {"min": 0, "max": 1}, "spec/roles/decode": AUTO},
        "spec.scalingPolicy.ratio.prefillPerDecode.min",
        ["out of range", "above 0"],
    ),
    (
        {RATIO: {"min": "0.5", "max": "250m"}, "spec/roles/decode": AUTO},
        "spec.scalingPolicy.ratio.prefillPerDecode.min",
        ['"0.5" is above max', "250m or less"],
    ),
    (
        {RATIO: {"max": 0.5}, "spec/roles/decode": AUTO},
        "spec.scalingPolicy.ratio.prefillPerDecode.max",
        ["in quotes", "250m"],
    ),
    ({RATIO: {"max": 2}}, "spec.scalingPolicy.ratio", ["mode Auto", "there is none"]),
    (
        {RATIO: {"min": 2}, "spec/roles/prefill": AUTO, "spec/roles/decode/scaling": {"replicas": 3}},
        "spec.scalingPolicy.ratio.prefillPerDecode",
        ["1 to 4 prefill pods and 3 decode pods", "widen it"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "path", "pieces"), BAD, ids=[f"{i}-{path}" for i, (_, path, _) in enumerate(BAD)])
def test_bad_value_names_path_value_and_fix(changes: dict[str, Any], path: str, pieces: list[str]) -> None:
    found = problems(with_values(base(), changes))
    assert [problem.path for problem in found] == [path]
    for piece in pieces:
        assert piece in str(found[0])
    assert "allowed:" in str(found[0])
    assert "fix:" in str(found[0])


@pytest.mark.parametrize(
    "path",
    [
        "engine/parallelism/pipeline",
        "engine/kvCache/hostOffload",
        "store/ssd",
        "store/ha",
        "store/master/managed/replicas",
        "transfer/rdma/devices",
        "transfer/rdma/gidIndex",
        "router/tls",
        "availability/recovery",
        "observability/tracing",
    ],
)
def test_a_field_of_another_version_is_told_from_a_typing_error(path: str) -> None:
    (found,) = problems(with_values(base(), {f"spec/{path}": {}}))
    assert found.path == f"spec.{path.replace('/', '.')}"
    assert "is not supported in this version" in str(found)
    assert "fix: remove it" in str(found)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"spec/transfer": {}}, "spec.transfer"),
        ({"spec/store": {}}, "spec.store"),
        ({"spec/scalingPolicy": {}}, "spec.scalingPolicy"),
        ({"spec/roles/prefill": {}}, "spec.roles.prefill"),
        ({"spec/roles/worker": None}, "spec.roles.worker"),
    ],
)
def test_unified_mode_has_one_role_and_moves_nothing(changes: dict[str, Any], path: str) -> None:
    assert [problem.path for problem in problems(with_values(base("Unified"), changes))] == [path]


def test_only_what_moves_no_blocks_may_scatter_them() -> None:
    scattered = {"spec/engine": {"kvCache": {"layout": "LayerMajor"}}}
    parse(with_values(base("Unified"), scattered))
    assert [problem.path for problem in problems(with_values(base(), scattered))] == ["spec.engine.kvCache.layout"]


def test_all_problems_come_at_once_whatever_their_kind() -> None:
    manifest = with_values(
        base(),
        {
            "metadata/name": "x-store",
            "spec/model/source": {"pvc": {}},
            "spec/roles/decode/scaling": {"replicas": -1, "modus": 1},
            "spec/roles/worker": {},
            "spec/transfer": {"mode": "Store", "timeout": 5},
            "spec/rollout/maxUnavailable": 0,
        },
    )
    assert [problem.path for problem in problems(manifest)] == [
        "metadata.name",
        "spec.model.source.pvc.claimName",
        "spec.roles.decode.scaling.modus",
        "spec.roles.decode.scaling.replicas",
        "spec.roles.worker",
        "spec.rollout.maxUnavailable",
        "spec.store",
        "spec.transfer.timeout",
    ]


def test_a_wrong_field_is_not_reported_twice_by_rules_that_read_it() -> None:
    found = problems(with_values(base(), {"spec/transfer": {"transport": "nvlink", "fallback": "AllowTCP"}}))
    assert [problem.path for problem in found] == ["spec.transfer.transport"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    service = parse(yaml.safe_load(path.read_text()))
    assert service.name == ("qwen3-8b" if path.stem == "gpu" else "smollm2")
    assert service.namespace == "default"


def test_defaults_promised_by_the_documentation() -> None:
    spec = parse(base()).spec
    assert spec.transfer.mode.value == "Direct"
    assert spec.transfer.on_failure.value == "Recompute"
    assert spec.transfer.fallback.value == "Deny"
    assert spec.rollout.max_surge.is_zero
    assert spec.rollout.drain_timeout.seconds == 120
    assert spec.availability.startup_timeout.seconds == 1800
    assert spec.engine.kv_cache.block_size == 16
    assert parse(base()).served_names == ("svc",)


def test_an_unknown_field_in_a_list_is_not_a_list_that_is_too_short() -> None:
    refs = [{"name": "gateway", "sectoinName": "https"}]
    (found,) = problems(with_values(base(), {"spec/router/expose": {"httpRoute": {"parentRefs": refs}}}))
    assert found.path == "spec.router.expose.httpRoute.parentRefs[0].sectoinName"
    assert "did you mean sectionName?" in found.fix


def test_ranks_of_an_engine() -> None:
    """Each has a GPU where there are GPUs; adapters are for all of them; prefill and decode have as many."""
    ranks = {"spec/engine/parallelism": {"tensor": 2}}
    parse(with_values(base(), ranks))
    gpus = {
        f"spec/roles/{role}/resources": {"limits": {"nvidia.com/gpu": n}} for role, n in (("prefill", 2), ("decode", 1))
    }
    (found,) = problems(with_values(base(), ranks | gpus))
    assert found.path == "spec.roles.decode.resources.limits.nvidia.com/gpu" and "2 or more" in str(found)

    def limits(amount: int) -> dict[str, Any]:
        return {"spec/roles/worker": {"resources": {"limits": {"nvidia.com/gpu": amount}}}}

    parse(with_values(base("Unified"), ranks))
    parse(with_values(base("Unified"), ranks | limits(2)))
    (found,) = problems(with_values(base("Unified"), ranks | limits(1)))
    assert found.path == "spec.roles.worker.resources.limits.nvidia.com/gpu" and "2 or more" in str(found)
    parse(with_values(base("Unified"), ranks | adapters({"name": "a", "source": LORA})))
