"""`isthmus up FILE`: from a file to running processes."""

from __future__ import annotations

import asyncio
import copy
import errno
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..api.rules import without_effect
from ..api.v1alpha1 import InferenceService, parse
from ..errors import LaunchError, UserError
from ..files import Documents
from ..render import adapters
from ..render.names import ROUTER_PORT, Component, Defaults
from ..render.revision import pairing
from ..render.service import render
from ..settings import cache_dir, inherited_environment
from .addresses import Addresses
from .console import Console
from .issuer import LocalIssuer
from .pods import Pod, translate
from .supervisor import Launch, Supervisor

_RUNTIME = "isthmus-runtime"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+(@[\w./-]+)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Flags of `isthmus up`."""

    model: str = ""
    port: int = ROUTER_PORT
    run_dir: str = ""
    quiet: bool = False
    namespace: str = "default"


def up(documents: Documents, options: Options, out: TextIO) -> int:
    """Runs until stopped; the exit code. UserError before anything is started, LaunchError after."""
    console = Console(out, quiet=options.quiet)
    manifest = with_local_model(documents.service, options.model, cache_dir() / "models", console)
    service = parse(manifest, namespace=options.namespace)
    for warning in without_effect(service.spec):
        console.say(f"warning: {warning}")
    issuer = LocalIssuer()
    manifests = render(service, Defaults(issuer=issuer.public))
    if service.spec.router.replicas > 1:
        if "replicas" in service.spec.router.model_fields_set:
            console.say(f"router: 1 of {service.spec.router.replicas} replicas, as they would share one port here")
        _router_deployment(manifests)["spec"]["replicas"] = 1
    run_dir = Path(options.run_dir or tempfile.mkdtemp(prefix=f"isthmus-{service.name}-")).resolve()
    pods = translate(
        manifests,
        run_dir=str(run_dir),
        take_address=Addresses().take,
        ports={Component.ROUTER.value: options.port},
        objects={**documents.objects, **made_objects(service, manifests)},
    )
    _check(pods, service)
    run_dir.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{options.port}"
    console.say(f"run folder: {run_dir}")
    launch = Launch(
        name=service.name,
        namespace=service.namespace,
        url=url,
        pods=pods,
        run_dir=run_dir,
        environment=inherited_environment(),
        find_program=find_program,
        announce=lambda: console.say(ready_text(service, url)),
        console=console,
        issuer=issuer,
    )

    async def main() -> int:
        return await Supervisor(launch).run()

    try:
        return asyncio.run(main())
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        # A write names no file.
        raise LaunchError(f"run folder {run_dir}: {error.strerror}; --run-dir names another") from error


def made_objects(service: InferenceService, manifests: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """ConfigMaps of the service by (kind, name). Nothing is mounted here, so its adapters are listed where they are."""
    made = [manifest for manifest in manifests if manifest["kind"] == "ConfigMap"]
    if service.spec.model.adapters:
        made.append(adapters.config_map(service, pairing(service), mounted=False))
    return {("ConfigMap", one["metadata"]["name"]): one for one in made}


def find_program(name: str) -> str | None:
    """A program of this environment, or else of PATH."""
    if "/" in name:
        return name if Path(name).exists() else None
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def ready_text(service: InferenceService, url: str) -> str:
    """What to do next, for the terminal."""
    body = json.dumps(
        {
            "model": service.served_names[0],
            "messages": [{"role": "user", "content": "What is an isthmus?"}],
            "max_tokens": 64,
        }
    )
    key = ' -H "Authorization: Bearer $KEY"' if service.spec.router.auth else ""
    return (
        f"\n{service.name} is ready: {url}/v1\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n    -d '{body}'\n\n"
        "Ctrl-C stops everything.\n"
    )


def with_local_model(manifest: dict[str, Any], model: str, models: Path, console: Console) -> dict[str, Any]:
    """The manifest with a model source that works on this machine; the rest is left for `parse` to judge."""
    out = copy.deepcopy(manifest)
    spec = out.get("spec")
    block = spec.get("model") if isinstance(spec, dict) else None
    if isinstance(spec, dict) and model:
        block = block if isinstance(block, dict) else {}
        chosen = _source(model, models, console)
        spec["model"] = {**{k: v for k, v in block.items() if k != "cache"}, "source": chosen}
        block = spec["model"]
    source = block.get("source") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(source, dict):
        return out
    if isinstance(source.get("hostPath"), dict) and isinstance(source["hostPath"].get("path"), str):
        source["hostPath"]["path"] = _folder(source["hostPath"]["path"], models, console)
    elif ("huggingFace" in source or "s3" in source) and not _keeps_downloads(block):
        # A cache of the pod would be downloaded again by every pod and every run.
        block["cache"] = {"hostPath": {"path": str(models)}}
    return out


def _keeps_downloads(block: dict[str, Any]) -> bool:
    return isinstance(block.get("cache"), dict) and "hostPath" in block["cache"]


def _source(model: str, models: Path, console: Console) -> dict[str, Any]:
    path = Path(model).expanduser()
    if path.is_file():
        return {"hostPath": {"path": str(_imported(path, models, console))}}
    if path.exists():
        return {"hostPath": {"path": str(path.resolve())}}
    if _HUB_ID.match(model) and not model.startswith(("/", ".", "~")):
        repo, _, revision = model.partition("@")
        return {"huggingFace": {"repo": repo, **({"revision": revision} if revision else {})}}
    raise UserError(
        f"--model {model!r} is neither a folder or GGUF file of this machine nor a hub id such as Qwen/Qwen3-0.6B"
    )


def _imported(path: Path, models: Path, console: Console) -> Path:
    """The folder among the models of this machine that a GGUF file is imported to, by its name and what it holds, as
    another of that name may be served from here. An import that is there is kept."""
    program = find_program(_RUNTIME)
    if path.suffix.lower() != ".gguf":
        raise UserError(f"--model {path} is a file; give a folder with config.json and safetensors, or a GGUF file")
    if program is None:
        raise UserError(
            f"--model {path}: {_RUNTIME}, which imports GGUF files, is neither beside {sys.executable} nor on PATH;"
            f" where it is installed run `{_RUNTIME} model import {path} --under {models}`, and give the folder that it"
            " prints"
        )
    console.say(f"model: importing {path.name} to {models}")
    arguments = [program, "model", "import", str(path), "--under", str(models)]
    done = subprocess.run(arguments, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise UserError(f"--model {path} could not be imported; its problems are above")
    out = Path(done.stdout.removesuffix("\n"))
    if not out.is_dir():
        raise UserError(f"--model {path}: {program} names no folder that it was imported to; is it of another version?")
    return out.resolve()


def _folder(path: str, models: Path, console: Console) -> str:
    """The folder itself if it is there, or else one of the same name among the models of this machine."""
    wanted = Path(path).expanduser()
    local = models / wanted.name
    if wanted.exists() or not local.exists():
        return str(wanted)
    console.say(f"model: {wanted} is not on this machine; using {local}")
    return str(local)


def _router_deployment(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    component = "app.kubernetes.io/component"
    return next(
        m
        for m in manifests
        if m["kind"] == "Deployment" and m["metadata"]["labels"].get(component) == Component.ROUTER.value
    )


def _check(pods: list[Pod], service: InferenceService) -> None:
    of_adapters = [one.source.host_path.path for one in service.spec.model.adapters if one.source.host_path]
    for pod in pods:
        for path in pod.needs:
            if not Path(path).exists() and path in of_adapters:
                raise UserError(f"spec.model.adapters: {path} is not on this machine; name one that is, or remove it")
            if not Path(path).exists():
                raise UserError(
                    f"spec.model.source.hostPath.path: {path} is not on this machine; give the model with"
                    " --model PATH-or-HUB-ID, or run `make model` for the model of the examples"
                )
        for container in (*pod.init, *pod.containers):
            if find_program(container.argv[0]) is None:
                raise UserError(
                    f"{pod.name}: the program {container.argv[0]} is neither beside {sys.executable} nor on PATH;"
                    " install the runtime into the same environment (make venv)"
                )
