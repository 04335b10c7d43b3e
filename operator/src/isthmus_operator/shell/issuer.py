"""Who signs the tokens of ServiceAccounts in this cluster, as its API server says."""

from __future__ import annotations

import json

from ..errors import ApiError
from ..render.names import TokenIssuer
from .client import Api

CONFIGURATION, KEYS = "/.well-known/openid-configuration", "/openid/v1/jwks"
AGAIN_S = 60.0
"""Between two looks. Keys are rotated by adding the new one first; pods hear of it a minute or two after this."""


async def find_issuer(api: Api) -> TokenIssuer:
    """Raises ApiError; one of status 403 where service account issuer discovery was taken from this account."""
    try:
        configuration, found = await api.get(CONFIGURATION), await api.get(KEYS)
        keys = sorted(found["keys"], key=lambda key: str(key["kid"]))
        return TokenIssuer(name=str(configuration["issuer"]), keys=json.dumps(keys, sort_keys=True))
    except ApiError as error:
        why = f"cannot read by which keys tokens of ServiceAccounts are signed: {error}"
        raise ApiError(error.status, f"{why}; see operator/docs/rbac.md") from error
    except (KeyError, TypeError) as error:
        raise ApiError(404, f"{KEYS} is not understood: it lacks {error}") from error
