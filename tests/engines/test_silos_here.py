"""Silos of one slot whose work is done in one call: which they are, and what an error costs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from toy import SCHEMA, Said, Say

from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Answering, InSteps, Missing, Reason, answered, no_phase
from moretta.engines import silos_here
from moretta.engines.silos_here import SLOT, SilosHere, slots_of
from moretta.errors import MisuseError, ParameterError, PeerError, SumSpent

NOW = Stamp("run", 1, 0)
LEAST = 3


@dataclass
class Doubling:
    """Doubles a number, and notes with whom."""

    client: Stepping
    key: Hashable | None
    least: int = LEAST

    def alone(self) -> int:
        self.client.calls.append([self.client.name])
        if self.client.fault is not None:
            raise self.client.fault
        return 2 * self.client.number

    def together(self, works: Sequence[Doubling]) -> list[int]:
        self.client.calls.append([work.client.name for work in works])
        if any(work.client.fault is not None for work in works):
            raise RuntimeError("one of them")
        return [2 * work.client.number for work in works]


@dataclass
class Stepping:
    """Says twice its number, by two works of its key. calls: who was in each call of all clients."""

    name: str
    number: int
    key: Hashable | None
    calls: list[list[str]]
    fault: Exception | None = None
    phase: object = field(default=no_phase)

    @InSteps
    def answer(self, message: Message) -> Answering:
        doubled = yield Doubling(self, self.key)
        assert (yield Doubling(self, self.key)) == doubled
        return Said(stamp=message.stamp, number=doubled)


def clients_of(keys: Sequence[Hashable | None], calls: list[list[str]]) -> dict[str, Any]:  # `Stepping` without state
    return {f"s{n}": Stepping(f"s{n}", n, key, calls) for n, key in enumerate(keys)}


def said(here: SilosHere, silos: Sequence[str]) -> dict[str, object]:
    answers = here.answers({silo: Say(stamp=NOW) for silo in silos})
    return {silo: one.answer.number if isinstance(one.answer, Said) else one.answer for silo, one in answers.items()}


def groups_of(keys: Sequence[Hashable | None], asked: Sequence[str]) -> Iterator[list[str]]:
    """Yield who is to be in one call, from order, keys and who is asked alone."""
    names = [f"s{n}" for n in range(len(keys))]
    key_of = dict(zip(names, keys, strict=True))
    for slot in slots_of(names):
        for key in dict.fromkeys(keys):
            alike = [silo for silo in slot if silo in asked and key_of[silo] == key]
            yield from [alike] if key is not None and len(alike) >= LEAST else [[silo] for silo in alike]


@pytest.mark.parametrize("count", [0, 1, SLOT, SLOT + 1, 3 * SLOT - 1, 100])
def test_slots_are_consecutive_and_even(count: int) -> None:
    names = [str(n) for n in range(count)]
    slots = slots_of(names)
    sizes = [len(slot) for slot in slots]
    assert [name for slot in slots for name in slot] == names
    assert len(slots) == -(-count // SLOT)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_who_is_in_one_call_follows_from_order_and_keys(seed: int) -> None:
    random = np.random.default_rng(seed)
    keys = [[None, "a", "b"][n] for n in random.integers(0, 3, random.integers(1, 70))]
    asked = [f"s{n}" for n in random.permutation(len(keys)) if random.random() < 0.8]
    calls: list[list[str]] = []
    clients = clients_of(keys, calls)
    assert said(SilosHere(clients), asked) == {silo: 2 * clients[silo].number for silo in asked}
    wanted = sorted(2 * list(groups_of(keys, asked)))
    assert sorted(calls) == wanted

    calls.clear()  # two processes, each with every other slot
    slots = slots_of(list(clients))
    for mine in (slots[::2], slots[1::2]):
        some = {silo: clients[silo] for slot in mine for silo in slot}
        said(SilosHere(some, slots=mine), [silo for silo in asked if silo in some])
    assert sorted(calls) == wanted


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (ParameterError("its rows"), Reason.BAD_INPUT),
        (MisuseError("not now"), Reason.REFUSED),
        (ZeroDivisionError("0"), Reason.FAILED),
        (StopIteration("odd"), Reason.FAILED),
    ],
)
def test_an_error_costs_only_its_silo(fault: Exception, reason: Reason) -> None:
    clients = clients_of(["a"] * 6, [])
    clients["s2"].fault = fault
    found = said(SilosHere(clients), list(clients))
    missing = found.pop("s2")
    assert isinstance(missing, Missing)
    assert missing.reason is reason
    assert found == {silo: 2 * clients[silo].number for silo in clients if silo != "s2"}


def test_an_answer_that_cannot_be_kept_costs_only_its_silo() -> None:
    def kept(answer: Message) -> Message:
        if isinstance(answer, Said) and answer.number == 4:
            raise PeerError("its numbers are not finite any more")
        return answer

    clients = clients_of(["a"] * 6, [])
    found = said(SilosHere(clients, kept=kept), list(clients))
    assert isinstance(found.pop("s2"), Missing)
    assert list(found) == ["s0", "s1", "s3", "s4", "s5"]


def test_a_silo_that_helped_to_open_another_sum_says_so() -> None:
    clients = clients_of(["a"] * 4, [])
    clients["s1"].fault = SumSpent(1, ("s0",), False)
    answers = SilosHere(clients).answers({silo: Say(stamp=NOW) for silo in clients})
    assert [type(one.answer).__name__ for one in answers.values()] == ["Said", "Spent", "Said", "Said"]


def test_with_a_codec_each_is_asked_by_itself() -> None:
    calls: list[list[str]] = []
    clients = clients_of(["a"] * 5, calls)
    said(SilosHere(clients, Codec(SCHEMA)), ["s3", "s1", "s2", "s0"])
    assert calls == [[name] for name in ("s3", "s1", "s2", "s0") for _ in range(2)]


def test_ctrl_c_in_a_shared_call_is_nobodys_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Doubling, works: Sequence[Doubling]) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Doubling, "together", interrupt)
    clients = clients_of(["a"] * 4, [])
    with pytest.raises(KeyboardInterrupt):
        said(SilosHere(clients), list(clients))


def test_seconds_of_a_shared_call_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(silos_here.time, "perf_counter", lambda: float(next(clock)))
    clients = clients_of(["a"] * 4, [])
    answers = SilosHere(clients).answers({silo: Say(stamp=NOW) for silo in clients})
    # three stretches of a second of its own, and a quarter of each of two calls
    assert {one.seconds for one in answers.values()} == {3.5}


def test_whoever_replaces_answer_replaces_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    clients = clients_of(["a"] * 4, calls)
    inner = clients["s0"].answer
    monkeypatch.setattr(clients["s0"], "answer", lambda message: inner(message))
    assert said(SilosHere(clients), list(clients)) == {f"s{n}": 2 * n for n in range(4)}
    assert calls == [["s0"], ["s0"], ["s1", "s2", "s3"], ["s1", "s2", "s3"]]
    last = answered(clients["s3"], Say(stamp=NOW))
    assert isinstance(last, Said)
    assert last.number == 6
