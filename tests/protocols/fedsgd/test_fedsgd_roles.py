"""What FedSGD's roles refuse, and what a dropped silo costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import plain_sgd
import pytest
import torch
from cast import cast_only
from networks import perceptron
from torch import nn

from moretta import Federation, FedSGD, Local, SecureAggregation, Silo
from moretta.contract.messages import Message, Stamp
from moretta.errors import MisuseError, PeerError
from moretta.protocols.common import modules
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.modules import first_weights
from moretta.protocols.fedsgd.client import Client
from moretta.protocols.fedsgd.messages import Show, Shown, Step, Stepped, TrainOn

NOW = Stamp("run", 1, 0)


def silos() -> list[Silo]:
    made = []
    for seed, (name, rows) in enumerate([("north", 21), ("south", 40), ("east", 9)]):
        x = np.random.default_rng(seed).normal(0, 1, (rows, 4))
        made.append(Silo(name, x, x[:, :3] ** 2))
    return made


def network() -> nn.Sequential:
    return perceptron(4, 6, 3).double()


def federation(protocol: Any, scheme: Any = "none") -> Federation:
    secure = SecureAggregation(scheme=scheme, threshold=2 if scheme == "pairwise" else None)  # bears the loss of one
    return Federation(network(), silos(), protocol, dtype="float64", batch_size=8, aggregation=secure)


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_a_round_without_a_silo_is_plain_sgd_on_the_rows_of_the_others(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Client.answer

    def away(self: Client, message: Message) -> Message:
        if isinstance(message, TrainOn) and message.stamp.round == 3 and self.rows.batches.rows == 40:
            raise PeerError("away")
        return answer(self, message)

    monkeypatch.setattr(Client, "answer", away)
    result = federation(FedSGD(learning_rate=0.05, momentum=0.9), scheme).train(6, seed=2)
    assert [gone["silo"] for gone in result.record["dropped"]] == ["south"]
    model, rounds = first_weights(network()), []
    for number in range(1, 7):
        there = [silo for silo in silos() if number != 3 or silo.name != "south"]
        index = {silo.name: Batches(len(silo.x), 8, 2, silo.name).of_round(number) for silo in there}
        x = np.concatenate([silo.x[index[silo.name]] for silo in there])
        y = np.concatenate([silo.y[index[silo.name]] for silo in there])
        rounds.append((torch.tensor(x), torch.tensor(y)))
    plain_sgd.train(model, rounds, "mse", 0.05, 0.9)
    assert result.model is not None
    for name, value in modules.arrays(model).items():
        # Float64's rounding, or the ring's step of about 2^16 / 2^62 in a gradient, in six rounds at rate 0.5 in all.
        bound = 1e-14 if scheme == "none" else 1e-12
        np.testing.assert_allclose(modules.arrays(result.model)[name], value, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("protocol", "foreign"), [(FedSGD(), Step(stamp=NOW)), (Local(), Shown(stamp=NOW, parameters={}))]
)
def test_a_message_of_another_protocol_is_refused(protocol: Any, foreign: Message) -> None:
    made = federation(protocol)
    for client in cast_only(made).clients.values():
        with pytest.raises(MisuseError, match=f"has no answer to `{foreign.TAG}`"):
            client.answer(foreign)


def test_a_lone_silo_says_its_loss_before_the_step_and_shows_its_model() -> None:
    made = federation(Local(learning_rate=0.05))
    client = cast_only(made).clients["north"]
    rows, model = Batches(21, 8, 2, "north").of_round(1), first_weights(network())
    loss = loss_of(model, rows)
    stepped = client.answer(Step(stamp=NOW))
    assert isinstance(stepped, Stepped)
    assert (stepped.loss, stepped.rows) == (loss, 8)
    shown = client.answer(Show(stamp=NOW))
    assert isinstance(shown, Shown)
    plain_sgd.train(model, [(torch.tensor(silos()[0].x[rows]), torch.tensor(silos()[0].y[rows]))], "mse", 0.05)
    for name, value in modules.arrays(model).items():
        assert shown.parameters[name].tobytes() == value.tobytes()


def loss_of(model: nn.Module, rows: np.ndarray) -> float:
    return float(Loss("mse")(model(torch.tensor(silos()[0].x[rows])), torch.tensor(silos()[0].y[rows])).detach())
