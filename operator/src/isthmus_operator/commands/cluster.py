"""`isthmus status | explain | plan`: what the cluster says about a service, for people and for programs."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import replace
from typing import Any, TextIO

from ..api.reasons import TEXTS, Reason
from ..api.v1alpha1 import API_VERSION, KIND, InferenceService, parse, parse_stored
from ..errors import UserError
from ..files import STDIN, load
from ..plan.observe import observe
from ..plan.observed import Facts, Observed
from ..plan.rehearse import World, rehearse
from ..render.names import SERVICE_LABEL
from ..settings import identity
from ..shell.client import Api, connect, default_namespace, path_of

Object = dict[str, Any]
_READ = (("apps/v1", "Deployment"), ("apps/v1", "StatefulSet"), ("v1", "Pod"), (API_VERSION, "RoleScaler"))


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """One command; 0, or 1 when `explain` has found a cause."""
    if arguments.command == "plan":
        return _plan(arguments, out)
    body = asyncio.run(_service(arguments, arguments.name))
    if arguments.command == "status":
        out.write(json.dumps(body.get("status") or {}, indent=2) + "\n" if _json(arguments) else status_text(body))
        return 0
    cause = blocking(body)
    if _json(arguments):
        out.write(json.dumps(cause, indent=2) + "\n")
    else:
        out.write(explain_text(body, cause))
    return 0 if cause["reason"] == Reason.ALL_READY else 1


def _json(arguments: argparse.Namespace) -> bool:
    return bool(arguments.output == "json")


def _kubeconfig(arguments: argparse.Namespace) -> str:
    return str(arguments.kubeconfig or identity().kubeconfig)


async def _connect(arguments: argparse.Namespace) -> Api:
    return await connect(_kubeconfig(arguments), arguments.context)


async def _service(arguments: argparse.Namespace, name: str) -> Object:
    namespace = arguments.namespace or default_namespace(_kubeconfig(arguments), arguments.context)
    api = await _connect(arguments)
    try:
        found = await api.find(path_of(API_VERSION, KIND, namespace, name))
    finally:
        await api.close()
    if found is None:
        raise UserError(f"there is no InferenceService {name} in namespace {namespace}; name another namespace with -n")
    return found


def blocking(body: Object) -> dict[str, str]:
    """The one cause: the condition Ready's, which is that of the first thing everything else waits for."""
    status = body.get("status") or {}
    found = {c["type"]: c for c in status.get("conditions") or ()}
    ready = found.get("Ready")
    if ready is None or status.get("observedGeneration") != body["metadata"]["generation"]:
        return {
            "reason": "NotObserved",
            "message": f"no operator has looked at generation {body['metadata']['generation']} yet",
            "remedy": "See whether the operator runs: kubectl get pods -A -l app.kubernetes.io/component=operator",
        }
    reason = next((one for one in Reason if one.value == ready["reason"]), None)
    remedy = TEXTS[reason].remedy if reason is not None else ""
    return {"reason": ready["reason"], "message": ready["message"], "remedy": remedy}


def explain_text(body: Object, cause: dict[str, str]) -> str:
    """The causes as text."""
    name = body["metadata"]["name"]
    if cause["reason"] == Reason.ALL_READY:
        return f"{name} is ready: {(body.get('status') or {}).get('url', '')}\n"
    return f"{name} is not ready: {cause['reason']}\n  {cause['message']}\n  Remedy: {cause['remedy']}\n"


def status_text(body: Object) -> str:
    """A status as text: counts, transfer, and every condition."""
    status = body.get("status") or {}
    transfer = status.get("transfer") or {}
    lines = [f"{body['metadata']['namespace']}/{body['metadata']['name']}  {status.get('url', '')}"]
    for role, counts in (status.get("roles") or {}).items():
        more = f", {counts['routable']} routable" if "routable" in counts else ""
        lines.append(f"  {role:8} {counts['summary']:>7} ready, {counts['updated']} of the current spec{more}")
    if transfer:
        speed = f" at {transfer['probedGBps']} GB/s" if transfer.get("probedGBps") else ""
        lines.append(f"  transfer {transfer.get('mode', '')} over {transfer.get('effective', 'nothing yet')}{speed}")
    if revision := status.get("revision"):
        lines.append(f"  revision {revision.get('current', 'none')} serves, {revision['updated']} is asked for")
    if skipped := status.get("skipped"):
        lines.append(f"  left out: {', '.join(skipped)}, as their APIs are not installed")
    for condition in status.get("conditions") or ():
        lines.append(
            f"  {condition['type']:14} {condition['status']:8} {condition['reason']:20} {condition['message']}"
        )
    return "\n".join(lines) + "\n"


