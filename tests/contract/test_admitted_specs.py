"""What the schema lets through the parser can read, and what is admitted is rendered into arguments that its processes
take: over random specs of the whole CRD."""

import functools
import json
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from isthmus_operator.api.crd import crd
from isthmus_operator.api.fields import DURATION_PATTERN, QUANTITY_PATTERN
from isthmus_operator.api.spec import Spec
from isthmus_operator.errors import InvalidSpec
from isthmus_operator.plan.admission import admit
from isthmus_operator.render.names import Defaults
from isthmus_operator.render.service import render
from isthmus_runtime.commands.model import build_model_parser
from isthmus_runtime.serve_flags import parse_serve

SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
ONE_OF = {"source": 1, "cache": 1, "auth": 1, "master": 1}
"""Blocks of which a rule asks for exactly one field."""
LEFT_OUT = {"extraArgs", "podPatch"}
"""What the processes' own flags and the pods of `test_admission_rehearsal` are the judges of."""
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""Without shrinking: drawing a spec again takes tens of milliseconds, and it names its field as it is."""
EDGES = {
    "integer": [0, 1, 2, 3, 16, 64, 10_000],
    "duration": ["1ms", "0.00001ms", "1234567ms", "278h", "8784h", "1h30m", "0.1s", "1000000.5s"],
    "quantity": ["1", "1Mi", "1.5Gi", "8Gi", "0.25", "500m", "9e18", "9223372036854775807", "1n", 4],
}


def values(schema: dict[str, Any], name: str = "") -> st.SearchStrategy[Any]:
    """Values that a structural schema takes."""
    return _values(json.dumps(schema, sort_keys=True), name)


@functools.cache
def _values(text: str, name: str) -> st.SearchStrategy[Any]:
    schema = json.loads(text)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        edges = EDGES["quantity"] if schema["pattern"] == QUANTITY_PATTERN else ["0%", "25%", 1]
        return st.sampled_from(edges)
    kind = schema["type"]
    if kind == "object":
        return objects(schema, name)
    if kind == "array":
        most = min(schema["maxItems"], 3)
        return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=most)
    if kind == "string":
        return texts(schema)
    if kind == "boolean":
        return st.booleans()
    low, high = schema.get("minimum"), schema.get("maximum")
    if kind == "number":
        return st.floats(low, high, exclude_min=schema.get("exclusiveMinimum", False), allow_nan=False)
    return st.integers(low, high) | st.sampled_from([n for n in EDGES["integer"] if low <= n <= high] or [low])


def texts(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    """Texts of a schema: of its pattern, or any that JSON of an API server can hold."""
    least, most = schema.get("minLength", 0), schema["maxLength"]
    if "pattern" not in schema:
        return st.text(st.characters(exclude_categories=["Cs"]), min_size=least, max_size=min(most, 8))
    if schema["pattern"] == DURATION_PATTERN:
        return st.sampled_from(EDGES["duration"])
    # As the API server reads it: of ASCII alone.
    pattern = schema["pattern"].replace("\\w", "A-Za-z0-9_")
    found = st.from_regex(pattern, fullmatch=True, alphabet=st.characters(codec="ascii"))
    return found.filter(lambda text: least <= len(text) <= most)


@st.composite
def objects(draw: st.DrawFn, schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Objects of a schema, with one field alone where a rule asks for that."""
    fields = schema.get("properties")
    if fields is None:
        if "additionalProperties" not in schema:
            return {}
        names = st.sampled_from(["cpu", "memory", "a.b/c"])
        return draw(st.dictionaries(names, values(schema["additionalProperties"])))
    required = schema.get("required", [])
    optional = [field for field in fields if field not in required and field not in LEFT_OUT]
    if name in ONE_OF:
        chosen = [draw(st.sampled_from(optional))]
    else:
        chosen = [field for field in optional if draw(st.integers(0, 3)) == 0]
    return {field: draw(values(fields[field], field)) for field in fields if field in (*required, *chosen)}


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Specs that have the roles of their mode, so that most of them break no rule."""
    spec = draw(objects(SCHEMA, "spec"))
    roles = SCHEMA["properties"]["roles"]["properties"]
    unified = spec.get("mode") == "Unified"
    wanted = ("worker",) if unified else ("prefill", "decode")
    spec["roles"] = {role: draw(values(roles[role], role)) for role in wanted}
    for field in ("transfer", "store", "scalingPolicy") if unified else ():
        spec.pop(field, None)
    return spec


def body(spec: dict[str, Any]) -> dict[str, Any]:
    """As the API server hands it to the webhook."""
    return {
        "apiVersion": "serving.isthmus.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "svc", "namespace": "ns", "uid": "u", "generation": 1},
        "spec": spec,
    }


@pytest.mark.slow
@settings(max_examples=150, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(specs())
def test_the_parser_reads_what_the_schema_takes_and_processes_take_what_is_rendered(spec: dict[str, Any]) -> None:
    Spec.model_validate_json(json.dumps(spec))
    try:
        service = admit(body(spec))
    except InvalidSpec as error:
        hypothesis.event("refused: " + error.problems[0].path.split("[")[0])
        assert not any("cannot be rendered" in one.message for one in error.problems), error
        assume(False)
    hypothesis.event("admitted")
    for manifest in render(service, Defaults()):
        json.dumps(manifest, allow_nan=False)
        if manifest["kind"] != "Deployment":
            continue
        pod = manifest["spec"]["template"]["spec"]
        parse_serve(pod["containers"][0]["args"][1:])
        for init in pod.get("initContainers", []):
            build_model_parser().parse_args(init["args"][1:])
