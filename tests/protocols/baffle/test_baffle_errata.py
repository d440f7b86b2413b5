"""What docs/errata.md says of BAFFLE's text, and of what we had said of it, each by numbers."""

from __future__ import annotations

import math
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from forwards import drawn, matrix
from networks import seeded
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.protocols.baffle.silo.estimate import differences
from moretta.protocols.baffle.torch_forward import TorchForward, layout_of
from moretta.protocols.common import modules
from moretta.protocols.common.targets import RowLosses

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
INPUTS, HIDDEN, CLASSES, ROWS, K = 8, 6, 4, 16, 400
Floats = NDArray[np.float64]


def network(dtype: torch.dtype) -> nn.Sequential:
    with seeded():
        layers = nn.Linear(INPUTS, HIDDEN), nn.Hardswish(), nn.Linear(HIDDEN, CLASSES)
        return nn.Sequential(*layers).to(dtype)


def batch() -> tuple[Floats, NDArray[np.int64]]:
    random = np.random.default_rng(0)
    return random.normal(size=(ROWS, INPUTS)), random.integers(0, CLASSES, ROWS)


def slope_and_curvature() -> tuple[Floats, Floats]:
    """Autograd's gradient and Hessian of the mean loss, in float64."""
    model, (x, y) = network(torch.float64), batch()
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    sizes = [parameter.numel() for parameter in model.parameters()]

    def loss(w: Tensor) -> Tensor:
        parts = dict(zip(dict(model.named_parameters()), w.split(sizes), strict=True))
        shaped = {name: part.view_as(model.get_parameter(name)) for name, part in parts.items()}
        outputs = torch.func.functional_call(model, shaped, (torch.from_numpy(x),))
        return nn.functional.cross_entropy(outputs, torch.from_numpy(y))

    at = flat.requires_grad_()
    (slope,) = torch.autograd.grad(loss(at), at)
    return slope.numpy(), torch.autograd.functional.hessian(loss, flat.detach()).numpy()


