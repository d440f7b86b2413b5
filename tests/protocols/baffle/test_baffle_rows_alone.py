"""Models of which a row's loss is not its own, settings that no round could be played with, and what sums cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from baffle_runs import SEED, farthest, learning, make, network, silos, weights
from cast import cast_only
from refused_rows import Row, refused
from torch import Tensor, nn
from torch.nn import functional as F

from moretta import SecureAggregation, Silo
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.directions import gaussian_table
from moretta.protocols.common.accountant import epsilon


class Mixing(nn.Module):
    """Standardises by the batch, in no module that has a name for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((x - x.mean(0)) / (x.std(0, correction=0) + 1e-3))


class Remembering(nn.Module):
    """BatchNorm as a function, whose running mean moves in forward passes."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("running", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.running += 0.1 * (x.mean(0) - self.running)
        return self.inner(x)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.batch_norm(x, self.mean, self.variance, training=True))


@pytest.mark.parametrize("noise", [{}, {"dp_noise": 1.0, "dp_clip": 1.0}], ids=["plain", "private"])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Mixing, "the model's outputs for a row differ by"),
        (Remembering, "changes running in forward passes"),
        (Functional, "changes mean, variance in forward passes"),
    ],
)
def test_a_model_of_which_a_rows_loss_is_not_its_own_is_refused(
    model: type[nn.Module], said: str, noise: dict[str, float], tmp_path: Path
) -> None:
    made = make(learning(**noise), model=model(), out=tmp_path / "run")
    with pytest.raises(ParameterError, match=said):
        made.train(2, SEED)
    assert not (tmp_path / "run").exists()


@refused("baffle_rows_alone.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_a_clip_that_the_ring_cannot_hold_is_no_matter_where_there_is_no_ring() -> None:
    protocol = learning(dp_noise=1.0, dp_clip=1e4)
    make(protocol, aggregation=SecureAggregation(scheme="none")).rehearse(3)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"k": 2}, 2.0),  # K / (K - 1)
        ({"k": 24, "form": "base"}, 1.0),
        ({"k": 24, "form": "base", "direction": "gaussian"}, float(gaussian_table().max()) / 4096),
        ({"k": 24, "form": "base", "class_weights": (4.0,) * 4}, 0.25),
    ],
)
def test_the_bound_of_fixed_points_error_is_of_the_gradients_entries(settings: dict[str, Any], factor: float) -> None:
    """One rounded scalar moves an entry by at most |d| / (K - 1), and there are K of them."""
    plain = make(learning(form="base")).train(1, SEED).history[0]["ring_step"]
    found = make(learning(**settings)).train(1, SEED).history[0]["ring_step"]
    assert found == pytest.approx(factor * plain)


def test_whole_epochs_move_the_model_by_what_silos_say_whatever_their_rate() -> None:
    protocol = learning(optimizer="sgd", learning_rate=0.03, local_epochs=1)
    record = make(protocol).train(3, SEED)
    steps = sum(line["ring_step"] for line in record.history)
    assert record.record["facts"]["ring_weight_error"] == pytest.approx(steps)


def test_a_run_that_was_killed_counts_the_rounds_that_it_plays_again_as_they_were_once(tmp_path: Path) -> None:
    """`test_releases` has those that it plays again otherwise."""
    protocol = learning(dp_noise=1.0, dp_clip=5.0)
    settings: dict[str, Any] = {"out": tmp_path / "run", "checkpoint_every": 100}

    def stop(number: int, *_: Any) -> None:
        if number == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(protocol, **settings).train(8, SEED, progress=stop)
    resumed = make(protocol, **settings).train(8, SEED, resume=True)
    assert resumed.record["facts"]["epsilon"] == pytest.approx(epsilon(1.0, 1e-5, 16 / 24, 8))


def test_a_run_under_noise_says_what_it_does_not_count() -> None:
    protocol = learning(dp_noise=1.0, dp_clip=5.0)
    facts = make(protocol, batch_size=0, standardise=True).train(1, SEED).record["facts"]
    assert facts["epsilon_leaves_out"] == (
        "means and deviations of the input columns, summed without noise and the number of rows of all silos together"
    )


def test_a_silo_of_one_row_is_looked_at_too() -> None:
    one = [*silos()[:1], Silo("silo-1", np.ones((1, 6), np.float32), np.zeros(1, np.int64))]
    assert len(cast_only(make(silos=one[::-1])).clients) == 2
    assert math.isfinite(farthest(weights(make(silos=one).train(1, SEED)), weights(make(silos=one).train(1, SEED))))
