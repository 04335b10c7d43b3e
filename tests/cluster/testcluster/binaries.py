"""Builds the cluster's programs from the Go modules of tests/cluster/tools and finds them again.

A module's programs lie in `<cache>/bin/<module>-<hash>/`, the hash taken over go.mod, go.sum, our own sources and the
build flags, so that a checkout with other versions builds beside them and an unchanged one builds nothing.
"""

import fcntl
import hashlib
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testcluster.settings import TOOLS, Settings, child_environment

KUBERNETES = "k8s.io/kubernetes/cmd"
CONTAINERD = "github.com/containerd/containerd/v2/cmd"

# module folder -> program -> its main package, in the order they are built: what the fast tests need comes first.
MODULES: dict[str, dict[str, str]] = {
    "etcd": {"etcd": "go.etcd.io/etcd/server/v3"},
    "kubernetes": {
        name: f"{KUBERNETES}/{name}"
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubectl",
            "kubelet",
            "kube-proxy",
        )
    },
    "kwok": {"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
    "containerd": {name: f"{CONTAINERD}/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
    "kube-router": {"kube-router": "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"},
    "coredns": {"coredns": "."},
    "helm": {"helm": "helm.sh/helm/v4/cmd/helm"},
}
FAST = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kwok")
FULL = tuple(program for programs in MODULES.values() for program in programs)
# What a KUBEBUILDER_ASSETS folder must hold to be taken for a control plane.
ASSETS = ("etcd", "kube-apiserver", "kubectl")

PROGRESS_S = 15.0


class MissingBinariesError(RuntimeError):
    """Programs that the cluster needs are not built."""


class BuildError(RuntimeError):
    """The compiler failed; the message ends with what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """Where each program lies."""

    paths: dict[str, Path]

    def __getitem__(self, program: str) -> str:
        return str(self.paths[program])

    def folders(self) -> str:
        """The folders joined as a PATH."""
        return ":".join(sorted({str(path.parent) for path in self.paths.values()}))


def find(settings: Settings, programs: tuple[str, ...] = FULL) -> Binaries:
    """Find built `programs`; raises MissingBinariesError that names what is missing and how to build it."""
    paths: dict[str, Path] = {}
    missing: list[str] = []
    for program in programs:
        path = asset(settings, program) or built_path(settings, program)
        if path.is_file():
            paths[program] = path
        else:
            missing.append(program)
    if missing:
        raise MissingBinariesError(f"not built: {', '.join(missing)}; run 'make cluster-build'")
    return Binaries(paths=paths)


def asset(settings: Settings, program: str) -> Path | None:
    """The program in KUBEBUILDER_ASSETS, if that folder holds a control plane and this program."""
    if settings.assets is None or not all((settings.assets / name).is_file() for name in ASSETS):
        return None
    path = settings.assets / program
    return path if path.is_file() else None


def built_path(settings: Settings, program: str) -> Path:
    """Where `build` puts `program`."""
    module = next(name for name, programs in MODULES.items() if program in programs)
    return settings.cache / "bin" / f"{module}-{module_hash(module)}" / program


def module_hash(module: str) -> str:
    """The first 16 hex digits of the hash over everything that decides what the programs of `module` are."""
    digest = hashlib.sha256()
    for path in (TOOLS / module / "go.mod", TOOLS / module / "go.sum", *sorted((TOOLS / module).glob("*.go"))):
        digest.update(path.read_bytes())
    digest.update("\0".join(flags(module)).encode())
    return digest.hexdigest()[:16]


def flags(module: str) -> list[str]:
    """The build flags of `module`: stripped, reproducible, and for Kubernetes stamped with its version."""
    linker = ["-s", "-w"]
    if module == "kubernetes":
        version = module_version(module, "k8s.io/kubernetes")
        major, minor, _ = version.removeprefix("v").split(".", 2)
        stamp = "k8s.io/component-base/version"
        values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
        for key, value in values.items():
            linker += ["-X", f"{stamp}.{key}={value}"]
    return ["-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", " ".join(linker)]


def module_version(module: str, dependency: str) -> str:
    """The version of `dependency` that `module`'s go.mod requires."""
    for line in (TOOLS / module / "go.mod").read_text().splitlines():
        words = line.removeprefix("require").split()
        if len(words) >= 2 and words[0] == dependency and words[1].startswith("v"):
            return words[1]
    raise ValueError(f"{module}/go.mod requires no {dependency}")


def build(settings: Settings, programs: tuple[str, ...] = FULL) -> Binaries:
    """Build what is missing of `programs`, printing progress; safe to run several times at once."""
    (settings.cache / "bin").mkdir(parents=True, exist_ok=True)
    with lock(settings.cache / "bin" / ".lock"):
        todo = [p for p in programs if asset(settings, p) is None and not built_path(settings, p).is_file()]
        if not todo:
            say(f"all {len(programs)} programs are there")
            return find(settings, programs)
        if shutil.which("go") is None:
            raise BuildError(f"no Go compiler on PATH to build {', '.join(todo)}; install Go 1.26 or later")
        start = time.monotonic()
        for number, program in enumerate(todo, start=1):
            compile_program(settings, program, f"[{number}/{len(todo)}] {program}")
        say(f"{len(todo)} programs built in {time.monotonic() - start:.0f} s")
    return find(settings, programs)


def compile_program(settings: Settings, program: str, label: str) -> None:
    """Run the compiler for one program at low priority; the finished file is renamed into place."""
    module = next(name for name, programs in MODULES.items() if program in programs)
    target = built_path(settings, program)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{program}.partial")
    polite = ["nice", "-n", "19"] + (["ionice", "-c3"] if shutil.which("ionice") else [])
    jobs = str(settings.jobs)
    command = [*polite, "go", "build", "-v", "-p", jobs, *flags(module), "-o", str(partial), MODULES[module][program]]
    start = time.monotonic()
    say(f"{label}: compiling")
    process = subprocess.Popen(
        command,
        cwd=TOOLS / module,
        env=child_environment(CGO_ENABLED="0", GOMAXPROCS=jobs, GOWORK="off"),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    said = watch(process, label, start)
    if process.wait() != 0:
        partial.unlink(missing_ok=True)
        last = "\n".join(said.splitlines()[-20:])
        raise BuildError(f"{program}: go build failed with status {process.returncode}:\n{last}")
    partial.rename(target)
    say(f"{label}: done in {time.monotonic() - start:.0f} s, {target.stat().st_size / 1e6:.0f} MB")


def watch(process: subprocess.Popen[bytes], label: str, start: float) -> str:
    """Return what the compiler printed; every PROGRESS_S seconds say how many packages it has named so far."""
    assert process.stderr is not None
    said = b""
    shown = start
    with selectors.DefaultSelector() as selector:
        selector.register(process.stderr, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=PROGRESS_S):
                chunk = os.read(process.stderr.fileno(), 65536)
                if not chunk:
                    return said.decode(errors="replace")
                said += chunk
            now = time.monotonic()
            if now - shown >= PROGRESS_S:
                shown = now
                lines = said.count(b"\n")
                say(f"{label}: {lines} packages, {now - start:.0f} s")


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the file lock `path`; a second builder waits for the first and then finds its work done."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is running; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    print(f"cluster-build: {text}", flush=True)
