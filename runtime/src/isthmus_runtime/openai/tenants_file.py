"""Keeps tenants as their file says: a mounted Secret changes under a running process."""

from __future__ import annotations

import logging
from pathlib import Path

from ..errors import ConfigError
from .tenants import Tenants, read_tenants

_log = logging.getLogger(__name__)
_LOOK_S = 2.0
"""Between two looks at the file: kubelets take a minute to bring a change anyway."""


class TenantsFile:
    """The tenants of a file, read again when it has changed. A file that is wrong changes nothing, and is told once."""

    def __init__(self, path: str, now: float) -> None:
        """`now`: monotonic seconds. ConfigError names what is wrong with the file."""
        self._path = Path(path)
        self._seen = self._stamp()
        self._looked = now
        self.tenants = Tenants(read_tenants(self._path))

    def refresh(self, now: float) -> None:
        """Look, unless that was done just now."""
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self.tenants.replace(read_tenants(self._path))
        except ConfigError as e:
            _log.error("the tenants stay as they were: %s", e)
        else:
            _log.info("%s has changed and was read again", self._path)

    def _stamp(self) -> tuple[int, ...]:
        """What differs after a change, for a file and for the links that a mounted Secret is made of."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
