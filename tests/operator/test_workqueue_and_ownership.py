"""The queue's promises, what managedFields say, autoscaling, and reading engines' answers."""

import asyncio
import json
import logging
import sys
from dataclasses import replace
from typing import Any

import pytest

from isthmus_operator.api.v1alpha1 import parse
from isthmus_operator.commands.completion import script
from isthmus_operator.commands.log_lines import OneLine
from isthmus_operator.commands.parser import SHELLS, build_parser
from isthmus_operator.errors import InvalidSpec, Problem
from isthmus_operator.plan import autoscale, ownership
from isthmus_operator.plan.observed import EngineFacts, Facts, Word
from isthmus_operator.plan.ownership import (
    FIELD_MANAGER,
    TEMPLATE_MARK,
    altered,
    differs,
    marked,
    owned,
    pinned,
    plain,
    set_by_us,
    taken_over,
)
from isthmus_operator.plan.planner import plan
from isthmus_operator.plan.rehearse import World, rehearse
from isthmus_operator.render.names import Component
from isthmus_operator.shell.facts import engine_facts, words
from isthmus_operator.shell.workqueue import Key, Pauses, WorkQueue

FAST = Pauses(settle=0.0, first=0.001, most=0.004, resync=1000)
A, B = ("ns", "a"), ("ns", "b")


class Run:
    """A queue whose work is a script; `wait` ends after so many runs."""

    def __init__(self, results: dict[int, Any] | None = None, pauses: Pauses = FAST) -> None:
        self.runs: list[Key] = []
        self.failures: list[str] = []
        self.active: list[Key] = []
        self.results = results or {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.changed = asyncio.Condition()
        self.queue = WorkQueue(
            self.work, failed=lambda k, e: self.failures.append(str(e)), pauses=pauses, spread=lambda: 0
        )
        self.task = asyncio.create_task(self.queue.run(3))

    def fail(self, key: Key, error: Exception) -> None:
        self.failures.append(str(error))

    async def work(self, key: Key) -> float | None:
        assert key not in self.active
        self.active.append(key)
        self.runs.append(key)
        async with self.changed:
            self.changed.notify_all()
        await self.gate.wait()
        self.active.remove(key)
        result = self.results.get(len(self.runs))
        if isinstance(result, Exception):
            raise result
        return result

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: len(self.runs) >= count)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def test_a_burst_is_one_run_and_a_change_meanwhile_is_one_more() -> None:
    async def main() -> None:
        run = Run()
        for _ in range(10):
            run.queue.add(A)
        run.gate.clear()
        await run.until(1)
        for _ in range(10):
            run.queue.add(A)
        run.queue.add(B)
        await run.until(2)
        assert run.runs == [A, B]
        run.gate.set()
        await run.until(3)
        assert run.runs == [A, B, A]
        await run.close()

    asyncio.run(main())


def test_failures_come_again_and_success_ends_them() -> None:
    async def main() -> None:
        run = Run({1: RuntimeError("one"), 2: RuntimeError("two")})
        run.queue.add(A)
        await run.until(3)
        assert run.failures == ["one", "two"]
        await run.close()

    asyncio.run(main())


def test_pauses_double_up_to_the_most() -> None:
    async def main() -> None:
        queue = WorkQueue(_nothing, failed=lambda k, e: None, pauses=Pauses(), spread=lambda: 0)
        found = []
        for count in range(1, 9):
            queue._failures[A] = count
            found.append(queue._pause(A))
        assert found == [1, 2, 4, 8, 16, 32, 60, 60]

    asyncio.run(main())


async def _nothing(key: Key) -> float | None:
    return None


def test_a_key_that_is_woken_without_end_is_run_at_the_granted_rate_and_others_at_once() -> None:
    async def main() -> None:
        run = Run(pauses=replace(FAST, burst=3, refill=1000.0))
        for count in range(1, 4):
            run.queue.add(A)
            await run.until(count)
        run.queue.add(A, anew=True)
        run.queue.add(B)
        await run.until(4)
        assert run.runs == [A, A, A, B]
        assert run.queue._settle(A) == pytest.approx(1000, abs=60), "as long as it takes to be granted one more"
        run.queue.remove(A)
        run.queue.add(A)
        await run.until(5)
        assert run.runs[-1] == A, "a new object of that name owes nothing"
        await run.close()

    asyncio.run(main())


