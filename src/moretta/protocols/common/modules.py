"""PyTorch modules as named numpy arrays, their first weights, their inputs in batches, and their optimizers.

**Steps** of SGD and Adam equal those of `torch.optim` on the CPU to the bit. On first use `torch.optim` loads PyTorch's
compiler, which takes a third as long as all of PyTorch. Its overhead around a small model's step exceeds the step.

**The start of a run** (`first_weights`): the model's parameters as built or warm-started, each tensor moved a little.

Initialisers draw few bits: PyTorch's draw one of 2^24 values between -b and b. Factors that multiply such numbers can
be computed from the products, even rounded once, as PBPFL's scales were (`scales-from-low-bits` of the audit). So each
trained parameter W begins at W + n, with n normal of deviation 2^-23 max|W|. Where max|W| is about b, that is the step
of such a lattice, and W + n is nearly uniform between its points (the density varies by 2 exp(-2 pi^2), 5e-9). This
does not hide coarser starts, such as weights of eight bits or normalisation layers of ones. Frozen parameters and
buffers stay as they are: some are masks and places, and PBPFL sends them unscaled.

All protocols do so, so that they are compared from one start. As n follows from a digest of all parameters W, runs of
one seed stay equal. Anyone who does not know the start (from a seed, the operating system or a file) does not know n; a
start that others know hides nothing.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor, nn

from moretta.contract.lazy_rows import LazyRows
from moretta.contract.messages import Array, Tensors
from moretta.contract.roles import Phase, State, no_phase
from moretta.errors import ParameterError
from moretta.protocols.common.passes import WHOLE, Passes
from moretta.protocols.common.training import Training
from moretta.secure_aggregation.keystream import Keystream, derive, digest_of

if TYPE_CHECKING:
    from moretta.protocols.common.losses import Loss

CHUNK = 2048  # rows in one forward pass without gradients
CHUNK_NUMBERS = 1 << 22  # numbers in their inputs; fewer rows where samples are large
EPS = 1e-8  # PyTorch's default for Adam
SPREAD = 2.0**-23  # of max|W|
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}
"""The dtypes that models compute in, by their names in settings and files."""


def arrays(module: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Array]:
    """Return copies of all parameters and buffers by PyTorch's names. dtype: of floating-point ones, if given."""
    copies, on_cpu = dict[str, Array](), True
    state = module.state_dict()
    for name, tensor in state.items():
        state[name] = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
        on_cpu &= tensor.device.type == "cpu"
        if on_cpu:
            copies[name] = np.array(state[name].numpy())
    return copies if on_cpu else on_host(state)


