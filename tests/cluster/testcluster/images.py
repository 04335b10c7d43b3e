"""Container images that need no build tool: programs of this machine, packed as `docker save` would."""

import hashlib
import io
import json
import shutil
import tarfile
from pathlib import Path

from testcluster.commands import run

BUSYBOX_IMAGE = "isthmus.test/busybox:1"
APPLETS = ("sh", "cat", "env", "hostname", "httpd", "id", "ls", "nslookup", "sleep")


def write_busybox_image(path: Path, tag: str, *, command: list[str], user: str) -> Path:
    """Write an archive with the static busybox of this machine under `tag` and return its path.

    It holds /bin/busybox, its applets as links, the folders a program expects, and bash with its libraries: a static
    program cannot look up names as others do (wget ends in a crash), and bash opens connections by /dev/tcp/HOST/PORT.
    Raises FileNotFoundError.
    """
    busybox = shutil.which("busybox")
    if busybox is None:
        raise FileNotFoundError("no busybox on PATH; on Debian install busybox-static")
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777), ("proc", 0o555), ("dev", 0o755)):
            add(tar, folder, mode, kind=tarfile.DIRTYPE)
        add(tar, "bin/busybox", 0o755, Path(busybox).read_bytes())
        for applet in APPLETS:
            add(tar, f"bin/{applet}", 0o777, kind=tarfile.SYMTYPE, link="busybox")
        for needed in with_libraries("/bin/bash"):
            add(tar, needed.lstrip("/"), 0o755, Path(needed).read_bytes())
        add(tar, "etc/passwd", 0o644, b"root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")
    return write_archive(path, tag, layer.getvalue(), command=command, user=user)


def with_libraries(program: str) -> list[str]:
    """The program and the shared libraries, loader included, that it needs, under the names it looks for."""
    words = run(["ldd", program]).split()
    return [program, *(word for word in words if word.startswith("/"))]


def add(
    tar: tarfile.TarFile, name: str, mode: int, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = ""
) -> None:
    info = tarfile.TarInfo(name)
    info.mode = mode
    info.type = kind
    info.linkname = link
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_archive(path: Path, tag: str, layer: bytes, *, command: list[str], user: str) -> Path:
    """Write one layer and its configuration in the format of `docker save`."""
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": command, "User": user, "Env": ["PATH=/bin"], "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    body = json.dumps(config).encode()
    name = hashlib.sha256(body).hexdigest()
    manifest = [{"Config": f"{name}.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode="w") as tar:
        add(tar, f"{name}.json", 0o644, body)
        add(tar, "layer.tar", 0o644, layer)
        add(tar, "manifest.json", 0o644, json.dumps(manifest).encode())
    return path
