"""What a token must be like to be taken, and that files which change are followed."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from tokens import AUDIENCE, Issuer, write

from isthmus_runtime.credentials import SKEW_S, Credentials
from isthmus_runtime.errors import AccessDenied, RequestError, Unauthenticated

CLUSTER, STRANGER = Issuer(), Issuer()


class Clock:
    """Seconds since the epoch, a minute on with each look, so that files are looked at anew."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        self.now += 60
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "peers", token=CLUSTER.token(), trust=CLUSTER.trust())
    return tmp_path / "peers"


def refused(credentials: Credentials, token: str) -> RequestError:
    with pytest.raises((Unauthenticated, AccessDenied)) as caught:
        credentials.check(f"Bearer {token}")
    return caught.value


def unsigned(**header: Any) -> str:
    parts = [{"typ": "JWT", "kid": "k1", **header}, jwt.decode(CLUSTER.token(), options={"verify_signature": False})]
    return ".".join(base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=").decode() for p in parts) + "."


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
def test_a_pod_of_the_service_is_served(tmp_path: Path, algorithm: str) -> None:
    cluster = Issuer(algorithm=algorithm)
    write(tmp_path, token=cluster.token(), trust=cluster.trust())
    credentials = Credentials(str(tmp_path))
    credentials.check(credentials.authorization())
    credentials.check(f"bearer {cluster.token(sub='system:serviceaccount:team:another')}")
    assert credentials.problem() == ""


NOW = int(time.time())


@pytest.mark.parametrize(
    ("token", "status", "says"),
    [
        (CLUSTER.token(exp=NOW - SKEW_S - 5), 401, "expired"),
        (CLUSTER.token(nbf=NOW + SKEW_S + 86_400), 401, "not yet valid"),
        (CLUSTER.token(exp=None), 401, "exp"),
        (CLUSTER.token(iss="https://elsewhere.example"), 401, "issuer"),
        (CLUSTER.token(aud=["serving.isthmus.dev/team/other"]), 403, "another service"),
        (CLUSTER.token(aud=["https://kubernetes.default.svc"]), 403, "another service"),
        (CLUSTER.token(aud=None), 401, "aud"),
        (CLUSTER.token(sub="system:serviceaccount:other:default"), 403, "namespace 'team'"),
        (CLUSTER.token(sub="system:serviceaccount:team-b:default"), 403, "namespace 'team'"),
        (CLUSTER.token(sub="system:node:n1"), 403, "namespace 'team'"),
        (STRANGER.token(), 401, "ignature"),
        (Issuer(kid="k2").token(), 401, "'k2'"),
        (unsigned(alg="none"), 401, "not valid"),
        (unsigned(alg="NONE"), 401, "not valid"),
        (jwt.encode({"aud": AUDIENCE}, CLUSTER.public["n"], "HS256", headers={"kid": "k1"}), 401, "not valid"),
        ("", 401, "no bearer token"),
        ("nonsense", 401, "not valid"),
        ("\udce4.\udce4.\udce4", 401, "not valid"),
        (base64.urlsafe_b64encode(b"[" * 9000).decode() + ".e30.", 401, "not valid"),
        (CLUSTER.token()[:-8] + "AAAAAAAA", 401, "ignature"),
    ],
    # A token is another one in each process, and test processes must collect the same names.
    ids=[f"stranger{number}" for number in range(20)],
)
def test_strangers_are_refused(folder: Path, token: str, status: int, says: str) -> None:
    error = refused(Credentials(str(folder)), token)
    assert error.status == status and says in error.message, error.message


@pytest.mark.parametrize("header", ["", "Basic dTpw", "Bearer", "Bearer ", CLUSTER.token()])
def test_a_header_without_a_bearer_token_is_none(folder: Path, header: str) -> None:
    with pytest.raises(Unauthenticated, match="no bearer token"):
        Credentials(str(folder)).check(header)


def test_clocks_may_differ_by_the_stated_amount(folder: Path) -> None:
    credentials = Credentials(str(folder))
    credentials.check(f"Bearer {CLUSTER.token(exp=int(time.time()) - SKEW_S + 20)}")
    credentials.check(f"Bearer {CLUSTER.token(nbf=int(time.time()) + SKEW_S - 20)}")


def test_a_verified_token_is_looked_at_again_when_it_expires(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = Clock(), []
    credentials, token = Credentials(str(folder), clock), CLUSTER.token()
    decode = jwt.decode

    def counted(*args: Any, **settings: Any) -> Any:
        looks.append(clock.now)
        return decode(*args, **settings)

    monkeypatch.setattr(jwt, "decode", counted)
    for _ in range(5):
        credentials.check(f"Bearer {token}")
    assert len(looks) == 1
    clock.now += 3600 + SKEW_S
    credentials.check(f"Bearer {token}")
    assert len(looks) == 2


def test_a_renewed_token_is_shown_without_a_restart(folder: Path) -> None:
    credentials = Credentials(str(folder), Clock())
    before = credentials.authorization()
    write(folder, token=CLUSTER.token(exp=int(time.time()) + 7200))
    assert credentials.authorization() != before
    assert credentials.problem() == ""


def test_a_rotated_key_is_taken_and_one_that_was_removed_is_not(folder: Path) -> None:
    credentials, successor = Credentials(str(folder), Clock()), Issuer(kid="k2")
    old, new = f"Bearer {CLUSTER.token()}", f"Bearer {successor.token()}"
    credentials.check(old)
    write(folder, trust=CLUSTER.trust(successor))
    credentials.check(old)
    credentials.check(new)
    write(folder, trust=successor.trust())
    credentials.check(new)
    assert refused(credentials, old.removeprefix("Bearer ")).status == 401
    assert "none of https://cluster.example" in credentials.problem()  # its own is of the old key


def test_without_its_files_a_process_is_not_ready_and_says_why(tmp_path: Path) -> None:
    credentials = Credentials(str(tmp_path / "peers"), Clock())
    assert "trust.json" in credentials.problem()
    assert "takes no calls yet" in refused(credentials, CLUSTER.token()).message
    assert credentials.authorization() == ""
    write(tmp_path / "peers", trust=CLUSTER.trust())
    assert "token" in credentials.problem()
    write(tmp_path / "peers", token=CLUSTER.token(exp=NOW - 2 * SKEW_S))
    assert "its own credential" in credentials.problem() and "expired" in credentials.problem()
    write(tmp_path / "peers", token=CLUSTER.token())
    assert credentials.problem() == ""


def test_files_that_cannot_be_read_leave_what_was_there(folder: Path) -> None:
    credentials = Credentials(str(folder), Clock())
    credentials.check(credentials.authorization())
    for broken in ("{", "[]", '{"keys": []}', CLUSTER.trust(keys=[{"kty": "oct", "k": "AAAA", "kid": "k1"}])):
        write(folder, trust=broken)
        credentials.check(credentials.authorization())
        assert "cannot be used" in credentials.problem(), broken
    write(folder, trust=CLUSTER.trust())
    assert credentials.problem() == ""


@pytest.mark.parametrize(
    "odd",
    [
        {"kty": "new", "kid": "x"},
        {"kty": "RSA", "kid": "x"},
        {"kty": "oct", "k": "AAAA", "kid": "x"},
        {"kty": "EC", "crv": "P-521x", "x": "AA", "y": "AA", "kid": "x"},
        {"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo", "kid": "x"},
        "no key",
    ],
)
def test_a_key_that_is_not_understood_leaves_the_others_in_use(folder: Path, odd: object) -> None:
    """RFC 7517, 5."""
    write(folder, trust=CLUSTER.trust(keys=[odd, *json.loads(CLUSTER.trust())["keys"]]))
    credentials = Credentials(str(folder), Clock())
    assert credentials.problem() == ""
    credentials.check(credentials.authorization())


def test_while_pods_without_a_token_are_left_everybody_is_served(folder: Path) -> None:
    credentials = Credentials(str(folder), Clock())
    write(folder, trust=CLUSTER.trust(required=False))
    credentials.check("")
    credentials.check("Bearer nonsense")
    write(folder, trust=CLUSTER.trust())
    assert refused(credentials, "nonsense").status == 401
