"""The one key function: prefix cache, KV store and both transfer modes name block contents here.

A full block's hash is chained: ``SHA-256(parent hash, token ids, extra keys)``, so it stands for the whole prefix.
Everything that changes the bytes of a block but is not a token id (adapter, cache salt, multimodal input) is an
extra key. Every variable part is tagged and length-prefixed, so that no two different inputs encode equally.

A store key adds what changes the *representation*: the layout digest (model revision, dtype, block size, heads,
layers, layout) and the range of heads and layers held. A key stands for a content, not for its last bits: KV computed
in another batch rounds otherwise, and a store keeps the first value that is put under a key.

In the pool a service with a secret uses names of its own (`pool_name`), from which nobody else can tell the content.
"""

import hmac
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import quote

from ..request import GenerateRequest

TOKEN_BYTES = 4
_VERSION = b"isthmus-kv-2"
KV_ABI = 3
"""Raise it when bytes in a block or in the pool, or the records between engines, change meaning. Part of the layout's
digest, and so of the keys of a pool and of engines' fingerprints."""
_MAX_READABLE = 96

# Tags of the encoded parts. Values are part of every stored key: never renumber.
_TAG_SEED = b"\x01"
_TAG_LORA = b"\x02"
_TAG_SALT = b"\x03"
_TAG_MULTIMODAL = b"\x04"
_TAG_TAIL = b"\x05"
_TAG_LAYOUT = b"\x06"


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalItem:
    """One image, audio clip or video whose placeholder tokens lie at ``[offset, offset + length)`` in the prompt.

    ``identifier`` is a digest of the content, never a URL or a name.
    """

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraKeys:
    """What changes KV bytes besides token ids.

    ``lora_digest`` is of the adapter's content: its name would hit stale KV after a reload. ``cache_salt`` separates
    tenants.
    """

    lora_digest: str | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()

    def __post_init__(self) -> None:
        for number, item in enumerate(self.multimodal):
            if item.offset < 0 or item.length < 1:
                raise ValueError(
                    f"extra keys: multimodal[{number}] must have offset >= 0 and length >= 1, "
                    f"got {item.offset} and {item.length}"
                )


NO_EXTRA = ExtraKeys()


def extra_keys(request: GenerateRequest) -> ExtraKeys:
    """What of this request, besides its tokens, decides the bytes of its KV: the one place that says so."""
    adapter = request.adapter
    return ExtraKeys(lora_digest=None if adapter is None else adapter.digest, cache_salt=request.cache_salt)


def pack_tokens(token_ids: Sequence[int] | bytes) -> bytes:
    """Token ids as little-endian int32, 4 bytes each; bytes pass unchanged.

    Raises:
        ValueError: an id does not fit in a signed 32-bit integer.
    """
    if isinstance(token_ids, bytes):
        return token_ids
    try:
        packed = array("i", token_ids)
    except OverflowError as error:
        wrong = next(token for token in token_ids if not -(2**31) <= token < 2**31)
        raise ValueError(f"token id {wrong} does not fit in 32 bits") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def root_hash(extra: ExtraKeys = NO_EXTRA, seed: bytes = b"") -> bytes:
    """Parent of the first block: the seed and the request-wide extra keys, so that the chain carries them on."""
    parts = [_VERSION, _field(_TAG_SEED, seed)]
    if extra.lora_digest is not None:
        parts.append(_field(_TAG_LORA, _utf8(extra.lora_digest)))
    if extra.cache_salt is not None:
        parts.append(_field(_TAG_SALT, _utf8(extra.cache_salt)))
    return sha256(b"".join(parts)).digest()


def block_hashes(
    token_ids: Sequence[int] | bytes, block_size: int, *, extra: ExtraKeys = NO_EXTRA, seed: bytes = b""
) -> list[bytes]:
    """Chained hashes (32 bytes each) of the full blocks of a sequence; an incomplete last block has none.

    Args:
        token_ids: the whole sequence, as ids or packed by ``pack_tokens``.
        block_size: tokens per block.
        extra: what else changes the bytes.
        seed: separates deployments that must not share; the same on every process that must.
    """
    hashes: list[bytes] = []
    extend(hashes, token_ids, block_size, extra=extra, seed=seed)
    return hashes


