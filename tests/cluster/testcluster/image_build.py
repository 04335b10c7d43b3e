"""Builds the project's images with docker or buildah and leaves an archive of each for `ctr images import`.

The default base is a public Python image. Where no image registry is reached, `base="debootstrap"` makes one from
Debian packages: minimal Debian with its Python, documentation and translations removed.
"""

import shutil
import subprocess
import tarfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testcluster.commands import CommandError, run
from testcluster.settings import CHECKOUT, Settings

BASE = "python:3.11-slim-bookworm"
DEBIAN = "bookworm"
DEBIAN_BASE = f"localhost/isthmus-base:{DEBIAN}"
PACKAGES = ("ca-certificates", "python3", "python3-venv")
# What only people read, and what apt fetches again when it is asked to.
USELESS = (
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/cache/debconf",
    "var/lib/apt/lists",
    "var/log",
)
LIMIT_MB = {"isthmus-operator": 300, "isthmus-router": 300}


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image: its Dockerfile and target, and whether a plain `make images` builds it."""

    name: str
    dockerfile: str
    target: str | None = None
    default: bool = True


IMAGES = (
    Image(name="isthmus-operator", dockerfile="operator/Dockerfile"),
    Image(name="isthmus-router", dockerfile="runtime/Dockerfile", target="router"),
    Image(name="isthmus-engine", dockerfile="runtime/Dockerfile", target="engine"),
    # For the end-to-end tests: the router image and what the nodes mount (node.py).
    Image(name="isthmus-engine-for-tests", dockerfile="tests/cluster/images/engine.Dockerfile", default=False),
)
FOR_TESTS = ("isthmus-operator", "isthmus-router", "isthmus-engine-for-tests")


class ImageError(RuntimeError):
    """An image cannot be built, or is not as promised."""


def version() -> str:
    """The version that images are tagged with: the operator distribution's."""
    project = tomllib.loads((CHECKOUT / "operator" / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def archive(settings: Settings, name: str) -> Path:
    """Where `build` leaves the archive of image `name`."""
    return settings.cache / "images" / f"{name}.tar"


def build(settings: Settings, names: Sequence[str], *, base: str = BASE) -> list[Path]:
    """Build the images `names`, print their sizes, and return their archives."""
    builder = choose(settings)
    (settings.cache / "images").mkdir(parents=True, exist_ok=True)
    if base == "debootstrap":
        base = debian_base(settings, builder)
    paths = []
    for image in IMAGES:
        if image.name in names:
            paths.append(build_one(settings, builder, image, base))
    return paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """The command prefixes of the build tool found on this machine."""

    name: str
    build: tuple[str, ...]
    save: tuple[str, ...]

    def export(self, tag: str, path: Path) -> None:
        if self.name == "docker":
            run([*self.save, "--output", str(path), tag], timeout=1800)
        else:
            run([*self.save, tag, f"docker-archive:{path}:{tag}"], timeout=1800)


def choose(settings: Settings) -> Builder:
    """docker where its daemon answers, else buildah; raises ImageError."""
    if shutil.which("docker") and succeeds(["docker", "info"]):
        return Builder(name="docker", build=("docker", "build"), save=("docker", "save"))
    if shutil.which("buildah") is None:
        raise ImageError("neither a docker daemon nor buildah; on Debian install buildah")
    store = settings.cache / "buildah"
    # Its storage is mounted in a namespace of its own, so that no mount stays behind.
    tool = ("unshare", "--mount", "--", "buildah", f"--root={store / 'root'}", f"--runroot={store / 'run'}")
    build_command = (*tool, "bud", "--isolation=chroot", "--layers", "--format=docker", *host_settings())
    return Builder(name="buildah", build=build_command, save=(*tool, "push", "--quiet"))


def host_settings() -> tuple[str, ...]:
    """Lets steps of a build use this machine's certificates and pip settings, without leaving them in the image."""
    files = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf")
    return tuple(f"--volume={path}:{path}:ro" for path in files if Path(path).is_file())


def succeeds(command: Sequence[str]) -> bool:
    try:
        run(command, timeout=20)
    except CommandError:
        return False
    return True


WITHOUT_REGISTRY = "Where no image registry is reached, `make images BASE=debootstrap` makes the base image too."


def build_one(settings: Settings, builder: Builder, image: Image, base: str) -> Path:
    """Build, export and measure one image."""
    start = time.monotonic()
    tag = f"{image.name}:{version()}"
    arguments = [
        f"--file={CHECKOUT / image.dockerfile}",
        f"--tag={tag}",
        f"--build-arg=BASE={base}",
        f"--build-arg=ROUTER={'localhost/' if builder.name == 'buildah' else ''}isthmus-router:{version()}",
        f"--build-arg=VERSION={version()}",
        f"--build-arg=REVISION={revision()}",
    ]
    if image.target is not None:
        arguments.append(f"--target={image.target}")
    print(f"images: {image.name}: building with {builder.name}", flush=True)
    log = settings.cache / "images" / f"{image.name}.log"
    with log.open("wb") as output:
        done = subprocess.run(
            [*builder.build, *arguments, str(CHECKOUT)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode != 0:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        text = f"{image.name}: {builder.name} ended with status {done.returncode}; {log} ends:\n{last}"
        raise ImageError(text if base == DEBIAN_BASE else f"{text}\n{WITHOUT_REGISTRY}")
    path = archive(settings, image.name)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    builder.export(tag, partial)
    partial.rename(path)
    size = path.stat().st_size / 1e6
    print(f"images: {tag}: {size:.0f} MB, {time.monotonic() - start:.0f} s, {path}", flush=True)
    limit = LIMIT_MB.get(image.name)
    if limit is not None and size >= limit:
        raise ImageError(f"{tag} is {size:.0f} MB; the limit is {limit} MB")
    return path


def revision() -> str:
    """The commit of the checkout, or `unknown` outside one."""
    try:
        return run(["git", "-C", str(CHECKOUT), "rev-parse", "HEAD"]).strip()
    except CommandError:
        return "unknown"


def debian_base(settings: Settings, builder: Builder) -> str:
    """Make the Debian base image unless it is there, and return its name."""
    root = settings.cache / "images" / "debian"
    tar = root / f"{DEBIAN}.tar"
    if not tar.exists():
        make_debian_tar(root, tar)
    dockerfile = root / "Dockerfile"
    dockerfile.write_text(f"FROM scratch\nADD {tar.name} /\n")
    print(f"images: {DEBIAN_BASE}: {tar.stat().st_size / 1e6:.0f} MB", flush=True)
    run([*builder.build, f"--file={dockerfile}", f"--tag={DEBIAN_BASE}", str(root)], timeout=600)
    return DEBIAN_BASE


def make_debian_tar(root: Path, tar: Path) -> None:
    """Run debootstrap from the package index that this machine's apt uses, and pack the result."""
    if shutil.which("debootstrap") is None:
        raise ImageError("no debootstrap; on Debian install it, or name a base image: make images BASE=...")
    start = time.monotonic()
    print(f"images: making a Debian {DEBIAN} base with {', '.join(PACKAGES)}", flush=True)
    root.mkdir(parents=True, exist_ok=True)
    tree = root / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", DEBIAN, str(tree), debian_site()]
    # It mounts /proc in the tree: in a namespace of its own that is gone with it.
    run(["unshare", "--mount", "--", *command], timeout=1800)
    for name in USELESS:
        shutil.rmtree(tree / name, ignore_errors=True)
        (tree / name).mkdir(parents=True)
    partial = tar.with_suffix(".partial")
    with tarfile.open(partial, "w") as packed:
        for entry in sorted(tree.iterdir()):
            packed.add(entry, arcname=entry.name, recursive=True, filter=plain_files)
    partial.rename(tar)
    shutil.rmtree(tree)
    print(f"images: Debian base made in {time.monotonic() - start:.0f} s", flush=True)


def plain_files(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out device nodes: the container runtime makes its own."""
    return None if info.isdev() else info


def debian_site() -> str:
    """Where this machine's apt gets Debian from."""
    listed = run(["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME) $(ORIGIN)"])
    for line in listed.splitlines():
        site, codename, origin = [*line.split(), "", ""][:3]
        if codename == DEBIAN and origin == "Debian":
            return site
    raise ImageError(f"apt here has no index of Debian {DEBIAN}; run apt-get update, or name a base image")