def test_nothing_is_kept_of_a_key_that_is_removed_while_it_runs() -> None:
    async def main() -> None:
        run = Run({1: OSError("one")})
        run.gate.clear()
        run.queue.add(A)
        await run.until(1)
        run.queue.remove(A)
        run.gate.set()
        run.queue.add(B)
        await run.until(2)
        assert run.runs == [A, B]
        assert A not in run.queue._failures
        assert A not in run.queue._full
        await run.close()

    asyncio.run(main())


def test_the_work_says_when_to_come_again_and_a_removed_key_never_does() -> None:
    async def main() -> None:
        run = Run({1: 0.001, 2: 0.001})
        run.queue.add(A)
        await run.until(3)
        run.queue.remove(A)
        run.queue.add(B)
        await run.until(4)
        assert run.runs == [A, A, A, B]
        await run.close()

    asyncio.run(main())


def live(**more: Any) -> dict[str, Any]:
    """A Deployment as the server returns it after our apply: defaults filled in, ownership recorded."""
    fields = {
        "f:metadata": {"f:labels": {"f:a": {}}},
        "f:spec": {
            "f:replicas": {},
            "f:selector": {},
            "f:template": {
                "f:spec": {
                    "f:containers": {
                        'k:{"name":"engine"}': {
                            ".": {}, "f:name": {}, "f:image": {}, "f:args": {},
                            "f:ports": {'k:{"containerPort":1,"protocol":"TCP"}': {".": {}, "f:containerPort": {}}},
                            "f:resources": {"f:limits": {"f:cpu": {}}},
                            "f:env": {'k:{"name":"IP"}': {".": {}, "f:name": {}, "f:valueFrom": {"f:fieldRef": {}}}},
                        }
                    }
                }
            },
        },
    }  # fmt: skip
    container = {
        "name": "engine", "image": "i:1", "args": ["x"], "imagePullPolicy": "Always",
        "ports": [{"containerPort": 1, "protocol": "TCP"}], "resources": {"limits": {"cpu": "500m"}},
        "env": [{"name": "IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}],
    }  # fmt: skip
    ours = {"manager": "isthmus-operator", "operation": "Apply", "fieldsV1": fields}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "d",
            "namespace": "ns",
            "labels": {"a": "b"},
            "managedFields": [ours, *more.get("others", ())],
        },
        "spec": {
            "replicas": more.get("replicas", 2),
            "selector": {"matchLabels": {"a": "b"}},
            "revisionHistoryLimit": 10,
            "template": {"spec": {"containers": [container], "dnsPolicy": "ClusterFirst"}},
        },
    }


def wanted(**container: Any) -> dict[str, Any]:
    one = {
        "name": "engine", "image": "i:1", "args": ["x"], "ports": [{"containerPort": 1}],
        "resources": {"limits": {"cpu": "0.5"}},
        "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
    } | container  # fmt: skip
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d", "namespace": "ns", "labels": {"a": "b"}},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"a": "b"}},
            "template": {"spec": {"containers": [one]}},
        },
    }


def test_what_we_applied_is_not_applied_again() -> None:
    assert not differs(wanted(), live())


@pytest.mark.parametrize(
    "change",
    [{"image": "i:2"}, {"args": ["x", "y"]}, {"resources": {"limits": {"cpu": "1"}}}, {"env": []}, {"command": ["c"]}],
)
def test_any_change_of_ours_is_a_difference(change: dict[str, Any]) -> None:
    assert differs(wanted(**change), live())


def test_a_field_taken_over_or_removed_is_a_difference() -> None:
    taken = live(replicas=5)
    del taken["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"]["f:replicas"]
    assert differs(wanted(), taken)
    removed = live()
    removed["metadata"]["labels"] = {}
    assert differs(wanted(), removed)


