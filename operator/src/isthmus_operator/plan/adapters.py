"""Pure: the lists of adapters that engines follow; and which adapters of the spec which engines lack, a condition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..api.reasons import Reason
from ..api.v1alpha1 import InferenceService
from ..render import adapters
from ..render.names import PAIRING_LABEL
from ..render.revision import pairing
from .causes import State
from .observed import EngineFacts
from .ownership import owned, plain

_MOST_TOLD = 8

Object = Mapping[str, Any]


def lists_of_adapters(service: InferenceService, there: Object | None, workloads: Iterable[Object]) -> dict[str, Any]:
    """The ConfigMap with the list of the present spec, and those that engines of another pairing follow, as they are:
    theirs is another base. `there`: as it is now; `workloads`: Deployments."""
    present = pairing(service)
    made = adapters.config_map(service, present)
    kept = {} if there is None else plain(owned(there)).get("data") or {}
    others: dict[str, str] = {}
    for workload in workloads:
        file = adapters.file_of(workload)
        if file and (workload["metadata"].get("labels") or {}).get(PAIRING_LABEL) == present:
            # Earlier operators made one list for all.
            made["data"][file] = adapters.text(service)
        elif file in kept:
            others[file] = kept[file]
    return {**made, "data": others | made["data"]}


def adapters_state(service: InferenceService, answered: Mapping[str, EngineFacts]) -> State:
    """`answered`: what the pods of the present revision say, by their names."""
    if not answered:
        return State("Unknown", Reason.NOT_REPORTED, "no engine has reported its adapters yet")
    names, digest = [one.name for one in service.spec.model.adapters], adapters.digest(service)
    lacking: dict[str, list[str]] = {}
    for pod, facts in answered.items():
        for name, problem in facts.adapter_problems:
            if not name or name in names:
                lacking.setdefault(name, []).append(f"pod {pod}: {problem}")
    if lacking:
        each = [
            f"{name or 'the list'} fails on {len(told)} of {len(answered)} engines ({told[0]})"
            for name, told in sorted(lacking.items())
        ]
        return State("False", Reason.ADAPTERS_MISSING, _some(each))
    late = [f"pod {pod}" for pod, facts in answered.items() if facts.adapter_list != digest]
    if late:
        return State("False", Reason.ADAPTERS_PENDING, f"the present list of adapters was not read yet: {_some(late)}")
    return State("True", Reason.ADAPTERS_LOADED, f"{len(names)} adapters on each of {len(answered)} engines")


def _some(texts: Sequence[str]) -> str:
    more = len(texts) - _MOST_TOLD
    return "; ".join(texts[:_MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")