def offsets(sigma: float, dtype: torch.dtype) -> tuple[Floats, Floats]:
    """Twice-forward's x_k less the derivative along d_k, and the directions."""
    model, (x, y) = network(dtype), batch()
    layout = layout_of(model)
    directions = drawn("twice-forward", K // 2, layout.size, kind="gaussian")
    at = layout.flat(modules.arrays(model))
    found, _ = differences(
        "twice-forward", sigma, directions, TorchForward(model, layout), RowLosses("cross-entropy"), at,
        x.astype(at.dtype), y,
    )  # fmt: skip
    along = matrix(directions)
    return found.mean(axis=1) - along @ slope_and_curvature()[0], along


def test_at_sigma_1e_4_twice_forward_has_next_to_nothing_of_curvature() -> None:
    """x_k = d'g + sigma d'Hd / 2, whose mean, sigma tr(H) / 2, the form "mean" takes out.

    Its price is a factor 1 + (that / |g|)^2 on the squared error. float32 rounds the difference of two losses, which at
    1e-4 is still far below what the slope has.
    """
    slope, curvature = slope_and_curvature()
    size, cost = float(np.linalg.norm(slope)), {}
    for sigma in (1e-3, 1e-4):
        off, along = offsets(sigma, torch.float64)
        second = sigma / 2 * np.einsum("ki,ij,kj->k", along, curvature, along)
        np.testing.assert_allclose(off, second, atol=200 * sigma**2)
        expected = sigma / 2 * np.trace(curvature)
        assert off.mean() == pytest.approx(expected, abs=5 * second.std() / math.sqrt(K) + 200 * sigma**2)
        cost[sigma] = (np.square(off).mean() / size**2, expected / size)
        rounded, _ = offsets(sigma, torch.float32)
        assert (rounded - off).std() < 5e-3 * size * (1e-4 / sigma)  # a thousandth of a loss's last digit over sigma
    assert cost[1e-4][1] == pytest.approx(cost[1e-3][1] / 10)
    assert cost[1e-4][0] < 1e-4  # of the estimate's squared error


@pytest.mark.parametrize(("dtype", "least"), [(torch.float16, 0.25), (torch.bfloat16, 2.0**-5)])
def test_added_in_half_precision_a_sigma_of_1e_4_moves_no_larger_weight(dtype: torch.dtype, least: float) -> None:
    weights = torch.linspace(least, 4.0, 5000).to(dtype)
    moved = weights + torch.full_like(weights, 1e-4)
    assert torch.equal(moved, weights)
    below = torch.tensor([least / 4], dtype=dtype)
    assert not torch.equal(below + torch.tensor([1e-4], dtype=dtype), below)
    # Gaussian entries times it move those that are above half of the distance to the next number
    drawn_from = torch.Generator().manual_seed(0)
    weights = torch.linspace(1.25 * least, 1.75 * least, 20_000).to(dtype)
    steps = (1e-4 * torch.randn(len(weights), generator=drawn_from)).to(dtype)
    size = torch.finfo(dtype).eps * least / 2 / 1e-4
    expected = math.erfc(size / math.sqrt(2))
    assert expected == pytest.approx(0.22, abs=0.005)
    counting = 5 * math.sqrt(expected * (1 - expected) / len(weights))
    rounding = math.sqrt(2 / math.pi) * math.exp(-(size**2) / 2) * size * torch.finfo(dtype).eps  # of steps, to a tie
    found = (weights + steps != weights).double().mean().item()
    assert found == pytest.approx(expected, abs=counting + rounding)


@pytest.mark.parametrize(("ratio", "times"), [(1, 3.0), (10, 5.1), (100, 11.6), (400, 21.7)])
def test_theorem_3_2_fails_for_k_far_below_n(ratio: int, times: float) -> None:
    """|C - I| is about (1 + sqrt(n / K))^2 - 1, so it grows as n / K, and C0 sqrt(n / K) with one C0 does not."""
    k = 300 if ratio == 1 else 30
    n, random = ratio * k, np.random.default_rng(3)
    found = []
    for _ in range(5):
        directions = random.normal(size=(k, n))  # C = directions' directions / K has the eigenvalues of this, and 0
        largest = np.linalg.eigvalsh(directions @ directions.T / k).max()
        found.append(max(largest - 1, 1.0 if n > k else 0.0) / math.sqrt(ratio))
    assert np.mean(found) == pytest.approx(times, rel=0.05)
    assert times == pytest.approx(((1 + math.sqrt(ratio)) ** 2 - 1) / math.sqrt(ratio), rel=0.05)


PEAK = "print(next(int(w.split()[1]) for w in open('/proc/self/status') if w.startswith('VmHWM:')) / 1024)"
BACKPROPAGATION = """
import torch
from moretta.models import catalogue
model = catalogue.build("lenet", inputs=(3, 32, 32), outputs=10, seed=1)
model(torch.zeros(8, 3, 32, 32)).sum().backward()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_process_of_forwards_is_a_tenth_of_one_that_backpropagates_a_lenet() -> None:
    """What an edge client has imported before it holds a model is more than a tenth already."""
    pytest.importorskip("onnxruntime")

    def peak(code: str) -> float:
        done = subprocess.run([sys.executable, "-c", f"{code}\n{PEAK}"], capture_output=True, text=True, check=True)
        return float(done.stdout)

    assert peak("import numpy, onnxruntime") > 0.1 * peak(BACKPROPAGATION)


def test_the_paper_s_figure_beside_our_lenet_is_its_lenet_s() -> None:
    """92.18, and not the 95.17 that its Table 1 has for WRN-10-2."""
    tables = tomllib.loads((EXPERIMENTS / "baffle" / "tables.toml").read_text(encoding="utf-8"))
    (printed,) = tables["baffle-table-1-mnist"]["printed"]["K = 500"]
    assert (
        [printed]
        == tables["baffle-mnist"]["printed"]["K = 200"]
        != tables["baffle-table-1-wrn-mnist"]["printed"]["K = 1000"]
    )
    assert str(printed) in tables["baffle-blocks-mnist"]["paper"]
