"""The model inside a pod: the volume, the mount, an init container that downloads it, and the path for `--model`."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from posixpath import basename, normpath
from typing import Any

from ..api.v1alpha1 import InferenceService
from .pod import flag, literal

ROOT = "/models"
CREDENTIALS = "/etc/isthmus/model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """path: the model's folder as the container sees it; the rest are pieces of the pod spec."""

    path: str
    volumes: list[dict[str, Any]]
    mounts: list[dict[str, Any]]
    init_containers: list[dict[str, Any]]


def model_parts(service: InferenceService, *, image: str, deadline: str, tokenizer_only: bool = False) -> ModelParts:
    """Pieces for one pod. `deadline`: a download ends when its pod may no longer be starting, and is resumed by
    the pod's next try. `tokenizer_only`: the router downloads no weights."""
    source = service.spec.model.source
    if source.host_path:
        folder = f"{ROOT}/{basename(source.host_path.path)}"
        return _mounted({"hostPath": {"path": source.host_path.path, "type": "Directory"}}, mount=folder, path=folder)
    if source.pvc:
        claim = {"persistentVolumeClaim": {"claimName": source.pvc.claim_name, "readOnly": True}}
        return _mounted(claim, mount=ROOT, path=normpath(f"{ROOT}/{source.pvc.path}"))
    if source.oci:
        image_volume = {"image": {"reference": source.oci.image, "pullPolicy": source.oci.pull_policy.value}}
        folder = f"{ROOT}/{service.name}"
        return _mounted(image_volume, mount=folder, path=folder)
    return _fetched(service, image=image, deadline=deadline, tokenizer_only=tokenizer_only)


def _mounted(volume: dict[str, Any], *, mount: str, path: str) -> ModelParts:
    return ModelParts(
        path=path,
        volumes=[{"name": "model", **volume}],
        mounts=[{"name": "model", "mountPath": mount, "readOnly": True}],
        init_containers=[],
    )


def _fetched(service: InferenceService, *, image: str, deadline: str, tokenizer_only: bool) -> ModelParts:
    source = service.spec.model.source
    args = ["model", "fetch"]
    secret: dict[str, Any] | None = None
    # Engines may share the cache with routers, and take a folder that is there for a whole model.
    root = f"{ROOT}/.tokenizers" if tokenizer_only else ROOT
    if source.hugging_face:
        hub = source.hugging_face
        # The revision is part of the folder, so that a shared cache keeps several side by side.
        path = f"{root}/{hub.repo}@{_one_name(hub.revision)}"
        args += [f"hf://{hub.repo}@{hub.revision}", path]
        if hub.token_secret_ref:
            ref = hub.token_secret_ref
            secret = {"secretName": ref.name, "items": [{"key": ref.key, "path": "token"}]}
            args += ["--token-file", f"{CREDENTIALS}/token"]
    else:
        bucket = source.s3
        assert bucket is not None, "validation lets exactly one source through"
        path = f"{root}/{bucket.uri.removeprefix('s3://').rstrip('/')}"
        if bucket.endpoint:
            # Another server may have something else by that name.
            path += "@" + _digest(f"{bucket.endpoint} {bucket.region or ''}")
        args += [bucket.uri, path]
        if bucket.endpoint:
            args += ["--s3-endpoint", bucket.endpoint]
        if bucket.region:
            args += flag("s3-region", bucket.region)
        if bucket.credentials_secret_ref:
            secret = {"secretName": bucket.credentials_secret_ref.name}
            args += ["--credentials-dir", CREDENTIALS]
    args = [*literal(args), "--deadline", deadline, "--resume-as", "$(POD_NAME)"]
    if tokenizer_only:
        args.append("--tokenizer-only")
    volumes: list[dict[str, Any]] = [{"name": "model", **_cache(service)}]
    mounts: list[dict[str, Any]] = [{"name": "model", "mountPath": ROOT}]
    if secret is not None:
        volumes.append({"name": "model-credentials", "secret": secret | {"defaultMode": 0o440}})
    init = {
        "name": "model-fetch",
        "image": image,
        "command": ["isthmus-runtime"],
        "args": args,
        "volumeMounts": mounts
        + ([{"name": "model-credentials", "mountPath": CREDENTIALS, "readOnly": True}] if secret else []),
    }
    return ModelParts(
        path=path,
        volumes=volumes,
        mounts=[{**mounts[0], "readOnly": True}],
        init_containers=[init],
    )


def _one_name(revision: str) -> str:
    """For a folder."""
    return revision if "/" not in revision else f"{revision.replace('/', '_')}-{_digest(revision)}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:10]


def _cache(service: InferenceService) -> dict[str, Any]:
    cache = service.spec.model.cache
    if cache is not None and cache.pvc:
        return {"persistentVolumeClaim": {"claimName": cache.pvc.claim_name}}
    if cache is not None and cache.host_path:
        return {"hostPath": {"path": cache.host_path.path, "type": "DirectoryOrCreate"}}
    limit = cache.empty_dir.size_limit if cache is not None and cache.empty_dir else None
    return {"emptyDir": {"sizeLimit": str(limit)} if limit is not None else {}}
