"""What the surroundings say: the only module of this distribution that reads the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def cache_dir() -> Path:
    """Where models are kept on this machine: ISTHMUS_CACHE, or ~/.cache/isthmus."""
    return Path(os.environ.get("ISTHMUS_CACHE") or Path.home() / ".cache" / "isthmus")


def inherited_environment() -> dict[str, str]:
    """What local processes get beside their container's own variables: search paths, locale, proxies, devices."""
    return dict(os.environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is in a cluster.

    namespace: of the pod, from POD_NAMESPACE or the service account; empty outside a cluster
    name:      POD_NAME, or else the host's name
    address:   of the pod, POD_IP; empty outside a cluster
    kubeconfig: first file of KUBECONFIG; empty when it is not set
    """

    namespace: str
    name: str
    kubeconfig: str
    address: str = ""

    @property
    def everywhere(self) -> str:
        """What to listen on for all addresses, of which the pod's own may be one of IPv6."""
        return "::" if ":" in self.address else "0.0.0.0"


def identity(environ: Mapping[str, str] | None = None, account: Path = _ACCOUNT) -> Identity:
    """Read once, at start."""
    environ = os.environ if environ is None else environ
    namespace = environ.get("POD_NAMESPACE", "")
    if not namespace and (account / "namespace").is_file():
        namespace = (account / "namespace").read_text().strip()
    return Identity(
        namespace=namespace,
        name=environ.get("POD_NAME") or socket.gethostname(),
        kubeconfig=environ.get("KUBECONFIG", "").split(os.pathsep)[0],
        address=environ.get("POD_IP", ""),
    )
