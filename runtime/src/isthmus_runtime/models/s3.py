"""Downloads a model from S3-compatible object storage: configuration, tokenizer and safetensors only."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import WeightsError
from .fetching import MODEL_FILES, TOKENIZER_FILES, Progress, in_place


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Access:
    """endpoint: of a server other than AWS; region: of the bucket; keys: empty for the pod's own identity."""

    endpoint: str = ""
    region: str = ""
    access_key_id: str = ""
    secret_access_key: str = ""


def read_credentials(folder: Path, *, endpoint: str = "", region: str = "") -> S3Access:
    """Keys from the files accessKeyId and secretAccessKey of a mounted Secret. WeightsError names a missing one."""
    values = {}
    for name in ("accessKeyId", "secretAccessKey"):
        try:
            values[name] = (folder / name).read_text().strip()
        except OSError as e:
            raise WeightsError(f"{folder / name}: {e.strerror}; the Secret must have the key {name}") from e
    return S3Access(
        endpoint=endpoint,
        region=region,
        access_key_id=values["accessKeyId"],
        secret_access_key=values["secretAccessKey"],
    )


def fetch_s3(uri: str, out: Path, progress: Progress, access: S3Access, *, tokenizer_only: bool = False) -> None:
    """Download the folder s3://bucket/prefix into `out`, which appears whole or not at all.

    Raises WeightsError when boto3 is not installed, or the storage refuses, cannot be reached, or has no model there.
    """
    try:
        import boto3
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as e:
        raise WeightsError("s3:// needs boto3; install isthmus-runtime[s3]") from e

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    prefix = prefix.rstrip("/") + "/"
    patterns = TOKENIZER_FILES if tokenizer_only else MODEL_FILES

    def download(folder: Path) -> None:
        try:
            client = boto3.client(
                "s3",
                endpoint_url=access.endpoint or None,
                region_name=access.region or None,
                aws_access_key_id=access.access_key_id or None,
                aws_secret_access_key=access.secret_access_key or None,
            )
            names = _names(client, bucket, prefix, patterns)
            if not names:
                raise WeightsError(f"{uri} holds no model files; give the folder of config.json as the prefix")
            for number, name in enumerate(names, start=1):
                progress(f"downloading {name} ({number} of {len(names)})")
                client.download_file(bucket, prefix + name, str(folder / name))
        except (Boto3Error, BotoCoreError, ClientError) as e:
            raise WeightsError(f"{uri}: {type(e).__name__}: {e}") from e

    in_place(out, progress, download, weights=not tokenizer_only)


def _names(client: Any, bucket: str, prefix: str, patterns: tuple[str, ...]) -> list[str]:
    """Files directly in the folder that are wanted. Names with a path in them are left out, so none leaves it."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, Delimiter="/")
    names = [str(item["Key"])[len(prefix) :] for page in pages for item in page.get("Contents", ())]
    plain = [name for name in names if name and PurePosixPath(name).name == name]
    return sorted(name for name in plain if any(fnmatch.fnmatch(name, pattern) for pattern in patterns))
