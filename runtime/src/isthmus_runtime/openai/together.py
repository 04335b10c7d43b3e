"""Generations of one request side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from ..errors import RequestError


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them side by side. The first error cancels the others, whose own are its echo, and is raised: a RequestError
    if there is one.

    It is raised where no group is its context: the group holds it, and is held by asyncio's frame in its traceback.
    Such cycles would keep the prompts and answers of all until the collector comes by.
    """
    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        errors.__traceback__ = None
        failed = next((error for error in errors.exceptions if isinstance(error, RequestError)), errors.exceptions[0])
    if failed is not None:
        try:
            raise failed
        finally:
            del failed  # its traceback has this frame
