"""What cannot be trained on is refused in one sentence; what can, but protects less, is warned of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import CLASSES, FIRST, Fault, bytes_of, failing, grid, make, network, participants, run, table, train
from refused_rows import Row, refused
from torch import nn

from moretta import CGD, PBPFL, Centralised, Engine, FedAvg, Federation, FedSGD, Local, SecureAggregation, Silo
from moretta.config import run_files
from moretta.engines.checkpoint import last_checkpoint
from moretta.errors import ParameterError, RunFailed
from moretta.protocols.cgd.messages import Descend, DescribeRows
from moretta.protocols.common.training import Training
from moretta.run.assembly import federation_of
from moretta.run.trained_model import ModelChoice, model_file

JOINT = grid([6, 4, 7], [3, 2], holders=1)
ENGINES = ("in-process", "fused", "exact-ring")


def changed(silos: list[Silo], name: str, **changes: Any) -> list[Silo]:
    return [dataclasses.replace(silo, **changes) if silo.name == name else silo for silo in silos]


# -- the grid ----------------------------------------------------------------------------------------------------------


def run_file(folder: Path, **data: Any) -> Path:
    x, y = table(12, 4)
    rows = "\n".join(",".join(map(str, [*row, label])) for row, label in zip(x, y, strict=True))
    (folder / "t.csv").write_text(f"a,b,c,d,target\n{rows}\n")
    keys = "\n".join(f"{key.replace('_', '-')} = {value}" for key, value in data.items())
    (folder / "run.toml").write_text(
        f"""
        [run]
        rounds = 2
        [data]
        source = "t.csv"
        test-fraction = 0.5
        batch-size = 0
        {keys}
        [model]
        source = "mlp"
        hidden = [4]
        [protocol]
        name = "cgd"
        """
    )
    return folder / "run.toml"


@refused("cgd_bad_input.txt")
def test_what_cannot_be_is_refused(row: Row, request: pytest.FixtureRequest) -> None:
    row.play(globals(), request)


def test_a_run_file_that_cuts_well(tmp_path: Path) -> None:
    path = run_file(tmp_path, partition='"grid"', grid=[3, 2])
    result = federation_of(run_files.load(path, []), None).train(2)
    assert result.record["silos"] == 6


@pytest.mark.parametrize("engine", ENGINES)
def test_a_participant_without_samples(engine: str) -> None:
    empty = dataclasses.replace(JOINT[2], x=JOINT[2].x[:0])
    with pytest.raises(ParameterError, match=r"silo `silo-1-0`: expected .* at least one; got 0 rows"):
        run([*JOINT[:2], empty, *JOINT[3:]], 1, CGD(delta=0.1), engine)
    rows = grid([6, 4], [5])
    empty = dataclasses.replace(rows[1], x=rows[1].x[:0], y=rows[1].y[:0])
    with pytest.raises(ParameterError, match=r"silo `silo-1`: expected .* at least one; got 0 rows"):
        run([rows[0], empty], 1, CGD(delta=0.1), engine)


# -- rows that are not the same ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_whose_participants_have_unequally_many(engine: str) -> None:
    short = changed(JOINT, "silo-2-0", x=JOINT[4].x[:5])
    with pytest.raises(ParameterError, match=r"row-2`: .*`silo-2-0`.*`silo-2-1`.* order") as caught:
        run(short, 2, CGD(delta=0.1), engine)
    assert "5" in str(caught.value)
    assert "7" in str(caught.value)


def with_ids(rows: int = 3) -> list[Silo]:
    return grid([6, 4, 7, 5][:rows], [2, 1, 2], holders=1, ids=True)


def ids_of(silo: Silo) -> list[str]:
    assert silo.ids is not None
    return [str(one) for one in silo.ids]


@pytest.mark.parametrize(
    "wrong", [lambda ids: ids[::-1], lambda ids: [*ids[1:], ids[0]], lambda ids: ["stranger", *ids[1:]]]
)
@pytest.mark.parametrize("name", ["silo-1-0", "silo-1-1"])
def test_ids_that_differ_are_refused_by_name(name: str, wrong: Callable[[list[str]], list[str]]) -> None:
    silos = with_ids()
    own = next(silo for silo in silos if silo.name == name)
    silos = changed(silos, name, ids=np.array(wrong(ids_of(own))))
    with pytest.raises(ParameterError, match=r"row-1`: the ids of `silo-1-.` are not those of `silo-1-1`") as caught:
        run(silos, 2, CGD(delta=0.1))
    assert not [person for person in ids_of(own) if person in str(caught.value)]
    others = ("silo-1-0", "silo-1-2") if name == "silo-1-1" else (name,)  # the head's are what all are compared with
    assert all(f"the ids of `{one}`" in str(caught.value) for one in others)


def test_equal_ids_are_well_and_none_is_too() -> None:
    found = run(with_ids(), 2, CGD(delta=0.1))
    without = run([dataclasses.replace(silo, ids=None, aligned=True) for silo in with_ids()], 2, CGD(delta=0.1))
    assert bytes_of(found) == bytes_of(without)
    assert not found.dropped


def test_a_row_that_no_longer_matches_later_sits_out() -> None:
    """In round 1 that is bad input; later the rest of a run that went well is not lost to it."""
    silos = with_ids(4)
    gone = Fault("silo-0-0", 2, DescribeRows, lambda one: dataclasses.replace(one, digest=bytes(32)))
    lost = [{"round": 1, "silo": "silo-3-0", "phase": "set-up"}]  # so that there is a set-up in round 2
    engine = Engine.model_validate({"strict": True, "faults": {"drop": lost}})
    # In batches: where rounds use all rows, silo-3-0 could not join any more.
    found = run(silos, 4, CGD(delta=0.1), engine, wrap=failing(gone), batch_size=2)
    assert gone.happened
    assert (2, "silo-0-0") in found.dropped


# -- settings ----------------------------------------------------------------------------------------------------------


# -- two participants --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silos", [grid([6, 4], [5]), grid([6, 4], [3, 2])], ids=["rows", "joint"])
def test_two_are_allowed_and_told(silos: list[Silo]) -> None:
    found = run(silos, 2, CGD(delta=0.1))
    assert any("the other's gradient" in warning for warning in found.result.record["warnings"])


@pytest.mark.parametrize("silos", [grid([6, 4, 7], [5]), grid([6, 4, 7], [2, 1, 2])], ids=["rows", "joint"])
def test_three_are_not_warned(silos: list[Silo]) -> None:
    found = run(silos, 2, CGD(delta=0.1))
    assert not any("the other's" in warning for warning in found.result.record["warnings"])


# -- divergence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("silos", [JOINT, grid([6, 4, 7], [5])], ids=["joint", "rows"])
def test_a_run_that_diverges_names_the_round_and_keeps_the_last_good_one(
    silos: list[Silo], engine: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))

    def of(folder: Path | None) -> Federation:
        named = Engine.model_validate({"name": engine})
        protocol = CGD(delta=0.5, learning_rate=3.0, loss="mse")
        return make(silos, protocol, model, out=folder, checkpoint_every=100, engine=named, dtype="float32")

    with pytest.raises(RunFailed, match=r"round (\d+)") as caught:
        train(of(out), 60)
    text = str(caught.value)
    number = int(text.partition("round ")[2].partition(":")[0].partition(" ")[0])
    assert 2 < number < 60
    assert any(way in text for way in ("--resume", "checkpoint is whole", "is kept"))
    found = last_checkpoint(out / "checkpoint")
    assert found is not None
    assert found[0].round == number - 1  # though one is due only every hundred rounds
    for state in found[1].values():
        for value in state.values():
            assert not isinstance(value, np.ndarray) or np.isfinite(value).all()
    # It goes on from there: to the same end with the same settings, and no further back.
    with pytest.raises(RunFailed, match=rf"round {number}\b"):
        train(of(out), 60, resume=True)
    stopped = train(of(tmp_path / "stopped"), number - 1)
    resumed = train(of(out), number - 1, resume=True)
    assert bytes_of(resumed) == bytes_of(stopped)


# -- protocols and models that columns cannot be split for -------------------------------------------------------------


@pytest.mark.parametrize(
    "protocol", [FedSGD(), FedAvg(), Local(), PBPFL()], ids=lambda protocol: str(type(protocol).__name__)
)
def test_other_protocols_refuse_columns(protocol: Training) -> None:
    with pytest.raises(ParameterError, match=f"train by cgd.*{protocol.name}"):  # type: ignore[attr-defined]
        Federation(network(5), JOINT, protocol)


def test_centralised_puts_the_columns_together() -> None:
    assert Federation(network(5), JOINT, Centralised(), aggregation=SecureAggregation(scheme="none")).train(1).model


def test_batchnorm_without_statistics_of_its_own_is_no_exception_to_what_is_computed() -> None:
    """A norm that keeps no running statistics normalises with a row's batch: all three engines agree or all refuse."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, CLASSES))
    ends = []
    for engine in ENGINES:
        try:
            ends.append(run(JOINT, 2, CGD(delta=0.1), engine, model=model).displacement)
        except ParameterError:
            ends.append(None)
    if ends[0] is None:
        assert ends == [None] * 3
    else:
        for end in ends[1:]:
            assert end is not None
            np.testing.assert_allclose(end[FIRST], ends[0][FIRST], rtol=1e-6, atol=1e-12)


