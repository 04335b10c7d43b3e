"""The Mooncake master through changes: it follows engines that serve, and a bad one is put right by a good spec."""

from typing import Any

from operator_world import Service, roles
from simulated_kubelet import Behaviour, Pod


def uid(service: Service) -> str:
    (pod,) = service.pods("store")
    return str(pod["metadata"]["uid"])


def image(service: Service) -> str:
    (pod,) = service.pods("store")
    return str(pod["spec"]["containers"][0]["image"])


def fails(name: str) -> Any:
    def behave(pod: Pod) -> Behaviour:
        if pod["spec"]["containers"][0]["image"] == name:
            return Behaviour(ready_after=None, waiting=("ImagePullBackOff", f"Back-off pulling image {name}"))
        return Behaviour()

    return behave


def test_a_bad_image_never_reaches_the_master(service: Service) -> None:
    assert service.kubelet is not None
    service.kubelet.behave = fails("engine:bad")
    service.apply(roles=roles(2, 2), store={}, transfer={"mode": "Store"}, rollout={"progressDeadline": "5s"})
    service.ready()
    before = uid(service)
    service.apply(engine={"image": "engine:bad"})
    assert "engine:bad" in service.reason("Progressing", "ProgressDeadlineExceeded")["message"]
    assert uid(service) == before
    assert service.condition("StoreReady")["reason"] == "RollingOut"
    service.apply(engine={"image": "engine:3"}, rollout={"progressDeadline": "5m"})
    service.ready()
    assert image(service) == "engine:3"


def test_a_master_that_cannot_start_is_replaced_by_that_of_a_good_spec(service: Service) -> None:
    assert service.kubelet is not None
    service.kubelet.behave = fails("engine:bad")
    store = {"store": {}, "transfer": {"mode": "Store"}}
    service.apply(engine={"image": "engine:bad"}, **store)
    said = service.reason("Ready", "ImagePullFailed")
    assert "store" in said["message"] and "svc-store-0" in said["message"]
    assert "svc-store-0" in service.cluster_cli("explain", "svc")
    service.apply(engine={"image": "engine:2"})
    service.ready()
    assert image(service) == "engine:2"
    greedy = {"master": {"managed": {"resources": {"limits": {"nvidia.com/gpu": 9}}}}}
    service.apply(store=greedy)
    service.reason("StoreReady", "Unschedulable")
    assert "svc-store-0" in service.cluster_cli("explain", "svc")
    service.apply(store={})
    service.ready()
