"""What helm makes of the chart: every variant in charts/isthmus/ci, the defaults, and values that must be refused."""

import base64
import json
import re
import socket
import ssl
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import (
    CHART,
    NAMESPACE,
    ROOT,
    Manifest,
    StrictLoader,
    flags,
    of_kind,
    only,
    parse,
    render,
    run_helm,
    template,
    violations_of_restricted,
)

from isthmus_operator.api.profile import Feature, Profile
from isthmus_operator.commands.parser import build_parser
from isthmus_operator.commands.run_operator import options_of
from isthmus_operator.settings import Identity
from isthmus_operator.shell.rbac import LEASE_RULES, policy_rules

VARIANTS: dict[str, Path | None] = {
    "defaults": None,
    **{path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))},
}
OWN_SECRET = {
    "webhook.certificate.source": "secret",
    "webhook.certificate.secretName": "own",
    "webhook.certificate.caBundle": "Q0E=",
}
LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
# The rest of what the chart makes belongs to the release's namespace.
OF_THE_CLUSTER = {"ClusterRole", "ClusterRoleBinding", "ValidatingWebhookConfiguration", "CustomResourceDefinition"}


@cache
def variant(name: str) -> list[Manifest]:
    return render(VARIANTS[name])


def deployment(manifests: list[Manifest]) -> Manifest:
    return only(manifests, "Deployment")


def container(manifests: list[Manifest]) -> Manifest:
    found: Manifest = deployment(manifests)["spec"]["template"]["spec"]["containers"][0]
    return found


def labels_of(value: Any) -> list[dict[str, str]]:
    """Every `labels` and `matchLabels` below a value."""
    out: list[dict[str, str]] = []
    if isinstance(value, dict):
        for key, child in value.items():
            if key in ("labels", "matchLabels") and isinstance(child, dict):
                out.append(child)
            out += labels_of(child)
    elif isinstance(value, list):
        for child in value:
            out += labels_of(child)
    return out


@pytest.mark.parametrize("name", VARIANTS)
def test_the_lease_goes_with_the_release(name: str) -> None:
    """Else one that its holder could not give back keeps the next installation waiting."""
    lease = only(variant(name), "Lease")["metadata"]
    flag = f"--lease-name={lease['name']}"
    assert flag in container(variant(name))["args"]
    assert lease["namespace"] == deployment(variant(name))["metadata"]["namespace"]


@pytest.mark.parametrize("name", VARIANTS)
def test_helm_lint_finds_nothing(name: str) -> None:
    done = run_helm("lint", "--strict", str(CHART), *flags(VARIANTS[name], {}))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", VARIANTS)
def test_objects_are_distinct_and_well_formed(name: str) -> None:
    seen = set()
    for manifest in variant(name):
        meta = manifest["metadata"]
        key = (manifest["kind"], meta.get("namespace"), meta["name"])
        assert key not in seen
        seen.add(key)
        assert ("namespace" in meta) == (manifest["kind"] not in OF_THE_CLUSTER), key
        limit = 253 if manifest["kind"] == "CustomResourceDefinition" else 63
        assert re.fullmatch(r"[a-z]([-a-z0-9.]*[a-z0-9])?", meta["name"]) and len(meta["name"]) <= limit, key
        assert meta["labels"]["app.kubernetes.io/name"] == "isthmus-operator"
        if manifest["kind"] == "CustomResourceDefinition":
            continue
        for labels in labels_of(manifest):
            for label, value in labels.items():
                assert isinstance(value, str) and len(value) <= 63 and LABEL_VALUE.fullmatch(value), (key, label)


@pytest.mark.parametrize("release", ["a" * 53, "1st", "a.b", "isthmus", "prod"])
def test_names_hold_for_any_release_name(release: str) -> None:
    manifests = render(None, OWN_SECRET, release=release, namespace="n" * 63)
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        assert manifest["kind"] == "CustomResourceDefinition" or len(name) <= 63
        assert re.fullmatch(r"[a-z]([-a-z0-9.]*[a-z0-9])?", name)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", only(manifests, "Service")["metadata"]["name"])


