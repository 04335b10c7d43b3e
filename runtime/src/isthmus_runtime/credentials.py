"""Who may call the internal routes of a service: its own pods, which show a token that the cluster has signed for them.

A folder holds both sides, as a projected volume of Kubernetes or as `isthmus up` writes it (docs/adr/0024):

| file         | what it is |
|--------------|------------|
| `token`      | this process's own JSON Web Token (RFC 7519), shown to peers as `Authorization: Bearer` |
| `trust.json` | whose tokens are taken: issuer, audience, namespace, and the issuer's public keys (RFC 7517) |

Both are replaced while the process runs: tokens are renewed, keys rotated. Nothing here reaches any other host. What a
token proves is that its bearer is a pod of this service or somebody whom such a pod told; the connection is not
encrypted.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import jwt

from .errors import AccessDenied, Unauthenticated

_log = logging.getLogger(__name__)

TOKEN_FILE, TRUST_FILE = "token", "trust.json"
ALGORITHMS = ("RS256", "RS384", "RS512", "ES256", "ES384", "ES512")
"""What Kubernetes signs with; none of them takes a public key for a shared secret."""
SKEW_S = 60
"""How far the clocks of two nodes may differ."""
LOOK_S = 1.0
"""How often the files are looked at."""
_MAX_KNOWN = 4096
_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """A `trust.json`. `audience` names the one service, `namespace` that of its pods' ServiceAccounts; not `required`:
    callers without a token are still served, as during a roll-out from pods that have none."""

    issuer: str
    audience: str
    namespace: str
    required: bool
    keys: dict[str, jwt.PyJWK]
    """By key id."""

    @staticmethod
    def read(text: str) -> Trust:
        """Raises ValueError naming what is wrong."""
        try:
            raw = json.loads(text)
            keys, odd = _fit(raw["keys"])
            if odd:
                _log.warning("%d keys of the issuer are not used: %s", len(odd), "; ".join(odd))
            if not keys:
                raise ValueError(f"none of its keys can be used: {'; '.join(odd) or 'there are none to sign with'}")
            return Trust(
                issuer=str(raw["issuer"]),
                audience=str(raw["audience"]),
                namespace=str(raw["namespace"]),
                required=bool(raw["required"]),
                keys={key.key_id: key for key in keys if key.key_id},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it lacks {error}") from error

    def verify(self, token: str) -> float:
        """When the token expires, in seconds since the epoch.

        Raises:
            Unauthenticated: it is no valid token of this issuer, or not valid now.
            AccessDenied: it is one, but for another service or of another namespace.
        """
        try:
            name = str(jwt.get_unverified_header(token).get("kid"))
            key = self.keys.get(name)
            if key is None:
                raise Unauthenticated(f"the token is signed by key {name[:64]!r}, which is none of {self.issuer}")
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self.audience,
                issuer=self.issuer,
                leeway=SKEW_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.InvalidAudienceError as error:
            raise AccessDenied(f"the token is for another service, not for {self.audience!r}") from error
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            raise Unauthenticated(f"the token is not valid: {error}") from error
        if not str(claims["sub"]).startswith(f"system:serviceaccount:{self.namespace}:"):
            raise AccessDenied(f"the token is of {claims['sub']!r}, not of a pod in namespace {self.namespace!r}")
        return float(claims["exp"])


def _fit(found: list[Any]) -> tuple[list[jwt.PyJWK], list[str]]:
    """The keys to check signatures with, and what is wrong with others: RFC 7517, 5 has one that is not understood be
    ignored, as an issuer may have keys for other purposes."""
    keys, odd = [], []
    for place, raw in enumerate(found):
        try:
            if raw.get("use", "sig") != "sig":
                continue
            key = jwt.PyJWK(raw)
        except (jwt.PyJWTError, AttributeError, TypeError, ValueError) as error:
            odd.append(f"keys[{place}]: {error}")
            continue
        if key.algorithm_name in ALGORITHMS:
            keys.append(key)
        else:
            odd.append(f"keys[{place}]: {key.algorithm_name} is not taken; allowed: {', '.join(ALGORITHMS)}")
    return keys, odd


class Credentials:
    """The folder `--peer-credentials`. Safe for use by several threads; `clock` gives seconds since the epoch."""

    def __init__(self, folder: str, clock: Callable[[], float] = time.time) -> None:
        self._token_file, self._trust_file = Path(folder, TOKEN_FILE), Path(folder, TRUST_FILE)
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._stamps: tuple[_Stamp | None, _Stamp | None] = (None, None)
        self._trust: Trust | None = None
        self._token = ""
        self._known: dict[bytes, float] = {}
        """Until when tokens that were verified are valid, by their hash."""
        self._broken = ""
        """Why a file cannot be used."""

    def authorization(self) -> str:
        """Value of the header for a call to a peer; empty where there is no token, and then `problem` says so."""
        self._look()
        return f"Bearer {self._token}" if self._token else ""

    def check(self, authorization: str) -> None:
        """Whether a caller with this header may be served. Raises Unauthenticated or AccessDenied."""
        self._look()
        trust = self._trust
        if trust is None:
            raise Unauthenticated(f"this process takes no calls yet: {self._broken}")
        if not trust.required:
            return
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated(
                "internal routes are for pods of this service alone, and the call has no bearer token"
            )
        digest = sha256(token.encode(errors="surrogateescape")).digest()
        expires = self._known.get(digest)
        if expires is None or self._clock() > expires + SKEW_S:
            expires = trust.verify(token)
            with self._lock:
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                if self._trust is trust:  # else by keys that are not trusted any more
                    self._known[digest] = expires

    def problem(self) -> str:
        """Why peers cannot be called, or cannot call: empty when both can. Part of readiness."""
        self._look()
        trust, token = self._trust, self._token
        if self._broken or trust is None:
            return self._broken
        if not trust.required:
            return ""
        try:
            self.check(f"Bearer {token}")
        except (Unauthenticated, AccessDenied) as error:
            # Peers would say the same, so this is told before one of them does.
            return f"its own credential {self._token_file} is of no use: {error.message}"
        return ""

    def _look(self) -> None:
        """Read the files again when they have changed."""
        now = self._clock()
        with self._lock:
            if 0 <= now - self._looked < LOOK_S:
                return
            self._looked = now
            stamps = (_stamp(self._token_file), _stamp(self._trust_file))
            if stamps == self._stamps and None not in stamps:
                return
            self._stamps = stamps
            self._known.clear()
            try:
                self._trust = Trust.read(self._trust_file.read_text())
                self._token = self._token_file.read_text().strip()
                self._broken = "" if self._token else f"--peer-credentials: {self._token_file} is empty"
            except (OSError, ValueError) as error:
                # What was there stays in use: files may be in the middle of a change.
                self._broken = f"--peer-credentials: {self._trust_file.parent} cannot be used: {error}"


def peer_credentials(folder: str, host: str) -> Credentials | None:
    """Those of `--peer-credentials`; None without one, which is said where strangers may reach `host`."""
    if folder:
        return Credentials(folder)
    if not (host == "localhost" or host == "::1" or host.startswith("127.")):
        _log.warning(
            "no --peer-credentials: whoever reaches %s may read and overwrite KV and make this process call others",
            host,
        )
    return None


def _stamp(file: Path) -> _Stamp | None:
    """Changes with the file: a mounted volume is replaced by turning a symbolic link."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
