"""Rules of spec.model.adapters. Listed in `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Problem
from .problems import show
from .spec import Spec


def adapters(spec: Spec) -> Iterator[Problem]:
    """Names that differ, from those of the model too; one source each, and a folder inside it."""
    seen: set[str] = set()
    for index, adapter in enumerate(spec.model.adapters):
        path, source = f"spec.model.adapters[{index}]", adapter.source
        if adapter.name in seen:
            yield Problem(f"{path}.name", f"{show(adapter.name)} is there twice", "distinct names", "rename it")
        if adapter.name in spec.model.served_names:
            taken = f"{show(adapter.name)} is one of spec.model.servedNames"
            yield Problem(f"{path}.name", taken, "a name of its own", "rename it")
        seen.add(adapter.name)
        if not adapter.name.isprintable():
            wrong = f"{show(adapter.name)} holds characters that cannot be printed"
            yield Problem(f"{path}.name", wrong, "letters, digits, marks and spaces", "rename it")
        kinds = {"pvc": source.pvc, "oci": source.oci, "hostPath": source.host_path}
        given = [name for name, value in kinds.items() if value is not None]
        if len(given) != 1:
            found = f"names {len(given)} sources ({', '.join(given)})" if given else "names no source"
            yield Problem(f"{path}.source", found, f"exactly one of {', '.join(kinds)}", "keep or add one of them")
        for field, folder in (
            ("pvc.path", source.pvc.path if source.pvc else ""),
            ("hostPath.subPath", source.host_path.sub_path if source.host_path else ""),
        ):
            if ".." in folder.split("/"):
                inside = "a folder inside the volume, without `..`"
                yield Problem(f"{path}.source.{field}", f"{show(folder)} leads out of it", inside, "name it directly")
