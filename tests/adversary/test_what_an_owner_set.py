"""A server against what a site's owner set: a budget, `apart`, what may be repeated, and files of the site's own."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from stopped import Killed, killed_after
from torch import nn

from moretta import FedAvg, Federation, FedSGD, SecureAggregation, Silo
from moretta.config import run_files
from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Ask, Missing, Reason, Replies, answered
from moretta.data.rows import Subjects
from moretta.deployment.agreed_settings import SiteAgreement, pinned_settings
from moretta.engines import journal
from moretta.engines.driver import Driver
from moretta.engines.flare import envelope
from moretta.engines.in_process import InProcess
from moretta.engines.journal import HelpedFile
from moretta.errors import ParameterError, PeerError, PolicyError, RowsError, SumSpent
from moretta.protocols.common.accountant import Accountant, epsilon
from moretta.protocols.common.lattice import Privacy
from moretta.protocols.common.overlap import AskApart, Comparison, compared
from moretta.protocols.fedsgd.messages import TrainOn
from moretta.secure_aggregation.one_sum import HelpedSums
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.sums import Query
from moretta.secure_aggregation.unmasking import Confirmed, SelfMaskShares

NAMES = ("north", "east", "south", "west")
SKIPPED = "west"

# A budget.


def federation(protocol: Any, **settings: Any) -> Federation:
    random = np.random.default_rng(0)
    rows = [Silo(name, random.normal(size=(20, 3)).astype(np.float32), np.arange(20) % 2) for name in NAMES]
    secure = SecureAggregation(threshold=3)
    return Federation(nn.Linear(3, 2), rows, protocol, aggregation=secure, batch_size=5, **settings)


class Skipping(InProcess):
    """Asks one silo for its uploads, and never for its help. asked: what it was asked for last."""

    asked: TrainOn

    def deliver(self, ask: Ask) -> Replies:
        if isinstance(message := ask.messages.get(SKIPPED), TrainOn):
            self.asked = message
        if not issubclass(ask.reply, SelfMaskShares):
            return super().deliver(ask)
        rest = {name: message for name, message in ask.messages.items() if name != SKIPPED}
        replies = super().deliver(Ask(rest, ask.reply, ask.check)) if rest else Replies({}, {})
        return Replies(replies.answers, {**replies.missing, SKIPPED: Missing(Reason.LATE, "was not asked")})


def test_a_silo_whose_help_nobody_needs_keeps_its_budget() -> None:
    """The shares of the others opened twelve sums that its upload was in, and it had counted none of them."""
    most = (epsilon(1.0, 1e-5, 0.25, 2) + epsilon(1.0, 1e-5, 0.25, 3)) / 2
    made = federation(FedSGD(loss="cross-entropy", learning_rate=0.1, dp_noise=1.0, dp_clip=1.0, dp_epsilon=most))
    players = made.players(2, 0)
    engine = Skipping(players.clients, Codec(players.messages), strict=False)
    ends = list(Driver(players.server, NAMES, "run", engine, players.least).rounds(1, 2))
    assert all(SKIPPED in opened.silos for end in ends for opened in end.sums if opened.round)
    silo, accountant = players.clients[SKIPPED], players.accountant
    assert accountant is not None
    assert silo.privacy()["releases"] == accountant.releases.count == 2  # type: ignore[attr-defined]
    third = Stamp("run", 3, engine.asked.stamp.attempt)
    with pytest.raises(ParameterError, match="is spent by the uploads that this silo has sent"):
        answered(silo, TrainOn(stamp=third, parameters=engine.asked.parameters, encoding=engine.asked.encoding))


@pytest.mark.parametrize(("unit", "releases"), [("row", 1), ("silo", 2)])
def test_a_take_that_is_asked_for_again_counts_again_where_its_update_may_differ(unit: Any, releases: int) -> None:
    """Another update has other noise: the sum was a second one, and the server took it for the first."""
    accountant = Accountant(Privacy(1.0, 1.0, 1e-5, unit=unit), 0.25)

    def asking(now: Stamp) -> Iterator[Ask]:
        for reply in (MaskedUpload, Confirmed, SelfMaskShares):
            yield Ask.all(NAMES, Message(stamp=now), reply)

    for now in (Stamp("run", 1, 0), Stamp("run", 1, 3)):
        list(accountant.counted(asking(now), now, b"parameters"))  # type: ignore[arg-type]
    assert accountant.releases.count == releases


def test_a_run_that_repeats_rounds_of_whole_updates_counts_them_again(tmp_path: Path) -> None:
    private = FedAvg(loss="cross-entropy", learning_rate=0.1, dp_noise=1.0, dp_clip=1.0)

    with pytest.raises(Killed):
        federation(private, out=tmp_path / "run", checkpoint_every=100).train(3, 1, progress=killed_after(2))
    resumed = federation(private, out=tmp_path / "run", checkpoint_every=100).train(3, 1, resume=True)
    assert resumed.record["facts"]["releases"] == 2 + 3


RUN = """
[run]
rounds = 50
[engine]
name = "flare"
sites = ["a", "b", "c", "d"]
[data]
source = "sites"
inputs = [4]
classes = 2
batch-size = 10
least-rows = 50
[model]
source = "mlp"
hidden = [4]
[protocol]
name = "baffle"
loss = "cross-entropy"
optimizer = "sgd"
dp-noise = 4.0
dp-clip = 0.5
dp-epsilon = 8.0
"""


def test_another_unit_of_the_noise_waits_for_the_owner(tmp_path: Path) -> None:
    """The ledger had epsilon 8 of a run whose releases of all a silo's rows were counted as if of few: 12.04."""
    rows, silos = (run_files.loads(RUN + more, tmp_path / "run.toml") for more in ("", "local-epochs = 1"))
    assert [run.protocol.privacy.unit for run in (rows, silos) if run.protocol.privacy] == ["row", "silo"]
    SiteAgreement(tmp_path).check(pinned_settings(rows))
    with pytest.raises(PolicyError, match=r'\[protocol\] dp-unit: "row" -> "silo"'):
        SiteAgreement(tmp_path).check(pinned_settings(silos))


