"""Steps in canonical form: under fixed and fresh keys made here, and on recorded runs."""

import numpy as np
import pytest
import torch
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.pbpfl.canonical_form import STEPS as ATTACK
from moretta.audit.attacks.pbpfl.canonical_form import likeness, step_of
from moretta.models import catalogue
from moretta.protocols.pbpfl.perturbation import Key, Perturbation
from moretta.protocols.pbpfl.scales import ScaleKey, ScalePlan
from moretta.secure_aggregation.keystream import SecretRoot


def keys(perturbation, how):
    """Return the keys of two consecutive rounds."""
    root = SecretRoot(bytes(32))
    drawn = [perturbation.draw_key(root.stream("key", number), offset_size=3.0) for number in range(2)]
    if how == "fresh and permuted":
        return drawn
    still = perturbation.plan.identity().permutations
    placed = [Key(ScaleKey(one.scales.scales, still), one.gamma, one.xi, one.parts, one.direction) for one in drawn]
    return placed if how == "fresh" else [placed[0], placed[0]]


@pytest.mark.parametrize("how", ["fixed", "fresh", "fresh and permuted"])
def test_a_step_is_seen_under_any_keys(how):
    model = catalogue.build("mlp", inputs=(12,), outputs=4, seed=1, hidden=[9, 7])
    plan = ScalePlan.of(model, (torch.zeros(2, 12),))
    perturbation = Perturbation(plan, 1, "squared-error")
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    after = {name: one + 0.01 * torch.randn(one.shape, generator=generator) for name, one in before.items()}
    noisy = [perturbation.perturb(one, key) for one, key in zip((before, after), keys(perturbation, how), strict=True)]
    true = step_of(plan, *({name: value.numpy() for name, value in one.items()} for one in (before, after)))
    cosine, shuffled = likeness(plan, step_of(plan, *noisy), true)
    # Rounding to float32 is 1e-7 of weights, of which the step is about 3 %.
    assert cosine > 0.999999
    assert abs(shuffled) < 0.5
    # Without canonical forms a fixed key shows the step (0.96), fresh scales (0.09) and permutations (-0.04) hide it.
    plainly = cosine_of(*({name: noisy[number][name] for name in true[0]} for number in range(2)), before, after)
    assert (plainly > 0.5) == (how == "fixed")


def cosine_of(noisy, next_noisy, before, after):
    """Return the cosine of a plain difference of noisy models with the step."""
    seen = np.concatenate([(next_noisy[name] - noisy[name]).ravel() for name in noisy])
    step = np.concatenate([(after[name] - before[name]).numpy().ravel() for name in noisy])
    return seen @ step / (np.linalg.norm(seen) * np.linalg.norm(step))


def run(folder, seed, **protocol):
    folder.mkdir()
    return recorded(folder, run={"rounds": 12, "seed": seed}, protocol={"name": "pbpfl", **protocol})


def test_steps_of_a_run_are_seen(tmp_path):
    found = attacked(ATTACK, run(tmp_path / "one", 5))
    assert found.succeeded
    assert found.figures["lowest"] > 0.99999
    # Without canonical forms fresh scales hide it, and ones that stay would not.
    assert abs(found.figures["plain_difference"]) < 0.3
    assert abs(found.figures["plain_difference_with_channels_in_place"]) < 0.5
    assert found.figures["plain_difference_with_scales_that_stay_too"] > 0.6


def test_steps_of_another_run_are_not_its(tmp_path):
    one, other = (run(tmp_path / str(seed), seed, loss="cross-entropy") for seed in (5, 6))
    found = ATTACK.score(claimed(ATTACK, other), one)
    assert not found.succeeded
    assert found.score < 0.3


def test_rounds_far_apart_do_not_do(tmp_path):
    folder = tmp_path / "apart"
    folder.mkdir()
    truth = recorded(folder, run={"rounds": 4, "record_views": [1, 3]}, protocol={"name": "pbpfl"})
    assert "no two consecutive rounds" in ATTACK.fits(truth.run)
