"""BatchNorm by forward passes: losses of whole batches, and running statistics that the server keeps by a sum."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from baffle_runs import CLEAR, SEED, answering, learning, make, normalised, server_of, silos, table, weights
from cast import casting
from numpy.typing import NDArray
from torch import nn

from moretta import Engine, SecureAggregation
from moretta.errors import ParameterError, RowsError
from moretta.protocols.baffle.batch_statistics import moving
from moretta.protocols.baffle.silo.messages import Estimate
from moretta.protocols.baffle.torch_forward import TorchForward, layout_of
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.modules import first_weights

BY_BATCH: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.2, "k": 12, "batch_statistics": True}


def batch_of(silo: Any, number: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    index = Batches(len(silo.x), 16, SEED, silo.name).of_round(number)
    return torch.tensor(silo.x[index], dtype=torch.float64), torch.tensor(silo.y[index])


@pytest.mark.parametrize("directions", ["shared", "own"])
@pytest.mark.parametrize("scheme", ["none", "pairwise", "additive-shares"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_the_mean_of_one_update_at_each_silo(
    scheme: Any, directions: Any, momentum: float | None
) -> None:
    model = normalised()
    model[1].momentum = momentum  # type: ignore[assignment]
    protocol, secure = learning(**BY_BATCH, directions=directions), SecureAggregation(scheme=scheme)
    result = make(protocol, model=model, dtype="float64", aggregation=secure).train(1, SEED)
    start, rows, wanted = first_weights(model).double().train(), 0, dict[str, Any]()
    for silo in silos():
        own, (x, _) = copy.deepcopy(start), batch_of(silo)
        with torch.no_grad():
            own(x)
        for name in ("1.running_mean", "1.running_var"):
            wanted[name] = wanted.get(name, 0) + len(x) * own.state_dict()[name].numpy()
        rows += len(x)
    for name, value in wanted.items():
        np.testing.assert_allclose(weights(result)[name], value / rows, rtol=0, atol=1e-12)
    assert weights(result)["1.num_batches_tracked"] == 1


def test_a_round_is_a_step_along_losses_normalised_by_each_silos_batch() -> None:
    model = normalised()
    protocol = learning(**BY_BATCH)
    seen = list[Any]()

    def noted(honest: Any, ask: Any) -> Any:
        seen.append(ask)
        return honest(ask)

    with casting(answering("silo-0", Estimate, noted)) as players:
        result = make(protocol, model=model, dtype="float64", aggregation=CLEAR).train(1, SEED)
    start, server = first_weights(model).double().train(), server_of(players[0])
    layout = layout_of(start, moving(start))
    at = layout.flat({name: value.detach().numpy() for name, value in start.named_parameters()})
    purpose = (seen[0].stamp.run, 1, seen[0].parameter_hash)
    made = server._recipe.directions(12, len(at), server._seed.seed, *purpose).perturbed(np.zeros(len(at)), 1.0)
    directions = np.concatenate([part.copy() for part in made])
    estimate, rows = np.zeros(len(at)), 0
    for silo in silos():
        x, y = batch_of(silo)

        def loss(moved: NDArray[np.float64], x: Any = x, y: Any = y) -> float:
            own = copy.deepcopy(start)
            state = {name: torch.tensor(value) for name, value in layout.split(at + moved).items()}
            with torch.no_grad():
                return float(nn.functional.cross_entropy(torch.func.functional_call(own, state, (x,)), y))

        ahead = np.array([loss(protocol.sigma * row) for row in directions])
        estimate += len(x) * ((ahead - ahead.mean()) / protocol.sigma @ directions / (len(directions) - 1))
        rows += len(x)
    for name, value in layout.split(at - 0.2 * estimate / rows).items():
        np.testing.assert_allclose(weights(result)[name], value, rtol=0, atol=1e-11)


def test_it_learns_and_its_running_statistics_serve_for_rows_alone() -> None:
    settings: dict[str, Any] = BY_BATCH | {"optimizer": "adam", "learning_rate": 0.05, "k": 24}
    result = make(learning(**settings), model=normalised(), test=table(400, 5), aggregation=CLEAR).train(40, SEED)
    assert result.test["accuracy"] > 0.7
    model = result.model
    assert model is not None
    x, y = table(400, 5)
    with torch.no_grad():
        found = torch.cat([model.eval()(torch.from_numpy(x[row : row + 1])) for row in range(100)])
    assert (found.argmax(1).numpy() == y[:100]).mean() > 0.6


@pytest.mark.parametrize("phase", ["upload", "unmasking"])
def test_a_silo_that_vanishes_is_in_no_statistics(phase: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "moretta")
    drop = {"drop": [{"round": 1, "silo": "silo-3", "phase": phase}]}
    engine, parts = Engine.model_validate({"strict": True, "faults": drop}), silos((16,) * 5)
    result = make(learning(**BY_BATCH), model=normalised(), silos=parts, engine=engine, dtype="float64").train(1, SEED)
    start, means = first_weights(normalised()).double().train(), list[Any]()
    for silo in parts:
        own, (x, _) = copy.deepcopy(start), batch_of(silo)
        with torch.no_grad():
            own(x)
        if phase == "unmasking" or silo.name != "silo-3":
            means.append(own.state_dict()["1.running_mean"].numpy())
    np.testing.assert_allclose(weights(result)["1.running_mean"], np.mean(means, axis=0), rtol=0, atol=1e-12)


def test_a_forward_pass_leaves_the_models_buffers_as_they_are() -> None:
    model = normalised().train()
    forward = TorchForward(model, layout_of(model, moving(model)), by_batch=True)
    before, x = forward.fixed(), table(8)[0]
    at = forward.layout.flat({name: value.detach().numpy() for name, value in model.named_parameters()})
    one = forward.statistics(at, x)
    forward.outputs(at[None], 3 * x)
    again = forward.statistics(at, x)
    for name, value in one.items():
        np.testing.assert_array_equal(again[name], value)
    assert set(one) == {"1.running_mean", "1.running_var"}
    assert before["1.running_mean"].any() == 0
    assert not model.state_dict()["1.running_mean"].any()  # the caller's own model


@pytest.mark.parametrize(("settings", "said"), [
    ({"engine": Engine(edge=("silo-1",))}, "edge clients run a few rows at a time.*remove it, or .*batch_statistics"),
    ({"model": nn.Sequential(nn.Linear(6, 4))}, "which the model lacks; remove it"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(settings: dict[str, Any], said: str) -> None:
    chosen: dict[str, Any] = {"model": normalised(), "aggregation": CLEAR} | settings
    with pytest.raises(ParameterError, match=said):
        make(learning(**BY_BATCH), **chosen).train(3, SEED)


def test_no_batch_of_a_silo_has_one_row() -> None:
    parts = silos((17, 24, 60))  # 15 rows and two
    result = make(learning(**BY_BATCH), model=normalised(), silos=parts, aggregation=CLEAR).train(2, SEED)
    assert [at["rows"] for at in result.history] == [15 + 16 + 16, 2 + 8 + 16]
    assert not result.record["dropped"]


def test_a_silo_of_one_row_is_refused_before_round_one_here_and_in_its_round_elsewhere() -> None:
    with pytest.raises(RowsError, match="silo `silo-0`: a batch of its 1 rows has one row, on which the model cannot"):
        make(learning(**BY_BATCH), model=normalised(), silos=silos((1, 24, 60)), aggregation=CLEAR).train(2, SEED)
    model = normalised().train()
    forward = TorchForward(model, layout_of(model, moving(model)), by_batch=True)
    at = forward.layout.flat({name: value.detach().numpy() for name, value in model.named_parameters()})
    said = "a batch of 1 rows has no variance .* leaves no such rest, or use GroupNorm"
    with pytest.raises(ParameterError, match=said):
        forward.statistics(at, table(1)[0])
