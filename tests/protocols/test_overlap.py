"""The comparison of silos' training rows with the server's test rows: what is refused, what is sent, and to whom."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import nn

from moretta import BAFFLE, CGD, Engine, Federation, FedSGD, Silo
from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Ask, Exchange, Phase, Reason, no_phase
from moretta.data.alignment.partner import Alignment, IdRules, ids_digest
from moretta.data.rows import Subjects
from moretta.data.silo import aligned, in_order
from moretta.engines.in_process import InProcess
from moretta.errors import MisuseError, ParameterError, PeerError, RowsError, RunFailed
from moretta.protocols.common import overlap
from moretta.protocols.common.overlap import AskApart, Comparison, compared
from moretta.protocols.common.training import Training
from moretta.run.inputs import RunRows
from moretta.secure_aggregation.one_sum import Answers


class Comparing:
    """A silo that knows nothing but whom its rows are about."""

    phase: Phase

    def __init__(self, own: Subjects) -> None:
        self.phase, self.own, self.answers = no_phase, own, Answers()

    def answer(self, message: Message) -> Message:
        assert isinstance(message, AskApart)
        return compared(message, self.own, self.answers)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: object) -> None:
        pass


def compare(comparison: Comparison, silos: dict[str, Subjects]) -> tuple[Aborted | None, list[Ask]]:
    engine = InProcess({name: Comparing(own) for name, own in silos.items()}, Codec(overlap.MESSAGES), strict=True)
    exchange, replies, asked = comparison.run(Stamp("run", 1, 0), list(silos)), None, list[Ask]()
    while True:
        try:
            ask = exchange.send(replies)  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value, asked
        asked.append(ask)
        replies = engine.deliver(ask)


def people(*names: object) -> np.ndarray:
    return np.array(names).astype(np.str_)


@pytest.mark.parametrize(
    ("own", "count"),
    [
        (Subjects(people("a", "b")), None),
        (Subjects(people("a", "T1", "T2", "T3")), "3 of 4 training rows have ids that"),
        (Subjects(groups=people("x", "y", "G", "G", "G")), "3 of 5 training rows have groups that"),
        (Subjects(people("a"), people("G")), "1 of 1 training rows have groups that"),
        (Subjects(people("G"), people("T1")), None),  # ids are compared with ids, and groups with groups
        (Subjects(), None),
        (Subjects(people("\ud800", "t1")), None),
    ],
)
def test_a_silo_with_test_rows_among_its_own_is_refused(
    own: Subjects, count: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    comparison = Comparison(Subjects(people("T1", "T2", "T3"), people("G", "G", "H")))
    aborted, asked = compare(comparison, {"north": own, "south": Subjects(people("b", "c"))})
    assert len(asked) == 1
    if count is None:
        assert aborted is None
        assert compare(comparison, {"north": own})[1] == []  # once a silo
        return
    assert aborted is not None
    assert list(aborted.missing) == ["north"]
    assert aborted.missing["north"].reason is Reason.BAD_INPUT
    told = aborted.missing["north"].detail
    assert told.startswith("some of its training rows are about ")
    assert not any(letter.isdigit() for letter in told)
    assert count in caplog.text  # in the silo's own log alone
    assert not any(name in aborted.missing["north"].detail.split() for name in ("T1", "T2", "T3", "G"))
    assert list(compare(comparison, {"north": own, "south": Subjects()})[1][0].messages) == ["north"]  # asked again


@pytest.mark.parametrize("tested", [Subjects(), Subjects(people())])
def test_without_ids_nothing_is_sent(tested: Subjects) -> None:
    assert compare(Comparison(tested), {"north": Subjects(people("a"))}) == (None, [])


def test_only_digests_under_the_lists_own_key_are_sent() -> None:
    def sent(ids: Sequence[object]) -> AskApart:
        (ask,) = compare(Comparison(Subjects(people(*ids))), {"north": Subjects()})[1]
        message = ask.messages["north"]
        assert isinstance(message, AskApart)
        return message

    one, other = sent(["anna", "bert", "anna"]), sent(["bert", "anna"])
    assert one.ids.shape == (2, 16)
    assert not one.groups.size
    assert one.ids.tobytes() == other.ids.tobytes()  # neither order nor number of rows
    assert one.key == other.key  # the same test rows are the same question, in every session and run
    longer = sent(["anna", "bert", "carl"])
    assert one.key != longer.key
    assert not {row.tobytes() for row in one.ids} & {row.tobytes() for row in longer.ids}
    assert "key: bytes" in repr(one)
    assert one.key.hex() not in repr(one)


def asked_of(*ids: object, attempt: int = 0, run: str = "run") -> AskApart:
    (ask,) = compare(Comparison(Subjects(people(*ids))), {"north": Subjects()})[1]
    message = ask.messages["north"]
    assert isinstance(message, AskApart)
    return replace(message, stamp=Stamp(run, 1, attempt))


def test_a_long_list_takes_no_more_memory_than_it_has() -> None:
    """A set of its digests took five times as much, and a message may have a GiB."""
    ids = np.arange(2**18, dtype=">u8").view(np.uint8).reshape(-1, 8)
    ids = np.hstack([np.zeros_like(ids), ids])
    own, nobody = Subjects(np.array(["p1", "p2"]), None), np.empty((0, 16), np.uint8)
    ask = AskApart(stamp=Stamp("run", 0, 0), key=bytes(32), ids=ids, groups=nobody)
    tracemalloc.start()
    try:
        compared(ask, own, Answers())
        assert tracemalloc.get_traced_memory()[1] < ids.nbytes
    finally:
        tracemalloc.stop()
    for others in (ids[::-1], ids[[0, 0]]):
        with pytest.raises(PeerError, match="in ascending order, each once"):
            AskApart(stamp=ask.stamp, key=bytes(32), ids=others, groups=nobody)


def test_a_silo_answers_one_list() -> None:
    own, answers = Subjects(people("anna")), Answers()
    for attempt in range(2):
        assert compared(asked_of("bert", "carl", attempt=attempt), own, answers).stamp.attempt == attempt
    for other in (asked_of("anna"), asked_of("bert"), replace(asked_of("bert", "carl"), key=bytes(32))):
        with pytest.raises(PeerError, match="one list of test rows, but was sent another"):
            compared(other, own, answers)
    compared(asked_of("bert", "carl"), own, answers)
    compared(asked_of("bert", run="another"), own, answers)  # where a run is one process, each has its list
    refused = Answers(over_runs=True)
    for _ in range(2):
        with pytest.raises(RowsError, match="some of its training rows"):
            compared(asked_of("anna"), own, refused)
    for run in ("run", "another"):
        with pytest.raises(PeerError):
            compared(asked_of("bert", run=run), own, refused)


KINDS = pytest.mark.parametrize(
    ("protocol", "engine"),
    [
        (FedSGD(), Engine()),
        (BAFFLE(k=2), Engine()),
        (BAFFLE(k=2), Engine(edge=("south",))),
        (CGD(loss="cross-entropy"), Engine()),
    ],
    ids=["by PyTorch", "by arrays", "by ONNX", "by groups"],
)


@KINDS
def test_every_kind_of_silo_answers(protocol: Training, engine: Engine) -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32), np.array([0, 1] * 3)
    silos = [Silo(name, x, y, groups=people(*[f"{name}{n // 2}" for n in range(6)])) for name in ("north", "south")]
    made = Federation(nn.Linear(3, 2), silos, protocol, engine=engine, batch_size=2)
    tested = Federation.of(
        made.spec, made.model, RunRows(silos, (x, y), tested=Subjects(groups=people(*["south1"] * 6)))
    )
    with pytest.raises(ParameterError, match="south: some of its training rows are about groups that the server's"):
        tested.train(1)
    others = Federation.of(made.spec, made.model, RunRows(silos, (x, y), tested=Subjects(groups=people(*["west"] * 6))))
    assert not others.train(1).history[-1]["dropped"]


@KINDS
def test_every_kind_of_silo_refuses_a_second_list(
    protocol: Training, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Comparison.run

    def twice(self: Comparison, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        first = yield from run(self, now, cohort)
        assert first is None
        second = yield from run(Comparison(Subjects(groups=people("east"))), now, cohort)
        return second

    monkeypatch.setattr(Comparison, "run", twice)
    x, y = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32), np.array([0, 1] * 3)
    silos = [Silo(name, x, y, groups=people(*[f"{name}{n // 2}" for n in range(6)])) for name in ("north", "south")]
    made = Federation(nn.Linear(3, 2), silos, protocol, engine=engine, batch_size=2)
    others = Federation.of(made.spec, made.model, RunRows(silos, (x, y), tested=Subjects(groups=people(*["west"] * 6))))
    with pytest.raises((ParameterError, MisuseError, RunFailed), match="one list of test rows, but was sent"):
        others.train(1)


def test_aligned_rows_are_compared_as_their_owner_writes_them() -> None:
    rules = IdRules()
    own, x = people("Anna", "Bert", "Carl"), np.arange(6.0).reshape(3, 2)
    found = Alignment(rules, np.array([2, 0]), bytes(32), ids_digest(own, "rows"), ())
    silo = aligned(Silo("north", x, np.arange(3), ids=own, groups=people("A", "B", "C")), found)
    silo = in_order(silo, np.array([1, 0]))
    assert silo.ids is not None
    assert silo.ids.tolist() == ["anna", "carl"]
    assert silo.subjects.ids is not None
    assert silo.subjects.ids.tolist() == ["Anna", "Carl"]
    with pytest.raises(ParameterError, match="some of its training rows are about ids"):
        compared(asked_of("Anna"), silo.subjects, Answers())
    compared(asked_of("Bert"), silo.subjects, Answers())
