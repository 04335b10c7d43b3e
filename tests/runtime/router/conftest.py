"""Fake engines that speak `protocol/` over real HTTP, and a router in front of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web
from ended import end
from prometheus_client import CollectorRegistry
from serving import served as serving

from isthmus_runtime.config import ModelConfig, RouterConfig, ServerConfig
from isthmus_runtime.errors import RequestError, UnknownModel
from isthmus_runtime.metrics import render
from isthmus_runtime.protocol.calls import (
    AbortCall,
    AdapterCall,
    CommitCall,
    GenerateCall,
    PrefillAnswer,
    PrefillCall,
    TicketCall,
)
from isthmus_runtime.protocol.info import AdapterInfo, EngineInfo, KvEvents, KvInfo, LoadInfo, TransferInfo
from isthmus_runtime.protocol.lines import reserved_line, sent_line, token_line
from isthmus_runtime.protocol.request import CLIENT_HEADER
from isthmus_runtime.protocol.ticket import Ticket
from isthmus_runtime.request import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from isthmus_runtime.router.app import Router
from isthmus_runtime.serving.app import make_app
from isthmus_runtime.serving.call import error_answer
from isthmus_runtime.serving.in_flight import InFlight

DIE = "die"
"""In a script: the server closes the connection without another word."""


@web.middleware
async def refuse(request, handler):
    """As an engine does."""
    try:
        return await handler(request)
    except RequestError as error:
        status, headers, body = error_answer(error)
        return web.Response(status=status, headers=headers, body=body)


def tokens(*ids, **more):
    return TokenChunk(token_ids=ids, **more)


def done(*ids, reason=FinishReason.STOP, error=None):
    return TokenChunk(token_ids=ids, finish_reason=reason, error=error)


class FakeEngine:
    """One engine. Scripts hold chunks, lines as they are, events to wait for, errors (before the first line: a refusal)
    and DIE."""

    def __init__(self, role, *, fingerprint="f1", mode="memory") -> None:
        self.role = role
        self.fingerprint = fingerprint
        self.mode = mode
        self.draining = False
        self.is_ready = True
        self.max_model_len = 4096
        self.adapters = ()
        self.tokenizer = self.vocabulary = ""
        self.begins_early = False
        self.early_script = [tokens(7)]
        """What prefill says of a prompt that was begun without its ticket, before the answer."""
        self.kv_usage = 0.0
        self.tickets = []
        self.frozen = None
        """An event: nothing is answered before it is set."""
        self.probes = 0
        self.before = []
        """What generate does before the reservation (or the first token)."""
        self.script = [tokens(7, note="transferred"), tokens(8), done(9)]
        self.local_script = [tokens(7, note="local"), tokens(8), done(9)]
        self.on_failed_commit = [tokens(7, note="recomputed"), tokens(8), done(9)]
        self.prefill_script = []
        self.prefill_hits = 0
        self.prefill_scores = ()
        """Of its prefix cache, in tokens."""
        self.commit_error = None
        self.kv_changes = None
        """A queue of KvEvents lines, None ends the stream; without a queue there is no such route."""
        self.kv_readers = 0
        self.epoch = "e1"
        self.generates = []
        self.clients = []
        """As calls to generate and prefill name them."""
        self.prefills = []
        self.commits = []
        self.aborts = []
        self.cancelled = 0
        self.started = asyncio.Event()
        self.changed = asyncio.Event()
        self._commit_of = {}
        self.url = ""

    def note(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def until(self, condition) -> None:
        while not condition(self):
            await self.changed.wait()

    @asynccontextmanager
    async def serve(self, host="127.0.0.1", port=0):
        app = web.Application(middlewares=[refuse])
        app.router.add_get("/info", self._info)
        app.router.add_get("/ready", self._ready)
        if self.kv_changes is not None:
            app.router.add_get("/internal/kv-events", self._kv_events)
        for name in ("generate", "prefill", "ticket", "commit", "abort", "adapter"):
            app.router.add_post(f"/internal/{name}", getattr(self, f"_{name}"))
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, host, port, reuse_address=True).start()
        self.port = runner.addresses[0][1]
        self.address = f"{host}:{self.port}"
        self.url = f"http://{self.address}"
        try:
            yield self
        finally:
            await end(runner)

    async def _info(self, request):
        self.probes += 1
        adapters = self.adapters
        self.note()
        if self.frozen is not None:
            await self.frozen.wait()
        info = EngineInfo(
            role=self.role,
            model="m",
            served_names=("m",),
            fingerprint=self.fingerprint,
            kv=KvInfo(
                block_size=16,
                physical_blocks=11,
                usable_blocks=10,
                bytes_per_block=1,
                max_model_len=self.max_model_len,
                layout_digest="d",
            ),
            transfer=TransferInfo(mode=self.mode, epoch=self.epoch),
            version="0",
            draining=self.draining,
            adapters=adapters,
            tokenizer=self.tokenizer,
            vocabulary=self.vocabulary,
            begins_early=self.begins_early,
            load=LoadInfo(kv_usage=self.kv_usage),
        )
        return web.Response(text=info.model_dump_json(), content_type="application/json")

    async def _kv_events(self, request):
        self.kv_readers += 1
        self.note()
        response = web.StreamResponse()
        await response.prepare(request)
        while (line := await self.kv_changes.get()) is not None:
            await response.write(line.model_dump_json().encode() + b"\n")
        return response

    async def _ready(self, request):
        return web.Response(status=200 if self.is_ready else 503, text="warming up")

    async def _play(self, request, response, script):
        for item in script:
            if isinstance(item, asyncio.Event):
                await item.wait()
            elif item is DIE:
                request.transport.abort()
                raise asyncio.CancelledError
            elif isinstance(item, RequestError):
                raise item
            else:
                await response.write(item if isinstance(item, bytes) else token_line(item))

    async def _generate(self, request):
        self.clients.append(request.headers.get(CLIENT_HEADER))
        call = GenerateCall.model_validate_json(await request.read())
        self.generates.append(call)
        self.started.set()
        self.note()
        response = web.StreamResponse()
        try:
            self._check(call)
            await self._play(request, response, self.before)
            await response.prepare(request)
            script = self.local_script
            if call.attempt:
                commit = self._commit_of[call.attempt] = asyncio.get_running_loop().create_future()
                await response.write(reserved_line(Ticket(mode="memory", attempt=call.attempt, layout_digest="d")))
                answer = await commit
                script = self.script if answer.ok else self.on_failed_commit
            await self._play(request, response, script)
            await response.write_eof()
        except asyncio.CancelledError:
            self.cancelled += 1
            self.note()
            raise
        return response

    async def _prefill(self, request):
        self.clients.append(request.headers.get(CLIENT_HEADER))
        call = PrefillCall.model_validate_json(await request.read())
        self.prefills.append(call)
        self.started.set()
        self.note()
        response = None
        try:
            self._check(call)
            if call.ticket is None:
                response = web.StreamResponse()
                await response.prepare(request)
                await self._play(request, response, [tokens(), *self.early_script])
                await self.until(lambda e: e.tickets)
            await self._play(request, response, self.prefill_script)
        except asyncio.CancelledError:
            self.cancelled += 1
            self.note()
            raise
        answer = PrefillAnswer(
            attempt=call.attempt,
            num_tokens=len(call.request.prompt_token_ids),
            cached_tokens=self.prefill_hits,
            prompt_logprobs=self.prefill_scores,
        )
        if response is not None:
            await response.write(sent_line(answer))
            await response.write_eof()
            return response
        return web.Response(text=answer.model_dump_json(exclude_defaults=True), content_type="application/json")

    def _check(self, call):
        adapter = call.request.adapter
        if adapter is not None and adapter.digest not in {one.digest for one in self.adapters}:
            raise UnknownModel(f"model: this engine has another {adapter.name!r}", param="model")

    async def _ticket(self, request):
        self.tickets.append(TicketCall.model_validate_json(await request.read()).ticket)
        self.note()
        return web.json_response({})

    async def _commit(self, request):
        call = CommitCall.model_validate_json(await request.read())
        self.commits.append(call)
        if self.commit_error is not None:
            raise self.commit_error
        self._commit_of[call.attempt].set_result(call)
        self.note()
        return web.json_response({})

    async def _abort(self, request):
        self.aborts.append(AbortCall.model_validate_json(await request.read()))
        self.note()
        return web.json_response({})

    async def _adapter(self, request):
        call = AdapterCall.model_validate_json(await request.read())
        left = [adapter for adapter in self.adapters if adapter.name != call.name]
        new = [] if call.path is None else [AdapterInfo(name=call.name, digest=call.path)]
        self.adapters = (*left, *new)
        self.note()
        return web.json_response({})


def kv_line(previous, following, *changes, reset=False):
    return KvEvents(previous=previous, following=following, reset=reset, changes=changes)


class Rig:
    """A running router and its engines."""

    def __init__(self, router, registry, engines) -> None:
        self.router = router
        self.backend = router.backend
        self.pool = router.pool
        self.engines = engines
        self._registry = registry

    def metric(self, start: str) -> float:
        lines = render(self._registry).decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))

    async def until(self, condition) -> None:
        while not condition(self.pool):
            await self.pool.changed()

    async def until_ready(self, count=None) -> None:
        expected = len(self.engines) if count is None else count
        await self.until(lambda p: len(p.fleet.prefill) + len(p.fleet.decode) == expected)

    def idle(self) -> bool:
        """No load is left anywhere, in the router's books."""
        return all(load.requests == 0 and load.tokens == 0 for load in self.pool.loads.values())


