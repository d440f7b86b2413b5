"""A PyTorch module run forward at flat parameters: in place, or if small at several parameter vectors at once.

Directions on the device that a model runs on (`perturbed`, `combine`) have the same bits as `Directions` on the CPU.
The processor computes the keystream. A block of eight Rademacher directions is copied as one byte per parameter and
unpacked on the device; a Gaussian direction as two bytes per entry. Each entry of a perturbed vector is one rounded
addition, and a sum over directions is made of integers, so every device computes the same.
"""

import copy
import fnmatch
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from moretta.contract.messages import Array
from moretta.contract.wording import nearest
from moretta.errors import ParameterError
from moretta.models.checks import check_traceable
from moretta.protocols.baffle import batch_statistics
from moretta.protocols.baffle.batched import Batched
from moretta.protocols.baffle.silo.directions import BLOCK, GAUSSIAN_BITS, STEP, Directions, scaled_back
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.common import modules

SMALL = 100_000  # trained parameters; above, several models at once are no faster than one after the other
MIXING = 1e-3  # of the largest output: by which a row may differ among others; rounding is far below
BATCHES = 32  # of silos in one pass through the model, and the most kept on its device
LEAST, MOST, TOGETHER = 8, 32, 256  # models at once, and the rows of all of them together


def layout_of(model: nn.Module, moving: Collection[str] = ()) -> Layout:
    """Return the layout of a model's trained parameters in a flat array. moving: buffers that change in training."""
    trained = {name: parameter.detach().cpu().numpy() for name, parameter in modules.trainable(model).items()}
    others = {*trained, *modules.ties(model), *moving}
    fixed = {name: value for name, value in modules.arrays(model).items() if name not in others}
    return Layout.of(trained, fixed)


def partly_trained(model: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """Return a copy of a model that trains only the named parameters or modules; all without names.

    Args:
        patterns: Names, in which "*" is any text; a parameter that is frozen already stays so.

    Raises:
        ParameterError: The model does not have a name.
    """
    model = copy.deepcopy(model)
    names, chosen = [name for name, _ in model.named_parameters()], set[str]()
    for pattern in patterns:
        matching = [
            name for name in names if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")
        ]
        if not matching:
            homes = sorted({*names, *(name.rpartition(".")[0] for name in names)} - {""})
            close = nearest(pattern, homes)
            hint = f"did you mean `{close}`?" if close else f"they are {', '.join(homes):.200}"
            raise ParameterError(f"trainable: the model has no parameter or module `{pattern}`; {hint}")
        chosen |= set(matching)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and (name in chosen or not patterns))
    return model


