"""Turns the findings of pydantic into `Problem`s: field path, value, what is allowed, fix. Called by v1alpha1.parse."""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from ..errors import Problem
from .router_spec import Router
from .spec import (
    Availability,
    Engine,
    KvCache,
    KvMemory,
    ManagedMaster,
    Observability,
    Parallelism,
    Rdma,
    RoleEngine,
    Store,
)

Location = tuple[int | str, ...]

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "model_type": "a mapping of fields",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
}
_PATTERNS = {
    r"^/[^\s]*[^/\s]$": "an absolute path without spaces and without a slash at its end",
    r"^\w[\w.-]*/\w[\w.-]*$": "owner/name",
    r"^s3://[^/\s]+/[^\s]+$": "s3://bucket/prefix",
    r"^[A-Za-z0-9_][^\s:/]*:[0-9]{1,5}$": "host:port, the host without a dash at its beginning",
    r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$": "lower-case letters, digits, '-' and '.'",
    r"^[a-z][a-z0-9-]*$": "a flag name without dashes in front, in lower case",
    r"^https?://[^\s]+$": "a URL that begins with http:// or https://",
}


_LATER: dict[tuple[type[BaseModel], str], str] = {
    (Parallelism, "pipeline"): "remove it; tensor splits a model over the processes of a pod",
    (KvCache, "hostOffload"): "remove it; spec.store keeps KV in the host memory of all engine pods",
    (Store, "ssd"): "remove it",
    (Store, "ha"): "remove it; engines register again with a master that was restarted",
    (ManagedMaster, "replicas"): "remove it: one master runs, and is restarted",
    (Rdma, "devices"): "remove it: engines use the devices that resourceName gives their pod",
    (Rdma, "gidIndex"): "remove it",
    (Router, "tls"): "remove it; end TLS at a Gateway (spec.router.expose.httpRoute) or an Ingress",
    (Availability, "recovery"): "remove it: pods of a role are restarted one by one",
    (Observability, "tracing"): "remove it; metrics are at /metrics of every pod",
}
"""Fields that other versions have or may get, and that would do nothing here -> what to do instead."""


_SHOWN = json.JSONEncoder(default=str, ensure_ascii=False, check_circular=False, skipkeys=True)


def show(value: object) -> str:
    """A value as the user wrote it, shortened."""
    if isinstance(value, Enum):
        value = value.value
    text = ""
    # Piece by piece: what refers to itself many times over, as aliases in YAML do, has no end.
    for piece in _SHOWN.iterencode(value):
        text += piece
        if len(text) > 80:
            return text[:77] + "..."
    return text


def path_of(location: Location, root: str = "spec") -> str:
    """Field path: `spec.model.servedNames[0]`."""
    path = root
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path


def nearest(word: str, known: Sequence[str]) -> str:
    """The known name closest to `word`, or nothing."""
    by_folded = {name.lower(): name for name in known}
    if found := by_folded.get(word.lower().replace("_", "").replace("-", "")):
        return found
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return matches[0] if matches else ""


def from_pydantic(
    model: type[BaseModel], errors: Sequence[ErrorDetails], root: str = "spec"
) -> list[tuple[Location, Problem]]:
    """One problem per finding, with its location relative to `model`."""
    return [_one(model, error, root) for error in errors]


