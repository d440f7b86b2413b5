"""What is not trained travels once, by its digest: to whoever lacks it, and nothing else is taken for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cast import casting
from networks import perceptron
from torch import nn

from moretta import PBPFL, FedAvg, Federation, FedSGD, SecureAggregation, Silo
from moretta.contract.messages import Message, Stamp, Tensors
from moretta.contract.roles import answered
from moretta.errors import PeerError
from moretta.protocols.common import frozen, modules
from moretta.protocols.common.frozen import AskFrozen, Frozen, HoldsFrozen, TakeFrozen
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.messages import TrainOn
from moretta.secure_aggregation.keystream import digest_of

NOW = Stamp("run", 1, 0)
BASE = {"0.weight": np.ones((3, 2), "f4"), "0.bias": np.zeros(3, "f4")}
OTHER = {name: value + 1 for name, value in BASE.items()}


def adapted() -> nn.Sequential:
    """A frozen base of 1,840 numbers below a layer of 123 that is trained."""
    model = perceptron(4, 40, 40, 3)
    for layer in list(model)[:-1]:
        layer.requires_grad_(False)
    return model


def federation(protocol: Training, out: Path | None = None, model: nn.Module | None = None) -> Federation:
    drawn = np.random.default_rng(0)
    silos = [Silo(f"silo-{k}", drawn.normal(size=(9, 4)).astype("f4"), np.arange(9) % 3) for k in range(3)]
    plain = SecureAggregation(scheme="none")
    made = adapted() if model is None else model
    return Federation(made, silos, protocol, aggregation=plain, insecure_secret_seed=1, out=out)


def held(message: Message | None) -> bool:
    assert isinstance(message, HoldsFrozen)
    return message.held


def holding(tensors: Tensors) -> Frozen:
    silo = Frozen(modules.shapes(BASE))
    assert not held(silo.answer(AskFrozen(stamp=NOW, digest=digest_of(tensors))))
    assert held(silo.answer(TakeFrozen(stamp=NOW, tensors=tensors)))
    return silo


def test_a_silo_adds_what_it_was_sent_and_holds_it_over_set_ups() -> None:
    silo = holding(BASE)
    assert silo.beside({"1.weight": np.ones(2, "f4")}).keys() == {"1.weight", *BASE}
    assert held(silo.answer(AskFrozen(stamp=replace(NOW, attempt=1), digest=digest_of(BASE))))
    assert silo.agreed == (digest_of(BASE),)


def test_a_digest_whose_tensors_never_came_is_refused() -> None:
    never, silo = Frozen(modules.shapes(BASE)), holding(BASE)
    assert not held(silo.answer(AskFrozen(stamp=NOW, digest=digest_of(OTHER))))
    for one in (never, silo):
        with pytest.raises(PeerError, match="names frozen tensors that this silo was never sent"):
            one.beside({"1.weight": np.ones(2, "f4")})


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (OTHER, "whose digest was named before, got others"),
        ({"0.weight": BASE["0.weight"]}, "expected the 2 frozen tensors"),
        ({**BASE, "1.weight": np.ones(2, "f4")}, "expected the 2 frozen tensors"),
        ({**BASE, "0.bias": np.zeros(3)}, "expected the 2 frozen tensors"),
    ],
    ids=["others", "fewer", "more", "another dtype"],
)
def test_other_tensors_than_those_named_are_refused(tensors: Tensors, sentence: str) -> None:
    silo = Frozen(modules.shapes(BASE))
    silo.answer(AskFrozen(stamp=NOW, digest=digest_of(BASE)))
    with pytest.raises(PeerError, match=sentence):
        silo.answer(TakeFrozen(stamp=NOW, tensors=tensors))


def test_frozen_tensors_with_a_model_and_asked_of_a_silo_that_has_none_are_refused() -> None:
    with pytest.raises(PeerError, match=r"`0.bias` is frozen: expected it once"):
        holding(BASE).beside({**BASE})
    with pytest.raises(PeerError, match="this silo trains all of its model"):
        Frozen({}).answer(AskFrozen(stamp=NOW, digest=bytes(32)))


@pytest.mark.parametrize("protocol", [FedSGD(loss="mse"), FedAvg(loss="mse"), PBPFL(loss="mse")], ids=lambda p: p.name)
def test_rounds_send_what_is_trained_alone_and_train_as_before(
    protocol: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = federation(protocol).train(3, seed=0)
    per_round = once.bytes["down_per_silo_per_round"]
    monkeypatch.setattr(modules, "frozen", lambda module: {})  # as it was: all travels in each round
    before = federation(protocol).train(3, seed=0)
    whole = 4 * modules.size(adapted())
    trained = 4 * sum(one.numel() for one in modules.trainable(adapted()).values())
    assert trained < per_round < 0.5 * whole < whole < before.bytes["down_per_silo_per_round"]
    ours, theirs = modules.arrays(once.model or nn.Module()), modules.arrays(before.model or nn.Module())
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_a_silo_that_begins_anew_and_a_resumed_run_are_sent_them_again(tmp_path: Path) -> None:
    whole = federation(FedSGD(loss="mse")).train(4, seed=0)
    made = federation(FedSGD(loss="mse"), tmp_path / "run")
    made.train(2, seed=0)
    found = federation(FedSGD(loss="mse"), tmp_path / "run").train(4, seed=0, resume=True)
    ours, theirs = (modules.arrays(one.model or nn.Module()) for one in (found, whole))
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_a_silo_refuses_a_round_of_a_server_that_never_sent_them() -> None:
    kept = list[Roles]()
    with casting() as players:
        federation(FedSGD(loss="mse")).train(1, seed=0)
        kept += players
    silo = kept[0].clients["silo-1"]
    silo.rows.frozen = Frozen(modules.shapes(modules.frozen(adapted())))  # type: ignore[attr-defined]
    moving = {name: one.detach().numpy() for name, one in modules.trainable(adapted()).items()}
    with pytest.raises(PeerError, match="was never sent"):
        answered(silo, TrainOn(stamp=Stamp("other", 1, 0), parameters=moving, encoding={}))
    assert {kind.TAG for kind in frozen.MESSAGES} <= {kind.TAG for kind in kept[0].messages}


@pytest.mark.parametrize("protocol", [FedSGD, PBPFL])
def test_attacks_read_what_travelled_once(protocol: type[Any], tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((120, 8)).astype(np.float32)
    labels = (rows[:, 0] + rows[:, 1] > 0).astype(np.int64)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 2))
    model[0].requires_grad_(False)
    silos = [Silo(name, rows[place::3], labels[place::3]) for place, name in enumerate("abc")]
    test = (rows[:40], labels[:40])
    kept: dict[str, Any] = {"out": tmp_path / "run", "record_views": True}
    audit = Federation(model, silos, protocol(loss="cross-entropy"), test=test, **kept).train(rounds=2, seed=1).audit()
    assert len(audit.attacks) > 4
    assert not [one for one in audit.record["not_run"] if one["because"].startswith("it ended")]