class TorchForward:
    """Runs a copy of a module on the CPU or a GPU. Raises `moretta.errors.ParameterError` as `check_model` does."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        device: str = "cpu",
        *,
        by_batch: bool = False,
        micro_batch: int | None = None,
    ) -> None:
        check_traceable(model)
        check_model(model, by_batch=by_batch)
        self.layout, self.micro_batch = layout, micro_batch
        self._model = modules.out_of_place(copy.deepcopy(model)).to(device).requires_grad_(False)
        for layer in batch_statistics.layers(self._model).values() if by_batch else ():
            layer.track_running_stats = False  # until `statistics` needs them
        trained = dict(self._model.named_parameters())
        self._flat = torch.zeros(layout.size, dtype=modules.DTYPES[layout.dtype], device=device)
        self._batches = dict[int, tuple[Array, Tensor]]()  # of a round, on the host and on the device
        for name, place in layout.places.items():  # every parameter becomes a view of the flat one: one copy sets all
            trained[name].data = self._flat[place].view(trained[name].shape)
        self._batched = Batched.of(self._model, layout) if layout.size <= SMALL else None

    def at_once(self, rows: int) -> int:
        """Return the number of parameter vectors to run together: the fewer rows share a call, the more."""
        return min(MOST, max(LEAST, TOGETHER // min(rows, self.micro_batch or rows))) if self._batched else 1

    def fixed(self) -> dict[str, Array]:
        """Return copies of the untrained tensors: frozen parameters and all buffers, also unsaved ones."""
        names = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        return {name: value.cpu().numpy().copy() for name, value in names.items() if name not in self.layout.shapes}

    def statistics(self, at: Array, x: Array) -> dict[str, Array]:
        """Return the mean and variance of each BatchNorm's inputs (`moretta.protocols.baffle.batch_statistics`).

        Args:
            at: Parameters [size].

        Raises:
            ParameterError: The batch has no variance.
        """
        try:
            with torch.inference_mode(), batch_statistics.noted(self._model):
                self._outputs_at(torch.from_numpy(at).to(self._flat.device), self._on_device(x))
        except ValueError as error:
            raise ParameterError(
                f"a batch of {len(x)} rows has no variance that BatchNorm could divide by; choose a batch-size that "
                "leaves no such rest, or use GroupNorm"
            ) from error
        held = dict(self._model.named_buffers())
        return {name: held[name].cpu().numpy().copy() for name in batch_statistics.shapes(self._model)}

    def perturbed(self, directions: Directions, at: Array, distance: float, rows: int) -> Iterator[Any]:
        """Yield perturbed parameters, on their device."""
        self._batches.clear()
        if self._flat.device.type == "cpu":
            return directions.perturbed(at, distance, self.at_once(rows))
        return perturbed(directions, at, distance, self._flat.device)

    def outputs(self, parameters: NDArray[np.floating] | Tensor, x: Array) -> Array:
        """Return the model's outputs at each parameter vector: see `moretta.protocols.baffle.silo.forward.Forward`."""
        with torch.inference_mode():
            vectors = parameters if isinstance(parameters, Tensor) else torch.from_numpy(parameters)
            vectors, inputs = vectors.to(self._flat.device), self._on_device(x)
            if self._batched is not None and len(vectors) > 1:
                parts = [self._batched.outputs(vectors, part) for part in self._parts(inputs)]
                return np.asarray(torch.cat(parts, dim=1).cpu())
            return np.asarray(torch.stack([self._outputs_at(vector, inputs) for vector in vectors]).cpu())

    def _outputs_at(self, vector: Tensor, inputs: Tensor) -> Tensor:
        self._flat.copy_(vector)
        return torch.cat([self._model(part) for part in self._parts(inputs)])

    def _parts(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return torch.split(inputs, self.micro_batch or max(1, len(inputs)))

    def _on_device(self, x: Array) -> Tensor:
        """Return a batch on the model's device; all directions of a round share it, so it is copied once."""
        if self._flat.device.type == "cpu":
            return torch.from_numpy(x)
        if id(x) not in self._batches:
            if len(self._batches) >= BATCHES:
                self._batches.clear()
            self._batches[id(x)] = x, torch.from_numpy(x).to(self._flat.device)  # x is kept, so its id is unique
        return self._batches[id(x)][1]


def check_model(model: nn.Module, *, by_batch: bool = False) -> None:
    """Raise ParameterError, naming the place, if a forward pass changes the model or mixes rows.

    Args:
        by_batch: Whether BatchNorm normalises by a batch's own statistics; the model then needs one that does.
    """
    if by_batch and not batch_statistics.layers(model):
        raise ParameterError("batch-statistics needs BatchNorm in training mode, which the model lacks; remove it")
    for name, module in model.named_modules():
        place = f"`{name or 'the model'}` ({type(module).__name__})"
        if by_batch and isinstance(module, _BatchNorm):
            continue
        if isinstance(module, _BatchNorm | _InstanceNorm) and module.training and module.track_running_stats:
            raise ParameterError(
                f"{place} changes its running statistics in forward passes; freeze it by .eval() (built-in models: "
                'norm = "frozen-batch"), use GroupNorm, or for BatchNorm set batch-statistics = true'
            )
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ParameterError(
                f"{place} mixes the rows of a batch, so that their losses are not their own; use GroupNorm"
            )


def forward_only(model: nn.Module, x: Tensor, *, blocks: bool, by_batch: bool = False) -> tuple[nn.Module, list[str]]:
    """Return a copy of a model as forward-only silos run it, and its warnings.

    Layers that draw at random run in evaluation mode: losses would differ by chance and not by direction. So does
    BatchNorm, with the model's initial statistics, if blocks of layers move.

    Args:
        x: A few rows.
        by_batch: Whether BatchNorm normalises by a batch's own statistics.
    """
    model, warnings = copy.deepcopy(model), list[str]()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm | _InstanceNorm) and module.training]
    if draws(model, x):
        model.eval()
        warnings.append(
            "the model draws at random in training (dropout or the like); silos that run forward alone run it as in "
            "evaluation, without that"
        )
    keeping = [norm for norm in norms if norm.track_running_stats]
    if blocks and not by_batch and keeping:
        model.eval()
        warnings.append(
            f"{len(keeping)} normalisation layers use the statistics that the model came with, as in evaluation: "
            "blocks of layers are moved without a batch's own; start from a trained model, or use GroupNorm"
        )
    else:
        for norm in norms:
            norm.train()
    return model, warnings


