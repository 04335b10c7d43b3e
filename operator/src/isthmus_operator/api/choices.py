"""The closed choices of the spec, spelled as in manifests."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    DISAGGREGATED = "Disaggregated"
    UNIFIED = "Unified"


class ScalingMode(StrEnum):
    STATIC = "Static"
    EXTERNAL = "External"
    AUTO = "Auto"


class ScalingMetric(StrEnum):
    QUEUED_REQUESTS = "QueuedRequests"
    KV_CACHE_USAGE = "KVCacheUsage"


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class KvDtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"


class Quantization(StrEnum):
    AUTO = "auto"
    FP8 = "fp8"
    NONE = "none"


class SpeculativeMethod(StrEnum):
    NGRAM = "NGram"


class KvLayout(StrEnum):
    BLOCK_MAJOR = "BlockMajor"
    LAYER_MAJOR = "LayerMajor"


class TransferMode(StrEnum):
    DIRECT = "Direct"
    STORE = "Store"


class Transport(StrEnum):
    AUTO = "Auto"
    RDMA = "RDMA"
    NVLINK = "NVLink"
    TCP = "TCP"


class Fallback(StrEnum):
    DENY = "Deny"
    ALLOW_TCP = "AllowTCP"


class TransferFailure(StrEnum):
    RECOMPUTE = "Recompute"
    FAIL = "Fail"


class Enforcement(StrEnum):
    PREFERRED = "Preferred"
    REQUIRED = "Required"


class RouterPolicy(StrEnum):
    ROUND_ROBIN = "RoundRobin"
    LEAST_LOAD = "LeastLoad"
    PREFIX_AWARE = "PrefixAware"
    KV_AWARE = "KVAware"


class PrefillUnavailable(StrEnum):
    LOCAL = "Local"
    REJECT = "Reject"


class RolloutStrategy(StrEnum):
    COORDINATED = "Coordinated"
    RECREATE = "Recreate"
    INDEPENDENT = "Independent"


class RolloutFailure(StrEnum):
    PAUSE = "Pause"
    ROLLBACK = "Rollback"


class Toggle(StrEnum):
    AUTO = "Auto"
    DISABLED = "Disabled"


class ServiceType(StrEnum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"
