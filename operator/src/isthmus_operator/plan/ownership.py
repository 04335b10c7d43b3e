"""Pure: which fields of a live object are ours, by its managedFields, and whether they are as we want them.

Server-side apply records who set which field. Reading our own record back answers two questions without storing
anything: "is there something to write?" and "what did we once apply as this pod template?", so that a template can be
applied again unchanged by a version of the operator that would render it differently.

A field that somebody removes leaves no trace in that record. Workloads therefore carry a mark, the hash of the template
as it was rendered: while this operator renders the same, whatever is missing was removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api.fields import Quantity
from ..api.v1alpha1 import GROUP, KIND

FIELD_MANAGER = "isthmus-operator"
TEMPLATE_MARK = "serving.isthmus.dev/template"
"""Annotation of workloads, not of pods."""

_MOST_SHAPES = 4
"""Sets of fields by which the keys of one list name its items. Kubernetes has one for each list."""

_QUICK = 64 * 1024
"""Characters of an object's managedFields that are gone through in a few milliseconds. Ours are 10 KB."""

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Whole:
    """A value that is owned as one: a scalar, or a list or mapping that is replaced as a whole."""

    value: object


Owned = dict[str, "Owned"] | list["Owned"] | Whole
"""What we own of a value: a mapping by field, a list by item, or the whole."""


def is_ours(entry: Object) -> bool:
    """Whether an entry of managedFields is this operator's. Nobody has to have a name in his own."""
    return bool(entry.get("manager") == FIELD_MANAGER)


def owned(live: Object) -> Owned:
    """The fields of `live` that we applied, with their present values; metadata without name and namespace."""
    for entry in live["metadata"].get("managedFields") or ():
        if is_ours(entry) and entry.get("operation") == "Apply" and not entry.get("subresource"):
            found = _extract(live, [entry.get("fieldsV1") or {}])
            return found if found is not None else {}
    return {}


def owners(manifest: Object) -> set[str]:
    """The uids of those an object belongs to."""
    return {owner["uid"] for owner in manifest["metadata"].get("ownerReferences") or ()}


def was_made_by_us(live: Object) -> bool:
    """Whether this operator has ever written the object, be it by making it."""
    return any(is_ours(entry) for entry in live["metadata"].get("managedFields") or ())


def set_by_us(live: Object, *place: str) -> bool:
    """Whether what stands in a field was written by this operator, by making the object or by applying it."""
    for entry in live["metadata"].get("managedFields") or ():
        fields = entry.get("fieldsV1") or {}
        for name in place:
            fields = fields.get(f"f:{name}") if isinstance(fields, Mapping) else None
        if fields is not None and is_ours(entry):
            return True
    return False


def may_write(wanted: Object, live: Object) -> bool:
    """Whether a live object of the name of `wanted` is ours: it belongs to the same service, or was left by a former
    one of that name, be it for the garbage collector or, with `--cascade=orphan`, for its successor."""
    ours = wanted["metadata"].get("ownerReferences") or []
    theirs = live["metadata"].get("ownerReferences") or []
    if not theirs:
        return owned(live) != {}
    if owners(wanted) & owners(live):
        return True
    names = {(KIND, owner["name"]) for owner in ours}
    groups = {owner["apiVersion"].partition("/")[0] for owner in theirs}
    return groups == {GROUP} and {(owner["kind"], owner["name"]) for owner in theirs} <= names


def plain(value: Owned) -> Any:
    """Owned fields as plain data."""
    if isinstance(value, Whole):
        return value.value
    if isinstance(value, list):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()}


def differs(wanted: Object, live: Object) -> bool:
    """Whether applying `wanted` would change what we own of `live`."""
    content = {key: value for key, value in wanted.items() if key not in ("apiVersion", "kind", "metadata")}
    meta = {key: value for key, value in wanted["metadata"].items() if key not in ("name", "namespace")}
    return not _same(content | {"metadata": meta}, owned(live))


@dataclass(frozen=True, slots=True)
class Look:
    """How a live object stands to what is wanted under its name. ours: `may_write`; the others are looked at only where
    that is so, and `stand` and `altered` where it differs."""

    ours: bool
    differs: bool = False
    stand: str = ""
    altered: bool = False


def look(wanted: Object, live: Object) -> Look:
    """All that decides whether it is written."""
    if not may_write(wanted, live):
        return Look(ours=False)
    if not differs(wanted, live):
        return Look(ours=True)
    return Look(ours=True, differs=True, stand=stand_off(wanted, live), altered=altered(wanted, live))


