"""A loss of the user's own: it trains as written by hand, and is refused in one sentence where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refused_rows import Row, refused
from test_contract import network, silos, weights
from torch import Tensor, nn

from moretta import BAFFLE, CGD, Centralised, Engine, FedAvg, Federation, FedProx, FedSGD, Local, Silo
from moretta.config import run_files
from moretta.errors import ParameterError
from moretta.protocols.common.training import Training
from moretta.run import consent
from moretta.run.assembly import federation_of
from moretta.secure_aggregation.settings import SecureAggregation


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    chance = outputs.softmax(dim=1).gather(1, targets[:, None])[:, 0]
    return -((1 - chance) ** 2) * chance.log()


def wrong_rows(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many rows are wrong, of each 0 or 1: it has no gradient, and a forward-only protocol needs none."""
    return (outputs.argmax(dim=1) != targets).to(outputs.dtype)


SETTINGS: dict[str, Any] = {"loss": "cross-entropy", "learning_rate": 0.1}
PROTOCOLS: dict[str, Callable[..., Training]] = {
    "fedsgd": FedSGD, "fedavg": FedAvg, "fedprox": FedProx, "local": Local, "centralised": Centralised,
    "cgd": lambda **given: CGD(**given, delta=0.1),
    "baffle": lambda **given: BAFFLE(**given, k=8, sigma=1e-3, optimizer="sgd"),
}  # fmt: skip


def trained(protocol: Training, held: list[Silo] | None = None, rounds: int = 3, **settings: Any) -> Any:
    chosen: dict[str, Any] = {"insecure_secret_seed": 5, "batch_size": 8, "dtype": "float64"} | settings
    return Federation(network(), held or silos(), protocol, **chosen).train(rounds, 7, progress=False)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_built_in_one_by_hand_trains_the_same(name: str) -> None:
    rounds = 1 if name == "baffle" else 3  # whose next directions follow from every bit of the model
    ours = trained(PROTOCOLS[name](**SETTINGS, own_loss=cross_entropy), rounds=rounds)
    theirs = trained(PROTOCOLS[name](**SETTINGS), rounds=rounds)
    models, others = ([one.model, *one.models.values()] for one in (ours, theirs))
    for model, other in zip(models, others, strict=True):
        if model is not None:
            torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=1e-6)
    for one, other in zip(ours.history, theirs.history, strict=True):
        assert ("loss" in one) == ("loss" in other)
        assert one.get("loss", 0.0) == pytest.approx(other.get("loss", 0.0), rel=1e-6)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_another_one_trains_another_model(name: str) -> None:
    ours, theirs = trained(PROTOCOLS[name](**SETTINGS, own_loss=focal)), trained(PROTOCOLS[name](**SETTINGS))
    if "loss" in ours.history[0]:
        assert ours.history[0]["loss"] != pytest.approx(theirs.history[0]["loss"], rel=1e-3)
    if ours.model is not None and ours.model.state_dict():
        assert weights(ours) != weights(theirs)