def edit(fields: dict[str, Any], manager: str = "kubectl-set") -> dict[str, Any]:
    return {"manager": manager, "operation": "Update", "fieldsV1": fields}


def test_a_pinned_template_is_the_one_we_applied_whatever_we_render_now() -> None:
    newer = wanted(args=["new"], command=["other"])
    kept = pinned(newer, live())
    assert plain(owned(live()))["spec"]["template"] == kept["spec"]["template"]
    assert kept["spec"]["template"]["spec"]["containers"][0]["args"] == ["x"]
    assert kept["spec"]["replicas"] == newer["spec"]["replicas"]
    assert not differs(kept, live())


def test_a_template_edited_by_somebody_else_is_rendered_anew() -> None:
    there = live(
        others=[
            edit({"f:spec": {"f:template": {"f:spec": {"f:containers": {'k:{"name":"engine"}': {"f:image": {}}}}}}})
        ]
    )
    there["spec"]["template"]["spec"]["containers"][0]["image"] = "theirs:1"
    assert taken_over(wanted(), there, "spec", "template")
    assert pinned(wanted(), there)["spec"]["template"]["spec"]["containers"][0]["image"] == "i:1"


def test_what_somebody_else_adds_is_theirs() -> None:
    annotated = {"f:metadata": {"f:annotations": {"f:kubectl.kubernetes.io/restartedAt": {}}}}
    there = live(others=[edit({"f:spec": {"f:template": annotated}}, "kubectl-rollout")])
    there["spec"]["template"]["metadata"] = {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}
    assert not taken_over(wanted(), there, "spec", "template")
    assert not differs(wanted(), there)


def as_applied(manifest: dict[str, Any]) -> dict[str, Any]:
    """A live object with the mark that came with it."""
    there = live()
    there["metadata"]["annotations"] = manifest["metadata"]["annotations"]
    there["metadata"]["managedFields"][0]["fieldsV1"]["f:metadata"]["f:annotations"] = {f"f:{TEMPLATE_MARK}": {}}
    return there


def without(there: dict[str, Any], field: str) -> dict[str, Any]:
    """The same after somebody has removed a field of the container: it leaves our record, and no other has it."""
    template = there["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"]["f:template"]
    del template["f:spec"]["f:containers"]['k:{"name":"engine"}'][f"f:{field}"]
    del there["spec"]["template"]["spec"]["containers"][0][field]
    return there


@pytest.mark.parametrize("field", ["args", "env", "resources", "ports"])
def test_a_field_that_somebody_removes_is_put_back_once(field: str) -> None:
    rendered = marked(wanted())
    assert not differs(pinned(rendered, as_applied(rendered)), as_applied(rendered))
    there = without(as_applied(rendered), field)
    healing = pinned(rendered, there)
    assert healing == rendered
    assert differs(healing, there) and altered(healing, there)
    assert not altered(rendered, as_applied(rendered))


def test_an_item_that_somebody_removes_is_put_back() -> None:
    rendered = marked(wanted(env=[{"name": "IP"}, {"name": "X", "value": "1"}]))
    assert pinned(rendered, as_applied(rendered)) == rendered


def test_what_a_newer_operator_renders_in_addition_was_not_removed() -> None:
    """Else its upgrade would restart every pod."""
    there = as_applied(marked(wanted()))
    newer = marked(wanted(command=["other"], env=[]))
    kept = pinned(newer, there)
    assert not differs(kept, there) and not altered(kept, there)


def test_a_workload_without_a_mark_gets_one_and_keeps_its_template() -> None:
    there = live()
    first = pinned(marked(wanted()), there)
    assert first["metadata"]["annotations"].keys() == {TEMPLATE_MARK}
    assert first["spec"]["template"] == wanted()["spec"]["template"]
    assert differs(first, there) and not altered(first, there)
    newer = pinned(marked(wanted(command=["other"])), there)
    assert not differs(newer, there)
    assert "annotations" not in newer["metadata"]


