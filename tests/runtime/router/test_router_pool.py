"""Discovery, probing and the router's own routes."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack

import aiohttp
import pytest

from isthmus_runtime.errors import EngineFailed, NeverFits, Overloaded
from isthmus_runtime.router import resolving
from isthmus_runtime.router.passed_on import OwnTokenizer
from isthmus_runtime.router.resolving import resolve_all


def states(pool):
    return {s.url: (s.state, s.reason) for s in pool.statuses()}


def test_only_equal_fingerprints_and_modes_are_paired(rig, run, kit):
    async def main():
        old_p, new_p = kit.Engine("prefill", fingerprint="old"), kit.Engine("prefill", fingerprint="new")
        old_d, new_d = kit.Engine("decode", fingerprint="old"), kit.Engine("decode", fingerprint="new")
        async with rig(old_p, new_p, old_d, new_d) as r:
            await asyncio.gather(*(kit.collect(r.backend, kit.request(request_id=f"r{i}")) for i in range(8)))
            urls = {old_d: old_p.url, new_d: new_p.url}
            for decode, url in urls.items():
                assert decode.generates and {c.prefill_url for c in decode.generates} == {url}

    run(main())


@pytest.mark.parametrize("difference", [{"fingerprint": "f2"}, {"mode": "store"}])
@pytest.mark.parametrize("setting", ["local", "reject"])
def test_no_compatible_prefill(rig, run, kit, difference, setting):
    async def main():
        prefill, decode = kit.Engine("prefill", **difference), kit.Engine("decode")
        async with rig(prefill, decode, on_prefill_unavailable=setting) as r:
            if setting == "local":
                chunks = await kit.collect(r.backend)
                assert chunks[0].note == "local" and r.backend.ready() == ""
            else:
                with pytest.raises(Overloaded, match="fingerprint and transfer mode") as caught:
                    await kit.collect(r.backend)
                assert caught.value.status == 503 and caught.value.retry_after_s
                assert "fingerprint" in r.backend.ready()
            assert prefill.prefills == []

    run(main())


async def looked_at(engine):
    """What it says now is known to its router."""
    seen = engine.probes
    await engine.until(lambda e: e.probes > seen + 2)


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("unified",)])
def test_no_ids_go_to_an_engine_with_another_tokenizer(rig, run, kit, roles):
    """As there are in a rollout to another model, whose ids mean other words."""

    async def main():
        engines = [kit.Engine(role, fingerprint=made) for made in ("old", "new") for role in roles]
        for engine in engines:
            engine.vocabulary = engine.fingerprint
        olds, news = engines[: len(roles)], engines[len(roles) :]
        own = OwnTokenizer("new", lambda prompt: [1])
        async with rig(*engines, wait=False, tokenizer=own) as r:
            await r.until_ready(len(news))
            for number in range(4):
                await kit.collect(r.backend, kit.request(request_id=f"r{number}"))
            assert all(not engine.generates and not engine.prefills for engine in olds)
            assert all(engine.generates or engine.prefills for engine in news)
            assert all("another tokenizer" in states(r.pool)[engine.url][1] for engine in olds)
            assert {s.url for s in r.pool.statuses() if s.other_tokenizer} == {engine.url for engine in olds}
            olds[-1].vocabulary = ""  # one that does not tell, of an older version
            await looked_at(olds[-1])
            assert "does not tell" in states(r.pool)[olds[-1].url][1]
            assert {s.url for s in r.pool.statuses() if s.other_tokenizer} == {engine.url for engine in olds[:-1]}
            olds[-1].tokenizer = "new"  # it tells by which it takes texts
            await r.until_ready(len(news) + 1)

    run(main())


def test_engines_that_tell_no_tokenizer_serve_until_one_of_their_role_tells_the_routers(rig, run, kit):
    """In an upgrade together with another tokenizer all were taken for the router's own, and answered other words."""

    async def main():
        old, new = kit.Engine("unified"), kit.Engine("unified")
        new.vocabulary, new.is_ready = "new", False
        async with rig(old, new, wait=False, tokenizer=OwnTokenizer("new", lambda prompt: [1])) as r:
            for engine in (new, old):
                await looked_at(engine)
            await kit.collect(r.backend)  # while none of the others can serve
            new.is_ready = True
            await r.until(lambda p: [one.url for one in p.fleet.decode] == [new.url])
            await kit.collect(r.backend)
            assert len(old.generates) == len(new.generates) == 1
            assert "does not tell" in states(r.pool)[old.url][1]
            new.is_ready = False
            for engine in (new, old):
                await looked_at(engine)
            assert not r.pool.fleet.decode, "one that comes back is worth waiting for"

    run(main())


