"""What the specs of several components share: resources, placement and patches of their pods, and further flags. The
docstring under a field is its description in the CRD."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints, WithJsonSchema

from .choices import Toggle
from .fields import Block, Label, Name, Quantity, Text

_OPEN = {"type": "object", "maxProperties": 64, "x-kubernetes-preserve-unknown-fields": True}
Count = Annotated[int, Field(ge=0, le=10000)]
Open = Annotated[dict[str, Any], WithJsonSchema(_OPEN)]
"""A Kubernetes object passed through unread; the API server checks it when the pods are made. `limits` bounds it."""


ExtraArgs = Annotated[
    dict[Annotated[str, StringConstraints(max_length=63, pattern=r"^[a-z][a-z0-9-]*$")], Text], Field(max_length=32)
]


class Resources(Block):
    requests: Annotated[dict[Label, Quantity], Field(max_length=16)] = Field(default_factory=dict)
    """What the scheduler reserves. Absent for a resource that has a limit: the limit."""
    limits: Annotated[dict[Label, Quantity], Field(max_length=16)] = Field(default_factory=dict)
    """What the container may use, for example nvidia.com/gpu: 1."""


class Placement(Block):
    node_selector: Annotated[dict[Label, Annotated[str, StringConstraints(max_length=63)]], Field(max_length=32)] = (
        Field(default_factory=dict)
    )
    """Labels a node must have."""
    tolerations: Annotated[tuple[Open, ...], Field(max_length=32)] = ()
    """Taints to accept, as in a pod."""
    affinity: Open = Field(default_factory=dict)
    """Affinity, as in a pod. Joined with what transfer.locality asks for."""
    topology_spread: Toggle = Toggle.AUTO
    """Auto: pods of the role are spread over nodes when that is possible."""
    priority_class_name: Name | None = None
    """Priority class of the pods."""
    runtime_class_name: Name | None = None
    """Runtime class of the pods."""


class PodSettings(Block):
    resources: Resources = Field(default_factory=Resources)
    """Resources of the main container."""
    placement: Placement = Field(default_factory=Placement)
    """Where the pods may run."""
    pod_patch: Open = Field(default_factory=dict)
    """Strategic merge patch on the pod template, applied last. The container is `engine`, `router` or `master`."""
