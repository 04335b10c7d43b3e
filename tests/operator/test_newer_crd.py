"""The CRD is upgraded before the operator: what it adds to every resource must not break one."""

import asyncio
from typing import Any

import kopf
import pytest

from isthmus_operator.api.profile import PERMISSIVE
from isthmus_operator.api.v1alpha1 import parse, parse_stored
from isthmus_operator.errors import InvalidSpec
from isthmus_operator.render.revision import service_revision
from isthmus_operator.shell.budget import Workbench
from isthmus_operator.shell.handlers import review

SERVICE: dict[str, Any] = {
    "apiVersion": "serving.isthmus.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "svc", "namespace": "team"},
    "spec": {
        "model": {"source": {"hostPath": {"path": "/models/m"}}},
        "roles": {"prefill": {"scaling": {"replicas": 2}}, "decode": {}},
        "engine": {"kvCache": {"blockSize": 16}},
        "router": {"expose": {"httpRoute": {"parentRefs": [{"name": "gateway"}]}}},
    },
}


def reviewed(body: Any) -> None:
    asyncio.run(review(Workbench(), PERMISSIVE, kopf.Body(body), warnings=[]))


def newer(value: Any) -> Any:
    """As a later CRD's defaults would fill it in: a field more in every block."""
    if isinstance(value, dict):
        return {key: newer(item) for key, item in value.items()} | {"laterField": "value"}
    return [newer(item) for item in value] if isinstance(value, list) else value


def stored(spec: Any) -> dict[str, Any]:
    return SERVICE | {"spec": spec}


def test_fields_of_a_newer_crd_change_nothing() -> None:
    body = stored(newer(SERVICE["spec"]))
    with pytest.raises(InvalidSpec) as caught:
        parse(body)
    assert len(caught.value.problems) > 8, "a user's file is told of each"
    assert parse_stored(body).spec == parse(SERVICE).spec
    assert service_revision(parse_stored(body)) == service_revision(parse(SERVICE))


def test_beside_them_everything_is_checked_as_before() -> None:
    spec = SERVICE["spec"] | {"rollout": {"drainTimeout": "5s"}, "transfer": {"timeout": "30s"}, "mode": "Diagonal"}
    spec["engine"] = {"kvCache": {"blockSize": 0}}
    with pytest.raises(InvalidSpec) as plain:
        parse(stored(spec))
    with pytest.raises(InvalidSpec) as among:
        parse_stored(stored(newer(spec)))
    assert among.value.problems == plain.value.problems
    assert {problem.path for problem in plain.value.problems} >= {"spec.engine.kvCache.blockSize", "spec.mode"}


def test_the_webhook_lets_them_pass_and_refuses_the_rest() -> None:
    reviewed(stored(newer(SERVICE["spec"])))
    with pytest.raises(kopf.AdmissionError, match=r"spec\.roles\.decode: is missing"):
        reviewed(stored(newer(SERVICE["spec"] | {"roles": {"prefill": {}}})))


def test_a_broken_resource_that_is_being_deleted_is_let_go() -> None:
    """Foreground deletion ends with an update that takes a finalizer off."""
    broken = stored(SERVICE["spec"] | {"roles": {"prefill": {}}})
    with pytest.raises(kopf.AdmissionError):
        reviewed(broken)
    leaving = broken | {"metadata": broken["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
    reviewed(leaving)
