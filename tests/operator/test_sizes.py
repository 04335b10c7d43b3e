"""Any resource that the API server could store is parsed or refused in a bounded number of steps.

Steps are counted, not timed: every call, of Python and of C, while a spec is admitted. What one call into C may cost is
bounded by the lengths of what it is given, which is checked where numbers and patterns are.
"""

import copy
import json
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from isthmus_operator.api import limits
from isthmus_operator.api.crd import crd, role_scaler_crd
from isthmus_operator.api.fields import Duration, Quantity
from isthmus_operator.api.limits import MOST_PROBLEMS, too_large
from isthmus_operator.api.profile import Profile
from isthmus_operator.api.spec import Spec
from isthmus_operator.api.v1alpha1 import parse, parse_stored
from isthmus_operator.errors import InvalidSpec
from isthmus_operator.plan.admission import admit
from isthmus_operator.render.pod import merge

EXAMPLES = Path(__file__).parents[2] / "examples"
STORE = yaml.safe_load((EXAMPLES / "store.yaml").read_text())
REQUEST_BYTES = 1_500_000
"""Of etcd, and with it of the API server."""
MOST_CALLS = 400_000
"""The store example takes 6,000; the largest that is admitted 150,000, most of it for rules on 10,000 pods."""


def calls(work: Callable[[], object]) -> tuple[int, object]:
    """How many calls `work` makes, and what it returns or raises."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    result: object
    sys.setprofile(note)
    try:
        result = work()
    except InvalidSpec as error:
        result = error
    finally:
        sys.setprofile(None)
    return count, result


def bounded(manifest: dict[str, Any]) -> object:
    """What admission says of a resource, strictly and as stored, within the bound."""
    last: object = None
    for work in (lambda: parse(manifest), lambda: admit(manifest, Profile())):
        count, last = calls(work)
        assert count < MOST_CALLS
        if isinstance(last, InvalidSpec):
            assert len(last.problems) <= 2 * MOST_PROBLEMS + 8
            assert len(str(last)) < 200_000
    return last


def put(place: tuple[str, ...], value: Any) -> dict[str, Any]:
    out: dict[str, Any] = copy.deepcopy(STORE)
    holder = out
    for name in place[:-1]:
        if not isinstance(holder.get(name), dict):
            holder[name] = {}
        holder = holder[name]
    holder[place[-1]] = value
    return out


def places(block: type[BaseModel] = Spec, path: tuple[str, ...] = ("spec",)) -> Iterator[tuple[str, ...]]:
    """Every field of the spec, blocks and leaves."""
    hints = typing.get_type_hints(block)
    for name, info in block.model_fields.items():
        where = (*path, info.alias or name)
        yield where
        kinds = [hints[name]]
        while any(get_args(kind) for kind in kinds):
            kinds = [leaf for kind in kinds for leaf in (get_args(kind) or (kind,))]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from places(kind, where)


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": [value]}
    return value


N = REQUEST_BYTES
BOMBS: dict[str, Any] = {
    "digits": "1" * N,
    "zeros": "0." + "0" * N,
    "exponent": "1e999999",
    "exponent of 300000": "1e300000",
    "units": "1s" * (N // 2),
    "letters": "a" * (N - 1) + "!",
    "dashes": "-" * N,
    "spaces": " " * N,
    "numbers": [1] * (N // 2),
    "texts": ["x"] * (N // 4),
    "empty": [{}] * (N // 3),
    "named": [{"name": f"n{i}"} for i in range(N // 18)],
    "the same": [{"name": "engine", "env": []}] * (N // 30),
    "fields": {f"f{i}": 1 for i in range(N // 14)},
    "long names": {f"{i}" + "f" * 1000: 1 for i in range(N // 1010)},
    "lists of lists": [[[1] * 100] * 100] * 100,
    "deep": nested(450),
    "infinite": float("inf"),
    "nan": float("nan"),
    "tiny": 1e-320,
    "wide integer": 10**4000,
    "just under the limits": {f"f{i}": [{"name": f"{i}-{k}"} for k in range(6)] for i in range(120)},
    "wrong up to the limits": [1] * limits.MOST_ITEMS,
    "wrong keys up to the limits": {f"%{i}": "%" for i in range(limits.MOST_FIELDS)},
}
PLACES = sorted(where for where in set(places()) if not {"decode", "worker", "managed"} & set(where))
"""Without those of the same types."""


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_no_bomb_in_any_field_takes_long(bomb: str) -> None:
    for place in PLACES:
        bounded(put(place, BOMBS[bomb]))
    bounded({**STORE, "spec": BOMBS[bomb]})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["1Gi", "Auto"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    place=st.sampled_from(PLACES),
    value=json_values,
    times=st.integers(1, 300),
    name=st.sampled_from(["name", "$patch"]),
)
def test_no_random_value_takes_long(place: tuple[str, ...], value: Any, times: int, name: str) -> None:
    """Anything, alone and repeated, as items and as fields."""
    for one in (value, [value] * times, {f"{name}{i}": value for i in range(times)}, [{name: value}] * times):
        bounded(put(place, one))


def test_the_largest_that_is_admitted_is_admitted() -> None:
    env = [{"name": f"E{i}", "value": "x" * 10} for i in range(250)]
    patch = {"spec": {"containers": [{"name": "engine", "env": env}]}}
    manifest = put(("spec", "roles", "prefill", "podPatch"), patch)
    manifest = json.loads(json.dumps(manifest))
    manifest["spec"]["roles"]["decode"]["podPatch"] = patch
    manifest["spec"]["model"]["source"] = {"pvc": {"claimName": "m"}}
    assert not isinstance(bounded(manifest), InvalidSpec)


def test_all_that_is_too_large_is_named_at_once_up_to_a_number() -> None:
    found = too_large({"a": "x" * 20_000, "b": [0] * 300, "c": {"d": 2**70, "e": nested(40)}})
    assert {problem.path for problem in found} >= {"spec.a", "spec.b", "spec.c.d"}
    assert any("too deep" in problem.message for problem in found)
    assert len(too_large([["x" * 20_000] * 100])) == MOST_PROBLEMS
    assert [one.path for one in too_large([[0] * 200 for _ in range(200)])] == ["spec"]
    assert too_large(STORE["spec"]) == []


@pytest.mark.parametrize("kind", [Quantity, Duration])
def test_what_is_converted_is_short(kind: type[Quantity] | type[Duration], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a decimal grows with its digits and its exponent: neither is looked at before the length."""
    seen: list[int] = []

    def watched(self: str) -> Any:
        seen.append(len(self))
        return 1

    monkeypatch.setattr(kind, "value" if kind is Quantity else "seconds", property(watched))
    for text in [bomb for bomb in BOMBS.values() if isinstance(bomb, str)] + ["1" * 33, "1" * 32, "1s" * 16, "1Gi\n"]:
        try:
            kind.parse(text)
        except ValueError:
            continue
    assert seen and max(seen) <= 32
    with pytest.raises(ValueError, match=r"^a (quantity|duration)"):
        kind.parse("1Gi\n" if kind is Quantity else "1s\n")