def test_draining_and_unready_engines_take_nothing_new(rig, run, kit):
    async def main():
        a, b = kit.Engine("unified"), kit.Engine("unified")
        never = asyncio.Event()
        a.local_script = [kit.tokens(1), never, kit.done(2)]
        b.is_ready = False
        async with rig(a, b, wait=False) as r:
            await r.until_ready(1)
            running = asyncio.create_task(kit.collect(r.backend))
            await a.started.wait()
            a.draining = True
            await r.until(lambda p: not p.fleet.decode)
            assert states(r.pool)[a.url] == ("unready", "draining")
            assert states(r.pool)[b.url] == ("unready", "not ready: warming up")
            with pytest.raises(Overloaded, match="no decode engine"):
                await kit.collect(r.backend)
            never.set()  # what runs there may end there
            assert (await running)[-1].token_ids == (2,)
            b.is_ready = True
            await r.until_ready(1)
            assert [i for c in await kit.collect(r.backend) for i in c.token_ids] == [7, 8, 9]

    run(main())


def test_engine_that_does_not_answer_comes_back(rig, run, kit):
    async def main():
        engine = kit.Engine("unified")
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(AsyncExitStack())
            await first.enter_async_context(engine.serve())
            port = engine.port
            r = await stack.enter_async_context(rig(engine, served=False))
            await first.aclose()  # the process is gone
            with pytest.raises((EngineFailed, Overloaded)):
                await kit.collect(r.backend)
            assert not r.pool.fleet.decode and r.backend.ready()
            assert r.metric('isthmus_router_endpoints{role="unified",state="unready"}') == 1
            await stack.enter_async_context(engine.serve(port=port))  # restarted
            await r.until_ready(1)
            assert [i for c in await kit.collect(r.backend) for i in c.token_ids] == [7, 8, 9]

    run(main())


def test_engine_that_answers_late_stays(rig, run, kit):
    """A node that has no CPU to spare for a while has lost no engine; silence ends that only after `dead_after_s`."""

    async def main():
        engine = kit.Engine("unified")
        async with rig(engine, dead_after_s=60.0) as r:
            engine.frozen, asked = asyncio.Event(), engine.probes
            await engine.until(lambda e: e.probes >= asked + 2)  # the second is sent when the first was given up
            assert states(r.pool)[engine.url] == ("ready", "") and r.backend.ready() == ""
            engine.frozen.set()

    run(main())


def test_one_name_for_many_pods(rig, run, kit):
    """All addresses are used; one that vanishes takes nothing new but finishes what it has."""

    async def main():
        a, b = kit.Engine("unified"), kit.Engine("unified")
        names = {"pods": {"127.0.0.2", "127.0.0.3"}}
        never = asyncio.Event()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(a.serve("127.0.0.2"))
            await stack.enter_async_context(b.serve("127.0.0.3", a.port))

            async def resolve(host, port):
                if names[host] is None:
                    raise OSError("resolver is down")
                return names[host]

            r = await stack.enter_async_context(rig(a, b, served=False, resolve=resolve, worker=(f"pods:{a.port}",)))
            a.local_script = b.local_script = [kit.tokens(1), never, kit.done(2)]
            works = [asyncio.create_task(kit.collect(r.backend, kit.request(request_id=f"r{i}"))) for i in range(2)]
            await a.started.wait()
            await b.started.wait()
            names["pods"] = {"127.0.0.3"}
            await r.until(lambda p: len(p.fleet.decode) == 1)
            assert states(r.pool)[a.url][0] == "leaving"
            names["pods"] = None  # a resolver that cannot tell changes nothing
            never.set()
            for work in works:
                assert (await work)[-1].token_ids == (2,)
            await r.until(lambda p: a.url not in states(p))
            assert [e.url for e in r.pool.fleet.decode] == [b.url]
            names["pods"] = set()  # a headless Service without ready pods
            await r.until(lambda p: not p.fleet.decode)
            assert r.backend.ready().startswith("no decode engine takes requests now")

    run(main())


