"""Whose request it is, by the key that came with it."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from fastapi import Request

from ..errors import InvalidRequest
from ..serving.call import authorization
from .tenants import Tenant
from .tenants_file import TenantsFile


class _Unauthorised(InvalidRequest):
    status = 401
    code = "invalid_api_key"


class Keys:
    """The one key of all clients, those of tenants, or none at all."""

    def __init__(self, api_key: str, tenants: TenantsFile | None, clock: Callable[[], float]) -> None:
        """`api_key`: "" for none. `clock`: monotonic seconds."""
        self._key = api_key.encode()
        self._tenants = tenants
        self._clock = clock

    def check(self, request: Request) -> Tenant | None:
        """Whose request it is, where there are tenants. Raises a RequestError (401) without a valid key."""
        if not self._key and self._tenants is None:
            return None
        scheme, _, token = authorization(request.scope).partition(" ")
        own = request.headers.get("x-api-key", "")  # as clients of /v1/messages send it
        if own:
            scheme, token = "bearer", own
        given = token.strip().encode("utf-8", "surrogateescape")
        if self._tenants is not None:
            self._tenants.refresh(self._clock())
            tenant = self._tenants.tenants.of_key(given) if scheme.lower() == "bearer" else None
            if tenant is not None:
                return tenant
        elif hmac.compare_digest(given, self._key) and scheme.lower() == "bearer":
            return None
        raise _Unauthorised("Authorization: send a valid API key as `Bearer KEY`", param="Authorization")