def request(prompt=range(100), max_tokens=8, timeout_s=20.0, request_id="r1"):
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        timeout_s=timeout_s,
    )


async def collect(backend, wanted=None):
    """Its chunks, in the way that clients' requests take."""
    chunks = []

    def take(chunk):
        chunks.append(chunk)
        return True

    await backend.push(wanted or request(), take)
    return chunks


@pytest.fixture
def rig():
    """`async with rig(engine, ...) as r`: the engines and a router that has found them all."""

    @asynccontextmanager
    async def start(
        *engines, wait=True, resolve=None, dead_after_s=None, gap_s=0.0, served=True, tokenizer=None, **settings
    ):
        async with AsyncExitStack() as stack:
            for engine in engines if served else ():
                await stack.enter_async_context(engine.serve())
            by_role = {"prefill": [], "decode": [], "worker": []}
            for engine in engines:
                by_role["worker" if engine.role == "unified" else engine.role].append(engine.address)
            lists = {role: tuple(addresses) for role, addresses in by_role.items()}
            config = RouterConfig(
                server=ServerConfig(),
                model=ModelConfig(path="m", served_names=("m",)),
                **{"discovery_interval_s": 0.05, **lists, **settings},
            )
            registry = CollectorRegistry()
            extra = {} if resolve is None else {"resolve": resolve}
            router = Router(config, registry, InFlight(), tokenizer=tokenizer, **extra)
            router.backend._gap_s = gap_s
            if dead_after_s is not None:
                router.pool._dead_after = dead_after_s
            app = make_app("test", bodies=(), lifespan=router.lifespan)
            router.add_probes(app)
            router.add_metrics(app)
            port = await stack.enter_async_context(serving(app))
            made = Rig(router, registry, engines)
            made.url = f"http://127.0.0.1:{port}"
            if wait:
                await made.until_ready()
            yield made

    return start


@pytest.fixture
def run():
    """Run a coroutine on a fresh loop with a deadline."""
    return lambda work: asyncio.run(asyncio.wait_for(work, 30))


@pytest.fixture
def kit():
    """The names above, for test modules (there are no packages under tests/)."""

    class Kit:
        Engine = FakeEngine
        DIE = DIE
        tokens = staticmethod(tokens)
        done = staticmethod(done)
        kv_line = staticmethod(kv_line)
        request = staticmethod(request)
        collect = staticmethod(collect)

    return Kit
