"""PBPFL's scales from the low bits of one noisy model: found where W has few bits, at chance where it has not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recorded import attacked, recorded
from torch import nn

from moretta.audit.attacks.pbpfl import scales
from moretta.audit.attacks.pbpfl.canonical import trunk
from moretta.audit.attacks.pbpfl.scales import ATTACK, bits_of, candidates, guessed, half_widths, true_scales
from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.protocols.common.modules import first_weights
from moretta.protocols.pbpfl.perturbation import Perturbation
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.secure_aggregation.keystream import SecretRoot

ROOT = SecretRoot.insecure(0, "server")
# Of 24 scales that are guessed among 64 each, 6 or more are right with a chance of C(24, 6) / 64^6 = 2e-6.
LUCK = 5


def hits(model: nn.Module, dtype: torch.dtype, *, old: bool, shape: tuple[int, ...] = (30,)) -> tuple[int, int]:
    """Play the game on a model's first message, as it was sent before or as it is now: scales found, and in all."""
    plan = ScalePlan.of(model, (torch.zeros(2, *shape),))
    perturbation = Perturbation(plan, 1, "squared-error")
    key = perturbation.draw_key(ROOT.stream("low bits", str(dtype)), offset_size=0.5)
    if old:
        noisy = perturbation.perturb(model.to(dtype).state_dict(), key)
    else:
        noisy = perturbation.perturb(first_weights(model).state_dict(), key, dtype)
    offered, true = candidates(true_scales(plan, key.scales))
    return int((guessed(plan, trunk(plan, noisy), offered) == true).sum()), plan.free


class Recurrent(nn.Module):
    """A layer whose hidden channels have signs, one with scales, and the head."""

    def __init__(self, layer: nn.Module, between: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.layer, self.between, self.head = layer, between, head

    def forward(self, x):
        return self.head(self.between(self.layer(x)[0].mean(1)).relu())


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return catalogue.build("mlp", inputs=(30,), outputs=1, seed=7, hidden=[16, 8]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_scales_were_found_in_one_message_without_labels(dtype) -> None:
    assert hits(mlp(), dtype, old=True) == (24, 24), "a second layer is found after the first"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_none_is_found_in_what_is_sent_now(dtype) -> None:
    found, games = hits(mlp(), dtype, old=False)
    assert games == 24
    assert found <= LUCK


def test_weights_trained_in_float32_gave_some_away() -> None:
    """A float of 24 bits times R, rounded to 24 bits, is not any float where R W falls between those further apart."""
    torch.manual_seed(0)
    model = mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    assert hits(model, torch.float32, old=True)[0] > LUCK
    assert hits(model, torch.float32, old=False)[0] <= LUCK


def test_the_start_alone_does_not_help_nor_does_float64_alone() -> None:
    """Each half of the defence is needed: without the other, the attack succeeds."""
    model = mlp()
    moved = first_weights(model).float()
    assert hits(moved, torch.float32, old=True)[0] > LUCK, "float32 weights, of whatever start"
    plan = ScalePlan.of(model, (torch.zeros(2, 30),))
    perturbation = Perturbation(plan, 1, "squared-error")
    key = perturbation.draw_key(ROOT.stream("not moved"), offset_size=0.5)
    noisy = perturbation.perturb(mlp(torch.float64).state_dict(), key, torch.float32)
    offered, true = candidates(true_scales(plan, key.scales))
    assert (guessed(plan, trunk(plan, noisy), offered) == true).sum() == 24, "float64 weights on the lattice"


def test_scales_of_filters_were_found_too() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3, bias=False), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(12 * 16, 3))
    assert hits(model, torch.float32, old=True, shape=(2, 8, 8)) == (24, 24)
    assert hits(model, torch.float32, old=False, shape=(2, 8, 8))[0] <= LUCK


def test_signs_take_no_turns(monkeypatch) -> None:
    """Signs come first among the places, and more of them than are tried would leave no scale to be tried."""
    torch.manual_seed(0)
    model = Recurrent(nn.GRU(3, 16, batch_first=True), nn.Linear(16, 6), nn.Linear(6, 2))
    monkeypatch.setattr(scales, "MOST_SCALES", 8)
    assert hits(model, torch.float32, old=True, shape=(5, 3)) == (6, 16 + 6)


def test_signs_alone_are_nothing_to_find() -> None:
    plan = ScalePlan.of(
        Recurrent(nn.LSTM(3, 4, 2, batch_first=True), nn.Identity(), nn.Linear(4, 2)), (torch.zeros(2, 5, 3),)
    )
    assert (plan.free, plan.positive) == (4, 0)
    with pytest.raises(ParameterError, match="nothing below the head is scaled"):
        true_scales(plan, plan.draw(ROOT.stream("signs")))


def test_true_scales_are_those_of_the_places_in_the_noisy_model() -> None:
    model = mlp(torch.float64)
    plan = ScalePlan.of(model, (torch.zeros(2, 30, dtype=torch.float64),))
    key = plan.draw(ROOT.stream("places"))
    ones = {name: np.ones(value.shape) for name, value in model.state_dict().items()}
    scales = true_scales(plan, key)
    still = plan.identity()
    expected = plan.perturb(ones, type(key)(scales, still.permutations))
    for name, value in plan.perturb(ones, key).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-15)


def test_candidates_are_drawn_as_the_true_scale_might_have_been() -> None:
    scales = np.exp2(np.linspace(-1, 1, 400))
    offered, true = candidates(scales)
    assert (offered[np.arange(400), true] == scales).all()
    spread = np.log(offered.max(1) / offered.min(1))
    assert spread.max() < 0.01
    # Its rank among 64 is uniform: mean 31.5 and deviation 18.5, of 400 within four deviations of the mean.
    ranks = (offered < scales[:, None]).sum(1)
    assert abs(ranks.mean() - 31.5) < 4 * 18.5 / 20


def test_bits_and_half_widths() -> None:
    values = np.array([1.0, -3.0, 0.0, 2.0**-7])
    assert bits_of(values) == 2
    assert bits_of(np.float32([0.1, 0.7]).astype(np.float64)) == 24
    np.testing.assert_array_equal(half_widths(np.array([1.0, 1.5, 4.0]), 2), [0.25, 0.25, 1.0])


def test_a_recorded_run_is_at_chance(tmp_path) -> None:
    keys = {"rounds": 2, "insecure-secret-seed": 11}
    truth = recorded(tmp_path, run=keys, model={"hidden": [16, 8]}, protocol={"name": "pbpfl"})
    found = attacked(ATTACK, truth)
    assert not found.succeeded
    assert found.figures["scales"] == 24.0
    assert found.score <= LUCK / 24


def test_powers_of_two_have_nothing_to_find(tmp_path) -> None:
    truth = recorded(tmp_path, run={"rounds": 1}, protocol={"name": "pbpfl", "scales": "powers-of-two"})
    assert "powers of two" in ATTACK.fits(truth.run)
