"""Follows one engine's prefix-cache events."""

from __future__ import annotations

import logging

import aiohttp
from pydantic import ValidationError

from ..credentials import Credentials
from ..protocol.info import KvEvents
from .prefixes import EventGap, StoredBlocks

_log = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 2.0
_MAX_LINE = 1 << 20


async def follow(
    session: aiohttp.ClientSession, url: str, blocks: StoredBlocks, credentials: Credentials | None = None
) -> bool:
    """Keep `blocks` up to date until the connection or the sequence breaks; the caller may follow again then.

    Returns whether the engine has events at all. Nothing is known of the engine when this returns or is cancelled.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    shown = "" if credentials is None else credentials.authorization()
    headers = {"Authorization": shown} if shown else {}
    try:
        async with session.get(url + "/internal/kv-events", timeout=timeout, headers=headers) as answer:
            if answer.status == 404:
                return False
            if answer.status != 200:
                _log.warning("%s: no KV events: HTTP %d", url, answer.status)
                return True
            rest = b""
            async for data in answer.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _MAX_LINE:
                    raise ValueError(f"a line of KV events has more than {_MAX_LINE} bytes")
                for line in lines:
                    event = KvEvents.model_validate_json(line)
                    blocks.apply(
                        url,
                        reset=event.reset,
                        previous=event.previous,
                        following=event.following,
                        changes=event.changes,
                    )
    except EventGap as e:
        _log.info("%s: %s: asking for a snapshot", url, e)
    except (aiohttp.ClientError, OSError, TimeoutError) as e:
        _log.info("%s: KV events end: %s", url, str(e) or type(e).__name__)
    except (ValidationError, ValueError) as e:
        _log.warning("%s: KV events are not understood: %s", url, e)
    finally:
        blocks.forget(url)
    return True
