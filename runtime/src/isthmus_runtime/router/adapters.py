"""Adapters of all engines: what a client asks the router for goes to each of them, and whoever fails is named."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from ..errors import EngineLost, InvalidRequest, Overloaded, RequestError, UnknownModel
from ..protocol.calls import AdapterCall
from .links import LOST, Links, lost
from .pool import EnginePool

_LOG = logging.getLogger(__name__)


class FleetAdapters:
    """Loads and unloads adapters on every engine that is there. An engine that starts later does not have them."""

    def __init__(self, pool: EnginePool, links: Links) -> None:
        self._pool = pool
        self._links = links

    async def change(self, name: str, path: str | None, *, replace: bool = False) -> None:
        """Load the adapter at `path` of the engines' folders; None: unload. Raises InvalidRequest where all engines
        refuse it alike, EngineLost (502) where only some did: where they are is for this process's log alone."""
        roles = {status.url: status.role for status in self._pool.statuses() if status.state == "ready"}
        if not roles:
            raise Overloaded("no engine is ready; ask again when one is")
        call = AdapterCall(name=name, path=path, replace=replace)
        failed = [one for one in await asyncio.gather(*(self._one(url, call) for url in roles)) if one is not None]
        await self._pool.ask_again()  # a request for it may be the client's next
        if path is None and len(failed) < len(roles):
            # As when this is repeated for an engine that failed: the others have unloaded it before.
            failed = [(url, error) for url, error in failed if not isinstance(error, UnknownModel)]
        if not failed:
            return
        for url, error in failed:
            _LOG.warning("adapter %s: %s: %s", name, url, error.message)
        first = failed[0][1]
        if len(failed) == len(roles) and all(isinstance(error, InvalidRequest) for _, error in failed):
            raise first
        told = Counter(
            f"{roles[url]}: {error.message if isinstance(error, InvalidRequest) else 'did not answer or broke'}"
            for url, error in failed
        )
        some = len(failed) < len(roles)
        raise EngineLost(
            f"{len(failed)} of {len(roles)} engines failed, {'the others did it' if some else 'none did it'}; "
            f"repeat this{' for all of them' if some else ''} "
            f"({'; '.join(f'{count} x {text}' for text, count in told.items())}; the router's log names them)",
            stage="adapters",
        )

    async def _one(self, url: str, call: AdapterCall) -> tuple[str, RequestError] | None:
        try:
            await self._links.adapter(url, call)
        except RequestError as error:
            return url, error
        except LOST as e:
            return url, lost("", url, "", e)
        return None
