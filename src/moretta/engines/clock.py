"""The engine's clock: seconds by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Clock:
    """Charges time to the innermost open phase, so that phases never count a second twice."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a stretch of work."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def charge(self, name: str, seconds: float) -> None:
        """Count seconds that another process spent in a phase, where this one waited for it, as that phase's."""
        self._charge()
        self._seconds[name] += seconds
        if self._open:
            waiting = self._open[-1]
            self._seconds[waiting] -= min(seconds, self._seconds[waiting])  # what it says need not be true

    def take(self) -> Mapping[str, float]:
        """Return the seconds by phase since the last call, and begin again."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
