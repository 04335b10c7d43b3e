"""prefix-aware and kv-aware over real HTTP: requests go where their prefix is; what is known dies with the engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from isthmus_runtime.kv.keys import ExtraKeys, block_hashes
from isthmus_runtime.router import proxy

PROMPT = range(200)


def changes(sign, prompt):
    hashes = block_hashes(tuple(prompt), 16, extra=ExtraKeys(cache_salt=""))
    return tuple(sign + h[:8].hex() for h in hashes)


async def send(r, kit, number, prompt):
    return await kit.collect(r.backend, kit.request(prompt, request_id=f"r{number}"))


def test_prefix_aware_sticks(rig, run, kit):
    async def main():
        engines = [kit.Engine("unified") for _ in range(3)]
        async with rig(*engines, policy="prefix-aware") as r:
            for i in range(6):
                await send(r, kit, i, PROMPT)
            assert sorted(len(e.generates) for e in engines) == [0, 0, 6]
            engine = r.pool.fleet.decode[0]
            blocks = len(PROMPT) // engine.block_size
            assert r.metric("isthmus_router_prefix_blocks_total") == 6 * blocks
            assert r.metric("isthmus_router_prefix_hit_blocks_total") == 5 * min(blocks, engine.blocks)
            for i in range(6, 12):  # nothing in common: these spread
                await send(r, kit, i, range(1000 * i, 1000 * i + 200))
            assert min(len(e.generates) for e in engines) >= 1 and r.idle()

    run(main())


def test_a_prompt_is_hashed_once_for_all_its_choices(rig, run, kit, monkeypatch):
    hashed, hashes = [], proxy.prompt_hashes

    def noted(request, size):
        hashed.append(request.request_id)
        return hashes(request, size)

    monkeypatch.setattr(proxy, "prompt_hashes", noted)

    async def main():
        engine = kit.Engine("unified")
        async with rig(engine, policy="prefix-aware") as r:
            for group in [*range(3), *range(40), *range(3)]:
                for choice in range(3):
                    wanted = kit.request(range(group, group + 200), request_id=f"{group}-{choice}")
                    await kit.collect(r.backend, replace(wanted, prompt_group=f"g{group}"))
            assert hashed == [f"{group}-0" for group in [*range(40), *range(3)]], "those of long ago are hashed again"
            assert r.metric("isthmus_router_prefix_blocks_total") == 46 * 3 * (200 // 16) and r.idle()

    run(main())


def test_a_lost_or_restarted_engine_has_no_prefix(rig, run, kit):
    async def main():
        engines = [kit.Engine("unified") for _ in range(2)]
        async with rig(*engines, policy="prefix-aware") as r:
            known = r.backend._prefixes
            await send(r, kit, 0, PROMPT)
            (used,) = (e for e in engines if e.generates)
            hashes = [int(c[1:], 16) for c in changes("+", PROMPT)]
            assert known.hit(used.url, hashes) == 10  # as many as the engine has
            used.epoch = "e2"
            while known.hit(used.url, hashes):
                await r.pool.changed()
            await send(r, kit, 1, PROMPT)
            (used,) = (e for e in engines if known.hit(e.url, hashes))
            r.pool.failed(used.url, "gone")
            assert known.hit(used.url, hashes) == 0

    run(main())


@pytest.mark.parametrize("how", ["events", "gap", "restart"])
def test_kv_aware_follows_the_engines(rig, run, kit, how):
    async def main():
        engines = [kit.Engine("unified") for _ in range(3)]
        for e in engines:
            e.kv_changes = asyncio.Queue()
        async with rig(*engines, policy="kv-aware") as r:
            known = r.backend._prefixes
            owner = engines[1]
            hashes = [int(c[1:], 16) for c in changes("+", PROMPT)]

            async def until_hit(url, blocks):
                while True:
                    if known.hit(url, hashes) == blocks:
                        return
                    await asyncio.sleep(0)

            await owner.until(lambda e: e.kv_readers == 1)
            owner.kv_changes.put_nowait(kit.kv_line(5, 5, reset=True))
            owner.kv_changes.put_nowait(kit.kv_line(5, 17, *changes("+", PROMPT)))
            await until_hit(owner.url, 12)
            for i in range(4):
                await send(r, kit, i, PROMPT)
            assert len(owner.generates) == 4 and r.idle()
            if how == "events":
                owner.kv_changes.put_nowait(kit.kv_line(17, 18, changes("-", PROMPT)[3]))
                await until_hit(owner.url, 3)
                return
            if how == "gap":
                owner.kv_changes.put_nowait(kit.kv_line(20, 21, "+01"))
            else:
                owner.kv_changes.put_nowait(None)
            await until_hit(owner.url, 0)
            await owner.until(lambda e: e.kv_readers == 2)
            owner.kv_changes.put_nowait(kit.kv_line(9, 9, *changes("+", PROMPT)[:6], reset=True))
            if how == "gap":  # the first reader's handler still takes lines: whichever got it, the second gets one too
                owner.kv_changes.put_nowait(kit.kv_line(9, 9, *changes("+", PROMPT)[:6], reset=True))
            await until_hit(owner.url, 6)

    run(main())


def test_kv_aware_serves_engines_without_events(rig, run, kit):
    async def main():
        engines = [kit.Engine("unified") for _ in range(2)]
        async with rig(*engines, policy="kv-aware") as r:
            for i in range(4):
                await send(r, kit, i, PROMPT)
            assert [len(e.generates) for e in engines] == [2, 2]

    run(main())
