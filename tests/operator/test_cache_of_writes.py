"""What the watch says, corrected by what we have written, and never longer than that is newer."""

import asyncio
import json
import random
from typing import Any

import pytest

from isthmus_operator.shell import cache
from isthmus_operator.shell.answers import weight
from isthmus_operator.shell.cache import MOST_CHILDREN, MOST_OF_A_SERVICE, MOST_WEIGHT_OF_A_SERVICE, Cache
from isthmus_operator.shell.kept import MOST_KEPT, MOST_OF_A_POD, keep

KEY = ("ns", "svc")


def body(version: int, *, uid: str = "u", name: str = "d", kind: str = "Deployment", **more: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": str(version)}
    labels = {"serving.isthmus.dev/service": "svc"}
    owner = {"apiVersion": "serving.isthmus.dev/v1alpha1", "kind": "InferenceService", "name": "svc", "uid": "s"}
    meta |= {"labels": labels, "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": kind, "metadata": meta, **more}


def service(version: int = 1, **more: Any) -> dict[str, Any]:
    return body(version, uid="s", name="svc", kind="InferenceService", **more)


class Woken:
    """A cache, and what it has called out."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.cache = Cache(*(lambda _, name=name: self.calls.append(name) for name in ("changed", "edited", "removed")))

    def versions(self) -> dict[str, int]:
        found = self.cache.children(KEY)()
        return {one["metadata"]["name"]: int(one["metadata"]["resourceVersion"]) for one in found}

    def since(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def test_an_answer_stands_until_the_watch_has_caught_up_or_told_of_the_deletion() -> None:
    async def main() -> None:
        one = Woken()
        one.cache.changed(service())
        one.cache.written(KEY, "apply", body(5))
        assert one.versions() == {"d": 5}, "made, and not watched yet"
        one.cache.changed(body(4))
        assert one.versions() == {"d": 5}, "the watch is behind"
        one.cache.changed(body(6))
        assert one.versions() == {"d": 6}
        one.cache.gone(body(7))
        assert one.versions() == {}, "deleted by somebody else"
        one.cache.written(KEY, "apply", body(8, uid="new"))
        one.cache.gone(body(9, uid="an older one"))
        assert one.versions() == {"d": 8}
        one.cache.changed(body(8, uid="new"))
        one.cache.gone(body(9, uid="new"))
        assert one.versions() == {}

    asyncio.run(main())


def test_what_we_deleted_is_gone_although_the_watch_still_shows_it() -> None:
    async def main() -> None:
        one = Woken()
        one.cache.changed(service())
        one.cache.changed(body(1))
        one.cache.changed(body(2, uid="v", name="e"))
        one.cache.written(KEY, "delete", body(1))
        assert one.versions() == {"e": 2}

    asyncio.run(main())


def test_a_service_is_woken_by_what_is_read_and_by_nothing_else() -> None:
    async def main() -> None:
        one = Woken()
        one.cache.changed(body(1, spec={"replicas": 1}))
        assert one.since() == [], "its service is not known yet"
        one.cache.changed(service())
        assert one.since() == ["changed"]
        one.cache.changed(body(2, spec={"replicas": 1}, status={"observedGeneration": 3, "replicas": 1}))
        assert one.since() == [], "a controller's status"
        one.cache.changed(body(3, spec={"replicas": 2}))
        assert one.since() == ["changed"]
        one.cache.written(KEY, "apply", body(4, spec={"replicas": 3}))
        one.cache.changed(body(5, spec={"replicas": 2}))
        assert one.since() == ["changed"], "what we wrote was undone before the watch told of it"
        failed = {"type": "ReplicaFailure", "status": "True", "message": "quota"}
        one.cache.changed(body(6, spec={"replicas": 2}, status={"conditions": [failed]}))
        assert one.since() == ["changed"]
        one.cache.gone(body(7))
        assert one.since() == ["changed"]
        one.cache.gone(service(8))
        assert one.since() == ["removed"]
        assert one.cache.service(KEY) is None
        one.cache.changed(body(9))
        assert one.since() == []

    asyncio.run(main())


def test_after_a_list_only_what_it_named_is_there() -> None:
    async def main() -> None:
        one = Woken()
        one.cache.changed(service())
        one.cache.changed(body(1))
        one.cache.changed(body(2, uid="v", name="e"))
        one.since()
        one.cache.absent("Deployment", "other", set(), 9)
        assert one.versions() == {"d": 1, "e": 2}
        one.cache.changed(body(3, uid="new"))
        one.cache.absent("Deployment", "", {"new"}, 9)
        assert one.versions() == {"d": 3}, "of the same name, and made anew meanwhile"
        assert one.since() == ["changed"] * 3
        one.cache.absent("InferenceService", "ns", set(), 9)
        assert one.since() == ["removed"]

    asyncio.run(main())


def test_a_list_and_a_watch_may_be_behind_each_other() -> None:
    async def main() -> None:
        one = Woken()
        one.cache.changed(service())
        one.cache.changed(body(5, spec={"replicas": 5}))
        one.since()
        one.cache.changed(body(4, spec={"replicas": 4}))
        assert (one.versions(), one.since()) == ({"d": 5}, []), "what is older says nothing"
        one.cache.changed(body(8, uid="v", name="e"))
        one.cache.absent("Deployment", "", {"u"}, 7)
        assert one.versions() == {"d": 5, "e": 8}, "made after the list was begun"
        one.cache.gone(body(9))
        one.cache.changed(body(5))
        assert one.versions() == {"e": 8}, "in a list that was begun before it was deleted"
        one.cache.changed(body(10))
        assert one.versions() == {"d": 10, "e": 8}, "its label was removed, and is back"
        one.cache.changed(body(11, uid="new"))
        assert one.versions() == {"d": 11, "e": 8}

    asyncio.run(main())


def test_ready_services_are_counted() -> None:
    async def main() -> None:
        one = Woken()
        one.cache.changed(service())
        assert one.cache.counts() == (0, 1)
        one.cache.changed(service(2, status={"conditions": [{"type": "Ready", "status": "True"}]}))
        assert one.cache.counts() == (1, 0)
        one.cache.gone(service(3))
        assert one.cache.counts() == (0, 0)

    asyncio.run(main())


def test_an_object_that_changes_its_service_is_no_more_the_first_ones() -> None:
    async def main() -> None:
        one = Woken()
        one.cache.changed(service())
        one.cache.changed(body(1))
        moved = body(2)
        moved["metadata"]["labels"] = {"serving.isthmus.dev/service": "other"}
        moved["metadata"]["ownerReferences"][0]["name"] = "other"
        one.cache.changed(moved)
        assert one.versions() == {}
        assert [child["metadata"]["name"] for child in one.cache.children(("ns", "other"))()] == ["d"]

    asyncio.run(main())


def test_an_edited_spec_is_told_apart_from_other_changes_of_a_service() -> None:
    async def main() -> None:
        def told(version: int, generation: int, uid: str = "s", **more: Any) -> dict[str, Any]:
            found = service(version, **more)
            found["metadata"] |= {"generation": generation, "uid": uid}
            return found

        one = Woken()
        one.cache.changed(told(1, 1, spec={}))
        one.cache.changed(told(2, 1, spec={}, status={"url": "x"}))
        assert one.since() == ["changed", "changed"]
        one.cache.changed(told(3, 2, spec={"mode": "Unified"}))
        one.cache.changed(told(3, 2, spec={"mode": "Unified"}))
        assert one.since() == ["edited"]
        one.cache.gone(told(4, 2))
        one.cache.changed(told(5, 1, uid="another"))
        assert one.since() == ["removed", "changed"]

    asyncio.run(main())


def test_of_what_is_only_labelled_as_a_services_nothing_is_kept() -> None:
    async def main() -> None:
        one = Woken()
        one.cache.changed(service())
        foreign = body(1, kind="ConfigMap", data={"x": "y" * 1000})
        for owners in ([], [{"apiVersion": "apps/v1", "kind": "Deployment", "name": "svc", "uid": "d"}]):
            foreign["metadata"] |= {"ownerReferences": owners, "resourceVersion": str(len(owners) + 2)}
            one.cache.changed(foreign)
            assert one.versions() == {}
        one.since()
        one.cache.changed(body(4, kind="ConfigMap"))
        assert (one.versions(), one.since()) == ({"d": 4}, ["changed"]), "it has been given to the service"
        foreign["metadata"]["resourceVersion"] = "5"
        one.cache.changed(foreign)
        assert (one.versions(), one.since()) == ({}, ["changed"]), "its owner reference was taken off"

    asyncio.run(main())


def test_labels_and_annotations_that_nobody_reads_are_not_kept() -> None:
    async def main() -> None:
        one = Woken()
        many = {f"{group}/l{n}": "x" for group in ("example.com", "serving.isthmus.dev") for n in range(1000)}
        ours = {"serving.isthmus.dev/template": "1"}
        child = body(1)
        child["metadata"]["labels"] |= many
        child["metadata"]["annotations"] = many | ours
        names = {f"f:{name}": {} for name in (*many, *ours)}
        fields = {"f:metadata": {"f:labels": names, "f:annotations": names}, "f:spec": {}}
        entry = {"manager": "kubectl", "operation": "Update", "fieldsV1": fields}
        child["metadata"]["managedFields"] = [entry]
        one.cache.changed(child)
        (kept,) = one.cache.children(KEY)()
        assert kept["metadata"]["labels"] == {"serving.isthmus.dev/service": "svc"}
        assert kept["metadata"]["annotations"] == ours
        (fields,) = (known["fieldsV1"] for known in kept["metadata"]["managedFields"])
        mine = {"f:serving.isthmus.dev/template": {}}
        assert fields == {"f:metadata": {"f:labels": {}, "f:annotations": mine}, "f:spec": {}}

    asyncio.run(main())


def test_a_child_larger_than_any_spec_asks_for_is_not_kept() -> None:
    async def main() -> None:
        one = Woken()
        one.cache.changed(body(1, kind="ConfigMap", data={"x": "y" * MOST_KEPT}))
        assert one.versions() == {}

    asyncio.run(main())


def test_a_pod_is_small_whatever_else_it_says() -> None:
    async def main() -> None:
        one = Woken()
        one.cache.changed(body(1, kind="Pod", status={"phase": "Running"}))
        assert one.versions() == {"d": 1}
        conditions = [{"type": f"t{number}", "message": "y" * 1000} for number in range(MOST_OF_A_POD // 1000)]
        one.cache.changed(body(2, kind="Pod", status={"conditions": conditions}))
        assert one.versions() == {}

    asyncio.run(main())


def test_objects_with_a_forged_owner_have_the_room_of_one_service() -> None:
    """Anybody may name a service as the owner of what he makes."""

    async def main() -> None:
        one = Woken()
        one.cache.changed(service(1))
        # As good as incompressible.
        noise = random.Random(0)
        for number in range(20):
            data = {"x": noise.randbytes(100 * 1024).hex()}
            one.cache.changed(body(2, uid=f"u{number}", name=f"d{number}", kind="ConfigMap", data=data))
        kept = sum(len(one.data) for one in one.cache._watched[KEY].values())
        assert MOST_OF_A_SERVICE / 2 < kept <= MOST_OF_A_SERVICE + 1024
        one.cache.changed(body(2, uid="p", name="pod", kind="Pod"))
        assert "pod" in one.versions(), "pods are counted by what there is of them"
        known = one.versions()
        one.cache.changed(body(3, uid="u0", name="d0", kind="ConfigMap", data={"x": noise.randbytes(99 * 1024).hex()}))
        assert one.versions() == known | {"d0": 3}, "what is replaced makes room for itself"

    asyncio.run(main())


def test_what_found_no_room_is_kept_once_there_is_some() -> None:
    """A list tells it again, as it is."""

    async def main() -> None:
        one = Woken()
        one.cache.changed(service(1))
        noise = random.Random(0)

        def large(name: str) -> dict[str, Any]:
            data = {"x": noise.randbytes(100 * 1024).hex()}
            return body(2, uid=name, name=name, kind="ConfigMap", data=data)

        forged, ours = [large(f"f{number}") for number in range(12)], large("ours")
        for each in (*forged, ours):
            one.cache.changed(each)
        assert "ours" not in one.versions()
        for each in forged:
            one.cache.gone({**each, "metadata": {**each["metadata"], "resourceVersion": "3"}})
        one.cache.changed(ours)
        assert one.versions()["ours"] == 2

    asyncio.run(main())


def test_services_of_a_namespace_have_its_room_and_those_beyond_are_left_out_until_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "MOST_OF_SERVICES", 100 * 1024)
    noise = random.Random(0)

    def large(number: int, namespace: str = "ns", version: int = 1, size: int = 15) -> dict[str, Any]:
        patch = {"x": noise.randbytes(size * 1024).hex()}
        one = body(version, uid=f"{namespace}{number}", name=f"s{number}", kind="InferenceService", spec=patch)
        one["metadata"]["namespace"] = namespace
        return one

    async def main() -> None:
        one = Woken()
        several = [large(number) for number in range(10)]
        for each in several:
            one.cache.changed(each)
        kept = [number for number in range(10) if not one.cache.left_out(("ns", f"s{number}"))]
        assert kept == [0, 1, 2, 3, 4], "those that came first"
        assert one.cache.service(("ns", "s9")) is None and ("ns", "s9") in one.cache
        assert one.since() == ["changed"] * 10, "each is told"
        one.cache.written(("ns", "s9"), "status", several[9] | {"status": {"x": "y"}})
        assert one.cache.service(("ns", "s9")) is None
        one.cache.changed(large(0, "other"))
        assert one.cache.service(("other", "s0")) is not None, "another namespace has its own room"
        one.cache.changed(large(1, version=2, size=14))
        one.cache.changed(large(2, version=2, size=60))
        assert not one.cache.left_out(("ns", "s1")) and one.cache.left_out(("ns", "s2"))
        one.since()
        one.cache.changed(several[9])
        found = one.cache.service(("ns", "s9"))
        assert found is not None and found["spec"] == several[9]["spec"] and one.since() == ["changed"]
        assert "ownerReferences" not in found["metadata"], "nobody reads whose a service is"
        used = sum(len(there["InferenceService", key[1]].data) for key, there in one.cache._watched.items())
        assert used <= 2 * 100 * 1024

    asyncio.run(main())


def test_an_answer_is_not_kept_beside_what_the_watch_tells_of_the_same() -> None:
    async def main() -> None:
        one = Woken()
        one.cache.changed(service(1))
        one.cache.written(KEY, "status", service(3))
        one.cache.changed(service(2))
        assert one.cache._written[KEY]
        one.cache.changed(service(3))
        assert not one.cache._written[KEY]

    asyncio.run(main())


def test_what_took_the_name_of_another_may_go_first() -> None:
    """Watches tell of each object in order, not of one and its successor."""

    async def main() -> None:
        one = Woken()
        for make in (service, body):
            old, new = make(2), make(4)
            new["metadata"]["uid"] = "new"
            one.cache.changed(old)
            one.cache.changed(new)
            one.cache.gone({**new, "metadata": {**new["metadata"], "resourceVersion": "5"}})
            one.cache.absent(old["kind"], "ns", set(), 6)
            assert one.versions() == {}
        one.cache.changed(service(7))
        one.cache.changed(body(8))
        assert one.versions() == {"d": 8}

    asyncio.run(main())


def test_of_a_service_that_is_gone_no_answer_is_kept() -> None:
    """A run that was under way when it went writes on."""

    async def main() -> None:
        one = Woken()
        one.cache.changed(service())
        one.cache.gone(service(2))
        one.cache.written(KEY, "apply", body(3))
        one.cache.written(KEY, "status", service(4))
        assert KEY not in one.cache
        assert one.cache._written == {}
        one.cache.changed(service(5))
        assert one.versions() == {}

    asyncio.run(main())


def test_what_a_services_children_weigh_when_they_are_looked_at_is_bounded() -> None:
    """A thousand policies that compress to nothing took a gigabyte in each run."""

    async def main() -> None:
        one = Woken()
        one.cache.changed(service())
        for number in range(100):
            rules = {"ingress": [{}] * 12_000}
            one.cache.changed(body(number + 2, uid=f"u{number}", name=f"n{number}", kind="NetworkPolicy", spec=rules))
        found = one.cache.children(KEY)()
        weighs = sum(weight(json.dumps(child)) for child in found)
        assert MOST_WEIGHT_OF_A_SERVICE / 2 < weighs <= MOST_WEIGHT_OF_A_SERVICE * 1.01
        for number in range(100):
            one.cache.gone(body(number + 200, uid=f"u{number}", name=f"n{number}", kind="NetworkPolicy"))
        for number in range(2 * MOST_CHILDREN):
            one.cache.changed(body(number + 400, uid=f"v{number}", name=f"m{number}", kind="ConfigMap"))
        assert len(one.cache.children(KEY)()) == MOST_CHILDREN, "those that are gone have made room"

    asyncio.run(main())


def test_of_a_pod_few_owners_are_kept() -> None:
    async def main() -> None:
        one = Woken()
        pod = body(2, kind="Pod", status={"phase": "Running"})
        pod["metadata"]["ownerReferences"] *= 200
        one.cache.changed(service())
        one.cache.changed(pod)
        (found,) = one.cache.children(KEY)()
        assert len(found["metadata"]["ownerReferences"]) == 16

    asyncio.run(main())


def pod(number: int, of: str = "svc", **status: Any) -> dict[str, Any]:
    found = body(number + 2, uid=f"p{number}", name=f"p{number}", kind="Pod", status={"phase": "Pending", **status})
    found["metadata"]["labels"]["serving.isthmus.dev/service"] = of
    return found


def test_of_a_pod_nothing_is_kept_that_anybody_may_write_at_length() -> None:
    """Two thousand of one ReplicaSet with an annotation of 31 KB, which is of workloads, took 50 MB, and as much in
    each run."""

    async def main() -> None:
        one = Woken()
        one.cache.changed(service())
        container = {"name": "c", "ready": False, "restartCount": 3, "imageID": "i" * 9000}
        container["lastState"] = {"terminated": {"exitCode": 1, "message": "first" + "m" * 4000 + "last"}}
        condition = {"type": "Ready", "status": "False", "message": "n" * 4000, "lastProbeTime": None}
        large = pod(1, conditions=[condition], containerStatuses=[container])
        large["metadata"]["annotations"] = {"serving.isthmus.dev/template": "x" * 9000}
        large["metadata"]["ownerReferences"] = [
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": name, "uid": "r", "controller": True}
            for name in ("n" * 9000, "d-5f")
        ]
        one.cache.changed(large)
        (found,) = one.cache.children(KEY)()
        assert len(json.dumps(found)) < 5000
        assert [owner["name"] for owner in found["metadata"]["ownerReferences"]] == ["d-5f"]
        (told,) = found["status"]["containerStatuses"]
        assert told["lastState"]["terminated"]["exitCode"] == 1
        assert told["restartCount"] == 3
        said = told["lastState"]["terminated"]["message"]
        assert said.startswith("first") and said.endswith("last")

    asyncio.run(main())


def test_pods_have_the_room_of_one_service_and_of_one_namespace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A label may name a service that does not exist, and ten thousand of them."""
    monkeypatch.setattr(cache, "MOST_WEIGHT_OF_PODS", 100_000)
    monkeypatch.setattr(cache, "MOST_OF_A_NAMESPACE", 30_000)
    chance = random.Random(5)

    async def main() -> None:
        one = Woken()
        one.cache.changed(service())
        for number in range(200):
            one.cache.changed(pod(number, message=chance.randbytes(300).hex()))
        found = one.cache.children(KEY)()
        weighs = sum(weight(json.dumps(child)) for child in found)
        assert 50_000 < weighs < 120_000
        assert "is left out: there is no room for it beside other pods ns svc" in caplog.text
        for number in range(300, 600):
            one.cache.changed(pod(number, f"svc{number}", message=chance.randbytes(300).hex()))
        kept = sum(
            len(of) for there in one.cache._watched.values() for of in [b"".join(k.data for k in there.values())]
        )
        assert 15_000 < kept < 31_000
        assert "beside other namespace ns" in caplog.text
        for number in (*range(200), *range(300, 600)):
            one.cache.gone({**pod(number), "metadata": {**pod(number)["metadata"], "resourceVersion": "9999"}})
        assert set(one.cache._used) == {("services", "ns")}, "they have given all of it back"

    asyncio.run(main())


@pytest.mark.parametrize(("letter", "fits"), [("a", 48), ("\u0142", 24), ("\U0001f600", 12)])
def test_a_text_takes_what_its_widest_letter_takes_for_each_other_one(letter: str, fits: int) -> None:
    """47 ConfigMaps of one emoji each took four times what was counted."""
    kept = keep(body(1, kind="ConfigMap", data={"x": "a" * (MOST_KEPT - 2000) + letter}))
    assert kept.data and cache.MOST_WEIGHT_OF_A_SERVICE // kept.weight == fits
