"""Credentials of a service's pods: on by default, and an upgrade from pods without any breaks nothing on its way."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jwt
import pytest
from applied import OLD, D, P, deployments, engines, live, pod, service, wanted

from isthmus_operator.api.v1alpha1 import InferenceService
from isthmus_operator.local.issuer import LocalIssuer
from isthmus_operator.local.pods import TokenFile, translate
from isthmus_operator.plan.desired import Desired
from isthmus_operator.plan.observed import Pod
from isthmus_operator.render import engine, router
from isthmus_operator.render.credentials import TOKEN_S, audience
from isthmus_operator.render.names import (
    ENGINE_PORT,
    GUARDED_LABEL,
    METRICS_PORT,
    ROUTER_PORT,
    Component,
    Defaults,
    TokenIssuer,
)
from isthmus_operator.render.service import render
from isthmus_operator.shell.facts import FactReader
from isthmus_runtime.credentials import Credentials
from isthmus_runtime.errors import Unauthenticated

ROUTER = Component.ROUTER
ISSUER = TokenIssuer(name="https://cluster", keys="[]")
NOW = Defaults(issuer=ISSUER)
Object = dict[str, Any]


def before(target: InferenceService, part: Component) -> Object:
    """A workload as an operator without credentials has made it."""
    made = router.deployment(target, OLD) if part is ROUTER else engine.deployment(target, part, OLD, replicas=1)
    template = made["spec"]["template"]
    del template["metadata"]["labels"][GUARDED_LABEL]
    container = template["spec"]["containers"][0]
    for flag in ("--peer-credentials", "--metrics-port"):
        at = container["args"].index(flag)
        del container["args"][at : at + 2]
    container["ports"] = [port for port in container["ports"] if port["name"] == "http"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        container[probe]["httpGet"]["port"] = "http"
    container["volumeMounts"] = [m for m in container["volumeMounts"] if m["name"] != "peers"]
    template["spec"]["volumes"] = [v for v in template["spec"]["volumes"] if v["name"] != "peers"]
    return live(made)


def running(target: InferenceService) -> list[Object]:
    """All of a service made by an operator without credentials."""
    workloads = [before(target, part) for part in (P, D, ROUTER)]
    return [*workloads, *(pod(one) for one in workloads)]


def guarded(workload: Object) -> bool:
    template = workload["spec"]["template"]
    container = template["spec"]["containers"][0]
    has = "--peer-credentials" in container["args"]
    assert container["readinessProbe"]["httpGet"]["port"] == ("metrics" if has else "http")
    assert [port["name"] for port in container["ports"]] == ["http", *(["metrics"] if has else [])]
    assert has == ("--metrics-port" in container["args"])
    assert has == ("peers" in {volume["name"] for volume in template["spec"]["volumes"]})
    assert has == (template["metadata"]["labels"].get(GUARDED_LABEL) == "true")
    return has


def required(found: Desired) -> bool:
    (one,) = (m for m in found.apply if m["kind"] == "ConfigMap")
    return bool(json.loads(one["data"]["trust.json"])["required"])


def test_a_new_service_asks_for_credentials_from_the_start() -> None:
    found = wanted(service(), [], NOW)
    assert required(found)
    assert all(guarded(one) for part in (P, D, ROUTER) for one in deployments(found, part))
    kinds = [m["kind"] for m in found.apply]
    assert kinds.index("ConfigMap") < kinds.index("Deployment")


def test_an_upgraded_operator_restarts_nothing_and_asks_for_nothing_that_pods_lack() -> None:
    found = wanted(service(), running(service()), NOW)
    assert not any(guarded(one) for part in (P, D, ROUTER) for one in deployments(found, part))
    assert not required(found)


def test_engines_that_pair_with_earlier_ones_are_made_like_them() -> None:
    changed = service(roles={"prefill": {}, "decode": {"resources": {"limits": {"cpu": "2"}}}})
    found = wanted(changed, running(service()), NOW)
    assert len(deployments(found, D)) == 2
    assert not any(guarded(one) for part in (P, D, ROUTER) for one in deployments(found, part))
    assert not required(found)


def test_with_the_first_guarded_engines_the_router_gets_a_token_and_nobody_is_asked_until_all_have_one() -> None:
    changed = service(engine={"maxModelLen": 2048})
    old = running(service())
    found = wanted(changed, old, NOW)
    made = [one for part in (P, D) for one in deployments(found, part)]
    assert {guarded(one) for one in made} == {True, False}
    (front,) = deployments(found, ROUTER)
    assert guarded(front) and not required(found)

    # All templates are new by now, but pods of the old ones still end.
    new = [live(one) for one in [*engines(changed), router.deployment(changed, OLD)]]
    pods = [pod(one) for one in new]
    ending = old[-1]
    assert not required(wanted(changed, [*new, *pods, ending], NOW))
    assert required(wanted(changed, [*new, *pods], NOW))


def test_scrapers_reach_the_port_of_metrics_alone_once_every_pod_has_one() -> None:
    scraped = service(observability={"scrapeNamespaces": ["monitoring"]})
    seen = Defaults(operator_namespace="isthmus-system")

    def open_to_others(children: list[Object], name: str) -> list[list[int]]:
        found = wanted(scraped, children, seen).apply
        (policy,) = (m for m in found if (m["kind"], m["metadata"]["name"]) == ("NetworkPolicy", name))
        rules = [rule for rule in policy["spec"]["ingress"] if "ports" in rule]
        return [[port["port"] for port in rule["ports"]] for rule in rules]

    new = [*engines(scraped), live(router.deployment(scraped, OLD))]
    pods = [pod(one) for one in new]
    assert open_to_others([*new, *pods], "svc-engines") == [[METRICS_PORT]]
    assert open_to_others([*new, *pods], "svc-router") == [[ROUTER_PORT], [METRICS_PORT]]
    assert open_to_others(running(scraped), "svc-engines") == [[METRICS_PORT, ENGINE_PORT]]


def test_the_operator_asks_each_pod_at_the_port_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def text(reader: FactReader, url: str, pod: Pod, most: int = 0) -> None:
        asked.append(url)

    async def main() -> None:
        reader = FactReader()
        old, new = (
            Pod(name=n, component=D, revision="r", created=0, changed=0, ip=f"10.0.0.{n}", uid=n, ready=True)
            for n in "12"
        )
        front = replace(old, component=ROUTER, ip="10.0.0.3")
        fronts = [front, replace(front, ip="10.0.0.4", guarded=True)]
        for front in fronts:
            await reader.read("ns", [old, replace(new, guarded=True), front], load=False)
        await reader.close()

    monkeypatch.setattr(FactReader, "_text", text)
    asyncio.run(main())
    ports = {1: ENGINE_PORT, 2: METRICS_PORT, 3: ROUTER_PORT, 4: METRICS_PORT}
    assert set(asked) == {f"http://10.0.0.{host}:{port}/info" for host, port in ports.items()}


def test_without_the_cluster_s_keys_no_trust_is_written() -> None:
    assert not [m for m in wanted(service(), [], Defaults()).apply if m["kind"] == "ConfigMap"]


def test_keys_travel_to_pods_with_what_they_are_for() -> None:
    issuer = TokenIssuer(name="https://cluster", keys='[{"kid": "a"}]')
    (found,) = (m for m in render(service(), Defaults(issuer=issuer)) if m["kind"] == "ConfigMap")
    assert json.loads(found["data"]["trust.json"]) == {
        "issuer": "https://cluster",
        "audience": "serving.isthmus.dev/ns/svc",
        "namespace": "ns",
        "required": True,
        "keys": [{"kid": "a"}],
    }
    volumes = deployments(wanted(service(), [], NOW), P)[0]["spec"]["template"]["spec"]["volumes"]
    (peers,) = (volume["projected"] for volume in volumes if volume["name"] == "peers")
    token, trust = peers["sources"]
    assert token["serviceAccountToken"]["audience"] == audience(service())
    assert trust["configMap"]["name"] == found["metadata"]["name"]


# ------------------------------------------------------------------------------------------------------ on a laptop


def test_local_pods_trust_each_other_and_no_other_run(tmp_path: Path) -> None:
    """As `isthmus up` writes it and the runtime reads it."""
    runs = []
    for name in ("one", "two"):
        issuer = LocalIssuer()
        manifests = render(service(), Defaults(issuer=issuer.public))
        maps = {("ConfigMap", m["metadata"]["name"]): m for m in manifests if m["kind"] == "ConfigMap"}
        pods = translate(
            manifests,
            run_dir=str(tmp_path / name),
            take_address=lambda pod, role, ports: "127.0.0.1",
            ports={},
            objects=maps,
        )
        for one in pods:
            for path, content in one.files.items():
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_bytes(content)
            issuer.write(one.tokens)
            (token,) = one.tokens
            assert Path(token.path).stat().st_mode & 0o777 == 0o600
            argv = one.containers[0].argv
            assert argv[argv.index("--peer-credentials") + 1] == str(Path(token.path).parent)
        runs.append([Credentials(str(Path(one.tokens[0].path).parent)) for one in pods])
    mine, others = runs
    for caller in mine:
        assert caller.problem() == ""
        for receiver in mine:
            receiver.check(caller.authorization())
        with pytest.raises(Unauthenticated):
            others[0].check(caller.authorization())


def test_local_tokens_are_renewed_before_they_expire_even_after_a_night_asleep(tmp_path: Path) -> None:
    now = [time.time()]
    issuer = LocalIssuer(clock=lambda: now[0])
    file = TokenFile(path=str(tmp_path / "t" / "token"), audience="a", namespace="ns", valid_s=TOKEN_S)

    def expires() -> int:
        issuer.write([file])
        claims = jwt.decode(Path(file.path).read_text(), options={"verify_signature": False})
        return int(claims["exp"])

    first = expires()
    now[0] += 0.7 * TOKEN_S
    assert expires() == first
    now[0] += 0.2 * TOKEN_S
    assert expires() > first
    now[0] += 5 * TOKEN_S
    assert expires() > now[0]
