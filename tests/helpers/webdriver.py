"""A browser for tests: the few calls of the WebDriver protocol that they need, through Debian's
chromedriver and Python's own HTTP client."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "" if CHROMIUM and DRIVER else "needs a browser: apt install chromium chromium-driver"

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The protocol's own name for the reference to an element."""


class Browser:
    """Headless Chromium; a context, which ends what it has started."""

    def __init__(self, profile: Path) -> None:
        """profile: an empty folder of its own."""
        self._driver = subprocess.Popen(
            [str(DRIVER), "--port=0"], stdout=subprocess.PIPE, text=True
        )
        try:
            self._address = f"http://127.0.0.1:{self._port()}"
            options = {
                "binary": CHROMIUM,
                "args": [*_FLAGS, f"--user-data-dir={profile}"],
            }
            asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = self._send("POST", "", {"capabilities": {"alwaysMatch": asked}})
            self._address += f"/session/{answer['sessionId']}"
        except BaseException:
            self._end_driver()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._send("DELETE", "", None)  # ends Chromium
        finally:
            self._end_driver()

    def open(self, file: Path, hash: str = "") -> None:
        self.post("/url", url=file.as_uri() + hash)

    def resize(self, width: int, height: int) -> None:
        """The page's own size, which may be narrower than a window can be."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body returns in the page."""
        return self.post("/execute/sync", script=script, args=list(arguments))

    def click(self, selector: str) -> None:
        """As a person does: what is out of sight or covered cannot be clicked."""
        self.post(f"/element/{self._find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self.post(f"/element/{self._find(selector)}/value", text=text)

    def log(self) -> list[str]:
        """What the console has said since the last call."""
        return [
            f"{line['level']}: {line['message']}" for line in self.post("/se/log", type="browser")
        ]

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.post("/goog/cdp/execute", cmd=command, params=parameters)

    def post(self, path: str, **body: Any) -> Any:
        return self._send("POST", path, body)

    def _find(self, selector: str) -> str:
        return self.post("/element", using="css selector", value=selector)[_ELEMENT]

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        address = self._address + (path if "/session/" in self._address else "/session" + path)
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(f"{method} {path}: {error.read().decode()[:500]}") from None

    def _port(self) -> int:
        assert self._driver.stdout
        for line in self._driver.stdout:
            if "started successfully on port" in line:
                return int(line.rstrip().rstrip(".").split()[-1])
        raise RuntimeError("chromedriver has ended before it was ready")

    def _end_driver(self) -> None:
        self._driver.send_signal(signal.SIGTERM)
        self._driver.wait(timeout=20)
        if self._driver.stdout:
            self._driver.stdout.close()
