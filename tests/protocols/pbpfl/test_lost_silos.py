"""A silo that is lost between the two exchanges of cross-entropy: the round goes on, exactly, with the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from networks import perceptron
from torch import nn

from moretta import PBPFL, Engine, Faults, Federation, FedSGD, Silo
from moretta.contract.messages import Message
from moretta.contract.roles import Client
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.training import Training
from moretta.protocols.pbpfl.messages import Softmax
from moretta.protocols.registry import build
from moretta.run import federation

COUNTS = {"north": 20, "south": 33, "east": 9, "west": 15, "centre": 27}
LOST = {2: "south", 4: "north"}
ROUNDS = 5


def silo(name: str, count: int) -> Silo:
    x = np.random.default_rng(count).normal(0, 1, (count, 4))
    return Silo(name, x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 1))


def make(protocol: Training, **settings: Any) -> Federation:
    model = perceptron(4, 6, 3, between=nn.ReLU)
    silos = [silo(name, count) for name, count in COUNTS.items()]
    return Federation(model, silos, protocol, batch_size=8, dtype="float64", insecure_secret_seed=1, **settings)


def lose_in_the_second_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    def casting(setting: Setting) -> Roles:
        made = build(setting)
        for name, client in made.clients.items():
            monkeypatch.setattr(client, "answer", lossy(name, client))
        return made

    def lossy(name: str, client: Client) -> Any:
        answer = client.answer

        def answering(message: Message) -> Message:
            if isinstance(message, Softmax) and LOST.get(message.stamp.round) == name:
                raise ConnectionError("the line is dead")
            return answer(message)

        return answering

    monkeypatch.setattr(federation, "build", casting)


@pytest.mark.parametrize("variant", ["probabilities", "paper"])
def test_its_part_is_left_out_and_the_rest_is_exact(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"loss": "cross-entropy", "learning_rate": 0.1}
    drop = [{"round": number, "silo": name} for number, name in LOST.items()]
    faults = Faults.model_validate({"drop": drop})
    plain = make(FedSGD.model_validate(shared), engine=Engine(faults=faults)).train(ROUNDS)

    lose_in_the_second_exchange(monkeypatch)
    result = make(PBPFL.model_validate(shared | {"variant": variant})).train(ROUNDS)
    assert [line["attempt"] for line in result.history] == [0] * ROUNDS
    assert [(one["round"], one["silo"]) for one in result.record["dropped"]] == list(LOST.items())
    assert all("the line is dead" in one["reason"] for one in result.record["dropped"])
    assert [line["rows"] for line in result.history] == [line["rows"] for line in plain.history]
    np.testing.assert_allclose(
        [line["loss"] for line in result.history], [line["loss"] for line in plain.history], rtol=0, atol=1e-8
    )
    assert result.model is not None
    assert plain.model is not None
    torch.testing.assert_close(result.model.state_dict(), plain.model.state_dict(), rtol=0, atol=1e-8)