# Sets of silos.

SILOS = tuple("0123456789")
FANO = ("012", "034", "056", "135", "146", "236", "245")


def without(away: str) -> tuple[str, ...]:
    return tuple(silo for silo in SILOS if silo not in away)


class Sites:
    """Sites that keep what they helped, each with its owner's floors."""

    def __init__(self, apart: int, silos: tuple[str, ...] = SILOS) -> None:
        self.helped = {silo: HelpedSums(over_runs=True, apart=apart, fewest=7) for silo in silos}
        self.opened = list[tuple[str, ...]]()

    def open(self, survivors: tuple[str, ...]) -> bool:
        """Ask all of a set to help with a round's sum; return whether all do, without which it does not open."""
        number = sum(len(helped._helped) for helped in self.helped.values()) + 1
        for silo in survivors:
            try:
                query = Query(bytes(32), whole=True)
                self.helped[silo].bind(Stamp("run", number, 0), query, survivors, gives=True)
            except PeerError:
                return False
        self.opened.append(survivors)
        return True

    def isolated(self) -> list[str]:
        """Return the silos whose uploads are a linear combination of the sums."""
        sums = np.array([[silo in survivors for silo in self.helped] for survivors in self.opened], float)
        rank = np.linalg.matrix_rank(sums)
        return [silo for silo, row in zip(self.helped, np.eye(len(self.helped)), strict=True)
                if np.linalg.matrix_rank(np.vstack([sums, row])) == rank]  # fmt: skip


def test_many_sets_together_isolate_no_silo() -> None:
    """Any two of these sets differ by two silos or more, and all eight gave seven silos' own uploads."""
    free, kept = Sites(1), Sites(2)
    for away in (*FANO, ""):
        assert free.open(without(away))
        kept.open(without(away))
    assert len(free.isolated()) == 7
    assert kept.opened
    assert kept.isolated() == []


@pytest.mark.parametrize("seed", range(20))
def test_no_sets_that_a_server_chooses_isolate_a_silo(seed: int) -> None:
    draw, sites = random.Random(seed), Sites(2)
    for _ in range(40):
        sites.open(tuple(sorted(draw.sample(SILOS, draw.randint(7, 10)))))
    assert sites.opened
    assert sites.isolated() == []


def test_known_limit_sums_that_no_one_silo_knows() -> None:
    """A silo bounds what the sums that it helped isolate; the sums of other silos alone are in no record of it.

    Of five sets of 7 or more of 12 silos each silo knows some, and S1 + 2 S2 - S3 + 2 S4 - 3 S5 is one silo's upload. A
    record that had the first three would refuse the fourth. This pins what is true, not what is wanted.
    """
    sets = ("025678a", "13479ab", "123459b", "013489b", "0134789ab")
    sites, knows_all = Sites(2, tuple("0123456789ab")), HelpedSums(apart=2, fewest=7)
    assert all(sites.open(tuple(each)) for each in sets)
    factors: Counter[str] = Counter()
    for factor, each in zip((1, 2, -1, 2, -3), sets, strict=True):
        factors.update(dict.fromkeys(each, factor))
    assert [(silo, factor) for silo, factor in factors.items() if factor] == [("6", 1)]
    assert sites.isolated() == ["6"]
    for number, each in enumerate(sets[:3]):
        knows_all.bind(Stamp("run", number, 0), Query(bytes(32), whole=True), tuple(each), gives=True)
    with pytest.raises(PeerError, match=r"apart = 2"):
        knows_all.bind(Stamp("run", 3, 0), Query(bytes(32), whole=True), tuple(sets[3]), gives=True)