def test_names_that_look_like_numbers_stay_texts() -> None:
    names = {"serviceAccount.name": "123", "operator.priorityClassName": "1e3", "dashboards.namespace": "007"}
    scope = {"scope": "namespace", "watch.namespaces": ["12", "0x1f"], "images.pullSecrets": ["0777"]}
    manifests = render(None, names | scope, namespace="12345")
    for manifest in manifests:
        meta = manifest["metadata"]
        assert isinstance(meta["name"], str) and isinstance(meta.get("namespace", ""), str), manifest
        for subject in manifest.get("subjects", ()):
            assert isinstance(subject["name"], str) and isinstance(subject["namespace"], str), manifest
    spec = deployment(manifests)["spec"]["template"]["spec"]
    assert (spec["serviceAccountName"], spec["priorityClassName"]) == ("123", "1e3")
    assert spec["imagePullSecrets"] == [{"name": "0777"}]


def test_two_releases_share_no_object_of_the_cluster() -> None:
    def names(release: str, namespace: str) -> set[tuple[str, str]]:
        made = render(None, {"crds.install": False} | OWN_SECRET, release=release, namespace=namespace)
        return {(m["kind"], m["metadata"]["name"]) for m in of_kind(made, *OF_THE_CLUSTER)}

    assert not names("isthmus", "team-a") & names("isthmus", "team-b")
    long = "n" * 60
    assert not names("isthmus", long + "a") & names("isthmus", long + "b")


@pytest.mark.parametrize("name", VARIANTS)
def test_selectors_find_the_operators_pods_and_nothing_else(name: str) -> None:
    manifests = variant(name)
    pod = deployment(manifests)["spec"]["template"]["metadata"]["labels"]
    test_pod = only(manifests, "Pod")["metadata"]["labels"]
    chosen = [deployment(manifests)["spec"]["selector"]["matchLabels"]]
    chosen += [service["spec"]["selector"] for service in of_kind(manifests, "Service")]
    chosen += [policy["spec"]["podSelector"]["matchLabels"] for policy in of_kind(manifests, "NetworkPolicy")]
    chosen += [m["spec"]["selector"]["matchLabels"] for m in of_kind(manifests, "PodDisruptionBudget", "PodMonitor")]
    for selector in chosen:
        assert selector.items() <= pod.items()
        assert not selector.items() <= test_pod.items()


@pytest.mark.parametrize("name", VARIANTS)
def test_pods_meet_pod_security_restricted(name: str) -> None:
    manifests = variant(name)
    assert violations_of_restricted(deployment(manifests)["spec"]["template"]["spec"]) == []
    assert violations_of_restricted(only(manifests, "Pod")["spec"]) == []


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"securityContext": {}}, "runAsNonRoot"),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "hostPath"),
        ({"containers": [{"name": "c"}]}, "allowPrivilegeEscalation"),
    ],
)
def test_the_pod_security_check_can_fail(broken: dict[str, Any], named: str) -> None:
    pod = deployment(variant("defaults"))["spec"]["template"]["spec"]
    assert any(named in problem for problem in violations_of_restricted({**pod, **broken}))


@pytest.mark.parametrize("name", VARIANTS)
def test_no_secret_is_empty(name: str) -> None:
    for secret in of_kind(variant(name), "Secret"):
        assert secret["data"]
        assert all(base64.b64decode(value, validate=True) for value in secret["data"].values())


def test_only_a_generated_certificate_makes_a_secret() -> None:
    with_secret = {name for name in VARIANTS if of_kind(variant(name), "Secret")}
    assert with_secret == {"defaults", "namespaced-webhook", "several-namespaces", "openshift", "everything"}


