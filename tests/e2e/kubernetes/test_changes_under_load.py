"""Two prefill and two decode pods under a steady load of streams, and what operators of clusters do to them.

Every answer is compared with the one given before anything was disturbed: greedy tokens do not depend on which pod
computed them, on how the KV came, or on what was killed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from installed import Deployed, Installation, Object, make_namespace, remove_namespace
from operator_world import until
from pods_beside import Client, Load, client_image

NAMESPACE = "under-load"
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write a sentence about the sea.",
    "Count from one to ten.",
    "What is an isthmus? " + "An isthmus is a narrow strip of land between two seas. " * 12 + "So what is it?",
)
MAX_TOKENS = 16
WORKERS = 3


@pytest.fixture(scope="module")
def service(installation: Installation) -> Iterator[Deployed]:
    """examples/direct.yaml with two pods of each role, and a router that a rollout of routers may not leave alone."""
    make_namespace(installation.cluster, NAMESPACE, {})
    one = Deployed(installation.cluster, NAMESPACE)

    def two_of_each(spec: Object) -> None:
        for role in ("prefill", "decode"):
            spec["roles"][role] = {
                "scaling": {"replicas": 2},
                # The limits of the example are for one pod of each; here seven containers share two cores.
                "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
            }
        spec["engine"]["kvCache"]["memory"] = "128Mi"
        spec["rollout"] = {"drainTimeout": "60s", "progressDeadline": "10m"}

    one.load_example("direct.yaml")
    one.apply(two_of_each)
    one.ready()
    yield one
    remove_namespace(installation.cluster, NAMESPACE)


@pytest.fixture(scope="module")
def client(installation: Installation, service: Deployed) -> Client:
    one = Client(installation.cluster, NAMESPACE, client_image(installation.images))
    one.create()
    return one


@pytest.fixture(scope="module")
def answers(client: Client, service: Deployed) -> dict[str, str]:
    """The undisturbed answers."""
    return client.ask(service.get()["status"]["url"], "smollm2", QUESTIONS, MAX_TOKENS)


@contextmanager
def loaded(client: Client, service: Deployed, answers: dict[str, str]) -> Iterator[Load]:
    """Load the service; afterwards every answer that was given must be the right one."""
    url = service.get()["status"]["url"]
    with client.load(url, "smollm2", QUESTIONS, MAX_TOKENS, WORKERS) as load:
        yield load
    wrong = [one for one in load.results if "answer" in one and one["answer"] != answers[one["question"]]]
    assert not wrong, wrong


def no_errors(load: Load, service: Deployed) -> None:
    """Every request that ended, ended well."""
    if load.errors():
        told = "\n".join(json.dumps(one) for one in load.errors())
        pytest.fail(f"{len(load.errors())} of {len(load.results)} requests failed:\n{told}\n{service.describe()}")


def test_operator_upgrade_changes_no_pod(
    installation: Installation, service: Deployed, client: Client, answers: dict[str, str]
) -> None:
    before = service.uids()
    generation = service.get()["metadata"]["generation"]
    with loaded(client, service, answers) as load:
        installation.helm(
            "upgrade", "--set", "operator.podAnnotations.upgraded=yes", "--set", "operator.logLevel=debug"
        )
        # The new operator has seen the service: it writes a condition anew only if something changed, so ask for
        # its own view through a change that touches no pod.
        service.cluster.kubectl("label", "pdsvc", service.name, "-n", NAMESPACE, "team=a", "--overwrite")
        service.ready()
        load.more(6)
    no_errors(load, service)
    assert service.uids() == before
    assert service.get()["metadata"]["generation"] == generation


def test_rollouts_under_load_lose_no_request(service: Deployed, client: Client, answers: dict[str, str]) -> None:
    """First a change that leaves the KV layout alone, then one that alters it, so that old and new cannot pair."""
    before = service.uids("prefill") | service.uids("decode")
    with loaded(client, service, answers) as load:
        service.apply(lambda spec: spec.update(observability={"logLevel": "debug"}))
        service.ready()
        first = service.uids("prefill") | service.uids("decode")
        assert not first & before
        service.apply(lambda spec: spec["engine"]["kvCache"].update(blockSize=32))
        service.ready()
        assert not (service.uids("prefill") | service.uids("decode")) & first
        load.more(6)
    no_errors(load, service)


def test_a_drained_node_loses_no_request(service: Deployed, client: Client, answers: dict[str, str]) -> None:
    """`kubectl drain` of the node with most of the service's pods, a router among them: disruption budgets let one of
    each role go at a time, and those that go end what they have begun."""
    cluster = service.cluster
    if len(cluster.nodes) < 2:
        pytest.skip("needs nodes of our own: it closes one to all pods")
    homes = Counter(pod["spec"]["nodeName"] for pod in service.pods())
    node = max(homes, key=lambda name: (any(on(pod, name) for pod in service.pods("router")), homes[name]))
    gone = {pod["metadata"]["uid"] for pod in service.pods() if on(pod, node)}
    chosen = f"--pod-selector=serving.isthmus.dev/service={service.name}"
    with loaded(client, service, answers) as load:
        try:
            cluster.kubectl("drain", node, chosen, "--delete-emptydir-data", "--timeout=280s", timeout=300)
            service.ready()
            load.more(6)
            assert gone and not gone & service.uids()
            assert not any(on(pod, node) for pod in service.pods())
        finally:
            cluster.kubectl("uncordon", node)
    no_errors(load, service)


def on(pod: Object, node: str) -> bool:
    return bool(pod["spec"]["nodeName"] == node)


def test_a_deleted_prefill_pod_loses_no_prompt(service: Deployed, client: Client, answers: dict[str, str]) -> None:
    with loaded(client, service, answers) as load:
        victim = service.pods("prefill")[0]["metadata"]["name"]
        service.cluster.kubectl("delete", "pod", victim, "-n", NAMESPACE, "--timeout=120s", timeout=150)
        load.more(6)
        service.ready()
    no_errors(load, service)


def test_a_killed_prefill_pod_ends_each_request(service: Deployed, client: Client, answers: dict[str, str]) -> None:
    decode = service.uids("decode")
    with loaded(client, service, answers) as load:
        victim = service.pods("prefill")[0]["metadata"]["name"]
        # No grace: the container is killed at once and the object goes without waiting for it.
        service.cluster.kubectl("delete", "pod", victim, "-n", NAMESPACE, "--grace-period=0", "--force")
        load.more(6)
        service.ready()
        load.more(3)
    for one in load.errors():
        assert "stage" in one["error"] and "attempt" in one["error"], f"{one}\n{service.describe()}"
    assert service.uids("decode") == decode
    assert all(c["restartCount"] == 0 for pod in service.pods("decode") for c in pod["status"]["containerStatuses"])


def test_transfer_mode_is_changed_and_changed_back(service: Deployed, client: Client, answers: dict[str, str]) -> None:
    def store(spec: Object) -> None:
        spec["transfer"]["mode"] = "Store"
        spec["store"] = {
            "segmentSize": "256Mi",
            "master": {"managed": {"resources": {"limits": {"memory": "512Mi"}}}},
        }

    def direct(spec: Object) -> None:
        spec["transfer"]["mode"] = "Direct"
        del spec["store"]

    with loaded(client, service, answers) as load:
        service.apply(store)
        status = service.ready()
        assert (status["transfer"]["mode"], status["transfer"]["effective"]) == ("Store", "TCP")
        load.more(6)
        (master,) = service.pods("store")
        service.cluster.kubectl(
            "delete", "pod", master["metadata"]["name"], "-n", NAMESPACE, "--grace-period=0", "--force"
        )
        load.more(6)
        service.ready()
        service.apply(direct)
        assert service.ready()["transfer"]["mode"] == "Direct"
        until(lambda: not service.pods("store"), 120, service.describe, every=0.5)
        load.more(6)
    no_errors(load, service)


def test_no_prefill_pod_left(service: Deployed, client: Client, answers: dict[str, str]) -> None:
    """`Local`: decode pods compute prompts themselves. `Reject`: 503 with the reason, from a router that is there."""

    def prefill(replicas: int, unavailable: str) -> None:
        def change(spec: Object) -> None:
            spec["roles"]["prefill"]["scaling"]["replicas"] = replicas
            spec["router"]["onPrefillUnavailable"] = unavailable

        service.apply(change)

    with loaded(client, service, answers) as load:
        prefill(0, "Local")
        until(lambda: not service.pods("prefill"), 180, service.describe, every=0.5)
        load.more(6)
    no_errors(load, service)
    prefill(0, "Reject")

    def said_so() -> bool:
        """The service tells why it is not ready, and the routers that refuse have replaced those before."""
        reason = service.conditions()["Ready"]
        generation = service.get()["metadata"]["generation"]
        refusing = ["reject" in pod["spec"]["containers"][0]["args"] for pod in service.pods("router")]
        return (reason["reason"], reason["observedGeneration"], refusing) == ("NoEngine", generation, [True, True])

    until(said_so, 180, service.describe, every=0.5)
    with loaded(client, service, answers) as load:
        load.more(3)
    refused = load.results[-3:]
    assert all("503" in one.get("error", "") and "no prefill engine" in one["error"] for one in refused), refused
    assert all(one["seconds"] < 30 for one in refused), refused
    prefill(1, "Local")
    service.ready()
    assert client.ask(service.get()["status"]["url"], "smollm2", QUESTIONS, MAX_TOKENS) == answers


def test_deletion_with_the_operator_down_leaves_nothing(installation: Installation, service: Deployed) -> None:
    installation.scale(0)
    try:
        service.delete()
        left = service.cluster.kubectl("get", "all,configmaps,events", "-n", NAMESPACE, "-o", "name").split()
        mine = [name for name in left if service.name in name and not name.startswith("event/")]
        assert not mine
    finally:
        installation.scale(1)
