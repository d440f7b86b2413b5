"""A training loop of the user's own under federated averaging: what it comes to is what is summed."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import SGDClassifier
from test_contract import network, silos, weights
from torch import Tensor, nn

from moretta import FedAvg, Federation, FedProx, FedSGD, SecureAggregation, Silo
from moretta.config import run_files
from moretta.errors import ParameterError
from moretta.run import consent
from moretta.run.assembly import federation_of

RATE, EPOCHS = 0.1, 3


def epochs(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
    """Take the steps of federated averaging with whole batches, in three epochs."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, len(x)


def by_names(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
    """Return the same as arrays, in the place of the module."""
    trained, rows = epochs(model, x, y, number)
    return {name: tensor.numpy() for name, tensor in trained.state_dict().items()}, np.int64(rows)


def trained(held: list[Silo] | None = None, rounds: int = 3, model: Any = None, **given: Any) -> Any:
    protocol = FedAvg(loss="cross-entropy", **given)
    settings: dict[str, Any] = {"insecure_secret_seed": 5, "batch_size": 0, "dtype": "float64"}
    return Federation(model or network(), held or silos(), protocol, **settings).train(rounds, 7, progress=False)


@pytest.mark.parametrize("fit", [epochs, by_names])
@pytest.mark.parametrize("scheme", ["none", "pairwise", "additive-shares"])
def test_our_epochs_by_hand_come_to_our_weights(fit: Any, scheme: Any) -> None:
    held = silos({"north": 8, "south": 20, "west": 12})
    settings: dict[str, Any] = {"aggregation": SecureAggregation(scheme=scheme), "batch_size": 0, "dtype": "float64"}
    protocols = (FedAvg(loss="cross-entropy", fit=fit), FedAvg(loss="cross-entropy", local_epochs=EPOCHS))
    both: list[Any] = [Federation(network(), held, one, **settings).train(3, 7, progress=False) for one in protocols]
    ours, theirs = (result.model.state_dict() for result in both)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_a_silo_counts_by_the_rows_that_it_trained_on_and_the_loss_is_of_what_it_came_to() -> None:
    seen: list[tuple[int, int]] = []

    def half(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
        seen.append((number, len(x)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(len(x)))
        return model, len(x) // 2

    result = trained(silos({"north": 8, "south": 24}), rounds=2, fit=half)
    mean = (4 * 8.0 + 12 * 24.0) / 16
    for parameter in result.model.parameters():
        torch.testing.assert_close(parameter, torch.full_like(parameter, mean), rtol=0, atol=1e-9)
    assert [line["rows"] for line in result.history] == [16.0, 16.0]
    assert sorted(seen) == [(1, 8), (1, 24), (2, 8), (2, 24)]
    assert result.history[0]["loss"] == pytest.approx(np.log(3), rel=1e-9)  # all outputs alike


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_running_statistics_are_averaged_and_what_is_frozen_stays(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()

    def fit(model: Any, x: Tensor, y: Tensor, number: int) -> Any:
        with torch.no_grad():
            model[1].running_mean.fill_(len(x))
        return model.to(dtype), len(x)

    def thawing(model: Any, x: Tensor, y: Tensor, number: int) -> Any:
        return epochs(model.requires_grad_(True), x, y, number)

    with pytest.raises(ParameterError, match=r"changed `0.weight`, which is frozen in the run and not summed; leave"):
        trained(rounds=1, model=model, fit=thawing)
    result = trained(silos({"north": 8, "south": 24}), rounds=1, model=model, fit=fit)
    torch.testing.assert_close(result.model[0].weight.detach(), frozen.double())
    torch.testing.assert_close(
        result.model[1].running_mean, torch.full((5,), 20.0, dtype=torch.float64), atol=1e-9, rtol=0
    )


def test_partial_fit_of_scikit_learn_trains_a_linear_model() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 4)).astype(np.float32)
    y = (x @ np.array([[1.0, 0.0, -1.0], [-1.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.0, -0.5, 0.0]])).argmax(axis=1)

    def fit(model: Any, x: Tensor, y: Tensor, number: int) -> Any:
        learner = SGDClassifier(loss="log_loss", random_state=number)
        learner.partial_fit(x.numpy(), y.numpy(), classes=np.arange(3))
        learner.coef_, learner.intercept_ = (one.detach().numpy().copy() for one in (model.weight, model.bias))
        for _ in range(5):
            learner.partial_fit(x.numpy(), y.numpy())
        return {"weight": learner.coef_, "bias": learner.intercept_}, len(x)

    held = [Silo("north", x[:80], y[:80]), Silo("south", x[80:200], y[80:200])]
    torch.manual_seed(0)
    result = trained(held, rounds=4, model=nn.Linear(4, 3), fit=fit)
    found = result.model(torch.from_numpy(x[200:]).double()).argmax(dim=1).numpy()
    assert np.mean(found == y[200:]) > 0.85  # a third by chance, of rows that nobody trained on


def test_a_loop_that_writes_to_its_rows_changes_no_later_round() -> None:
    """Rows were three times as large in each round as in the one before."""

    def scaling(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
        made = epochs(model, x, y, number)
        x.numpy()[:] *= 3
        y.zero_()
        return made

    assert weights(trained(fit=scaling)) == weights(trained(fit=epochs))


def test_a_loop_that_trains_a_copy_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def idle(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
        epochs(copy.deepcopy(model), x, y, number)
        return model, len(x)

    said = "the loss is the same after each of 3 rounds, so the model learned nothing"
    assert said in " ".join(trained(fit=idle).record["warnings"])
    assert "returned the weights that it was given; return the model that it trained" in caplog.text
    assert "learned nothing" not in " ".join(trained(fit=epochs).record["warnings"])


def test_random_numbers_are_the_same_in_another_run() -> None:
    def fit(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        return model, len(x)

    torch.manual_seed(1)
    first = trained(fit=fit)
    torch.manual_seed(2)
    assert weights(first) == weights(trained(fit=fit))


def changed(change: Any) -> Any:
    """Return a loop whose weights at one silo, the one of 8 rows, in round 2 are what `change` makes of them."""

    def fit(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
        if number != 2 or len(x) != 8:
            return epochs(model, x, y, number)
        return change(model, len(x))

    return fit


def _without_one(model: nn.Module, rows: int) -> Any:
    return dict(list(model.state_dict().items())[1:]), rows


def _other_shapes(model: nn.Module, rows: int) -> Any:
    return {name: tensor[..., None] for name, tensor in model.state_dict().items()}, rows


def _nan(model: nn.Module, rows: int) -> Any:
    return {name: tensor * float("nan") for name, tensor in model.state_dict().items()}, rows


def _words(model: nn.Module, rows: int) -> Any:
    return dict.fromkeys(model.state_dict(), "many"), rows


def _integers(model: nn.Module, rows: int) -> Any:
    return {name: tensor.mul(127).to(torch.int8) for name, tensor in model.state_dict().items()}, rows


WRONG: dict[str, tuple[Any, str]] = {
    "an error": (lambda model, rows: model.missing, "failed in round 2 with"),
    "nothing": (
        lambda model, rows: None,
        "expected weights and a number of rows, `return model, len(x)`; got NoneType",
    ),
    "no number": (lambda model, rows: model, "expected weights and a number of rows"),
    "no weights": (lambda model, rows: (3, rows), "expected the model or a mapping of names to tensors, got int"),
    "no rows": (lambda model, rows: (model, 0), "expected a number of rows from 1 to 8"),
    "too many": (lambda model, rows: (model, 9), "expected a number of rows from 1 to 8, which the silo has; got 9"),
    "half a row": (lambda model, rows: (model, 2.5), "expected a number of rows from 1 to 8"),
    "yes": (lambda model, rows: (model, True), "expected a number of rows from 1 to 8"),
    "a tensor less": (_without_one, "the weights lack `"),
    "other shapes": (_other_shapes, "of shape"),
    "words": (_words, "is not an array of numbers"),
    "integers": (_integers, "of float64, got int8; return the weights as they train"),
    "not finite": (_nan, "has NaN or infinity"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_loop_that_fails_at_one_silo_costs_it_the_round_and_names_it(name: str) -> None:
    change, said = WRONG[name]
    held = silos({"north": 8, "south": 24, "west": 20, "east": 16})
    result = trained(held, fit=changed(change))
    assert len(result.history) == 3
    assert [line["rows"] for line in result.history] == [68.0, 60.0, 68.0]
    assert "north" in str(result.history[1])
    assert said in str(result.history[1])


OF_STEPS: dict[str, Any] = dict.fromkeys(("learning_rate", "momentum", "weight_decay", "clip_norm"), 0.5) | {
    "local_epochs": 2, "lr_schedule": "cosine", "first_rate": 0.5, "epoch_rounds": 2, "checkpoint_minutes": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("key", OF_STEPS)
def test_settings_of_our_own_steps_are_refused(key: str) -> None:
    with pytest.raises(ParameterError, match=f"fit trains by a loop of its own, and {key.replace('_', '-')} is for"):
        FedAvg(fit=epochs, **{key: OF_STEPS[key]})


MODULE = """
def fit(model, x, y, number):
    return model, len(x)
"""
RUN = """
[run]
rounds = 2
[data]
source = "rows.csv"
task = "classification"
[model]
source = "mlp"
layers = 2
width = 4
[protocol]
name = "fedavg"
fit = "ours:fit"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> run_files.RunFile:
    random = np.random.default_rng(0)
    rows = [",".join(f"{value:.3f}" for value in random.normal(size=4)) + f",{number % 2}" for number in range(40)]
    (tmp_path / "rows.csv").write_text("a,b,c,d,y\n" + "\n".join(rows) + "\n")
    (tmp_path / "ours.py").write_text(MODULE)
    (tmp_path / "run.toml").write_text(RUN)
    return run_files.load(tmp_path / "run.toml")


def test_a_run_file_names_it_and_it_is_code_that_is_asked_for(run_file: run_files.RunFile, tmp_path: Path) -> None:
    result = federation_of(run_file, tmp_path / "run").train(2, progress=False)
    assert result.record["settings"]["protocol"]["fit"] == "ours:fit"
    assert result.history[0]["loss"] == result.history[1]["loss"]  # the loop leaves the model as it is
    assert set(consent.code_named(run_file, data=True)) == {"ours:fit"}
    with pytest.raises(ParameterError, match='module "ours" has no function "missing"'):
        federation_of(run_files.load(tmp_path / "run.toml", ["protocol.fit=ours:missing"]), None)


def test_code_that_changed_on_the_way_is_said_and_stays_said(run_file: run_files.RunFile, tmp_path: Path) -> None:
    """Rows and settings were compared, and rounds by two loops were one result without a word."""

    def warnings(rounds: int, resume: bool = True) -> str:
        made = federation_of(run_file, tmp_path / "run").train(rounds, resume=resume, progress=False)
        return " ".join(made.record["warnings"])

    said = "the run's Python files were changed after round 3"
    assert "Python files" not in warnings(2, resume=False) + warnings(3)
    (tmp_path / "ours.py").write_text(MODULE + "\n# another\n")
    assert "Python files" not in warnings(3)  # no round is left that it could change
    assert said in warnings(4)
    assert said in warnings(4)
    assert warnings(5).count("were changed after") == 1


def test_all_silos_that_fail_end_the_run_by_one_sentence() -> None:
    with pytest.raises(ParameterError, match=r"fit `test_own_loop:.*failed in round 1"):
        trained(fit=lambda model, x, y, number: model.missing)


def test_an_audit_says_that_its_attacks_do_not_know_it(tmp_path: Path) -> None:
    federation = Federation(
        network(), silos(), FedAvg(loss="cross-entropy", fit=epochs), out=tmp_path / "run", record_views=True
    )
    audit = federation.train(1, progress=False).audit()
    assert not audit.attacks
    assert audit.record["not_run"]
    assert all("loop of their own (fit)" in one["because"] for one in audit.record["not_run"])


def test_a_silos_own_loop_stands_before_the_protocols_and_beside_the_built_in_epochs() -> None:
    held = silos({"north": 8, "south": 20, "west": 12})
    settings: dict[str, Any] = {"batch_size": 0, "dtype": "float64"}
    with_loops = [replace(held[0], fit=epochs), held[1], replace(held[2], fit=by_names)]
    both: list[Any] = [
        Federation(network(), one, FedAvg(loss="cross-entropy", local_epochs=EPOCHS), **settings).train(
            3, 7, progress=False
        )
        for one in (with_loops, held)
    ]
    torch.testing.assert_close(*(result.model.state_dict() for result in both), rtol=0, atol=1e-9)
    said = both[0].record["settings"]["protocol"]["fit"]
    assert "test_own_loop:epochs" in said
    assert "test_own_loop:by_names" in said
    assert both[1].record["settings"]["protocol"]["fit"] is None

    def zero(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
        return {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}, len(x)

    result = trained([replace(one, fit=zero) for one in held], rounds=1, fit=epochs)
    assert max(float(parameter.detach().abs().max()) for parameter in result.model.parameters()) < 1e-9


def test_a_silos_own_loop_is_refused_where_nothing_calls_it() -> None:
    held = silos({"north": 8, "south": 20, "west": 12})
    with pytest.raises(ParameterError, match="silo `north`: fit: expected a function of model, x, y and round; got"):
        replace(held[0], fit=3)  # type: ignore[arg-type]
    mine = [replace(held[0], fit=epochs), *held[1:]]
    with pytest.raises(ParameterError, match="under fedavg or fedprox, and fedsgd has built-in steps alone; remove"):
        Federation(network(), mine, FedSGD(loss="cross-entropy"))
    with pytest.raises(ParameterError, match="and its rows are on another machine; remove fit"):
        Federation(network(), [replace(mine[0], remote=True), *held[1:]], FedAvg(loss="cross-entropy"))


MU = 0.7


def accumulating(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
    """Take the same steps, each of two gradients of halves that are added up."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for _ in range(EPOCHS):
        optimizer.zero_grad(set_to_none=False)
        for half in (slice(None, len(x) // 2), slice(len(x) // 2, None)):
            loss = nn.functional.cross_entropy(model(x[half]), y[half], reduction="sum") / len(x)
            loss.backward()
        optimizer.step()
    return model, len(x)


@pytest.mark.parametrize("fit", [epochs, accumulating])
def test_fedprox_pulls_a_loop_as_it_pulls_its_own_epochs(fit: Any) -> None:
    held, settings = silos({"north": 8, "south": 20, "west": 12}), {"batch_size": 0, "dtype": "float64"}
    protocols = (
        FedProx(loss="cross-entropy", mu=MU, fit=fit),
        FedProx(loss="cross-entropy", mu=MU, local_epochs=EPOCHS),
        FedAvg(loss="cross-entropy", local_epochs=EPOCHS),
    )
    results: list[Any] = [
        Federation(network(), held, one, **settings).train(3, 7, progress=False)  # type: ignore[arg-type]
        for one in protocols
    ]
    pulled, theirs, free = (torch.cat([one.reshape(-1) for one in r.model.parameters()]) for r in results)
    torch.testing.assert_close(pulled, theirs, rtol=0, atol=1e-9)
    assert float((pulled - free).detach().abs().max()) > 1e-3


def test_fedprox_refuses_a_loop_that_it_cannot_pull() -> None:
    def other(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
        return epochs(nn.Sequential(nn.Linear(4, 3)).double(), x, y, number)

    with pytest.raises(ParameterError, match=r"computed no gradient of the model .* mu of fedprox had no effect"):
        Federation(network(), silos(), FedProx(loss="cross-entropy", mu=MU, fit=other), dtype="float64").train(
            2, progress=False
        )


class Words(nn.Module):
    """A model of token ids and a table, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.table, self.head = nn.Embedding(5, 3), nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, ids: Tensor, table: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.words(ids).mean(1) + self.table(table)))
        return out


def test_a_loop_is_given_several_arrays_by_name() -> None:
    random = np.random.default_rng(0)

    def rows(number: int) -> Any:
        x = {"ids": random.integers(0, 5, (number, 6)), "table": random.normal(size=(number, 4)).astype(np.float32)}
        return x, random.integers(0, 3, number)

    def fit(model: nn.Module, x: Any, y: Tensor, number: int) -> Any:
        assert {name: (one.dtype, tuple(one.shape[1:])) for name, one in x.items()} == {
            "ids": (torch.int64, (6,)),
            "table": (torch.float64, (4,)),
        }
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(**x), y).backward()
            optimizer.step()
        return model, len(y)

    held = [Silo("north", *rows(10)), Silo("south", *rows(14))]
    torch.manual_seed(0)
    model, settings = Words(), {"batch_size": 0, "dtype": "float64", "task": "classification"}
    protocols = (FedAvg(loss="cross-entropy", fit=fit), FedAvg(loss="cross-entropy", local_epochs=EPOCHS))
    both: list[Any] = [Federation(model, held, one, **settings).train(2, 7, progress=False) for one in protocols]  # type: ignore[arg-type]
    torch.testing.assert_close(*(result.model.state_dict() for result in both), rtol=0, atol=1e-9)
