"""The chart's files as they lie: values and schema in step, the CRD's copy, versions. Needs no helm."""

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from chart import CHART, ROOT, StrictLoader

from isthmus_operator.render.names import Defaults

VALUES_TEXT = (CHART / "values.yaml").read_text()
VALUES = yaml.load(VALUES_TEXT, Loader=StrictLoader)
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
META = yaml.safe_load((CHART / "Chart.yaml").read_text())
FROM_HELM = {"global"}  # passed to a chart that is used inside another


def keys(values: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield path + name
        # Resources are the user's own map; its entries here are a default.
        if isinstance(value, dict) and not path.startswith("operator.resources."):
            yield from keys(value, f"{path}{name}.")


def schema_at(path: str) -> dict[str, Any]:
    node: dict[str, Any] = SCHEMA
    for name in path.split("."):
        children = node.get("properties", {})
        further = node.get("additionalProperties")
        if name in children:
            node = children[name]
        else:
            assert isinstance(further, dict), f"{path}: not in values.schema.json"
            node = further
    return node


@pytest.mark.parametrize("path", list(keys(VALUES)))
def test_every_value_is_in_the_schema(path: str) -> None:
    assert schema_at(path)


def test_every_field_of_the_schema_is_in_the_values() -> None:
    def fields(node: dict[str, Any], path: str = "") -> Iterator[str]:
        for name, child in node.get("properties", {}).items():
            yield path + name
            yield from fields(child, f"{path}{name}.")

    written = set(keys(VALUES)) | FROM_HELM
    # The empty default stands for "no issuer"; its fields are in the comment above it.
    missing = {path for path in fields(SCHEMA) if path not in written and ".issuerRef." not in path}
    assert not missing


def test_the_schema_is_strict_everywhere() -> None:
    def loose(node: Any, path: str) -> Iterator[str]:
        if isinstance(node, dict):
            if "properties" in node and node.get("type") == "object" and node.get("additionalProperties") is not False:
                yield path
            for name, child in node.items():
                yield from loose(child, f"{path}/{name}")

    assert list(loose(SCHEMA, "")) == []


def test_every_value_has_a_comment_above_it() -> None:
    lines = VALUES_TEXT.splitlines()
    bare = [
        line
        for above, line in zip(["", *lines], lines, strict=False)
        if re.match(r"^ *[A-Za-z]+:", line) and not above.lstrip().startswith("#")
    ]
    # A block that only groups values needs no comment: its values have theirs.
    groups = {f"{name}:" for name, value in VALUES.items() if isinstance(value, dict) and value} | {"  certificate:"}
    assert set(bare) - groups == set()


def test_the_copy_of_the_crd_is_current() -> None:
    sources = {path.name: path.read_bytes() for path in (ROOT / "crds").glob("*.yaml")}
    copies = {path.name: path.read_bytes() for path in (CHART / "crds-files").iterdir()}
    assert copies == sources, "charts/isthmus/crds-files differs from crds/: run 'make generate'"


def test_helm_does_not_manage_the_crd_its_own_way() -> None:
    """Helm installs a folder `crds` once and never upgrades it."""
    assert not (CHART / "crds").exists()


def test_versions_are_those_of_the_operator() -> None:
    version = tomllib.loads((ROOT / "operator" / "pyproject.toml").read_text())["project"]["version"]
    assert META["appVersion"] == version
    assert META["version"] == version


def test_default_images_are_those_of_the_operator() -> None:
    images, defaults = VALUES["images"], Defaults()
    assert f"{images['engine']['repository']}:{META['appVersion']}" == defaults.engine_image
    assert f"{images['router']['repository']}:{META['appVersion']}" == defaults.router_image
