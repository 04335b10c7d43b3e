"""From a plan and what exists to the objects to write: the master, the router and engines through changes."""

import copy
import dataclasses
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from applied import (
    NEW,
    OLD,
    ROUTER,
    STORE,
    D,
    P,
    applied,
    deployments,
    engines,
    image,
    live,
    pod,
    service,
    wanted,
)

from isthmus_operator.api.v1alpha1 import InferenceService
from isthmus_operator.plan.desired import Desired, name_of
from isthmus_operator.plan.observe import observe
from isthmus_operator.plan.observed import Facts
from isthmus_operator.plan.ownership import differs
from isthmus_operator.plan.rehearse import World, rehearse
from isthmus_operator.render import adapters, engine, mooncake, router
from isthmus_operator.render.names import REVISION_LABEL, UID_LABEL
from isthmus_operator.render.revision import pairing, role_revision, service_revision

Object = dict[str, Any]


# ---------------------------------------------------------------------------------------------------- adapters


def test_a_changed_list_of_adapters_is_written_and_no_pod_is_replaced() -> None:
    def listing(*names: str) -> InferenceService:
        sources = [{"name": name, "source": {"pvc": {"claimName": "c", "path": name}}} for name in names]
        return service(model={"source": {"hostPath": {"path": "/m"}}, "adapters": sources})

    def lists(found: Desired) -> list[list[str]]:
        texts = [text for m in found.apply if m["kind"] == "ConfigMap" for text in m["data"].values()]
        return [[one["name"] for one in json.loads(text)] for text in texts]

    one, two = listing("a"), listing("a", "b")
    children = engines(one)
    before, after = wanted(one, children), wanted(two, children)
    assert (lists(before), lists(after)) == ([["a"]], [["a", "b"]])
    for part in (P, D):
        assert deployments(before, part) == deployments(after, part) != []
    assert lists(wanted(service(), children)) == []
    listed = applied(adapters.config_map(one, pairing(one)))
    assert lists(wanted(service(), [*children, listed])) == [["a"]], "engines that stay a while have what they had"
    assert lists(wanted(service(), [listed])) == []
    stranger = {**listed, "metadata": {**listed["metadata"], "ownerReferences": []}}
    assert lists(wanted(service(), [*children, stranger])) == []


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("paused", [False, True])
def test_engines_of_another_base_keep_their_own_list_of_adapters(paused: bool, failed: bool) -> None:
    """A rollout of base and adapters, and one that was rolled back, gave the old engines the new adapters."""

    def of(version: str) -> InferenceService:
        source = {"pvc": {"claimName": "adapters", "path": f"sql-{version}"}}
        model = {"source": {"pvc": {"claimName": "models", "path": version}}}
        return service(model=model | {"adapters": [{"name": "sql", "source": source}]}, rollout={"paused": paused})

    def followed(found: Desired, deployment: Object) -> str:
        (data,) = [m["data"] for m in found.apply if m["kind"] == "ConfigMap"]
        return str(json.loads(data[adapters.file_of(deployment)])[0]["path"])

    old, new = of("v1"), of("v2")
    children = engines(old)
    listed = applied(wanted(old, children).apply[0])
    assert followed(wanted(old, children), children[0]).endswith("/sql-v1")
    children += [
        listed,
        *map(pod, engines(old)),
        live(engine.deployment(new, D, OLD, replicas=0), "2026-02-01T00:00:00Z"),
    ]
    found = wanted(new, children, failed=service_revision(new) if failed else "")
    assert followed(found, children[0]).endswith("/sql-v1")
    assert followed(found, children[-1]).endswith("/sql-v2")
    both = applied(found.apply[0])
    later = [both, children[-1], pod(children[-1])]
    (data,) = [m["data"] for m in wanted(new, later).apply if m["kind"] == "ConfigMap"]
    assert list(data) == [adapters.file_of(children[-1])], "the list of those that are gone is too"


