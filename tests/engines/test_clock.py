"""The clock: every second is counted once, for the innermost open phase."""

import pytest

from moretta.engines import clock as clock_module
from moretta.engines.clock import Clock


class Time:
    """A clock on the wall that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock_module, "time", time)
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
