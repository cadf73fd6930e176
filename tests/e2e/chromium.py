"""Drives a headless Chromium over its debugging pipe (Chrome DevTools Protocol); no packages needed."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]  # fmt: skip


class Browser:
    """One browser with one tab. Use as a context manager."""

    def __init__(self, *, width=1440, height=1300, dark=False):
        self.size, self.dark = (width, height), dark
        self.console: list[str] = []
        self.requests: list[str] = []
        self._next = 0
        self._buffer = b""

    def __enter__(self):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        child_in, self._out = os.pipe()
        self._in, child_out = os.pipe()
        os.set_inheritable(child_in, True)
        os.set_inheritable(child_out, True)
        command = f'exec "$@" 3<&{child_in} 4>&{child_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "chromium", str(BINARY), *FLAGS, f"--user-data-dir={self._profile.name}"],
            pass_fds=(child_in, child_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(child_in)
        os.close(child_out)
        os.set_blocking(self._in, False)
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=self.size[0], height=self.size[1], deviceScaleFactor=1, mobile=False
        )
        scheme = "dark" if self.dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        return self

    def __exit__(self, *_):
        os.close(self._out)  # the browser ends when its pipe closes
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method, **params):
        """One protocol command; its result."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _read(self, timeout=60.0):
        end = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            if time.monotonic() > end or self._process.poll() is not None:
                raise TimeoutError("the browser does not answer")
            try:
                self._buffer += os.read(self._in, 1 << 20)
            except BlockingIOError:
                time.sleep(0.002)
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.console.append(message["params"]["exceptionDetails"].get("exception", {}).get("description", "exception"))
            case "Log.entryAdded":
                self.console.append(message["params"]["entry"]["text"])
            case "Runtime.consoleAPICalled":
                self.console.append(str([arg.get("value") for arg in message["params"]["args"]]))
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
        return message

    def open(self, path):
        """Opens a file and waits until the page has read its log."""
        self.call("Page.navigate", url=path.as_uri())
        self.until("document.readyState === 'complete' && document.body.dataset.ready === 'true'")

    def eval(self, expression):
        """The JSON value of an expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression, timeout=60.0):
        """Waits for an expression to be true."""
        end = time.monotonic() + timeout
        while not self.eval(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {expression}; console: {self.console}")
            time.sleep(0.02)

    def key(self, key, *, code="", shift=False, number=0):
        """A key, pressed and released."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code or key, modifiers=8 if shift else 0,
                      windowsVirtualKeyCode=number)  # fmt: skip

    def mouse(self, kind, x, y, *, down=False):
        """A mouse event: "mouseMoved", "mousePressed" or "mouseReleased"."""
        button = "left" if down or kind != "mouseMoved" else "none"
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=1 if down else 0, clickCount=1)

    def click(self, x, y):
        """A click."""
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, down=True)
        self.mouse("mouseReleased", x, y)

    def box(self, selector):
        """``(x, y, width, height)`` of an element in the window."""
        return self.eval(f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                         "return [b.x, b.y, b.width, b.height]; })()")  # fmt: skip

    def text(self, selector):
        """The text of an element."""
        return self.eval(f"document.querySelector({json.dumps(selector)}).textContent")

    def screenshot(self, path):
        """The window, as a PNG file."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