def test_auto_scaling_follows_the_target_within_its_bounds() -> None:
    scaling = {"mode": "Auto", "min": 1, "max": 5, "target": {"metric": "QueuedRequests", "value": 4}}
    target = parse(
        {
            "apiVersion": "serving.isthmus.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "s", "namespace": "ns", "uid": "u"},
            "spec": {
                "model": {"source": {"hostPath": {"path": "/m"}}},
                "roles": {"prefill": {}, "decode": {"scaling": scaling}},
            },
        }
    )
    world = World()
    world.seen = replace(world.seen, scales={Component.DECODE: 2})
    for _ in rehearse(target, world):
        pass

    def decided(queued: float | None, now: float = 5000.0, *, stale: bool = False) -> autoscale.Decision:
        pods = world.seen.of(Component.DECODE)[0].pods
        said = EngineFacts(fingerprint="f", queued=queued, stale=stale)
        facts = Facts(engines={pod.name: said for pod in pods})
        seen = replace(world.seen, facts=facts)
        return autoscale.decide(target, seen, plan(target, seen, now), now)[Component.DECODE]

    def count(queued: float, now: float = 5000.0, *, stale: bool = False) -> int:
        return decided(queued, now, stale=stale).count

    assert len(world.seen.of(Component.DECODE)[0].pods) == 2
    assert count(4) == 2
    assert count(4.3) == 2
    assert count(6) == 3
    assert count(100) == 5
    assert count(0) == 1
    assert count(100, stale=True) == count(0, stale=True) == 2, "what a pod said before is no load of now"
    assert count(0, now=1100.0) == 2, "just started pods stay"
    assert decided(None).count == 2 and "QueuedRequests" in decided(None).held, "nobody says how busy they are"


def test_engine_answers_are_read_and_anything_else_is_refused() -> None:
    info = {
        "role": "decode", "model": "m", "fingerprint": "f", "waiting": 3,
        "kv": {"physical_blocks": 5, "usable_blocks": 4, "bytes_per_block": 10, "max_model_len": 64},
        "transfer": {"mode": "direct", "transport": "tcp", "probed_gbps": 1.5, "ready": True, "reason": ""},
    }  # fmt: skip
    text = 'vllm:kv_cache_usage_perc{model_name="m"} 0.25\nvllm:kv_cache_usage_perc_other 9\n'
    found = engine_facts(info, text)
    assert (found.fingerprint, found.transport, found.queued, found.kv_usage) == ("f", "tcp", 3, 0.25)
    silent = engine_facts({key: value for key, value in info.items() if key != "waiting"}, "other 1\n")
    assert (silent.queued, silent.kv_usage) == (None, None), "what it does not say is no load of 0"
    with pytest.raises(KeyError):
        engine_facts({"role": "router"})
    engines = [
        {"url": "http://10.0.0.1:8001", "reason": ""},
        {"url": "http://[fd00::1]:8001", "reason": "draining", "other_tokenizer": False},
        {"url": "http://10.0.0.2:8001", "reason": "its model has another", "other_tokenizer": True},
        {"url": "http://10.0.0.3:8001", "reason": ""},
    ]
    assert words(engines, {"10.0.0.1", "fd00::1", "10.0.0.2", "10.0.0.4"}) == {
        "10.0.0.1": Word.TAKEN,
        "fd00::1": Word.NOT_NOW,
        "10.0.0.2": Word.OTHER,
    }, "of none that is not asked for"


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_command(shell: str) -> None:
    text = script(shell, build_parser())
    for command in ("up", "plan", "explain", "operator"):
        assert command in text
    assert "kubeconfig" in text


