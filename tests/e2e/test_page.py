"""The router's page in a real browser, before real processes whose engines compute nothing."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from browser import Page, browser, browser_path
from processes import Process, Stack, free_port, get_json, stack

pytestmark = pytest.mark.e2e

READY = "document.querySelector('#state').textContent === 'Ready'"
ANSWER = "[...document.querySelectorAll('.turn.model .said > .text')].at(-1)?.textContent"
META = "[...document.querySelectorAll('.turn.model .meta')].at(-1)?.textContent"
PROGRESS = "document.querySelector('#progress').textContent"
FOCUS = "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
OVERFLOW = "document.documentElement.scrollWidth - innerWidth"
SIZES = [(390, 844), (1280, 800)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    browser_path()
    with stack(tmp_path_factory.mktemp("page"), "direct", engine_args=("--drain-timeout", "5s")) as running:
        yield running


@asynccontextmanager
async def opened(url: str, tmp: Path, width: int = 1280, height: int = 800) -> AsyncIterator[Page]:
    async with browser(tmp) as page:
        await page.look(width, height, mobile=width < 500)
        await page.go(url + "/")
        yield page


@asynccontextmanager
async def held(url: str) -> AsyncIterator[str]:
    """A proxy before the router that holds back the end of a streamed answer, and what comes after ten events."""

    async def forward(request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if request.path.startswith("/v1/") and data:
            # Some ids end an answer, and some are no text: with others it would be luck how long it becomes.
            data = json.dumps({**json.loads(data), "ignore_eos": True, "temperature": 0}).encode()
        async with session.request(request.method, url + request.path_qs, data=data) as answer:
            headers = {"Content-Type": answer.headers["Content-Type"]}
            if not request.path.startswith("/v1/"):
                return web.Response(status=answer.status, headers=headers, body=await answer.read())
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            for _ in range(10):
                event = await answer.content.readuntil(b"\n\n")
                if b'"finish_reason":null' not in event.replace(b" ", b""):
                    break
                await response.write(event)
            await asyncio.Event().wait()
            return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    async with aiohttp.ClientSession() as session:
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def drive(
    url: str,
    tmp: Path,
    work: Callable[[Page], Awaitable[None]],
    width: int = 1280,
    height: int = 800,
    *,
    hold: bool = False,
) -> None:
    """Run `work` on the page, which must have nothing to complain of. `hold`: answers do not come to an end."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            origin = await stack.enter_async_context(held(url)) if hold else url
            page = await stack.enter_async_context(opened(origin, tmp, width, height))
            await page.until(READY)
            await work(page)
            assert page.problems == []

    asyncio.run(main())


async def option(page: Page, field: str, value: str) -> None:
    await page.eval(f"document.querySelector('#options').open = true; document.querySelector('#{field}').focus()")
    await page.type(value)
    await page.eval("document.querySelector('#prompt').focus()")


def test_a_conversation_streams_and_shows_what_it_cost(service: Stack, tmp_path: Path) -> None:
    async def work(page: Page) -> None:
        await option(page, "temperature", "0")  # what is drawn may end the answer before its first token
        await option(page, "tokens", "40")
        await page.type("Hello")
        await page.click("#send")
        await page.until(f"{PROGRESS} === 'Done.'")
        assert await page.eval(ANSWER)
        meta = await page.eval(META)
        found = re.search(r"^first token .* s · (\d+) tokens? · prompt \d+", meta)
        assert found and 1 <= int(found[1]) <= 40, meta
        assert await page.eval("document.querySelectorAll('[aria-busy]').length") == 0
        await page.type("And then?")
        await page.press("Enter")
        await page.until("document.querySelectorAll('.turn').length === 4")
        await page.until(f"{PROGRESS} === 'Done.'")
        assert await page.eval("document.querySelector('.turn.person .said > .text').textContent") == "Hello"
        await page.click("#new")
        assert await page.eval("document.querySelectorAll('.turn').length") == 0

    drive(service.url("router"), tmp_path, work)


def test_a_long_answer_is_stopped_in_the_middle_and_its_engines_are_free(service: Stack, tmp_path: Path) -> None:
    async def work(page: Page) -> None:
        await page.type("Go on for ever")
        await page.press("Enter")
        await page.until(f"({ANSWER} ?? '').length > 2")
        assert await page.eval("document.querySelector('[aria-busy=true]') !== null")
        await page.click("#stop")
        await page.until(f"{PROGRESS} === 'Stopped.'")
        assert (await page.eval(META)).endswith("stopped")
        kept = await page.eval(ANSWER)
        await page.until("!document.querySelector('#send').hidden")
        assert await page.eval(ANSWER) == kept != ""
        end = asyncio.get_running_loop().time() + 20
        for engine in ("prefill0", "decode0"):
            while (await asyncio.to_thread(get_json, service.url(engine) + "/info"))["running"]:
                assert asyncio.get_running_loop().time() < end, f"{engine} still works on it"
                await asyncio.sleep(0.05)

    drive(service.url("router"), tmp_path, work, hold=True)


def test_an_error_of_the_api_is_shown_and_can_be_tried_again(service: Stack, tmp_path: Path) -> None:
    async def work(page: Page) -> None:
        await option(page, "tokens", "999999")
        await page.type("Hello")
        await page.press("Enter")
        alert = await page.until("document.querySelector('[role=alert]')?.textContent")
        assert "max_tokens" in alert
        assert "HTTP 400" in await page.eval(META)
        # The browser itself notes an answer of 400 in its console; nothing else may be there.
        assert "400" in await page.problem()
        await page.eval("document.querySelector('#tokens').value = '5'")
        await page.click(".meta button")
        await page.until(f"{PROGRESS} === 'Done.'")
        assert await page.eval("document.querySelector('[role=alert]')") is None

    drive(service.url("router"), tmp_path, work)