def test_slow_resolver_does_not_stop_probes(rig, run, kit):
    async def main():
        engine = kit.Engine("unified")
        calls = 0
        never = asyncio.Event()

        async def resolve(host, port):
            nonlocal calls
            calls += 1
            if calls > 1:
                await never.wait()
            return {"127.0.0.1"}

        async with rig(engine, resolve=resolve) as r:
            engine.draining = True
            await r.until(lambda p: not p.fleet.decode)
            engine.draining = False
            await r.until_ready(1)

    run(main())


def test_wrong_role_is_named(rig, run, kit):
    async def main():
        engine = kit.Engine("decode")
        async with rig(engine, wait=False) as r:
            await r.until_ready(1)
            engine.role = "prefill"
            await r.until(lambda p: not p.fleet.decode)
            assert states(r.pool)[engine.url][1] == "is a prefill engine, but is listed as decode"

    run(main())


def test_shortest_limit_counts(rig, run, kit):
    async def main():
        prefill, a, b = kit.Engine("prefill"), kit.Engine("decode"), kit.Engine("decode")
        prefill.max_model_len, a.max_model_len, b.max_model_len = 10, 4096, 2048
        async with rig(prefill, a, b) as r:
            assert r.backend.max_model_len == 2048

    run(main())


@pytest.mark.parametrize("setting", ["local", "reject"])
def test_no_prefill_engine_gets_a_prompt_that_is_too_long_for_it(rig, run, kit, setting):
    """It was computed after a failed try at each, or failed as the service's own fault."""

    async def main():
        short, long, decode = kit.Engine("prefill"), kit.Engine("prefill"), kit.Engine("decode")
        short.max_model_len, long.max_model_len = 50, 101
        async with rig(short, long, decode, on_prefill_unavailable=setting) as r:
            for number in range(4):
                await kit.collect(r.backend, kit.request(range(100), request_id=f"r{number}"))
            assert (len(short.prefills), len(long.prefills)) == (0, 4)
            await kit.collect(r.backend, kit.request(range(49), request_id="short"))
            assert len(short.prefills) + len(long.prefills) == 5
            if setting == "local":
                chunks = await kit.collect(r.backend, kit.request(range(101)))
                assert chunks[0].note == "local"
                assert r.metric('isthmus_router_choices_total{model_name="m",reason="long-prompt"}') == 1
            else:
                with pytest.raises(NeverFits, match="has 101 tokens, but prefill engines take 100 at most"):
                    await kit.collect(r.backend, kit.request(range(101)))
            assert len(short.prefills) + len(long.prefills) == 5 and r.backend.ready() == ""

    run(main())


