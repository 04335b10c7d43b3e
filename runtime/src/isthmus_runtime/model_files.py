"""The files of a model folder, wherever it was mounted from: none of them is a link to somewhere else.

Whoever publishes a model decides what is in its folder. A link in it is followed in this process, which has more
mounted than the model: keys of tenants, its own credential. What a chat template is made of, any client may ask for.
"""

from __future__ import annotations

from pathlib import Path

from .errors import ConfigError


def check_links(folder: str | Path) -> None:
    """Raise ConfigError for files of `folder` that lie elsewhere. Those of a Hugging Face cache may be in its blobs."""
    root = Path(folder).resolve()
    inside = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    wrong = []
    for path in sorted((*root.glob("*"), *root.glob("*/*"))):
        if path.is_symlink() and not any(path.resolve().is_relative_to(place) for place in inside):
            wrong.append(
                f"{path}: is a link out of its folder, which may lead anywhere; put the file itself there (cp -L)"
            )
    if wrong:
        raise ConfigError(wrong[:8])
