"""Other people's models: torchvision's, as they come, and a transformer of torch.nn."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from networks import seeded
from torch import Tensor, nn
from torchvision_stub import OUTPUTS, REASON, REFUSED, ZOO, build, torchvision

from moretta import PBPFL
from moretta.errors import UnsupportedModel
from moretta.protocols.pbpfl.exactness import Input, check

# In docs/models-measured.md these need powers of two in float32; no other model may come to need them unseen.
FALLING_BACK = {"densenet121", "googlenet", "mnasnet0_5", "shufflenet_v2_x0_5"}


@pytest.fixture(scope="module")
def models() -> ModuleType:
    found = torchvision()
    if found is None:
        pytest.skip(REASON)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
@pytest.mark.parametrize("name", [name for name in ZOO if name not in REFUSED])
def test_torchvisions_models_are_trained_exactly(models: ModuleType, name: str, loss: str) -> None:
    model, given = build(models, name), Input((3, ZOO[name][0], ZOO[name][0]))
    found = check(model, [given], OUTPUTS, PBPFL(loss=loss), fall_back=name in FALLING_BACK)
    assert found["passes"], found
    assert found["scales"] == "continuous" or name in FALLING_BACK
    assert found["free_scales"] > 500
    assert all(entry["because"] for entry in found["forced_to_one"])


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_torchvisions_models_that_are_refused(models: ModuleType, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=REFUSED[name]):
        check(build(models, name), [Input((3, ZOO[name][0], ZOO[name][0]))], OUTPUTS, PBPFL())


class Words(nn.Module):
    """An embedding, a position, two layers of nn.TransformerEncoder, the mean over words, a linear head."""

    def __init__(self, norm_first: bool, activation: str) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(20, 16), nn.Parameter(0.1 * torch.randn(6, 16))
        layer = nn.TransformerEncoderLayer(
            16, 4, 24, dropout=0.1, activation=activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, OUTPUTS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens) + self.position).mean(1))


@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
@pytest.mark.parametrize(("norm_first", "activation"), [(False, "relu"), (True, "gelu")])
def test_a_transformer_on_tokens_is_trained_exactly(norm_first: bool, activation: str, loss: str) -> None:
    with seeded():
        model = Words(norm_first, activation)
    found = check(model, [Input.parse("6:int20")], OUTPUTS, PBPFL(loss=loss))
    assert found["passes"], found
    # Free in each layer: a channel of q (k has its inverse), of the values, and what ReLU passes or a norm gives on.
    layers = {"relu": 2 * (16 + 16 + 24) + 16, "gelu": 2 * (16 + 16 + 16 + 16)}
    assert found["free_scales"] == layers[activation]
    assert not any("an operation without a rule" in entry["because"] for entry in found["forced_to_one"])
