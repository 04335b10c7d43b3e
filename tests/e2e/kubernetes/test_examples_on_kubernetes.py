"""`helm install`, `kubectl apply -f examples/...`, and a chat streamed from another pod through the Service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chat_reference import MAX_TOKENS, QUESTIONS, greedy_answers
from installed import RESTRICTED, Deployed, Installation, make_namespace, remove_namespace
from pods_beside import Client, client_image


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return greedy_answers(QUESTIONS, MAX_TOKENS)


@pytest.fixture(scope="module")
def client(installation: Installation) -> Iterator[Client]:
    """In a namespace of its own, as an application would be."""
    make_namespace(installation.cluster, "application", RESTRICTED)
    one = Client(installation.cluster, "application", client_image(installation.images))
    one.create()
    yield one
    remove_namespace(installation.cluster, "application")


@pytest.fixture
def deployed(installation: Installation, request: pytest.FixtureRequest) -> Iterator[Deployed]:
    """A namespace for one service. "restricted" is only warned of: the examples read their model from a hostPath,
    which that level forbids."""
    example = request.node.callspec.params["example"] if hasattr(request.node, "callspec") else "unified.yaml"
    namespace = f"examples-{example.removesuffix('.yaml')}"
    make_namespace(installation.cluster, namespace, {})
    yield Deployed(installation.cluster, namespace)
    remove_namespace(installation.cluster, namespace)


def test_helm_test_passes(installation: Installation) -> None:
    assert "Succeeded" in installation.test()


EXPECTED = {
    "direct.yaml": ("Disaggregated", {"prefill", "decode", "router"}, "TCP"),
    "store.yaml": ("Disaggregated", {"prefill", "decode", "router", "store"}, "TCP"),
    "unified.yaml": ("Unified", {"worker", "router"}, None),
}


@pytest.mark.parametrize("example", sorted(EXPECTED))
def test_example_serves_the_right_tokens_and_goes_without_a_trace(
    deployed: Deployed, client: Client, reference: dict[str, str], example: str
) -> None:
    mode, roles, transport = EXPECTED[example]
    deployed.apply_example(example)
    status = deployed.ready()
    found = {pod["metadata"]["labels"]["serving.isthmus.dev/role"] for pod in deployed.pods()}
    assert found == roles
    assert status.get("transfer", {}).get("effective") == transport
    assert deployed.get()["spec"].get("mode", "Disaggregated") == mode
    assert client.ask(status["url"], "smollm2", QUESTIONS, MAX_TOKENS) == reference
    assert not deployed.restarts()
    deployed.delete()
