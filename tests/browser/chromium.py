"""Debian's Chromium without a window, driven over its DevTools protocol: as much of it as the tests need."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

__all__ = ["Chromium", "Tab", "chromium"]

PROGRAM = "chromium"
_PATIENCE = 30.0  # seconds; a busy machine is slow, a broken page is not there later either


class Tab:
    """One page. `complaints` collects what its console and its scripts complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._listening = asyncio.create_task(self._listen())

    async def begin(self) -> None:
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(self._answers[number], _PATIENCE)

    async def open(self, url: str) -> None:
        """Go there, and wait until it is loaded."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), _PATIENCE)

    async def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        done = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise AssertionError(f"{script}: {json.dumps(done['exceptionDetails'])[:600]}")
        return done["result"].get("value")

    async def until(self, script: str, fits: Callable[[Any], bool] = bool) -> Any:
        """The value of the expression once it fits."""
        value = None
        last = time.monotonic() + _PATIENCE
        while time.monotonic() < last:
            value = await self.run(script)
            if fits(value):
                return value
            await asyncio.sleep(0.05)
        raise AssertionError(f"{script} is {value!r}; the page complained of {self.complaints}")

    async def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Another window size and colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def press(self, key: str, text: str = "") -> None:
        """A key as a user presses it, such as "ArrowRight", or "j" with its text."""
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def screenshot(self) -> bytes:
        """What the window shows, as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])

    async def close(self) -> None:
        self._listening.cancel()
        await self._socket.close()

    async def _listen(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                answer = self._answers.pop(data["id"])
                if "error" in data:
                    answer.set_exception(RuntimeError(str(data["error"])))
                else:
                    answer.set_result(data["result"])
            else:
                self._heard(data["method"], data["params"])

    def _heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value")) for one in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


class Chromium:
    """A running browser."""

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self._address = address
        self._session = session

    @contextlib.asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """A new page, gone at the end."""
        async with self._session.put(f"{self._address}/json/new?about:blank") as response:
            page = await response.json(content_type=None)
        async with self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            tab = Tab(socket)
            await tab.begin()
            yield tab
            await tab.close()
        async with self._session.get(f"{self._address}/json/close/{page['id']}"):
            pass


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Chromium]:
    """A browser with a profile of its own; gone at the end."""
    program = shutil.which(PROGRAM)
    assert program, "chromium is missing: `make test-browser` installs Debian's package"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                yield Chromium(f"http://127.0.0.1:{port}", session)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _port(file: Path) -> int:
    """Of the DevTools, which the browser writes down when it is ready."""
    last = time.monotonic() + _PATIENCE
    while time.monotonic() < last:
        if (text := await asyncio.to_thread(_text, file)).count("\n"):
            return int(text.splitlines()[0])
        await asyncio.sleep(0.05)
    raise AssertionError("chromium does not start")


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""
