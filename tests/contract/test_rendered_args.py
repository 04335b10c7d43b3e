"""Operator and runtime meet in command-line arguments: what is rendered parses, and means what the spec says."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus_operator.api.rules import TYPED_FLAGS
from isthmus_operator.api.v1alpha1 import parse
from isthmus_operator.render.names import Defaults
from isthmus_operator.render.service import render
from isthmus_runtime.commands.model import build_model_parser
from isthmus_runtime.config import EngineConfig, OnFailure, Role, RouterConfig
from isthmus_runtime.serve_flags import build_serve_parser, parse_serve

EXAMPLES = Path(__file__).parents[2] / "examples"

FULL: dict[str, Any] = {
    "mode": "Disaggregated",
    "model": {"source": {"pvc": {"claimName": "c", "path": "m"}}, "servedNames": ["a", "b"]},
    "engine": {
        "dtype": "bfloat16",
        "threads": 2,
        "maxModelLen": 4096,
        "maxBatchedTokens": 1024,
        "maxStepTime": "150ms",
        "maxNumSeqs": 8,
        "maxWaiting": 9,
        "queueTimeout": "1m30s",
        "noProgressTimeout": "45s",
        "kvCache": {
            "blockSize": 32,
            "dtype": "float32",
            "memory": "1.5Gi",
            "numBlocksOverride": 200,
            "prefixCaching": False,
        },
        "speculative": {"method": "NGram", "tokens": 4},
        "extraArgs": {"executor": "fake"},
    },
    "roles": {
        "prefill": {"engine": {"maxBatchedTokens": 2048, "maxStepTime": "1s", "kvCache": {"gpuMemoryFraction": 0.25}}},
        "decode": {},
    },
    "transfer": {
        "mode": "Store",
        "transport": "Auto",
        "fallback": "AllowTCP",
        "timeout": "20s",
        "onFailure": "Fail",
        "verifyChecksums": True,
    },
    "store": {"segmentSize": "512Mi", "replicas": 2, "secretRef": {"name": "pool", "key": "k"}},
    "router": {
        "policy": "RoundRobin",
        "disaggregateAbove": 256,
        "onPrefillUnavailable": "Reject",
        "maxQueue": 17,
        "requestTimeout": "5m",
        "auth": {"apiKeySecretRef": {"name": "s", "key": "k"}},
        "corsOrigins": ["https://chat.example", "http://localhost:3000"],
        "extraArgs": {"tool-format": "mistral", "control-tokens": "never", "max-body-memory": "1Gi"},
    },
    "rollout": {"drainTimeout": "90s"},
    "observability": {"logLevel": "debug"},
}


def configs(spec: dict[str, Any]) -> dict[str, EngineConfig | RouterConfig]:
    service = parse(
        {
            "apiVersion": "serving.isthmus.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "svc", "namespace": "ns"},
            "spec": spec,
        }
    )
    out: dict[str, EngineConfig | RouterConfig] = {}
    for manifest in render(service, Defaults()):
        if manifest["kind"] == "Deployment":
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            assert container["command"] == ["isthmus-runtime"]
            assert container["args"][0] == "serve"
            config = parse_serve(container["args"][1:])
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert config.server.port == ports["http"]
            out[manifest["metadata"]["labels"]["serving.isthmus.dev/role"]] = config
    return out


@pytest.mark.parametrize("name", ["direct", "gpu", "store", "unified"])
def test_arguments_of_the_examples_parse(name: str) -> None:
    found = configs(yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())["spec"])
    assert set(found) == ({"worker", "router"} if name in ("gpu", "unified") else {"prefill", "decode", "router"})


def test_every_setting_arrives_at_the_engine() -> None:
    found = configs(FULL)
    prefill, decode = found["prefill"], found["decode"]
    assert isinstance(prefill, EngineConfig)
    assert isinstance(decode, EngineConfig)
    assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
    assert decode.model.path == "/models/m"
    assert decode.model.served_names == ("a", "b")
    assert (decode.model.dtype, decode.model.threads) == ("bfloat16", 2)
    assert decode.server.drain_timeout_s == 90
    assert decode.server.no_progress_timeout_s == 45
    assert decode.server.log_level == "debug"
    assert decode.kv.block_size == prefill.kv.block_size == 32
    assert decode.kv.memory_bytes == 3 * 2**29
    assert decode.kv.num_blocks_override == 200
    assert (decode.kv.dtype, decode.kv.layout, decode.kv.prefix_caching) == ("float32", "block-major", False)
    assert (prefill.kv.memory_bytes, prefill.kv.memory_fraction) == (None, 0.25)
    assert (prefill.scheduler.max_batched_tokens, decode.scheduler.max_batched_tokens) == (2048, 1024)
    assert (prefill.scheduler.max_step_s, decode.scheduler.max_step_s) == (1.0, 0.15)
    assert decode.scheduler.max_model_len == 4096
    assert (decode.scheduler.max_num_seqs, decode.scheduler.max_waiting) == (8, 9)
    assert decode.scheduler.queue_timeout_s == 90
    assert (prefill.scheduler.speculative_tokens, decode.scheduler.speculative_tokens) == (0, 4)
    assert decode.executor == "fake"
    transfer = decode.transfer
    assert (transfer.mode, transfer.transport, transfer.fallback) == ("store", "auto", "allow-tcp")
    assert (transfer.timeout_s, transfer.on_failure, transfer.verify_crc) == (20, OnFailure.FAIL, True)
    assert transfer.store.master == "svc-store:50051"
    assert (transfer.store.segment_bytes, transfer.store.replicas) == (2**29, 2)
    assert transfer.store.secret_file == "/etc/isthmus/store/secret"


def test_every_setting_arrives_at_the_router() -> None:
    router = configs(FULL)["router"]
    assert isinstance(router, RouterConfig)
    assert router.prefill == ("svc-prefill:8001",)
    assert router.decode == ("svc-decode:8001",)
    assert (router.policy, router.disaggregate_above, router.on_prefill_unavailable) == ("round-robin", 256, "reject")
    assert (router.max_queue, router.request_timeout_s) == (17, 300)
    assert router.api_key_file == "/etc/isthmus/auth/key"
    assert router.cors_origins == ("https://chat.example", "http://localhost:3000")
    assert (router.chat.tool_format, router.chat.control_tokens) == ("mistral", "never")
    assert router.server.max_body_memory_bytes == 1 << 30
    assert router.model.served_names == ("a", "b")


def test_what_the_spec_leaves_open_keeps_the_runtime_s_default() -> None:
    spec = {"model": FULL["model"], "roles": {"prefill": {}, "decode": {}}}
    decode = configs(spec)["decode"]
    assert isinstance(decode, EngineConfig)
    default = parse_serve(["--role", "decode", "--model", "m", "--transfer-mode", "direct"])
    assert isinstance(default, EngineConfig)
    assert decode.scheduler == default.scheduler
    assert decode.kv == default.kv
    assert decode.transfer.timeout_s == default.transfer.timeout_s


def test_a_role_that_gets_a_gpu_computes_on_it() -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    found = configs({"model": FULL["model"], "roles": {"prefill": gpu, "decode": {}}})
    prefill, decode = found["prefill"], found["decode"]
    assert isinstance(prefill, EngineConfig) and isinstance(decode, EngineConfig)
    assert (prefill.model.device, decode.model.device) == ("cuda", "auto")


def test_products_of_8_bit_floats_reach_every_engine() -> None:
    roles = {"prefill": {}, "decode": {}}
    found = configs({"model": FULL["model"], "engine": {"quantization": "fp8"}, "roles": roles})
    assert [found[role].model.quantization for role in roles] == ["fp8", "fp8"]
    plain = configs({"model": FULL["model"], "roles": roles})
    assert [plain[role].model.quantization for role in roles] == ["auto", "auto"]


def test_rows_alike_in_any_batch_reach_every_engine() -> None:
    roles: dict[str, Any] = {"prefill": {}, "decode": {}}
    found = configs({"model": FULL["model"], "engine": {"extraArgs": {"deterministic": "on"}}, "roles": roles})
    assert [found[role].model.deterministic for role in roles] == [True, True]


def test_an_engine_that_computes_one_step_for_ninety_seconds_is_not_killed() -> None:
    """As when it compiles a kernel. /health is fine for so long, and only its failures count for the liveness probe."""
    decode = configs({"model": FULL["model"], "roles": {"prefill": {}, "decode": {}}})["decode"]
    assert isinstance(decode, EngineConfig)
    assert decode.server.no_progress_timeout_s > 90


LIMITS = {"api-process", "max-connections", "max-connections-per-address", "max-body-memory", "memory-limit"}
"""Of how a port is served: their defaults hold in a pod; `extraArgs` of engine and router may change them."""


TRACES = {"trace-endpoint", "trace-sampling"}
ADAPTERS = {"lora", "lora-dir", "lora-memory", "lora-updates", "max-loras", "max-lora-rank"}


def test_extra_args_may_hold_only_flags_that_no_field_sets() -> None:
    flags = {
        option.removeprefix("--")
        for action in build_serve_parser()._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    free = {"help", "executor", "control-tokens", "tool-format", "reasoning", "page", *TRACES, *LIMITS, *ADAPTERS}
    free |= {"task", "speculative-model"}  # of workers, which have them by extraArgs
    free |= {"deterministic", "trust-tokenizer", "store-reads"}
    assert flags - TYPED_FLAGS == free, "a new runtime flag needs a field, or a place in this list"
    assert not TYPED_FLAGS - flags


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (
            {"huggingFace": {"repo": "o/n", "revision": "v1", "tokenSecretRef": {"name": "hf", "key": "t"}}},
            {"source": "hf://o/n@v1", "token_file": "/etc/isthmus/model/token"},
        ),
        (
            {
                "s3": {
                    "uri": "s3://b/p/m",
                    "endpoint": "http://minio:9000",
                    "region": "r",
                    "credentialsSecretRef": {"name": "keys"},
                }
            },
            {
                "source": "s3://b/p/m",
                "s3_endpoint": "http://minio:9000",
                "s3_region": "r",
                "credentials_dir": "/etc/isthmus/model",
            },
        ),
    ],
)
def test_init_containers_fetch_what_the_main_container_serves(source: dict[str, Any], wanted: dict[str, str]) -> None:
    spec = {"model": {"source": source}, "roles": {"prefill": {}, "decode": {}}}
    manifest = {
        "apiVersion": "serving.isthmus.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "svc", "namespace": "ns"},
        "spec": spec,
    }
    deployments = [m for m in render(parse(manifest), Defaults()) if m["kind"] == "Deployment"]
    assert len(deployments) == 3
    for deployment in deployments:
        pod = deployment["spec"]["template"]["spec"]
        (init,) = pod["initContainers"]
        assert init["command"] == ["isthmus-runtime"]
        assert init["args"][0] == "model"
        found = vars(build_model_parser().parse_args(init["args"][1:]))
        assert found["command"] == "fetch"
        assert {key: found[key] for key in wanted} == wanted
        assert found["tokenizer_only"] == (pod["containers"][0]["name"] == "router")
        config = parse_serve(pod["containers"][0]["args"][1:])
        assert found["out"] == config.model.path


@pytest.mark.parametrize(("text", "seconds"), [("300h", 1_080_000), ("8784h", 31_622_400), ("1234567ms", 1234.567)])
def test_durations_of_any_length_arrive_as_they_were_written(text: str, seconds: float) -> None:
    router = configs({**FULL, "rollout": {"drainTimeout": text}, "router": {"requestTimeout": text}})["router"]
    assert isinstance(router, RouterConfig)
    assert (router.server.drain_timeout_s, router.request_timeout_s) == (seconds, seconds)


def test_a_text_that_begins_like_a_flag_is_none() -> None:
    model = FULL["model"] | {"servedNames": ["--host", "-m"]}
    found = configs({**FULL, "model": model})
    assert [one.model.served_names for one in found.values()] == [("--host", "-m")] * 3
