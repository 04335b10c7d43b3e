"""No spec that is admitted brings its operator to a halt: every extreme of every field is refused, or rendered."""

import copy
import json
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from isthmus_operator.api.fields import CountOrPercent, Duration, Quantity
from isthmus_operator.api.spec import Spec
from isthmus_operator.api.v1alpha1 import InferenceService, parse
from isthmus_operator.errors import InvalidSpec
from isthmus_operator.plan import admission
from isthmus_operator.plan.admission import admit
from isthmus_operator.plan.autoscale import decide
from isthmus_operator.plan.desired import desired
from isthmus_operator.plan.observed import EngineFacts, Facts
from isthmus_operator.plan.planner import plan
from isthmus_operator.plan.rehearse import World, rehearse
from isthmus_operator.render.names import Defaults

EXAMPLES = Path(__file__).parents[2] / "examples"
INT32, INT64 = 2**31 - 1, 2**63 - 1
EXTREMES: dict[Any, list[Any]] = {
    Quantity: ["0", "1n", "1e99", "1e5000", "1e9999999", "9" * 32, "9" * 33, "9999999P", "9223372036854775807", 2**70],
    Duration: ["1ms", "0.000001ms", "1000000h", "9" * 40 + "h", "10000h", "9999h60m", "0.1ms"],
    CountOrPercent: ["0%", "100%", 0, 10_000, 10**12, "9" * 400],
    int: [0, 1, -1, 10_000, 2**24, INT32, 2**40, 10**400],
    float: [0, 1, 1e-320, 5, "nan"],
}
PATCHES: list[Any] = [
    *({"spec": {"containers": one}} for one in (["engine"], [{"name": "engine", "env": ["A=b"]}], [{}], {}, "x", None)),
    *({"spec": {"containers": [{"name": "engine", "ports": one}]}} for one in ([1], [[]], [{"containerPort": {}}])),
    *({"spec": {"volumes": one}} for one in ([None], [{"name": None}], [{"$patch": "delete"}])),
    {"containers": [{"name": "engine", "env": ["A=b"]}]},
    {"metadata": None},
    {"metadata": []},
    {"spec": None},
    {"spec": {"$patch": "replace"}},
    {"spec": {"$patch": "delete"}},
    {"$patch": "replace"},
    {"$patch": "delete"},
    {"spec": {"affinity": 5, "tolerations": {}, "securityContext": []}},
    {"metadata": {"labels": {"a": None, "b": {}}}},
    {"metadata": {"annotations": [1]}},
    {"metadata": {"labels": None}},
]


def leaves(block: type[BaseModel], path: tuple[str, ...] = ("spec",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(place, type) of every number, quantity, duration and open object."""
    hints = typing.get_type_hints(block)
    for name, info in block.model_fields.items():
        where = (*path, info.alias or name)
        kinds = [hints[name]]
        while any(get_args(kind) for kind in kinds):
            kinds = [leaf for kind in kinds for leaf in (get_args(kind) or (kind,))]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from leaves(kind, where)
            elif kind in EXTREMES and hints[name] is not dict:
                yield where, kind
        if "resources" in path and where[-1] in ("requests", "limits"):
            yield (*where, "memory"), Quantity
        if where[-1] == "podPatch":
            yield where, dict


EVERY = sorted(set(leaves(Spec)), key=str)


@cache
def read(example: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())
    return found


def put(manifest: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    out = copy.deepcopy(manifest)
    holder = out
    for name in place[:-1]:
        holder = holder.setdefault(name, {})
    holder[place[-1]] = value
    return out


def numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def carry_out(service: InferenceService) -> None:
    """A whole life of it: from nothing until it is complete, with engines that report their load."""
    world = World()
    for _ in rehearse(service, world, limit=50):
        pass
    names = [pod.name for w in world.seen.engines for pod in w.pods]
    seen = world.seen
    object.__setattr__(seen, "facts", Facts(engines=dict.fromkeys(names, EngineFacts(fingerprint="f", queued=1e9))))
    wanted = plan(service, seen, world.now)
    decide(service, seen, wanted, world.now)
    made = desired(service, Defaults(), wanted, (), seen, world.now)
    assert json.dumps([made.apply, made.create, made.optional])
    for manifest in made.apply:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            # Kubernetes' numbers are of 32 bits but for the grace of a pod.
            assert all(abs(number) <= INT32 for number in numbers(manifest["spec"])), manifest


@pytest.mark.parametrize("place", sorted({where for where, _ in EVERY}), ids=".".join)
@pytest.mark.parametrize("example", ["store", "unified"])
def test_every_extreme_is_refused_or_carried_out(place: tuple[str, ...], example: str) -> None:
    manifest = copy.deepcopy(read(example))
    if len(place) > 2 and place[1] == "roles" and place[2] not in manifest["spec"]["roles"]:
        return
    if "scaling" in place and {"min", "max", "target"} & set(place):
        target = {"metric": "QueuedRequests", "value": 1}
        auto = {"mode": "Auto", "min": 1, "max": 3, "target": target}
        manifest = put(manifest, place[: place.index("scaling") + 1], auto)
    kinds = {kind for where, kind in EVERY if where == place}
    for value in [one for kind in kinds for one in (PATCHES if kind is dict else EXTREMES[kind])]:
        try:
            service = admit(put(manifest, place, value))
        except InvalidSpec as error:
            text = str(error)
            assert "cannot be rendered" not in text, f"{place} {value!r}: no rule says what is wrong: {text}"
            assert "decimal." not in text and "Traceback" not in text
            continue
        carry_out(service)


def test_it_looks_at_every_kind_of_field() -> None:
    kinds = {kind for _, kind in EVERY}
    assert kinds == {*EXTREMES, dict}
    assert len(EVERY) > 60


def test_what_no_rule_has_foreseen_is_refused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise AttributeError("'str' object has no attribute 'get'")

    manifest = yaml.safe_load((EXAMPLES / "direct.yaml").read_text())
    assert admit(manifest).spec == parse(manifest).spec
    monkeypatch.setattr(admission, "decide", fails)
    with pytest.raises(InvalidSpec, match=r"spec: cannot be rendered: AttributeError: 'str' object has no attribute"):
        admit(manifest)
