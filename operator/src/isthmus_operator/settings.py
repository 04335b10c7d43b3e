"""What the surroundings say: the only module of this distribution that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where models are kept on this machine: ISTHMUS_CACHE, or ~/.cache/isthmus."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("ISTHMUS_CACHE") or Path.home() / ".cache" / "isthmus")


def inherited_environment() -> dict[str, str]:
    """What local processes get beside their container's own variables: search paths, locale, proxies, devices."""
    return dict(os.environ)