def _one(model: type[BaseModel], error: ErrorDetails, root: str) -> tuple[Location, Problem]:
    # A bad mapping key is reported at (..., key, "[key]").
    bad_key = error["loc"][-1:] == ("[key]",)
    location: Location = error["loc"][:-1] if bad_key else error["loc"]
    path, kind, context = path_of(location, root), error["type"], error.get("ctx", {})
    value = show(error["input"])
    if kind == "extra_forbidden":
        return location, _unknown(model, location, path)
    if kind == "missing":
        return location, Problem(path, "is missing", "a value", f"set {path}")
    if kind == "enum":
        return location, _choice(model, location, path, error["input"])
    if kind == "value_error":
        return location, Problem(path, f"{value} is not accepted", str(context["error"]), "write it in that form")
    if kind in _TYPES:
        quoted = isinstance(error["input"], str) and kind[:3] in ("int", "flo", "boo")
        fix = "remove the quotes" if quoted else f"give {_TYPES[kind]}"
        return location, Problem(path, f"{value} has the wrong type", _TYPES[kind], fix)
    if kind == "string_pattern_mismatch":
        form = _PATTERNS.get(context["pattern"], f"text that matches {context['pattern']}")
        return location, Problem(path, f"{value} has the wrong form", form, "write it in that form")
    bounds = {"greater_than_equal": ("ge", "{} or more"), "greater_than": ("gt", "above {}"),
              "less_than_equal": ("le", "{} or less"), "less_than": ("lt", "below {}")}  # fmt: skip
    if kind in bounds:
        key, text = bounds[kind]
        return location, Problem(path, f"{value} is out of range", text.format(context[key]), "choose a value in range")
    return location, Problem(path, f"{value} is not accepted", error["msg"].lower(), "change or remove it")


def _unknown(model: type[BaseModel], location: Location, path: str) -> Problem:
    parent, name = block_at(model, location[:-1]), str(location[-1])
    known = _aliases(parent) if parent else []
    if parent in (RoleEngine, KvMemory) and name in _aliases(Engine) + _aliases(KvCache):
        shared = "spec.engine." + ("kvCache." if parent is KvMemory else "") + name
        return Problem(
            path,
            "must be the same for prefill and decode",
            ", ".join(known),
            f"set {shared} for all roles and remove it here",
        )
    if parent is not None and (instead := _LATER.get((parent, name))):
        return Problem(path, "is not supported in this version", ", ".join(known), instead)
    near = nearest(name, known)
    fix = f"did you mean {near}?" if near else "remove it"
    return Problem(path, "is not a field", ", ".join(known), fix)


def _choice(model: type[BaseModel], location: Location, path: str, value: object) -> Problem:
    parent = block_at(model, location[:-1])
    choices: list[str] = []
    if parent is not None:
        info = next((f for n, f in parent.model_fields.items() if (f.alias or n) == location[-1]), None)
        types = _flatten(info.annotation if info else None)
        enum = next((t for t in types if isinstance(t, type) and issubclass(t, Enum)), None)
        choices = [str(member.value) for member in enum] if enum else []
    near = nearest(str(value), choices)
    return Problem(path, f"{show(value)} is not one of the choices", " | ".join(choices),
                   f"did you mean {near}?" if near else "use one of them")  # fmt: skip


def _aliases(block: type[BaseModel]) -> list[str]:
    return [info.alias or name for name, info in block.model_fields.items()]


def _flatten(annotation: Any) -> list[Any]:
    """All types inside unions, containers and Annotated."""
    if get_origin(annotation) is None:
        return [annotation]
    return [leaf for argument in get_args(annotation) for leaf in _flatten(argument)]


def block_at(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The block type found at a location; None where values are free-form."""
    current: type[BaseModel] | None = model
    for part in location:
        if current is None:
            return None
        if isinstance(part, int):
            continue
        hints = typing.get_type_hints(current)
        name = next((n for n, f in current.model_fields.items() if (f.alias or n) == part), None)
        leaves = _flatten(hints[name]) if name else []
        current = next((t for t in leaves if isinstance(t, type) and issubclass(t, BaseModel)), None)
    return current


def without(data: Mapping[str, Any], locations: Sequence[Location]) -> dict[str, Any]:
    """A deep copy without what lies at the locations, so that the rest can still be checked."""
    copy: dict[str, Any] = json.loads(json.dumps(data, default=str))
    # Longest indices first, so that removing one list item does not shift another.
    for location in sorted(locations, key=lambda where: [str(p).zfill(9) for p in where], reverse=True):
        holder: Any = copy
        for part in location[:-1]:
            try:
                holder = holder[part]
            except (KeyError, IndexError, TypeError):
                break
        else:
            if isinstance(holder, dict):
                holder.pop(location[-1], None)
            elif isinstance(holder, list) and isinstance(location[-1], int) and location[-1] < len(holder):
                del holder[location[-1]]
    return copy
