"""The Kubernetes API as this operator uses it: plain objects in and out, by `kubernetes.aio`'s dynamic client.

Every request has a deadline. Errors are `ApiError`, with the server's own message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.request import getproxies

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, ApiException, Configuration
from kubernetes.aio.dynamic import DynamicClient
from yaml import YAMLError

from ..errors import ApiError
from ..plan.ownership import FIELD_MANAGER
from ..settings import identity
from .answers import Reader

REQUEST_TIMEOUT_S = 15.0
SERVED_S = 3.0
SKEW_S = 5.0
"""Clocks that differ by less agree: a Date has whole seconds, and an answer takes a while."""

_UNREADABLE = (config.ConfigException, OSError, YAMLError, ValueError, TypeError, LookupError, AttributeError)
"""What the reader of kubeconfigs raises: where one is no YAML, or of another shape, whatever its code then meets."""

_log = logging.getLogger(__name__)

PLURALS = {
    "ConfigMap": "configmaps",
    "Deployment": "deployments",
    "Event": "events",
    "HTTPRoute": "httproutes",
    "InferenceService": "inferenceservices",
    "Lease": "leases",
    "NetworkPolicy": "networkpolicies",
    "Pod": "pods",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "PodMonitor": "podmonitors",
    "RoleScaler": "rolescalers",
    "Service": "services",
    "StatefulSet": "statefulsets",
}
"""Kinds this operator reads or writes, and their names in URLs."""

FORBIDDEN = 403
NOT_FOUND = 404
CONFLICT = 409
TOO_SLOW = 408
INVALID = 422


async def connect(kubeconfig: str = "", context: str = "") -> Api:
    """A connection: to the cluster this process runs in, or by a kubeconfig file. The caller closes it.

    `kubeconfig` empty: inside a cluster its own service account, elsewhere the usual file. ApiError says what is wrong.
    """
    if not (path := _usual(kubeconfig)).is_file() and (kubeconfig or not identity().namespace):
        where = (
            "is no file"
            if path.exists()
            else "does not exist"
            if kubeconfig
            else "does not exist, and this process is not in a pod"
        )
        raise ApiError(0, f"kubeconfig {path} {where}; give --kubeconfig, or set KUBECONFIG")
    configuration = Configuration()
    # How many requests run at once is decided by who makes them.
    configuration.connection_pool_maxsize = 0
    # Where there is no proxy, aiohttp would read ~/.netrc for each request, in a thread.
    configuration.client_session_kwargs = {"trust_env": bool(getproxies())}
    try:
        if kubeconfig:
            await config.load_kube_config(kubeconfig, context or None, configuration)
        else:
            try:
                config.load_incluster_config(client_configuration=configuration)
            except config.ConfigException:
                await config.load_kube_config(None, context or None, configuration)
    except _UNREADABLE as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ApiError(0, f"no usable cluster configuration, kubeconfig {path}: {what}; set KUBECONFIG") from error
    return Api(ApiClient(configuration=configuration))


def default_namespace(kubeconfig: str = "", context: str = "") -> str:
    """Where kubectl would look without -n: the context's namespace, inside a cluster the pod's, or `default`.

    Arguments as of `connect`, which names what is wrong with a file.
    """
    if not kubeconfig and (own := identity().namespace):
        return own
    if not _usual(kubeconfig).is_file():
        return "default"
    try:
        contexts, active = config.list_kube_config_contexts(kubeconfig or None)
    except _UNREADABLE:
        return "default"
    chosen = next((one for one in contexts if one["name"] == context), None) if context else active
    return str(((chosen or {}).get("context") or {}).get("namespace") or "default")


def _usual(kubeconfig: str) -> Path:
    return Path(kubeconfig).expanduser() if kubeconfig else Path.home() / ".kube" / "config"


def path_of(api_version: str, kind: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """URL path of an object or a collection."""
    root = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
    parts = [root, *(("namespaces", namespace) if namespace else ()), PLURALS[kind], name, subresource]
    return "/".join(part for part in parts if part)


class Api:
    """One connection to an API server. reader: of its answers, and of those that kopf gets."""

    def __init__(self, client: ApiClient) -> None:
        self.reader = Reader()
        self._client = DynamicClient(client)
        self._served: dict[str, tuple[float, frozenset[str]]] = {}
        self._asking = asyncio.Lock()
        self._ahead = 0.0

    def now(self) -> float:
        """Seconds since the epoch by the API server's clock, as of its last answer. Times of objects are by it: to
        a clock that is ahead every pod would be late."""
        return time.time() - self._ahead

    def _set_clock(self, date: str) -> None:
        """`date`: as an answer names it; what is none changes nothing."""
        try:
            ahead = time.time() - parsedate_to_datetime(date).timestamp()
        except ValueError:
            return
        ahead = ahead if abs(ahead) >= SKEW_S else 0.0
        if (ahead == 0.0) is not (self._ahead == 0.0):
            _log.warning("this machine's clock is %.0f s ahead of the API server's, whose is used", ahead)
        self._ahead = ahead

    async def close(self) -> None:
        """Close the connection; idempotent."""
        await self._client.client.close()

    async def credentials(self) -> dict[str, Any]:
        """Server, trust and identity of this connection as of now, for kopf's own."""
        known = self._client.configuration
        token = await known.get_api_key_with_prefix("BearerToken")
        scheme, _, secret = (token or "").partition(" ")
        return {
            "server": known.host,
            "ca_path": known.ssl_ca_cert,
            "ca_data": known.ca_cert_data,
            "insecure": not known.verify_ssl,
            "certificate_path": known.cert_file,
            "private_key_path": known.key_file,
            "scheme": scheme.capitalize() if secret else None,
            "token": secret or scheme or None,
        }

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        """One object, or a list of them."""
        return await self.request("GET", path, query)

    async def page(self, path: str, **query: str) -> dict[str, Any]:
        """A page of a list; ApiError where the answer is none."""
        found = await self.get(path, **query)
        if not isinstance(found.get("items"), list) or not isinstance(found.get("metadata"), dict):
            raise ApiError(0, f"GET {path}: not a list, but {str(found)[:200]}")
        return found

    async def find(self, path: str) -> dict[str, Any] | None:
        """One object, or None if it does not exist."""
        try:
            return await self.get(path)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def serves(self, api_version: str, kind: str) -> bool:
        """Whether the API server knows a kind. What it said is believed for SERVED_S, or until `recheck`."""
        async with self._asking:
            now = asyncio.get_running_loop().time()
            known = self._served.get(api_version)
            if known is None or now - known[0] > SERVED_S:
                found = await self.find(f"/apis/{api_version}")
                kinds = frozenset(resource["kind"] for resource in (found or {}).get("resources") or ())
                known = self._served[api_version] = now, kinds
        return kind in known[1]

    def recheck(self, api_version: str) -> None:
        """Ask about an API anew."""
        self._served.pop(api_version, None)

    async def named(self, api_version: str, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        """One object by its name, with only the right to list; None if it does not exist."""
        page = await self.page(path_of(api_version, kind, namespace), fieldSelector=f"metadata.name={name}")
        # Items of a list do not name their own kind.
        found: list[dict[str, Any]] = [{"apiVersion": api_version, "kind": kind, **item} for item in page["items"]]
        return found[0] if found else None

    async def apply(
        self, manifest: Mapping[str, Any], *, over: Mapping[str, Any] | None = None, subresource: str = ""
    ) -> dict[str, Any]:
        """Server-side apply by our one field manager; the object as it is then.

        over: the live object, which is ours: others' values of our fields yield. Without it there should be none.
        ApiError of status 409 or 422 where something else is in its place.
        """
        meta = manifest["metadata"]
        path = path_of(manifest["apiVersion"], manifest["kind"], meta["namespace"], meta["name"], subresource)
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        if over is not None:
            query["force"] = "true"
            # The server compares it: what was made anew under the same name meanwhile is somebody else's.
            manifest = {**manifest, "metadata": {**meta, "uid": over["metadata"]["uid"]}}
        return await self.request("PATCH", path, query, manifest, "application/apply-patch+yaml")

    async def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """POST; ApiError of status 409 where the name is taken."""
        path = path_of(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["namespace"])
        return await self.request("POST", path, {"fieldManager": FIELD_MANAGER}, manifest)

    async def replace(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """PUT of a whole object; ApiError of status 409 where it has changed since it was read."""
        meta = manifest["metadata"]
        path = path_of(manifest["apiVersion"], manifest["kind"], meta["namespace"], meta["name"])
        return await self.request("PUT", path, {"fieldManager": FIELD_MANAGER}, manifest)

    async def delete(self, live: Mapping[str, Any]) -> bool:
        """Delete this very object, by its uid; False where it is gone or replaced already."""
        meta = live["metadata"]
        path = path_of(live["apiVersion"], live["kind"], meta["namespace"], meta["name"])
        body = {"propagationPolicy": "Background", "preconditions": {"uid": meta["uid"]}}
        try:
            await self.request("DELETE", path, {}, body)
        except ApiError as error:
            if error.status in (NOT_FOUND, CONFLICT):
                return False
            raise
        return True

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """One request and its decoded answer."""
        try:
            # Neither by the library's typed methods, which drop what they do not know, nor by its discovery: the kinds
            # are known.
            answer = await self._client.request(
                method,
                path,
                body=None if body is None else dict(body),
                query_params=list(query.items()),
                # Some answer by a JSON of their own type alone, such as the keys of tokens.
                header_params={"Accept": "application/json, */*;q=0.1"},
                content_type=content_type,
                serialize=False,
                _request_timeout=REQUEST_TIMEOUT_S,
            )
            self._set_clock(answer.headers.get("Date", ""))
            found: dict[str, Any] = await self.reader.read(answer.content)
        except ApiException as error:
            why = f"{method} {path}: HTTP {error.status}: {_message(error.body)}"
            raise ApiError(error.status, why) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"{method} {path}: {type(error).__name__}: {error or 'no answer in time'}"
            raise ApiError(0, why) from error
        return found


def _message(text: str | None) -> str:
    try:
        return str(json.loads(text or "").get("message"))
    except (ValueError, AttributeError):
        return (text or "")[:500]