def _plan(arguments: argparse.Namespace, out: TextIO) -> int:
    if arguments.file == arguments.old == STDIN:
        raise UserError("FILE and --old are both standard input; give a file for one of them")
    namespace = arguments.namespace
    if not namespace:
        # Two files need no cluster.
        namespace = "default" if arguments.old else default_namespace(_kubeconfig(arguments), arguments.context)
    service = parse(load(arguments.file).service, namespace=namespace)
    if arguments.old:
        world = World()
        for _ in rehearse(parse(load(arguments.old).service, namespace=namespace), world):
            pass
        if world.unfinished:
            out.write(
                f"--old {arguments.old} was not complete after {world.unfinished} steps; what follows is from there\n"
            )
    else:
        world = World(seen=asyncio.run(_live(arguments, service)), now=time.time())
    steps = plan_steps(service, world)
    if _json(arguments):
        out.write(json.dumps(steps, indent=2) + "\n")
    elif not steps:
        out.write("nothing changes\n")
    else:
        for number, step in enumerate(steps, start=1):
            out.write(f"{number:3}. {step['text']}\n")
    return 0


def plan_steps(service: InferenceService, world: World) -> list[dict[str, Any]]:
    """What applying `service` does, step by step, if every new pod becomes ready."""
    world.seen = replace(world.seen, facts=Facts(), failed="", conditions=())
    steps: list[dict[str, Any]] = []
    before = world.seen
    for wanted, _ in rehearse(service, world):
        known = {(w.component, w.revision): w.replicas for w in before.engines}
        for (component, revision), count in sorted(wanted.counts.items(), key=lambda item: item[1]):
            was = known.get((component, revision), 0)
            if was != count:
                steps.append(_resized(component.value, revision, was, count, gap=wanted.gap))
        routers = {w.revision: w.replicas for w in before.routers}
        for revision, count in sorted(wanted.routers.items(), key=lambda item: item[1]):
            if routers.get(revision, 0) != count:
                steps.append(_resized("router", revision, routers.get(revision, 0), count, gap=wanted.alone))
        present, old = world.seen.store, before.store
        if (present and present.revision) != (old and old.revision):
            what = f"{present.revision} is rolled out" if present else "is removed"
            steps.append({"role": "store", "text": f"store {what}"})
        before = world.seen
    if world.unfinished:
        text = f"not complete after {world.unfinished} steps of the rehearsal: what comes after them is not shown"
        steps.append({"role": "", "unfinished": True, "text": text})
    return steps


def _resized(role: str, revision: str, was: int, count: int, *, gap: bool) -> dict[str, Any]:
    verb, gap = "start" if count > was else "stop", gap and count == 0
    text = f"{role} {revision}: {verb} {abs(count - was)} ({was} -> {count})"
    return {"role": role, "revision": revision, "from": was, "to": count, "gap": gap} | {
        "text": text + (" — this role has no pod until the new one is ready" if gap else "")
    }


async def _live(arguments: argparse.Namespace, service: InferenceService) -> Observed:
    api = await _connect(arguments)
    try:
        body = await api.find(path_of(API_VERSION, KIND, service.namespace, service.name))
        if body is None:
            return Observed()
        children: list[Object] = []
        for version, kind in _READ:
            found = await api.get(
                path_of(version, kind, service.namespace), labelSelector=f"{SERVICE_LABEL}={service.name}"
            )
            children += [{"apiVersion": version, "kind": kind, **item} for item in found["items"]]
    finally:
        await api.close()
    return observe(parse_stored(body), children, Facts(), body.get("status") or {})
