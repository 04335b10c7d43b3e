"""Pure: rendered manifests to the processes that stand for their pods.

What a cluster would add is worked out here: pod addresses, Service names, mounts, environment references.
Nothing is opened or started, and nothing here knows what an engine is.
"""

from __future__ import annotations

import base64
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..render.names import ROLE_LABEL, Component

START_FIRST = (Component.STORE.value,)
"""Roles that must be ready before others start: clients of a dead Mooncake master wait a minute before they fail."""

STOP_ORDER = (Component.ROUTER.value, "", Component.STORE.value)
"""First who takes new work, last what the others depend on; the empty entry stands for all other roles."""

_PORTS = ("http", "metrics")

_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
"""Of a ConfigMap or Secret, as API servers take them."""

Objects = Mapping[tuple[str, str], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One probe. Exactly one of path (HTTP GET), command (exec) or neither (TCP connect) says how."""

    port: int = 0
    path: str = ""
    command: tuple[str, ...] = ()
    period_s: float = 10.0
    timeout_s: float = 1.0
    initial_delay_s: float = 0.0
    failure_threshold: int = 3

    def __str__(self) -> str:
        if self.command:
            return f"exec {self.command[0]}"
        return f"GET {self.path}" if self.path else f"connect to port {self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """argv and env are final: names resolved, mounts replaced by folders of this machine."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    ports: dict[str, int]
    startup: Probe | None = None
    readiness: Probe | None = None
    liveness: Probe | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A token of a ServiceAccount of `namespace`, for `audience` and valid for `valid_s`, to be written to `path`."""

    path: str
    audience: str
    namespace: str
    valid_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """files: path -> content, written before the pod starts; tokens: the same, but renewed while it runs; folders: made
    before it starts; needs: must exist."""

    name: str
    role: str
    address: str
    init: tuple[Container, ...]
    containers: tuple[Container, ...]
    restart: bool
    grace_s: float
    files: dict[str, bytes]
    folders: tuple[str, ...]
    needs: tuple[str, ...]
    tokens: tuple[TokenFile, ...] = ()


@dataclass(frozen=True, slots=True)
class _Draft:
    """A pod before its addresses are filled in."""

    name: str
    role: str
    labels: dict[str, str]
    namespace: str
    spec: dict[str, Any]
    ports: dict[str, int]
    address: str


def translate(
    manifests: Sequence[dict[str, Any]],
    *,
    run_dir: str,
    take_address: Callable[[str, str, Sequence[int]], str],
    ports: Mapping[str, int],
    objects: Objects,
) -> list[Pod]:
    """Pods to run, in the order of the manifests.

    take_address(pod name, role, ports) gives each pod an address on which those ports are free.
    ports: role -> the port its `http` container port moves to, and its `metrics` as well: on an address that is not its
    own, a role has one port.
    objects: ConfigMaps and Secrets by (kind, name). UserError names what cannot be run on one machine.
    """
    drafts = [draft for manifest in manifests for draft in _drafts(manifest, ports, take_address)]
    services = [m for m in manifests if m["kind"] == "Service"]
    names = _service_names(services, drafts)
    return [_pod(draft, run_dir, names(draft.namespace), ports.get(draft.role), objects) for draft in drafts]


def _drafts(
    manifest: dict[str, Any], ports: Mapping[str, int], take_address: Callable[[str, str, Sequence[int]], str]
) -> list[_Draft]:
    if manifest["kind"] not in ("Deployment", "StatefulSet"):
        return []
    template = manifest["spec"]["template"]
    labels = template["metadata"]["labels"]
    role = labels.get(ROLE_LABEL, manifest["metadata"]["name"])
    drafts = []
    for index in range(manifest["spec"].get("replicas", 1)):
        name = f"{role}-{index}"
        declared = [p for c in template["spec"]["containers"] for p in c.get("ports", [])]
        numbers = {
            p["name"]: ports[role] if p["name"] in _PORTS and role in ports else p["containerPort"] for p in declared
        }
        namespace = manifest["metadata"]["namespace"]
        address = take_address(name, role, list(numbers.values()))
        drafts.append(_Draft(name, role, labels, namespace, template["spec"], numbers, address))
    return drafts


_SERVICE_NAME = re.compile(
    r"(?<![\w.-])([a-z][a-z0-9-]*)(?:\.([a-z0-9-]+)(?:\.svc(?:\.cluster\.local)?)?)?:(\d+)(?!\w)"
)


def _service_names(
    services: Sequence[dict[str, Any]], drafts: Sequence[_Draft]
) -> Callable[[str], Callable[[str], str]]:
    """By namespace, replaces `name:port` and `name.namespace:port` (or with `.svc`) by the addresses of the pods
    behind: all for a headless Service, one otherwise, as DNS would."""
    table: dict[tuple[str, str, int], str] = {}
    for service in services:
        meta, spec = service["metadata"], service["spec"]
        behind = [
            d for d in drafts if spec["selector"].items() <= d.labels.items() and d.namespace == meta["namespace"]
        ]
        if spec.get("clusterIP") != "None":
            behind = behind[:1]
        for port in spec["ports"]:
            target = port.get("targetPort", port["port"])
            found = [f"{d.address}:{d.ports[target] if isinstance(target, str) else target}" for d in behind]
            table[meta["name"], meta["namespace"], port["port"]] = ",".join(found)

    def of(namespace: str) -> Callable[[str], str]:
        return lambda text: _SERVICE_NAME.sub(lambda m: table.get((m[1], m[2] or namespace, int(m[3])), m[0]), text)

    return of


_VARIABLE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


def _pod(draft: _Draft, run_dir: str, replace: Callable[[str], str], http_port: int | None, objects: Objects) -> Pod:
    volumes = {v["name"]: v for v in draft.spec.get("volumes", [])}
    root = f"{run_dir}/pods/{draft.name}"
    files: dict[str, bytes] = {}
    folders: list[str] = []
    needs: list[str] = []
    places: dict[str, str] = {}
    tokens: list[TokenFile] = []
    for name, volume in volumes.items():
        if "projected" in volume:
            places[name] = f"{root}/volumes/{name}"
            folders.append(places[name])
            tokens += _project(draft, volume["projected"]["sources"], places[name], objects, files)
        else:
            places[name] = _place(draft.name, name, volume, root, objects, files, folders, needs)

    def container(raw: dict[str, Any]) -> Container:
        mounts = {
            m["mountPath"]: posixpath.join(places[m["name"]], m.get("subPath", "")).rstrip("/")
            for m in raw.get("volumeMounts", [])
        }
        env = _environment(draft, raw, objects)

        def final(text: str) -> str:
            text = _VARIABLE.sub(lambda m: "$" if m[0] == "$$" else env.get(m[1], m[0]), text)
            text = _mounted(replace(text), mounts)
            return re.sub(r"(^|=)0\.0\.0\.0$", rf"\g<1>{draft.address}", text)

        argv = [final(part) for part in (*raw.get("command", []), *raw.get("args", []))]
        if not argv or not raw.get("command"):
            raise UserError(
                f"{draft.name}: container {raw['name']} has no command, and `isthmus up` cannot"
                " run an image; give the container a command"
            )
        if http_port is not None and "--port" in argv:
            argv[argv.index("--port") + 1] = str(http_port)
            if "--metrics-port" in argv:
                argv[argv.index("--metrics-port") + 1] = "0"
        numbers = {p["name"]: draft.ports.get(p["name"], p["containerPort"]) for p in raw.get("ports", [])}
        return Container(
            name=raw["name"],
            argv=tuple(argv),
            env={key: final(value) for key, value in env.items()},
            ports=numbers,
            startup=_probe(raw.get("startupProbe"), numbers),
            readiness=_probe(raw.get("readinessProbe"), numbers),
            liveness=_probe(raw.get("livenessProbe"), numbers),
        )

    return Pod(
        name=draft.name,
        role=draft.role,
        address=draft.address,
        init=tuple(container(raw) for raw in draft.spec.get("initContainers", [])),
        containers=tuple(container(raw) for raw in draft.spec["containers"]),
        restart=draft.spec.get("restartPolicy", "Always") == "Always",
        grace_s=float(draft.spec.get("terminationGracePeriodSeconds", 30)),
        files=files,
        folders=tuple(folders),
        needs=tuple(needs),
        tokens=tuple(tokens),
    )


def _project(
    draft: _Draft, sources: Sequence[dict[str, Any]], folder: str, objects: Objects, files: dict[str, bytes]
) -> list[TokenFile]:
    """The tokens of a projected volume; adds its other files."""
    tokens = []
    for source in sources:
        if "serviceAccountToken" in source:
            raw = source["serviceAccountToken"]
            tokens.append(
                TokenFile(
                    path=_below(draft.name, folder, raw["path"]),
                    audience=raw.get("audience", ""),
                    namespace=draft.namespace,
                    valid_s=float(raw.get("expirationSeconds", 3600)),
                )
            )
        for key, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
            if key not in source or (source[key].get("optional") and (kind, source[key]["name"]) not in objects):
                continue
            content = _content(draft.name, kind, source[key]["name"], objects)
            items = source[key].get("items") or [{"key": k, "path": k} for k in content]
            there = [item for item in items if item["key"] in content]
            files.update({_below(draft.name, folder, item["path"]): content[item["key"]] for item in there})
    return tokens


def _place(
    pod: str,
    name: str,
    volume: dict[str, Any],
    root: str,
    objects: Objects,
    files: dict[str, bytes],
    folders: list[str],
    needs: list[str],
) -> str:
    """The folder of this machine that stands for a volume; notes what must be made or be there first."""
    folder = _below(pod, f"{root}/volumes", name)
    if "hostPath" in volume:
        path = str(volume["hostPath"]["path"])
        (folders if volume["hostPath"].get("type") == "DirectoryOrCreate" else needs).append(path)
        return path
    if "emptyDir" in volume:
        folders.append(folder)
        return folder
    for kind, key, name_key in (("Secret", "secret", "secretName"), ("ConfigMap", "configMap", "name")):
        if key in volume:
            folders.append(folder)
            content = _content(pod, kind, volume[key][name_key], objects)
            items = volume[key].get("items") or [{"key": k, "path": k} for k in content]
            for item in items:
                if item["key"] not in content:
                    name = volume[key][name_key]
                    raise UserError(f"{pod}: {kind} {name} has no key {item['key']}; add it to its data")
                files[_below(pod, folder, item["path"])] = content[item["key"]]
            return folder
    kind = next(key for key in volume if key != "name")
    raise UserError(
        f"{pod}: volume {name} is a {kind}, which this machine does not have;"
        " give the model with --model PATH-or-HUB-ID"
    )


def _below(pod: str, folder: str, path: str) -> str:
    """`path` in `folder`. UserError for one that leads out of it, which API servers refuse, too."""
    if path.startswith("/") or not path or ".." in path.split("/") or path.rsplit("/", maxsplit=1)[-1] in ("", "."):
        raise UserError(f"{pod}: the path {path[:64]!r} of a volume leads out of it; give one below")
    return f"{folder}/{path}"


def _content(pod: str, kind: str, name: str, objects: Objects) -> dict[str, bytes]:
    found = objects.get((kind, name))
    if found is None:
        raise UserError(f"{pod}: {kind} {name} is not in the file; add it as a further document, separated by ---")
    plain = {k: str(v).encode() for k, v in (found.get("stringData" if kind == "Secret" else "data") or {}).items()}
    coded = found.get("data" if kind == "Secret" else "binaryData") or {}
    for key in (*plain, *coded):
        if not _KEY.fullmatch(key) or key in (".", ".."):
            raise UserError(
                f"{pod}: {kind} {name} has the key {key[:64]!r}; keys are file names of letters, digits, '-', '_', '.'"
            )
    try:
        return {k: base64.b64decode(v, validate=True) for k, v in coded.items()} | plain
    except (ValueError, TypeError):
        raise UserError(f"{pod}: {kind} {name} has values that are not base64; write texts as stringData") from None


def _variable(pod: str, kind: str, reference: dict[str, Any], content: dict[str, bytes], key: str) -> str:
    """The text of a key; UserError where there is none, or it is no text."""
    name = reference["name"]
    if key not in content:
        raise UserError(f"{pod}: {kind} {name} has no key {key!r}; it has {', '.join(sorted(content)) or 'none'}")
    try:
        return content[key].decode()
    except UnicodeDecodeError:
        raise UserError(f"{pod}: the key {key!r} of {kind} {name} is not UTF-8, as variables are") from None


def _environment(draft: _Draft, raw: dict[str, Any], objects: Objects) -> dict[str, str]:
    env: dict[str, str] = {}
    for source in raw.get("envFrom", []):
        for key, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
            if key in source:
                content = _content(draft.name, kind, source[key]["name"], objects)
                for k in content:
                    env[source.get("prefix", "") + k] = _variable(draft.name, kind, source[key], content, k)
    for entry in raw.get("env", []):
        if "valueFrom" not in entry:
            env[entry["name"]] = str(entry.get("value", ""))
            continue
        reference = entry["valueFrom"]
        if "fieldRef" in reference:
            env[entry["name"]] = _field(draft, reference["fieldRef"]["fieldPath"])
            continue
        for key, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
            if key in reference:
                one = reference[key]
                content = _content(draft.name, kind, one["name"], objects)
                env[entry["name"]] = _variable(draft.name, kind, one, content, one["key"])
    return env


def _field(draft: _Draft, path: str) -> str:
    known = {
        "status.podIP": draft.address,
        "status.hostIP": "127.0.0.1",
        "metadata.name": draft.name,
        "metadata.namespace": draft.namespace,
        "spec.nodeName": "localhost",
    } | {f"metadata.labels['{key}']": value for key, value in draft.labels.items()}
    if path not in known:
        raise UserError(f"{draft.name}: the field {path} has no meaning here; allowed: {', '.join(known)}")
    return known[path]


def _mounted(text: str, mounts: Mapping[str, str]) -> str:
    """A path below a mount becomes a path of this machine. Longest mount first; once, so that the result is final."""
    for mount in sorted(mounts, key=len, reverse=True):
        match = re.search(rf"(?:^|(?<==)){re.escape(mount)}(?=/|$)", text)
        if match:
            return text[: match.start()] + mounts[mount] + text[match.end() :]
    return text


def _probe(raw: dict[str, Any] | None, ports: Mapping[str, int]) -> Probe | None:
    if raw is None:
        return None
    how = raw.get("httpGet") or raw.get("tcpSocket") or {}
    port = how.get("port", 0)
    return Probe(
        port=ports[port] if isinstance(port, str) else port,
        path=raw["httpGet"].get("path", "/") if "httpGet" in raw else "",
        command=tuple(raw["exec"]["command"]) if "exec" in raw else (),
        period_s=float(raw.get("periodSeconds", 10)),
        timeout_s=float(raw.get("timeoutSeconds", 1)),
        initial_delay_s=float(raw.get("initialDelaySeconds", 0)),
        failure_threshold=int(raw.get("failureThreshold", 3)),
    )