def test_routes(rig, run, kit):
    async def main():
        engine = kit.Engine("unified")
        async with rig(engine) as r, aiohttp.ClientSession() as session:
            for path in ("/health", "/ready"):
                async with session.get(r.url + path) as answer:
                    assert answer.status == 200
            async with session.get(r.url + "/info") as answer:
                info = await answer.json()
                assert info["role"] == "router" and info["max_model_len"] == 4096
                assert info["engines"][0]["state"] == "ready"
            async with session.get(r.url + "/metrics") as answer:
                assert 'isthmus_router_endpoints{role="unified",state="ready"} 1.0' in await answer.text()
            engine.is_ready = False
            await r.until(lambda p: not p.fleet.decode)
            async with session.get(r.url + "/ready") as answer:
                assert answer.status == 503 and answer.headers["Retry-After"] == "1"
                told = (await answer.json())["error"]["message"]
                assert told == "not ready: no decode engine takes requests now"  # clients reach it: no address
            async with session.get(r.url + "/info") as answer:
                assert (await answer.json())["engines"][0]["reason"] == "not ready: warming up"
            async with session.get(r.url + "/health") as answer:
                assert answer.status == 200

    run(main())


def test_a_router_asks_for_services_of_its_own_namespace(run, monkeypatch):
    async def main():
        asked = []

        async def getaddrinfo(host, *args, **more):
            asked.append(host)
            return []

        asyncio.get_running_loop().getaddrinfo = getaddrinfo
        monkeypatch.setattr(resolving, "absolute", lambda host: f"{host}.own.svc.cluster.local.")
        assert await resolve_all("chat-decode", 80) == set()
        assert asked == ["chat-decode.own.svc.cluster.local."]

    run(main())


def test_resolving(run):
    async def main():
        assert "127.0.0.1" in await resolve_all("localhost", 80)
        assert await resolve_all("127.0.0.1", 80) == {"127.0.0.1"}

        def refuse(code):
            async def getaddrinfo(*args, **more):
                raise socket.gaierror(code, "x")

            return getaddrinfo

        loop = asyncio.get_running_loop()
        loop.getaddrinfo = refuse(socket.EAI_NONAME)
        assert await resolve_all("gone", 80) == set()
        loop.getaddrinfo = refuse(socket.EAI_AGAIN)
        with pytest.raises(OSError):
            await resolve_all("gone", 80)

    run(main())


def test_one_failed_probe_after_a_standstill_ends_no_request(rig, run, kit):
    async def main():
        decode = kit.Engine("unified")
        async with rig(decode) as r:
            pool, lost = r.router.pool, []
            hold = pool.hold(decode.url, 1, lost.append)
            engine = pool._engines[decode.url]
            engine.last_answer -= 1000
            engine.failures = 1
            pool._check_alive(engine)
            assert not lost
            engine.failures = 2
            pool._check_alive(engine)
            assert len(lost) == 1 and hold.lost
            hold.release()

    run(main())


@pytest.mark.parametrize("held", [False, True])
def test_a_router_that_stood_still_does_not_blame_its_engines(rig, run, kit, held):
    """Large bodies held its loop up, and then both engines had left the fleet: nobody had read their answers."""

    async def main():
        engine = kit.Engine("unified")
        async with rig(engine) as r:
            loop, late = asyncio.get_running_loop(), 0.0
            clock = loop.time
            loop.time = lambda: clock() + late
            ever, rebuilt = set(), r.pool._rebuild
            r.pool._rebuild = lambda: (rebuilt(), ever.add(len(r.pool.fleet.decode)))
            lost = []
            hold = r.pool.hold(engine.url, 1, lost.append) if held else None
            for _ in range(3):
                engine.frozen, asked = asyncio.Event(), engine.probes
                await engine.until(lambda e, asked=asked: e.probes > asked)  # it is asked, and has not answered
                late += 6.0  # every timer is due before anything else is looked at
                await asyncio.sleep(0)
                engine.frozen.set()
            asked = engine.probes
            await engine.until(lambda e: e.probes > asked + 1)
            assert states(r.pool)[engine.url] == ("ready", "") and not lost
            assert 0 not in ever
            if hold is not None:
                hold.release()

    run(main())


