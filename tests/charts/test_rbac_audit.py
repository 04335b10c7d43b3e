"""The comparison of granted rights with calls in an audit log."""

import json
from typing import Any

import pytest
from rbac_audit import Right, calls, compare, rights

USER = "system:serviceaccount:isthmus-system:isthmus-operator"
PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}


def event(verb: str, resource: str, *, user: str = USER, code: int = 200, **target: Any) -> str:
    reference = {"resource": resource, "apiVersion": "v1", **target}
    return json.dumps(
        {
            "kind": "Event",
            "verb": verb,
            "user": {"username": user},
            "objectRef": reference,
            "responseStatus": {"code": code},
        }
    )


def test_calls_are_those_of_the_account_with_their_subresource() -> None:
    log = [
        event("list", "pods"),
        event("patch", "inferenceservices", apiGroup="serving.isthmus.dev", subresource="status"),
        event("get", "secrets", user="admin"),
        json.dumps({"verb": "get", "user": {"username": USER}, "requestURI": "/apis"}),
    ]
    assert calls(log, USER) == {
        Right("", "pods", "list"),
        Right("serving.isthmus.dev", "inferenceservices/status", "patch"),
    }


def test_an_apply_that_creates_needs_both_rights() -> None:
    log = [event("patch", "services", code=201), event("patch", "deployments", apiGroup="apps", code=200)]
    assert calls(log, USER) == {
        Right("", "services", "patch"),
        Right("", "services", "create"),
        Right("apps", "deployments", "patch"),
    }


def test_what_is_too_much_and_too_little_is_named() -> None:
    asked = {Right("", "pods", "list"), Right("", "events", "create")}
    difference = compare(rights([{"rules": [PODS]}]), asked, {})
    assert str(difference) == "granted, never used: get pods\nused, not granted: create events"


def test_a_reason_excuses_a_right_and_a_stale_one_is_refused() -> None:
    granted, asked = rights([{"rules": [PODS]}]), {Right("", "pods", "list")}
    unseen = Right("", "pods", "get")
    assert str(compare(granted, asked, {unseen: "only after a crash"})) == "minimal"
    with pytest.raises(ValueError, match="get pods; remove it"):
        compare(granted, asked | {unseen}, {unseen: "only after a crash"})