def test_the_generated_certificate_serves_the_name_that_the_api_server_calls(tmp_path: Path) -> None:
    manifests = variant("defaults")
    (webhook,) = only(manifests, "ValidatingWebhookConfiguration")["webhooks"]
    secret = {key: base64.b64decode(value) for key, value in only(manifests, "Secret")["data"].items()}
    for name, data in secret.items():
        (tmp_path / name).write_bytes(data)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    bundle = base64.b64decode(webhook["clientConfig"]["caBundle"]).decode()
    client = ssl.create_default_context(cadata=bundle)
    where = webhook["clientConfig"]["service"]
    ours, theirs = socket.socketpair()
    problems: list[Exception] = []

    def answer() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as connection:
                connection.recv(1)
        except (OSError, ssl.SSLError) as error:
            problems.append(error)

    ours.settimeout(30)
    theirs.settimeout(30)
    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=f"{where['name']}.{where['namespace']}.svc") as connection:
            connection.sendall(b"x")
            assert connection.version() == "TLSv1.3"
    finally:
        thread.join()
        ours.close()
        theirs.close()
    assert problems == []


def mounted(manifests: list[Manifest]) -> str:
    volumes = deployment(manifests)["spec"]["template"]["spec"]["volumes"]
    (name,) = [volume["secret"]["secretName"] for volume in volumes if "secret" in volume]
    return str(name)


def test_the_mounted_secret_is_the_one_that_is_made() -> None:
    assert mounted(variant("defaults")) == only(variant("defaults"), "Secret")["metadata"]["name"]
    assert mounted(variant("air-gapped")) == "isthmus-webhook"


def test_cert_manager_is_told_whom_to_trust() -> None:
    for name, issuer in (("cert-manager", "internal"), ("self-signed-issuer", "isthmus-webhook")):
        manifests = variant(name)
        configuration = only(manifests, "ValidatingWebhookConfiguration")
        (certificate,) = (m for m in of_kind(manifests, "Certificate") if not m["spec"].get("isCA"))
        wanted = f"{NAMESPACE}/{certificate['metadata']['name']}"
        assert configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"] == wanted
        assert "caBundle" not in configuration["webhooks"][0]["clientConfig"]
        assert certificate["spec"]["issuerRef"]["name"] == issuer
        service = configuration["webhooks"][0]["clientConfig"]["service"]["name"]
        assert f"{service}.{NAMESPACE}.svc" in certificate["spec"]["dnsNames"]
        assert mounted(manifests) == certificate["spec"]["secretName"]
    assert not of_kind(variant("cert-manager"), "Issuer")


def test_an_issuer_of_the_charts_own_keeps_its_authority_when_the_certificate_is_renewed() -> None:
    """One that signs itself would be trusted before any pod serves it, and what is served not any more."""
    manifests = variant("self-signed-issuer")
    issuers = {m["metadata"]["name"]: m["spec"] for m in of_kind(manifests, "Issuer")}
    authority, certificate = sorted(of_kind(manifests, "Certificate"), key=lambda m: not m["spec"].get("isCA"))
    assert issuers[authority["spec"]["issuerRef"]["name"]] == {"selfSigned": {}}
    assert issuers[certificate["spec"]["issuerRef"]["name"]] == {"ca": {"secretName": authority["spec"]["secretName"]}}
    assert authority["spec"]["secretName"] != certificate["spec"]["secretName"]


def test_the_webhook_cannot_hold_up_deletion_or_status() -> None:
    (webhook,) = only(variant("defaults"), "ValidatingWebhookConfiguration")["webhooks"]
    (rule,) = webhook["rules"]
    assert rule["operations"] == ["CREATE", "UPDATE"]
    assert rule["resources"] == ["inferenceservices"]
    assert rule["apiGroups"] == ["serving.isthmus.dev"]
    expressions = " ".join(condition["expression"] for condition in webhook["matchConditions"])
    assert "deletionTimestamp" in expressions and "object.spec != oldObject.spec" in expressions
    assert webhook["sideEffects"] == "None"


def in_namespaces(*names: str) -> Manifest:
    return {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(names)}]}


def test_a_namespaced_webhook_sees_its_namespace_only() -> None:
    (webhook,) = only(variant("namespaced-webhook"), "ValidatingWebhookConfiguration")["webhooks"]
    assert webhook["namespaceSelector"] == in_namespaces(NAMESPACE)
    assert "namespaceSelector" not in only(variant("defaults"), "ValidatingWebhookConfiguration")["webhooks"][0]


