"""Builds the back end that a configuration asks for. Mooncake is loaded only when its modes are prepared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..config import StoreConfig, TransferConfig
from ..credentials import Credentials
from ..errors import ConfigError
from ..kv.keys import pool_secret
from ..own_namespace import absolute_address
from .backend import TransferBackend
from .memory import MemoryFabric
from .other_ranks import OtherRank

SECRET_BYTES = 16
"""Fewer could be found by trying."""


def make_transfer(
    cfg: TransferConfig,
    *,
    epoch: str = "",
    credentials: Credentials | None = None,
    secret: bytes = b"",
    others: Sequence[OtherRank] = (),
    fabric: MemoryFabric | None = None,
    name: str = "",
) -> TransferBackend:
    """The back end for `cfg.mode`, not yet prepared.

    Args:
        epoch: of this process; peers know it from `/info` and from tickets.
        credentials: shown to peers.
        secret: of the service, from `store_secret`: mode `store` salts its names and seals its values with it.
        others: of a tensor-parallel engine, which mode `direct` alone has.
        fabric, name: for mode `memory`: the network to join, and as whom.

    Raises:
        ConfigError: the mode moves nothing, is unknown, or lacks what it needs.
    """
    if cfg.mode == "direct":
        from .direct import DirectTransfer

        return DirectTransfer(
            host=cfg.host,
            epoch=epoch,
            transport=cfg.transport,
            fallback=cfg.fallback,
            timeout_s=cfg.timeout_s,
            credentials=credentials,
            others=others,
        )
    assert not others, f"--transfer-mode {cfg.mode} is refused with several ranks"
    if cfg.mode == "store":
        from .store import StoreTransfer

        if cfg.transport not in ("auto", "tcp"):
            raise ConfigError(f"--transfer-transport {cfg.transport} with --transfer-mode store: only tcp is available")
        return StoreTransfer(
            host=cfg.host,
            master=absolute_address(cfg.store.master),
            segment_bytes=cfg.store.segment_bytes,
            replicas=cfg.store.replicas,
            secret=secret,
            timeout_s=cfg.timeout_s,
        )
    if cfg.mode == "memory":
        if fabric is None or not name:
            raise ConfigError(
                "--transfer-mode memory works only inside one process: it needs a MemoryFabric and a name"
            )
        return fabric.connect(name, epoch)
    raise ConfigError(f"--transfer-mode {cfg.mode!r} moves no KV; allowed: direct, store, memory")


def store_secret(cfg: StoreConfig) -> bytes:
    """What the file of the service's secret gives (`kv.keys.pool_secret`); empty without one.

    Raises:
        ConfigError: the file cannot be read, or is too short to be a secret.
    """
    if not cfg.secret_file:
        return b""
    try:
        credential = Path(cfg.secret_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--store-secret-file {cfg.secret_file}: {error.strerror}") from error
    if len(credential) < SECRET_BYTES:
        raise ConfigError(
            f"--store-secret-file {cfg.secret_file} holds {len(credential)} bytes; give {SECRET_BYTES} or more, random"
        )
    return pool_secret(credential)