def test_engines_of_an_earlier_operator_follow_the_list_that_it_made() -> None:
    def listing(*names: str) -> InferenceService:
        sources = [{"name": name, "source": {"pvc": {"claimName": "c", "path": name}}} for name in names]
        return service(model={"source": {"hostPath": {"path": "/m"}}, "adapters": sources})

    children = []
    for part in (P, D):
        text = json.dumps(engine.deployment(listing("a"), part, OLD, replicas=1))
        children.append(live(json.loads(text.replace(f"adapters-{pairing(listing('a'))}.json", "adapters.json"))))
    found = wanted(listing("a", "b"), children)
    (data,) = [m["data"] for m in found.apply if m["kind"] == "ConfigMap"]
    assert len(json.loads(data["adapters.json"])) == 2 and len(set(data.values())) == 1
    assert [adapters.file_of(one) for one in deployments(found, D)] == ["adapters.json"], "no pod is replaced"


# ------------------------------------------------------------------------------------------ images that pair


def test_a_change_of_one_role_keeps_the_image_of_the_other_whatever_the_operator_brings() -> None:
    before = service()
    changed = service(roles={"prefill": {}, "decode": {"resources": {"limits": {"cpu": "2"}}}})
    children = engines(before)
    assert {image(m) for m in deployments(wanted(before, children, NEW), D)} == {"engine:0.1"}
    found = wanted(changed, children, NEW)
    assert role_revision(changed, D) in {m["metadata"]["labels"][REVISION_LABEL] for m in deployments(found, D)}
    assert {image(m) for m in (*deployments(found, P), *deployments(found, D))} == {"engine:0.1"}


def test_a_change_that_all_engines_share_brings_the_image_of_the_operator() -> None:
    children = engines(service())
    changed = service(engine={"maxModelLen": 2048})
    found = [m for part in (P, D) for m in deployments(wanted(changed, children, NEW), part)]
    revisions = {role_revision(changed, P), role_revision(changed, D)}
    made = [m for m in found if m["metadata"]["labels"][REVISION_LABEL] in revisions]
    assert made and {image(m) for m in made} == {"engine:0.2"}
    named = service(engine={"maxModelLen": 2048, "image": "engine:own"})
    assert "engine:own" in {image(m) for m in deployments(wanted(named, children, NEW), P)}


def test_what_is_to_be_made_comes_before_what_gives_way() -> None:
    two = {"prefill": {"scaling": {"replicas": 2}}, "decode": {"scaling": {"replicas": 2}}}
    children: list[Object] = []
    for part in (P, D):
        one = live(engine.deployment(service(roles=two), part, OLD, replicas=2))
        children += [one, pod(one), pod(one, number=1)]
    changed = service(roles=two, engine={"image": "engine:2"})
    found = wanted(changed, children)
    names = {name_of(child) for child in children}
    order = [name_of(m) in names for m in found.apply if m["kind"] == "Deployment" and "router" not in name_of(m)[1]]
    assert order == sorted(order) and not all(order)


# ------------------------------------------------------------------------------------------ the router held back


def test_a_router_that_is_held_back_has_its_number_of_pods() -> None:
    before = service()
    children = [*engines(before), live(router.deployment(before, OLD))]
    changed = service(
        rollout={"paused": True}, engine={"image": "engine:2"}, router={"replicas": 3, "image": "router:2"}
    )
    (found,) = deployments(wanted(changed, children), ROUTER)
    assert found["spec"]["replicas"] == 3
    assert image(found) == OLD.router_image
    by_hand = [*children[:-1], children[-1] | {"spec": children[-1]["spec"] | {"replicas": 7}}]
    (found,) = deployments(wanted(changed, by_hand), ROUTER)
    assert found["spec"]["replicas"] == 3 and differs(found, by_hand[-1])


# ------------------------------------------------------------------------------------------------- routers


@pytest.mark.parametrize("renamed", [False, True])
def test_of_two_workloads_of_routers_of_one_revision_one_goes(renamed: bool) -> None:
    """An earlier operator makes another. The older goes on, unless only the other serves."""
    target = service()
    manifest = router.deployment(target, OLD, replicas=2)
    one = live(manifest)
    other = live(
        copy.deepcopy(manifest) | {"metadata": manifest["metadata"] | {"name": "svc-router"}}, "2026-01-02T00:00:00Z"
    )
    for edited in (target, service(router={"maxQueue": 9})):
        found = wanted(edited, [*engines(target), one, other, pod(other if renamed else one)])
        counts = {m["metadata"]["name"]: m["spec"]["replicas"] for m in deployments(found, ROUTER)}
        gone, stays = (one, other) if renamed else (other, one)
        assert counts[gone["metadata"]["name"]] == 0
        assert counts[stays["metadata"]["name"]] in (1, 2)
        assert min(counts.values()) == 0 and sum(counts.values()) <= 3
    gone["spec"]["replicas"] = 0
    found = wanted(target, [*engines(target), one, other, pod(stays)])
    assert [m["metadata"]["name"] for m in found.delete] == [gone["metadata"]["name"]]


