"""The trunk's two ways back, by hand for chains of linear layers and by autograd for all else, agree."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moretta.protocols.pbpfl.head import Head
from moretta.protocols.pbpfl.work import Trunk, dense_layers


def head_of(path: str) -> Head:
    return Head(path, f"{path}.weight", f"{path}.bias", outputs=2, inputs=6, tied=False)


class Wrapped(nn.Module):
    """The same layers where the hand-written way does not see them."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


@pytest.mark.parametrize("bias", [True, False])
def test_by_hand_and_by_autograd(bias) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(5, 7, bias=bias), nn.ReLU(), nn.Linear(7, 6, bias=bias), nn.ReLU(), nn.Linear(6, 2)
    )
    layers = layers.double()
    inputs, cotangents = torch.randn(4, 5).double(), torch.randn(3, 4, 6).double()
    by_hand, by_autograd = Trunk(layers, head_of("4")), Trunk(Wrapped(layers), head_of("layers.4"))
    for ours, theirs in zip(by_hand.forward(inputs), by_autograd.forward(inputs), strict=True):
        assert torch.equal(ours, theirs)
    found, wanted = by_hand.backward(cotangents), by_autograd.backward(cotangents)
    assert {f"layers.{name}" for name in found} == set(wanted)
    for name, value in found.items():
        torch.testing.assert_close(value, torch.stack([*wanted[f"layers.{name}"]]), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("model", "head"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), "2"),
        (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), "1"),
        (nn.Sequential(nn.Flatten(), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), "3"),
    ],
)
def test_other_chains_go_by_autograd(model, head) -> None:
    assert dense_layers(model, head) is None


def test_a_layer_used_twice_goes_by_autograd() -> None:
    layer, activation = nn.Linear(3, 3), nn.ReLU()
    assert dense_layers(nn.Sequential(layer, activation, layer, activation, nn.Linear(3, 1)), "4") is None


def test_frozen_layers_go_by_autograd_and_have_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    trunk = Trunk(model, head_of("4"))
    trunk.forward(torch.randn(2, 2))
    assert set(trunk.backward(torch.randn(2, 2, 3))) == {"2.weight", "2.bias"}
