"""What the environment says about where test clusters are built and kept. The only reader of it here."""

import os
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent / "tools"
CHECKOUT = TOOLS.parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Folders and limits of the test cluster.

    `cache`: binaries, images and the state of running clusters, `$ISTHMUS_CACHE/cluster`.
    `assets`: a folder with a ready control plane, `$KUBEBUILDER_ASSETS`, used before anything built here.
    `jobs`: compilers that run at once, `$CLUSTER_BUILD_JOBS`.
    `required`: `$ISTHMUS_REQUIRE_CLUSTER`: a missing binary fails a test where it would skip it.
    `kubeconfig`: `$E2E_KUBECONFIG`: run the end-to-end tests against this cluster and start none.
    """

    cache: Path
    assets: Path | None
    jobs: int
    required: bool
    kubeconfig: Path | None


def load() -> Settings:
    """Read the environment once; a malformed value raises ValueError and names the variable."""
    env = os.environ
    base = Path(env.get("ISTHMUS_CACHE") or Path.home() / ".cache" / "isthmus")
    jobs = env.get("CLUSTER_BUILD_JOBS") or "2"
    if not jobs.isdecimal() or int(jobs) < 1:
        raise ValueError(f"CLUSTER_BUILD_JOBS={jobs!r}: give a whole number of at least 1")
    return Settings(
        cache=base / "cluster",
        assets=Path(env["KUBEBUILDER_ASSETS"]) if env.get("KUBEBUILDER_ASSETS") else None,
        jobs=int(jobs),
        required=env.get("ISTHMUS_REQUIRE_CLUSTER", "") not in ("", "0"),
        kubeconfig=Path(env["E2E_KUBECONFIG"]).resolve() if env.get("E2E_KUBECONFIG") else None,
    )


def child_environment(**extra: str) -> dict[str, str]:
    """The environment of a child process: ours and `extra`."""
    return {**os.environ, **extra}
