"""The record's bytes, what decode compares, and what a drain answer proves."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.kv.keys import keys_digest
from isthmus_runtime.protocol.ticket import PrefillRecord
from isthmus_runtime.transfer.drain import ask_peer
from isthmus_runtime.transfer.record import Expected, mismatch, pack_record, unpack_record

RECORD = PrefillRecord(
    attempt="a-1",
    num_tokens=40,
    first_token=7,
    first_logprobs=(7, -0.5, ((7, -0.5), (9, -1.25))),
    key_digest=keys_digest(["k0", "k1"]),
    block_bytes=64,
)


def test_a_record_survives_the_wire_and_what_follows_it_is_ignored() -> None:
    assert unpack_record(pack_record(RECORD) + b"\xff" * 100) == RECORD


@given(st.data())
def test_any_cut_or_flipped_bit_is_noticed(data: st.DataObject) -> None:
    raw = bytearray(pack_record(RECORD))
    if data.draw(st.booleans()):
        with pytest.raises(ValueError):
            unpack_record(bytes(raw[: data.draw(st.integers(0, len(raw) - 1))]))
        return
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError):
        unpack_record(bytes(raw))


def test_an_empty_slot_has_no_record() -> None:
    with pytest.raises(ValueError, match="no record was written"):
        unpack_record(bytes(64))


@given(st.lists(st.text(max_size=4), max_size=5), st.lists(st.text(max_size=4), max_size=5))
def test_key_digests_differ_for_different_lists(a: list[str], b: list[str]) -> None:
    a, b = ([k.encode("utf-8", "ignore").decode() for k in keys] for keys in (a, b))
    assert (keys_digest(a) == keys_digest(b)) == (a == b)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attempt": "a-2"}, "attempt a-2, decode expects a-1"),
        ({"num_tokens": 41}, "token count 41, decode expects 40"),
        ({"block_bytes": 65}, "block bytes 65, decode expects 64"),
        ({"key_digest": "0"}, "key digest 0"),
        ({"first_token": 10}, "token id 10, the model has ids 0 to 9"),
        ({"first_token": -1}, "token id -1"),
        ({"first_logprobs": (1 << 40, -0.5, ())}, f"token id {1 << 40}"),
        ({"first_logprobs": (7, -0.5, ((7, -0.5), (10, -1.0)))}, "token id 10"),
        ({"first_logprobs": (7, float("nan"), ())}, "log-probability nan"),
        ({"first_logprobs": (7, -0.5, ((7, float("inf")),))}, "log-probability inf"),
        ({"first_logprobs": (7, -0.5, ((7, float("-inf")),))}, ""),
        ({"first_logprobs": None}, ""),
        ({}, ""),
    ],
)
def test_a_difference_is_named_with_both_values(change: dict[str, object], named: str) -> None:
    expected = Expected(attempt="a-1", num_tokens=40, keys=("k0", "k1"), block_bytes=64, vocab_size=10)
    problem = mismatch(RECORD.model_copy(update=change), expected)
    assert named in problem and bool(named) == bool(problem)


class Peer:
    """An HTTP server that answers every drain question with `body` and `status`."""

    def __init__(self) -> None:
        self.body, self.status, self.asked = b"", 200, ""
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                peer.asked = self.path
                self.send_response(peer.status)
                self.send_header("Content-Length", str(len(peer.body)))
                self.end_headers()
                self.wfile.write(peer.body)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def answers(self, status: int = 200, **body: object) -> None:
        self.status, self.body = status, json.dumps(body).encode()


@pytest.fixture
def peer() -> Iterator[Peer]:
    started = Peer()
    yield started
    started.server.shutdown()
    started.thread.join()
    started.server.server_close()


def test_a_drain_answer_counts_only_for_the_attempt_asked_about(peer: Peer) -> None:
    peer.answers(attempt="a b", drained=True, epoch="e1")
    assert ask_peer(peer.url, "e1", "a b")
    assert peer.asked == "/internal/drained?attempt=a%20b"
    assert ask_peer(peer.url.removeprefix("http://"), "e1", "a b")
    assert not ask_peer(peer.url, "e1", "other")
    peer.answers(attempt="a b", drained=False, epoch="e1")
    assert not ask_peer(peer.url, "e1", "a b")


def test_another_epoch_means_that_the_process_is_gone(peer: Peer) -> None:
    peer.answers(attempt="a", drained=False, epoch="e2")
    assert ask_peer(peer.url, "e1", "a")


def test_errors_and_nonsense_prove_nothing(peer: Peer) -> None:
    peer.answers(500, attempt="a", drained=True, epoch="e1")
    assert not ask_peer(peer.url, "e1", "a")
    peer.answers(200, hello=1)
    assert not ask_peer(peer.url, "e1", "a")
    assert not ask_peer("", "e1", "a")


def test_silence_proves_nothing_and_a_refused_connection_everything() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
        assert ask_peer(url, "e1", "a")
        s.listen(1)
        assert not ask_peer(url, "e1", "a", timeout_s=0.1)
