"""A user's own loss: a function of outputs and targets that returns a number for each row.

    def huber(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.huber_loss(outputs, targets, reduction="none").sum(dim=1)

Training minimises its mean over rows. The built-in loss named by `loss` still sets how targets are encoded
(`moretta.protocols.common.targets`) and scores test rows, so that runs can be compared.

A row's number depends on that row alone, as silos are weighted by their rows, and some protocols take rows one by one.
This module needs no torch until a loss is called.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BeforeValidator, PlainSerializer

from moretta.contract.messages import Array
from moretta.contract.settings import Spelled
from moretta.data.references import cause, is_reference, resolve
from moretta.errors import ParameterError
from moretta.protocols.common.targets import encode

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[..., Any]
ROWS = 8  # made-up rows of a trial
CLOSE = 1e-4  # relative, between a row's number alone and among others


def named(function: Function | str) -> str:
    """Return "module:function", as in a run file."""
    if isinstance(function, str):
        return function
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"


def _known(value: object) -> object:
    if value is None or callable(value) or (isinstance(value, str) and is_reference(value)):
        return value
    raise ValueError('a function, in a run file "module:function"')


OwnFunction = Annotated[
    Function | str | None,
    BeforeValidator(_known),
    PlainSerializer(named, return_type=str, when_used="unless-none"),
    Spelled('`"module:function"`'),
]
"""A field for a function, in a run file its "module:function", or None."""


def imported(function: Function | str, base: Path = Path(), agreed: Container[str] = ()) -> Function:
    """Return a function, imported by its name from beside a run file in the folder `base`; agreed: see `resolve`."""
    return resolve(function, base, agreed) if isinstance(function, str) else function


def of_rows(function: Function, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each row, [rows]. Raises `moretta.errors.ParameterError` for anything else."""
    import torch

    losses = function(outputs, targets)
    if not isinstance(losses, torch.Tensor) or losses.shape != outputs.shape[:1]:
        got = f"shape {list(losses.shape)}" if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise ParameterError(
            f"own-loss `{named(function)}`: expected a tensor of one number a row, [{len(outputs)}], got {got}; leave "
            'out the mean over rows (of torch\'s own losses by reduction="none")'
        )
    return losses


def of_arrays(function: Function) -> Callable[[Array, Array], Array]:
    """Return the same function of arrays, in float64 and without gradients."""

    def losses(outputs: Array, targets: Array) -> Array:
        import torch

        expected = targets.astype(np.float64) if targets.dtype.kind == "f" else targets
        with torch.no_grad():
            return of_rows(function, torch.tensor(outputs, dtype=torch.float64), torch.tensor(expected)).numpy()

    return losses


def check(
    loss_function: Function | str,
    outputs: int,
    loss: str,
    task: str,
    dtype: Any,
    *,
    differentiable: bool,
    targets: Array | None = None,
) -> None:
    """Try a loss on made-up outputs.

    Args:
        loss: The built-in one, which encodes targets.
        dtype: torch's, of the run.
        differentiable: Whether silos need its gradient.
        targets: Some of a silo's own; None makes some up.

    Raises:
        ParameterError: The loss cannot be trained on.
    """
    import torch

    function, drawn = imported(loss_function), np.random.default_rng(0)
    said_first = f"own-loss `{named(function)}`"
    x = torch.tensor(drawn.normal(size=(ROWS, outputs)), dtype=dtype, requires_grad=True)
    some = _made_up_targets(drawn, outputs, loss, task) if targets is None else targets[np.arange(ROWS) % len(targets)]
    y = torch.tensor(some if targets is None else encode(some, outputs, loss, "the first", np.float64))
    y = y.to(dtype) if y.is_floating_point() else y
    try:
        losses = of_rows(function, x, y)
        alone = torch.cat([of_rows(function, x[row : row + 1], y[row : row + 1]) for row in range(ROWS)])
        slopes = torch.autograd.grad(losses.sum(), x)[0] if differentiable else x.detach()
    except ParameterError:
        raise
    except Exception as error:
        raise ParameterError(
            f"{said_first} failed on {ROWS} made-up rows, outputs {list(x.shape)} and targets {list(y.shape)} of "
            f"{str(y.dtype).removeprefix('torch.')}, with {cause(error)}; fix it"
        ) from error
    if not (torch.isfinite(losses).all() and torch.isfinite(slopes).all()):
        raise ParameterError(f"{said_first}: expected finite numbers on made-up rows, got NaN or infinity; fix it")
    if not torch.allclose(losses.detach(), alone.detach(), rtol=CLOSE, atol=CLOSE):
        raise ParameterError(
            f"{said_first}: expected the same number for a row alone and among others; let a row's loss depend on that "
            "row alone"
        )


def _made_up_targets(drawn: np.random.Generator, outputs: int, loss: str, task: str) -> Array:
    if task == "classification":
        return encode(np.arange(ROWS) % max(outputs, 2), outputs, loss, "made up", np.float64)
    numbers = np.abs(drawn.normal(size=(ROWS, outputs)))  # times and counts are never negative
    if loss == "cross-entropy":  # rows of probabilities
        numbers = np.exp(numbers) / np.exp(numbers).sum(axis=1, keepdims=True)
    return encode(numbers, outputs, loss, "made up", np.float64)
