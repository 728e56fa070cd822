"""A page in a headless Chromium: what it says on its console, what is in it, and how it looks.

Chromium is driven through two pipes (`--remote-debugging-pipe`), by JSON messages that end with a zero byte.
"""

from __future__ import annotations

import base64
import functools
import http.server
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
    "--remote-debugging-pipe",
)
SECONDS = 60.0


def executable() -> str | None:
    """The browser of this machine, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A tab of a browser that was started.

    Attributes:
        errors: what pages reported since the last `open`: errors on the console, exceptions, failed requests.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._number = 0
        self._buffer = b""
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    _session: str | None = None

    def open(self, address: str) -> None:
        """Shows a page. It may go on loading; see `wait_for`."""
        self.errors.clear()
        self._call("Page.navigate", url=address)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = SECONDS) -> Any:
        """The value of the expression as soon as it is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(AssertionError):  # it may not be there yet
                if value := self.evaluate(expression):
                    return value
            time.sleep(0.1)
        raise AssertionError(f"{expression} was not true in {seconds} s; errors: {self.errors}")

    def screenshot(self, file: Path) -> None:
        """Writes a picture (PNG) of the whole page."""
        picture = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(picture["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._receive, 2**16)
            assert piece, "the browser has ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            self.errors.append(f"console: {[each.get('value') for each in about['args']]}")
        elif event == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(f"exception: {details.get('exception', {}).get('description') or details['text']}")
        elif event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(f"log: {about['entry']['text']} {about['entry'].get('url', '')}")
        elif event == "Network.loadingFailed" and not about.get("canceled"):
            self.errors.append(f"request: {about['errorText']}")


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with an empty profile, which ends with the block."""
    path = executable()
    assert path is not None
    theirs_in, send = os.pipe()
    receive, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads descriptor 3 and writes descriptor 4.
        started = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}',
                "bash",
                path,
                *FLAGS,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        timer = threading.Timer(4 * SECONDS, started.kill)
        timer.start()
        try:
            yield Browser(send, receive)
        finally:
            timer.cancel()
            os.close(send)  # at which it ends by itself
            os.close(receive)
            with suppress(subprocess.TimeoutExpired):
                started.wait(5.0)
            started.kill()
            started.wait()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address under which the files of the folder are served, to this machine alone."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