def test_list_items_of_another_manager_are_not_asked_about_each_of_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """3,000 variables of somebody's in one Deployment took half a minute of the operator, in every run."""
    parsed = 0
    loads = json.loads

    def counted(text: str) -> Any:
        nonlocal parsed
        parsed += 1
        return loads(text)

    names = [f"E{number}" for number in range(300)]
    keys = {f'k:{{"name":"{name}"}}': {"f:name": {}, "f:value": {}} for name in names}
    theirs = {"f:spec": {"f:template": {"f:spec": {"f:containers": {'k:{"name":"c"}': {"f:env": keys}}}}}}

    def workload(value: str, fields: dict[str, Any]) -> dict[str, Any]:
        env = [{"name": name, "value": value} for name in names]
        template = {"spec": {"containers": [{"name": "c", "env": env}]}}
        entries = [{"manager": "another", "operation": "Update", "fieldsV1": fields}] if fields else []
        return {"metadata": {"name": "w", "managedFields": entries}, "spec": {"template": template}}

    monkeypatch.setattr(json, "loads", counted)
    live = workload("x", theirs)
    assert not taken_over(workload("x", {}), live)
    assert taken_over(workload("y", {}), live)
    assert parsed <= 4 * len(names)


def test_list_items_are_not_gone_through_for_each_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """640 managers of one variable each, of 4,200, took seconds; the API server bounds those of updates alone."""
    asked = 0
    of = ownership._Keys.of

    def counted(keys: Any, item: Any) -> Any:
        nonlocal asked
        asked += 1
        return of(keys, item)

    names = [f"E{number}" for number in range(100)]

    def workload(value: str, last: str) -> dict[str, Any]:
        env = [{"name": name, "value": value} for name in names[:-1]] + [{"name": names[-1], "value": last}]
        return {"metadata": {"name": "w"}, "spec": {"containers": [{"name": "c", "env": env}]}}

    def theirs(name: str) -> dict[str, Any]:
        env = {".": {}, f'k:{{"name":"{name}"}}': {".": {}, "f:name": {}, "f:value": {}}}
        return {"f:spec": {"f:containers": {'k:{"name":"c"}': {"f:env": env}}}}

    monkeypatch.setattr(ownership._Keys, "of", counted)
    live = workload("x", "x")
    live["metadata"]["managedFields"] = [
        {"manager": f"m{name}", "operation": "Apply", "fieldsV1": theirs(name)} for name in names
    ]
    assert not taken_over(workload("x", "x"), live)
    assert taken_over(workload("x", "y"), live)
    live["metadata"]["managedFields"].append(
        {"manager": "whole", "operation": "Update", "fieldsV1": {"f:spec": {"f:containers": {}}}}
    )
    assert taken_over(workload("x", "y"), live) and not taken_over(workload("x", "x"), live)
    assert asked <= 5 * (len(names) + 1)


def test_a_list_key_names_one_item_by_all_its_fields() -> None:
    ports = [{"port": 1, "protocol": "TCP"}, {"port": 1, "protocol": "UDP"}, {"port": 1, "protocol": "TCP", "x": 1}]
    fields = {
        'k:{"port":1,"protocol":"UDP"}': {"f:port": {}, "f:protocol": {}},
        'k:{"port":1,"protocol":"TCP"}': {"f:port": {}, "f:protocol": {}},
    }
    entry: dict[str, Any] = {"manager": FIELD_MANAGER, "operation": "Apply"}
    entry["fieldsV1"] = {"f:ports": fields, "f:set": {'v:"a"': {}, "v:1": {}}}
    found = owned({"metadata": {"managedFields": [entry]}, "ports": ports, "set": ["a", "b", 1]})
    assert plain(found) == {"ports": ports[:2], "set": ["a", 1]}


