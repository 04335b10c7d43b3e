"""CEL in the CRD and `parse` judge alike: what the server accepts without a webhook is valid but for what CEL cannot
say, and what `parse` accepts the server accepts."""

import importlib.util
import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulated_kubelet import Client
from testcluster.cluster import Cluster

PATH = "/apis/serving.isthmus.dev/v1alpha1/namespaces/default/inferenceservices?dryRun=All&fieldValidation=Strict"
_FILE = Path(__file__).parents[1] / "test_validation.py"
_SPEC = importlib.util.spec_from_file_location("validation_cases", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
cases = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cases)

BEYOND_CEL = {
    "spec.model.servedNames[0]": "what can be printed",
    "spec.model.servedNames[1]": "a set list: the server refuses it, in its own words",
    "spec.roles.decode.resources.requests.cpu": "arithmetic on quantities",
    "spec.roles.decode.resources.limits.memory": "arithmetic on quantities",
    "spec.store.segmentSize": "arithmetic on quantities",
    "spec.engine.kvCache.memory": "arithmetic on quantities",
    "spec.engine.kvCache.numBlocksOverride": "only known with the block size",
    "spec.engine.extraArgs.block-size": "the list of typed flags",
    "spec.engine.extraArgs.tensor-parallel-size": "the list of typed flags",
    "spec.model.adapters[0].name": "the name of the service, where the model has none of its own",
    "spec.model.source.pvc.path": "`..` in a path",
    "spec.model.adapters[0].source.pvc.path": "`..` in a path",
    "spec.model.adapters[0].source.hostPath.subPath": "`..` in a path",
    "spec.router.extraArgs.max-queue": "the list of typed flags",
    "spec.model.source.s3.uri": "`..` between slashes",
    "spec.transfer.timeout": "durations",
    "spec.rollout.drainTimeout": "durations",
    "spec.store.replicas": "pods in total",
    "spec.scalingPolicy.ratio.prefillPerDecode": "whether some numbers of pods meet it",
    "spec.router.placement.tolerations[0]": "checked when pods are made",
}
"""Paths that only the webhook refuses, and why."""


def ask(client: Client, manifest: dict[str, Any]) -> tuple[int, str]:
    try:
        client("POST", PATH, manifest)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["message"]
    return 201, ""


@pytest.fixture(scope="module")
def client(plane: Cluster) -> Client:
    return Client(plane)


@pytest.mark.parametrize(
    ("changes", "path"), [(c, p) for c, p, _ in cases.BAD], ids=lambda v: v if isinstance(v, str) else ""
)
def test_what_parse_refuses_the_server_refuses_too(client: Client, changes: dict[str, Any], path: str) -> None:
    status, message = ask(client, cases.with_values(cases.base(), changes))
    if path in BEYOND_CEL and status == 201:
        return
    assert status >= 400, f"{path} was accepted"
    assert status < 500, message


@pytest.mark.parametrize("name", ["direct", "store", "unified"])
def test_the_examples_are_accepted(client: Client, name: str) -> None:
    manifest = yaml.safe_load((Path(__file__).parents[3] / "examples" / f"{name}.yaml").read_text())
    assert ask(client, manifest) == (201, "")


@pytest.mark.parametrize("mode", ["Disaggregated", "Unified"])
def test_the_smallest_is_accepted_and_gets_its_defaults(client: Client, mode: str) -> None:
    assert ask(client, cases.base(mode)) == (201, "")


def test_adapters_and_ranks_are_accepted(client: Client) -> None:
    adapters = {
        "a/b": {"pvc": {"claimName": "c", "path": "a"}},
        "b": {"oci": {"image": "i:1"}},
        "c": {"hostPath": {"path": "/c", "subPath": "d"}},
    }
    changes = {
        "spec/model/adapters": [{"name": name, "source": source} for name, source in adapters.items()],
        "spec/model/servedNames": ["m"],
    }
    assert ask(client, cases.with_values(cases.base(), changes)) == (201, "")
    ranks = {"spec/engine/parallelism": {"tensor": 2}}
    for mode in ("Unified", "Disaggregated"):
        assert ask(client, cases.with_values(cases.base(mode), ranks)) == (201, "")


STATIC: dict[str, Any] = {"scaling": {"mode": "Static"}}
EXTERNAL: dict[str, Any] = {"scaling": {"mode": "External"}}
COUNTED: dict[str, Any] = {"scaling": {"replicas": 3}}


@pytest.mark.parametrize(
    ("before", "after", "accepted"),
    [
        (EXTERNAL, COUNTED, True),
        (EXTERNAL, STATIC, False),
        (EXTERNAL, {"scaling": {}}, False),
        (EXTERNAL, {}, False),
        (COUNTED, {}, True),
        ({}, EXTERNAL, True),
    ],
)
def test_a_role_is_taken_back_from_an_autoscaler_with_a_number(
    client: Client, before: dict[str, Any], after: dict[str, Any], accepted: bool
) -> None:
    manifest = cases.with_values(cases.base(), {"spec/roles/decode": before, "metadata/name": "back"})
    made = client("POST", PATH.partition("?")[0], manifest)
    where = f"{PATH.partition('?')[0]}/back"
    try:
        made["spec"]["roles"]["decode"] = after
        client("PUT", where, made)
        assert accepted
    except urllib.error.HTTPError as error:
        assert not accepted
        assert "give scaling.replicas" in json.load(error)["message"]
    finally:
        client("DELETE", where)
