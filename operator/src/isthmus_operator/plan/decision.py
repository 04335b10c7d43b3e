"""Pure: from a resource as it is stored, and what exists, to what is wanted of it. What a reconcile and admission ask
for, and the only part of either whose cost depends on what somebody wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..api.v1alpha1 import InferenceService
from ..render.names import Defaults
from .desired import Desired, desired
from .observe import observe
from .observed import Facts, Observed
from .planner import Plan, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was seen of a service, what is planned for it, and the objects that it should consist of."""

    seen: Observed
    wanted: Plan
    exact: Desired


def decide(
    service: InferenceService,
    children: Iterable[dict[str, Any]],
    facts: Facts,
    status: Mapping[str, Any],
    defaults: Defaults,
    now: float,
) -> Decision:
    """`children`: objects labelled as the service's; `status`: of the InferenceService; both as they are now."""
    children = list(children)
    seen = observe(service, children, facts, status)
    wanted = plan(service, seen, now)
    return Decision(seen=seen, wanted=wanted, exact=desired(service, defaults, wanted, children, seen, now))
