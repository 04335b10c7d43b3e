"""Fields of the resource that the documentation names are in the CRD."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from isthmus_operator.api.crd import crd

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "operator/docs").glob("*.md"))]
PARTS: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
BLOCKS = "|".join(PARTS["spec"]["properties"])
TOLD = re.compile(rf"`((?:spec|status|{BLOCKS})\.[A-Za-z.]*[A-Za-z])")
OTHERS = {"networkPolicy.nodeCIDRs", "spec.replicas", "router.py"}
"""A value of the chart, a field of RoleScaler, and a file."""


def is_field(path: str) -> bool:
    node: dict[str, Any] = {"properties": PARTS}
    for name in path.split("."):
        while "items" in node:
            node = node["items"]
        if "properties" not in node:
            return bool(node.get("x-kubernetes-preserve-unknown-fields")) or "additionalProperties" in node
        if name not in node["properties"]:
            return False
        node = node["properties"][name]
    return True


def test_fields_that_pages_name_are_in_the_crd() -> None:
    told = {(page.name, path) for page in PAGES for path in TOLD.findall(page.read_text(encoding="utf-8"))}
    assert ("guide.md", "engine.maxStepTime") in told
    wrong = [
        (page, path)
        for page, path in sorted(told)
        if path not in OTHERS and not is_field(path if path.startswith(("spec.", "status.")) else f"spec.{path}")
    ]
    assert not wrong
