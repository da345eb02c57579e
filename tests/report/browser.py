"""Headless Chromium over its debugging pipe: no driver, no port, no further package.

`python tests/report/browser.py docs/images demo/report.html` takes the pictures of README.md and docs/guide.md.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


def find():
    """The browser's program, if one is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page in a browser of its own; commands go by pipe 3, answers by pipe 4, ended by null bytes."""

    def __init__(self, program):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self.commands = os.pipe()
        self.replies, replies = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={self.profile.name}", "about:blank"]
        script = f'exec "$@" 3<&{commands} 4>&{replies}'
        pipes = {"pass_fds": (commands, replies), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(["bash", "-c", script, "bash", *command], **pipes)
        os.close(commands)
        os.close(replies)
        self.buffer, self.sent, self.events, self.session = b"", 0, [], {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        os.close(self.commands)  # the browser ends when its pipe does
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.replies)
        self.profile.cleanup()

    def _message(self):
        while b"\0" not in self.buffer:
            part = os.read(self.replies, 1 << 16)
            if not part:
                raise RuntimeError(f"the browser ended with status {self.process.poll()}")
            self.buffer += part
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        """One command; events that come before its answer are kept in `events`."""
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params} | self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self.sent:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page, width, height=900, *, dark=False):
        """Load a page from disk at a width in CSS pixels and wait until it is there."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def evaluate(self, expression):
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def complaints(self):
        """Everything the page wrote to the console since it was opened, and every uncaught error."""
        self.call("Runtime.evaluate", expression="1")  # whatever was on its way has now arrived
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event) for event in self.events if event.get("method") in kinds]

    def screenshot(self, file):
        """A PNG of what the window shows."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return file


def take_pictures(images, page):
    """The upper part of the page on a desk; three views of it on a phone at night, side by side."""
    from PIL import Image

    with Browser(find()) as browser:
        browser.open(page, 1280)
        below = browser.evaluate("document.querySelector('.output:nth-child(3)').getBoundingClientRect().bottom")
        browser.open(page, 1280, round(below) + 8)
        wide = browser.screenshot(images / "report-wide.png")
        Image.open(wide).convert("RGB").quantize(256).save(wide, optimize=True)
        phone, sheet = images / "report-phone.png", Image.new("RGB", (3 * 390 + 2 * 24, 844), "#808890")
        for index, place in enumerate(("body", "#examples", "#training")):
            browser.open(page, 390, 844, dark=True)
            browser.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
            browser.evaluate("document.querySelector('#training details').open = true")
            browser.evaluate(f"document.querySelector('{place}').scrollIntoView()")
            sheet.paste(Image.open(browser.screenshot(phone)).convert("RGB"), (index * 414, 0))
        sheet.save(phone, optimize=True)


if __name__ == "__main__":
    take_pictures(*map(Path, sys.argv[1:]))
