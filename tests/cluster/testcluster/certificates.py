"""Keys, certificates, tokens and kubeconfigs of a test cluster. Made anew for each; worth nothing elsewhere."""

import base64
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from testcluster.commands import run

DAYS = "30"
CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A user of the API server, known by a bearer token."""

    user: str
    groups: tuple[str, ...]
    token: str


def identity(user: str, *groups: str) -> Identity:
    return Identity(user=user, groups=groups, token=secrets.token_hex(16))


def make_authority(folder: Path) -> None:
    """Write ca.crt and ca.key."""
    constraints = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    keys = ["-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.crt")]
    openssl("req", "-x509", *CURVE, "-days", DAYS, "-subj", "/CN=isthmus-test-ca", *constraints, *keys)


def make_server_certificate(folder: Path, names: list[str], addresses: list[str]) -> None:
    """Write server.crt and server.key, the API server's, for these DNS names and IP addresses."""
    alternatives = ",".join([f"DNS:{name}" for name in names] + [f"IP:{address}" for address in addresses])
    extensions = f"subjectAltName={alternatives}\nextendedKeyUsage=serverAuth\n"
    sign(folder, "server", "/CN=kube-apiserver", extensions)


def make_kubelet_client_certificate(folder: Path) -> None:
    """Write kubelet-client.crt and kubelet-client.key, by which kubelets know the API server (for logs and exec)."""
    sign(folder, "kubelet-client", "/O=system:masters/CN=kube-apiserver", "extendedKeyUsage=clientAuth\n")


def sign(folder: Path, name: str, subject: str, extensions: str) -> None:
    """Write <name>.crt and <name>.key, signed by the authority."""
    (folder / f"{name}.ext").write_text(extensions)
    request = str(folder / f"{name}.csr")
    openssl("req", "-new", *CURVE, "-subj", subject, "-keyout", str(folder / f"{name}.key"), "-out", request)
    signer = ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key"), "-CAcreateserial"]
    out = ["-extfile", str(folder / f"{name}.ext"), "-out", str(folder / f"{name}.crt")]
    openssl("x509", "-req", "-in", request, "-days", DAYS, *signer, *out)


def make_service_account_key(folder: Path) -> None:
    """Write sa.key and sa.pub, which sign and check service account tokens."""
    openssl("genrsa", "-out", str(folder / "sa.key"), "2048")
    openssl("pkey", "-in", str(folder / "sa.key"), "-pubout", "-out", str(folder / "sa.pub"))


def write_tokens(path: Path, identities: list[Identity]) -> None:
    """Write the API server's static token file."""
    lines = [f'{one.token},{one.user},{one.user},"{",".join(one.groups)}"' for one in identities]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)


def write_kubeconfig(path: Path, *, server: str, authority: Path, who: Identity) -> Path:
    """Write a kubeconfig (JSON, which is YAML) and return its path."""
    certificate = base64.b64encode(authority.read_bytes()).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority-data": certificate}}],
        "users": [{"name": who.user, "user": {"token": who.token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": who.user}}],
        "current-context": "test",
    }
    path.write_text(json.dumps(config, indent=1) + "\n")
    path.chmod(0o600)
    return path


def openssl(*arguments: str) -> None:
    run(["openssl", *arguments], label=f"openssl {arguments[0]}")
