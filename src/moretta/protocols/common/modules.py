"""PyTorch modules as named numpy arrays, their losses and their optimizers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor, nn

from moretta.contract.messages import Array, Tensors
from moretta.contract.roles import State
from moretta.errors import ParameterError
from moretta.protocols.common.lazy_tensor import CHUNK, Inputs, chunks
from moretta.protocols.common.steps import take_step
from moretta.protocols.common.training import Training


def arrays(module: nn.Module) -> dict[str, Array]:
    """Return copies of all parameters and buffers by PyTorch's names."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in module.state_dict().items()}


def load(module: nn.Module, tensors: Tensors) -> None:
    """Copy named arrays into the module's parameters and buffers. The arrays are never written to."""
    state = module.state_dict(keep_vars=True)
    if set(tensors) != set(state):
        different = sorted(set(tensors) ^ set(state))
        raise ParameterError(f"expected arrays for the {len(state)} tensors of the model; {different} differ")
    with torch.no_grad():
        for name, tensor in state.items():
            if tuple(tensor.shape) != tensors[name].shape:
                raise ParameterError(f"`{name}`: expected shape {list(tensor.shape)}, got {list(tensors[name].shape)}")
            tensor.copy_(torch.tensor(tensors[name]))


def read_state_dict(path: Path) -> dict[str, Array]:
    """Return a state_dict from a .safetensors file, or from a .pt file without running any code in it.

    Raises `moretta.errors.ParameterError` for a file that is neither.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
        return {str(name): tensor.numpy() for name, tensor in found.items()}
    except Exception as error:
        raise ParameterError(f"{path}: expected a state_dict in .safetensors or .pt; {error}".split("\n")[0]) from error


def shapes(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each array, by name."""
    return {name: (array.shape, array.dtype.name) for name, array in tensors.items()}


def schema(module: nn.Module) -> str:
    """Return a digest of the names, shapes and dtypes of a model, on which its server and silos must agree."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
    return digest.hexdigest()


def under(prefix: str, state: State) -> dict[str, Array]:
    """Return the arrays of a state whose names begin with a prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in state.items()
        if name.startswith(prefix) and isinstance(value, np.ndarray)
    }


def size(module: nn.Module) -> int:
    """Return how many numbers a module's parameters have in all."""
    return sum(parameter.numel() for parameter in module.parameters())


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name; a tied one once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def ties(module: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, each with the name under which it is trained."""
    first: dict[int, str] = {id(parameter): name for name, parameter in module.named_parameters()}
    everything = module.state_dict(keep_vars=True)
    return {name: first[id(one)] for name, one in everything.items() if first.get(id(one), name) != name}


def running_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers, BatchNorm's running statistics, by name."""
    saved = module.state_dict()
    return {
        name: saved[name] for name, buffer in module.named_buffers() if name in saved and buffer.is_floating_point()
    }


def take_buffers(module: nn.Module, means: Tensors) -> None:
    """Set the running statistics to the silos' weighted means; whole-number counters go up by one."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in means:
                buffer.copy_(torch.tensor(means[name]))
                if name.endswith("running_var"):  # a silo may have made it negative, and then it has no square root
                    buffer.clamp_(min=0.0)
            elif not buffer.is_floating_point() and name.endswith("num_batches_tracked"):
                buffer.add_(1)


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Inputs, at_a_time: int = CHUNK) -> Tensor:
    """Return the outputs of a model in eval mode, [rows, outputs], at most so many rows at a time."""
    was_training = model.training
    model.eval()
    parts = chunks(inputs, at_a_time)
    outputs = torch.cat(list(map(model, parts)))  # unlike a loop, map holds no chunk while the next is made
    model.train(was_training)
    return outputs


class Optimizer:
    """PyTorch's SGD or Adam, stepping along gradients that come as arrays, at the rate of the round.

    rounds: of the whole run, over which the rate's schedule spreads.
    """

    def __init__(self, module: nn.Module, params: Training, rounds: int) -> None:
        self._parameters, self._params, self._rounds = trainable(module), params, rounds
        self._kept: dict[str, dict[str, Tensor]] = {name: {} for name in self._parameters}

    def step(self, gradients: Mapping[str, NDArray[np.float64]], number: int) -> None:
        """Take the step of round `number`; gradients, by parameter name, are rounded to the parameters' dtype."""
        factor = 1.0
        if self._params.clip_norm is not None:
            norm = np.sqrt(sum(float(np.square(gradient, dtype=np.float64).sum()) for gradient in gradients.values()))
            factor = min(1.0, self._params.clip_norm / (norm or 1.0))
        for name, parameter in self._parameters.items():
            gradient = gradients[name] if factor == 1.0 else gradients[name] * factor
            own = torch.tensor(gradient).to(parameter)
            take_step(parameter, own, self._kept[name], self._params.rate(number, self._rounds), self._params)

    def state(self) -> State:
        """Return momentum and moments as flat arrays, ``optimizer/<parameter>/<what>``."""
        return {
            f"optimizer/{name}/{key}": value.cpu().numpy().copy()
            for name, kept in self._kept.items()
            for key, value in kept.items()
        }

    def restore(self, state: State) -> None:
        """Take up what `state` returned."""
        self._kept = {name: {} for name in self._parameters}
        for path, value in state.items():
            if path.startswith("optimizer/"):
                name, key = path.removeprefix("optimizer/").rsplit("/", 1)
                tensor = torch.tensor(value)
                self._kept[name][key] = tensor if key == "step" else tensor.to(self._parameters[name])
