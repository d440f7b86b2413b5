"""An adapter beside a frozen base, and masks under cross-entropy: what PBPFL shows of them, each beside a control."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import attacked, check, claimed, given_other, recorded

from moretta.audit.attacks.pbpfl import adapters, server_softmax
from moretta.audit.attacks.pbpfl.canonical import plan_of, structure
from moretta.audit.attacks.pbpfl.head_offset import key_of
from moretta.audit.evidence.attack import Given
from moretta.audit.evidence.truth import Truth
from moretta.errors import ParameterError

NETS = '''"""A network with an adapter, and a segmenter with its images."""

import numpy as np
import torch
from torch import nn


class Adapted(nn.Module):
    def __init__(self, frozen=True, low=True):
        super().__init__()
        self.below, self.base, self.head = nn.Linear(64, 12), nn.Linear(12, 12), nn.Linear(12, 10)
        self.a, self.b = nn.Linear(12, 3, bias=False), nn.Linear(3, 12, bias=False)
        for one in (self.below, self.base):
            one.requires_grad_(not frozen)
        for one in (self.a, self.b):
            one.requires_grad_(low)
        self.low = low

    def forward(self, x):
        h = torch.relu(self.below(x.flatten(1)))
        return self.head(torch.relu(self.base(h) + self.b(self.a(h)) if self.low else self.base(h)))


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 2, 1)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def images():
    random = np.random.default_rng(0)
    y = np.zeros((60, 8, 8), int)
    for one in y:
        top, left = random.integers(0, 5, 2)
        one[top : top + 4, left : left + 4] = 1
    x = (2.0 * y - 1 + random.normal(size=y.shape))[:, None].astype("float32")
    return x[:48], y[:48], x[48:], y[48:]
'''


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def pbpfl(folder: Path, model: dict[str, Any], protocol: dict[str, Any], run: dict[str, Any], **rest: Any) -> Truth:
    return recorded(
        folder,
        protocol={"name": "pbpfl", **protocol},
        model={"hidden": None, **model},
        run={"rounds": 6, **run},
        **rest,
    )


def test_beside_a_frozen_base_a_silo_has_an_adapters_product(nets: Path) -> None:
    truth = pbpfl(nets, {"source": "nets:Adapted"}, {}, {})
    found = check(attacked(adapters.ATTACK, truth), adapters=(1, 1), relative_error=(0, 1e-5), rounds=(6, 6))
    assert found.interval[0] > 0.9


def test_where_the_base_trains_scales_stand_around_the_product(nets: Path) -> None:
    truth = pbpfl(nets, {"source": "nets:Adapted", "frozen": False}, {}, {})
    with pytest.raises(ParameterError, match="no parameter is frozen"):
        adapters.gather(truth)
    silo = truth.run.silos[0]
    case = truth.case({silo: truth.recorded}, structure(plan_of(truth)), thorough=False)
    # It multiplies all the same; the factors s_out / s_in of an entry lie between 1/4 and 4, and channels move.
    check(adapters.score(adapters.attack(case), truth), succeeds=False, relative_error=(0.3, 10))


def test_another_adapters_factor_is_not_this_ones(nets: Path) -> None:
    truth = pbpfl(nets, {"source": "nets:Adapted"}, {}, {})
    claim = claimed(adapters.ATTACK, truth)
    check(adapters.score({name: -value for name, value in claim.items()}, truth), succeeds=False)


def test_a_frozen_layer_without_an_adapter_is_not_attacked(nets: Path) -> None:
    truth = pbpfl(nets, {"source": "nets:Adapted", "low": False}, {}, {"rounds": 1})
    with pytest.raises(ParameterError, match="no two trained matrices share all their scales"):
        adapters.gather(truth)


MASKS = {"source": "nets:images", "standardise": False}
SHOWN = {"loss": "cross-entropy", "learning-rate": 1.0}
SECRETS = {"insecure-secret-seed": 3, "rounds": 12, "record-views": [12]}


def test_under_cross_entropy_the_server_sees_a_segmentation_of_each_image(nets: Path) -> None:
    truth = pbpfl(nets, {"source": "nets:Segmenter"}, SHOWN, SECRETS, data=MASKS)
    check(attacked(server_softmax.SEGMENTATION, truth), score=(0.85, 1), model_agreement=(0.999, 1), images=(48, 48))
    # Without its offset the server takes the noisy outputs for the model's own.
    wrong = given_other(server_softmax.SEGMENTATION, truth, lambda known: {"offset": 0.0 * known["offset"]})
    assert wrong.figures["model_agreement"] < 0.9
    # Of another silo's images it says nothing.
    claim, silos = claimed(server_softmax.SEGMENTATION, truth), truth.run.silos
    moved = {f"p/{silo}": claim[f"p/{other}"] for silo, other in zip(silos, [*silos[1:], silos[0]], strict=True)}
    assert server_softmax.score_masks(moved, truth).score < 0.65


def test_such_a_run_trains_as_plain_pytorch_does(nets: Path) -> None:
    """So what the server sees is what the exchange needs, no more."""
    truth = pbpfl(nets, {"source": "nets:Segmenter"}, SHOWN, SECRETS | {"record-views": [1, 2]}, data=MASKS)
    before, after = (truth.parameters(number) for number in (1, 2))
    total: dict[str, np.ndarray] = {}
    rows = [len(truth.batch(silo, 1)) for silo in truth.run.silos]
    for silo, count in zip(truth.run.silos, rows, strict=True):
        for name, value in truth.gradient(silo, 1).items():
            total[name] = total.get(name, 0.0) + value * count / sum(rows)
    for name, value in total.items():
        np.testing.assert_allclose(before[name] - after[name], 1.0 * value, atol=2e-5 * np.abs(value).max() + 1e-7)


def test_a_run_with_secrets_is_refused_and_mse_shows_no_position(nets: Path) -> None:
    with pytest.raises(ParameterError, match="the server would see the softmax at each: of an image its segmentation"):
        pbpfl(nets, {"source": "nets:Segmenter"}, SHOWN, {"rounds": 1}, data=MASKS)
    truth = pbpfl(nets, {"source": "nets:Segmenter"}, {"learning-rate": 0.01}, {"rounds": 1}, data=MASKS)
    assert (
        server_softmax.SEGMENTATION.fits(truth.run)
        == "the server answers silos with a softmax only under cross-entropy"
    )
    given = Given({"server": (1,)}, {"offset": key_of(truth, 1).offset}, "", "")
    case = truth.case(given.views, given.arrays, thorough=False)
    assert server_softmax.attack_masks(case) == {}
    other = dataclasses.replace(truth.run, mask=())
    assert server_softmax.SEGMENTATION.fits(other) == "targets are not masks, so no row is a position of an image"