def test_a_step_is_along_its_gradient() -> None:
    one = silos({"north": 8})
    result = Federation(
        network(), one, FedSGD(loss="cross-entropy", learning_rate=0.5, own_loss=focal), batch_size=0,
        dtype="float64", aggregation=SecureAggregation(scheme="none"),
    ).train(1, progress=False)  # fmt: skip
    from moretta.protocols.common.modules import first_weights

    model = first_weights(network()).double()
    value = focal(model(torch.tensor(one[0].x, dtype=torch.float64)), torch.tensor(one[0].y)).mean()
    value.backward()
    assert result.history[0]["loss"] == pytest.approx(float(value.detach()), rel=1e-12)
    assert result.model is not None
    for (name, parameter), ours in zip(model.named_parameters(), result.model.state_dict().values(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(ours, (parameter - 0.5 * parameter.grad).detach(), rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("own", [focal, cross_entropy])
def test_small_silos_are_stepped_together_as_one_by_one(own: Any) -> None:
    held = silos({f"silo-{number}": 16 for number in range(6)})
    protocol = FedAvg(**SETTINGS, own_loss=own, local_epochs=2)
    together, alone = (trained(protocol, held, engine=Engine(strict=strict)) for strict in (False, True))
    torch.testing.assert_close(together.model.state_dict(), alone.model.state_dict(), rtol=0, atol=1e-9)


def test_a_forward_only_protocol_takes_a_loss_without_a_gradient() -> None:
    result = trained(PROTOCOLS["baffle"](**SETTINGS, own_loss=wrong_rows))
    assert all(0 <= line["loss"] <= 1 for line in result.history)
    with pytest.raises(ParameterError, match="own-loss `test_own_loss:wrong_rows` failed on 8 made-up rows"):
        trained(FedSGD(**SETTINGS, own_loss=wrong_rows))


def test_test_rows_are_scored_by_the_built_in_loss() -> None:
    held = silos()
    test = held[0].x, held[0].y
    result = trained(FedSGD(**SETTINGS, own_loss=focal), test=test)
    outputs = result.model(torch.tensor(test[0], dtype=torch.float64)).detach()
    expected = float(nn.functional.cross_entropy(outputs, torch.tensor(test[1])))
    assert result.test["loss"] == pytest.approx(expected, rel=1e-9)
    assert result.record["settings"]["protocol"]["own-loss"] == "test_own_loss:focal"


def test_numbers_are_targets_as_they_are() -> None:
    held = [Silo(one.name, one.x, one.x[:, :3].astype(np.float32)) for one in silos()]

    def huber(outputs: Tensor, targets: Tensor) -> Tensor:
        assert targets.shape == outputs.shape
        assert targets.dtype == outputs.dtype
        return nn.functional.huber_loss(outputs, targets, reduction="none").sum(dim=1)

    assert len(trained(FedSGD(own_loss=huber), held).history) == 3


REFUSED: dict[str, tuple[Any, str]] = {
    "a mean": (lambda o, t: cross_entropy(o, t).mean(), r"one number a row, \[8\], got shape \[\]"),
    "a number": (lambda o, t: 0.5, r"one number a row, \[8\], got float"),
    "too many": (lambda o, t: o, r"one number a row, \[8\], got shape \[8, 3\]"),
    "not finite": (lambda o, t: o.sum(dim=1) / 0, "expected finite numbers on made-up rows"),
    "a row among others": (
        lambda o, t: cross_entropy(o - o.mean(dim=0), t), "the same number for a row alone and among others",
    ),
    "an error": (lambda o, t: o.missing, "failed on 8 made-up rows.*AttributeError"),
    "no gradient": (lambda o, t: cross_entropy(o.detach(), t), "failed on 8 made-up rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_on_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    own, said = REFUSED[name]
    with pytest.raises(ParameterError, match=said) as caught:
        Federation(network(), silos(), FedSGD(**SETTINGS, own_loss=own), out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@refused("own_loss.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_edge_clients_and_columns_that_are_split_refuse_it() -> None:
    baffle = PROTOCOLS["baffle"](**SETTINGS, own_loss=focal)
    with pytest.raises(ParameterError, match="edge clients compute the built-in losses alone"):
        Federation(network(), silos(), baffle, engine=Engine(edge=("north",)))
    split = _grid()
    with pytest.raises(ParameterError, match="own-loss is for silos that hold whole rows"):
        Federation(network(), split, CGD(**SETTINGS, delta=0.1, own_loss=focal)).train(1, progress=False)


def _grid() -> list[Silo]:
    found = []
    for one in silos():
        for number, columns in enumerate([(0, 1), (2, 3)]):
            x = np.ascontiguousarray(one.x[:, list(columns)])
            found.append(
                Silo(f"{one.name}-{number}", x, one.y if not number else one.y[:0], one.name, columns, aligned=True)
            )
    return found


MODULE = """
from torch import nn

def build():
    return nn.Linear(4, 2)

def halved(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none") / 2

def share_of_ones(outputs, targets):
    return (outputs.argmax(dim=1) == 1).double().mean()
"""
RUN = """
[run]
rounds = 2
metrics = ["ours:share_of_ones"]
[data]
source = "rows.csv"
task = "classification"
[model]
source = "ours:build"
[protocol]
name = "fedsgd"
loss = "cross-entropy"
own-loss = "ours:halved"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> run_files.RunFile:
    random = np.random.default_rng(0)
    rows = [",".join(f"{value:.3f}" for value in random.normal(size=4)) + f",{number % 2}" for number in range(40)]
    (tmp_path / "rows.csv").write_text("a,b,c,d,y\n" + "\n".join(rows) + "\n")
    (tmp_path / "ours.py").write_text(MODULE)
    (tmp_path / "run.toml").write_text(RUN)
    return run_files.load(tmp_path / "run.toml")


def test_a_run_file_names_loss_and_metrics(run_file: run_files.RunFile, tmp_path: Path) -> None:
    result = federation_of(run_file, tmp_path / "run").train(2, progress=False)
    plain = run_files.load(tmp_path / "run.toml", ["protocol.own-loss=ours:halved"])
    assert plain == run_file
    assert result.history[0]["loss"] < 0.6
    assert 0 <= result.test["metrics"]["share_of_ones"] <= 1
    assert result.record["settings"]["protocol"]["own-loss"] == "ours:halved"
    again = run_files.load(tmp_path / "run" / "run.toml")
    assert again.protocol.own_loss == "ours:halved"
    assert run_files.digest(again) == run_files.digest(run_file)


def test_a_run_folder_s_loss_and_metrics_are_code_that_is_asked_for(run_file: run_files.RunFile) -> None:
    assert consent.code_named(run_file, data=False) == ("ours:build",)
    assert set(consent.code_named(run_file, data=True)) == {"ours:build", "ours:halved", "ours:share_of_ones"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("protocol.own-loss=3", '[protocol] own-loss: expected a function, in a run file "module:function", got 3'),
        ("protocol.own-loss=mse", '[protocol] own-loss: expected a function, in a run file "module:function"'),
        ("protocol.name=pbpfl", "own-loss: pbpfl trains exactly"),
    ],
)
def test_a_wrong_name_is_one_sentence(run_file: run_files.RunFile, tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ParameterError) as caught:
        run_files.load(tmp_path / "run.toml", [override])
    assert said in str(caught.value)


@pytest.mark.parametrize("override", ["protocol.own-loss=ours:missing", "run.metrics=['ours:missing']"])
def test_a_function_that_is_not_there_is_one_sentence(
    run_file: run_files.RunFile, tmp_path: Path, override: str
) -> None:
    with pytest.raises(ParameterError, match='module "ours" has no function "missing"'):
        federation_of(run_files.load(tmp_path / "run.toml", [override]), None)


def test_an_audit_says_that_its_attacks_do_not_know_it(tmp_path: Path) -> None:
    federation = Federation(
        network(), silos(), FedSGD(**SETTINGS, own_loss=focal), out=tmp_path / "run", record_views=True
    )
    audit = federation.train(1, progress=False).audit()
    assert not audit.attacks
    assert audit.record["not_run"]
    assert all("own-loss" in one["because"] for one in audit.record["not_run"])


def weibull(outputs: Tensor, targets: Tensor) -> Tensor:
    """Survival: minus the log of a density of times, which cannot be negative; as torchsurv's, it says so."""
    if (targets < 1.0).any():
        raise ValueError("times are below 1")
    shape, scale = outputs.exp()[:, 0], outputs.exp()[:, 1]
    times = targets[:, 0]
    return (times / scale) ** shape - torch.log(shape / scale) - (shape - 1) * torch.log(times / scale)


def test_a_loss_is_tried_on_targets_of_a_silo_s_own() -> None:
    random = np.random.default_rng(0)
    torch.manual_seed(0)  # some starts of this model diverge
    held = [Silo(name, random.normal(size=(9, 4)), 1 + random.exponential(size=(9, 2))) for name in "ab"]
    protocol = FedSGD(loss="mse", own_loss=weibull, learning_rate=1e-3)
    made = Federation(nn.Linear(4, 2), held, protocol, aggregation=SecureAggregation(scheme="none"))
    assert made.train(2, progress=False).history
    held[0].y[0] = -1.0
    with pytest.raises(ParameterError, match=r"own-loss .*weibull.*with ValueError: times are below 1"):
        Federation(nn.Linear(4, 2), held, protocol, aggregation=SecureAggregation(scheme="none"))
