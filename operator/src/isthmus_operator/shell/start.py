"""What must hold before the operator begins: its ports are free, and the API server answers, knows our kinds and may be
read."""

from __future__ import annotations

import asyncio
import logging
import socket

from ..api.v1alpha1 import API_VERSION, PLURAL
from ..errors import ApiError, UserError
from .client import Api
from .watched import UNREADABLE, WATCHED

_log = logging.getLogger(__name__)
RIGHTS_S = 20.0
"""How long rights and CRDs may take to come into force after they were given, or after the API server has begun."""
MOST_PAUSE_S = 5.0
"""Between two looks for the API server: until it is found, nobody validates specs."""


def require_port(flag: str, host: str, port: int) -> None:
    """Before anything is started: kopf would tell of a port in use by a traceback. Port 0 is any free one, or none.
    UserError names the flag."""
    if not port:
        return
    try:
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # as it will be listened on
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(address)
    except OSError as error:
        raise UserError(
            f"{flag} {port}: cannot listen on {host} port {port}: {error.strerror}; give another port"
        ) from error


async def require_cluster(api: Api, namespaces: tuple[str, ...]) -> None:
    """Return when the API server answers, knows our kinds and lets us read what we watch.

    UserError or ApiError where it goes on answering that it does not.
    """
    loop = asyncio.get_running_loop()
    refused: float | None = None
    pause = 1.0
    while True:
        try:
            await _require_kinds(api)
            await _require_rights(api, namespaces)
            return
        except (UserError, ApiError) as error:
            if isinstance(error, ApiError) and (error.status in (0, 429) or error.status >= 500):
                refused = None
            else:
                refused = refused or loop.time()
                if loop.time() - refused > RIGHTS_S:
                    raise
            # An API server that has just started itself answers so for a moment.
            (_log.info if pause < 4 else _log.warning)("cannot start yet: %s", error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, MOST_PAUSE_S)


async def _require_kinds(api: Api) -> None:
    found = await api.find(f"/apis/{API_VERSION}")
    kinds = {resource["name"] for resource in (found or {}).get("resources", ())}
    missing = [name for name in (PLURAL, "rolescalers") if name not in kinds]
    if missing:
        raise UserError(f"the API server does not know {', '.join(missing)} of {API_VERSION}; apply the files of crds/")


async def _require_rights(api: Api, namespaces: tuple[str, ...]) -> None:
    """A watch without the right to it would leave the operator deaf. One namespace of several may refuse it without
    harm to the others: whoever administers it can."""
    refused: dict[str, list[str]] = {}
    for kind in WATCHED:
        for namespace in namespaces:
            try:
                await api.get(kind.path(namespace), **kind.page(1))
            except ApiError as error:
                if error.status not in UNREADABLE:
                    raise
                refused.setdefault(namespace, []).append(str(error))
    if len(refused) == len(namespaces):
        every = "; ".join(one for found in refused.values() for one in found)
        raise ApiError(403, f"cannot read the objects it watches: {every}; see operator/docs/rbac.md")
    for namespace, found in refused.items():
        _log.warning("namespace %s is not looked after: %s", namespace, "; ".join(found))
