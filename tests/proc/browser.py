"""A headless Chromium, driven over a pipe with its DevTools protocol.

In: addresses to open, sizes of the window. Out: what JavaScript says about the page, pictures of it. Every wait has a
deadline. Known limit: one page at a time.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Browser", "why_none"]

ANSWER_S = 90.0  # only a hang takes this long
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)


def why_none() -> str:
    return "" if shutil.which("chromium") else "Chromium is not installed (Debian: chromium)"


class Browser:
    """Use as a context manager."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="p2p-chromium-", ignore_cleanup_errors=True)
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # Chromium looks for them at 3 and 4, which may be taken by these very pipes until they are out of the way.
        one, two = max(commands, answers, 4) + 1, max(commands, answers, 4) + 2
        script = f'exec {one}<&{commands} {two}>&{answers}; exec 3<&{one} 4>&{two} {one}<&- {two}>&-; exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", *OPTIONS, f"--user-data-dir={self._folder.name}"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._number = 0
        self._buffer = b""
        self._session: dict[str, str] = {}

    def __enter__(self) -> Browser:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._commands)  # Chromium ends with its pipe
        try:
            self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        self._folder.cleanup()

    def open(self, url: str, width: int = 1000, height: int = 800, *, phone: bool = False, dark: bool = False) -> None:
        """Returns once the page has been loaded."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        failed = self._call("Page.navigate", url=url).get("errorText")
        assert not failed, f"{url}: {failed}"
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Until it is true; returns its value."""
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            value = self.evaluate(expression)
            if value:
                return value
            time.sleep(0.05)
        text = self.evaluate("document.body.innerText")
        raise AssertionError(f"{expression} did not become true within {ANSWER_S:.0f} s; the page says:\n{text}")

    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def screenshot(self, path: Path) -> None:
        """Of the whole page, as PNG."""
        width, height = self.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        picture = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            more = os.read(self._answers, 1 << 20)
            assert more, "Chromium has ended"
            self._buffer += more
        raw, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(raw)
        return found
