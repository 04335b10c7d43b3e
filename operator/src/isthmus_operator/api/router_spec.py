"""The routers of an InferenceService, and how clients reach them. The docstring under a field is its description in the
CRD."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from .choices import PrefillUnavailable, RouterPolicy, ServiceType
from .fields import Block, Duration, Name, Text
from .model_spec import SecretKey
from .pod_spec import Count, ExtraArgs, PodSettings, Resources

Origin = Annotated[str, StringConstraints(max_length=280, pattern=r"^(\*|https?://[^/?#,\s]+)$")]
"""Of a web page, as browsers send it: scheme, host and port. `*`: any."""


class RouterAuth(Block):
    """Who may call the API: exactly one of the two."""

    api_key_secret_ref: SecretKey | None = None
    """Key that clients must send as a bearer token."""
    tenants_secret_ref: SecretKey | None = None
    """JSON document of tenants, their keys and limits; read again when the Secret changes."""


class ExposeService(Block):
    type: ServiceType = ServiceType.CLUSTER_IP
    """Type of the Service in front of the router."""
    port: Annotated[int, Field(ge=1, le=65535)] = 80
    """Port of that Service."""


Hostname = Annotated[
    str,
    StringConstraints(
        max_length=253, pattern=r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
    ),
]
"""A DNS name, which may begin with `*.`, as the Gateway API takes it."""


class ParentRef(Block):
    name: Name
    """Name of a Gateway."""
    namespace: Name | None = None
    """Namespace of the Gateway. Absent: the service's own."""
    section_name: Name | None = None
    """Listener of the Gateway."""


class HttpRoute(Block):
    parent_refs: Annotated[tuple[ParentRef, ...], Field(min_length=1, max_length=8)]
    """Gateways that carry the route."""
    hostnames: Annotated[tuple[Hostname, ...], Field(max_length=16)] = ()
    """Host names of the route. Absent: all of the Gateway."""


class Expose(Block):
    service: ExposeService = Field(default_factory=ExposeService)
    """The Service clients use."""
    http_route: HttpRoute | None = None
    """An HTTPRoute (Gateway API) to the router. Skipped with an Event while that API is not installed."""


class Router(PodSettings):
    resources: Resources = Field(default_factory=Resources)
    """Resources of the main container. What is not named has a default, so that a quota takes routers."""
    replicas: Count = 2
    """Number of routers. They share nothing. With one, clients are refused while its node is drained."""
    image: Text | None = None
    """Image of the router. Absent: the operator's default, fixed when a revision is first made."""
    policy: RouterPolicy = RouterPolicy.LEAST_LOAD
    """How pods are chosen."""
    disaggregate_above: Annotated[int, Field(ge=0, le=2**24)] = 0
    """Prompts of at most this many tokens are computed on the decode pod itself."""
    on_prefill_unavailable: PrefillUnavailable = PrefillUnavailable.LOCAL
    """Local: decode computes prompts while no prefill pod can. Reject: 503 with Retry-After."""
    max_queue: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1024
    """Most requests in flight per router; more are answered with 429."""
    request_timeout: Duration = Duration("10m")
    """Longest a request may take from arrival to its last token."""
    auth: RouterAuth | None = None
    """Absent: no key is asked for."""
    cors_origins: Annotated[tuple[Origin, ...], Field(max_length=16)] = ()
    """Origins of web pages that may call the API from a browser. Absent: none."""
    extra_args: ExtraArgs = Field(default_factory=dict)
    """Further router flags without their dashes, for example tool-format or control-tokens; as engine.extraArgs."""
    expose: Expose = Field(default_factory=Expose)
    """How clients reach the router."""
