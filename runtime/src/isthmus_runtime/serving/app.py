"""The FastAPI application that routes are added to: errors in OpenAI's form, limits, CORS, documentation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from ..credentials import Credentials
from ..errors import EngineFailed, InvalidRequest, RequestError, unforeseen
from ..threads import running_pool
from .access import PeersOnly
from .call import Calls, error_response
from .limits import BodyLimit

_M = TypeVar("_M", bound=BaseModel)

MAX_PUBLIC_BODY = 16 << 20
MAX_INTERNAL_BODY = 64 << 20
"""A million-token prompt is about 7 MB of JSON."""
_OFF_LOOP_BYTES = 64 << 10
_REF = "#/components/schemas/{model}"


class ErrorDetail(BaseModel):
    """What went wrong. Where it is known, the stage and the attempt it happened in."""

    message: str
    type: str
    param: str | None
    code: str | None
    stage: str | None = None
    attempt: str | None = None
    retry_after: float | None = None


class ErrorAnswer(BaseModel):
    """Every answer but a 2xx."""

    error: ErrorDetail


class Version(BaseModel):
    """Version of this software."""

    version: str


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that may answer with these, beside those that the server gives."""
    return {status: {"model": ErrorAnswer} for status in (*statuses, 400, 408, 413, 415, 431, 500, 503)}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads a `model` by itself. FastAPI's own way parses twice; see docs/adr."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@cache
def _parser() -> ThreadPoolExecutor:
    """Parses large bodies of calls, one at a time: each holds the interpreter's lock, and hundreds of them at once
    would leave nothing for what else the loop has to do."""
    return running_pool(1, "calls")


async def read_model(request: Request, model: type[_M]) -> _M:
    """The body of an internal call; a large one is parsed off the loop. InvalidRequest names the first problem."""
    raw = await request.body()
    try:
        if len(raw) > _OFF_LOOP_BYTES:
            return await asyncio.get_running_loop().run_in_executor(_parser(), model.model_validate_json, raw)
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise InvalidRequest(f"{request.url.path}: {where}: {first['msg']}", param=where) from error


def model_response(answer: BaseModel) -> Response:
    """A 200 with `answer`, without FastAPI's second look at it."""
    return Response(answer.model_dump_json().encode(), media_type="application/json")


class _App(FastAPI):
    """Calls go past what FastAPI has around a route (errors, dependencies, telemetry, a body limit of its own), all of
    which they do by themselves or not at all: 7% of what a plain answer costs a router. Our own middleware stays."""

    _calls = Calls(())
    _short: ASGIApp = _calls
    """What calls go through. None goes before the application has started, which makes it."""

    def build_middleware_stack(self) -> ASGIApp:
        """Of starlette, when the application starts."""
        whole = super().build_middleware_stack()
        self._short = self._calls = Calls(self.routes)
        for made, args, kwargs in reversed(self.user_middleware):
            self._short = made(self._short, *args, **kwargs)
        return whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        if self._calls.has(scope):
            await self._short(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def make_app(
    title: str,
    *,
    bodies: Sequence[type[BaseModel]],
    lifespan: Lifespan[FastAPI] | None = None,
    cors_origins: Sequence[str] = (),
    max_body_bytes: int = MAX_PUBLIC_BODY,
    credentials: Credentials | None = None,
) -> FastAPI:
    """An application without routes of its own; `add_pages` adds those that every role has, after all others.

    Args:
        bodies: the models that routes name by `json_body`.
        cors_origins: of web pages that may call it from a browser; "*" for all, none by default.
        max_body_bytes: of a body outside /internal/.
        credentials: by which callers of /internal/ are known; None: nobody is asked.
    """
    app = _App(
        title=title,
        version=version("isthmus-runtime"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # ours is /metrics
    )
    _parser()  # a thread that is made when there is no memory left may keep the event loop waiting for ever
    app.add_exception_handler(RequestError, _ours)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unforeseen)
    app.add_middleware(BodyLimit, public=max_body_bytes, internal=MAX_INTERNAL_BODY)
    if credentials is not None:
        app.add_middleware(PeersOnly, credentials=credentials)  # before any body is read
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    generate = app.openapi

    def with_bodies() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            modes: list[tuple[type[BaseModel], Literal["validation"]]] = [(model, "validation") for model in bodies]
            _, found = models_json_schema(modes, ref_template=_REF)
            document.setdefault("components", {})["schemas"].update(found.get("$defs", {}))
        return generate()

    app.openapi = with_bodies  # type: ignore[method-assign]
    return app


def add_pages(app: FastAPI) -> None:
    """/version, /openapi.json, and /docs with files of this installation."""

    @app.get("/version", tags=["server"])
    async def get_version() -> Version:
        return Version(version=app.version)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        return app.openapi()

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=app.title,
            swagger_js_url="docs-files/swagger-ui-bundle.js",
            swagger_css_url="docs-files/swagger-ui.css",
            swagger_favicon_url="docs-files/favicon.png",
        )

    app.mount("/docs-files", StaticFiles(packages=[("fastapi_offline", "static")]))


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _plain(error.status_code, f"{request.method} {request.url.path}: {error.detail}", error.headers or {})


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return error_response(InvalidRequest(f"{param}: {first['msg']}", param=param))


async def _unforeseen(request: Request, error: Exception) -> Response:
    return error_response(unforeseen(error))


def _plain(status: int, message: str, headers: Mapping[str, str]) -> Response:
    """For what has no class in the error tree: 404, 405."""
    error = InvalidRequest(message) if status < 500 else EngineFailed(message)
    error.status = status
    response = error_response(error)
    response.headers.update(headers)
    return response
