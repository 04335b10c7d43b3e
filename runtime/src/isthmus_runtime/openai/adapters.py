"""vLLM's routes for adapters: load one under a name, unload it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from ..serving.app import errors, json_body, read_model


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


def add_adapter_routes(app: FastAPI, check: Callable[[Request], object], change: ChangeAdapter) -> None:
    """Add /v1/load_lora_adapter and /v1/unload_lora_adapter, which `check` guards."""

    async def load(request: Request) -> PlainTextResponse:
        """Load an adapter from the folder of adapters."""
        check(request)
        body = await read_model(request, LoadAdapter)
        await change(body.lora_name, body.lora_path, replace=body.load_inplace)
        return PlainTextResponse(f"adapter {body.lora_name} is loaded")

    async def unload(request: Request) -> PlainTextResponse:
        """Unload an adapter: its requests that run end with it, new ones are refused."""
        check(request)
        body = await read_model(request, UnloadAdapter)
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
            responses={**errors(401, 404, 502), 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
        )
