"""What a report says of who took part is what was opened: blips, retries, takes and losses against the truth.

The truth is what the aggregators of a real run return, as they return it. Silos are lost where a script says so, by the
attempt, and come back if it says so, as silos at other machines do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from moretta import BAFFLE, CGD, PBPFL, FedAvg, Federation, FedSGD, Local, SecureAggregation, Silo
from moretta.contract.roles import Aborted, Ask, Missing, Reason, Replies
from moretta.engines.in_process import InProcess
from moretta.protocols.common.claims import opened_sums
from moretta.report.folder import RunRecord, read_run
from moretta.report.statements import privacy_statements, summary, verdicts
from moretta.run.record import KEY_TAGS, SET_UP_TAGS, UNMASKING_TAGS, all_sums
from moretta.secure_aggregation.keyed_sums import KeyedAggregator
from moretta.secure_aggregation.plain import PlainAggregator

FEW = "fewer than three expose each other"
DIFFER = "differences of totals"
TWO_SETS = "two takes of a round were opened, over different silos"
STATISTICS = "the other’s means and deviations of input columns"

SET_UP, UPLOAD, UNMASKING = "set-up", "upload", "unmasking"
Lost = tuple[int, int, str, str]  # round, attempt, phase, silo


class Blinking(InProcess):
    """An engine whose silos are lost by a script, and of which the server can wait for some."""

    lost: ClassVar[Sequence[Lost]] = ()
    returns: ClassVar[Sequence[str]] = ()

    def deliver(self, ask: Ask) -> Replies:
        there, gone = {}, {}
        for silo, message in ask.messages.items():
            tag, now = message.TAG, message.stamp
            phase = UNMASKING if tag in UNMASKING_TAGS else SET_UP if tag in KEY_TAGS | SET_UP_TAGS else UPLOAD
            if (now.round, now.attempt, phase, silo) in self.lost:
                gone[silo] = Missing(Reason.DISCONNECTED, f"lost at the {phase}")
            else:
                there[silo] = message
        found = super().deliver(Ask(there, ask.reply, ask.check)) if there else Replies({})
        return Replies(found.answers, {**found.missing, **gone}, found.empty)

    def back(self, silos: Sequence[str], least: int) -> Sequence[str]:
        return [silo for silo in silos if silo in self.returns]


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, tuple[str, ...]]]:
    """What aggregators have returned: round, take and silos of each sum, once each."""
    known: dict[tuple[int, int, tuple[str, ...]], None] = {}

    def watch(kind: Any, name: str) -> None:
        inner = getattr(kind, name)

        def watched(self: Any, ask: Any, *rest: Any, **more: Any) -> Any:
            ended = yield from inner(self, ask, *rest, **more)
            stamp = (next(iter(ask.values())) if isinstance(ask, dict) else ask).stamp
            if not isinstance(ended, Aborted):
                known[stamp.round, stamp.take, tuple(sorted(ended.silos))] = None
            return ended

        monkeypatch.setattr(kind, name, watched)

    for kind, name in ((KeyedAggregator, "sum"), (PlainAggregator, "sum"), (KeyedAggregator, "relay")):
        watch(kind, name)
    return known  # type: ignore[return-value]  # its keys, in their order


TWO_OF = SecureAggregation(threshold=2)


def play(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: Sequence[Lost] = (),
    returns: Sequence[str] = (),
    silos: int = 3,
    protocol: Any = None,
    **settings: Any,
) -> RunRecord:
    """Play a run of three rounds and read its folder back."""
    monkeypatch.setattr("moretta.run.loop.InProcess", Blinking)
    monkeypatch.setattr(Blinking, "lost", lost)
    monkeypatch.setattr(Blinking, "returns", returns)
    random = np.random.default_rng(3)
    rows = [random.normal(size=(24, 3)).astype(np.float32) for _ in range(silos)]
    labelled = [(x, (x[:, 0] > 0).astype(np.int64)) for x in rows]
    held = [
        Silo(f"s{number}", x[6:], y[6:], held_out=(x[:6], y[:6]) if settings.get("score_at_silos") else None)
        for number, (x, y) in enumerate(labelled, 1)
    ]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    chosen: dict[str, Any] = {"batch_size": 4, "standardise": True, "aggregation": TWO_OF} | settings
    Federation(model, held, protocol or FedSGD(), out=out, **chosen).train(3, seed=1)
    return read_run(out)


def said(record: RunRecord) -> str:
    return " ".join(one.text for one in privacy_statements(record))


def used(record: RunRecord) -> set[tuple[int, int, tuple[str, ...]]]:
    """The sums of which the record says that a result is made of them."""
    found = opened_sums(record.model_dump(by_alias=True), "set-up", "round", "release")
    assert found is not None
    return {(number, one["take"], tuple(one["silos"])) for one in found for number in one["rounds"]}


ALL, PAIR = ("s1", "s2", "s3"), ("s1", "s2")
FLOORS = SecureAggregation(threshold=3)
PROTOCOLS = {
    "fedsgd": FedSGD(),
    "fedavg": FedAvg(),
    "pbpfl": PBPFL(),
    "baffle": BAFFLE(),
    "cgd": CGD(),
}
SCHEMES = ("pairwise", "additive-shares", "none")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_round_that_all_played_again_lacks_nobody(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: Any
) -> None:
    """The finding: a silo that was lost in an attempt and is back in the next was said to have missed the round."""
    lost = [(2, 0, UPLOAD, "s3")]
    record = play(tmp_path / "run", monkeypatch, lost, ["s3"], protocol=PROTOCOLS[protocol], aggregation=FLOORS)
    assert [(gone.round, gone.silo) for gone in record.dropped] == [(2, "s3")]
    assert record.history[1].attempt == 1
    assert used(record) == set(truth)
    assert {silos for _, _, silos in truth} == {ALL}
    assert record.missed == ()
    assert "missed" not in summary([record])
    for words in (FEW, DIFFER, TWO_SETS, STATISTICS):
        assert words not in said(record)
    assert "rounds of two" not in verdicts([record])[0].hidden
    assert not any(FEW in warning for warning in record.warnings)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("again", [True, False])
def test_a_silo_that_is_lost_before_the_sum_leaves_two(
    scheme: str, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: Any
) -> None:
    floors = {"min_survivors": 2} if scheme == "additive-shares" else {"threshold": 2}
    if scheme == "none":
        floors = {"min_survivors": 3 if again else 2}
    record = play(
        tmp_path / "run",
        monkeypatch,
        [(2, 0, UPLOAD, "s3")],
        ["s3"] if again else [],
        aggregation=SecureAggregation(scheme=scheme, **floors),
    )
    assert used(record) == set(truth)
    back = scheme == "none" and again  # elsewhere two are enough, and nobody waits
    assert {silos for number, _, silos in truth if number == 2} == {ALL if back else PAIR}
    assert (FEW in said(record)) == (not back)
    assert any(FEW in warning for warning in record.warnings) == (not back)
    assert (DIFFER in said(record)) == (not back and scheme != "none")
    assert [(gone.round, gone.silo) for gone in record.missed] == ([] if back else [(2, "s3")])
    assert ("missed 1 round" in summary([record]) or "missed one round" in summary([record])) == (not back)


def test_who_misses_the_unmasking_alone_is_in_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: Any
) -> None:
    record = play(tmp_path / "run", monkeypatch, [(2, 0, UNMASKING, "s3")])
    assert used(record) == set(truth) == {(number, 0, ALL) for number in (1, 2, 3)}
    assert record.dropped[0].silo == "s3"
    assert record.missed == ()
    for words in (FEW, DIFFER, TWO_SETS):
        assert words not in said(record)


FOUR = ("s1", "s2", "s3", "s4")
HELD_UP = [(2, 0, UNMASKING, "s3"), (2, 0, UNMASKING, "s4")]


def test_a_take_over_the_same_silos_says_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: Any
) -> None:
    """Two of four give no shares, so the sum does not open; all of them play the next take."""
    record = play(tmp_path / "run", monkeypatch, HELD_UP, ["s3", "s4"], silos=4, aggregation=FLOORS)
    assert used(record) == set(truth) == {(1, 0, FOUR), (2, 1, FOUR), (3, 0, FOUR)}
    (held,) = [one for one in record.sums or () if not one.used]
    assert (held.rounds, held.take, held.silos) == ((2,), 0, FOUR)
    for words in (FEW, DIFFER, TWO_SETS):
        assert words not in said(record)


@pytest.mark.parametrize("batch_size", [4, 0])
def test_two_sets_in_a_round_are_said_as_what_they_are(
    batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: Any
) -> None:
    """One of the two comes back: the first sum was of four and the second is of three."""
    if not batch_size:  # of whole rows the same silos alone may play again, so it comes to no second set
        with pytest.raises(Exception, match="can only be repeated by the same silos"):
            play(tmp_path / "run", monkeypatch, HELD_UP, ["s3"], silos=4, aggregation=FLOORS, batch_size=0)
        return
    record = play(tmp_path / "run", monkeypatch, HELD_UP, ["s3"], silos=4, aggregation=FLOORS, batch_size=batch_size)
    assert used(record) == set(truth)
    assert {silos for number, take, silos in truth if (number, take) == (2, 1)} == {ALL}
    server = said(record)
    assert TWO_SETS in server
    assert "up to the change that new rows make in the other silos’ updates" in server
    assert DIFFER in server
    assert FEW not in server


def test_statistics_of_two_silos_show_the_other_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: Any) -> None:
    record = play(tmp_path / "run", monkeypatch, [(1, 0, SET_UP, "s3")])
    assert used(record) == set(truth)
    assert {silos for number, _, silos in truth if number == 1} == {PAIR}
    assert {silos for number, _, silos in truth if number == 3} == {ALL}
    assert STATISTICS in said(record)
    assert FEW in said(record)  # round 1 was played by the two as well


def test_chosen_silos_are_those_that_are_in_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: Any
) -> None:
    record = play(tmp_path / "run", monkeypatch, silos=6, participation=0.5, aggregation=SecureAggregation())
    assert used(record) == set(truth)
    assert {len(silos) for number, _, silos in truth if number} == {3}
    assert FEW not in said(record)
    assert DIFFER in said(record)


def test_two_participants_of_three_are_said_under_cgd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: Any
) -> None:
    record = play(tmp_path / "run", monkeypatch, [(2, 0, UPLOAD, "s3")], protocol=CGD())
    assert used(record) == set(truth)
    assert PAIR in {silos for number, _, silos in truth if number == 2}
    assert "Can work out the other’s gradient where a sum is of two participants" in said(record)


def test_where_nothing_is_summed_the_silos_that_took_part_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = play(tmp_path / "run", monkeypatch, [(2, 0, UPLOAD, "s3")], protocol=Local())
    assert [(one.of, one.rounds, one.silos) for one in record.sums or () if one.of != "set-up"] == [
        ("no sum", (1, 3), ALL), ("no sum", (2,), PAIR),
    ]  # fmt: skip
    assert [(gone.round, gone.silo) for gone in record.missed] == [(2, "s3")]


def test_scores_are_claimed_where_they_were_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: Any) -> None:
    record = play(tmp_path / "run", monkeypatch, score_at_silos=True)
    assert (4, 0, ALL) in truth
    assert used(record) == set(truth)
    assert "the number of rows held back for scoring" in said(record)


def test_a_folder_of_an_earlier_version_says_what_it_does_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums are taken out of a real folder, as they were not in it before."""
    folder = tmp_path / "run"
    play(folder, monkeypatch, [(2, 0, UPLOAD, "s3")], ["s3"], aggregation=FLOORS)
    result = json.loads((folder / "result.json").read_text())
    del result["sums"]
    (folder / "result.json").write_text(json.dumps(result))
    record = read_run(folder)
    assert "if there were any, which this run’s record does not show" in said(record)
    assert "if not all sums are over the same silos, which this run’s record does not show" in said(record)
    assert "in rounds of fewer than three silos, if there were any" in verdicts([record])[0].hidden
    assert "missed answers in one round" in summary([record])


def test_a_run_that_an_earlier_version_began_does_not_record_its_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = play(tmp_path / "run", monkeypatch)
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert all_sums(lines, ()) == [one.model_dump(mode="json") for one in record.sums or ()]
    del lines[0]["sums"]
    assert all_sums(lines, ()) is None
