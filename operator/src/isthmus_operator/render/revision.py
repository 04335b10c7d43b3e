"""Revisions: hashes of the part of the spec that a pod template comes from, in canonical form.

They depend on the spec alone. Defaults, and fields that this version added, are not in the canonical form, so an
operator upgrade gives every existing spec the revision it had. What does not change a pod (counts, rollout policy,
exposure) is not in it either.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

from ..api.fields import canonical
from ..api.router_spec import Router
from ..api.spec import Role
from ..api.v1alpha1 import InferenceService
from . import adapters
from .names import Component

LENGTH = 8
AT_ONCE = 32
"""Services whose revisions are kept: every part of a reconcile asks for them, and a few reconciles run at a time."""


def _digest(parts: dict[str, object]) -> str:
    """Parts that say nothing are left out, so that a part added by a later version changes no old hash."""
    value = {name: part for name, part in parts.items() if part not in (None, {}, [])}
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def _shared(service: InferenceService) -> dict[str, object]:
    """What the pods of several components are made from."""
    spec = service.spec
    return {
        "name": service.name,
        "model": _model(service),
        "drainTimeout": canonical(spec.rollout.drain_timeout),
        "logLevel": spec.observability.log_level.value,
        "pullPolicy": canonical(spec.engine.image_pull_policy),
        "pullSecrets": canonical(spec.engine.image_pull_secrets),
    }


@lru_cache(AT_ONCE)
def _engines(service: InferenceService) -> dict[str, object]:
    """What all engine pods are made from, whatever their role."""
    spec = service.spec
    return _shared(service) | {
        "engine": canonical(spec.engine),
        "adapters": adapters.keys(spec.model),
        "transfer": canonical(spec.transfer),
        "store": _store_as_engines_see_it(service),
        "startupTimeout": canonical(spec.availability.startup_timeout),
    }


@lru_cache(AT_ONCE)
def pairing(service: InferenceService) -> str:
    """Equal for engines of equal KV layout, and changed by more than layout changes: it is for keeping whole pairs
    during a rollout. The router pairs by the fingerprint that engines report."""
    return _digest(_engines(service))


@lru_cache(AT_ONCE)
def model_digest(service: InferenceService) -> str:
    """Equal where routers know the model of engines: they may differ in all else, as in their image."""
    return _digest({"model": _model(service)})


def _model(service: InferenceService) -> dict[str, object]:
    return _without(canonical(service.spec.model), "adapters")


def _without(value: object, *fields: str) -> dict[str, object]:
    assert isinstance(value, dict)
    return {key: item for key, item in value.items() if key not in fields}


@lru_cache(AT_ONCE * len(Component))
def role_revision(service: InferenceService, component: Component) -> str:
    """Revision of one component: equal exactly when its pods need not be replaced."""
    spec = service.spec
    if component is Component.STORE:
        return _digest(
            {
                "master": canonical(spec.store.master) if spec.store else None,
                "image": spec.engine.image,
                "pullPolicy": canonical(spec.engine.image_pull_policy),
                "pullSecrets": canonical(spec.engine.image_pull_secrets),
            }
        )
    if component is Component.ROUTER:
        assert isinstance(spec.router, Router)
        own = _without(canonical(spec.router), "replicas", "expose")
        return _digest(_shared(service) | {"router": own, "mode": spec.mode.value})
    role = {
        Component.PREFILL: spec.roles.prefill,
        Component.DECODE: spec.roles.decode,
        Component.WORKER: spec.roles.worker,
    }[component]
    assert isinstance(role, Role), f"{component} is not part of this service"
    own = {"component": component.value, "role": _without(canonical(role), "scaling")}
    return _digest(_engines(service) | own)


def _store_as_engines_see_it(service: InferenceService) -> object:
    store = service.spec.store
    if store is None:
        return None
    return {
        "segmentSize": store.segment_size.canonical,
        "replicas": store.replicas,
        "external": canonical(store.master.external),
        # Absent, it says nothing: services of before keep their revision.
        **({"secretRef": canonical(store.secret_ref)} if store.secret_ref else {}),
    }


@lru_cache(AT_ONCE)
def service_revision(service: InferenceService) -> str:
    """Revision of the whole service: changes when that of any component does."""
    spec = service.spec
    present = [c for c, role in ((Component.PREFILL, spec.roles.prefill), (Component.DECODE, spec.roles.decode),
                                 (Component.WORKER, spec.roles.worker)) if role]  # fmt: skip
    if spec.store:
        present.append(Component.STORE)
    return _digest({component.value: role_revision(service, component) for component in (*present, Component.ROUTER)})
