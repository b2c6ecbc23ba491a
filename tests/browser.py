"""Drives Debian's chromium over a pair of pipes, by the protocol of its developer tools: no driver is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60.0  # seconds, against hangs alone


class Browser:
    """A chromium without a window."""

    def __init__(self, profile: Path) -> None:
        program = next((found for name in NAMES if (found := shutil.which(name))), None)
        if program is None:
            pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        flags += [
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-dev-shm-usage",
        ]
        flags += [f"--user-data-dir={profile}", "about:blank"]
        move = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'  # the browser wants them there
        self._process = subprocess.Popen(
            ["bash", "-c", move, "browser", program, *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._unread = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, *, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {} if session is None else {"sessionId": session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._in], [], [], PATIENCE)[0]:
                raise TimeoutError(f"the browser has said nothing for {PATIENCE:g} s")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise EOFError("the browser has ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    @contextlib.contextmanager
    def page(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Page]:
        """Open a page, and close it at the end."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.look(width=width, height=height, dark=dark)
        page.open(url)
        try:
            yield page
        finally:
            self.call("Target.closeTarget", targetId=target)

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError, RuntimeError, TimeoutError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)


class Page:
    """An open page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, session=self._session, **parameters)

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The parameters of the events of these names so far."""
        self.run("0")  # what came before has been read then
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in mine if event["method"] in names]

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings on the console, and exceptions."""
        logged = [entry["entry"]["text"] for entry in self.events("Log.entryAdded")]
        said = [
            str(call["args"])
            for call in self.events("Runtime.consoleAPICalled")
            if call["type"] in ("error", "warning")
        ]
        return logged + said + [str(each["exceptionDetails"]) for each in self.events("Runtime.exceptionThrown")]

    @property
    def requests(self) -> list[str]:
        """The addresses that were asked for, other than the page's own and data inside it."""
        urls = [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]
        return [url for url in urls[1:] if not url.startswith("data:")]

    def look(self, *, width: int, height: int = 900, dark: bool = False, dots: int = 1) -> None:
        """Have a window of this size, and this scheme of colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=dots, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        for _ in range(3):  # a change of size is heard, then drawn in the next frame
            self.run("new Promise(requestAnimationFrame)")

    def run(self, script: str) -> Any:
        """The value of a script, or of the promise that it makes."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        self._until(lambda: bool(self.run(condition)), condition)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} is still not so after {PATIENCE:g} s")
            time.sleep(0.02)

    def press(self, key: str, text: str | None = None) -> None:
        given = {"key": key} if text is None else {"key": key, "text": text}
        self.call("Input.dispatchKeyEvent", type="keyDown", **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)
        self.settle()

    def screenshot(self, file: Path) -> Path:
        """A picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        made = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(made["data"]))
        return file

    def pdf(self, file: Path) -> Path:
        made = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        file.write_bytes(base64.b64decode(made["data"]))
        return file
