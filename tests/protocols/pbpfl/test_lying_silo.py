"""A silo that lies about its alpha or its outputs, by which everybody's next offset and ring step are sized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cast import casting
from networks import perceptron
from torch import nn

from moretta import PBPFL, Federation, Silo
from moretta.contract.messages import Message
from moretta.contract.roles import Reason
from moretta.protocols.common.roles import Roles
from moretta.protocols.pbpfl.messages import Predictions
from moretta.run.result import Result

NAMES = ("north", "south", "east", "west", "centre")
LIAR, ROUNDS = "south", 5
Lie = Callable[[Predictions], Predictions]


def train(monkeypatch: pytest.MonkeyPatch, lie: Lie | None, names: tuple[str, ...] = NAMES, **settings: Any) -> Result:
    """Train among silos of which one changes what it predicts before it sends it."""

    def corrupt(made: Roles) -> None:
        answer = made.clients[LIAR].answer

        def lying(message: Message) -> Message:
            found = answer(message)
            return lie(found) if lie is not None and isinstance(found, Predictions) else found

        monkeypatch.setattr(made.clients[LIAR], "answer", lying)

    with casting(corrupt):
        return run(names, PBPFL(loss="cross-entropy", **settings))


def run(names: tuple[str, ...], protocol: PBPFL) -> Result:
    model = perceptron(4, 6, 3, between=nn.ReLU)
    silos = [silo(name, number) for number, name in enumerate(names)]
    return Federation(model, silos, protocol, batch_size=8, insecure_secret_seed=1).train(ROUNDS)


def silo(name: str, number: int) -> Silo:
    x = np.random.default_rng(number).normal(0, 1, (20, 4))
    return Silo(name, x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 1))


def alpha_of(size: float) -> Lie:
    return lambda found: replace(found, alpha=np.full_like(found.alpha, size))


def alpha_times(factor: float) -> Lie:
    return lambda found: replace(found, alpha=(found.alpha * factor).astype(found.alpha.dtype))


def far_outputs(found: Predictions) -> Predictions:
    z = found.z.copy()
    z[:, 0] = -1e20
    return replace(found, z=z)


def steps(result: Result) -> np.ndarray:
    return np.array([line["ring_step"] for line in result.history])


@pytest.mark.parametrize(
    ("lie", "variant"),
    [
        (alpha_of(1e6), "probabilities"),
        pytest.param(alpha_of(1e6), "paper", marks=pytest.mark.slow),
        (alpha_of(1e-9), "probabilities"),
        (far_outputs, "probabilities"),
    ],
    ids=["large", "large, paper", "small", "outputs"],
)
def test_a_lie_is_named_and_costs_only_its_silo(lie: Lie, variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result, plain = train(monkeypatch, lie, variant=variant), train(monkeypatch, None, variant=variant)
    assert [line["attempt"] for line in result.history] == [0] * ROUNDS
    assert {one["silo"] for one in result.record["dropped"]} == {LIAR}
    assert [one["round"] for one in result.record["dropped"]] == list(range(1, ROUNDS + 1))
    for one in result.record["dropped"]:
        assert one["reason"].startswith(Reason.MALFORMED)
        assert "have rms" in one["reason"]
        assert "the median over silos is" in one["reason"]
    # The same rows but for a fifth of them: as fine a ring, as large an offset, and it learns.
    assert (steps(result) <= 4 * steps(plain)).all()
    assert all(line["rho"] == 3.0 for line in result.history)
    assert result.history[-1]["loss"] < result.history[0]["loss"]


def test_what_is_not_out_of_proportion_moves_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    result, plain = train(monkeypatch, alpha_times(100.0)), train(monkeypatch, None)
    assert not result.record["dropped"]
    assert (steps(result) <= 4 * steps(plain)).all()


@pytest.mark.parametrize("factor", [100.0, 1e-5])
def test_of_two_silos_neither_has_its_way(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure of the round before is the third voice."""
    names = ("north", LIAR)
    result, plain = train(monkeypatch, alpha_times(factor), names), train(monkeypatch, None, names)
    assert not result.record["dropped"]
    assert (steps(result) <= 4 * steps(plain)).all()


def test_under_the_squared_error_what_comes_out_of_the_sum_grows_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One silo uploads the largest beta there is, from the third round on, and nobody sees whose it was."""

    def corrupt(made: Roles) -> None:
        contributor: Any = made.clients[LIAR]._contributor  # type: ignore[attr-defined]
        upload = contributor.upload

        def lying(stamp: Any, tensors: Any, *rest: Any, **named: Any) -> Message:
            if stamp.round >= 3 and "scalars" in tensors:
                tensors = tensors | {"scalars": np.array([*tensors["scalars"][:-1], 6e4])}
            return upload(stamp, tensors, *rest, **named)

        monkeypatch.setattr(contributor, "upload", lying)

    plain = run(NAMES, PBPFL(loss="mse"))
    with casting(corrupt):
        result = run(NAMES, PBPFL(loss="mse"))
    assert not result.record["dropped"]
    # alpha is off by 16 at most in each of the rounds that the running median has not moved in, beta's limit by 256.
    assert (steps(result) <= 16**2 * 4 * steps(plain)).all()
