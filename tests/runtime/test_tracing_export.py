"""What a process takes of what a collector answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from isthmus_runtime.tracing.otlp import OtlpTracer

MOST = 64 << 20
"""Bytes of the endless answer."""


class Collector:
    """On loopback: takes requests one after another, and answers each with what it is given."""

    def __init__(self, head: bytes, body: bytes, times: int) -> None:
        self._head, self._body, self._times = head, body, times
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(20)
        self.requests, self.connections, self.sent = 0, 0, 0
        self.asked = threading.Semaphore(0)

    def serve(self, answers: int) -> None:
        """So many requests."""
        while self.requests < answers:
            connection, _ = self.listener.accept()
            self.connections += 1
            with connection, connection.makefile("rb") as lines:
                connection.settimeout(20)
                while self.requests < answers and self._request(lines):
                    self.requests += 1
                    self.asked.release()
                    if not self._answer(connection):
                        break

    def _request(self, lines) -> bool:  # type: ignore[no-untyped-def]
        length = 0
        while (line := lines.readline()) not in (b"", b"\r\n"):
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return line != b"" and len(lines.read(length)) == length

    def _answer(self, connection: socket.socket) -> bool:
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + self._head + b"\r\n")
            for _ in range(self._times):
                connection.sendall(self._body)
                self.sent += len(self._body)
        except ConnectionError:
            return False
        return True


@contextmanager
def serving(collector: Collector, answers: int) -> Iterator[None]:
    thread = threading.Thread(target=collector.serve, args=(answers,), daemon=True)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()
    collector.listener.close()


def traced(collector: Collector, spans: int) -> None:
    port = collector.listener.getsockname()[1]
    tracer = OtlpTracer(f"http://127.0.0.1:{port}/v1/traces", sampling=1.0, role="router", service="s")
    for _ in range(spans):
        tracer.request("request", {}).end()
        assert tracer._provider.force_flush(10_000)
        assert collector.asked.acquire(timeout=10)
    tracer.close()


@pytest.mark.parametrize("head", [b"Content-Length: %d\r\n" % MOST, b"Content-Encoding: gzip\r\n", b""])
def test_an_endless_answer_is_hung_up_on(head: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A collector that is none, or not any more, could fill the memory of each process that tells it of requests."""
    collector = Collector(head, bytes(1 << 16), MOST >> 16)
    with serving(collector, 1):
        traced(collector, 1)
    assert collector.sent < MOST // 2  # what the kernels hold between is less
    assert not caplog.records  # the spans have arrived: its status says so


def test_connections_of_usual_answers_are_kept() -> None:
    collector = Collector(b"Content-Length: 2\r\n", b"{}", 1)
    with serving(collector, 3):
        traced(collector, 3)
    assert (collector.requests, collector.connections) == (3, 1)