def extend(
    hashes: list[bytes],
    token_ids: Sequence[int] | bytes,
    block_size: int,
    *,
    extra: ExtraKeys = NO_EXTRA,
    seed: bytes = b"",
) -> None:
    """Append the hashes of the blocks that a growing sequence has filled since ``hashes`` was last extended.

    Args:
        hashes: hashes of the first ``len(hashes)`` blocks of the same sequence, changed in place.
        token_ids: the whole sequence so far. Only the new blocks are read.
    """
    if block_size < 1:
        raise ValueError(f"block_size: must be at least 1, got {block_size}")
    width = TOKEN_BYTES if isinstance(token_ids, bytes) else 1
    first, stop = len(hashes), len(token_ids) // (block_size * width)
    if first >= stop:
        return
    packed = pack_tokens(token_ids[first * block_size * width : stop * block_size * width])
    step = block_size * TOKEN_BYTES
    head = step.to_bytes(8, "little")
    parent = hashes[-1] if hashes else root_hash(extra, seed)
    for index in range(first, stop):
        start = (index - first) * step
        body = parent + head + packed[start : start + step]
        if extra.multimodal:
            body += _multimodal(extra.multimodal, index * block_size, block_size)
        parent = sha256(body).digest()
        hashes.append(parent)


def tail_hash(
    parent_hash: bytes, tail_ids: Sequence[int] | bytes, *, extra: ExtraKeys = NO_EXTRA, start: int = 0
) -> bytes:
    """Hash of an incomplete last block over (parent, N, ids); never equal to a full block's.

    Args:
        parent_hash: hash of the last full block, or ``root_hash(...)`` when there is none.
        extra, start: only multimodal items matter here, and where the tail starts in the prompt.
    """
    packed = pack_tokens(tail_ids)
    body = parent_hash + _field(_TAG_TAIL, packed)
    if extra.multimodal:
        body += _multimodal(extra.multimodal, start, len(packed) // TOKEN_BYTES)
    return sha256(body).digest()


def layout_digest(
    *,
    model_revision: str,
    dtype: str,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    num_layers: int,
    layout: str,
    details: Sequence[str] = (),
) -> str:
    """Digest (32 hex digits) of all that decides how tokens become bytes; compared at the transfer handshake.

    Args:
        model_revision: digest or pinned revision of the weights, not a name that can move.
        num_kv_heads, num_layers: of the whole model, so that it does not depend on TP or PP.
        layout: ``block-major`` or ``layer-major``.
        details: one line for each further layer kind of a hybrid model (window, width, block size), and for what else
            divides a block's bytes, as ranks do in Direct mode.
    """
    numbers = (block_size, num_kv_heads, head_dim, num_layers)
    parts = [_utf8(model_revision), _utf8(dtype), _utf8(layout)]
    parts.extend(str(number).encode() for number in numbers)
    parts.extend(_utf8(detail) for detail in details)
    return sha256(_VERSION + _field(_TAG_LAYOUT, f"abi={KV_ABI}".encode(), *parts)).hexdigest()[:32]


def full_block_keys(
    layout: str,
    chain_hashes: Iterable[bytes],
    head_range: tuple[int, int],
    *,
    group: int = 0,
    layer_range: tuple[int, int] | None = None,
) -> list[str]:
    """Store keys of full blocks: shared by all requests and independent of TP.

    Args:
        layout: ``layout_digest(...)``.
        chain_hashes: from ``block_hashes``, one a block.
        head_range: half-open range of the model's KV heads that the values hold.
        group: KV cache group, for hybrid models (its layers have other bytes for the same tokens).
        layer_range: half-open range of layers, when a pipeline stage holds only some.
    """
    part = _part(head_range, group, layer_range)
    return [f"{layout}:{one.hex()}:{part}" for one in chain_hashes]


def tail_key(
    layout: str,
    parent_hash: bytes,
    n: int,
    tail_ids: Sequence[int] | bytes,
    request_id: str,
    attempt: int | str,
    head_range: tuple[int, int],
    *,
    group: int = 0,
    layer_range: tuple[int, int] | None = None,
    extra: ExtraKeys = NO_EXTRA,
    start: int = 0,
) -> str:
    """Store key of the incomplete last block with ``n`` valid tokens, scoped to one attempt of one request.

    Raises:
        ValueError: ``n`` differs from the number of tail ids, or is 0.
    """
    packed = pack_tokens(tail_ids)
    if n < 1 or n * TOKEN_BYTES != len(packed):
        raise ValueError(f"tail key: n must be the number of tail ids ({len(packed) // TOKEN_BYTES}), got {n}")
    digest = tail_hash(parent_hash, packed, extra=extra, start=start)
    part = _part(head_range, group, layer_range)
    return f"{layout}:{digest.hex()}:{part}:partial:{n}:{_name(request_id)}:{_name(str(attempt))}"


def record_key(request_id: str, attempt: int | str) -> str:
    """Store key of the record that prefill writes last for one attempt of one request."""
    return f"record:{_name(request_id)}:{_name(str(attempt))}"


def pool_secret(credential: bytes) -> bytes:
    """What a service's processes salt their names in the pool and seal their values with; empty without a credential.

    Derived, so that the credential itself is used for nothing here.
    """
    return hmac.digest(credential, b"isthmus-kv-pool", "sha256") if credential else b""


def pool_name(secret: bytes, key: str) -> str:
    """The name of `key` in the storage pool: without a `secret` the key itself, else its HMAC-SHA256 (64 hex digits).

    The master, and whoever else may join the pool, can then neither find a prompt that they guess nor compare prompts
    of two services.
    """
    return hmac.digest(secret, key.encode(), "sha256").hex() if secret else key


def _utf8(text: str) -> bytes:
    # JSON may carry lone surrogates; they must hash, and hash differently, not raise.
    return text.encode("utf-8", "surrogatepass")


def _field(tag: bytes, *parts: bytes) -> bytes:
    return tag + len(parts).to_bytes(8, "little") + b"".join(len(p).to_bytes(8, "little") + p for p in parts)


def _multimodal(items: Sequence[MultimodalItem], start: int, length: int) -> bytes:
    """Items that overlap ``[start, start + length)``, each with its own position relative to ``start``."""
    return b"".join(
        _field(
            _TAG_MULTIMODAL,
            _utf8(item.identifier),
            (item.offset - start).to_bytes(8, "little", signed=True),
            item.length.to_bytes(8, "little"),
        )
        for item in items
        if item.offset < start + length and start < item.offset + item.length
    )


def _part(head_range: tuple[int, int], group: int, layer_range: tuple[int, int] | None) -> str:
    for name, span in (("head_range", head_range), ("layer_range", layer_range)):
        if span is not None and not 0 <= span[0] < span[1]:
            raise ValueError(f"{name}: must be a half-open range [start, stop) with 0 <= start < stop, got {span}")
    layers = "all" if layer_range is None else f"{layer_range[0]}-{layer_range[1]}"
    return f"g{group}:l{layers}:h{head_range[0]}-{head_range[1]}"


def _name(text: str) -> str:
    """An injective, separator-free spelling; long names become a digest, marked by a sign that quoting never yields."""
    quoted = quote(text, safe="", errors="surrogatepass")
    return quoted if len(quoted) <= _MAX_READABLE else "=" + sha256(_utf8(text)).hexdigest()


def keys_digest(keys: Sequence[str]) -> str:
    """Hex SHA-256 over an ordered list of keys, each length-prefixed: what a transfer must have moved, in order."""
    digest = sha256()
    for key in keys:
        body = key.encode()
        digest.update(len(body).to_bytes(8, "little"))
        digest.update(body)
    return digest.hexdigest()
