"""Changes of several services in a storm, while the operator is killed again and again: then everything is there, once.

The seed is printed; `ISTHMUS_STORM_SEED` repeats a run as far as its changes go, and not their moments.
"""

import os
import random
import signal
import threading
from typing import Any

from operator_world import API, Object, Operator, Service, roles, until

CHANGES = 60
PAUSE_S = 0.3
KILLED_EVERY = 6
MOST = 4


def external(prefill: int, decode: int) -> Object:
    found = roles(prefill, decode)
    found["decode"] = {"scaling": {"mode": "External"}}
    return found


class Storm:
    """Three services in one namespace, and a random change of one of them at a time."""

    def __init__(self, service: Service, chance: random.Random) -> None:
        self.chance = chance
        self.services = [
            Service(client=service.client, cluster=service.cluster, namespace=service.namespace, name=name)
            for name in ("one", "two", "three")
        ]
        self.there: set[str] = set()

    def change(self) -> None:
        one, count = self.chance.choice(self.services), self.chance.randint(0, MOST)
        if one.name not in self.there or self.chance.random() < 0.2:
            one.apply(roles=roles(1, 1 + count % 2), rollout={"maxUnavailable": "50%"})
            self.there.add(one.name)
            return
        kind = self.chance.choice(("count", "image", "external", "scale", "paused", "remove a child", "remove"))
        if kind == "count":
            one.apply(roles=roles(max(1, count), self.chance.randint(1, MOST)))
        elif kind == "image":
            one.apply(engine={"image": f"engine:{count}"})
        elif kind == "external":
            one.apply(roles=external(1, 1))
        elif kind == "paused":
            one.apply(rollout={"maxUnavailable": "50%", "paused": self.chance.random() < 0.5})
        elif kind == "scale":
            scaler = f"{API}/namespaces/{one.namespace}/rolescalers/{one.name}-decode"
            if one.client.find(scaler):
                one.client.merge(scaler, {"spec": {"replicas": count}})
        elif kind == "remove a child":
            child = self.chance.choice(("service", "deployment", "poddisruptionbudget", "networkpolicy", "rolescaler"))
            label = f"serving.isthmus.dev/service={one.name}"
            one.cluster.kubectl("delete", child, "-l", label, "-n", one.namespace, "--wait=false")
        else:
            one.client("DELETE", one.path)
            self.there.discard(one.name)


def names(service: Service, resource: str, group: str) -> list[str]:
    return sorted(one["metadata"]["name"] for one in service.children(resource, group=group))


def children_of(service: Service) -> dict[str, list[str]]:
    kinds = {
        "services": "/api/v1",
        "deployments": "/apis/apps/v1",
        "networkpolicies": "/apis/networking.k8s.io/v1",
        "poddisruptionbudgets": "/apis/policy/v1",
        "rolescalers": API,
    }
    return {resource: names(service, resource, group) for resource, group in kinds.items()}


def is_whole(service: Service) -> bool:
    """Whether a service has each of its children once, nothing else, and the pods that it asks for."""
    found, name = children_of(service), service.name
    decode = service.spec["roles"]["decode"]["scaling"]
    scalers = service.children("rolescalers", group=API)
    wanted = {"prefill": service.spec["roles"]["prefill"]["scaling"]["replicas"], "router": 2}
    wanted["decode"] = scalers[0]["spec"]["replicas"] if scalers else decode.get("replicas", 0)
    per_role = [f"{name}-decode", f"{name}-prefill", f"{name}-router"]
    pods = {role: len(service.pods(role)) for role in wanted}
    uid = service.get()["metadata"]["uid"]
    owners = {o["uid"] for d in service.deployments() for o in d["metadata"]["ownerReferences"]}
    return (
        len(found["deployments"]) == 3
        and all(one.startswith(tuple(per_role)) for one in found["deployments"])
        and found["services"] == sorted([name, f"{name}-decode", f"{name}-prefill"])
        and found["networkpolicies"] == [f"{name}-engines", f"{name}-router"]
        and found["poddisruptionbudgets"] == per_role
        and found["rolescalers"] == ([f"{name}-decode"] if decode.get("mode") == "External" else [])
        and pods == wanted
        and owners == {uid}
    )


def kill(operator: Operator) -> None:
    assert operator.process is not None
    operator.process.send_signal(signal.SIGKILL)
    operator.process.wait()
    operator.process = None


def test_an_operator_that_is_killed_in_a_storm_of_changes_makes_nothing_twice_and_loses_nothing(
    service: Service, operator: Operator
) -> None:
    seed = int(os.environ.get("ISTHMUS_STORM_SEED", random.randrange(2**32)))
    print(f"ISTHMUS_STORM_SEED={seed}")
    storm, pause = Storm(service, random.Random(seed)), threading.Event()
    for number in range(CHANGES):
        storm.change()
        if number % KILLED_EVERY == KILLED_EVERY - 1:
            kill(operator)
            storm.change()
            operator.start()
        # Not for anything to happen, but for the changes to come at different moments of the operator's life.
        pause.wait(storm.chance.random() * 2 * PAUSE_S)
    for one in storm.services:
        if one.name in storm.there:
            one.apply(rollout={"maxUnavailable": "50%", "paused": False})

    def state() -> Any:
        return {one.name: (one.spec, children_of(one)) for one in storm.services}

    for one in storm.services:
        if one.name in storm.there:
            one.ready(timeout=150)
            until(lambda one=one: is_whole(one), 60, state)  # type: ignore[misc]
        else:
            until(lambda one=one: not any(children_of(one).values()), 60, state)  # type: ignore[misc]
