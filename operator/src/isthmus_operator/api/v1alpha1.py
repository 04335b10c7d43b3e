"""InferenceService, serving.isthmus.dev/v1alpha1: the parsed resource. Only `parse` and `parse_stored` make one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ..errors import InvalidSpec, Problem
from . import rules
from .limits import MOST_PROBLEMS, most, too_large
from .problems import Location, from_pydantic, nearest, path_of, show, without
from .profile import PERMISSIVE, Profile, refused
from .spec import Spec

GROUP = "serving.isthmus.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceService"
PLURAL = "inferenceservices"

MAX_NAME = 40
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
RESERVED_SUFFIXES = ("-prefill", "-decode", "-worker", "-router", "-store")
"""A service with such a name would share its Service object with a child of another service."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InferenceService:
    """One validated resource, which nobody changes. `uid` and `generation` are empty for a file that was never applied.
    Two of the same text are not equal: it is a key for what was computed of it.
    """

    name: str
    namespace: str
    spec: Spec
    uid: str = ""
    generation: int = 0

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names clients may ask for."""
        return self.spec.model.served_names or (self.name,)


def parse(manifest: Mapping[str, Any], *, namespace: str = "default") -> InferenceService:
    """A user's manifest as a validated resource; `namespace` is for manifests that name none.

    Raises InvalidSpec with every problem found: unknown fields, wrong values and broken rules together.
    """
    return _parse(manifest, namespace, strict=True)


def parse_stored(body: Mapping[str, Any], profile: Profile = PERMISSIVE) -> InferenceService:
    """A resource as the API server hands it out. Raises InvalidSpec, also for what the installation does not let
    services do, but not for a field that is not known here.

    Those that nobody knows, the server has dropped. What is left is of a newer CRD, and the server fills its defaults
    into every resource before the operator is upgraded too.
    """
    return _parse(body, "default", strict=False, profile=profile)


def _parse(
    manifest: Mapping[str, Any], namespace: str, *, strict: bool, profile: Profile = PERMISSIVE
) -> InferenceService:
    metadata = manifest.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    name = metadata.get("name")
    found = _envelope(manifest) + _metadata(metadata)
    raw_spec = manifest.get("spec", {})
    spec, problems = _spec({} if raw_spec is None else raw_spec, strict)
    found += problems
    namespace = str(metadata.get("namespace") or namespace)
    if spec is not None:
        found += _names(spec, name)
        found += most(refused(spec, profile, namespace))
    if found or spec is None:
        raise InvalidSpec(str(name or ""), most(sorted(found, key=lambda problem: problem.path)))
    generation = metadata.get("generation")
    return InferenceService(
        name=str(name),
        namespace=namespace,
        spec=spec,
        uid=str(metadata.get("uid") or ""),
        generation=generation if isinstance(generation, int) else 0,
    )


def _spec(raw: object, strict: bool) -> tuple[Spec | None, list[Problem]]:
    if large := too_large(raw):
        return None, large
    if not isinstance(raw, Mapping):
        return None, [Problem("spec", f"{show(raw)} has the wrong type", "a mapping of fields", "give a mapping")]
    text = json.dumps(raw, default=str)
    found: list[tuple[Location, Problem]] = []
    removed: list[Location] = []
    # What is wrong is taken out and the rest parsed again, so that the rules between fields are checked too.
    # A round removes at least one value, or a holder of a missing one; the bound only guards against a bug.
    for _ in range(8):
        try:
            spec = Spec.model_validate_json(text)
            break
        except ValidationError as error:
            errors = error.errors(include_url=False)
            # First, and alone: items that hold unknown fields are not counted, and their list seems too short.
            unknown = [e for e in errors if e["type"] == "extra_forbidden"]
            if unknown and not strict:
                text = json.dumps(without(json.loads(text), [e["loc"] for e in unknown]))
                continue
            errors = unknown or errors
            if len(errors) > MOST_PROBLEMS:
                return None, most(problem for _, problem in from_pydantic(Spec, errors[: MOST_PROBLEMS + 1]))
            batch = from_pydantic(Spec, errors)
            missing = {e["loc"] for e in errors if e["type"] == "missing"}
            found += [item for item in batch if not any(_below(item[0], gone) for gone in removed)]
            removed += [where[:-1] if where in missing else where for where, _ in batch]
            text = json.dumps(without(json.loads(text), removed))
    else:
        return None, [problem for _, problem in found]
    wrong = tuple(path_of(where, "").lstrip(".").split("[")[0] for where in removed)
    return spec, [problem for _, problem in found] + most(rules.check(spec, wrong))


def _names(spec: Spec, name: object) -> list[Problem]:
    """Adapters that have the name which the model has where it is given none."""
    if spec.model.served_names:
        return []
    allowed, fix = "a name of its own", "rename it, or give spec.model.servedNames"
    return [
        Problem(f"spec.model.adapters[{index}].name", f"{show(name)} is the name of the model", allowed, fix)
        for index, adapter in enumerate(spec.model.adapters)
        if adapter.name == name
    ]


def _below(location: Location, holder: Location) -> bool:
    return location[: len(holder)] == holder


def _envelope(manifest: Mapping[str, Any]) -> list[Problem]:
    found = []
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(field) != wanted:
            value = f"{show(manifest[field])} is not known" if field in manifest else "is missing"
            found.append(Problem(field, value, wanted, f"set {field}: {wanted}"))
    known = ["apiVersion", "kind", "metadata", "spec", "status"]
    for field in manifest:
        if field not in known:
            near = nearest(str(field), known)
            found.append(
                Problem(
                    str(field), "is not a field", ", ".join(known), f"did you mean {near}?" if near else "remove it"
                )
            )
    return found


def _metadata(metadata: Mapping[str, Any]) -> list[Problem]:
    name = metadata.get("name")
    path = "metadata.name"
    if not isinstance(name, str) or not name:
        return [Problem(path, "is missing" if name is None else f"{show(name)} is not a name", "a text", f"set {path}")]
    found = []
    if len(name) > MAX_NAME:
        allowed = f"{MAX_NAME} or fewer, as children add to it"
        return [Problem(path, f"{show(name)} has {len(name)} characters", allowed, "shorten it")]
    if not re.fullmatch(NAME_PATTERN, name):
        form = "lower-case letters, digits and '-', beginning with a letter and not ending with '-'"
        found.append(Problem(path, f"{show(name)} has the wrong form", form, "rename it"))
    if name.endswith(RESERVED_SUFFIXES):
        allowed = f"a name that does not end with {', '.join(RESERVED_SUFFIXES)}"
        found.append(Problem(path, f"{show(name)} is how children are named", allowed, "rename it"))
    return found
