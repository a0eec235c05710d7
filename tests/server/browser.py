"""Headless Chromium, driven by its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
from contextlib import asynccontextmanager

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page. `complaints`: what its console says of errors, and exceptions that nobody caught."""

    def __init__(self, socket):
        self.complaints = []
        self._socket = socket
        self._number = 0

    async def command(self, method, **params):
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            if message["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(message["params"])

    async def open(self, url, width, height):
        """Loads a page; returns when its scripts have run."""
        for domain in ("Runtime", "Log", "Page"):
            await self.command(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.command("Emulation.setDeviceMetricsOverride", **size)
        await self.command("Page.navigate", url=url)
        await self.until("location.href != 'about:blank' && document.readyState == 'complete'")

    async def get(self, expression):
        """The value of a JavaScript expression."""
        answer = await self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, condition, seconds=60):
        for _ in range(seconds * 20):
            if await self.get(condition):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"not within {seconds} s: {condition}")

    async def screenshot(self, path):
        path.write_bytes(base64.b64decode((await self.command("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def running_browser(profile):
    """A browser of its own; `profile` is an empty folder."""
    options = ["--headless=new", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")
    process = await asyncio.create_subprocess_exec(CHROMIUM, *options, "about:blank", stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(60):
            while not (found := re.search(rb"ws://([^/]+)/", await process.stderr.readline())):
                assert process.returncode is None
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{found[1].decode()}/json") as response:
                [page] = [one for one in await response.json() if one["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Browser(socket)
    finally:
        process.terminate()
        await process.wait()