def test_joining_a_long_list_looks_at_each_item_once() -> None:
    def cost(n: int) -> int:
        base = {"env": [{"name": f"a{i}"} for i in range(n)]}
        patch = {"env": [{"name": f"b{i}"} for i in range(n)]}
        count, joined = calls(lambda: merge(base, patch))
        assert isinstance(joined, dict) and len(joined["env"]) == 2 * n
        return count

    assert cost(2000) < 2.5 * cost(1000)


def test_a_resource_that_holds_more_than_the_limits_is_refused_from_the_store_too() -> None:
    """The webhook may be off, and the schema cannot bound what is passed through."""
    with pytest.raises(InvalidSpec, match=r"podPatch.*too deep"):
        parse_stored(put(("spec", "roles", "prefill", "podPatch"), {"spec": nested(30)}))


def unbounded(node: dict[str, Any], path: str) -> Iterator[str]:
    kind = node.get("type")
    if node.get("x-kubernetes-int-or-string"):
        missing = {"maxLength", "pattern"} - node.keys()
    elif kind == "string":
        missing = set() if {"maxLength", "enum"} & node.keys() or node.get("format") == "date-time" else {"maxLength"}
    elif kind == "array":
        missing = {"maxItems"} - node.keys()
    elif kind in ("integer", "number"):
        missing = {"minimum", "maximum"} - node.keys()
    elif "additionalProperties" in node or node.get("x-kubernetes-preserve-unknown-fields"):
        missing = {"maxProperties"} - node.keys()
    else:
        missing = set()
    yield from (f"{path}: {one}" for one in sorted(missing))
    children = {**node.get("properties", {}), "*": node.get("items") or node.get("additionalProperties")}
    for name, child in children.items():
        if isinstance(child, dict):
            yield from unbounded(child, f"{path}.{name}")


@pytest.mark.parametrize("make", [crd, role_scaler_crd])
def test_every_field_of_the_crds_is_bounded(make: Callable[[], dict[str, Any]]) -> None:
    schema = make()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    assert list(unbounded({"properties": {part: schema[part] for part in ("spec", "status")}}, "")) == []
