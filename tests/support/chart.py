"""Renders charts/isthmus with helm, for tests."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml
from kube import missing
from testcluster import binaries, settings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "isthmus"
NAMESPACE = "isthmus-system"
RELEASE = "isthmus"
HELM_S = 120.0

Manifest = dict[str, Any]


class StrictLoader(yaml.CSafeLoader):
    """YAML without repeated keys: the API server and GitOps tools refuse them, PyYAML keeps the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = {str(key) for key in keys if keys.count(key) > 1}
        assert not repeated, f"keys {sorted(repeated)} twice at line {node.start_mark.line + 1}"
        return super().construct_mapping(node, deep=deep)


def helm() -> str:
    """Path of helm: the test cluster's, or the one on PATH. Skips the test where there is none, or fails it where
    `ISTHMUS_REQUIRE_CLUSTER` is set."""
    ours = settings.load()
    built = binaries.built_path(ours, "helm")
    found = str(built) if built.is_file() else shutil.which("helm")
    if not found:
        missing(ours, "helm is neither built nor on PATH; run 'make cluster-build', or install it")
    assert found is not None
    return found


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm without a cluster and without the user's own settings."""
    # A third of the processor's time of each call was Go's collector.
    environment = {**os.environ, "GOGC": "400", "KUBECONFIG": os.devnull, "HELM_NAMESPACE": NAMESPACE}
    return subprocess.run(
        [helm(), *arguments], capture_output=True, text=True, timeout=HELM_S, env=environment, check=False
    )


def flags(values: Path | None, overrides: dict[str, Any]) -> list[str]:
    """Options for a values file and for values by dotted path."""
    chosen = [] if values is None else ["--values", str(values)]
    return chosen + [f"--set-json={path}={json.dumps(value)}" for path, value in overrides.items()]


def template(
    values: Path | None = None,
    overrides: dict[str, Any] | None = None,
    *,
    release: str = RELEASE,
    namespace: str = NAMESPACE,
    apis: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """`helm template`; `apis`: kinds the cluster is said to know, `group/version/Kind`."""
    known = [f"--api-versions={api}" for api in apis]
    return run_helm("template", release, str(CHART), "--namespace", namespace, *flags(values, overrides or {}), *known)


def parse(text: str) -> list[Manifest]:
    """All objects of a rendering."""
    return [document for document in yaml.load_all(text, Loader=StrictLoader) if document is not None]


def render(
    values: Path | None = None,
    overrides: dict[str, Any] | None = None,
    *,
    release: str = RELEASE,
    namespace: str = NAMESPACE,
    apis: tuple[str, ...] = (),
) -> list[Manifest]:
    """Objects of `helm template`, which must succeed."""
    done = template(values, overrides, release=release, namespace=namespace, apis=apis)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    """Those of some kinds."""
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def only(manifests: list[Manifest], kind: str) -> Manifest:
    """The one object of a kind."""
    found = of_kind(manifests, kind)
    assert len(found) == 1, [manifest["metadata"]["name"] for manifest in found]
    return found[0]


def violations_of_restricted(pod: Manifest) -> list[str]:
    """What Pod Security "restricted" would refuse in a pod's spec, and a root file system that can be written to.

    Source: the table "Restricted" of the Pod Security Standards.
    """
    out = [f"{name} is set" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    shared = pod.get("securityContext", {})
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"}
    allowed |= {"secret"}
    for volume in pod.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds <= allowed:
            out.append(f"volume {volume['name']} is a {', '.join(sorted(kinds))}")
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own = container.get("securityContext", {})
        effective = {**shared, **own}
        demands = {
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "privileged": not own.get("privileged"),
            "runAsNonRoot": effective.get("runAsNonRoot") is True,
            "runAsUser": effective.get("runAsUser") != 0,
            "seccompProfile": effective.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "capabilities.drop": own.get("capabilities", {}).get("drop") == ["ALL"],
            "capabilities.add": set(own.get("capabilities", {}).get("add", [])) <= {"NET_BIND_SERVICE"},
            "hostPort": not any(port.get("hostPort") for port in container.get("ports", [])),
            "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,
        }
        out += [f"container {container['name']}: {name}" for name, kept in demands.items() if not kept]
    return out
