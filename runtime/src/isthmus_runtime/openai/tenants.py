"""Who a client is by its key, and what it may ask for. Pure, but for the one read of the file.

Every key belongs to a tenant: a name, and limits that all its keys share. Tenants have prefix caches of their own, so
that none can find out by timing what another one asked.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from ..errors import ConfigError, InvalidRequest, Overloaded
from .batches import Batch
from .job import Job

MAX_TENANTS = 1000
"""Each is a label of some metrics."""
_MAX_FILE = 1 << 20
_Work = TypeVar("_Work", Job, Batch)
_Key = Annotated[str, StringConstraints(min_length=16, max_length=512, pattern=r"^[!-~]+$")]


class Tenant(BaseModel):
    """One entry of the tenants' file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=to_camel)

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
    """Shown in metrics and logs, where keys are not."""
    keys: Annotated[list[_Key], Field(min_length=1, max_length=32)]
    """Several, so that one can be replaced without a gap."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """The most urgent `priority` its requests may have: lower ones, which would run earlier, are raised to it."""
    requests_per_second: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    burst: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Requests at once after a pause; by default those of one second."""
    concurrency: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Generations in flight: a request with n = 4 and two prompts has eight."""
    hide_cached_tokens: bool = False
    """`cached_tokens` of its answers is 0."""

    def salt(self, given: str) -> str:
        """The cache salt of a request that came with `given`: no two tenants ever have the same."""
        return hashlib.sha256(f"isthmus tenant\0{self.name}\0{given}".encode()).hexdigest()

    def own(self, job: _Work) -> _Work:
        """`job` with what this tenant may ask for."""
        requests = (
            replace(r, priority=max(r.priority, self.priority), cache_salt=self.salt(r.cache_salt))
            for r in job.requests
        )
        return replace(job, requests=tuple(requests), show_cached=not self.hide_cached_tokens)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tenants: Annotated[list[Tenant], Field(min_length=1, max_length=MAX_TENANTS)]

    @model_validator(mode="after")
    def _check(self) -> _File:
        seen: dict[str, str] = {}
        for tenant in self.tenants:
            for key in tenant.keys:
                if key in seen:
                    raise ValueError(f"a key of {tenant.name} is one of {seen[key]} too; each may stand once")
                seen[key] = tenant.name
        names = [tenant.name for tenant in self.tenants]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)}: stands twice; put all keys of a tenant into one entry")
        return self


def parse_tenants(text: str, where: str) -> Mapping[bytes, Tenant]:
    """Tenants by the digest of each of their keys. ConfigError lists every problem, and repeats no key."""
    try:
        file = _File.model_validate_json(text)
    except ValidationError as e:
        found = e.errors(include_url=False, include_input=False, include_context=False)
        raise ConfigError(
            [
                f"{where}: {'.'.join(map(str, p['loc'])) or 'the file'}: {p['msg'].removeprefix('Value error, ')}"
                for p in found
            ]
        ) from None
    return {_digest(key.encode()): tenant for tenant in file.tenants for key in tenant.keys}


def _digest(key: bytes) -> bytes:
    # What a lookup's time tells about a digest says nothing about the key.
    return hashlib.sha256(key).digest()


class TokenBucket:
    """At most `burst` at once, and `rate` a second in the long run."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._at = now

    def take(self, now: float) -> float:
        """0 when there was one to take, else in how many seconds there will be. A clock that
        goes back fills nothing."""
        self._level = min(self.burst, self._level + max(0.0, now - self._at) * self.rate)
        self._at = max(self._at, now)
        if self._level < 1.0 - 1e-9:
            return (1.0 - self._level) / self.rate
        self._level -= 1.0
        return 0.0


class _Use:
    """What a tenant uses; outlives a new file."""

    def __init__(self) -> None:
        self.generations = 0
        self.bucket: TokenBucket | None = None


class Tenants:
    """Whom the keys belong to, and what each tenant uses now. `now`: monotonic seconds."""

    def __init__(self, by_key: Mapping[bytes, Tenant]) -> None:
        self._by_key = by_key
        self._use: dict[str, _Use] = {}

    def replace(self, by_key: Mapping[bytes, Tenant]) -> None:
        """A new file. Requests that run go on, and count on."""
        self._by_key = by_key
        there = {tenant.name for tenant in by_key.values()}
        self._use = {name: use for name, use in self._use.items() if name in there or use.generations}

    def of_key(self, key: bytes) -> Tenant | None:
        """The tenant whose key it is."""
        return self._by_key.get(_digest(key))

    def admit(self, tenant: Tenant, now: float) -> None:
        """Count a request, before its body is read. Raises Overloaded (429) above the tenant's rate."""
        rate = tenant.requests_per_second
        if rate is None:
            return
        burst = float(tenant.burst or max(1, math.ceil(rate)))
        use = self._of(tenant)
        if use.bucket is None or (use.bucket.rate, use.bucket.burst) != (rate, burst):
            use.bucket = TokenBucket(rate, burst, now)
        wait = use.bucket.take(now)
        if wait:
            raise Overloaded(
                f"{tenant.name} may send {rate:g} requests a second, {burst:g} at once; try again in {wait:.3g} s",
                status=429,
                retry_after_s=wait,
            )

    @contextmanager
    def running(self, tenant: Tenant, generations: int) -> Iterator[None]:
        """A block in which so many generations of the tenant run. Raises Overloaded (429) when those of others leave
        no room for all of them, InvalidRequest when there never is."""
        most, use = tenant.concurrency, self._of(tenant)
        if most is not None and generations > most:
            raise InvalidRequest(
                f"n: {generations} generations in one request, but {tenant.name} may have {most} in flight; send fewer",
                param="n",
            )
        if most is not None and use.generations + generations > most:
            raise Overloaded(
                f"{tenant.name} has {use.generations} generations in flight and may have {most}", status=429
            )
        use.generations += generations
        try:
            yield
        finally:
            use.generations -= generations

    def _of(self, tenant: Tenant) -> _Use:
        return self._use.setdefault(tenant.name, _Use())


def read_tenants(path: Path) -> Mapping[bytes, Tenant]:
    """The tenants of a file. ConfigError names it and every problem."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_FILE + 1)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--tenants-file {path}: {e}") from e
    if len(text) > _MAX_FILE:
        raise ConfigError(f"--tenants-file {path} has more than {_MAX_FILE} characters; no list of tenants has")
    return parse_tenants(text, f"--tenants-file {path}")