def test_routers_may_all_be_drained_while_there_are_no_engines() -> None:
    """They are ready only when they know an engine, so that the first one would be missing for good."""

    def budgets(replicas: int, there: int) -> dict[str, Any]:
        target = service({part: {"scaling": {"replicas": replicas}} for part in ("prefill", "decode")})
        parts = [one for one in engines(target) for one in (one, *[pod(one)] * there)]
        found = [m for m in wanted(target, parts).apply if m["kind"] == "PodDisruptionBudget"]
        return {m["metadata"]["name"]: m["spec"]["maxUnavailable"] for m in found}

    assert budgets(1, 1) == {"svc-prefill": 1, "svc-decode": 1, "svc-router": 1}
    assert budgets(0, 1)["svc-router"] == 1, "they answer still"
    assert budgets(0, 0) == {"svc-prefill": 1, "svc-decode": 1, "svc-router": "100%"}


# ------------------------------------------------------------------------------------------------- the master


def stored(image: str, **spec: Any) -> InferenceService:
    return service(store={}, transfer={"mode": "Store"}, engine={"image": image}, **spec)


def master(target: InferenceService, policy: str = "Parallel") -> Object:
    manifest = mooncake.stateful_set(target, OLD)
    assert manifest["spec"]["podManagementPolicy"] == "Parallel"
    found = live(manifest)
    if policy != "Parallel":
        # As one that an earlier version has made: by default, owned by nobody.
        del found["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"]["f:podManagementPolicy"]
        found["spec"]["podManagementPolicy"] = policy
    return found


def running(target: InferenceService, *, ready: bool = True, policy: str = "Parallel") -> list[Object]:
    """Master, engines and their pods; `ready`: the master."""
    store, parts = master(target, policy), engines(target)
    return [store, pod(store, ready=ready), *parts, *(pod(part) for part in parts)]


def stateful(found: Desired) -> Object:
    (one,) = (m for m in found.apply if m["kind"] == "StatefulSet")
    return one


