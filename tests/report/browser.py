"""A headless Chromium, driven by its DevTools protocol over a pipe; what tests of pages in a browser stand on."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_BROWSER = "no chromium, chromium-browser or google-chrome is installed"
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
)
# A browser's own end of the two pipes is 3 and 4.
LAUNCH = """
import fcntl, os, sys
for pipe, number in [(fcntl.fcntl(int(word), fcntl.F_DUPFD, 10), at) for word, at in zip(sys.argv[1:3], (3, 4))]:
    os.dup2(pipe, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
KEYS = {"Tab": 9, "Enter": 13, " ": 32}

# The least contrast of any text against what is painted behind it, and that text.
CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const parse = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const found = parse(getComputedStyle(one).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let least = [99, ''], texts = 0;
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || !one.checkVisibility() || ['STYLE', 'SCRIPT', 'NOSCRIPT'].includes(one.tagName)) continue;
    const style = getComputedStyle(one);
    const ink = parse(one instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(ink), light(ground(one))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    texts += 1;
    if (ratio < least[0]) least = [ratio, text];
  }
  return { ratio: least[0], text: least[1], texts };
})()
"""


class Page:
    """One page in a browser. complaints: what its console and its security policy have said."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest, self._number, self._session = to, back, b"", 0, ""
        self.complaints: list[str] = []
        self._loads = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        told = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            told["sessionId"] = self._session
        os.write(self._to, json.dumps(told).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._number:
                assert "error" not in said, said["error"]
                return said["result"]  # type: ignore[no-any-return]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._back, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        said: dict[str, Any] = json.loads(text)
        if said.get("method") == "Page.loadEventFired":
            self._loads += 1
        elif said.get("method") == "Log.entryAdded":
            self.complaints.append(said["params"]["entry"]["text"])
        elif said.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(said["params"]["exceptionDetails"]))
        elif said.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(said["params"]["args"]))
        return said

    def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        self._loaded("Page.navigate", url=address)

    def reload(self) -> None:
        self._loaded("Page.reload")

    def _loaded(self, method: str, **parameters: Any) -> None:
        before = self._loads
        self.call(method, **parameters)
        while self._loads == before:
            self._next()

    def ask(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 30.0) -> Any:
        """Return what a script gives, once that is true."""
        until = time.monotonic() + seconds
        while not (found := self.ask(script)):
            assert time.monotonic() < until, f"{script}: {self.ask('document.body.innerText')}"
            time.sleep(0.1)
        return found

    def press(self, key: str, *, shift: bool = False) -> None:
        text = {"Enter": "\r", " ": " "}.get(key, "")
        told = {"key": key, "code": {" ": "Space"}.get(key, key), "windowsVirtualKeyCode": KEYS[key]}
        told |= {"modifiers": 8 if shift else 0, **({"text": text} if text else {})}
        self.call("Input.dispatchKeyEvent", type="keyDown", **told)
        self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    def picture(self, path: Path) -> None:
        made = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(made["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Yield an empty page of a new browser, which ends with the block."""
    assert BROWSER is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    words = [BROWSER, *OPTIONS.split(), f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), *words],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(ours_out, ours_in)
    finally:
        os.close(ours_out)  # it ends with its pipe
        os.close(ours_in)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
