"""A backward pass in parts has the bits of whole passes, and keeps the activations of one part at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from moretta.protocols.pbpfl import backward
from moretta.protocols.pbpfl.backward import gradients_along, parts_of


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


class Twice(nn.Module):
    """A layer that is used at the top and at the bottom, and a path past all layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between = nn.Linear(6, 6), nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x).tanh()
        for layer in self.between:
            x = layer(x).tanh()
        return self.shared(x)


class Across(nn.Module):
    """A path past all other layers, as in a U-Net, so that no inner node is on all paths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(6, 6), nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.layers(x) * x


class Ends(torch.autograd.Function):
    """Passes no gradient back: of no direction (0), or of those alone whose first entry has this sign (1 or -1)."""

    @staticmethod
    def forward(ctx, x: Tensor, sign: int) -> Tensor:
        ctx.sign = sign
        return x.clone()

    @staticmethod
    def backward(ctx, above: Tensor) -> tuple[Tensor | None, None]:
        return above if ctx.sign * above.flatten()[0] > 0 else None, None


class Ended(nn.Module):
    """A gradient reaches the lower half in some directions only, or in none."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.lower, self.upper = (nn.Sequential(*(nn.Linear(6, 6) for _ in range(9))) for _ in range(2))
        self.sign = sign

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(Ends.apply(self.lower(x), self.sign))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def residuals() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), *(Residual(4) for _ in range(9)), nn.Flatten())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


MODELS = {
    "residuals": (residuals, (4, 3, 8, 8), 2),
    "transformer": (encoder, (4, 5, 8), 2),
    "LSTM": (Recurrent, (4, 5, 6), 1),
    "a layer used twice": (Twice, (4, 6), 1),
    "a path across": (Across, (4, 6), 1),
    "no gradient below": (lambda: Ended(0), (4, 6), 2),
    "a gradient below in some directions": (lambda: Ended(1), (4, 6), 2),
    "in the others": (lambda: Ended(-1), (4, 6), 2),
}


def whole(end: Tensor, seeds: list[list[Tensor]], parameters: list[Tensor]) -> list[list[Tensor]]:
    grad = torch.autograd.grad
    return [list(grad([end], parameters, seed, retain_graph=True, materialize_grads=True)) for seed in seeds]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("frozen", [False, True])
def test_parts_have_the_bits_of_whole_passes(name, frozen, monkeypatch) -> None:
    torch.manual_seed(0)
    build, shape, least = MODELS[name]
    model = build().train()
    for parameter in list(model.parameters())[: 2 * frozen]:
        parameter.requires_grad_(False)
    beside = torch.ones(3, requires_grad=True)  # outside of the graph
    parameters = [*(parameter for parameter in model.parameters() if parameter.requires_grad), beside]
    end = model(torch.randn(shape))
    one, other = torch.randn_like(end), torch.randn_like(end)
    seeds = [[one], [-one], [other]]
    expected = whole(end, seeds, parameters)
    assert len(list(parts_of(end.grad_fn))) >= least
    monkeypatch.setattr(backward, "LARGE", 0)
    for ours, theirs in itertools.chain(*map(zip, gradients_along([end], seeds, parameters), expected)):
        assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError, match="second time"):
        end.backward(seeds[0][0])  # the graph was freed


def test_activations_are_freed_part_by_part(monkeypatch) -> None:
    """Of the tensors that autograd packs, at most some parts' are alive when the last cotangent is at the bottom."""
    monkeypatch.setattr(backward, "LARGE", 0)
    alive, most_at_the_bottom = set[int](), list[int]()

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))

    model = nn.Sequential(*itertools.chain(*((nn.Linear(4, 4), nn.Tanh()) for _ in range(32))))
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        end = model(torch.randn(2, 4))
    total = len(alive)
    next(model.parameters()).register_hook(lambda gradient: most_at_the_bottom.append(len(alive)))
    gradients_along([end], [[torch.ones_like(end)], [torch.ones_like(end)]], list(model.parameters()))
    assert total >= 64
    assert most_at_the_bottom[0] <= total / 8, "the first cotangent's pass keeps one part alone"
