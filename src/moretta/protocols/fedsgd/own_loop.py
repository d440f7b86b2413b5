"""A user's own training loop, instead of federated averaging's epochs at a silo.

    def fit(model, x, y, number):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model, len(x)

Its arguments are the round's model, the silo's prepared inputs, the targets encoded for the loss, and the round's
number from 1. The model is a module in train mode, which the loop may change, as it may inputs and targets: they are
copies. Inputs and targets are on the run's device; inputs of several arrays are a dict of them, by the model's
keywords. It returns the final weights, as the module or a mapping of names to tensors or arrays, and the number of rows
that they count as: those trained on, at most the silo's. Frozen parameters must stay as they are. W - W_k and the
running statistics are summed, masked and kept, as after the built-in epochs. PyTorch's random numbers are the same in
each attempt at a round. The loop itself seeds all others, such as NumPy's.

A function with a method `at(silo, rounds)` is called with it once a run, and returns each silo's own loop, which may
keep state between rounds (`moretta.client.Script`).

Under FedProx mu (w - W) is added to each parameter's gradient as `backward` computes it, once until the gradient is
zeroed: a loop that accumulates gradients of several batches is pulled once a step.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moretta.contract.messages import Array
from moretta.data.references import cause
from moretta.data.silo import Silo
from moretta.errors import RangeError, RowsError
from moretta.models.hooks import arrays_of, gives_all
from moretta.protocols.common import modules
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.own_loss import Function, imported, named
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.params import Epochs

log = logging.getLogger("moretta")


def loops(protocol: Training, silos: Sequence[Silo], rounds: int) -> dict[str, Function]:
    """Return the loops of silos: a silo's own (`Silo.fit`), else the protocol's."""
    common = imported(protocol.fit) if isinstance(protocol, Epochs) and protocol.fit is not None else None
    fits = {silo.name: fit for silo in silos if not silo.remote and (fit := silo.fit or common) is not None}
    return {silo: fit.at(silo, rounds) if hasattr(fit, "at") else fit for silo, fit in fits.items()}


def fitted(
    fit: Function, model: nn.Module, x: Tensor, y: Tensor, loss: Loss, number: int, pull: float = 0.0
) -> tuple[dict[str, Array], int]:
    """Train by the user's own loop; return the upload, ``gradient/<name>``, ``loss``, ``buffer/<name>``, and rows.

    The loss is the last model's, over all rows, in evaluation.

    Args:
        model: Has the round's weights; the loop gets a copy, whose weights the model has afterwards.
        x, y: All rows of the silo.
        pull: FedProx's mu.

    Raises:
        RowsError: The loop fails, or returns weights that cannot be summed; the sentence stays at the silo.
    """
    before = model.state_dict()  # unchanged until `load`, as the loop gets a copy
    trained, buffers, where = modules.trainable(model), modules.running_buffers(model), f"fit `{named(fit)}`"
    copied = gives_all(copy.deepcopy(model))  # a library's trainer needs its objects
    pulls = [] if not pull else [_Pull(parameter, pull) for parameter in modules.trainable(copied).values()]
    try:
        returned = fit(copied, arrays_of(model, x.clone()), y.clone(), number)
    except Exception as error:
        raise RowsError(f"{where} failed in round {number} with {cause(error)}; fix it") from error
    if pulls and not any(pull_term.added for pull_term in pulls):
        raise RowsError(
            f"{where} computed no gradient of the model that it received, so mu of fedprox had no effect; train that "
            "model, or use fedavg"
        )
    weights, rows = _checked(returned, len(y), where)
    after = {name: _tensor(weights, name, before[name], where) for name in (*trained, *buffers)}
    for name, parameter in model.named_parameters():
        if name in trained or name not in weights:
            continue
        own = _tensor(weights, name, parameter, where)
        if not torch.equal(own, parameter.to(torch.as_tensor(weights[name]).dtype).to(own.dtype)):
            raise RowsError(
                f"{where}: changed `{name}`, which is frozen in the run and not summed; leave it as it is, or have the "
                "run train it (requires_grad_(True) before the run)"
            )
    if number == 1 and all(torch.equal(after[name], before[name]) for name in trained):
        log.warning("%s returned the weights that it was given; return the model that it trained", where)
    upload = {f"gradient/{name}": before[name] - after[name] for name in trained}
    upload |= {f"buffer/{name}": after[name] for name in buffers}
    modules.load(model, modules.on_host({**before, **after}))
    with torch.no_grad():
        reached = float(loss(modules.outputs_of(model, x), y))
    return modules.on_host(upload) | {"loss": np.asarray(reached)}, rows


class _Pull:
    """Adds mu (w - W) to each gradient of a parameter, unless an accumulated one has it already."""

    def __init__(self, parameter: Tensor, mu: float) -> None:
        self.added, self._parameter, self._start, self._mu = 0, parameter, parameter.detach().clone(), mu
        parameter.register_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """Return the gradient to accumulate; None for the same."""
        self.added += 1
        held = self._parameter.grad
        if held is not None and bool(held.any()):
            return None
        return gradient + self._mu * (self._parameter.detach() - self._start)


def _checked(returned: object, most: int, where: str) -> tuple[Mapping[str, Any], int]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise RowsError(
            f"{where}: expected weights and a number of rows, `return model, len(x)`; got {type(returned).__name__}"
        )
    weights, rows = returned
    weights = weights.state_dict() if isinstance(weights, nn.Module) else weights
    if not isinstance(weights, Mapping):
        raise RowsError(f"{where}: expected the model or a mapping of names to tensors, got {type(weights).__name__}")
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or not 1 <= rows <= most:
        raise RowsError(f"{where}: expected a number of rows from 1 to {most}, which the silo has; got {rows!r}")
    return weights, int(rows)


def _tensor(weights: Mapping[str, Any], name: str, like: Tensor, where: str) -> Tensor:
    if name not in weights:
        raise RowsError(f"{where}: the weights lack `{name}`, which the model has; return all of them")
    try:
        weight = torch.as_tensor(weights[name], device=like.device).detach()
        cast = weight.to(like.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RowsError(f"{where}: `{name}` is not an array of numbers: {cause(error)}") from error
    if cast.shape != like.shape:
        raise RowsError(f"{where}: expected `{name}` of shape {list(like.shape)}, got {list(cast.shape)}")
    if weight.is_floating_point() != like.is_floating_point():
        kinds = (str(tensor.dtype).removeprefix("torch.") for tensor in (like, weight))
        raise RowsError("{}: expected `{}` of {}, got {}; return the weights as they train".format(where, name, *kinds))
    if not bool(torch.isfinite(cast).all()):
        raise RangeError(f"{where}: `{name}` has NaN or infinity; lower its learning rate, or look at its rows")
    return cast.clone()