def with_tensors(module: nn.Module, tensors: Tensors, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a CPU module with other tensors, in their own memory.

    Args:
        tensors: Writable arrays for all names of the module's state_dict.
        dtype: Of floating-point buffers outside the state_dict.
    """
    cast: dict[int, Any] = {
        id(buffer): buffer.to(dtype, copy=True) if buffer.is_floating_point() else buffer.clone()
        for buffer in module.buffers()
    }
    for name, tensor in module.state_dict(keep_vars=True).items():
        value = torch.from_numpy(tensors[name])
        cast[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    return copy.deepcopy(module, cast)


def load(module: nn.Module, tensors: Tensors) -> None:
    """Copy named arrays into the module's parameters and buffers. The arrays are never written to."""
    state = module.state_dict(keep_vars=True)
    if set(tensors) != set(state):
        different = sorted(set(tensors) ^ set(state))
        raise ParameterError(f"expected arrays for the {len(state)} tensors of the model; {different} differ")
    for name, tensor in state.items():
        if tuple(tensor.shape) != tensors[name].shape:
            raise ParameterError(f"`{name}`: expected shape {list(tensor.shape)}, got {list(tensors[name].shape)}")
    device = next(iter(state.values())).device if state else torch.device("cpu")
    with torch.no_grad():
        for name, value in on_device(tensors, device).items():
            state[name].copy_(value)


def blank(module: nn.Module) -> nn.Module:
    """Set all parameters to 0, on the CPU in memory that the system provides only once it is written to."""
    for parameter in module.parameters():
        zeros = torch.from_numpy(np.zeros(parameter.numel() * parameter.element_size(), np.uint8))
        flat = zeros.to(parameter.device).view(parameter.dtype)
        parameter.data = flat.as_strided(parameter.shape, parameter.stride())
    return module


def on_device(arrays: Tensors, device: torch.device) -> dict[str, Tensor]:
    """Return arrays as read-only tensors: on the CPU mostly in their own memory, elsewhere one copy for each dtype."""
    tensors = dict[str, Tensor]()
    for name, array in arrays.items():
        tensors[name] = torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
    return tensors if device.type == "cpu" else _moved(tensors, lambda flat: flat.to(device))


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return tensors as arrays: on the CPU in their own memory, from elsewhere by one copy for each dtype."""
    arrays = dict[str, Array]()
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            return on_host(_moved(tensors, lambda flat: flat.detach().cpu()))
        arrays[name] = tensor.detach().numpy()
    return arrays


def _moved(tensors: Mapping[str, Tensor], move: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return one device's tensors on another, as parts of one copy for each dtype."""
    alike: defaultdict[torch.dtype, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        alike[tensor.dtype].append(name)
    moved = dict[str, Tensor]()
    for names in alike.values():
        flat = move(torch.cat([tensors[name].reshape(-1) for name in names]))
        parts = torch.split(flat, [tensors[name].numel() for name in names])
        moved |= {name: part.view(tensors[name].shape) for name, part in zip(names, parts, strict=True)}
    return {name: moved[name] for name in tensors}


def read_state_dict(path: Path) -> dict[str, Array]:
    """Return a state_dict from .safetensors, or .pt without running its code. Raises ParameterError for others."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        return {str(name): tensor.numpy() for name, tensor in tensors.items()}
    except Exception as error:
        raise ParameterError(f"{path}: expected a state_dict in .safetensors or .pt; {error}".split("\n")[0]) from error


def shapes(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each array, by name."""
    return {name: (array.shape, array.dtype.name) for name, array in tensors.items()}


def schema(module: nn.Module) -> str:
    """Return a digest of a model's names, shapes and dtypes, on which its server and silos must agree."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
    return digest.hexdigest()


def size(module: nn.Module) -> int:
    """Return the number of numbers in a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name, a tied one once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def frozen(module: nn.Module) -> dict[str, Array]:
    """Return the untrained parameters, under each of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    names = {name for name, parameter in parameters if not parameter.requires_grad}
    return {name: value for name, value in arrays(module).items() if name in names} if names else {}


def gradient(
    module: nn.Module,
    trained: Mapping[str, Tensor],
    loss: Loss,
    batch: tuple[Tensor, Tensor],
    phase: Phase = no_phase,
    passes: Passes = WHOLE,
) -> tuple[dict[str, Tensor], float]:
    """Return the gradient of a batch's mean loss by the name of each trained parameter, and the loss."""
    inputs, targets = batch
    total, mean = dict[str, Tensor](), 0.0
    for some, share in passes.shares(loss, targets):
        with phase("local_forward"):
            with passes.through(module):
                outputs = module(inputs[some] if passes.rows else inputs)
            part = loss(outputs.float() if outputs.dtype == torch.bfloat16 else outputs, targets[some])
            part = part * share if passes.rows else part
        with phase("local_backward"):
            gradients = torch.autograd.grad(part, list(trained.values()), materialize_grads=True)
            for name, value in zip(trained, gradients, strict=True):
                total[name] = total[name] + value if name in total else value
        mean += float(part.detach())
    return total, mean


def ties(module: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, each with the name under which it is trained."""
    first: dict[int, str] = {id(parameter): name for name, parameter in module.named_parameters()}
    everything = module.state_dict(keep_vars=True)
    return {name: first[id(tensor)] for name, tensor in everything.items() if first.get(id(tensor), name) != name}


def running_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers, BatchNorm's running statistics, by name."""
    saved = module.state_dict()
    return {
        name: saved[name] for name, buffer in module.named_buffers() if name in saved and buffer.is_floating_point()
    }


def take_buffers(module: nn.Module, means: Tensors) -> None:
    """Set the running statistics to the silos' weighted means; whole-number counters increase by one."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in means:
                buffer.copy_(torch.tensor(means[name]))
                if name.endswith("running_var"):  # a silo may have made it negative, without a square root
                    buffer.clamp_(min=0.0)
            elif not buffer.is_floating_point() and name.endswith("num_batches_tracked"):
                buffer.add_(1)


def out_of_place(model: nn.Module) -> nn.Module:
    """Return the model with layers that write to no input: the first layer's input is the rows themselves."""
    for layer in model.modules():
        if getattr(layer, "inplace", False) and not isinstance(layer, torch.jit.ScriptModule):  # constant there
            layer.inplace = False  # type: ignore[assignment]
    return model


@final
class LazyTensor:
    """Lazy rows in place of a tensor [rows, ...]; `make` turns those of an index or slice into a tensor."""

    def __init__(self, rows: LazyRows, make: Callable[[NDArray[np.float32]], Tensor]) -> None:
        self._rows, self._make, self.shape = rows, make, rows.shape

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: Tensor | slice) -> Tensor:
        return self._make(self._rows[key.cpu().numpy() if isinstance(key, Tensor) else key])


Inputs = Tensor | LazyTensor


def chunks(inputs: Inputs, most: int = CHUNK) -> Iterator[Tensor]:
    """Yield inputs [rows, ...] in order, at most `most` rows at a time."""
    step = min(most, max(1, CHUNK_NUMBERS // max(1, math.prod(inputs.shape[1:]))))
    yield from (inputs[start : start + step] for start in range(0, max(1, len(inputs)), step))


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Inputs, at_a_time: int = CHUNK) -> Tensor:
    """Return the outputs of a model in eval mode, [rows, outputs], at most `at_a_time` rows at a time."""
    was_training = model.training
    model.eval()
    parts = chunks(inputs, at_a_time)
    # Copies, as a model may write to its input. Unlike a loop, map holds no chunk while the next is made.
    outputs = torch.cat(list(map(model, map(torch.clone, parts))))
    model.train(was_training)
    return outputs


class Optimizer:
    """PyTorch's SGD or Adam on gradients as arrays, at the round's rate. rounds: of the run, for its schedule."""

    def __init__(self, module: nn.Module, params: Training, rounds: int) -> None:
        self._parameters, self._params, self._rounds = trainable(module), params, rounds
        self._kept: dict[str, dict[str, Tensor]] = {name: {} for name in self._parameters}

    def step(self, gradients: Mapping[str, NDArray[np.float64]], number: int) -> None:
        """Take the step of round `number`; gradients, by parameter name, are rounded to the parameters' dtype."""
        if self._params.clip_norm is not None:
            norm = np.sqrt(sum(float(np.square(gradient, dtype=np.float64).sum()) for gradient in gradients.values()))
            factor = self._params.clip_norm / (norm or 1.0)
            if factor < 1.0:
                gradients = {name: gradient * factor for name, gradient in gradients.items()}
        device = next(iter(self._parameters.values())).device if self._parameters else torch.device("cpu")
        rate = self._params.rate(number, self._rounds)
        for name, gradient in on_device(gradients, device).items():
            parameter = self._parameters[name]
            take_step(parameter, gradient.to(parameter), self._kept[name], rate, self._params)

    def state(self) -> State:
        """Return momentum and moments as flat arrays, ``optimizer/<parameter>/<what>``."""
        return {
            f"optimizer/{name}/{key}": np.array(value.numpy(force=True))
            for name, kept in self._kept.items()
            for key, value in kept.items()
        }

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        self._kept = {name: {} for name in self._parameters}
        for path, value in state.items():
            if path.startswith("optimizer/"):
                name, key = path.removeprefix("optimizer/").rsplit("/", 1)
                tensor = torch.tensor(value)
                self._kept[name][key] = tensor if key == "step" else tensor.to(self._parameters[name])


@torch.no_grad()
def take_step(parameter: Tensor, gradient: Tensor, kept: dict[str, Tensor], rate: float, params: Training) -> None:
    """Move a parameter along its gradient, by the optimizer, momentum and weight decay of `params`.

    Args:
        gradient: Of the parameter's shape, dtype and device; not written to.
        kept: The optimizer's state of this parameter, under the names of `torch.optim`; empty before the first step,
            and written to.
    """
    if params.weight_decay:
        gradient = gradient.add(parameter, alpha=params.weight_decay)
    if params.optimizer == "adam":
        _adam(parameter, gradient, kept, rate, params.betas)
    elif params.momentum:
        if kept:
            kept["momentum_buffer"].mul_(params.momentum).add_(gradient)
        else:
            kept["momentum_buffer"] = gradient.clone()
        parameter.add_(kept["momentum_buffer"], alpha=-rate)
    else:
        parameter.add_(gradient, alpha=-rate)


def _adam(
    parameter: Tensor, gradient: Tensor, kept: dict[str, Tensor], rate: float, betas: tuple[float, float]
) -> None:
    if not kept:
        kept |= {"step": torch.tensor(0.0, dtype=torch.float32)}
        kept |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    kept["step"] += 1
    mean = kept["exp_avg"].lerp_(gradient, 1 - betas[0])
    square = kept["exp_avg_sq"].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    first, second = (1 - beta ** kept["step"].item() for beta in betas)
    deviation = (square.sqrt() / math.sqrt(second)).add_(EPS)
    parameter.addcdiv_(mean, deviation, value=-rate / first)


def first_weights(model: nn.Module) -> nn.Module:
    """Return a copy in float64 whose trained parameters are moved, a tied one once."""
    start = copy.deepcopy(model).double()
    named = dict(start.named_parameters())
    digest = digest_of({name: value.numpy(force=True) for name, value in named.items()})
    trained = {name: tensor for name, tensor in named.items() if tensor.is_floating_point() and tensor.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            stream = Keystream(derive(digest, "first weights", name))
            noise = torch.from_numpy(stream.normal(parameter.numel())).view_as(parameter).to(parameter.device)
            parameter.add_(SPREAD * parameter.abs().max() * noise)
    return start
