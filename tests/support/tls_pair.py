"""A certificate and its key, as a Secret of type kubernetes.io/tls holds them."""

import subprocess
from pathlib import Path


def make_pair(folder: Path) -> None:
    """A self-signed certificate for 127.0.0.1 and its key."""
    folder.mkdir()
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=webhook", "-addext", "subjectAltName=IP:127.0.0.1,DNS:webhook.ns.svc"]
    command += ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    subprocess.run(command, check=True, capture_output=True)
