"""Runs a native call that may never return, and gives it up at a deadline."""

from __future__ import annotations

import importlib.metadata
import socket
import threading
from collections.abc import Callable
from typing import Any

INSTALL_HINT = (
    "install mooncake-transfer-engine-non-cuda (CPU) or mooncake-transfer-engine-cuda13 (GPU), "
    "and the system package libibverbs1"
)
_FOR_CPUS = "mooncake-transfer-engine-non-cuda"


def built_for_cpus() -> bool:
    """Whether the Mooncake that is installed is the build that can read host memory alone."""
    try:
        importlib.metadata.version(_FOR_CPUS)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class TookTooLong(Exception):
    """The call did not return in time; its daemon thread is left behind."""

    def __init__(self, message: str, ended: threading.Event) -> None:
        """`ended` is set when the call does return."""
        super().__init__(message)
        self.ended = ended


def run_bounded(call: Callable[[], Any], timeout_s: float, name: str) -> Any:
    """Result of `call()`, run in a daemon thread that does not hold up the end of the process.

    Raises:
        TookTooLong: no result within `timeout_s`.
        Exception: whatever `call` raised.
    """
    ended = threading.Event()
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            failure.append(error)
        finally:
            ended.set()

    threading.Thread(target=body, name=name, daemon=True).start()
    if not ended.wait(timeout_s):
        raise TookTooLong(f"{name}: no result within {timeout_s:g} s", ended)
    if failure:
        raise failure[0]
    return outcome[0]


def split_address(address: str) -> tuple[str, int]:
    """`host:port`, where an IPv6 host may stand in brackets. Raises ValueError naming the address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def connect_problem(address: str, timeout_s: float) -> str:
    """Empty when something accepts TCP connections at `host:port`, else why not."""
    try:
        with socket.create_connection(split_address(address), timeout_s):
            return ""
    except (OSError, ValueError) as error:
        return str(error)