def test_who_has_set_a_number_is_told_by_its_manager() -> None:
    def entry(manager: str, *fields: str, **more: str) -> dict[str, Any]:
        return {
            "manager": manager,
            "operation": "Update",
            "fieldsV1": {"f:spec": {f"f:{one}": {} for one in fields}},
        } | more

    def scaler(*entries: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": {"managedFields": list(entries)}, "spec": {"replicas": 3}}

    assert set_by_us(scaler(entry(FIELD_MANAGER, "replicas")), "spec", "replicas"), "made with it"
    assert set_by_us(
        scaler(entry("x", "other"), entry(FIELD_MANAGER, "replicas", operation="Apply")), "spec", "replicas"
    )
    theirs = scaler(entry(FIELD_MANAGER, "role"), entry("kubectl", "replicas", subresource="scale"))
    assert not set_by_us(theirs, "spec", "replicas")
    assert not set_by_us(scaler(), "spec", "replicas")


def test_what_users_write_is_a_part_of_one_line_of_the_log() -> None:
    record = logging.LogRecord(
        "kopf.objects", logging.ERROR, "", 0, "refused: %s", ("x\n2026 ERROR forged\x1b[2J",), None
    )
    form = OneLine("%(levelname)s %(name)s: %(message)s")
    assert form.format(record) == "ERROR kopf.objects: refused: x\\n2026 ERROR forged\\x1b[2J"
    try:
        raise ValueError("a\nERROR forged\x1b[2J")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "", 0, "failed, größer", (), sys.exc_info())
    first, *rest = form.format(record).split("\n")
    assert first == "ERROR n: failed, größer" and len(rest) > 2
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    assert str(Problem("spec.x\ny", "m", "a", "f")) == "spec.x\\ny: m; allowed: a; fix: f"


def test_what_is_said_of_a_resource_is_bounded() -> None:
    """5 KB of nested names were answered, and logged, with 290 KB."""
    problems = [Problem("spec" + f".{'n' * 313}" * 14, "m" * 4000, "a", "f")] * 64
    text = str(InvalidSpec("x", problems))
    assert len(text) < 12_000 and "64 problems" in text and text.endswith(" more")
    assert "n.nnn" in text and str(problems[0]).startswith("spec.nnn")
    few = str(InvalidSpec("x", problems[:2]))
    assert few.count("\n") == 2 and "more" not in few
    record = logging.LogRecord("n", logging.ERROR, "", 0, "x" * 100_000, (), None)
    assert len(OneLine("%(message)s").format(record)) < 9000


def test_namespaces_have_turns_at_the_workers() -> None:
    """Eight services of one, changed once a second, delayed everybody else's by seconds."""

    async def main() -> None:
        order: list[Key] = []
        go, done = asyncio.Event(), asyncio.Event()

        async def work(key: Key) -> None:
            order.append(key)
            await go.wait()
            if len(order) == 8:
                done.set()

        queue = WorkQueue(work, failed=lambda key, error: None, pauses=FAST)
        many = [("many", str(number)) for number in range(6)]
        for key in (*many, ("few", "a"), ("other", "b")):
            queue._now(key)
        running = asyncio.create_task(queue.run(1))
        go.set()
        await done.wait()
        running.cancel()
        await asyncio.wait((running,))
        assert order[:4] == [many[0], ("few", "a"), ("other", "b"), many[1]]
        assert [key for key in order if key[0] == "many"] == many

    asyncio.run(asyncio.wait_for(main(), 30))


def test_runs_that_take_long_do_not_hold_all_workers() -> None:
    """Eight services of one namespace, whose objects took the API server 15 s each, kept everybody else's waiting."""

    async def main() -> None:
        at_work: set[Key] = set()
        go, full, came, done = (asyncio.Event() for _ in range(4))
        slow = [(namespace, str(number)) for namespace in ("many", "more") for number in range(20)]

        async def work(key: Key) -> None:
            if key == ("few", "a"):
                came.set()
                return
            at_work.add(key)
            if len(at_work) == 5:
                full.set()
            await go.wait()
            at_work.discard(key)
            slow.remove(key)
            if not slow:
                done.set()

        queue = WorkQueue(work, failed=lambda key, error: None, pauses=FAST)
        for key in slow:
            queue._now(key)
        running = asyncio.create_task(queue.run(7))
        await full.wait()
        queue.add(("few", "a"))
        await came.wait()
        assert len(at_work) == 5
        go.set()
        await done.wait()
        running.cancel()
        await asyncio.wait((running,))
        assert not queue._ready._busy

    asyncio.run(asyncio.wait_for(main(), 30))
