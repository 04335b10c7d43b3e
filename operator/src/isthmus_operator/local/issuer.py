"""Stands for the cluster that signs the tokens of a local service's pods, and for the kubelet that renews them.

The private key never leaves this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from ..render.names import TokenIssuer
from .pods import TokenFile

NAME = "isthmus-up"
_ALGORITHM, _KEY_ID = "ES256", "up"
_RENEW_AFTER = 0.8
"""Of a token's life, as a kubelet does."""
_LOOK_S = 30.0


class LocalIssuer:
    """One key pair for one run. `clock` gives seconds since the epoch: a laptop that sleeps has old tokens after it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._key = ec.generate_private_key(ec.SECP256R1())
        public = {**ECAlgorithm.to_jwk(self._key.public_key(), as_dict=True), "kid": _KEY_ID, "alg": _ALGORITHM}
        self.public = TokenIssuer(name=NAME, keys=json.dumps([public]))
        self._signed: dict[TokenFile, float] = {}

    def write(self, files: Iterable[TokenFile]) -> None:
        """Write the tokens that are not there, or soon not valid any more. Only the owner may read them."""
        now = self._clock()
        for file in files:
            if now - self._signed.get(file, float("-inf")) < _RENEW_AFTER * file.valid_s:
                continue
            path = Path(file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as out:
                out.write(self._sign(file, int(now)))
            partial.replace(path)
            self._signed[file] = now

    async def keep(self, files: Iterable[TokenFile], say: Callable[[str], None]) -> None:
        """Renew them until cancelled; `say` what is in the way."""
        files = tuple(files)
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self.write(files)
            except OSError as error:
                say(f"the pods' credentials cannot be renewed: {error}")

    def _sign(self, file: TokenFile, now: int) -> str:
        claims = {
            "iss": NAME,
            "aud": [file.audience],
            "sub": f"system:serviceaccount:{file.namespace}:default",
            "iat": now,
            "nbf": now,
            "exp": now + int(file.valid_s),
        }
        return jwt.encode(claims, self._key, _ALGORITHM, headers={"kid": _KEY_ID})
