"""Time and memory of a process: seconds by phase, and MiB (2^20 bytes), with a cap far above a limit."""

import contextlib
import ctypes
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

DONT_NEED = 4  # MADV_DONTNEED
HEADROOM = 64  # MiB above a limit in which an overrun is not stopped, but reported with a sufficient limit


_earlier = 0.0  # the highest peak before the last reset of the system's count


def peak_mib() -> float:
    """Return the largest resident memory of this process since it began."""
    peak = status("VmHWM")
    if peak is not None:
        return max(peak, _earlier)  # on Linux ru_maxrss includes the parent's peak, so it is the last resort
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def peak_of(work: Callable[[], object]) -> float:
    """Return the largest resident memory during some work, or since the start if the system cannot reset its count."""
    global _earlier
    earlier = peak_mib()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak
        _earlier = earlier
    work()
    peak = status("VmHWM")
    return peak_mib() if peak is None else peak


def cap(limit_mib: float) -> None:
    """Have the system refuse this process memory far above a limit, because a graph could request gigabytes.

    Reserved writable memory counts, used or not. The bound is the sum of the limit, the memory reserved by now and not
    resident (threads' stacks and heaps, some 90 MiB), and `HEADROOM`. If the reserved memory and `HEADROOM` are more,
    they are the bound. Only Linux bounds all of it.

    Args:
        limit_mib: The limit, in MiB.
    """
    reserved = status("VmData") or 0.0
    unused = max(0.0, reserved - (status("RssAnon") or 0.0))
    bound = int((max(limit_mib + unused, reserved) + HEADROOM) * 2**20)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (bound if hard < 0 else min(bound, hard), hard))


def give_back_code() -> None:
    """Release resident pages of programs and libraries that are unchanged from their files (Linux).

    Loading a library or a graph runs much code that is not needed again. Needed pages are read again, mostly from the
    system's own cache.
    """
    try:
        maps = Path("/proc/self/smaps").read_text().splitlines()
        advise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return
    start = length = 0
    for line in maps:
        head, *rest = line.split()
        if "-" in head and not head.endswith(":"):
            first, last = (int(number, 16) for number in head.split("-"))
            fixed = rest[0] in ("r-xp", "r--p") and rest[-1].startswith("/")
            start, length = first, last - first if fixed else 0
        elif head == "Anonymous:" and length and rest[0] == "0":  # no page was written to
            advise(ctypes.c_void_p(start), ctypes.c_size_t(length), DONT_NEED)


def give_back_heap() -> None:
    """Release freed pages of the heap, with GNU's C library.

    The library's own release covers little but the heap's end. This is for work that is done once and needs much
    memory.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl lacks it
        if trim is not None:
            trim(0)


def status(field: str) -> float | None:
    """Return a figure of /proc/self/status, or None without one (not Linux)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), None)


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
        """Count seconds of another process in a phase, instead of this process's wait for it."""
        self._charge()
        self._seconds[name] += seconds
        if self._open:
            waiting = self._open[-1]
            self._seconds[waiting] -= min(seconds, self._seconds[waiting])  # its report may be wrong

    def take(self) -> Mapping[str, float]:
        """Return the seconds by phase since the last call, and reset them."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
