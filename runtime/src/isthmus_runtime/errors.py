"""The one error tree. Each class fixes the HTTP status and OpenAI error type it ends a request with.

IsthmusError
├── ConfigError (ValueError)         start-up refused: a flag, a file, a number
│   ├── PlanError                    the KV arithmetic says no (`code` tells which rule)
│   └── WeightsError                 model files missing, corrupt or unsupported
└── RequestError                     ends exactly one request
    ├── InvalidRequest (ValueError)  400, names the parameter
    │   ├── UnknownModel             404
    │   └── NeverFits                400, context_length_exceeded
    ├── Unauthenticated              401: an internal route, and no valid credential of this service
    ├── AccessDenied                 403: the same, and a valid credential of another one
    ├── Overloaded                   429 or 503 with Retry-After
    │   └── MemoryShort              503: the process nears the limit of its memory
    ├── TransferFailed               502 with stage and attempt
    ├── DeadlineExceeded             504
    ├── Cancelled                    499: the client left or the request was aborted
    └── EngineFailed                 500
        └── EngineLost               502, names the engine
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Sequence
from typing import Self

_SHORT_OF = {
    errno.EMFILE: "descriptors (raise RLIMIT_NOFILE)",
    errno.ENFILE: "descriptors on its node",
    errno.ENOMEM: "memory or threads (raise its limits)",
    errno.ENOSPC: "room on a disk",
}
_NO_THREAD = "can't start new thread"
"""A RuntimeError of Python's without a class of its own: there is no memory for a stack, or the limit on processes is
reached, which containers seldom have."""
_MOST_TEXT = 2000
"""Characters of a message that reaches a client: it may name what the client sent, at whatever length."""


def _bounded(text: str) -> str:
    if len(text) > _MOST_TEXT:
        text = f"{text[:_MOST_TEXT]} ... ({len(text)} characters)"
    # Files and names may hold half a character, which no answer can.
    return text.encode("utf-8", "backslashreplace").decode()


class IsthmusError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(IsthmusError, ValueError):
    """Start-up is refused. `problems` holds every finding, each naming field, value and fix."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class PlanError(ConfigError):
    """The KV plan is impossible; `code` is stable and machine-readable (for example `no_memory`)."""

    def __init__(self, code: str, message: str | Sequence[str]) -> None:
        self.code = code
        super().__init__(message)


class WeightsError(ConfigError):
    """Model files are missing, corrupt or of an unsupported kind."""


class RequestError(IsthmusError):
    """Ends one request. `status` is HTTP, `kind` the OpenAI `error.type`, `code` the OpenAI `error.code`.

    `stage` and `attempt` say where it failed: everything that reaches a client has both, except refusals of what it
    asked (InvalidRequest). What failed outside any attempt carries the request's own id as `attempt`.
    """

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        stage: str | None = None,
        attempt: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        message = _bounded(message)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else _bounded(param)
        self.stage = stage
        self.attempt = attempt
        self.retry_after_s = retry_after_s

    def located(self, stage: str, attempt: str | None) -> Self:
        """A copy that says where it failed; what the error says already is kept. One error may end many requests."""
        error = copy.copy(self)
        error.stage = self.stage or stage
        error.attempt = self.attempt or attempt or None
        return error

    def to_json(self) -> dict[str, object]:
        """The error as it travels between router and engine and inside an SSE stream."""
        body: dict[str, object] = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        if self.stage is not None:
            body["stage"] = self.stage
        if self.attempt is not None:
            body["attempt"] = self.attempt
        if self.retry_after_s is not None:
            body["retry_after"] = self.retry_after_s
        return body


class InvalidRequest(RequestError, ValueError):
    """The client asked for something impossible; `param` names the offending field."""

    status = 400
    kind = "invalid_request_error"

    def located(self, stage: str, attempt: str | None) -> Self:
        """The same: what is wrong is the request, wherever that is noticed. A copy, as it is raised from itself."""
        return copy.copy(self)


class UnknownModel(InvalidRequest):
    """The `model` field names no served model."""

    status = 404
    code = "model_not_found"


class NeverFits(InvalidRequest):
    """The prompt and its output can never fit the KV pool or the model's length limit."""

    code = "context_length_exceeded"


class Unauthenticated(RequestError):
    """An internal route was called without a valid credential."""

    status = 401
    kind = "authentication_error"
    code = "unauthenticated"


class AccessDenied(RequestError):
    """An internal route was called with a credential that is valid elsewhere."""

    status = 403
    kind = "permission_error"
    code = "access_denied"


class Overloaded(RequestError):
    """No capacity now. Carries Retry-After; 429 when a queue is full, 503 when no engine can serve."""

    status = 503
    kind = "overloaded_error"
    code = "overloaded"

    def __init__(self, message: str, *, status: int = 503, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.status = status


class MemoryShort(Overloaded):
    """The process nears the limit of its memory. Another one of its kind may have more."""

    code = "memory_short"


class TransferFailed(RequestError):
    """KV did not arrive whole. `stage` is the leg state it failed in, `attempt` the attempt id."""

    status = 502
    code = "kv_transfer_failed"


class DeadlineExceeded(RequestError):
    """A waiting state ran past its deadline."""

    status = 504
    code = "deadline_exceeded"


class Cancelled(RequestError):
    """The client disconnected or asked for the abort."""

    status = 499
    code = "cancelled"


class EngineFailed(RequestError):
    """The engine broke while it held the request."""

    code = "engine_failed"


class EngineLost(EngineFailed):
    """The router lost an engine that held the request: it died, froze, or cannot be reached."""

    status = 502
    code = "engine_lost"


_BY_CODE: dict[str, type[RequestError]] = {
    cls.code: cls
    for cls in (UnknownModel, NeverFits, TransferFailed, DeadlineExceeded, Cancelled, EngineFailed, EngineLost)
    if cls.code is not None
}


def error_from_json(status: int, body: dict[str, object]) -> RequestError:
    """Rebuild the error a peer reported, so that status, parameter, stage and attempt survive the hop."""
    message = str(body.get("message", f"peer answered HTTP {status} without a message"))
    code = body.get("code")
    retry = body.get("retry_after")
    param, stage, attempt = (v if isinstance(v := body.get(k), str) else None for k in ("param", "stage", "attempt"))
    if code == Overloaded.code or status in (429, 503):
        delay = float(retry) if isinstance(retry, (int, float)) else 1.0
        kind = MemoryShort if code == MemoryShort.code else Overloaded
        overloaded = kind(message, status=status if status in (429, 503) else 503, retry_after_s=delay)
        overloaded.stage, overloaded.attempt = stage, attempt
        return overloaded
    cls = _BY_CODE.get(str(code)) if code else None
    if cls is None:
        cls = InvalidRequest if status == 400 else EngineFailed
    return cls(message, param=param, stage=stage, attempt=attempt)


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust has given up: what it raises then is no Exception."""
    return type(error).__name__ == "PanicException"


def unforeseen(error: BaseException) -> RequestError:
    """What ends a request that met `error`, which is none of ours: its cause where the process ran out of something,
    which another try may find there, and otherwise no more than that it is in the log."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or str(error) == _NO_THREAD:
        number = errno.ENOMEM
    if number in _SHORT_OF:
        return Overloaded(f"this process has run out of {_SHORT_OF[number]}; retry later")
    if is_panic(error):
        return EngineFailed(f"a library of this process has failed: {error}")
    return EngineFailed("internal error; the log of this process has the details")
