"""The webhook's certificate, read again when its files change: renewal needs neither a restart nor a gap in answers."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from ..errors import UserError

CERTIFICATE, KEY = "tls.crt", "tls.key"
"""Names in the folder, as in a Secret of type kubernetes.io/tls."""

_log = logging.getLogger(__name__)
_Stamp = tuple[tuple[int, int, int], ...]


class Certificates:
    """Serves the pair of files in a folder. The files are looked at when a client connects, which for an admission
    webhook is rare and is the only moment at which it matters which certificate there is. Nothing runs in between.

    `context` is for the server: each of its connections gets the newest pair, whatever was loaded into it.
    A pair that cannot be used, as one that is half written, is told of once; the one before it goes on serving.
    """

    def __init__(self, folder: str) -> None:
        self.certificate, self.key = Path(folder, CERTIFICATE), Path(folder, KEY)
        self._files = (self.certificate, self.key)
        try:
            self._seen = _stamp(self._files)
            self.context = self._present = self._load()
        except (OSError, ssl.SSLError) as error:
            raise UserError(
                f"--webhook-cert-dir {folder}: no usable {CERTIFICATE} and {KEY}: {error}; "
                "give a folder with a certificate and its key, both PEM"
            ) from error
        self.context.sni_callback = self._connecting

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._files)
        return context

    def _connecting(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in each handshake, with or without a server name."""
        self._refresh()
        connection.context = self._present

    def _refresh(self) -> None:
        stamp = _stamp(self._files)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._present = self._load()
        except (OSError, ssl.SSLError) as error:
            _log.warning(
                "%s: not usable, still serving with the previous certificate: %s", self._files[0].parent, error
            )
        else:
            _log.info("%s: new certificate", self._files[0].parent)


def _stamp(files: tuple[Path, ...]) -> _Stamp:
    """Changes with the files: a mounted Secret is replaced by turning a symbolic link."""
    out = []
    for file in files:
        try:
            found = file.stat()
            out.append((found.st_ino, found.st_mtime_ns, found.st_size))
        except OSError:
            out.append((0, 0, 0))
    return tuple(out)
