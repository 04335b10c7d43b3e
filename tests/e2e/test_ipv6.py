"""A service whose pods have addresses of IPv6 alone, started as the operator renders it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from processes import MODEL, metric, stack
from tokenizers import Tokenizer

from isthmus_runtime.executor.fake import expected_tokens
from isthmus_runtime.request import SamplingParams

LOOPBACK = "00000000000000000000000000000001"
NONE = not Path("/proc/net/if_inet6").exists() or LOOPBACK not in Path("/proc/net/if_inet6").read_text()
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(NONE, reason="no IPv6 here")]
ALL = ("--host", "0.0.0.0")


def answer(url: str, prompt: list[int], count: int) -> str:
    body = {"model": "test", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


@pytest.mark.parametrize("mode", ["direct", "store"])
def test_kv_moves_and_clients_of_both_families_are_answered(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listened where pods are asked, and the TransferEngine had addresses of IPv4 alone."""
    monkeypatch.setenv("POD_IP", "::1")
    engine_args = (*ALL, "--kv-memory", "256Ki", "--transfer-timeout", "5s")
    prompt = list(range(40, 120))
    ids = expected_tokens(prompt, SamplingParams(max_tokens=8, temperature=0.0), 8)
    wanted = Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(ids, skip_special_tokens=True)
    with stack(tmp_path, mode, host="[::1]", engine_args=engine_args, router_args=ALL) as service:
        assert answer(service.url("router"), prompt, 8) == wanted
        assert metric(service.url("router"), "isthmus_router_prompts_total", source="transferred") == 1
        assert answer(f"http://127.0.0.1:{service.ports['router']}", prompt, 8) == wanted
