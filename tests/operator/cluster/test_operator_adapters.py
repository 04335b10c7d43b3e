"""Adapters come and go on a real API server: the list is written, and the pods stay as long as their mounts do."""

import json

from operator_world import Service, until


def test_a_changed_list_is_written_and_the_pods_stay(service: Service) -> None:
    def listed(*names: str, folder: str = "/a") -> None:
        sources = [{"name": name, "source": {"hostPath": {"path": folder, "subPath": name}}} for name in names]
        service.apply(model={"source": {"hostPath": {"path": "/models/m"}}, "adapters": sources})

    def names() -> list[str]:
        lists = [
            text for m in service.children("configmaps") for text in (m.get("data") or {}).values() if text[:1] == "["
        ]
        return sorted({one["name"] for text in lists for one in json.loads(text)})

    def pods() -> set[str]:
        return {pod["metadata"]["uid"] for pod in service.pods() if "deletionTimestamp" not in pod["metadata"]}

    service.apply()
    service.ready()
    plain = pods()
    assert names() == []
    listed("a")
    service.ready()
    first = pods()
    assert names() == ["a"]
    router = {pod["metadata"]["uid"] for pod in service.pods("router")}
    assert first & plain == router, "engines get slots and the list; the router learns of adapters from them"
    for wanted in (["a", "b"], ["b"]):
        listed(*wanted)
        until(lambda wanted=wanted: names() == wanted, 30)  # type: ignore[misc]
        service.ready()
        assert pods() == first
    listed("b", folder="/other")
    service.ready()
    assert names() == ["b"] and pods() & first == router
    service.apply(model={"source": {"hostPath": {"path": "/models/m"}}})
    until(lambda: names() == [], 30)
    service.ready()
    assert all("adapters" not in str(pod["spec"]["volumes"]) for pod in service.pods())