def test_silos_that_leave_and_return_in_the_same_groups_are_helped() -> None:
    sites = Sites(2)
    assert all(sites.open(without(away)) for away in ("", "01", "", "234", "01", ""))
    with pytest.raises(PeerError, match=r"apart = 2\); wait for the silos that are away"):
        sites.helped["9"].bind(Stamp("run", 9, 0), Query(bytes(32), whole=True), without("0"), gives=True)
    assert sites.open(without("01"))


ROWS = {"once": "moments", "lasting": True}


@pytest.mark.parametrize("once", [ROWS, {"once": "score"}, {"once": "score/tables", "lasting": True}])
def test_rounds_that_may_be_repeated_repeat_no_statistic_and_no_score(once: dict[str, Any]) -> None:
    """`repeat-whole-rows = true` let statistics be over other sets, whatever `repeat-statistics` was."""
    helped, whole = HelpedSums(repeats=True, over_runs=True), Query(bytes(32), whole=True)
    for fewer in (SILOS, SILOS[1:]):
        helped.bind(Stamp("run", 1, 0), whole, fewer, gives=True)
    asked = Query(bytes(32), whole=True, **once)
    helped.bind(Stamp("run", 0, 0), asked, SILOS, gives=True)
    for stamp in (Stamp("run", 0, 1), Stamp("run", 0, 0, 1)):
        with pytest.raises(SumSpent):
            helped.bind(stamp, asked, SILOS[1:], gives=True)


# What is on the disk.


@pytest.mark.parametrize("boot", ["", "one"])
def test_a_loss_of_power_frees_no_round(boot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the boot id could not be read, up to 15 rounds were free again."""
    path, synced = tmp_path / "helped.jsonl", b""
    monkeypatch.setattr(journal, "BOOT", tmp_path / "boot")
    if boot:
        (tmp_path / "boot").write_text(boot)

    def sync(descriptor: int) -> None:
        nonlocal synced
        synced = path.read_bytes()

    monkeypatch.setattr(os, "fsync", sync)
    opened = HelpedFile(str(path), forces=True).opened
    for number in range(1, 6):
        opened.bind(Stamp("run", number, 0), Query(bytes(32)), SILOS, gives=True)
    path.write_bytes(synced)  # the power is lost
    if boot:
        (tmp_path / "boot").write_text("another")
    again = HelpedFile(str(path), forces=True).opened
    for number in range(1, 6):
        with pytest.raises(SumSpent):
            again.bind(Stamp("run", number, 0), Query(bytes(32)), SILOS[1:], gives=True)


# Names of runs.


def test_a_name_before_a_runs_id_tests_no_further_ids() -> None:
    """`repeat-statistics = true` allows one list of test rows a run, and a server named as many runs as it liked."""
    helped = HelpedSums(over_runs=False)
    own = Subjects(np.array(["p1", "p7", "p9"]), None)

    def asked(run: str, *ids: str) -> AskApart:
        exchange = Comparison(Subjects(np.array(ids), None)).run(Stamp(run, 0, 0), ["a"])
        message = next(exchange).messages["a"]
        assert isinstance(message, AskApart)
        return message

    compared(asked("everybody/run", "p3"), own, helped.answers)
    compared(asked("run", "p3"), own, helped.answers)
    for run in ("run", "g0/run", "g1/g0/run"):
        with pytest.raises(PeerError, match="one list of test rows"):
            compared(asked(run, "p7"), own, helped.answers)
    with pytest.raises(RowsError):
        compared(asked("another", "p7"), own, helped.answers)


def hello(run: str) -> envelope.Hello:
    return envelope.Hello(run=run, round=0, session=0, job="j", model="m", versions={}, torch=())


@pytest.mark.parametrize(
    "file", ["helped.jsonl", "helped.half-done", "epsilon.txt", "agreed.json", "run.toml", "agreed.json.lock"]
)
def test_no_run_has_the_name_of_a_file_that_a_site_keeps(file: str) -> None:
    """Where the file was not there yet, a folder of its name was made: the site took part in nothing any more."""
    with pytest.raises(ValidationError, match="run"):
        hello(file)


def test_the_ids_of_runs_are_taken(tmp_path: Path) -> None:
    for run in ("0" * 32, f"{'0' * 32}.{'f' * 16}", "run"):
        assert hello(run).run == run
