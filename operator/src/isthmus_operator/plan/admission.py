"""Pure: whether a spec can be carried out at all. What a reconcile would render for it, from nothing, is rendered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..api.profile import PERMISSIVE, Profile
from ..api.v1alpha1 import InferenceService, parse_stored
from ..errors import InvalidSpec, Problem
from ..render.names import Defaults
from ..render.service import render
from .decision import decide
from .observed import Facts
from .status import status_of

_EPOCH = "1970-01-01T00:00:00Z"


def admit(body: Mapping[str, Any], profile: Profile = PERMISSIVE) -> InferenceService:
    """A resource that the API server asks about. Raises InvalidSpec for one that breaks rules or that the installation
    refuses, and for one that has found a gap in them: it would be admitted, and then stop its service's reconciles."""
    service = parse_stored(body, profile)
    rehearse_render(service)
    return service


def rehearse_render(service: InferenceService) -> None:
    """Render everything. Raises InvalidSpec with whatever keeps that from being done."""
    try:
        defaults = Defaults()
        found = decide(service, (), Facts(), {}, defaults, 0.0)
        status_of(service, found.seen, found.wanted, {}, _EPOCH)
        # Engines that would wait for others to be ready first.
        render(service, defaults)
    # Whatever it is: no spec may bring its own operator to a halt.
    except Exception as error:
        problem = Problem(
            "spec",
            f"cannot be rendered: {type(error).__name__}: {error}",
            "a spec from which every manifest can be rendered",
            "correct what the message names, most likely a podPatch; if there is no podPatch, report it",
        )
        raise InvalidSpec(service.name, [problem]) from error
