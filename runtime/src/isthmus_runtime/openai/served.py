"""Which models are served: the model itself under its names, its adapters, and for which task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..errors import InvalidRequest, Overloaded, UnknownModel
from ..interfaces.backend import Backend
from ..request import AdapterName

_ROUTES: Mapping[str, str] = MappingProxyType(
    {
        "generate": "/v1/chat/completions, /v1/completions, /v1/responses and /v1/messages",
        "embed": "/v1/embeddings, and by the vectors' cosine /v1/rerank and /v1/score",
        "score": "/v1/rerank and /v1/score",
    }
)
"""What a model answers, by the task that it is served for."""


class Served:
    """What a request's `model` may be."""

    def __init__(
        self, backend: Backend, names: tuple[str, ...], adapters: Callable[[], Mapping[str, AdapterName]]
    ) -> None:
        """`adapters` that may be named as the model, at present."""
        self._backend = backend
        self._names = names
        self._adapters = adapters

    def admit(self, model: str, *tasks: str) -> int:
        """The length limit of a request for one of these tasks. Raises when the model is not ours or is served for
        another task, or no engine could serve it yet: the limit is known from the first engine on. Whether one can
        serve it now is the backend's to say, which may wait for it."""
        if self.adapter(model) is not None and tasks != ("generate",):
            raise InvalidRequest(f"model: {model!r} is an adapter, and adapters only generate here", param="model")
        limit = self._limit()
        kind = self._backend.task.kind
        if kind not in tasks:
            raise InvalidRequest(
                f"model: {model or self._names[0]} is served with --task {kind}, and this needs {' or '.join(tasks)}; "
                f"it answers {_ROUTES[kind]}",
                param="model",
            )
        return limit

    def named(self, model: str) -> str:
        """The name that an answer tells, of a request for `model`."""
        return model or self._names[0]

    def check(self, name: str) -> None:
        """Raises UnknownModel; "" is the model that is served."""
        self.adapter(name)

    def adapter(self, name: str) -> AdapterName | None:
        """The adapter of that name; None for the model itself. Raises UnknownModel, and Overloaded before any engine is
        known."""
        if not name or name in self._names:
            return None
        adapters = self._adapters()
        if name not in adapters:
            self._limit()
            served = ", ".join((*self._names, *sorted(adapters)))
            raise UnknownModel(f"model: {name!r} is not served here; served: {served}", param="model")
        return adapters[name]

    def _limit(self) -> int:
        limit = self._backend.max_model_len
        if not limit:
            reason = self._backend.ready() or "the length limit is not known yet"
            raise Overloaded(f"not ready: {reason}", retry_after_s=1.0)
        return limit
