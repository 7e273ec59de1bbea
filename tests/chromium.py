"""A headless Chromium, driven over its DevTools pipe: no package is needed, and no port is open."""

import base64
import fcntl
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from typing import Any

# Chromium reads commands from descriptor 3 and answers on 4.
EXEC = "import os, sys; os.dup2({}, 3); os.dup2({}, 4); os.execv(sys.argv[1], sys.argv[1:])"
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)


class Chromium:
    """One page in a browser of its own, which ends with the `with` block."""

    def __init__(self, program: str, timeout: float = 60, size: tuple[int, int] = (1120, 1400)) -> None:
        self.timeout = timeout
        self.problems: list[str] = []  # what the page logged as an error, and exceptions that nothing caught
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        reads, self._write = os.pipe()
        self._read, writes = os.pipe()
        # far away from 3 and 4, so that neither is overwritten before it is copied
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 50) for fd in (reads, writes)]
        os.close(reads)
        os.close(writes)
        flags = [*FLAGS, f"--user-data-dir={self._folder.name}", f"--window-size={size[0]},{size[1]}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # it refuses to run as root otherwise
        self._process = subprocess.Popen(
            [sys.executable, "-c", EXEC.format(*theirs), program, *flags, "about:blank"],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in theirs:
            os.close(fd)
        self._received = b""
        self._number = 0
        self._session: str | None = None
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        end = time.monotonic() + self.timeout
        while True:
            answer = self._receive(end, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _receive(self, end: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{what}: no answer within {self.timeout} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError(f"{what}: the browser ended with {self._process.wait(10)}")
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, said = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.problems.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and said["type"] == "error":
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in said["args"]))

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === {url!r} && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression comes to in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", expression))
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Ask until the expression is true of the page."""
        end = time.monotonic() + self.timeout
        while not (value := self.value(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression}: not within {self.timeout} s; {self.problems}")
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        """A click of the mouse on the middle of an element."""
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        x, y = self.value(f"(() => {{ const b = {box}; return [b.x + b.width / 2, b.y + b.height / 2]; }})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Text from the keyboard, where the cursor is."""
        self.call("Input.insertText", text=text)

    def prefer(self, scheme: str) -> None:
        """Whether the reader prefers "light" or "dark" pages."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, whole: bool = True) -> bytes:
        """The page as PNG: all of it, or what is in view."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])
