"""Drive a headless Chromium: open pages, evaluate expressions, and collect errors.

It speaks the DevTools protocol over a pipe, so that it needs no package and no port.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

__all__ = ["CHROMIUM", "MISSING", "Browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = "no Chromium is installed: `apt-get install chromium` gets it"

OPTIONS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Browser:
    """One tab; as a context manager, it leaves no process and no file."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.complaints: list[str] = []
        """The log entries, exceptions, dialogs, and network requests of the page."""
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._numbers = itertools.count(1)
        self._read = b""
        (client_in, browser_out), (browser_in, client_out) = os.pipe(), os.pipe()
        # Chromium reads requests from file 3 and answers on file 4.
        command = f'exec 3<&{browser_in} 4>&{browser_out}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "_", CHROMIUM, *OPTIONS, f"--user-data-dir={self._home.name}"],
            pass_fds=(browser_in, browser_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_in)
        os.close(browser_out)
        self._in, self._out = client_in, client_out
        self._session: str | None = None
        self._allowed = "file:"

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._home.cleanup()

    def open(self, page: Path | str, *, width: int = 1100, dark: bool = False) -> None:
        """Show *page*, a file or the address of a server, and wait until its script has run."""
        url = page if isinstance(page, str) else page.as_uri()
        self._allowed = url
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=1500,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.ask("delete document.documentElement.dataset.ready")  # the browser may show it longer
        self.call("Page.navigate", url=url)
        self.until(
            f"location.href === {json.dumps(url)} && document.readyState === 'complete' "
            "&& document.documentElement.dataset.ready"
        )

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; the page's security policy doesn't apply."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Evaluate *expression* every 10 ms until it's true."""
        for _ in range(3000):
            if self.ask(f"Boolean({expression})"):
                return
            time.sleep(0.01)  # a promise would fail if the browser opened the next page meanwhile
        raise AssertionError(f"it never became true: {expression}")

    def press(self, key: str) -> None:
        """Press a key, as a person does."""
        codes = {"Enter": 13, "ArrowRight": 39, "ArrowLeft": 37}
        event: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Type *text* where the focus is."""
        self.call("Input.insertText", text=text)

    def screenshot(self) -> bytes:
        """Return the whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    def printed(self) -> bytes:
        """Return the page as PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send the browser a request, and return its answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            received = self._next()
            if received.get("id") == number:
                assert "error" not in received, (method, received["error"])
                return received["result"]
            self._note_complaint(received)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has ended"
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def _note_complaint(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(event["params"]["exceptionDetails"])[:2000])
            case "Runtime.consoleAPICalled" | "Log.entryAdded":
                self.complaints.append(json.dumps(event["params"])[:2000])
            case "Page.javascriptDialogOpening":
                self.complaints.append("a dialog was opened")
            case "Network.requestWillBeSent":
                url = event["params"]["request"]["url"]
                if not url.startswith(("file:", "about:", self._allowed)):
                    self.complaints.append(f"it asked for {url}")
