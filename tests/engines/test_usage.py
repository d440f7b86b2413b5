"""Every second is counted once, for the innermost open phase; what was freed goes back when it is asked for."""

import platform
import subprocess
import sys

import pytest

from moretta.engines import usage
from moretta.engines.usage import Clock


class Time:
    """A clock on the wall that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(usage, "time", time)
    return time


def test_nested_phases_never_count_a_second_twice(time: Time) -> None:
    clock = Clock()
    time.now += 1000  # outside every phase: nobody's
    with clock.phase("outer"):
        time.now += 1
        with clock.phase("inner"):
            time.now += 10
            with clock.phase("outer"):  # the same name once more, further in
                time.now += 2
        time.now += 4
    time.now += 1000
    with clock.phase("inner"):
        time.now += 20
    assert clock.take() == {"outer": 7.0, "inner": 30.0}
    assert clock.take() == {}


def test_a_phase_that_raises_is_closed(time: Time) -> None:
    clock = Clock()

    def work() -> None:
        with clock.phase("outer"), clock.phase("inner"):
            time.now += 3
            raise ValueError("in the phase")

    with pytest.raises(ValueError, match="in the phase"):
        work()
    time.now += 50
    assert clock.take() == {"outer": 0.0, "inner": 3.0}


def test_what_is_taken_in_the_middle_of_a_phase_is_not_taken_again(time: Time) -> None:
    clock = Clock()
    with clock.phase("outer"):
        time.now += 1
        with clock.phase("inner"):
            time.now += 2
        first = clock.take()
        time.now += 4
    second = clock.take()
    assert {name: first.get(name, 0) + second.get(name, 0) for name in ("outer", "inner")} == {"outer": 5, "inner": 2}


HOLED = """
from moretta.engines.usage import give_back_heap, status

pieces = [b"x" * 60_000 for _ in range(1000)]  # too small for mappings of their own, so they lie on the heap
full, last = status("RssAnon"), pieces[-1]
del pieces  # the heap's end is in use, so it stays as long as it was
kept = status("RssAnon")
give_back_heap()
print(full - kept, full - status("RssAnon"))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the C library of GNU can be asked")
def test_what_lies_free_within_the_heap_is_given_back() -> None:
    told = subprocess.run([sys.executable, "-c", HOLED], capture_output=True, text=True, check=True)
    by_itself, asked = map(float, told.stdout.split())
    assert by_itself < 10 < 50 < asked  # MiB, of 57
