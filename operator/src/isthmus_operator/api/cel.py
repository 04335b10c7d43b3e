"""The rules between fields that CEL can express, by the place in the schema where they hold.

They repeat `rules.py`, so that the API server refuses a wrong resource while the operator is down; a test keeps the two
in agreement. Those on an edit (`oldSelf`) are here alone. Arithmetic on quantities, durations and pods in total are
left to `rules.py`.
"""

from __future__ import annotations

from .rules import HOSTNAME_KEY
from .v1alpha1 import MAX_NAME, NAME_PATTERN, RESERVED_SUFFIXES

Place = tuple[str, ...]


def _one_of(*fields: str) -> str:
    return "[" + ", ".join(f"has(self.{field})" for field in fields) + "].filter(given, given).size() == 1"


_DISAGGREGATED = "self.mode == 'Disaggregated'"
_SCALING_RULES = [
    ("self.mode == 'Static' || !has(self.replicas)", "replicas is only for mode Static"),
    (
        "self.mode == 'Auto' || !(has(self.min) || has(self.max) || has(self.target))",
        "min, max and target are only for mode Auto",
    ),
    (
        "self.mode != 'Auto' || (has(self.min) && has(self.max) && has(self.target))",
        "mode Auto needs min, max and target",
    ),
    ("!has(self.min) || !has(self.max) || self.min <= self.max", "min must not be above max"),
]
_RATIO_RULES = [
    ("has(self.min) || has(self.max)", "give min, max or both"),
    (
        "(!has(self.min) || quantity(string(self.min)).isGreaterThan(quantity('0')))"
        " && (!has(self.max) || quantity(string(self.max)).isGreaterThan(quantity('0')))",
        "min and max must be above 0",
    ),
    (
        "!has(self.min) || !has(self.max) || quantity(string(self.min)).compareTo(quantity(string(self.max))) <= 0",
        "min must not be above max",
    ),
]
_KV_RULES = [("!(has(self.memory) && has(self.gpuMemoryFraction))", "give one of memory and gpuMemoryFraction")]
_FLAG_RULES = [
    ("self.all(flag, flag.matches('^[a-z][a-z0-9-]{0,62}$'))", "give flags without dashes in front, in lower case")
]

_ROLES = ("prefill", "decode", "worker")
_ROLE_RULES = [
    (
        "!has(oldSelf.scaling) || oldSelf.scaling.mode == 'Static'"
        " || has(self.scaling) && (self.scaling.mode != 'Static' || has(self.scaling.replicas))",
        "give scaling.replicas: until now an autoscaler set the number",
    )
]

RULES: dict[Place, list[tuple[str, str]]] = {
    (): [
        (
            f"size(self.metadata.name) <= {MAX_NAME}",
            f"the name may have at most {MAX_NAME} characters: children add to it",
        ),
        (
            f"self.metadata.name.matches('{NAME_PATTERN}')",
            "the name must begin with a letter and hold only lower-case letters, digits and '-'",
        ),
        (
            " && ".join(f"!self.metadata.name.endsWith('{suffix}')" for suffix in RESERVED_SUFFIXES),
            f"the name must not end with {', '.join(RESERVED_SUFFIXES)}: children are named so",
        ),
    ],
    ("spec",): [
        (
            f"{_DISAGGREGATED} ? (has(self.roles.prefill) && has(self.roles.decode) && !has(self.roles.worker))"
            " : (has(self.roles.worker) && !has(self.roles.prefill) && !has(self.roles.decode))",
            "mode Disaggregated needs roles prefill and decode; mode Unified needs role worker; and no other",
        ),
        (
            f"{_DISAGGREGATED} || !(has(self.transfer) || has(self.store))",
            "transfer and store do not go with mode Unified",
        ),
        (
            f"!({_DISAGGREGATED}) || !has(self.engine) || !has(self.engine.parallelism)"
            " || self.engine.parallelism.tensor == 1 || !has(self.transfer) || self.transfer.mode != 'Store'",
            "engine.parallelism.tensor above 1 does not go with transfer mode Store",
        ),
        (
            f"!has(self.scalingPolicy) || {_DISAGGREGATED}",
            "scalingPolicy does not go with mode Unified",
        ),
        (
            "!has(self.scalingPolicy) || !has(self.scalingPolicy.ratio) || !has(self.roles.prefill)"
            " || !has(self.roles.decode) || "
            + " || ".join(
                f"(has(self.roles.{role}.scaling) && self.roles.{role}.scaling.mode == 'Auto')"
                for role in ("prefill", "decode")
            ),
            "scalingPolicy.ratio needs a role with scaling mode Auto",
        ),
        (
            "!has(self.transfer) || self.transfer.mode != 'Store' || has(self.store)",
            "transfer mode Store needs spec.store",
        ),
    ],
    ("spec", "model", "source"): [
        (
            _one_of("huggingFace", "pvc", "s3", "oci", "hostPath"),
            "give exactly one of huggingFace, pvc, s3, oci, hostPath",
        )
    ],
    ("spec", "model", "adapters", "*", "source"): [
        (_one_of("pvc", "oci", "hostPath"), "give exactly one of pvc, oci, hostPath")
    ],
    ("spec", "model"): [
        (
            "!has(self.adapters) || !has(self.servedNames) || !self.adapters.exists(one, one.name in self.servedNames)",
            "an adapter must not have one of servedNames as its name",
        ),
        (
            "!has(self.cache) || has(self.source.huggingFace) || has(self.source.s3)",
            "cache is only for huggingFace and s3",
        ),
    ],
    ("spec", "model", "cache"): [
        (_one_of("pvc", "hostPath", "emptyDir"), "give exactly one of pvc, hostPath, emptyDir")
    ],
    ("spec", "engine", "extraArgs"): _FLAG_RULES,
    ("spec", "router", "extraArgs"): _FLAG_RULES,
    ("spec", "engine", "kvCache"): _KV_RULES,
    ("spec", "transfer"): [
        (
            "self.transport != 'NVLink' || (has(self.locality) && self.locality.enforcement == 'Required'"
            f" && self.locality.topologyKey == '{HOSTNAME_KEY}')",
            f"transport NVLink needs locality {{topologyKey: {HOSTNAME_KEY}, enforcement: Required}}",
        ),
        ("!has(self.rdma) || self.transport in ['Auto', 'RDMA']", "rdma is only for transport Auto and RDMA"),
        (
            "self.fallback != 'AllowTCP' || self.transport == 'Auto'",
            "fallback AllowTCP is only for transport Auto: an explicit transport is never replaced",
        ),
    ],
    ("spec", "router", "auth"): [
        (_one_of("apiKeySecretRef", "tenantsSecretRef"), "give exactly one of apiKeySecretRef, tenantsSecretRef")
    ],
    ("spec", "store", "master"): [("!(has(self.managed) && has(self.external))", "give one of managed and external")],
    ("spec", "rollout"): [
        (
            "!(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])",
            "maxSurge and maxUnavailable cannot both be 0: no pod could ever change",
        )
    ],
    ("spec", "scalingPolicy", "ratio", "prefillPerDecode"): _RATIO_RULES,
    **{("spec", "roles", role): _ROLE_RULES for role in _ROLES},
    **{("spec", "roles", role, "scaling"): _SCALING_RULES for role in _ROLES},
    **{("spec", "roles", role, "engine", "kvCache"): _KV_RULES for role in _ROLES},
}
