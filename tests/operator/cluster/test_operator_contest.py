"""Another controller that goes on changing an object of a service: a fight with it is bounded and told of once."""

from datetime import datetime
from typing import Any

from operator_world import Service, roles, until

from isthmus_operator.plan.contests import FIRST_S


def told(service: Service, reason: str) -> list[str]:
    items = service.client("GET", f"/api/v1/namespaces/{service.namespace}/events")["items"]
    return [e["message"] for e in items if e["reason"] == reason]


def test_a_deployment_that_somebody_else_scales_again_and_again(service: Service) -> None:
    service.apply(roles=roles(1, 1))
    service.ready()
    name = next(d["metadata"]["name"] for d in service.deployments() if "decode" in d["metadata"]["name"])
    path = f"/apis/apps/v1/namespaces/{service.namespace}/deployments/{name}"

    def replicas() -> Any:
        return service.client("GET", path)["spec"]["replicas"]

    def put_right() -> datetime:
        """When the operator last wrote it, by the API server's clock."""
        fields = service.client("GET", path)["metadata"]["managedFields"]
        return max(datetime.fromisoformat(one["time"]) for one in fields if one["manager"] == "isthmus-operator")

    def scale() -> None:
        service.client.merge(f"{path}/scale", {"spec": {"replicas": 3}})

    for _ in range(3):
        scale()
        until(lambda: replicas() == 1, 20)
    until(lambda: told(service, "ChildContested"), 20)
    assert len(told(service, "ChildHealed")) == 2
    before = put_right()
    scale()
    # The rest of the service is looked after meanwhile.
    service.cluster.kubectl("delete", "service/svc-prefill", "-n", service.namespace)
    until(lambda: service.client.find(f"/api/v1/namespaces/{service.namespace}/services/svc-prefill"), 20)
    until(lambda: replicas() == 1, 60)
    # In whole seconds.
    assert (put_right() - before).total_seconds() >= FIRST_S - 1
    service.ready()
    (message,) = told(service, "ChildContested")
    assert message.startswith(f"Deployment {name} is changed by somebody else again and again")
    assert len([one for one in told(service, "ChildHealed") if "Deployment" in one]) == 2
