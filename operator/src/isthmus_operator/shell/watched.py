"""The kinds that are watched, and the list of all there is of them.

kopf reports every change. It does not say when its first list is complete, nor what was deleted while it was
disconnected for longer than the API server remembers. `look` finds that out, before the first decision and from time to
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from ..api.v1alpha1 import GROUP, PLURAL, VERSION
from ..render.names import SERVICE_LABEL
from .cache import Cache
from .client import Api

PAGE = 10
"""Objects of a list that are asked for at once. Each may have a megabyte as JSON."""
UNREADABLE = (401, 403, 404)
"""HTTP statuses that say that a kind may not be read; others are of the API server's own state, and pass."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What to watch. group: empty for the core API; selector: of labels; empty for all objects."""

    group: str
    version: str
    plural: str
    selector: str = SERVICE_LABEL

    def path(self, namespace: str) -> str:
        """URL path of the collection, of all namespaces when `namespace` is empty."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{namespace}/{self.plural}" if namespace else f"{root}/{self.plural}"

    def page(self, size: int) -> dict[str, str]:
        """Query of a list's first page."""
        return {"limit": str(size)} | ({"labelSelector": self.selector} if self.selector else {})


WATCHED = (
    Kind(GROUP, VERSION, PLURAL, selector=""),
    Kind("apps", "v1", "deployments"),
    Kind("apps", "v1", "statefulsets"),
    Kind("", "v1", "services"),
    Kind("", "v1", "configmaps"),
    Kind("", "v1", "pods"),
    Kind("policy", "v1", "poddisruptionbudgets"),
    Kind("networking.k8s.io", "v1", "networkpolicies"),
    Kind(GROUP, VERSION, "rolescalers"),
)


async def look(api: Api, namespaces: Iterable[str], cache: Cache, *, pause: float = 0.0) -> None:
    """List every kind in pages, and tell the cache of all objects and of what is not there. `namespaces`: an empty one
    is all of them; pause: seconds after each page, for everybody else's turn, and then one kind after the other, else
    all beside each other. ApiError leaves what was told until then.
    """
    for namespace in namespaces:
        if pause:
            for kind in WATCHED:
                await _list(api, kind, namespace, cache, pause)
            continue
        lists = (_list(api, kind, namespace, cache, 0.0) for kind in WATCHED)
        for ended in await asyncio.gather(*lists, return_exceptions=True):
            if ended is not None:
                raise ended


async def _list(api: Api, kind: Kind, namespace: str, cache: Cache, pause: float) -> None:
    query = kind.page(PAGE)
    present: set[str] = set()
    while True:
        page = await api.page(kind.path(namespace), **query)
        name, after = page["kind"].removesuffix("List"), page["metadata"]
        for item in page["items"]:
            present.add(item["metadata"]["uid"])
            # Items of a list do not name their own kind.
            cache.changed({"apiVersion": page["apiVersion"], "kind": name, **item})
            del item
        del page  # maybe 20 MB, which the next page, and those of other kinds, would be beside
        if not after.get("continue"):
            break
        query["continue"] = after["continue"]
        await asyncio.sleep(pause)
    cache.absent(name, namespace, present, int(after["resourceVersion"]))
