"""Pure: a plan, and what exists, to the exact objects that should be applied and deleted next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..api.choices import ScalingMode
from ..api.v1alpha1 import InferenceService
from ..render import adapters, credentials, engine, mooncake, policies, router, scaler
from ..render.names import REVISION_LABEL, Component, Defaults, child_name, is_engine
from ..render.revision import pairing, role_revision
from ..render.service import components
from .adapters import lists_of_adapters
from .observe import component_of, is_child
from .observed import SICK_AFTER_S, Observed, Workload
from .ownership import marked, owned, pinned, plain
from .planner import Plan
from .rollout import places

Object = dict[str, Any]
Name = tuple[str, str]
"""Kind and name."""

PRUNED = ("Service", "PodDisruptionBudget", "NetworkPolicy", "RoleScaler", "Deployment", "StatefulSet")
"""Kinds of which an object of ours that is not wanted any more is deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """apply: server-side apply, in this order; create: made once, then left to others; delete: live objects;
    optional: applied where their API is installed; unwanted: (apiVersion, kind, name) of optional objects to remove."""

    apply: tuple[Object, ...]
    create: tuple[Object, ...] = ()
    delete: tuple[Object, ...] = ()
    optional: tuple[Object, ...] = ()
    unwanted: tuple[tuple[str, str, str], ...] = ()


def name_of(manifest: Mapping[str, Any]) -> Name:
    """Kind and name of an object."""
    return str(manifest["kind"]), str(manifest["metadata"]["name"])


def desired(
    service: InferenceService,
    defaults: Defaults,
    wanted: Plan,
    children: Iterable[Object],
    seen: Observed,
    now: float,
) -> Desired:
    """Everything the service should consist of now, with old revisions at the numbers of the plan. `seen` and `now`:
    what the plan was made from; `children`: the objects it was observed in."""
    mine = {name_of(child): child for child in children if is_child(service, child)}
    live = {name: child for name, child in mine.items() if name[0] in PRUNED}
    defaults = _paired(service, defaults, seen, live)
    parts = components(service)
    leaving = _leaving(service, live, wanted)
    every = (*parts, *leaving)
    guarded = _pods_guarded(seen)
    rdma = service.spec.transfer.rdma
    on_nodes = wanted.store and ((rdma is not None and rdma.host_network) or any(map(_on_node, live.values())))
    apply = policies.network_policies(service, defaults, guarded=guarded, on_nodes=on_nodes)
    answers = any(goal.count for goal in wanted.goals.values()) or any(w.ready for w in seen.engines)
    apply += policies.disruption_budgets(service, every, answers=answers)
    if mooncake.is_managed(service):
        apply.append(mooncake.master_service(service, exact=seen.exact(Component.STORE)))
        apply += _master(service, defaults, live, seen, now, may_change=master_may_change(service, wanted, seen, now))
    for component in every:
        if is_engine(component):
            apply.append(engine.headless_service(service, component, exact=seen.exact(component)))
    apply += _engines(service, defaults, wanted, live)
    apply.append(router.client_service(service, exact=seen.exact(Component.ROUTER)))
    apply += _routers(service, defaults, wanted, seen, live, guarded=any(_guarded(one) for one in apply))
    if defaults.issuer is not None:
        apply.insert(0, credentials.config_map(service, defaults.issuer, required=guarded and _all_guarded(apply)))
    if service.spec.model.adapters or ("ConfigMap", adapters.name(service)) in mine:
        workloads = [one for (kind, _), one in live.items() if kind == "Deployment"]
        apply.insert(0, lists_of_adapters(service, mine.get(("ConfigMap", adapters.name(service))), workloads))
    scalers = [_scaler(service, part, wanted) for part in parts if is_engine(part)]
    create = tuple(one for one in scalers if one is not None)
    named = {name_of(one) for one in (*apply, *create)}
    keep = named | _standing(service, live, wanted)
    if mooncake.is_managed(service):
        keep -= {name for name in live if name[0] == "StatefulSet" and name not in named}
    optional = tuple(one for one in (policies.pod_monitor(service), router.http_route(service)) if one is not None)
    wanted_optional = {one["kind"] for one in optional}
    known = (("monitoring.coreos.com/v1", "PodMonitor"), ("gateway.networking.k8s.io/v1", "HTTPRoute"))
    return Desired(
        apply=tuple(apply),
        create=create,
        delete=tuple(child for name, child in live.items() if name not in keep),
        optional=optional,
        unwanted=tuple((version, kind, service.name) for version, kind in known if kind not in wanted_optional),
    )


