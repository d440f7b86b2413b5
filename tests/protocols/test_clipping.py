"""A silo that uploads the largest values there are: what is left of the model, with every protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cast import casting
from networks import seeded
from torch import nn

from moretta import BAFFLE, CGD, PBPFL, FedAvg, Federation, FedSGD, Silo
from moretta.contract.messages import Message, Stamp
from moretta.protocols.common.clipping import GROWTH, MULTIPLE, SETTLED, Clip, RunningMedian, SummedStep
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.training import Training
from moretta.run.result import Result

NAMES, SPOILER, ROUNDS = ("north", "south", "east", "west", "centre"), "south", 24
SPOILED = (8, 15)
LIMIT = 6e4  # of 2^16, the default


def silo(name: str, number: int) -> Silo:
    x = np.random.default_rng(number).normal(0, 1, (30, 4))
    return Silo(name, x, (x[:, 0] > 0).astype(np.int64))


def train(
    protocol: Any, monkeypatch: pytest.MonkeyPatch, spoiled: tuple[int, ...], norm: bool = False, rounds: int = ROUNDS
) -> Result:
    """Train; in some rounds one silo uploads ring elements at the limit in the place of what it found."""

    def corrupt(made: Roles) -> None:
        client: Any = made.clients[SPOILER]
        contributors = client._contributors if isinstance(protocol, CGD) else {"": client._contributor}
        for one in contributors.values():
            monkeypatch.setattr(one, "upload", spoil(one.upload, spoiled))

    with seeded():
        middle = [nn.BatchNorm1d(6)] if norm else []
        model = nn.Sequential(nn.Linear(4, 6), *middle, nn.ReLU(), nn.Linear(6, 2))
    silos = [silo(name, number) for number, name in enumerate(NAMES)]
    test = silo("test", 99)
    made = Federation(model, silos, protocol, test=(test.x, test.y), batch_size=16, insecure_secret_seed=1)
    with casting(corrupt):
        return made.train(rounds)


def spoil(upload: Any, spoiled: tuple[int, ...]) -> Any:
    def spoiling(stamp: Stamp, tensors: Any, *rest: Any, **named: Any) -> Message:
        if stamp.round in spoiled and not any(name.startswith("moments/") for name in tensors):
            tensors = {name: np.full(value.shape, LIMIT) for name, value in tensors.items()}
        answer: Message = upload(stamp, tensors, *rest, **named)
        return answer

    return spoiling


PROTOCOLS = {
    "fedsgd": FedSGD(loss="cross-entropy", learning_rate=0.3),
    "fedavg": FedAvg(loss="cross-entropy", learning_rate=0.3, local_epochs=1),
    "pbpfl": PBPFL(loss="cross-entropy", learning_rate=0.3),
    "pbpfl, squared error": PBPFL(loss="mse", learning_rate=0.1),
    "baffle": BAFFLE(loss="cross-entropy", learning_rate=0.1, k=64),
    "cgd": CGD(loss="cross-entropy", learning_rate=1.0, delta=0.1),
}


def kinds(*fast: str) -> list[Any]:
    """All protocols; those beside some that clip in the same place are slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in PROTOCOLS]


@pytest.mark.parametrize("name", kinds("fedsgd", "pbpfl", "cgd"))
def test_a_run_survives_rounds_that_one_silo_spoils(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    result = train(PROTOCOLS[name], monkeypatch, SPOILED)
    said = [record.getMessage() for record in caplog.records if "was clipped to" in record.getMessage()]
    for number in SPOILED:
        assert any(f"round {number}: the silos' sum of gradients" in sentence for sentence in said)
    if name != "cgd":  # there participants clip, and the aggregator sees nothing
        assert [line["round"] for line in result.history if "clipped" in line] == list(SPOILED)
        assert any("rounds 8, 15" in warning for warning in result.record["warnings"])
    assert result.record["dropped"] == []
    assert result.record["test"]["accuracy"] >= 0.75


def test_running_statistics_survive_too(monkeypatch: pytest.MonkeyPatch) -> None:
    result = train(PROTOCOLS["fedsgd"], monkeypatch, SPOILED, norm=True)
    assert [line["round"] for line in result.history if "clipped_buffers" in line] == list(SPOILED)
    assert result.model is not None
    assert float(result.model.state_dict()["1.running_var"].max()) < 1e3
    assert result.record["test"]["accuracy"] >= 0.75


@pytest.mark.parametrize("name", kinds("fedsgd", "cgd"))
def test_a_run_that_nobody_spoils_is_not_clipped(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    result = train(PROTOCOLS[name], monkeypatch, ())
    assert not [record for record in caplog.records if "clipped" in record.getMessage()]
    assert not any("clipped" in key for line in result.history for key in line)


def test_the_first_five_rounds_set_the_measure() -> None:
    clip = Clip("gradients")
    ordinary = {"w": np.array([3.0, 4.0])}
    assert [clip.factor(ordinary, number) for number in range(1, SETTLED + 1)] == [1.0] * SETTLED
    assert clip.factor({"w": np.array([0.0, 5.0 * MULTIPLE])}, 6) == 1.0
    assert clip.factor({"w": np.array([0.0, 5.1 * MULTIPLE])}, 7) == pytest.approx(1.0 / (1.02 * MULTIPLE))
    assert clip.factor({"w": np.array([0.0, 1e300])}, 8) == 0.0  # its norm leaves float64: nothing is left of it


def test_who_spoils_every_round_moves_the_measure_slowly() -> None:
    clip = Clip("gradients", [1.0] * 20)
    bounds = [clip.factor({"w": np.array([1e12])}, number) * 1e12 for number in range(40)]
    assert bounds[0] == pytest.approx(1.0)
    assert bounds[11] <= GROWTH**2  # and not 1e12


def test_of_two_medians_the_larger_counts() -> None:
    assert RunningMedian([1.0] * 50 + [0.01] * 11).note(0) == 1.0  # a run that has fitted its rows
    assert RunningMedian([0.01] * 50 + [1.0] * 11).note(0) == 1.0  # one that has left a plateau
    empty = RunningMedian()
    empty.note(0.0)
    assert empty.seen == []


def test_the_measure_is_taken_up_from_a_checkpoint() -> None:
    def step_of(norms: list[float]) -> SummedStep:
        found = SummedStep(nn.Linear(2, 1), Training(), 10)
        for number, norm in enumerate(norms, 1):
            gradient = {"weight": np.array([[norm, 0.0]]), "bias": np.zeros(1)}
            assert found.step(gradient, number) == {}
        return found

    before, after = step_of([1.0, 2.0, 3.0, 4.0, 5.0]), step_of([])
    after.restore(before.state())
    spoiled = {"weight": np.array([[3.0 * 256.0, 0.0]]), "bias": np.zeros(1)}
    assert before.step(spoiled, 6) == after.step(spoiled, 6) == {"clipped": 3.0 / (3.0 * 256.0)}