def test_namespaced_without_webhook_makes_nothing_of_the_cluster() -> None:
    manifests = variant("namespaced")
    assert of_kind(manifests, *OF_THE_CLUSTER) == []
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {NAMESPACE}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_operator_has_no_right_to_secrets_roles_or_everything(name: str) -> None:
    for role in of_kind(variant(name), "Role", "ClusterRole"):
        for rule in role["rules"]:
            assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]
            assert not {"secrets", "serviceaccounts", "roles", "rolebindings", "pods/exec"} & set(rule["resources"])
            assert "rbac.authorization.k8s.io" not in rule["apiGroups"]


def rules_of_the_operator(manifests: list[Manifest]) -> list[Any]:
    """Of every role that is bound to the account of the operator's pods, once for each binding."""
    account = deployment(manifests)["spec"]["template"]["spec"]["serviceAccountName"]
    bound = [
        binding["roleRef"]
        for binding in of_kind(manifests, "RoleBinding", "ClusterRoleBinding")
        if account in (subject["name"] for subject in binding["subjects"])
    ]
    known = {(m["kind"], m["metadata"]["name"]): m["rules"] for m in of_kind(manifests, "Role", "ClusterRole")}
    return [known[reference["kind"], reference["name"]] for reference in bound]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_scope_grants_what_the_operator_says_it_needs(name: str) -> None:
    *everywhere, lease = rules_of_the_operator(variant(name))
    assert len(everywhere) == (2 if name == "several-namespaces" else 1)
    assert all(rules == policy_rules() for rules in everywhere)
    assert [{key: rule[key] for key in rule if key != "resourceNames"} for rule in lease] == policy_rules(LEASE_RULES)


def test_several_namespaces_get_a_role_each_and_nothing_else_does() -> None:
    manifests = variant("several-namespaces")
    teams = ["team-a", "team-b"]
    for kind in ("Role", "RoleBinding"):
        made = [m["metadata"] for m in of_kind(manifests, kind) if m["metadata"]["name"].endswith("operator")]
        assert [meta["namespace"] for meta in made] == teams
        # Another release of the same name in another namespace may look after the same teams.
        assert {meta["name"] for meta in made} == {f"isthmus-{NAMESPACE}-operator"}
    for binding in of_kind(manifests, "RoleBinding"):
        assert [subject["namespace"] for subject in binding["subjects"]] == [NAMESPACE]
    assert [arg for arg in container(manifests)["args"] if arg.startswith("--namespace=")] == [
        f"--namespace={team}" for team in teams
    ]
    (webhook,) = only(manifests, "ValidatingWebhookConfiguration")["webhooks"]
    assert webhook["namespaceSelector"] == in_namespaces(*teams)
    (services,) = (
        peer["namespaceSelector"]
        for rule in only(manifests, "NetworkPolicy")["spec"]["egress"]
        for peer in rule.get("to", [])
    )
    assert services == in_namespaces(*teams)
    assert not of_kind(manifests, "ClusterRole", "ClusterRoleBinding")


def test_engines_with_the_addresses_of_nodes_are_reached_where_these_are_named() -> None:
    cidrs = ["10.0.0.0/16", "fd00::/64"]

    def peers(manifests: list[Manifest]) -> list[Any]:
        rules = [rule for rule in only(manifests, "NetworkPolicy")["spec"]["egress"] if "to" in rule]
        (rule,) = rules
        assert {port["port"] for port in rule["ports"]} == {8000, 8001, 9003}
        return list(rule["to"])

    (pods,) = peers(variant("defaults"))
    assert peers(render(None, {"networkPolicy.nodeCIDRs": cidrs})) == [pods, *({"ipBlock": {"cidr": c}} for c in cidrs)]


