"""The ideal that PBPFL must equal: the gradient of the true model's loss on all silos' rows together, in the clear."""

from torch import Tensor, nn

from moretta.protocols.common import modules
from moretta.protocols.common.losses import Loss


def gradient(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss) -> dict[str, Tensor]:
    """Return the gradient of the mean loss over the rows, by the name of each trained parameter."""
    return modules.gradient(model, modules.trainable(model), loss, (inputs, targets))[0]