# -- found in review ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["fused", "exact-ring"])
def test_a_simulation_refuses_dropout_which_it_would_draw_otherwise(engine: str) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Dropout(0.5), nn.Linear(7, CLASSES)).double()
    made = Federation(model, JOINT, CGD(delta=0.1), engine=Engine(name=engine), batch_size=0, dtype="float64")
    with pytest.raises(ParameterError, match="does not draw what each participant would"):
        made.train(1)


@pytest.mark.parametrize("engine", ["fused", "exact-ring"])
def test_a_simulation_refuses_images_that_vary(engine: str) -> None:
    rng = np.random.default_rng(0)
    silos = [Silo(name, rng.random((6, 1, 4, 4)), rng.integers(0, 2, 6)) for name in "abc"]
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(ParameterError, match='augment = "crop-flip": a simulation does not vary images'):
        Federation(model, silos, CGD(delta=0.1), engine=Engine(name=engine), augment="crop-flip")


def test_a_simulation_of_many_says_that_it_keeps_no_confined_model(tmp_path: Path) -> None:
    silos = grid([2] * 21, [5])
    train(make(silos, CGD(delta=0.1), engine=Engine(name="fused"), out=tmp_path / "run"), 1)
    assert "Of these 21 none is kept" in (tmp_path / "run" / "participants" / "SIMULATION.txt").read_text()
    with pytest.raises(ParameterError, match="it keeps no confined models"):
        model_file(tmp_path / "run", ModelChoice(silo="silo-3"))
    for true_model in (False, True):
        with pytest.raises(ParameterError, match=r"each silo has its own.*is D, which they have all moved by"):
            model_file(tmp_path / "run", ModelChoice(true_model))


def test_whom_the_best_round_left_behind_is_brought_up_before_the_end() -> None:
    """Round 1's sum reaches all but one; stopping early goes back to it, and the one must have that step too."""
    silos, fault = grid([6, 4, 7], [5]), Fault("silo-1", 1, Descend)
    protocol = CGD(delta=0.2, learning_rate=5.0)  # far too much: the loss only rises
    settings: dict[str, Any] = {"early_stopping": 2, "validation": table(20, 5, 1), "evaluate_every": 1}
    found = run(silos, 8, protocol, wrap=failing(fault), **settings)
    assert fault.happened
    assert found.result.record["facts"]["best_round"] == 1
    clients = participants(found.players)
    assert len({tuple(client._steps.values()) for client in clients.values()}) == 1
    assert len({client.displacement[FIRST].tobytes() for client in clients.values()}) == 1
