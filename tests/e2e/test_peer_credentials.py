"""Real processes that know each other by their credentials: requests are served, strangers refused on every role."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from processes import get_json, metric, stack
from tokens import Issuer, write

pytestmark = pytest.mark.e2e
DEADLINE_S = 30.0


def status(url: str, *, token: str = "", body: object = None) -> int:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=DEADLINE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_pair_serves_its_router_alone_through_a_rotation(tmp_path: Path) -> None:
    old, new = Issuer(), Issuer(kid="k2", algorithm="ES256")
    folder = tmp_path / "peers"
    write(folder, token=old.token(), trust=old.trust())
    flags = ("--peer-credentials", str(folder))
    with stack(tmp_path, "direct", engine_args=("--kv-memory", "256Ki", *flags), router_args=flags) as service:

        def complete(first: int) -> int:
            body = {"model": "test", "prompt": [first, *range(2, 60)], "max_tokens": 4, "temperature": 0}
            return status(f"{service.url('router')}/v1/completions", body=body)

        assert complete(1) == 200
        engines = [name for name in service.all if name != "router"]
        for name in engines:
            for path in ("generate", "prefill", "commit", "abort"):
                assert status(f"{service.url(name)}/internal/{path}", body={}) == 401, (name, path)
            assert status(f"{service.url(name)}/internal/drained?attempt=a") == 401
            assert status(f"{service.url(name)}/internal/drained?attempt=a", token=old.token()) == 200
            assert get_json(f"{service.url(name)}/info")["role"] in ("prefill", "decode")
        assert status(f"{service.url('router')}/internal/generate", body={}) == 401

        # Keys first, as an issuer rotates them; then tokens; then the old key goes.
        write(folder, trust=new.trust(old))
        write(folder, token=new.token())
        assert complete(2) == 200
        write(folder, trust=new.trust())
        end = time.monotonic() + DEADLINE_S
        while status(f"{service.url('decode0')}/internal/drained?attempt=a", token=old.token()) != 401:
            assert time.monotonic() < end, "the old key is still taken"
        while complete(3) != 200:
            assert time.monotonic() < end, "the router does not show its new token"

        def moved() -> float:
            return sum(metric(service.url(n), "isthmus_xfer_prompts_total", source="transferred") for n in engines)

        # A request in mid-rotation may have been computed again; with the new key alone KV moves.
        before, number = moved(), 4
        assert before >= 1
        while moved() == before:
            assert complete(number) == 200
            number += 1
            assert time.monotonic() < end, "no KV moves under the new key"