def test_users_with_edit_scale_roles_and_users_with_view_see_them() -> None:
    def rights(name: str) -> dict[str, set[str]]:
        (role,) = (m for m in of_kind(variant("defaults"), "ClusterRole") if m["metadata"]["name"].endswith(name))
        assert role["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{name}"] == "true"
        out: dict[str, set[str]] = {}
        for rule in role["rules"]:
            for resource in rule["resources"]:
                out.setdefault(resource, set()).update(rule["verbs"])
        return out

    assert {"rolescalers", "rolescalers/scale"} <= rights("view").keys()
    assert rights("view")["rolescalers/scale"] >= {"get"}
    # A scale is read before it is written, by the right that view gives; whoever has edit has view.
    for resource in ("rolescalers", "rolescalers/scale"):
        assert rights("edit")[resource] == {"update", "patch"}
    assert all(verbs <= {"get", "list", "watch"} for verbs in rights("view").values())


def test_the_check_asks_in_a_namespace_that_the_webhook_sees() -> None:
    for name, namespace in (("defaults", NAMESPACE), ("namespaced", NAMESPACE), ("several-namespaces", "team-a")):
        manifests = variant(name)
        assert only(manifests, "Pod")["spec"]["containers"][0]["args"][1] == namespace
        (role,) = (m for m in of_kind(manifests, "Role") if m["metadata"]["name"].endswith("-test"))
        assert role["metadata"]["namespace"] == namespace


@pytest.mark.parametrize("name", VARIANTS)
def test_bindings_name_roles_and_accounts_that_exist(name: str) -> None:
    manifests = variant(name)
    roles = {(m["kind"], m["metadata"]["name"]) for m in of_kind(manifests, "Role", "ClusterRole")}
    accounts = {m["metadata"]["name"] for m in of_kind(manifests, "ServiceAccount")}
    if name == "air-gapped":
        accounts.add("isthmus")
    for binding in of_kind(manifests, "RoleBinding", "ClusterRoleBinding"):
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in roles
        assert {subject["name"] for subject in binding["subjects"]} <= accounts
    assert deployment(manifests)["spec"]["template"]["spec"]["serviceAccountName"] in accounts


def test_the_lease_that_is_granted_is_the_one_that_is_taken() -> None:
    manifests = variant("defaults")
    (granted,) = [
        rule["resourceNames"]
        for role in of_kind(manifests, "Role")
        for rule in role["rules"]
        if rule["resources"] == ["leases"] and "resourceNames" in rule
    ]
    assert f"--lease-name={granted[0]}" in container(manifests)["args"]
    # Of the release, so that it goes with it; what is in it is the operator's.
    lease = only(manifests, "Lease")
    assert lease["metadata"]["name"] == granted[0]
    assert "spec" not in lease


