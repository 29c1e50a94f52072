"""Open a report in headless Chromium: fail on console errors, missing images and side scrolling.

    python tests/helpers/look_at_report.py OUT/report.html [SCREENSHOT_FOLDER]

Looks at it as a desktop (1200 px), a phone (360 px) and a phone in dark mode, through the DevTools
protocol on a pipe; needs `chromium` (or `chrome`) on PATH and nothing else.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VIEWS = {
    "desktop": {"width": 1200, "scheme": "light"},
    "phone": {"width": 360, "scheme": "light"},
    "phone-dark": {"width": 360, "scheme": "dark"},
}
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Images that did not decode, SVGs that drew nothing, and what asks for the network.
_CHECK = """(() => {
  const faults = [];
  for (const image of document.images)
    if (!image.complete || image.naturalWidth === 0) faults.push('image ' + image.src.slice(0, 60));
  let drawn = 0;
  for (const svg of document.querySelectorAll('svg')) {
    if (getComputedStyle(svg.parentElement).display === 'none') continue;
    const box = svg.getBoundingClientRect();
    drawn += 1;
    if (box.width < 100 || box.height < 50 || svg.querySelectorAll('path').length === 0)
      faults.push('empty svg ' + svg.getAttribute('aria-label'));
  }
  if (drawn === 0 && document.images.length === 0) faults.push('no figure at all');
  const width = document.documentElement.scrollWidth;
  if (width > window.innerWidth) faults.push('page scrolls sideways: ' + width + ' px');
  for (const entry of performance.getEntriesByType('resource'))
    if (!entry.name.startsWith('data:')) faults.push('asked for ' + entry.name);
  return {faults, height: document.documentElement.scrollHeight};
})()"""


class Browser:
    """Commands to one page of a Chromium, and the events it sent meanwhile."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write = os.fdopen(write_fd, "wb", buffering=0)
        self._read = os.fdopen(read_fd, "rb", buffering=0)
        self._buffer = b""
        self._sent = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        answer = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def close(self) -> None:
        self._write.close()
        self._read.close()

    def wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._receive())

    def _receive(self) -> Any:
        while b"\0" not in self._buffer:
            chunk = self._read.read(1 << 16)
            if not chunk:
                raise RuntimeError("Chromium went away")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)


@contextmanager
def chromium(program: str) -> Iterator[Browser]:
    """A fresh Chromium that is gone afterwards."""
    to_child, from_us = os.pipe()
    to_us, from_child = os.pipe()
    profile = tempfile.mkdtemp()
    # The protocol is spoken on descriptors 3 and 4 of the child.
    shell = f'exec 3<&{to_child} 4>&{from_child}; exec "$@"'
    command = ["bash", "-c", shell, "-", program, *_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(command, pass_fds=(to_child, from_child), stderr=subprocess.DEVNULL)
    os.close(to_child)
    os.close(from_child)
    browser = Browser(from_us, to_us)
    try:
        yield browser
    finally:
        browser.close()
        process.terminate()
        process.wait(timeout=20)
        shutil.rmtree(profile, ignore_errors=True)


def look(browser: Browser, page: Path, view: str, shots: Path | None) -> list[str]:
    """Load the page in one view; return its faults."""
    width, scheme = VIEWS[view]["width"], VIEWS[view]["scheme"]
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.call("Emulation.setEmulatedMedia", features=media)
    size = {"width": width, "height": 800, "deviceScaleFactor": 2, "mobile": width < 500}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.events.clear()
    browser.call("Page.navigate", url=page.resolve().as_uri())
    browser.wait_for("Page.loadEventFired")
    answer = browser.call("Runtime.evaluate", expression=_CHECK, returnByValue=True)
    found = answer["result"]["value"]
    faults: list[str] = found["faults"]
    for event in browser.events:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            faults.append(f"exception {params['exceptionDetails']['text']}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            faults.append(f"console {params['type']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            faults.append(f"log {params['entry']['text']}")
        elif method == "Network.loadingFailed":
            faults.append(f"load failed: {params.get('errorText')}")
    if shots:
        clip = {"x": 0, "y": 0, "width": width, "height": min(found["height"], 6000), "scale": 1}
        image = browser.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        shots.mkdir(parents=True, exist_ok=True)
        (shots / f"{page.stem}-{view}.png").write_bytes(base64.b64decode(image["data"]))
    return faults


def find_chromium() -> str | None:
    """Path of a Chromium or Chrome on this machine."""
    names = ("chromium", "chrome", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        return 2
    program = find_chromium()
    if program is None:
        print("no chromium on PATH: apt-get install chromium")
        return 2
    page = Path(sys.argv[1])
    shots = Path(sys.argv[2]) if len(sys.argv) == 3 else None
    failed = False
    with chromium(program) as browser:
        browser.attach()
        for view in VIEWS:
            faults = look(browser, page, view, shots)
            failed |= bool(faults)
            print(f"{view}: {'ok' if not faults else '; '.join(faults)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
