"""The model of an InferenceService: where its weights and adapters come from, and by which names clients ask for them.
The docstring under a field is its description in the CRD."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from .choices import PullPolicy
from .fields import AbsolutePath, Block, Name, Quantity, Text


class SecretKey(Block):
    name: Name
    """Name of a Secret in the service's namespace. Pods mount it; the operator never reads it."""
    key: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
    """Key inside the Secret."""


class SecretName(Block):
    name: Name
    """Name of a Secret in the service's namespace. Pods mount it; the operator never reads it."""


class HuggingFaceSource(Block):
    repo: Annotated[str, StringConstraints(max_length=200, pattern=r"^\w[\w.-]*/\w[\w.-]*$")]
    """Hub id, owner/name."""
    revision: Annotated[str, StringConstraints(max_length=100, pattern=r"^[\w./-]+$")] = "main"
    """Branch, tag or commit. Give a commit to make restarts reproducible."""
    token_secret_ref: SecretKey | None = None
    """Access token for private models."""


class PvcSource(Block):
    claim_name: Name
    """PersistentVolumeClaim that already holds the model; mounted read-only."""
    path: Annotated[str, StringConstraints(max_length=512, pattern=r"^[^/\s][^\s]*$")] = "."
    """Folder of the model inside the volume."""


class S3Source(Block):
    uri: Annotated[str, StringConstraints(max_length=512, pattern=r"^s3://[^/\s]+/[^\s]+$")]
    """s3://bucket/prefix of the model's folder."""
    endpoint: Annotated[str, StringConstraints(max_length=256, pattern=r"^https?://[^\s]+$")] | None = None
    """URL of an S3-compatible server; absent: AWS."""
    region: Text | None = None
    """Region of the bucket."""
    credentials_secret_ref: SecretName | None = None
    """Secret with the keys accessKeyId and secretAccessKey; absent: the pod's own identity."""


class OciSource(Block):
    image: Text
    """Image or artifact whose root is the model's folder; mounted read-only by the kubelet as an image volume."""
    pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    """When the kubelet pulls it."""


class HostPathSource(Block):
    path: AbsolutePath
    """Absolute folder of the model, present on every node that may run a pod of this service."""


class ModelSource(Block):
    hugging_face: HuggingFaceSource | None = None
    """Downloaded from the Hugging Face hub into the cache before the engine starts."""
    pvc: PvcSource | None = None
    """A volume that already holds the model."""
    s3: S3Source | None = None
    """Downloaded from object storage into the cache before the engine starts."""
    oci: OciSource | None = None
    """An OCI image or artifact, mounted as an image volume (Kubernetes 1.33 or later)."""
    host_path: HostPathSource | None = None
    """A folder on the node."""


class AdapterHostPath(HostPathSource):
    sub_path: Annotated[str, StringConstraints(max_length=512, pattern=r"^[^/\s][^\s]*$")] = "."
    """Folder of the adapter below path. Adapters below one path share its mount."""


class AdapterSource(Block):
    pvc: PvcSource | None = None
    """A volume that already holds it. Adapters of one claim share its mount."""
    oci: OciSource | None = None
    """An OCI image or artifact, a mount of its own."""
    host_path: AdapterHostPath | None = None
    """A folder on the node."""


class Adapter(Block):
    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """What clients ask for as the model."""
    source: AdapterSource = Field(default_factory=AdapterSource)
    """Where it lies, in PEFT's format: exactly one kind."""


class CachePvc(Block):
    claim_name: Name
    """PersistentVolumeClaim the pods write downloads to; ReadWriteMany when pods run on several nodes."""


class CacheHostPath(Block):
    path: AbsolutePath
    """Absolute folder on the node; created if missing, shared by all pods of the node."""


class CacheEmptyDir(Block):
    size_limit: Quantity | None = None
    """Most bytes a pod may keep."""


class ModelCache(Block):
    pvc: CachePvc | None = None
    """A volume shared by the pods: one download for the service."""
    host_path: CacheHostPath | None = None
    """A folder of the node: one download per node."""
    empty_dir: CacheEmptyDir | None = None
    """Storage of the pod: one download per pod. The default."""


class Model(Block):
    source: ModelSource = Field(default_factory=ModelSource)
    """Where the weights come from: exactly one kind."""
    served_names: Annotated[tuple[Text, ...], Field(max_length=16)] = ()
    """Names clients may ask for. Default: the name of the InferenceService."""
    adapters: Annotated[tuple[Adapter, ...], Field(max_length=64)] = ()
    """Low-rank adapters (LoRA). Running engines load and unload them as this list changes; pods are replaced only for
    the first, after the last, and where an adapter needs a mount that they do not have. Files are read once: give
    changed ones another path."""
    cache: ModelCache | None = None
    """Where downloaded models are kept. Only with huggingFace and s3."""