def test_an_engine_that_sends_tokens_is_not_lost_though_it_answers_no_probe(rig, run, kit):
    """Bodies for hundreds of choices held up its answers to probes for 5 s: every stream on it ended with 502."""

    async def main():
        engine, asked, enough = kit.Engine("unified"), asyncio.Event(), False

        def script():
            while not enough:
                asked.clear()
                yield kit.tokens(1)
                yield asked
            yield kit.done(2)

        engine.local_script = script()
        async with rig(engine, dead_after_s=0.4) as r:
            known, probes = r.pool._engines[engine.url], engine.probes
            engine.frozen = asyncio.Event()
            last = None
            async for chunk in r.backend.generate(kit.request()):
                (hold,) = known.holds or {None}
                assert hold is None or not hold.lost
                assert states(r.pool)[engine.url] == ("ready", "")
                # Two in a row without an answer, and then nothing else for as long, would end it.
                enough, last = engine.probes >= probes + 5 and known.failures >= 4, chunk
                asked.set()
            assert last.token_ids[-1] == 2
            engine.frozen.set()

    run(main())


@pytest.mark.parametrize("plain", [True, False])
def test_whatever_way_tokens_are_passed_on_they_are_a_sign_of_life(rig, run, kit, plain):
    async def main():
        engine, gate, went, heard = kit.Engine("unified"), asyncio.Event(), asyncio.Event(), []
        second = kit.tokens(2) if plain else kit.tokens(2, note="local")
        engine.local_script = [kit.tokens(1), gate, second, kit.done(3)]
        async with rig(engine, dead_after_s=60.0) as r:

            def take(chunk):
                heard.append(r.pool._engines[engine.url].silent_s)
                went.set()
                return True

            passing = asyncio.create_task(r.backend.push(kit.request(), take))
            await went.wait()
            engine.frozen, asked = asyncio.Event(), engine.probes
            await engine.until(lambda e: e.probes > asked)  # nothing before it is still to be answered
            r.pool._own.now += 1e6
            gate.set()
            await passing
            assert len(heard) > 1 and max(heard) < 1e6
            engine.frozen.set()

    run(main())


@pytest.mark.parametrize("answer", [set(), OSError("Temporary failure in name resolution")])
def test_accepts_clients_though_prefill_has_no_pods(rig, run, kit, answer):
    """`ready` says that nobody can be served; clients shall hear that from the router, not a refused connection. DNS
    without a server above it cannot say that a name has no address."""

    async def main():
        decode = kit.Engine("decode")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(decode.serve())

            async def resolve(host, port):
                if host != "pods":
                    return {"127.0.0.1"}
                if isinstance(answer, OSError):
                    raise answer
                return answer

            settings = {"resolve": resolve, "prefill": ("pods:1",), "on_prefill_unavailable": "reject"}
            r = await stack.enter_async_context(rig(decode, wait=False, served=False, **settings))
            await r.until_ready(1)
            await decode.until(lambda e: e.probes >= 2)  # by then the other name was asked for, too
            assert r.pool.complete
            assert "no prefill engine" in r.backend.ready() and r.backend.accepting() == ""

    run(main())


def test_accepts_clients_from_the_first_able_engine_on(rig, run, kit):
    async def main():
        engine = kit.Engine("unified")
        engine.is_ready = False
        async with rig(engine, wait=False) as r:
            await engine.until(lambda e: e.probes >= 2)  # the first has been understood
            assert "no decode engine" in r.backend.accepting()
            engine.is_ready = True
            await r.until_ready(1)
            assert r.backend.accepting() == ""
            engine.is_ready = False
            await r.until(lambda p: not p.fleet.decode)
            assert r.backend.ready() and r.backend.accepting() == ""

    run(main())


def test_discovery_that_has_stopped_makes_the_router_unhealthy(kit, rig, run):
    async def broken(host, port):
        raise LookupError("a bug")

    async def main():
        async with rig(kit.Engine("unified"), wait=False, resolve=broken) as r, aiohttp.ClientSession() as session:
            status, text = 200, ""
            while status == 200:
                async with session.get(r.url + "/health") as answer:
                    status, text = answer.status, await answer.text()
            assert status == 503 and "engine discovery has stopped: LookupError: a bug" in text

    run(main())
