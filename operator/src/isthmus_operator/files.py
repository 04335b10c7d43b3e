"""Reads a YAML file of one InferenceService, with the ConfigMaps and Secrets a local run may need beside it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .api.v1alpha1 import API_VERSION, KIND
from .errors import BadFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """service: the InferenceService as written; objects: (kind, name) -> ConfigMap or Secret."""

    service: dict[str, Any]
    objects: dict[tuple[str, str], dict[str, Any]]


STDIN = "-"


_MOST_NESTED = 100
"""Levels. What reads YAML takes time by their square, and a library may have raised the interpreter's own limit."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without the silent loss of a field that is written twice, and not nested without end."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            place = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            text = f"it is nested too deeply, in more than {_MOST_NESTED} levels"
            raise yaml.composer.ComposerError(None, None, text, place)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, AttributeError, TypeError) as error:  # of a date or a number that is none
            text = f"{str(node.value)[:40]!r} cannot be read ({error}); put text in quotes"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the field {key!r} is there twice; keep one", key_node.start_mark
                )
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


def load(path: str) -> Documents:
    """A file, or standard input where `path` is `-`. BadFile names the file, the place and the fix."""
    try:
        text = sys.stdin.read() if path == STDIN else Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadFile(f"{path}: no such file; give the path of a YAML file, for example examples/direct.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: cannot be read: {error}") from error
    path = "standard input" if path == STDIN else path
    try:
        documents = [d for d in yaml.load_all(text, Loader=_Loader) if d is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise BadFile(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise BadFile(f"{path}: not valid YAML: {error}") from None
    return _sorted_out(path, documents)


def _sorted_out(path: str, documents: list[Any]) -> Documents:
    services: list[dict[str, Any]] = []
    objects: dict[tuple[str, str], dict[str, Any]] = {}
    for number, document in enumerate(documents, start=1):
        if not isinstance(document, dict):
            raise BadFile(f"{path}: document {number} is not a mapping; it must begin with apiVersion: {API_VERSION}")
        kind = document.get("kind")
        if kind == KIND:
            services.append(document)
        elif kind in ("ConfigMap", "Secret"):
            meta = document.get("metadata")
            if not isinstance(meta, dict) or not isinstance(meta.get("name"), str):
                raise BadFile(f"{path}: document {number} is a {kind} without metadata.name, a text")
            objects[kind, meta["name"]] = document
        else:
            found = f"kind {kind!r}" if kind else "no kind"
            raise BadFile(f"{path}: document {number} has {found}; allowed: {KIND}, and ConfigMap or Secret beside it")
    if len(services) != 1:
        raise BadFile(f"{path}: holds {len(services)} resources of kind {KIND}; give exactly one per file")
    return Documents(service=services[0], objects=objects)
