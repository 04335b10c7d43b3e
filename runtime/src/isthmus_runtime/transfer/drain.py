"""Asks a prefill process whether a byte of an attempt may still leave it: `GET /internal/drained`."""

from __future__ import annotations

import http.client
from enum import StrEnum
from urllib.parse import SplitResult, quote, urlsplit

from pydantic import ValidationError

from ..credentials import Credentials
from ..protocol.ticket import DrainAnswer

ASK_TIMEOUT_S = 0.3
"""Connect and answer, each."""


class Answer(StrEnum):
    """What is known about the peer's bytes."""

    UNKNOWN = ""
    """Some may still come. False as a condition."""
    DRAINED = "drained"
    """The process acknowledged that none will."""
    GONE = "gone"
    """The process is gone. Its kernel may still send what it had written."""


def ask_peer(
    peer_url: str,
    peer_epoch: str,
    attempt: str,
    credentials: Credentials | None = None,
    timeout_s: float = ASK_TIMEOUT_S,
) -> Answer:
    """Whether the peer acknowledges the drain, or its process of `peer_epoch` is gone.

    A refused connection means that no process listens there any more; an answer with another epoch, that a new one
    does. Silence, an error status or nonsense prove nothing.
    """
    parts = _split(peer_url)
    try:
        port = parts.port or 80
    except ValueError:  # beyond 65,535
        return Answer.UNKNOWN
    if not parts.hostname:
        return Answer.UNKNOWN
    connection = http.client.HTTPConnection(parts.hostname, port, timeout=timeout_s)
    try:
        shown = "" if credentials is None else credentials.authorization()
        headers = {"Authorization": shown} if shown else {}
        connection.request("GET", f"/internal/drained?attempt={quote(attempt, safe='')}", headers=headers)
        response = connection.getresponse()
        body = response.read(65536)
        if response.status != 200:
            return Answer.UNKNOWN
        answer = DrainAnswer.model_validate_json(body)
    except ConnectionRefusedError:
        return Answer.GONE
    except (OSError, http.client.HTTPException, ValidationError):
        return Answer.UNKNOWN
    finally:
        connection.close()
    if peer_epoch and answer.epoch != peer_epoch:
        return Answer.GONE
    return Answer.DRAINED if answer.attempt == attempt and answer.drained else Answer.UNKNOWN


def host_of(peer_url: str) -> str:
    """The peer's host; empty when the URL has none."""
    return _split(peer_url).hostname or ""


def _split(peer_url: str) -> SplitResult:
    return urlsplit(peer_url if "//" in peer_url else f"//{peer_url}")