def test_the_crd_is_that_of_the_repository_and_survives_uninstalling() -> None:
    rendered = of_kind(variant("defaults"), "CustomResourceDefinition")
    sources = [yaml.load(path.read_text(), Loader=StrictLoader) for path in sorted((ROOT / "crds").glob("*.yaml"))]
    assert len(rendered) == len(sources) >= 1
    for made, source in zip(rendered, sources, strict=True):
        assert made["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        made["metadata"].pop("labels")
        assert made == source
    assert not of_kind(variant("namespaced"), "CustomResourceDefinition")


@pytest.mark.parametrize("name", VARIANTS)
def test_the_operator_knows_its_arguments(name: str) -> None:
    main = container(variant(name))
    options = options_of(
        build_parser().parse_args(main["args"]), Identity(namespace=NAMESPACE, name="pod", kubeconfig="")
    )
    ports = {port["name"]: port["containerPort"] for port in main["ports"]}
    assert options.metrics_port == ports["metrics"]
    assert options.metrics_host == options.webhook_host == "0.0.0.0"
    assert options.webhook_port == ports.get("webhook", 0)
    assert options.webhook_cert_dir in ["", *(mount["mountPath"] for mount in main["volumeMounts"])]
    assert options.lease is not None and options.lease.namespace == NAMESPACE
    several = ("team-a", "team-b") if name == "several-namespaces" else ()
    assert options.namespaces == ((NAMESPACE,) if name.startswith("namespaced") else several)
    assert {variable["name"] for variable in main["env"]} == {"POD_NAME", "POD_NAMESPACE", "POD_IP"}


def test_images() -> None:
    def used(name: str) -> tuple[str, list[str], str]:
        manifests = variant(name)
        main = container(manifests)
        defaults = [arg for arg in main["args"] if "-image=" in arg]
        return main["image"], defaults, only(manifests, "Pod")["spec"]["containers"][0]["image"]

    assert used("defaults") == (
        "isthmus-operator:0.1.0",
        ["--engine-image=isthmus-engine:0.1.0", "--router-image=isthmus-router:0.1.0"],
        "isthmus-operator:0.1.0",
    )
    mirror = "registry.example.com:5000/isthmus"
    operator = f"{mirror}/isthmus-operator@sha256:{'0123456789abcdef' * 4}"
    assert used("air-gapped") == (
        operator,
        [f"--engine-image={mirror}/isthmus-engine:0.1.0-cuda", f"--router-image={mirror}/isthmus-router:0.1.0"],
        operator,
    )
    spec = deployment(variant("air-gapped"))["spec"]["template"]["spec"]
    assert spec["imagePullSecrets"] == [{"name": "mirror"}]


def test_probes_and_services_use_ports_that_exist() -> None:
    manifests = variant("defaults")
    main = container(manifests)
    ports = {port["name"]: port["containerPort"] for port in main["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert main[probe]["httpGet"]["port"] in ports
    (port,) = only(manifests, "Service")["spec"]["ports"]
    assert port["targetPort"] in ports
    # The health port is for the kubelet alone, and a pod's own node is always let in.
    open_ports = {rule["ports"][0]["port"] for rule in only(manifests, "NetworkPolicy")["spec"]["ingress"]}
    assert open_ports == set(ports) - {"health"}


def test_a_monitor_is_made_where_its_kind_is_known() -> None:
    known = ("monitoring.coreos.com/v1/PodMonitor",)
    assert not of_kind(render(), "PodMonitor")
    assert of_kind(render(apis=known), "PodMonitor")
    assert not of_kind(render(None, {"metrics.podMonitor": "Disabled"}, apis=known), "PodMonitor")
    monitor = only(variant("cert-manager"), "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    ports = {port["name"] for port in container(variant("cert-manager"))["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports


def test_a_disruption_budget_is_made_for_two_or_more() -> None:
    assert not of_kind(variant("defaults"), "PodDisruptionBudget")
    assert only(variant("cert-manager"), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_dashboards_are_carried_unchanged() -> None:
    maps = of_kind(variant("everything"), "ConfigMap")
    carried = {name: text for config in maps for name, text in config["data"].items()}
    assert carried == {f"isthmus-{path.name}": path.read_text() for path in (CHART / "dashboards").iterdir()}
    for config in maps:
        assert config["metadata"]["namespace"] == "monitoring"
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert config["metadata"]["annotations"] == {"grafana_folder": "Isthmus"}


def test_the_users_labels_are_added() -> None:
    manifests = variant("everything")
    assert all(manifest["metadata"]["labels"]["team"] == "serving" for manifest in manifests)
    pod = deployment(manifests)["spec"]["template"]["metadata"]["labels"]
    assert pod["example.com/pool"] == "system"


def test_rendering_twice_gives_the_same() -> None:
    """Whoever applies renderings (GitOps) sees no change where there is none."""
    assert template(None, OWN_SECRET).stdout == template(None, OWN_SECRET).stdout


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("scope", "clsuter"),
        ("watch.namespaces", ["team-a"]),
        ("watch.namespaces", "team-a"),
        ("watch.namespaces", ["Team A"]),
        ("watch.namespace", "team-a"),
        ("replicas", 2),
        ("operator.replica", 2),
        ("operator.replicas", 0),
        ("operator.replicas", "2"),
        ("operator.logLevel", "verbose"),
        ("operator.runAsUser", 0),
        ("operator.resources.claims", []),
        ("images.operator.tag", "a b"),
        ("images.operator.digest", "sha256:123"),
        ("images.pullPolicy", "Sometimes"),
        ("images.pullSecrets", [{"name": "mirror"}]),
        ("crds.install", "yes"),
        ("crds.keep", False),
        ("webhook.failurePolicy", "fail"),
        ("webhook.timeoutSeconds", 31),
        ("webhook.certificate.source", "certmanager"),
        ("webhook.certificate.source", "secret"),
        ("webhook.certificate.issuerRef", {"kind": "Issuer"}),
        ("webhook.certificate.caBundle", "-----BEGIN CERTIFICATE-----"),
        ("metrics.podMonitor", True),
        ("metrics.interval", "30"),
        ("commonLabels", {"team": 1}),
        ("commonLabels", {"app.kubernetes.io/name": "mine"}),
        ("operator.podLabels", {"app.kubernetes.io/component": "mine"}),
        ("networkPolicy.apiServerPorts", []),
        ("networkPolicy.apiServerPorts", [0]),
        ("networkPolicy.nodeCIDRs", ["10.0.0.1"]),
        ("networkPolicy.nodeCIDRs", "10.0.0.0/16"),
        ("fullnameOverride", "Upper"),
        ("fullnameOverride", "1st"),
        ("webhook", None),
        ("webhook.certificate.source", None),
        ("security", None),
        ("security.profile", None),
        ("networkPolicy.enabled", None),
    ],
)
def test_bad_values_are_refused_and_named(path: str, value: Any) -> None:
    done = template(None, {path: value})
    assert done.returncode != 0
    parts = path.split(".")
    assert any(part in done.stderr for part in (parts[-1], "/".join(parts[:-1]) or "additional")), done.stderr


def test_an_own_secret_needs_its_name_and_its_ca() -> None:
    for missing in ("secretName", "caBundle"):
        done = template(None, OWN_SECRET | {f"webhook.certificate.{missing}": ""})
        assert done.returncode != 0
        assert missing in done.stderr


@pytest.mark.parametrize("name", VARIANTS)
def test_notes_say_what_was_installed(name: str) -> None:
    done = run_helm(
        "install", "isthmus", str(CHART), "--dry-run=client", "--namespace", NAMESPACE, *flags(VARIANTS[name], {})
    )
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert f"helm test isthmus --namespace {NAMESPACE}" in notes
    assert ("of all namespaces" in notes) == ("namespace" not in name)
    assert ("of namespace team-a, team-b" in notes) == (name == "several-namespaces")
    assert ("crds.install is false" in notes) == (name in ("namespaced", "several-namespaces"))
    assert ("webhook.enabled is false" in notes) == (name == "namespaced")
    assert "<no value>" not in notes and "<nil>" not in notes


def test_nothing_renders_as_no_value() -> None:
    for values in VARIANTS.values():
        done = template(values)
        assert "<no value>" not in done.stdout and "<nil>" not in done.stdout
        assert parse(done.stdout)


def test_what_services_may_ask_for_reaches_the_operator() -> None:
    def profile(name: str, **values: Any) -> Profile:
        manifests = render(VARIANTS[name], values)
        arguments = build_parser().parse_args(container(manifests)["args"])
        return options_of(arguments, Identity(namespace=NAMESPACE, name="pod", kubeconfig="")).profile

    assert profile("defaults") == Profile()
    assert profile("defaults", **{"security.profile": "permissive"}) == Profile(restricted=False)
    assert profile("everything") == Profile(
        host_paths=("/var/lib/isthmus/models", "/mnt/models"),
        writable_host_paths=("/var/cache/isthmus", "/var/cache/tenants/{namespace}"),
        gateway_namespaces=("gateways",),
        allow=frozenset({Feature.LOAD_BALANCER, Feature.RDMA}),
    )
    allowed = json.loads((CHART / "values.schema.json").read_text())["properties"]["security"]["properties"]["allow"]
    assert set(allowed["items"]["enum"]) == {one.value for one in Feature}


@pytest.mark.parametrize(
    "path", ["/", "models", "/models/", "/models/../etc", "/models/.", "//models", "/mo dels", "/models/{x}"]
)
def test_a_folder_that_may_be_mounted_is_named_plainly(path: str) -> None:
    for value in ("security.hostPaths", "security.writableHostPaths"):
        assert template(None, {value: [path]}).returncode != 0
    assert template(None, {"security.hostPaths": ["/models/{namespace}"]}).returncode != 0
