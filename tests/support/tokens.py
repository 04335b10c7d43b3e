"""An issuer of tokens with a key pair of its own, and folders for `--peer-credentials`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

NAMESPACE, AUDIENCE = "team", "serving.isthmus.dev/team/chat"


class Issuer:
    """Signs like a cluster's API server, with RS256 or ES256."""

    def __init__(self, name: str = "https://cluster.example", *, algorithm: str = "RS256", kid: str = "k1") -> None:
        self.name, self.kid, self.algorithm = name, kid, algorithm
        self._key: Any
        if algorithm == "RS256":
            self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
            public = RSAAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        else:
            self._key = ec.generate_private_key(ec.SECP256R1())
            public = ECAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        self.public = {**public, "use": "sig", "kid": kid, "alg": algorithm}

    def token(self, **changed: Any) -> str:
        """A pod's token of an hour; a claim that is None is left out."""
        now = int(time.time())
        claims = {
            "iss": self.name,
            "aud": [AUDIENCE],
            "sub": f"system:serviceaccount:{NAMESPACE}:default",
            "iat": now,
            "nbf": now,
            "exp": now + 3600,
            **changed,
        }
        claims = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(claims, self._key, self.algorithm, headers={"kid": self.kid})

    def trust(self, *others: Issuer, **changed: Any) -> str:
        """`trust.json` with its key, and those of others."""
        keys = [issuer.public for issuer in (self, *others)]
        document = {"issuer": self.name, "audience": AUDIENCE, "namespace": NAMESPACE, "required": True, "keys": keys}
        return json.dumps(document | changed)


def write(folder: Path, *, token: str | None = None, trust: str | None = None) -> None:
    """Put the files in place as a kubelet does: whole, and as other files than those before."""
    folder.mkdir(exist_ok=True)
    for name, text in (("token", token), ("trust.json", trust)):
        if text is not None:
            partial = folder / f"{name}.partial"
            partial.write_text(text)
            os.replace(partial, folder / name)
