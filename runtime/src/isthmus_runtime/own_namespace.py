"""Names of Services of the pod's own namespace, as nobody else's name."""

from __future__ import annotations

from pathlib import Path

RESOLV_CONF = Path("/etc/resolv.conf")


def absolute(host: str, resolv_conf: Path = RESOLV_CONF) -> str:
    """`host` as the absolute name of a Service of this pod's namespace; outside of a cluster, and with a dot in it, as
    it is.

    A resolver looks for a name without a dot in all domains of its list. Of a pod the first is its namespace's, and the
    last are its node's: while a Service has no pods, a host of that name there would be taken for it.
    """
    if not host or host == "localhost" or "." in host or ":" in host:
        return host
    domain = _first_domain(resolv_conf)
    return f"{host}.{domain.rstrip('.')}." if domain.split(".")[1:2] == ["svc"] else host


def absolute_address(address: str, resolv_conf: Path = RESOLV_CONF) -> str:
    """`absolute` for host:port."""
    host, colon, port = address.rpartition(":")
    return f"{absolute(host, resolv_conf)}{colon}{port}" if colon else address


def _first_domain(resolv_conf: Path) -> str:
    """Of the last `search` line, which is the one that counts (resolv.conf(5))."""
    try:
        lines = [line.split() for line in resolv_conf.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return ""
    lists = [words[1:] for words in lines if words[:1] == ["search"]]
    return lists[-1][0] if lists and lists[-1] else ""