def test_everything_is_reached_and_done_by_keyboard(service: Stack, tmp_path: Path) -> None:
    async def work(page: Page) -> None:
        assert await page.eval(FOCUS) == "prompt"
        await page.eval("document.querySelector('.skip').focus()")
        seen = []
        for _ in range(8):
            await page.press("Tab")
            seen.append(await page.eval(FOCUS))
            assert await page.eval("getComputedStyle(document.activeElement).outlineStyle") != "none", seen
        assert seen == ["new", "SUMMARY", "log", "curl", "A", "prompt", "send", "SUMMARY"]
        await page.press("Enter")  # opens the options
        assert await page.eval("document.querySelector('#options').open")
        await page.press("Tab")
        assert await page.eval(FOCUS) == "key"
        await page.press("Tab")
        await page.press("Tab")
        assert await page.eval(FOCUS) == "tokens"
        await page.eval("document.querySelector('.skip').focus()")
        await page.press("Enter")
        await page.until(f"({FOCUS}) === 'prompt'")
        await page.type("One line")
        await page.press("Enter", shift=True)
        await page.type("and another")
        assert await page.eval("document.querySelector('#prompt').value") == "One line\nand another"
        await page.press("Enter")
        await page.until(f"({ANSWER} ?? '').length > 2")
        await page.press("Escape")
        await page.until(f"{PROGRESS} === 'Stopped.'")
        assert await page.eval(FOCUS) == "prompt"

    drive(service.url("router"), tmp_path, work, hold=True)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nothing_is_wider_than_the_window(service: Stack, tmp_path: Path, width: int, height: int) -> None:
    async def work(page: Page) -> None:
        assert await page.eval(OVERFLOW) == 0
        await option(page, "tokens", "60")
        assert await page.eval(OVERFLOW) == 0
        await page.eval("document.querySelector('#service').open = true")
        assert await page.eval(OVERFLOW) == 0
        await page.type("w" * 300)
        await page.press("Enter")
        await page.until(f"{PROGRESS} === 'Done.'")
        assert await page.eval(OVERFLOW) == 0
        send = "document.querySelector('#send').getBoundingClientRect()"
        assert await page.eval(f"{send}.right <= innerWidth && {send}.height >= 44")

    drive(service.url("router"), tmp_path, work, width, height)


def test_the_service_is_shown_as_it_is(service: Stack, tmp_path: Path) -> None:
    async def work(page: Page) -> None:
        shown = await page.until("document.querySelector('#roles').innerText")
        for part in ("Prefill", "Decode", "1 of 1 ready", "queued", "Direct · TCP", "link"):
            assert part in shown, shown
        await option(page, "temperature", "0")
        await page.type("Hello")
        await page.press("Enter")
        await page.until("parseFloat(document.querySelector('#speed').textContent.replace(',', '')) > 0")

    drive(service.url("router"), tmp_path, work)


@contextmanager
def another_router(service: Stack, tmp: Path, *args: str) -> Iterator[tuple[str, Process]]:
    """Its URL, and the process: before the engines of `service`."""
    other = Stack(tmp, "direct", router_args=args, ports={**service.ports, "router": free_port()})
    process = other.spawn("router")
    try:
        other.ready("router")
        yield other.url("router"), process
    finally:
        process.stop()


def test_a_key_is_asked_for_and_kept_in_memory_and_a_lost_router_is_noticed(service: Stack, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a-key-of-a-client")

    async def main(url: str, router: Process) -> None:
        async with opened(url, tmp_path) as page:
            await page.until("document.querySelector('#state').textContent === 'Key needed'")
            await option(page, "key", "a-key-of-a-client")
            await page.until(READY)
            await option(page, "tokens", "5")
            await page.type("Hello")
            await page.press("Enter")
            await page.until(f"{PROGRESS} === 'Done.'")
            kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
            assert "a-key" not in await page.eval(kept)
            # A browser notes each 401 in its console.
            assert "401" in await page.problem() and all("401" in problem for problem in page.problems)
            router.kill()
            await page.until("document.querySelector('#state').textContent === 'No contact'")
            await page.type("Hello?")
            await page.press("Enter")
            assert "cannot be reached" in await page.until("document.querySelector('[role=alert]')?.textContent")

    with another_router(service, tmp_path, "--api-key-file", str(key)) as (url, router):
        asyncio.run(main(url, router))


def test_a_tenant_chats_and_sees_nothing_of_the_load(service: Stack, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"tenants": [{"name": "one", "keys": ["a-key-of-tenant-one"]}]}))

    async def main(url: str) -> None:
        async with opened(url, tmp_path) as page:
            await option(page, "key", "a-key-of-tenant-one")
            await page.until(READY)
            # A router is ready with decode alone.
            await page.until("document.querySelector('aside').innerText.includes('Direct · TCP')")
            shown = await page.eval("document.querySelector('aside').innerText")
            assert "1 of 1 ready" in shown
            assert not [word for word in ("tokens/s", "running", "queued", "KV", "now") if word in shown], shown
            await option(page, "tokens", "5")
            await page.type("Hello")
            await page.press("Enter")
            await page.until(f"{PROGRESS} === 'Done.'")
            assert all("401" in problem for problem in page.problems), page.problems

    with another_router(service, tmp_path, "--tenants-file", str(tenants)) as (url, _):
        asyncio.run(main(url))
