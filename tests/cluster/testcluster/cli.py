"""`python tests/cluster/cluster.py build|find|up|load|down|status`: the cluster of `make cluster-up`."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from testcluster import binaries, cluster, image_build, settings, state
from testcluster.commands import CommandError
from testcluster.launch import StartError
from testcluster.settings import Settings

MODELS = Path("/var/lib/isthmus/models")
ERRORS = (
    binaries.BuildError,
    binaries.MissingBinariesError,
    CommandError,
    StartError,
    image_build.ImageError,
    state.LeftoverError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cluster.py", description="A Kubernetes cluster on this machine, for tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build the programs that are not there yet")
    build.add_argument("--fast", action="store_true", help="only what the light form needs")
    look = commands.add_parser("find", help="say nothing if the programs are built; else say what is missing")
    look.add_argument("--fast", action="store_true", help="only what the light form needs")
    up = commands.add_parser("up", help="start a cluster and leave it running")
    up.add_argument("--light", action="store_true", help="API server and controllers with simulated nodes only")
    up.add_argument("--gpus", type=int, default=4, help="GPUs to advertise on each node (default: 4)")
    pack = commands.add_parser("images", help="build the project's images and say how large they are")
    pack.add_argument("names", nargs="*", help="which (default: all but the tests' own; `tests`: what the tests use)")
    pack.add_argument("--base", default=image_build.BASE, help="base image, or `debootstrap` to make one")
    into = commands.add_parser("load", help="bring images, and a model's folder, onto every node")
    into.add_argument("names", nargs="*", help="as of `images`")
    into.add_argument("--model", type=Path, help=f"folder of a model; nodes have it below {MODELS}")
    commands.add_parser("down", help="stop every cluster that no running test owns, and remove what it made")
    commands.add_parser("status", help="say what runs")
    options = parser.parse_args(arguments)
    ours = settings.load()
    try:
        if options.command == "build":
            binaries.build(ours, binaries.FAST if options.fast else binaries.FULL)
            return 0
        if options.command == "find":
            binaries.find(ours, binaries.FAST if options.fast else binaries.FULL)
            return 0
        if options.command == "images":
            image_build.build(ours, image_names(options.names), base=options.base)
            return 0
        if options.command == "load":
            return load(ours, image_names(options.names), options.model)
        if options.command == "up":
            return start(ours, light=options.light, gpus=options.gpus)
        if options.command == "down":
            return stop_all(ours)
        return show(ours)
    except ERRORS as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


def image_names(chosen: Sequence[str]) -> list[str]:
    """The images meant by the command's arguments."""
    if not chosen:
        return [image.name for image in image_build.IMAGES if image.default]
    names = [name for one in chosen for name in (image_build.FOR_TESTS if one == "tests" else (one,))]
    known = {image.name for image in image_build.IMAGES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise image_build.ImageError(f"no image {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return names


def runs(ours: Settings) -> Path:
    """Where running clusters keep their files, a folder each."""
    return ours.cache / "run"


def default_folder(ours: Settings) -> Path:
    """The folder of the cluster that this command starts."""
    return runs(ours) / "main"


def start(ours: Settings, *, light: bool, gpus: int) -> int:
    begin = time.monotonic()
    folder = default_folder(ours)
    if light:
        running = cluster.start_control_plane(ours, folder, follow=False)
    else:
        running = cluster.start_cluster(ours, folder, follow=False, gpus=gpus)
    print(f"cluster: up in {time.monotonic() - begin:.1f} s; use it with:")
    print(f"  export KUBECONFIG={running.kubeconfig}")
    print(f"  export PATH={binaries.find(ours, ('kubectl',)).folders()}:$PATH")
    return 0


def load(ours: Settings, names: Sequence[str], model: Path | None) -> int:
    """Import images that are built into every node, and have a model's folder at the place that the examples name."""
    running = cluster.attach(ours, default_folder(ours))
    if running is None:
        raise StartError("no full cluster of `make cluster-up` is up")
    absent = [name for name in names if not image_build.archive(ours, name).is_file()]
    if absent:
        raise image_build.ImageError(f"not built yet: {', '.join(absent)}; run make images")
    if model is not None and not model.is_dir():
        raise StartError(f"{model}: no such folder; run make model, or give MODEL=folder")
    for name in names:
        running.import_image(image_build.archive(ours, name))
        print(f"cluster: {name}:{image_build.version()} is on {len(running.nodes)} nodes", flush=True)
    if model is not None:
        place = MODELS / model.resolve().name
        running.show_folder(model.resolve(), place)
        print(f"cluster: the model is at {place} of every node")
    return 0


def stop_all(ours: Settings) -> int:
    begin = time.monotonic()
    count = 0
    for folder in sorted(runs(ours).glob("*")) if runs(ours).is_dir() else []:
        if folder.suffix == ".failed":
            shutil.rmtree(folder)
        elif state.load(folder) is not None and not owned(folder):
            cluster.take_down(folder)
            count += 1
            print(f"cluster: {folder.name} is down")
    print(f"cluster: {count} taken down in {time.monotonic() - begin:.1f} s")
    return 0


def show(ours: Settings) -> int:
    """Print each cluster's processes; status 1 unless one is wholly up."""
    up = False
    for folder in sorted(runs(ours).glob("*")) if runs(ours).is_dir() else []:
        known = state.load(folder)
        if known is None:
            continue
        print(f"{folder.name}: KUBECONFIG={folder / 'kubeconfig'}")
        for process in known.processes:
            alive = process.alive()
            total = memory(process.pid) / 2**20 if alive else 0.0
            print(f"  {process.name:14} pid {process.pid:7} {f'up, {total:.0f} MiB' if alive else 'GONE'}")
        up = up or (bool(known.processes) and all(process.alive() for process in known.processes))
    if not up:
        print("cluster: none is up")
    return 0 if up else 1


def memory(pid: int) -> int:
    """Resident bytes of the process and all below it; shared pages count once a process."""
    total = 0
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        total = pages * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return total + sum(memory(child) for child in state.children(pid))


def session_folder(ours: Settings, form: str) -> Path:
    """A folder for a cluster that belongs to this process and is named after it."""
    return runs(ours) / f"{form}-of-{os.getpid()}-{state.start_time(os.getpid())}"


def owned(folder: Path) -> bool:
    """Whether the process that `folder` is named after still runs."""
    _, _, owner = folder.name.partition("-of-")
    if not owner:
        return False
    pid, _, start = owner.partition("-")
    return state.start_time(int(pid)) == int(start)


def sweep(ours: Settings) -> None:
    """Take down what test runs that have ended left behind."""
    for folder in runs(ours).glob("*-of-*") if runs(ours).is_dir() else []:
        if state.load(folder) is not None and not owned(folder):
            cluster.take_down(folder)