def draws(model: nn.Module, x: Tensor) -> bool:
    """Whether a model, in its present mode, draws at random in a forward pass; it is unchanged."""
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        before = torch.get_rng_state()
        try:
            modules.out_of_place(copy.deepcopy(model))(x)
        except Exception:  # noqa: BLE001  # `check_rows` runs it again, and reports the error
            return False
        return not torch.equal(before, torch.get_rng_state())


def check_rows(forward: TorchForward, at: Array, x: Array, *, several: bool = True) -> None:
    """Raise ParameterError if a row's outputs depend on other rows, or change between passes.

    This also detects a forward pass that changes the model's buffers.

    Args:
        x: A few rows, at least one.
        several: Whether a row's outputs must be the same without other rows.
    """
    before = forward.fixed()
    first, second = (forward.outputs(at[None], x)[0] for _ in range(2))
    changed = sorted(name for name, value in forward.fixed().items() if not np.array_equal(value, before[name]))
    if changed:
        raise ParameterError(
            f"the model changes {', '.join(changed)} in forward passes, so that a loss depends on what ran before it; "
            "freeze what keeps running statistics, or use GroupNorm"
        )
    if not np.array_equal(first, second, equal_nan=True):
        raise ParameterError(
            "the model's outputs for the same rows vary from call to call, so losses would differ by chance and not "
            "by direction; remove what it draws at random"
        )
    if not several:
        return
    alone = np.concatenate([forward.outputs(at[None], x[row : row + 1])[0] for row in range(len(x))])
    most = np.abs(alone - first).max()
    if most > MIXING * np.abs(first).max():
        raise ParameterError(
            f"the model's outputs for a row differ by {most:.2g} where other rows are in the batch, so its loss is "
            "not its own; remove what mixes the rows of a batch"
        )


def perturbed(directions: Directions, at: Array, distance: float, device: torch.device) -> Iterator[Tensor]:
    """Yield parameters + distance d_k, k = 1 .. K, a block together, [m, n], of CPU floats `at`; overwritten."""
    centre = torch.from_numpy(at).to(device)
    together = torch.empty((BLOCK, len(at)), dtype=centre.dtype, device=device)
    for block in range(-(-directions.count // BLOCK)):
        vectors = together[: directions.count - block * BLOCK]
        if directions.gaussian:
            scale = float(at.dtype.type(distance * 2.0**-GAUSSIAN_BITS))
            for entries, vector in zip(_gaussian(directions, block), vectors, strict=True):
                torch.add(centre, entries.to(device).to(centre.dtype).mul_(scale), out=vector)
        else:
            step = float(at.dtype.type(distance))  # rounded as on the CPU, like the Gaussian's scale
            octets, ahead, behind = _octets(directions, block).to(device), centre + step, centre - step
            for bit, vector in enumerate(vectors):
                torch.where((octets >> bit & 1).bool(), behind, ahead, out=vector)
        yield vectors


def combine(directions: Directions, coefficients: NDArray[np.float64], device: torch.device) -> NDArray[np.float64]:
    """Return `Directions.combine`, summed on a device."""
    whole, bits = directions.rounded(coefficients)
    total = torch.zeros(directions.size, dtype=torch.int64, device=device)
    if directions.gaussian:
        each = (vector for block in range(-(-directions.count // BLOCK)) for vector in _gaussian(directions, block))
        for factor, entries in zip(whole, each, strict=True):
            total += int(factor) * entries.to(device).long()
        return scaled_back(total.cpu().numpy(), bits + GAUSSIAN_BITS)
    tables = torch.from_numpy(directions.tables(whole)).to(device)  # of all blocks in one copy
    for block, table in enumerate(tables):
        octets = _octets(directions, block).to(device)
        for start in range(0, directions.size, STEP_ON_DEVICE):
            total[start : start + STEP_ON_DEVICE] += table[octets[start : start + STEP_ON_DEVICE].long()]
    return scaled_back(total.cpu().numpy(), bits)


STEP_ON_DEVICE = 256 * STEP  # parameters whose indices and terms take memory at a time


def _octets(directions: Directions, block: int) -> Tensor:
    return torch.from_numpy(np.concatenate(list(directions.octets(block))))


def _gaussian(directions: Directions, block: int) -> Iterator[Tensor]:
    return (torch.from_numpy(entries.astype(np.int16)) for entries in directions.quantiles(block))
