"""What is slow is not taken for dead: a model that takes long to come, engines that answer nothing for a while.

E2E_DOWNLOAD_S: seconds that the download shall take (it was seen with 600).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from chat_reference import MAX_TOKENS, QUESTIONS, greedy_answers
from installed import RESTRICTED, Deployed, Installation, Object, make_namespace, remove_namespace
from operator_world import until
from pods_beside import Client, client_image, create_bucket
from processes import MODEL as MODEL_HERE
from testcluster.cluster import Cluster

pytestmark = pytest.mark.long  # slow downloads, and 90 s in which engines say nothing

DOWNLOAD_S = float(os.environ.get("E2E_DOWNLOAD_S", "70"))
SILENT_S = 90.0


@contextmanager
def service(installation: Installation, namespace: str, labels: dict[str, str]) -> Iterator[Deployed]:
    make_namespace(installation.cluster, namespace, labels)
    try:
        yield Deployed(installation.cluster, namespace)
    finally:
        remove_namespace(installation.cluster, namespace)


@pytest.fixture(scope="module")
def downloading(installation: Installation) -> Iterator[Deployed]:
    """examples/unified.yaml with its model in object storage that is DOWNLOAD_S of work away, where Pod Security
    "restricted" is enforced."""
    cluster, size = installation.cluster, sum(path.stat().st_size for path in MODEL_HERE.iterdir())
    with service(installation, "storage", {}), service(installation, "downloading", RESTRICTED) as one:
        create_bucket(cluster, "storage", client_image(installation.images), size / DOWNLOAD_S)
        keys = {"accessKeyId": "x", "secretAccessKey": "x"}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "bucket"}, "stringData": keys}
        cluster.apply(secret, namespace=one.namespace)
        one.load_example("unified.yaml")

        def from_bucket(spec: Object) -> None:
            spec["model"] = {
                "source": {
                    "s3": {
                        "uri": "s3://models/model",
                        "endpoint": "http://bucket.storage:9000",
                        "region": "us-east-1",
                        "credentialsSecretRef": {"name": "bucket"},
                    }
                },
                "servedNames": ["smollm2"],
            }
            # It runs beside `pair` on nodes of two CPUs, which routers have their share of.
            spec["roles"]["worker"]["resources"]["requests"] = {"cpu": "500m", "memory": "1Gi"}
            # Too short for it.
            spec["availability"] = {"startupTimeout": f"{max(20, DOWNLOAD_S / 20):.0f}s"}

        one.apply(from_bucket)
        yield one


@pytest.fixture(scope="module")
def pair(installation: Installation) -> Iterator[Deployed]:
    """examples/direct.yaml."""
    with service(installation, "silent", {}) as one:
        one.apply_example("direct.yaml")
        one.ready()
        yield one


def pause_engine(cluster: Cluster, pod: Object, number: signal.Signals) -> None:
    """Send a signal to every process of the pod's engine, as its node sees them."""
    uid = pod["metadata"]["uid"]
    script = (
        f"for each in $(grep -l {uid} /proc/[0-9]*/cgroup); do "
        "process=${each%/cgroup}; process=${process#/proc/}; "
        "tr '\\0' ' ' < /proc/$process/cmdline | grep -q isthmus-runtime && "
        f"kill -{int(number)} $process && echo $process; done; true"
    )
    (node,) = [name for name in cluster.nodes if name == pod["spec"]["nodeName"]]
    assert cluster.run_on(node, ["sh", "-c", script]).split()


def test_a_download_beyond_its_time_is_told(downloading: Deployed) -> None:
    """startupTimeout bounds each try, and what ended the last one is in the condition."""

    def told() -> bool:
        model = downloading.conditions().get("ModelReady", {})
        return model.get("reason") == "ModelFetchFailed" and "not finished after --deadline" in model["message"]

    until(told, 180, downloading.describe, every=0.5)
    assert "startupTimeout" in downloading.conditions()["ModelReady"]["message"]
    # From here on it has the time it needs.
    downloading.apply(lambda spec: spec["availability"].update(startupTimeout="30m"))


def test_engines_that_answer_nothing_for_90_s_are_not_killed(pair: Deployed, downloading: Deployed) -> None:
    """As when a kernel is compiled by a compiler that holds the interpreter's lock. The node's kubelet sees probes
    that time out; the router, requests that wait."""
    cluster = pair.cluster
    if not cluster.nodes:
        pytest.skip("needs nodes of our own: it stops processes on them")
    pods = [*pair.pods("prefill"), *pair.pods("decode")]
    before = pair.uids()
    for pod in pods:
        pause_engine(cluster, pod, signal.SIGSTOP)
    begin = time.monotonic()
    try:
        until(lambda: pair.conditions()["Ready"]["status"] == "False", 60, pair.describe, every=0.5)
        until(lambda: time.monotonic() - begin > SILENT_S, SILENT_S + 30, every=1.0)
    finally:
        for pod in pods:
            pause_engine(cluster, pod, signal.SIGCONT)
    pair.ready()
    assert pair.uids() == before
    assert not pair.restarts()


def test_a_slow_download_is_no_failure(installation: Installation, pair: Deployed, downloading: Deployed) -> None:
    """The pod that has the time it needs takes it, and is never restarted."""

    def state() -> str:
        conditions = downloading.conditions()
        assert conditions["ModelReady"]["reason"] in ("Starting", "ModelLoaded"), downloading.describe()
        return str(conditions["Ready"]["status"])

    until(lambda: state() == "True", DOWNLOAD_S + 120, downloading.describe, every=1.0)
    downloading.ready()
    (worker,) = downloading.pods("worker")
    assert not [name for name in downloading.restarts() if name.startswith(worker["metadata"]["name"])]
    (fetch,) = worker["status"]["initContainerStatuses"]
    took = times(fetch["state"]["terminated"])
    assert took > 0.8 * DOWNLOAD_S, f"the download took {took:.0f} s: it proves nothing"
    client = Client(installation.cluster, pair.namespace, client_image(installation.images))
    client.create()
    reference = greedy_answers(QUESTIONS, MAX_TOKENS)
    for one in (downloading, pair):
        assert client.ask(one.get()["status"]["url"], "smollm2", QUESTIONS, MAX_TOKENS) == reference


def times(ended: Object) -> float:
    """Seconds from a container's start to its end."""
    form = "%Y-%m-%dT%H:%M:%SZ"
    return time.mktime(time.strptime(ended["finishedAt"], form)) - time.mktime(time.strptime(ended["startedAt"], form))
