"""Downloads a model from S3-compatible object storage: configuration, tokenizer and safetensors only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import WeightsError
from .fetching import MODEL_FILES, TOKENIZER_FILES, Progress, in_place, no_space
from .names import MAX_FILES, NESTED, choose_files
from .provenance import Origin, record_files
from .source_bytes import SourceBytes

_TAGS = ".tags.json"
"""Of what has been downloaded, in the folder that is filled."""


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


def fetch_s3(
    uri: str, out: Path, progress: Progress, access: S3Access, *, tokenizer_only: bool = False, resume_as: str = ""
) -> None:
    """Download the folder s3://bucket/prefix into `out`, which appears whole or not at all.

    `resume_as`: see `in_place`; files that are there whole, and are what the storage has now, are not downloaded again.
    Raises WeightsError when the storage refuses, cannot be reached, has no model there, or has another meanwhile.
    """
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    prefix = prefix.rstrip("/") + "/"
    # Of AWS's own a bucket's name is that of one bucket.
    store = f"{access.endpoint} {access.region}".strip() if access.endpoint else ""
    origin = Origin(source=uri.rstrip("/"), store=store)
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
            bound = SourceBytes(uri)
            bound.watch_client(client)
            listed = _listed(client, bucket, prefix, patterns)
            sizes = {name: size for name, (size, _) in listed.items()}
            nested = {} if tokenizer_only else _nested(client, bucket, prefix)
            if not sizes:
                raise WeightsError(f"{uri} holds no model files; give the prefix under which config.json lies")
            bound.allow(sum(sizes.values()))
            known = _kept(folder, listed)
            for number, (name, size) in enumerate(sizes.items(), start=1):
                if (folder / name).exists():
                    continue
                progress(f"downloading {name} ({number} of {len(sizes)}, {size / 1e6:.1f} MB)")
                client.download_file(bucket, prefix + name, str(folder / name))
                if (found := (folder / name).stat().st_size) != size:
                    raise WeightsError(f"{uri}: {name} has {found} bytes, and is listed with {size}")
                known[name] = listed[name][1]
                (folder / _TAGS).write_text(json.dumps(known))
            if _listed(client, bucket, prefix, patterns) != listed:
                raise WeightsError(f"{uri}: files there have changed while they were downloaded; try again")
            (folder / _TAGS).unlink(missing_ok=True)
            for name, key in nested.items():
                client.download_file(bucket, key, str(folder / name))
        except (Boto3Error, BotoCoreError, ClientError) as e:
            if no_space(e):
                raise
            raise WeightsError(f"{uri}: {type(e).__name__}: {e}") from e
        except WeightsError:
            # Not to be gone on with, nor to be left in a cache that others share.
            shutil.rmtree(folder, ignore_errors=True)
            raise
        record_files(folder, origin)

    in_place(out, origin, progress, download, weights=not tokenizer_only, resume_as=resume_as)


def _kept(folder: Path, listed: Mapping[str, tuple[int, str]]) -> dict[str, str]:
    """Tags of the files that are there whole and as they are `listed`; whatever else was there is gone."""
    known = _known(folder / _TAGS)
    # boto3 names a file only when it is whole: what is there under another name is a piece of one.
    for path in folder.iterdir():
        if path.name not in listed or (path.stat().st_size, known.get(path.name)) != listed[path.name]:
            path.unlink()
    return known


def _known(file: Path) -> dict[str, str]:
    """Name -> tag of the files that an earlier try has downloaded."""
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _listed(client: Any, bucket: str, prefix: str, patterns: tuple[str, ...]) -> dict[str, tuple[int, str]]:
    """Name -> (bytes, tag of the content) of the wanted files directly in the folder."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, Delimiter="/")
    listed: dict[str, tuple[int, str]] = {}
    for page in pages:
        for item in page.get("Contents", ()):
            listed[str(item["Key"])[len(prefix) :]] = int(item["Size"]), str(item.get("ETag", ""))
        if len(listed) > MAX_FILES:
            break  # refused below; there may be no last page
    listed.pop("", None)  # the folder itself, as some tools store it
    return {name: listed[name] for name in choose_files(list(listed), patterns, source=f"s3://{bucket}/{prefix}")}


def _nested(client: Any, bucket: str, prefix: str) -> dict[str, str]:
    """Name in the model's folder -> key of the wanted files in folders below."""
    found = {}
    for there, here in NESTED.items():
        listed = client.list_objects_v2(Bucket=bucket, Prefix=prefix + there, MaxKeys=1).get("Contents", ())
        if any(item["Key"] == prefix + there for item in listed):
            found[here] = prefix + there
    return found