def _guarded(workload: Object) -> bool:
    """Whether pods of its template have credentials; of what has no pods, no."""
    template = workload.get("spec", {}).get("template", {})
    return credentials.GUARDED.items() <= (template.get("metadata", {}).get("labels") or {}).items()


def _on_node(workload: Object) -> bool:
    """Whether its pods have the addresses of nodes."""
    template = workload["spec"].get("template", {}) if workload["kind"] == "Deployment" else {}
    return bool(template.get("spec", {}).get("hostNetwork"))


def _all_guarded(apply: Iterable[Object]) -> bool:
    """Whether every engine and router that is to be made has credentials."""
    return all(_guarded(one) for one in apply if one["kind"] == "Deployment" and one["spec"].get("replicas") != 0)


def _pods_guarded(seen: Observed) -> bool:
    """Whether every engine and router that there is has them."""
    return all(pod.guarded for workload in (*seen.engines, *seen.routers) for pod in workload.pods)


def _kept(manifest: Object, live: Mapping[Name, Object]) -> Object:
    """A workload of the revision that is live keeps its template: a new version of the operator restarts no pod."""
    manifest = marked(manifest)
    there = live.get(name_of(manifest))
    revision = manifest["metadata"]["labels"][REVISION_LABEL]
    if there is None or (there["spec"]["template"]["metadata"].get("labels") or {}).get(REVISION_LABEL) != revision:
        return manifest
    return pinned(manifest, there)


def _paired(service: InferenceService, defaults: Defaults, seen: Observed, live: Mapping[Name, Object]) -> Defaults:
    """Prefill and decode that are to pair run one image: where the spec names none, that of those there are. A newer
    operator's own comes with the first change that all engines share."""
    same = {w.name: w.created for w in seen.engines if w.pairing == pairing(service)}
    # As it was applied: what somebody else has set is put right, and not taken up.
    images = {name: _applied_image(live["Deployment", name]) for name in same if ("Deployment", name) in live}
    # Nor do they ask each other for what some cannot have.
    defaults = replace(defaults, guarded=all(_guarded(live["Deployment", name]) for name in images))
    known = [name for name, image in images.items() if image]
    if service.spec.engine.image or not known:
        return defaults
    return replace(defaults, engine_image=images[max(known, key=lambda name: (same[name], name))])


def _applied_image(there: Object) -> str:
    """The engine image that we own of a live workload; empty where somebody else has set it."""
    template = plain(owned(there)).get("spec", {}).get("template", {})
    containers = template.get("spec", {}).get("containers", ())
    return next((str(one["image"]) for one in containers if one.get("name") == "engine" and "image" in one), "")


def _master(
    service: InferenceService,
    defaults: Defaults,
    live: Mapping[Name, Object],
    seen: Observed,
    now: float,
    *,
    may_change: bool,
) -> list[Object]:
    """The master's StatefulSet, or nothing in the run that deletes it to have it made anew."""
    manifest = mooncake.stateful_set(service, defaults)
    there = live.get(name_of(manifest))
    if there is None:
        return [marked(manifest)]
    if not may_change:
        return [_rescaled(there, 1)]
    if there["spec"]["podManagementPolicy"] != manifest["spec"]["podManagementPolicy"]:
        # It cannot be changed. A pod that is not ready has nothing to lose, and would be in the way of its successor.
        if seen.store is not None and seen.store.well(now) == 0:
            return []
        del manifest["spec"]["podManagementPolicy"]
    return [_kept(manifest, live)]


def master_may_change(service: InferenceService, wanted: Plan, seen: Observed, now: float) -> bool:
    """Whether the managed master may be brought to the present spec.

    Its restart costs the pool, and an image that does not run would cost the service: it changes after the last old
    engine that uses it, when new ones have proven the image. Where it is not ready and no new engine serves, that
    order would wait for ever: new ones cannot start without it.
    """
    if seen.store is None or seen.store.revision == role_revision(service, Component.STORE):
        return True
    if service.spec.rollout.paused or wanted.failed:
        return False
    present = {(goal.component, goal.revision) for goal in wanted.goals.values()}
    new = [w for w in seen.engines if (w.component, w.revision) in present]
    old = [w for w in seen.engines if w not in new and w.pooled and (w.replicas or places(w, now))]
    proven = any(w.ready for w in new)
    if seen.store.well(now) == 0:
        return not old or not any(w.pods for w in new) or (not proven and _is_lost(seen.store, now))
    return not old and (proven or not any(goal.count for goal in wanted.goals.values()))


