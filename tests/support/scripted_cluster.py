"""An API server as far as watches and a lease need one: it lists, tells, breaks off, forgets and refuses as told."""

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from ended import end

GROUP = "serving.isthmus.dev"
KINDS = {
    "v1": {"namespaces": "Namespace", "pods": "Pod", "services": "Service", "configmaps": "ConfigMap"},
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "apiextensions.k8s.io/v1": {"customresourcedefinitions": "CustomResourceDefinition"},
    f"{GROUP}/v1alpha1": {"inferenceservices": "InferenceService", "rolescalers": "RoleScaler"},
}
Object = dict[str, Any]


def resources(version: str) -> Object:
    verbs = ["get", "list", "watch", "patch"]
    found = [
        {"name": name, "kind": kind, "singularName": "", "namespaced": True, "verbs": verbs}
        for name, kind in KINDS[version].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": found}


def groups() -> Object:
    found = []
    for version in KINDS:
        if "/" in version:
            one = {"groupVersion": version, "version": version.partition("/")[2]}
            found.append({"name": version.partition("/")[0], "versions": [one], "preferredVersion": one})
    return {"kind": "APIGroupList", "groups": found}


class ScriptedCluster:
    """Runs in a thread of its own, as kopf cancels what it does not know in its loop.

    refuse: the status of every answer, 0 for none, 200 for a page of HTML; forbidden: namespaces that may not be read;
    meeting: lists that are answered together;
    writes: requests that were not reads, but for the lease's
    """

    def __init__(self) -> None:
        self.version = 10
        self.objects: dict[str, dict[str, Object]] = {plural: {} for kinds in KINDS.values() for plural in kinds}
        self.queries: list[tuple[str, dict[str, str]]] = []
        self.writes: list[str] = []
        self.refuse: int | None = None
        self.forbidden: set[str] = set()
        self.too_old = 0
        self.meeting: asyncio.Barrier | None = None
        self.lease: Object | None = None
        self._watches: dict[web.StreamResponse, tuple[str, web.Request]] = {}
        self._loop = asyncio.new_event_loop()

    @contextmanager
    def running(self, folder: Path) -> Iterator[Path]:
        """Yields a kubeconfig."""
        app = web.Application()
        app.add_routes([web.route("*", "/{path:.*}", self._answer)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        thread = threading.Thread(target=self._loop.run_forever)
        thread.start()
        try:
            yield self._listening(folder, runner)
        finally:
            self._there(end(runner))
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    def _there(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _listening(self, folder: Path, runner: web.AppRunner) -> Path:
        self._there(runner.setup())
        self._there(web.TCPSite(runner, "127.0.0.1", 0).start())
        cluster = {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}
        config = {
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    # ------------------------------------------------------------------------------------------ what a test directs

    def put(self, plural: str, name: str, **more: Any) -> Object:
        """Make or change an object of the service, unheard."""
        self.version += 1
        meta = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": str(self.version)}
        owner = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "InferenceService", "name": "svc", "uid": "uid-svc"}
        meta |= {"labels": {f"{GROUP}/service": "svc"}, "ownerReferences": [owner]}
        body = {"metadata": meta, **more}
        self.objects[plural][name] = body
        return body

    def drop(self, plural: str, name: str) -> Object:
        """Delete an object, unheard."""
        self.version += 1
        body = self.objects[plural].pop(name)
        return {**body, "metadata": body["metadata"] | {"resourceVersion": str(self.version)}}

    def tell(self, plural: str, event: str, body: Object) -> None:
        """Of a change, whoever watches."""
        self._there(self._tell(plural, event, body))

    def say(self, plural: str, line: bytes) -> None:
        """To whoever watches, and end it."""
        self._there(self._say(plural, line))

    async def _say(self, plural: str, line: bytes) -> None:
        for response, (watched, request) in list(self._watches.items()):
            if watched == plural:
                await response.write(line)
                await response.write_eof()
                assert request.transport is not None
                request.transport.close()
                self._watches.pop(response)

    def fail(self, plural: str, code: int) -> None:
        """Its watches, by an event, as where etcd has lost its leader."""
        self._there(self._tell(plural, "ERROR", {"kind": "Status", "code": code, "message": "no leader"}))

    async def _tell(self, plural: str, event: str, body: Object) -> None:
        version, kind = next((v, kinds[plural]) for v, kinds in KINDS.items() if plural in kinds)
        line = json.dumps({"type": event, "object": {"apiVersion": version, "kind": kind, **body}}).encode() + b"\n"
        for response, (watched, _) in list(self._watches.items()):
            if watched == plural:
                await response.write(line)

    def break_off(self) -> None:
        """Every watch."""
        self._there(self._break_off())

    async def _break_off(self) -> None:
        for _, request in self._watches.values():
            if request.transport is not None:
                request.transport.abort()
        self._watches.clear()

    @property
    def watches(self) -> int:
        """How many are open."""
        return len(self._watches)

    # ------------------------------------------------------------------------------------------------------ answers

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.strip("/")
        plural = path.rpartition("/")[2]
        self.queries.append((plural, dict(request.query)))
        if "/leases" in path:
            # Rights to it are granted apart from those to what is watched.
            return await self._lease(request)
        if self.refuse == 0:
            assert request.transport is not None
            request.transport.abort()
        if self.refuse == 200:
            return web.Response(text="<html>Please log in</html>\n", content_type="text/html")
        if self.refuse is not None:
            return web.json_response({"kind": "Status", "message": "no"}, status=self.refuse or 500)
        if any(f"/namespaces/{namespace}/" in request.path for namespace in self.forbidden):
            return web.json_response({"kind": "Status", "message": "no"}, status=403)
        if request.method != "GET":
            self.writes.append(f"{request.method} {request.path}")
            return web.json_response({"message": "no writes here"}, status=405)
        if plural in self.objects:
            return await (self._watch if "watch" in request.query else self._list)(request, plural)
        if path == "api":
            return web.json_response({"kind": "APIVersions", "versions": ["v1"]})
        if path == "apis":
            return web.json_response(groups())
        version = path.removeprefix("apis/").removeprefix("api/")
        if path == ".well-known/openid-configuration":
            return web.json_response({"issuer": "https://scripted"})
        if path == "openid/v1/jwks":
            if "*/*" not in request.headers["Accept"]:  # as a real one says
                return web.Response(text="406: Not Acceptable", status=406)
            found = json.dumps({"keys": [{"kty": "EC", "kid": "k1"}]})
            return web.Response(text=found, content_type="application/jwk-set+json")
        if version in KINDS:
            return web.json_response(resources(version))
        return web.json_response({"message": "not found"}, status=404)

    async def _list(self, request: web.Request, plural: str) -> web.StreamResponse:
        version, kind = next((v, kinds[plural]) for v, kinds in KINDS.items() if plural in kinds)
        if self.meeting is not None:
            await asyncio.wait_for(self.meeting.wait(), 10)
        start, size = int(request.query.get("continue") or 0), int(request.query.get("limit") or 10**6)
        items = [*self.objects[plural].values()]
        more = str(start + size) if start + size < len(items) else ""
        meta = {"resourceVersion": str(self.version), "continue": more}
        page = items[start : start + size]
        return web.json_response({"kind": f"{kind}List", "apiVersion": version, "metadata": meta, "items": page})

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if int(request.query["resourceVersion"]) < self.too_old:
            error = {"kind": "Status", "code": 410, "message": "too old resource version", "metadata": {}}
            await response.write(json.dumps({"type": "ERROR", "object": error}).encode() + b"\n")
            return response
        self._watches[response] = plural, request
        try:
            await asyncio.Event().wait()
        finally:
            self._watches.pop(response, None)
        return response

    async def _lease(self, request: web.Request) -> web.StreamResponse:
        if self.refuse == 200:
            return web.Response(text="<html>Please log in</html>", content_type="text/html")
        if request.method in ("POST", "PUT"):
            self.lease = await request.json()
        if self.lease is None:
            return web.json_response({"message": "not found"}, status=404)
        return web.json_response(self.lease)
