"""What the watch says, corrected by what we have written, and never longer than that is newer."""

import asyncio
from typing import Any

from isthmus_operator.cache import Cache

KEY = ("ns", "svc")


def body(version: int, *, uid: str = "u", name: str = "d", kind: str = "Deployment") -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name, "uid": uid, "resourceVersion": str(version)}}


def test_an_answer_stands_until_the_watch_has_caught_up_or_told_of_the_deletion() -> None:
    async def main() -> None:
        cache = Cache()
        watched: dict[tuple[str, str], list[dict[str, Any]]] = {KEY: []}
        cache.indexes = {"deployments": watched}
        cache.written(KEY, "apply", body(5))
        assert cache.children(KEY) == [body(5)], "made, and not watched yet"
        watched[KEY] = [body(4)]
        assert cache.children(KEY) == [body(5)], "the watch is behind"
        watched[KEY] = [body(6)]
        assert cache.children(KEY) == [body(6)]
        watched[KEY] = []
        assert cache.children(KEY) == [], "deleted by somebody else"
        cache.written(KEY, "apply", body(7))
        cache.gone(KEY, body(8, uid="an older one"))
        assert cache.children(KEY) == [body(7)]
        cache.gone(KEY, body(8))
        assert cache.children(KEY) == []

    asyncio.run(main())


def test_what_we_deleted_is_gone_although_the_watch_still_shows_it() -> None:
    async def main() -> None:
        cache = Cache()
        cache.indexes = {"services": {KEY: [body(1, kind="Service"), body(2, uid="v", name="e", kind="Service")]}}
        cache.written(KEY, "delete", body(1, kind="Service"))
        assert [one["metadata"]["name"] for one in cache.children(KEY)] == ["e"]

    asyncio.run(main())
