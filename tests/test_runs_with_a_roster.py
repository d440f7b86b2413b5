"""Federations whose silos hold identities, from Python and from a run file: keys are signed, and bad ones refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks import perceptron
from test_cli import call, prepare
from torch import nn

from moretta import PBPFL, Engine, Faults, Federation, FedSGD, SecureAggregation, Silo
from moretta.contract.roles import Answering
from moretta.engines.run_folder import read_json
from moretta.errors import ParameterError, RunFailed, SumSpent
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.client import Client
from moretta.protocols.fedsgd.messages import TrainOn
from moretta.secure_aggregation.identity import Identity, Roster, public_line

NAMES = ("north", "south", "east", "west", "centre")


def enrol(folder: Path, names: Iterable[str], keys: str = "keys") -> None:
    """Give each silo an identity, in ``keys/<silo>``, and write their roster beside."""
    entries = []
    for name in names:
        identity = Identity.fresh()
        identity.save(folder / keys / name)
        entries.append(f'[[silo]]\nname = "{name}"\nkey = "{public_line(identity.public_key)}"\n')
    (folder / "roster.toml").write_text("".join(entries))


def make(protocol: Training, out: Path | None = None, **settings: Any) -> Federation:
    silos = []
    for number, name in enumerate(NAMES):
        x = np.random.default_rng(number).normal(0, 1, (12, 4)).astype(np.float32)
        silos.append(Silo(name, x, x[:, :2] - x[:, 2:]))
    model = perceptron(4, 5, 2, between=nn.ReLU)
    return Federation(model, silos, protocol, out=out, insecure_secret_seed=1, **settings)


def signed(folder: Path, **more: Any) -> SecureAggregation:
    return SecureAggregation(roster=folder / "roster.toml", identity=str(folder / "keys" / "{silo}"), **more)


@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares"])
@pytest.mark.parametrize("protocol", [FedSGD(), PBPFL()], ids=["fedsgd", "pbpfl"])
def test_from_python(tmp_path: Path, protocol: Training, scheme: str) -> None:
    enrol(tmp_path, NAMES)
    result = make(protocol, aggregation=signed(tmp_path, scheme=scheme), engine=Engine(strict=True)).train(3)
    assert result.record["run"].endswith("." + Roster.load(tmp_path / "roster.toml").digest[:16])
    assert not result.record["dropped"]
    trusting = make(protocol, aggregation=SecureAggregation.model_validate({"scheme": scheme})).train(3)
    assert "." not in trusting.record["run"]
    if isinstance(protocol, FedSGD):  # a key of PBPFL follows from the run's id, and decides how weights are rounded
        assert result.history[-1]["loss"] == trusting.history[-1]["loss"]
    assert result.bytes["secure_aggregation"] > trusting.bytes["secure_aggregation"]


def test_a_server_whose_silos_are_all_remote_needs_a_roster_alone(tmp_path: Path) -> None:
    enrol(tmp_path, NAMES)
    silos = [Silo(name, np.empty((0, 4), np.float32), np.empty(0), remote=True) for name in NAMES]
    model, alone = nn.Linear(4, 2), SecureAggregation(roster=tmp_path / "roster.toml")
    assert Federation(model, silos, FedSGD(), aggregation=alone, task="regression").spec.secure_aggregation == alone
    with pytest.raises(ParameterError, match=r"SecureAggregation\(roster=..\) and identity belong together"):
        make(FedSGD(), aggregation=alone)


@pytest.mark.parametrize("protocol", [FedSGD(), PBPFL()], ids=["fedsgd", "pbpfl"])
def test_a_signed_round_goes_on_without_who_vanished_before(tmp_path: Path, protocol: Training) -> None:
    enrol(tmp_path, NAMES)
    faults = Faults.model_validate({"drop": [{"round": 2, "silo": "south"}]})
    result = make(protocol, aggregation=signed(tmp_path), engine=Engine(faults=faults)).train(3)
    assert [line["attempt"] for line in result.history] == [0, 0, 0]
    assert [line["rows"] for line in result.history] == [60, 48, 60]
    assert [(one["round"], one["silo"]) for one in result.record["dropped"]] == [(2, "south")]


@pytest.mark.parametrize("roster", [True, False])
def test_who_vanishes_before_signing_costs_a_signed_round_and_is_left_out_of_another(
    tmp_path: Path, roster: bool
) -> None:
    enrol(tmp_path, NAMES)
    drop = [{"round": 2, "silo": "south"}, {"round": 2, "silo": "west", "phase": "unmasking"}]
    engine = Engine(faults=Faults.model_validate({"drop": drop}))
    aggregation = signed(tmp_path, threshold=3) if roster else SecureAggregation(threshold=3)
    result = make(FedSGD(), aggregation=aggregation, engine=engine, batch_size=4).train(3)
    assert [line["attempt"] for line in result.history] == [0, int(roster), 0]
    assert [line.get("take", 0) for line in result.history] == [0, int(roster), 0], "who has signed has other rows"
    assert [line["rows"] for line in result.history] == [20, 12, 20]
    assert [(one["round"], one["silo"]) for one in result.record["dropped"]] == [(2, "south"), (2, "west")]


def test_a_silo_that_names_the_last_take_and_then_is_silent_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enrol(tmp_path, NAMES)
    honest = Client._train

    def lies(client: Client, ask: TrainOn) -> Answering:
        if client._contributor._name == "west" and (ask.stamp.round, ask.stamp.take) == (2, 0):  # type: ignore[union-attr]
            raise SumSpent(2**31 - 1, tuple(sorted(NAMES)), False)
        return honest(client, ask)

    faults = Faults.model_validate({"drop": [{"round": 2, "silo": "west", "phase": "unmasking"}]})
    settings: dict[str, Any] = {"aggregation": signed(tmp_path, threshold=3), "batch_size": 4, "out": tmp_path / "run"}
    with monkeypatch.context() as patch:
        patch.setattr(Client, "_train", lies)
        result = make(FedSGD(), engine=Engine(faults=faults), **settings).train(4)
    assert [line.get("take", 0) for line in result.history] == [0, 2, 0, 0]
    assert [(one["round"], one["silo"]) for one in result.record["dropped"]] == [(2, "west")]
    assert (tmp_path / "run" / "checkpoint" / "takes.txt").read_text() == "2 1\n2 2\n"
    assert len(make(FedSGD(), **settings).train(6, resume=True).history) == 6


def test_sums_of_all_rows_that_were_signed_are_not_made_again_over_fewer(tmp_path: Path) -> None:
    enrol(tmp_path, NAMES)
    engine = Engine(faults=Faults.model_validate({"drop": [{"round": 2, "silo": "west", "phase": "unmasking"}]}))
    federation = make(FedSGD(), aggregation=signed(tmp_path, threshold=3), engine=engine, batch_size=0)
    with pytest.raises(RunFailed, match=r"round 2 can only be repeated by the same silos.* missing: west; bring"):
        federation.train(3)


@pytest.mark.parametrize("protocol", ["fedsgd", "pbpfl"])
def test_from_a_run_file_paths_are_relative_to_it(
    tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    with prepare(home).open("a") as stream:
        stream.write('\n[secure-aggregation]\nroster = "roster.toml"\nidentity = "keys/{silo}"\n')
    enrol(home, ("silo-1", "silo-2", "silo-3"))
    monkeypatch.chdir(elsewhere)
    words = ("train", home / "run.toml", "--out", "mine", "--set", f"protocol.name={protocol}", "--json")
    done = call(*words)
    assert done.code == 0, done.err
    roster = Roster.load(home / "roster.toml")
    assert read_json(Path("mine") / "result.json")["run"].endswith("." + roster.digest[:16])
    # The run file as resolved finds them too, and a resumed run signs anew.
    again = call("train", Path("mine") / "run.toml", "--out", "mine", "--set", "run.rounds=9", "--resume", "--json")
    assert again.code == 0, again.err
    assert (again.told["rounds"], again.told["sessions"]) == (9, 2)
    assert not again.told["dropped"]


def test_a_run_is_not_resumed_with_another_roster(tmp_path: Path) -> None:
    enrol(tmp_path, NAMES)
    out = tmp_path / "run"
    make(FedSGD(), out, aggregation=signed(tmp_path)).train(2)
    enrol(tmp_path, NAMES, keys="others")
    others = signed(tmp_path).model_copy(update={"identity": str(tmp_path / "others" / "{silo}")})
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for aggregation in (signed(tmp_path), others):
        with pytest.raises(ParameterError):
            make(FedSGD(), out, aggregation=aggregation).train(3, resume=True)
    (tmp_path / "keys").rename(tmp_path / "first")
    (tmp_path / "others").rename(tmp_path / "keys")
    with pytest.raises(ParameterError, match="begun with another roster"):  # at the same places, new keys for all
        make(FedSGD(), out, aggregation=signed(tmp_path)).train(3, resume=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
