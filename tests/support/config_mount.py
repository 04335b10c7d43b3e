"""A mounted ConfigMap, changed as a kubelet does it."""

from __future__ import annotations

from pathlib import Path


def swap(mount: Path, name: str, text: str) -> None:
    """`mount`/`name` has `text` from one moment to the next: a new folder, and a link that changes at once."""
    mount.mkdir(exist_ok=True)
    folder = f"..{len(list(mount.iterdir()))}"
    (mount / folder).mkdir()
    (mount / folder / name).write_text(text)
    (mount / "..tmp").symlink_to(folder)
    (mount / "..tmp").replace(mount / "..data")
    if not (mount / name).is_symlink():
        (mount / name).symlink_to(f"..data/{name}")
