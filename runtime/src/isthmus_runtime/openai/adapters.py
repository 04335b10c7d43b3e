"""vLLM's routes for adapters: load one under a name, unload it.

A change has every engine read files, or forget what requests of others use: how often one client may ask for that is
bounded, and how many changes run at a time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from ..errors import InvalidRequest, Overloaded
from ..serving.app import errors, json_body
from .bodies import json_object, parsed
from .tenants import MAX_TENANTS, Tenant, TokenBucket

CHANGES_PER_SECOND = 1.0
CHANGES_AT_ONCE = 30.0
"""After a pause, by one client: as many as a script loads when it starts."""
MOST_RUNNING = 4
"""Changes of all clients that run at a time."""
_MOST_BYTES = 64 << 10
"""Of a body, which holds a name and a path."""


class ChangeAdapter(Protocol):
    """Has one, or has it no more."""

    def __call__(self, name: str, path: str | None, *, replace: bool = False) -> Awaitable[None]:
        """`path` None: unload. Raises RequestError."""


class LoadAdapter(BaseModel):
    """Have an adapter."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=256)
    """What requests call it."""
    lora_path: str = Field(min_length=1, max_length=4096)
    """Where it is in the engines' folder of adapters."""
    load_inplace: bool = False
    """Replace one of this name."""


class UnloadAdapter(BaseModel):
    """Have it no more."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = None
    """Not used: names are unique."""


BODIES: tuple[type[BaseModel], ...] = (LoadAdapter, UnloadAdapter)
"""What `make_app` has to know for the document."""


class ChangeBudget:
    """Bounds changes of adapters: of each tenant, or of all who share the one key or need none. Pure."""

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}
        """By the tenant's name, the latest last."""
        self._running = 0

    def admit(self, tenant: Tenant | None, now: float) -> None:
        """Count a change asked for at `now` (monotonic). Raises Overloaded (429) above the client's rate."""
        name = "" if tenant is None else tenant.name
        bucket = self._buckets.pop(name, None) or TokenBucket(CHANGES_PER_SECOND, CHANGES_AT_ONCE, now)
        self._buckets[name] = bucket
        if len(self._buckets) > MAX_TENANTS:
            # Tenants come and go. The bucket of who has asked for nothing for longest is full again, or nearly.
            del self._buckets[next(iter(self._buckets))]
        if wait := bucket.take(now):
            raise Overloaded(
                f"adapters may be changed {CHANGES_AT_ONCE:g} times at once and {CHANGES_PER_SECOND:g} time a second; "
                f"try again in {wait:.3g} s",
                status=429,
                retry_after_s=wait,
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block in which a change runs. Raises Overloaded (429) while as many run as may."""
        if self._running >= MOST_RUNNING:
            raise Overloaded(
                f"{self._running} changes of adapters run, and no more may; try again when one has ended",
                status=429,
                retry_after_s=1.0,
            )
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


_M = TypeVar("_M", bound=BaseModel)


async def _asked(request: Request, model: type[_M]) -> _M:
    body = await request.body()
    if len(body) > _MOST_BYTES:
        raise InvalidRequest(f"the body has {len(body)} bytes; a name and a path are at most {_MOST_BYTES}")
    return parsed(model, json_object(body), {})


def add_adapter_routes(
    app: FastAPI,
    check: Callable[[Request], Tenant | None],
    change: ChangeAdapter,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Add /v1/load_lora_adapter and /v1/unload_lora_adapter. `check` guards them and says whose request it is."""
    budget = ChangeBudget()

    async def load(request: Request) -> PlainTextResponse:
        """Load an adapter from the folder of adapters."""
        budget.admit(check(request), clock())
        body = await _asked(request, LoadAdapter)
        with budget.running():
            await change(body.lora_name, body.lora_path, replace=body.load_inplace)
        return PlainTextResponse(f"adapter {body.lora_name} is loaded")

    async def unload(request: Request) -> PlainTextResponse:
        """Unload an adapter: its requests that run end with it, new ones are refused."""
        budget.admit(check(request), clock())
        body = await _asked(request, UnloadAdapter)
        with budget.running():
            await change(body.lora_name, None)
        return PlainTextResponse(f"adapter {body.lora_name} is unloaded")

    for path, endpoint, body in (
        ("/v1/load_lora_adapter", load, LoadAdapter),
        ("/v1/unload_lora_adapter", unload, UnloadAdapter),
    ):
        app.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            tags=["adapters"],
            response_class=Response,  # of no type: errors are JSON, and what is done is told as text
            openapi_extra=json_body(body),
            responses={**errors(401, 404, 429, 502), 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
        )
