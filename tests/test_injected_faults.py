"""Faults that a user asks for: rounds are the survivors' own, and the run says who was dropped and why."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import perceptron
from refused_rows import Row, refused
from test_cli import call, prepare
from torch import nn

from moretta import Centralised, Engine, Faults, Federation, FedSGD, Local, SecureAggregation, Silo
from moretta.engines.run_folder import read_json
from moretta.errors import RunFailed
from moretta.protocols.common import modules
from moretta.protocols.common.modules import first_weights

COUNTS = {"north": 20, "south": 33, "east": 9, "west": 15}
RATE = 0.05


def silo(name: str, count: int) -> Silo:
    x = np.random.default_rng(count).normal(0, 1, (count, 4))
    return Silo(name, x, x[:, :2] @ np.array([[1.0, -1.0], [0.5, 2.0]]))


SILOS = [silo(name, count) for name, count in COUNTS.items()]


def network() -> nn.Module:
    return perceptron(4, 5, 2).to(torch.float64)


def make(faults: Faults | None, scheme: str = "none", **settings: Any) -> Federation:
    engine = Engine(faults=faults, **settings.pop("engine", {}))
    chosen: dict[str, Any] = {"protocol": FedSGD(learning_rate=RATE), "batch_size": 0, "dtype": "float64"}
    aggregation = SecureAggregation(scheme=scheme)  # type: ignore[arg-type]
    return Federation(network(), SILOS, engine=engine, aggregation=aggregation, **(chosen | settings))


def drop(*rows: tuple[int, str] | tuple[int, str, str]) -> Faults:
    keys = ("round", "silo", "phase")
    return Faults.model_validate({"drop": [dict(zip(keys, row, strict=False)) for row in rows]})


def by_hand(present: list[list[str]]) -> dict[str, np.ndarray]:
    """The weights after rounds of plain gradient descent, each on all rows of those who were present."""
    model = first_weights(network())
    for names in present:
        x = torch.tensor(np.concatenate([one.x for one in SILOS if one.name in names]))
        y = torch.tensor(np.concatenate([one.y for one in SILOS if one.name in names]))
        model.zero_grad()
        ((model(x) - y) ** 2).sum(1).div(2).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= RATE * parameter.grad
    return copy.deepcopy(modules.arrays(model))  # type: ignore[return-value]


def listed(record: Any) -> list[tuple[int, str, str]]:
    return [(one["round"], one["silo"], one["reason"].partition(":")[0]) for one in record["dropped"]]


ALL = list(COUNTS)


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
@pytest.mark.parametrize("phase", ["set-up", "upload"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_round_is_that_of_its_survivors(scheme: str, phase: str, strict: bool) -> None:
    faults = drop((2, "south", phase), (4, "north", phase))
    result = make(faults, scheme, engine={"strict": strict}).train(5)
    present = [ALL, ["north", "east", "west"], ALL, ["south", "east", "west"], ALL]
    assert result.model is not None
    for name, expected in by_hand(present).items():
        np.testing.assert_allclose(modules.arrays(result.model)[name], expected, rtol=0, atol=1e-8)
    assert [line["rows"] for line in result.history] == [sum(map(COUNTS.__getitem__, names)) for names in present]
    assert listed(result.record) == [(2, "south", "disconnected"), (4, "north", "disconnected")]
    assert [len(line["dropped"]) for line in result.history] == [0, 1, 0, 1, 0]


def test_who_vanishes_after_its_upload_is_in_the_sum_and_named() -> None:
    faults = drop((2, "south", "unmasking"))
    result = make(faults, "pairwise").train(3)
    assert result.model is not None
    for name, expected in by_hand([ALL] * 3).items():
        np.testing.assert_allclose(modules.arrays(result.model)[name], expected, rtol=0, atol=1e-8)
    assert [(line["rows"], line["attempt"]) for line in result.history] == [(77, 0)] * 3
    assert listed(result.record) == [(2, "south", "disconnected")]
    assert not make(faults, "none").train(3).record["dropped"], "in the clear there is nothing to unmask"


def test_who_is_slow_or_cut_short_is_out_of_the_round_for_its_own_reason() -> None:
    faults = Faults.model_validate(
        {
            "delay": [{"round": 1, "silo": "west", "seconds": 3600}, {"round": 3, "silo": "west", "seconds": 0.001}],
            "corrupt": [{"round": 2, "silo": "east"}],
        }
    )
    result = make(faults, engine={"deadline": 1800.0}).train(3)
    assert listed(result.record) == [(1, "west", "late"), (2, "east", "malformed")]
    assert all("fault injection: " in one["reason"] for one in result.record["dropped"])
    assert [line["rows"] for line in result.history] == [62, 68, 77]
    assert not make(faults).train(1).record["dropped"], "without a deadline one waits"


def test_bytes_are_a_mean_over_those_who_were_asked() -> None:
    clean, short, after = (line["bytes"] for line in make(drop((2, "west"))).train(3).history)
    assert (after["up"], after["down"]) == (clean["up"], clean["down"])
    # All four were asked and three sent; where the round was repeated, three were asked and sent once more.
    told, sent = 4 * short["down"] / clean["down"], 4 * short["up"] / clean["up"]
    assert (round(told), round(sent)) in {(4, 3), (7, 6)}
    assert (told, sent) == (pytest.approx(round(told), rel=0.01), pytest.approx(round(sent), rel=0.01))


def test_the_run_folder_tells_of_them(tmp_path: Path) -> None:
    result = make(drop((1, "north"), (2, "north"), (2, "east")), out=tmp_path / "run").train(3)
    record = read_json(tmp_path / "run" / "result.json")
    assert listed(record) == [(1, "north", "disconnected"), (2, "north", "disconnected"), (2, "east", "disconnected")]
    assert record["dropped"][0]["reason"] == (
        "disconnected: fault injection: unreachable from the upload of round 1 on"
    )
    assert any("faults were injected" in warning for warning in record["warnings"])
    assert record["settings"]["engine"]["faults"]["drop"][0] == {"round": 1, "silo": "north", "phase": "upload"}
    assert (tmp_path / "run" / "log.txt").read_text().count("fault injection") == 3
    page = result.report(tmp_path / "report.html").read_text()
    assert "Rounds in which a silo missed an answer, 3 in all" in page
    assert not any("faults" in warning for warning in make(None).train(1).record["warnings"])


def test_rounds_that_nobody_is_left_for_fail_by_name_and_are_resumed_without_faults(tmp_path: Path) -> None:
    away = make(drop(*((number, name) for number in (1, 2, 3, 4) for name in ALL)))
    with pytest.raises(RunFailed, match=r"round 4 cannot be completed by 0 of 4 silos.*north: fault injection: "):
        away.train(9)
    bad = Faults.model_validate({"corrupt": [{"round": 3, "silo": name} for name in ALL]})
    of = make(bad, out=tmp_path / "run", checkpoint_every=1)
    with pytest.raises(RunFailed, match=r"round 3 cannot be .* by 0 of 4 silos.*north: fault injection: the last byte"):
        of.train(4)
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]
    resumed = make(None, out=tmp_path / "run", checkpoint_every=1).train(4, resume=True)
    make(None, out=tmp_path / "whole").train(4)
    assert not resumed.record["dropped"]
    one, other = (tmp_path / folder / "model.safetensors" for folder in ("run", "whole"))
    assert one.read_bytes() == other.read_bytes()


def test_the_baselines_too_have_silos_that_drop_but_for_the_pool_of_all() -> None:
    faults = Faults(drop=drop((1, "north")).drop, drop_probability=0.9)
    assert not make(faults, protocol=Centralised()).train(3).record["dropped"]
    alone = make(drop((2, "north")), protocol=Local()).train(3)
    assert listed(alone.record) == [(2, "north", "disconnected")]
    assert set(alone.models) == set(ALL)


@refused("injected_faults.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_from_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    with Path("run.toml").open("a") as stream:
        stream.write('\n[engine.faults]\ndrop = [{ round = 2, silo = "silo-2" }]\n')
    done = call("train", "run.toml", "--out", "mine", "--set", "secure-aggregation.scheme=none", "--json")
    assert done.code == 0, done.err
    assert listed(done.told) == [(2, "silo-2", "disconnected")]
    again = call("train", "mine/run.toml", "--out", "again", "--json")
    assert again.told["dropped"] == done.told["dropped"], "the run file as resolved has them as well"
    wrong = call("train", "run.toml", "--out", "other", "--set", "engine.faults.drop=[{round = 2, silo = 'silo-9'}]")
    assert wrong.code == 2
    assert wrong.sentence.startswith("[engine.faults] drop: no silo is called `silo-9`; did you mean `silo-")
    assert not Path("other").exists()
