"""A round's line, and what the lines of a run add up to."""

from __future__ import annotations

from typing import Any

import pytest

from moretta.contract.roles import Report
from moretta.engines.driver import DroppedSilo, RoundEnd
from moretta.run.record import (
    KEY_TAGS,
    PHASES,
    SET_UP_TAGS,
    UNMASKING_TAGS,
    bytes_of,
    line_of,
    total_bytes,
    total_seconds,
)

KEY, UNMASKING, SET_UP = min(KEY_TAGS), min(UNMASKING_TAGS), min(SET_UP_TAGS)


def line(end: RoundEnd, peak: float | None = None, **traffic: int) -> dict[str, Any]:
    return line_of(end, {(way, "a/model"): size for way, size in traffic.items()}, {"update": 1.0}, peak, 2.0)


def test_bytes_go_by_what_they_are_for() -> None:
    traffic = {
        ("up", "a/model"): 90, ("down", "a/model"): 30, ("shares", "a/model"): 4,
        ("up", KEY): 1, ("down", UNMASKING): 2, ("up", SET_UP): 50, ("shares", SET_UP): 8,
    }  # fmt: skip
    assert bytes_of(traffic, 3) == {"up": 30.0, "down": 10.0, "secure_aggregation": 15.0, "set_up": 50.0}
    assert not any(bytes_of({}, 0).values())


def test_a_line_has_what_happened_and_nothing_that_did_not() -> None:
    end = RoundEnd(7, 0, ["north", "south"], Report({"loss": 0.5}), [])
    assert line(end, up=10) == {
        "round": 7, "attempt": 0, "loss": 0.5, "seconds": {"update": 1.0},
        "bytes": {"up": 5.0, "down": 0.0, "secure_aggregation": 0.0, "set_up": 0.0}, "dropped": [],
        "sums": [{"of": "no sum", "round": 7, "silos": ["north", "south"]}], "seconds_total": 2.0,
    }  # fmt: skip
    assert list(line(end)) == ["round", "attempt", "loss", "seconds", "bytes", "dropped", "sums", "seconds_total"]
    later = RoundEnd(7, 1, ["north"], Report({}), [DroppedSilo(7, "south", "late: ..")], take=2)
    assert line(later, peak=64.0).items() >= {"attempt": 1, "take": 2, "edge_peak_mib": 64.0}.items()
    assert line(later)["dropped"] == [{"round": 7, "silo": "south", "reason": "late: .."}]


def test_bytes_are_those_of_all_who_were_asked_in_the_round() -> None:
    """Who was missing before the first round, from the common statistics, was not asked in it."""
    gone = [
        DroppedSilo(0, "west", "late: .."),
        DroppedSilo(1, "south", "late: .."),
        DroppedSilo(1, "north", "late: .."),
    ]
    assert line(RoundEnd(1, 1, ["north"], Report({}), gone), up=10)["bytes"]["up"] == 5.0


def test_bytes_of_a_run_are_means_over_rounds_or_sums() -> None:
    rounds = [line(RoundEnd(number, 0, ["a"], Report({}), []), up=10 * number, down=4) for number in (1, 2)]
    rounds[0]["bytes"] |= {"secure_aggregation": 3.0, "set_up": 5.0}
    assert total_bytes(rounds) == {
        "up_per_silo_per_round": 15.0, "down_per_silo_per_round": 4.0, "secure_aggregation": 3.0, "set_up": 5.0,
    }  # fmt: skip


@pytest.mark.parametrize("private", [False, True])
def test_seconds_of_a_run_have_phases_unless_noise_hides_rows(private: bool) -> None:
    lines = [{"seconds": {} if private else {"update": 1.0}, "seconds_total": 3.0}] * 2
    found = total_seconds(lines)
    assert found["total"] == 6.0
    phases = dict.fromkeys(PHASES, 0.0) | {"update": 2.0}
    assert found == ({"total": 6.0} if private else {"total": 6.0, **phases})
