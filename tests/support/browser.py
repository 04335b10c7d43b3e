"""A headless Chromium, driven over the DevTools protocol: https://chromedevtools.github.io/devtools-protocol/.

A websocket client is all that this takes, and aiohttp has one; the browser is the system's (`.ci/browser` installs it).
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

DEADLINE_S = 30.0
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}


def browser_path() -> str:
    """Where Chromium is. Without one a test is skipped; ISTHMUS_REQUIRE_BROWSER makes that a failure."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    problem = "no chromium on PATH: run .ci/browser (Debian, as root), or install one"
    if os.environ.get("ISTHMUS_REQUIRE_BROWSER"):
        pytest.fail(problem)
    pytest.skip(problem)


class Page:
    """One tab. `problems` collects what its console says of errors, warnings and broken policies."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._session = ""
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def open(self) -> None:
        """A new tab, with what is needed to see its problems."""
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; AssertionError with what it complains of."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        call = {"id": number, "method": method, "params": params}
        await self._socket.send_json(call | ({"sessionId": self._session} if self._session else {}))
        async with asyncio.timeout(DEADLINE_S):
            found = await answer
        assert "error" not in found, f"{method}: {found['error']}"
        result: dict[str, Any] = found["result"]
        return result

    async def go(self, url: str) -> None:
        """Load a page, until its scripts have run."""
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def look(self, width: int, height: int, *, dark: bool = False, mobile: bool = False) -> None:
        """The size of the window, and what the system prefers."""
        scale = 2 if mobile else 1
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def eval(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        done = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, f"{expression}: {done['exceptionDetails']}"
        return done["result"].get("value")

    async def until(self, expression: str, deadline_s: float = DEADLINE_S) -> Any:
        """The first value of an expression that is true; AssertionError with the page's text when none is in time."""
        end = asyncio.get_running_loop().time() + deadline_s
        while not (value := await self.eval(expression)):
            if asyncio.get_running_loop().time() > end:
                text = await self.eval("document.body.innerText")
                raise AssertionError(f"{expression} stayed {value!r}; problems {self.problems}; the page:\n{text}")
            await asyncio.sleep(0.02)
        return value

    async def problem(self) -> str:
        """The first problem that nobody has asked for, taken away. The browser tells of it in its own time."""
        end = asyncio.get_running_loop().time() + DEADLINE_S
        while not self.problems:
            assert asyncio.get_running_loop().time() < end, "the browser complains of nothing"
            await asyncio.sleep(0.02)
        return self.problems.pop(0)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """A key, as from a keyboard."""
        text = {"Enter": "\r", " ": " "}.get(key)
        event = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": _KEYS[key]}
        modifiers = 8 if shift else 0
        down = {"type": "keyDown" if text else "rawKeyDown", **({"text": text} if text else {})}
        await self.send("Input.dispatchKeyEvent", **down, **event, modifiers=modifiers)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **event, modifiers=modifiers)

    async def type(self, text: str) -> None:
        """Text into what has the focus."""
        await self.send("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        """The middle of an element, which must be in sight."""
        box = await self.eval(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2, b.width]; })()"
        )
        assert box[2] > 0, f"{selector} is not to be seen"
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    async def screenshot(self) -> bytes:
        """What is in sight, as PNG."""
        return base64.b64decode((await self.send("Page.captureScreenshot", format="png"))["data"])

    async def close(self) -> None:
        """Stop listening."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if (answer := self._answers.pop(event.get("id", 0), None)) is not None:
                answer.set_result(event)
                continue
            params = event.get("params", {})
            match event["method"]:
                case "Runtime.exceptionThrown":
                    self.problems.append(str(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                    self.problems.append(str([a.get("value", a) for a in params["args"]]))
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    entry = params["entry"]
                    self.problems.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")


@asynccontextmanager
async def browser(tmp: Path) -> AsyncIterator[Page]:
    """A tab of a browser of its own, with an empty profile below `tmp`."""
    flags = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={tmp / 'profile'}", "--disable-gpu"]
    flags += ["--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage", "--hide-scrollbars"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # its sandbox refuses root
    process = await asyncio.create_subprocess_exec(
        browser_path(), *flags, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    said: list[str] = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not (said and said[-1].startswith("DevTools listening on ")):
                line = await process.stderr.readline()
                assert line, "the browser ended:\n" + "".join(said)
                said.append(line.decode())
        drain = asyncio.create_task(process.stderr.read())
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(said[-1].removeprefix("DevTools listening on ").strip(), max_msg_size=0) as socket,
            ):
                page = Page(socket)
                await page.open()
                try:
                    yield page
                finally:
                    await page.close()
        finally:
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            await process.wait()