def is_quick(live: Object) -> bool:
    """Whether that takes next to no time: there is little that others say of its fields."""
    return len(json.dumps(live["metadata"].get("managedFields") or ())) <= _QUICK


def stand_off(wanted: Object, live: Object) -> str:
    """A digest of what we want of an object, and of what we own of it as it is."""
    text = json.dumps([wanted, plain(owned(live))], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def marked(manifest: dict[str, Any]) -> dict[str, Any]:
    """A workload with the mark of its template."""
    text = json.dumps(manifest["spec"]["template"], sort_keys=True, separators=(",", ":"))
    return _with_mark(manifest, hashlib.sha256(text.encode()).hexdigest()[:8])


def _mark(workload: Object) -> str:
    return str((workload["metadata"].get("annotations") or {}).get(TEMPLATE_MARK, ""))


def _with_mark(manifest: dict[str, Any], mark: str) -> dict[str, Any]:
    others = {key: v for key, v in manifest["metadata"].get("annotations", {}).items() if key != TEMPLATE_MARK}
    annotations = others | ({TEMPLATE_MARK: mark} if mark else {})
    meta = {key: value for key, value in manifest["metadata"].items() if key != "annotations"}
    return {**manifest, "metadata": meta | ({"annotations": annotations} if annotations else {})}


def pinned(wanted: dict[str, Any], live: Object) -> dict[str, Any]:
    """`wanted`, which is marked, with the pod template that we applied to `live` before in place of its own.

    Where somebody else has taken fields of the template over or removed some, it is rendered anew: that edit has
    changed the pods already, and ours is what heals them.
    """
    template = _template(live)
    if template is None or taken_over(wanted, live, "spec", "template"):
        return wanted
    rendered = wanted["spec"]["template"]
    if _same(rendered, template) or (_rendered_alike(wanted, live) and _lacks(rendered, template)):
        return wanted
    kept = {**wanted, "spec": {**wanted["spec"], "template": plain(template)}}
    return _with_mark(kept, _mark(live))


def altered(wanted: Object, live: Object) -> bool:
    """Whether somebody else has changed or removed what we had applied."""
    if taken_over(wanted, live):
        return True
    template = _template(live) if _rendered_alike(wanted, live) else None
    return template is not None and _lacks(wanted["spec"]["template"], template)


def _rendered_alike(wanted: Object, live: Object) -> bool:
    return _mark(wanted) != "" and _mark(wanted) == _mark(live)


def _template(live: Object) -> dict[str, Owned] | None:
    ours = owned(live)
    spec = ours.get("spec") if isinstance(ours, dict) else None
    template = spec.get("template") if isinstance(spec, dict) else None
    return template if isinstance(template, dict) else None


def _lacks(wanted: Any, ours: Owned) -> bool:
    """Whether we want fields or list items that we do not own. Values are not looked at: who changes one owns it."""
    if isinstance(ours, Whole):
        return False
    if isinstance(ours, list):
        if not isinstance(wanted, list) or len(wanted) != len(ours):
            return isinstance(wanted, list) and len(wanted) > len(ours)
        return any(_lacks(a, b) for a, b in zip(wanted, ours, strict=True))
    present = {key: value for key, value in wanted.items() if value not in ({}, [])}
    return not present.keys() <= ours.keys() or any(_lacks(value, ours[key]) for key, value in present.items())


def taken_over(wanted: Object, live: Object, *place: str) -> bool:
    """Whether somebody else has set fields below `place` that we render, to another value."""
    rendered, there = wanted, live
    for name in place:
        rendered, there = rendered[name], there[name]
    trees = []
    for entry in live["metadata"].get("managedFields") or ():
        fields = entry.get("fieldsV1") or {}
        for name in place:
            fields = fields.get(f"f:{name}") or {}
        if fields and not is_ours(entry) and entry.get("subresource") != "status":
            trees.append(fields)
    theirs = _extract(there, trees, with_keys=True) if trees else None
    return theirs is not None and _conflicts(rendered, theirs)


def _extract(value: Any, trees: Sequence[Object], *, with_keys: bool = False) -> Owned | None:
    """The part of `value` that any of several fieldsV1 trees names; None for nothing that is there. `with_keys`: list
    items hold the fields they are told apart by, owned or not.

    Of all trees at once: whoever edits an object decides how many managers its fields have, and each of them would
    have to go through all items of a list.
    """
    if any(not fields.keys() - {"."} for fields in trees):
        return Whole(value)
    below: dict[str, list[Object]] = {}
    for fields in trees:
        for key in fields:
            below.setdefault(key, []).append(fields[key])
    if isinstance(value, Mapping):
        found: dict[str, Owned] = {}
        for key, inner in below.items():
            name = key.removeprefix("f:")
            if key.startswith("f:") and name in value:
                item = _extract(value[name], inner, with_keys=with_keys)
                if item is not None:
                    found[name] = item
        return found
    if isinstance(value, list):
        items: list[Owned] = []
        keys = _Keys(below)
        for item in value:
            for key, known in keys.of(item):
                part = _extract(item, below[key], with_keys=with_keys)
                if with_keys and isinstance(part, dict) and known:
                    part = {name: Whole(value) for name, value in known.items()} | part
                if part is not None:
                    items.append(part)
        return items
    return None


class _Keys:
    """List keys of fieldsV1 (`k:{...}` by fields, `v:...` by value), by what they name; each names one item, the first.

    Whoever edits an object decides how many there are, and how many items: neither are gone through for each of the
    others.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._by_value: dict[Hashable, list[str]] = {}
        self._by_fields: dict[tuple[str, ...], dict[Hashable, list[tuple[str, Mapping[str, Any]]]]] = {}
        for key in keys:
            if key.startswith("v:"):
                self._by_value.setdefault(_hashable(json.loads(key[2:])), []).append(key)
            elif key.startswith("k:"):
                known = json.loads(key[2:])
                names = tuple(sorted(known))
                if names in self._by_fields or len(self._by_fields) < _MOST_SHAPES:
                    values = tuple(_hashable(known[name]) for name in names)
                    self._by_fields.setdefault(names, {}).setdefault(values, []).append((key, known))

    def of(self, item: Any) -> list[tuple[str, Mapping[str, Any]]]:
        """Those that mean an item and named none before, and the fields by which they name it."""
        found: list[tuple[str, Mapping[str, Any]]] = []
        if self._by_value:
            found += [(key, {}) for key in self._by_value.pop(_hashable(item), ())]
        if isinstance(item, Mapping):
            for names, by_values in self._by_fields.items():
                found += by_values.pop(tuple(_hashable(item.get(name)) for name in names), ())
        return found


def _hashable(value: Any) -> Hashable:
    """Equal for equal values."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else (value is None, value)


def _same(wanted: Any, ours: Owned) -> bool:
    """Whether what we own is exactly what we want."""
    if isinstance(ours, Whole):
        return _within(wanted, ours.value)
    if isinstance(ours, list):
        return (
            isinstance(wanted, list)
            and len(wanted) == len(ours)
            and all(_same(a, b) for a, b in zip(wanted, ours, strict=True))
        )
    if not isinstance(wanted, Mapping):
        return False
    present = {key: value for key, value in wanted.items() if value not in ({}, [])} | {
        key: value for key, value in wanted.items() if key in ours
    }
    return present.keys() == ours.keys() and all(_same(present[key], ours[key]) for key in ours)


def _within(wanted: Any, live: Any) -> bool:
    """Whether `live` is `wanted`, less what the API server has filled in."""
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        return all(key in live and _within(value, live[key]) for key, value in wanted.items())
    if isinstance(wanted, list) and isinstance(live, list):
        return len(wanted) == len(live) and all(_within(a, b) for a, b in zip(wanted, live, strict=True))
    return bool(wanted == live) or _equal_quantities(wanted, live)


def _equal_quantities(one: Any, other: Any) -> bool:
    try:
        return Quantity.parse(one).value == Quantity.parse(other).value
    except ValueError:
        return False


def _conflicts(wanted: Any, theirs: Owned) -> bool:
    """Whether fields that somebody else set have another value than we would give them."""
    if isinstance(theirs, Whole):
        return not _within(wanted, theirs.value)
    if isinstance(theirs, list):
        # Items of theirs that we do not have are additions; those we share are told by their name.
        ours = {item["name"]: item for item in wanted if isinstance(item, Mapping) and "name" in item}
        shared = [(str(plain(item).get("name")), item) for item in theirs if isinstance(item, dict)]
        return any(name in ours and _conflicts(ours[name], item) for name, item in shared)
    if not isinstance(wanted, Mapping):
        return False
    return any(key in wanted and _conflicts(wanted[key], item) for key, item in theirs.items())
