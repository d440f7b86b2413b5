"""A model as an attacker runs it, from any source: outputs at some weights, its head, and its cost.

An attack's effort follows from the model's size and never from a clock. So the same run and seed have the same score on
any machine, under any load. Multiply-adds are counted. The figures below are approximately what an idle core does in a
second, and the cost of a call into torch beside them, measured on small networks with one thread.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moretta.audit.evidence.case import PublicRun
from moretta.contract.messages import Array, Tensors

SECOND = 3e9  # in a second
CALL = 4e4  # the least time of an operation on one tensor, in multiply-adds
STEP = 3  # forward passes with the time of a training step
SEARCHED = 24  # forward passes with the time of a step of a search through gradients, in float64: it goes back twice


def tensors(parameters: Tensors) -> dict[str, Tensor]:
    """Return copies of named arrays as tensors."""
    return {name: torch.tensor(np.asarray(value)) for name, value in parameters.items()}


def outputs_at(model: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the outputs of the model with these parameters and buffers, [rows, outputs], differentiable in all."""
    outputs: Tensor = torch.func.functional_call(model, dict(parameters), (x,))
    return outputs


def norms_like(g: Array, v: Array) -> Array:
    """Return the norms of v, [outputs, inputs], in the shape of g: over each axis along which g has one number."""
    axes = tuple(axis for axis in range(2) if not g.ndim or g.shape[axis] == 1)
    return np.asarray(np.linalg.norm(v, axis=axes, keepdims=True), v.dtype).reshape(g.shape)


def head_weight(run: PublicRun, parameters: Tensors) -> Array:
    """Return the weight that the head works with, [outputs, inputs]: with weight normalisation g v / |v|."""
    if not run.head_magnitude:
        return parameters[run.head]
    g, v = parameters[run.head_magnitude], parameters[run.head]
    return np.asarray(v * (g / norms_like(g, v)))


@torch.no_grad()
def head_inputs(model: nn.Module, run: PublicRun, parameters: Tensors, x: Array) -> tuple[Array, Array]:
    """Return the head's inputs h [rows, inputs] and the outputs [rows, outputs] at these weights, float64.

    It only runs the model, so it works for an exported program too. With unit vectors for rows of the head, the outputs
    are entries of h. The head must share its parameters with no other layer.
    """
    held = tensors(parameters)
    inputs = torch.tensor(x)
    outputs = outputs_at(model, held, inputs).double().numpy()
    weight, none = held[run.head], 1e-12 if run.head_magnitude else 0.0  # a norm of 0 would be divided by
    count, width = weight.shape
    columns = []
    for start in range(0, width, count):
        rows = torch.full_like(weight, none)
        for row in range(min(count, width - start)):
            rows[row, start + row] = 1.0
        at = held | {run.head: rows} | ({run.head_bias: torch.zeros(count).to(weight)} if run.head_bias else {})
        if run.head_magnitude:
            at[run.head_magnitude] = torch.from_numpy(norms_like(parameters[run.head_magnitude], rows.numpy()))
        columns.append(outputs_at(model, at, inputs)[:, : min(count, width - start)])
    return torch.cat(columns, dim=1).double().numpy(), outputs


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """Counts the multiplications of matrix products and convolutions, and an entry of any other new result as one."""

    count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.count += result.numel() * _terms(str(func).split(".")[1], args)
        return result


def _terms(name: str, args: Any) -> int:
    """Return the number of products in the sum of an entry of an operation's result."""
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return int(args[-1 if name in ("mm", "bmm") else 2].shape[-2])
    return int(args[1][0].numel()) if name == "convolution" else 1


def cost_of_row(model: nn.Module, shape: tuple[int, ...], *, tokens: bool = False) -> float:
    """Return the multiplications of one row's forward pass.

    Args:
        shape: The shape of a row.
        tokens: Whether rows are token ids.
    """
    dtype = next(model.parameters()).dtype
    # Two rows, as an exported program may need them, and copies of what they change: running statistics.
    rows = torch.ones((2, *shape), dtype=torch.int64 if tokens else dtype)
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    counter = _Counter()  # type: ignore[no-untyped-call]
    with torch.no_grad(), counter:
        torch.func.functional_call(model, held, (rows,))
    return float(counter.count) / 2.0


def cost_of_passes(model: nn.Module, each_row: float, rows: int, passes: float) -> float:
    """Return the cost of `passes` forward passes of `rows` rows. each_row: by `cost_of_row`."""
    return passes * (rows * each_row + CALL * max(1, len(list(model.parameters()))))


def times(seconds: float, each: float, least: int, most: int) -> int:
    """Return how many things of cost `each` an idle core does in these seconds, within bounds."""
    return int(np.clip(seconds * SECOND / max(each, 1.0), least, most))
