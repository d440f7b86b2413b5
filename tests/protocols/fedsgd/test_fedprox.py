"""FedProx: its silos step along the gradient of the proximal objective, and without the pull it is FedAvg."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from test_fedsgd import BATCH, CLEAR, SEED, SILOS, assert_same_bytes, network, silo, weights
from torch import nn

from moretta import Engine, FedAvg, Federation, FedProx, SecureAggregation, Silo
from moretta.errors import ParameterError
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import targets
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.modules import first_weights

OPTIONS: dict[str, Any] = {
    "learning_rate": 0.05, "momentum": 0.5, "weight_decay": 0.01, "clip_norm": 1.0, "local_epochs": 3,
}  # fmt: skip


def test_three_steps_are_those_computed_by_hand() -> None:
    slope, rate, mu, x, y = 0.75, 0.25, 2.0, 2.0, -1.0
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, slope)
    one = Silo("only", np.array([[x]], np.float32), np.array([y], np.float32))
    params = FedProx(learning_rate=rate, local_epochs=3, mu=mu)
    result = Federation(model, [one], params, dtype="float64", batch_size=0, aggregation=CLEAR).train(1)
    start = weights(first_weights(model))["weight"].item()
    at = start
    for _ in range(3):  # the derivative of (w x - y)^2 / 2 + mu / 2 (w - W)^2
        at -= rate * ((at * x - y) * x + mu * (at - start))
    assert weights(result.model)["weight"].item() == pytest.approx(at, rel=0, abs=1e-15)
    assert at != pytest.approx(start, abs=0.1)


@pytest.mark.parametrize("strict", [True, False], ids=["alone", "stacked"])
def test_a_round_is_plain_training_with_the_term_in_the_loss(strict: bool) -> None:
    alike = [silo(f"silo-{number}", 2 * BATCH, number) for number in range(6)]
    settings: dict[str, Any] = {"dtype": "float64", "batch_size": BATCH, "aggregation": CLEAR}
    params = FedProx(mu=0.7, **OPTIONS)
    result = Federation(network(), alike, params, engine=Engine(strict=strict), **settings).train(1, SEED)
    sent, ends = first_weights(network()), []
    for one in alike:
        model, plan = copy.deepcopy(sent), Batches(len(one.x), BATCH, SEED, one.name)
        inputs, wanted = torch.tensor(one.x, dtype=torch.float64), targets(one.y, 3, "mse", "", torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, weight_decay=0.01)
        for index in (rows for epoch in range(3) for rows in plan.of_epoch(epoch)):
            optimizer.zero_grad()
            pairs = zip(model.parameters(), sent.parameters(), strict=True)
            distance = torch.stack([(mine - theirs.detach()).square().sum() for mine, theirs in pairs]).sum()
            (Loss("mse")(model(inputs[index]), wanted[index]) + 0.7 / 2 * distance).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        ends.append(weights(model))
    for name, value in weights(result.model).items():
        np.testing.assert_allclose(value, sum(end[name] for end in ends) / 6, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scheme", ["pairwise", "none"])
@pytest.mark.parametrize("strict", [True, False], ids=["alone", "stacked"])
def test_without_the_pull_it_is_fedavg_bit_for_bit(scheme: str, dtype: str, strict: bool) -> None:
    held = [*SILOS, silo("west", 12, 4), *(silo(f"silo-{number}", 2 * BATCH, number) for number in range(6))]
    settings: dict[str, Any] = {
        "dtype": dtype, "batch_size": BATCH, "insecure_secret_seed": 3, "engine": Engine(strict=strict),
        "aggregation": SecureAggregation.model_validate({"scheme": scheme}),
    }  # fmt: skip

    def trained(params: FedAvg | FedProx) -> Any:
        return weights(Federation(network(), held, params, **settings).train(3, SEED).model)

    averaged = trained(FedAvg(**OPTIONS))
    assert_same_bytes(trained(FedProx(mu=0, **OPTIONS)), averaged)
    assert any((value != averaged[name]).any() for name, value in trained(FedProx(mu=0.5, **OPTIONS)).items())


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_the_pull_is_a_finite_number_from_zero_on(mu: float) -> None:
    with pytest.raises(ParameterError, match="FedProx: mu: expected"):
        FedProx(mu=mu)