def _is_lost(store: Workload, now: float) -> bool:
    """Whether the master is not just having a moment."""
    return bool(store.live) and all(now - pod.changed >= SICK_AFTER_S for pod in store.live)


def _engines(service: InferenceService, defaults: Defaults, wanted: Plan, live: Mapping[Name, Object]) -> list[Object]:
    present = {part: role_revision(service, part) for part in components(service) if is_engine(part)}
    out = []
    for (component, revision), count in wanted.counts.items():
        name = "Deployment", child_name(service.name, component.value, revision)
        if present.get(component) == revision:
            out.append(_kept(engine.deployment(service, component, defaults, replicas=count), live))
        elif name in live and name[1] not in wanted.delete:
            out.append(_rescaled(live[name], count))
    # What is to be made comes first: where it is refused, no old pod gives way to it.
    return sorted(out, key=lambda one: name_of(one) in live)


def _routers(
    service: InferenceService,
    defaults: Defaults,
    wanted: Plan,
    seen: Observed,
    live: Mapping[Name, Object],
    *,
    guarded: bool,
) -> list[Object]:
    """`guarded`: some engine asks for credentials."""
    present, names = role_revision(service, Component.ROUTER), {w.revision: w.name for w in seen.routers}
    out = []
    for revision, count in wanted.routers.items():
        there = live.get(("Deployment", names.get(revision, "")))
        if revision == present:
            manifest = router.deployment(service, defaults, replicas=count, there=there)
            # One that has no credential is no use to engines that ask for one: it changes as soon as there are some.
            behind = there is not None and not _guarded(there) and guarded
            out.append(marked(manifest) if behind else _kept(manifest, live))
        elif there is not None and there["metadata"]["name"] not in wanted.delete:
            out.append(_rescaled(there, count))
    out += [_rescaled(one, 0) for one in live.values() if component_of(one) is Component.ROUTER and _twice(one, seen)]
    return sorted(out, key=lambda one: name_of(one) in live)


def _twice(there: Object, seen: Observed) -> bool:
    """Whether it is a workload of routers beside another of its revision, that is not gone yet."""
    known = {w.name for w in seen.routers}
    return there["kind"] == "Deployment" and there["metadata"]["name"] not in known and there["spec"]["replicas"] != 0


def _rescaled(there: Object, count: int) -> Object:
    """What we own of a workload of an older revision, with another number of replicas."""
    ours = plain(owned(there))
    meta = {"name": there["metadata"]["name"], "namespace": there["metadata"]["namespace"], **ours.get("metadata", {})}
    # Those that somebody has taken off, by which it is watched, and which its selector still has.
    meta["labels"] = {**meta.get("labels", {}), **there["spec"]["selector"]["matchLabels"]}
    spec = {**ours.get("spec", {}), "replicas": count}
    # Always ours, and required by the API: an apply without them would be refused had somebody taken them over.
    spec.setdefault("selector", there["spec"]["selector"])
    return {"apiVersion": there["apiVersion"], "kind": there["kind"], "metadata": meta, "spec": spec}


def _leaving(service: InferenceService, live: Mapping[Name, Object], wanted: Plan) -> tuple[Component, ...]:
    """Roles that the spec no longer has and that still have workloads."""
    stay = components(service)
    found = {
        component_of(child)
        for (kind, name), child in live.items()
        if kind == "Deployment" and name not in wanted.delete
    }
    return tuple(part for part in Component if part in found and part not in stay and is_engine(part))


def _standing(service: InferenceService, live: Mapping[Name, Object], wanted: Plan) -> set[Name]:
    """What stays although it is not rendered: a store that old engines use, pods of roles that are gone."""
    keep: set[Name] = set()
    if wanted.store:
        store = child_name(service.name, Component.STORE.value)
        keep |= {("Service", store), ("StatefulSet", store), ("PodDisruptionBudget", store)}
    return keep | {
        (kind, name)
        for (kind, name), child in live.items()
        if kind == "Deployment" and name not in wanted.delete and child["spec"].get("replicas", 1) != 0
    }


def _scaler(service: InferenceService, component: Component, wanted: Plan) -> Object | None:
    if engine.role_of(service, component).scaling.mode is ScalingMode.STATIC:
        return None
    return scaler.role_scaler(service, component, replicas=wanted.goals[component].count)