@pytest.mark.parametrize("spec", [{}, {"mode": "Unified", "roles": {"worker": {}}}, {"rollout": {"paused": True}}])
@pytest.mark.parametrize("on_nodes", [False, True])
def test_a_master_that_old_engines_use_stays_behind_the_network_policy(spec: Object, on_nodes: bool) -> None:
    transfer = {"mode": "Store", "transport": "RDMA", "rdma": {"hostNetwork": on_nodes, "resourceName": "rdma/a"}}
    before = service(store={}, transfer=transfer)
    roles = spec.get("roles")
    after = service(roles, **{key: value for key, value in spec.items() if key != "roles"})
    found = wanted(after, running(before))
    assert "StatefulSet" not in {one["kind"] for one in found.delete}
    (policy,) = (m for m in found.apply if m["kind"] == "NetworkPolicy" and m["metadata"]["name"].endswith("-engines"))
    (roles_of,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert roles_of["operator"] == "In" and {STORE, P, D} <= set(roles_of["values"])
    open_to_all = [rule["ports"][0]["port"] for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert open_to_all == ([50051] if on_nodes else []), "engines with the addresses of nodes reach it until they go"


def test_the_master_stays_while_old_engines_use_it() -> None:
    before = running(stored("engine:1"))
    for changed in (stored("engine:2"), stored("engine:2", rollout={"paused": True})):
        kept = stateful(wanted(changed, before))
        assert image(kept) == "engine:1"
        assert not differs(kept, before[0])
    # Its own short trouble is no reason either: a new engine has not proven the image.
    new = live(engine.deployment(stored("engine:2"), P, OLD, replicas=1))
    blip = [*running(stored("engine:1"), ready=False), new, pod(new, ready=False)]
    since = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    assert image(stateful(wanted(stored("engine:2"), blip, now=since + 5))) == "engine:1"
    # Trouble that lasts is: new engines cannot start without a master, and old ones have lost theirs.
    assert image(stateful(wanted(stored("engine:2"), blip, now=since + 60))) == "engine:2"


def test_the_master_stays_after_a_rollback() -> None:
    bad = stored("engine:2")
    found = wanted(bad, running(stored("engine:1")), failed=service_revision(bad))
    assert image(stateful(found)) == "engine:1"


def test_the_master_follows_when_only_new_engines_are_left() -> None:
    children = [*running(stored("engine:1"))[:2], *running(stored("engine:2"))[2:]]
    assert image(stateful(wanted(stored("engine:2"), children))) == "engine:2"


def test_a_master_that_never_ran_is_put_right_at_once() -> None:
    store = master(stored("engine:bad"))
    assert image(stateful(wanted(stored("engine:2"), [store, pod(store, ready=False)]))) == "engine:2"
    # A revert to what old engines ran, which wait for the master.
    old = engines(stored("engine:1"))
    children = [store, pod(store, ready=False), *({**one, "spec": one["spec"] | {"replicas": 0}} for one in old)]
    serving = [part for one in engines(stored("engine:bad")) for part in (one, pod(one))]
    assert image(stateful(wanted(stored("engine:1"), [*children, *serving]))) == "engine:1"


@pytest.mark.parametrize("ready", [True, False])
def test_a_master_made_in_order_is_made_anew_only_while_nobody_loses_by_it(ready: bool) -> None:
    before = running(stored("engine:1"), ready=ready, policy="OrderedReady")
    found = wanted(stored("engine:1"), before)
    if ready:
        assert not differs(stateful(found), before[0])
        assert not found.delete
    else:
        assert [name_of(one) for one in found.delete] == [("StatefulSet", "svc-store")]
        assert not [m for m in found.apply if m["kind"] == "StatefulSet"]
        again = wanted(stored("engine:1"), before[2:])
        assert stateful(again)["spec"]["podManagementPolicy"] == "Parallel"


def test_how_images_are_pulled_is_part_of_the_masters_revision() -> None:
    plain = stored("engine:1")
    pulled = service(
        store={}, transfer={"mode": "Store"}, engine={"image": "engine:1", "imagePullSecrets": [{"name": "reg"}]}
    )
    always = service(store={}, transfer={"mode": "Store"}, engine={"image": "engine:1", "imagePullPolicy": "Always"})
    assert len({role_revision(one, STORE) for one in (plain, pulled, always)}) == 3
    # As it was before this was so.
    assert role_revision(plain, STORE) == "cddda7fd"
    children = [*running(plain)[:2], *running(pulled)[2:]]
    assert stateful(wanted(pulled, children))["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "reg"}]


def test_a_rehearsed_change_of_the_master_comes_after_the_old_engines() -> None:
    world = World()
    for _ in rehearse(stored("engine:1"), world):
        pass
    new = stored("engine:2")
    old = [w.name for w in world.seen.engines]
    for _, now in rehearse(new, world):
        assert now.seen.store is not None
        if now.seen.store.revision == role_revision(new, STORE):
            assert all(not w.replicas and not w.pods for w in now.seen.engines if w.name in old)
    assert world.seen.store is not None and world.seen.store.revision == role_revision(new, STORE)


def test_every_present_workload_is_kept_as_it_is() -> None:
    """With nothing to do nothing differs, so nothing is written."""
    target = stored("engine:1")
    children = [*running(target), live(router.deployment(target, OLD))]
    by_name = {name_of(child): child for child in children}
    found = wanted(target, children, NEW)
    for manifest in found.apply:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            assert not differs(manifest, by_name[name_of(manifest)])
    assert not found.delete


def test_an_image_set_by_hand_is_put_right_and_not_taken_up() -> None:
    """`kubectl set image` takes the field from us; the spec names no image."""
    children = engines(service())
    decode = children[1]
    template = decode["spec"]["template"]["spec"]
    template["containers"] = [{**one, "image": "other:9"} for one in template["containers"]]
    (record,) = decode["metadata"]["managedFields"]
    tree = record["fieldsV1"]["f:spec"]["f:template"]["f:spec"]["f:containers"]['k:{"name": "engine"}']
    del tree["f:image"]
    theirs = {"k:" + json.dumps({"name": "engine"}): {"f:image": {}}}
    decode["metadata"]["managedFields"].append(
        {
            "manager": "kubectl-set",
            "operation": "Update",
            "fieldsV1": {"f:spec": {"f:template": {"f:spec": {"f:containers": theirs}}}},
        }
    )
    found = wanted(service(), children, OLD)
    assert {image(m) for part in (P, D) for m in deployments(found, part)} == {"engine:0.1"}


# ------------------------------------------------------------------------------------------------ whom Services pick


def picked(found: Desired, name: str) -> str | None:
    """The uid that a Service asks pods for."""
    (one,) = [m for m in found.apply if m["kind"] == "Service" and m["metadata"]["name"] == name]
    value = one["spec"]["selector"].get(UID_LABEL)
    return None if value is None else str(value)


def by_an_older_operator(manifest: Object) -> Object:
    """As it was made before pods carried the uid."""
    manifest = copy.deepcopy(manifest)
    del manifest["spec"]["template"]["metadata"]["labels"][UID_LABEL]
    return live({key: value for key, value in manifest.items() if key != "status"})


SERVICES = ["svc-prefill", "svc-decode", "svc-store", "svc"]


def everything(target: InferenceService) -> list[Object]:
    made = [*engines(target), live(mooncake.stateful_set(target, OLD)), live(router.deployment(target, OLD))]
    return [*made, *map(pod, made)]


def test_services_pick_pods_by_the_uid_of_their_service() -> None:
    target = service(store={})
    for children in ([], everything(target)):
        found = wanted(target, children)
        assert [picked(found, name) for name in SERVICES] == ["u"] * 4
        templates = [m["spec"]["template"] for m in found.apply if "template" in m["spec"]]
        assert all(template["metadata"]["labels"][UID_LABEL] == "u" for template in templates)
        selectors = [m["spec"]["selector"]["matchLabels"] for m in found.apply if "template" in m["spec"]]
        assert not any(UID_LABEL in selector for selector in selectors), "they cannot be changed"


def test_an_upgrade_restarts_no_pod_and_loses_none() -> None:
    target = service(store={})
    made = [by_an_older_operator(one) for one in everything(target)[:4]]
    found = wanted(target, [*made, *map(pod, made)])
    assert [picked(found, name) for name in SERVICES] == [None] * 4
    before = {name_of(one): one["spec"]["template"] for one in made}
    after = {name_of(one): one["spec"]["template"] for one in found.apply if "template" in one["spec"]}
    assert after == before


@pytest.mark.parametrize("number,name", list(enumerate(SERVICES)))
def test_a_pod_that_lacks_the_uid_is_picked_until_it_is_gone(number: int, name: str) -> None:
    target = service(store={})
    children = everything(target)
    old = copy.deepcopy(children[4 + number])
    old["metadata"]["name"] += "-old"
    del old["metadata"]["labels"][UID_LABEL]
    found = wanted(target, [*children, old])
    assert {one: picked(found, one) for one in SERVICES} == dict.fromkeys(SERVICES, "u") | {name: None}


@pytest.mark.parametrize("uid,routed", [(None, False), ("another", False), ("u", True)])
def test_a_foreign_pod_is_told_of_where_requests_may_go_to_it(uid: str | None, routed: bool) -> None:
    target = service(store={})
    children = everything(target)
    foreign = copy.deepcopy(children[5])
    foreign["metadata"] |= {"name": "foreign", "ownerReferences": []}
    foreign["metadata"]["labels"][UID_LABEL] = uid
    if uid is None:
        del foreign["metadata"]["labels"][UID_LABEL]
    found = wanted(target, [*children, foreign])
    assert picked(found, "svc-decode") == "u", "it does not count for what the service's own carry"
    assert observe(target, [*children, foreign], Facts(), {}).strangers == (("foreign",) if routed else ())
    older = [children[0], by_an_older_operator(children[1]), *children[2:], foreign]
    assert observe(target, older, Facts(), {}).strangers == ("foreign",)


def test_the_uid_is_in_no_revision() -> None:
    target = service(store={})
    other = dataclasses.replace(target, uid="another")
    assert service_revision(target) == service_revision(other)
    assert all(role_revision(target, part) == role_revision(other, part) for part in (P, D, STORE, ROUTER))
