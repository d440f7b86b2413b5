"""Gradient inversion: search rows x whose gradient at known parameters is a given one.

With g(x, y) the gradient of the mean loss over the rows (x, y), and g* the given one, both as one vector:

    DLG (Zhu et al., NeurIPS 2019)               min |g(x, y) - g*|^2 / |g*|^2                over x and y, by L-BFGS
    iDLG (Zhao et al., 2020)                     one row's label is where the head's gradient is negative: y is known
    inverting gradients (Geiping et al., 2020)   min 1 - cos(g(x, y), g*) + c TV(x)           over x, by Adam

y is the class probabilities softmax(z) of each row under cross-entropy, over z, and the target itself under the squared
error. Both need second derivatives: DLG suits smooth networks, and the cosine suffers less from ReLU's kinks. Of
several starts the one with the nearest gradient is taken, which needs no truth.

A first layer that is linear with a bias has dL/dW = sum_n d_n x_n' and dL/db = sum_n d_n. So each row of the quotient
(dL/dW)_i / (dL/db)_i is x itself for one row (Phong et al., 2018), and for several a mixture: the first start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.audit.evidence import network
from moretta.audit.evidence.intervals import Floats
from moretta.audit.evidence.network import outputs_at
from moretta.contract.messages import Array, Tensors
from moretta.protocols.common.targets import probabilities

Search = Mapping[bool, tuple[float, int, int]]
EXACT = 1e-10  # of the squared relative distance: above float32's rounding of a gradient
TOTAL_VARIATION = 1e-3  # its weight c beside the cosine
RATE = 0.05  # of Adam, relative to an input's deviation
LEAST_STEPS = 20  # of a search
MEMORY = 30  # pairs that L-BFGS keeps


@dataclass(frozen=True)
class Inputs:
    """The range and moments of inputs, from background rows: by entry of x, [*shape] each."""

    mean: Floats
    deviation: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, x: Array) -> Inputs:
        """Return those of rows; the range is that of all entries together, as rows are few."""
        rows = np.asarray(x, dtype=np.float64)
        spread = np.full(rows.shape[1:], max(float(rows.std()), 1e-6))
        whole = np.ones(rows.shape[1:])
        return cls(rows.mean(axis=0), spread, whole * rows.min(), whole * rows.max())


@dataclass(frozen=True)
class Effort:
    """The effort of a search.

    Attributes:
        starts: The starts of each method.
        steps, adam: The steps of L-BFGS and of Adam from each start; 0 omits Adam.
    """

    starts: int = 2
    steps: int = 200
    adam: int = 0

    @classmethod
    def within(cls, most: Search, step: float, searches: int, *, thorough: bool) -> Effort:
        """Return the effort of one of `searches` searches, so that all end within the seconds of an idle core.

        Args:
            most: Seconds, starts and steps, by whether the audit is thorough.
            step: The cost of one step (`network.times`).
            thorough: Whether the search also goes by Adam.
        """
        seconds, starts, steps = most[thorough]
        steps = network.times(seconds / (starts * searches * (1 + thorough)), step, LEAST_STEPS, steps)
        return cls(starts, steps, adam=steps if thorough else 0)


@dataclass(frozen=True)
class Inverted:
    """The nearest result.

    Attributes:
        x: [rows, *shape].
        y: [rows, outputs]: probabilities of classes, or targets.
        distance: The squared distance of the gradient, relative to the seen one.
    """

    x: Floats
    y: Floats
    distance: float


class Gradients:
    """The gradients of one model at known parameters, in float64.

    Args:
        parameters: The model's parameters and buffers.
        seen: g*, by parameter.
        loss: "mse" or "cross-entropy".
        twice: Pass a single row as two equal ones, whose mean gradient is the same. An exported program may need two
            rows.
        linear: Names of parameters, and a function of their gradients, in order, that returns the seen values. None if
            `seen` is a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Tensors,
        seen: Tensors,
        loss: str,
        *,
        twice: bool = False,
        linear: tuple[Sequence[str], Callable[[Sequence[Tensor]], Tensor]] | None = None,
    ) -> None:
        self._model, self._mse, self._twice = model.double(), loss == "mse", twice
        self._held = {name: _float64(value) for name, value in parameters.items()}
        names, self._linear = linear or (list(seen), _flat)
        self._trained = [self._held[name].requires_grad_() for name in names]
        self._seen = _flat([_float64(value) for value in seen.values()])
        self._scale = max(float(self._seen.norm()), 1e-300)

    def step_cost(self, x: Array) -> float:
        """Return the cost of a step of a search for as many rows as x (`moretta.audit.evidence.network`)."""
        each_row = network.cost_of_row(self._model, x.shape[1:])
        return network.cost_of_passes(self._model, each_row, max(len(x), 2), network.SEARCHED)

    def at(self, x: Tensor, free: Tensor) -> Tensor:
        """Return g(x, y) / |g*|, differentiable. free: y under the squared error, else z with y = softmax(z)."""
        if self._twice and len(x) == 1:
            x, free = torch.cat([x, x]), torch.cat([free, free])
        outputs = outputs_at(self._model, self._held, x)
        if self._mse:
            value = (outputs - free).square().sum(dim=1).mean() / 2
        else:
            value = -(free.softmax(dim=1) * outputs.log_softmax(dim=1)).sum(dim=1).mean()
        slopes = torch.autograd.grad(value, self._trained, create_graph=True, materialize_grads=True)
        return self._linear(slopes) / self._scale

    def distance(self, x: Tensor, free: Tensor) -> Tensor:
        """Return |g(x, y) - g*|^2 / |g*|^2."""
        return (self.at(x, free) - self._seen / self._scale).square().sum()

    def angle(self, x: Tensor, free: Tensor) -> Tensor:
        """Return 1 - cos(g(x, y), g*)."""
        gradient = self.at(x, free)
        cosine: Tensor = gradient @ self._seen / self._scale / gradient.norm().clamp(min=1e-300)
        return 1.0 - cosine


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _float64(value: Array) -> Tensor:
    held = torch.tensor(np.asarray(value))
    return held.double() if held.is_floating_point() else held


def invert(
    gradients: Gradients,
    inputs: Inputs,
    rows: int,
    outputs: int,
    *,
    labels: Array | None = None,
    first: Array | None = None,
    effort: Effort = Effort(),
    seed: int = 0,
) -> Inverted:
    """Return the rows with the nearest gradient over all starts.

    Args:
        labels: The rows' classes, int[rows], if known under cross-entropy; None searches for the targets too.
        first: x of the first start, [rows, *shape]; None draws it.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    best: Inverted | None = None
    for number in range(effort.starts):
        x = inputs.mean + inputs.deviation * generator.standard_normal((rows, *inputs.mean.shape))
        if number == 0 and first is not None:
            x = np.asarray(first, dtype=np.float64)
        if labels is None:
            free = 0.1 * generator.standard_normal((rows, outputs))
        else:  # e^-100: its softmax is the class
            free = 100.0 * np.eye(outputs)[np.asarray(labels, dtype=np.int64)]
        for search in (_by_lbfgs, _by_adam):
            result = search(gradients, inputs, x, free, labels is None, effort)
            if result is None:
                continue
            at, z, distance = result
            if best is None or distance < best.distance:
                best = Inverted(at, z if gradients._mse else probabilities(z, "cross-entropy"), distance)
        if best is not None and best.distance < EXACT:
            break
    if best is None:
        best = Inverted(x, free, float("inf"))
    return best


Found = tuple[Floats, Floats, float] | None


def _by_lbfgs(gradients: Gradients, inputs: Inputs, x: Floats, free: Floats, search_y: bool, effort: Effort) -> Found:
    from scipy.optimize import minimize

    size, shape = x.size, x.shape

    def split(flat: Floats) -> tuple[Tensor, Tensor]:
        at = torch.tensor(flat[:size].reshape(shape), requires_grad=True)
        z = flat[size:].reshape(free.shape) if search_y else free
        return at, torch.tensor(z, requires_grad=search_y)

    def value(flat: Floats) -> tuple[float, Floats]:
        at, z = split(flat)
        distance = gradients.distance(at, z)
        slopes = torch.autograd.grad(distance, [at, z] if search_y else [at], materialize_grads=True)
        return float(distance.detach()), np.concatenate([slope.numpy().ravel() for slope in slopes])

    def near(intermediate_result: Mapping[str, float]) -> None:
        if intermediate_result["fun"] < EXACT**1.5:
            raise StopIteration

    start = np.concatenate([x.ravel(), free.ravel()]) if search_y else x.ravel()
    options = {"maxiter": effort.steps, "maxfun": 2 * effort.steps, "maxcor": MEMORY, "ftol": 0.0, "gtol": 0.0}
    ended = minimize(value, start, jac=True, method="L-BFGS-B", callback=near, options=options)
    if not np.isfinite(ended.fun):
        return None
    z = ended.x[size:].reshape(free.shape) if search_y else free
    return ended.x[:size].reshape(shape), z, float(ended.fun)


def _by_adam(gradients: Gradients, inputs: Inputs, x: Floats, free: Floats, search_y: bool, effort: Effort) -> Found:
    if not effort.adam:
        return None
    at, z = torch.tensor(x, requires_grad=True), torch.tensor(free, requires_grad=search_y)
    rate = RATE * float(inputs.deviation.mean())
    optimizer = torch.optim.Adam([{"params": [at], "lr": rate}, {"params": [z] if search_y else [], "lr": RATE}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, effort.adam)
    low, high = torch.tensor(inputs.low), torch.tensor(inputs.high)
    for _ in range(effort.adam):
        value = gradients.angle(at, z) + TOTAL_VARIATION * _variation(at)
        slopes = torch.autograd.grad(value, [at, z] if search_y else [at], materialize_grads=True)
        at.grad = slopes[0]
        if search_y:
            z.grad = slopes[1]
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            at.copy_(at.clamp(low, high))
    distance = float(gradients.distance(at, z).detach())
    return (at.detach().numpy(), z.detach().numpy(), distance) if np.isfinite(distance) else None


def _variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbours in images, 0 for other inputs."""
    if x.ndim != 4:
        return x.new_zeros(())
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def quotient_start(seen: Tensors, inputs: Inputs, rows: int) -> Floats | None:
    """Return (dL/dW)_i / (dL/db)_i of the units with the largest |(dL/db)_i|; None without such a first layer."""
    if not seen:
        return None
    name = next(iter(seen))
    weight, bias = np.asarray(seen[name], np.float64), seen.get(f"{name.removesuffix('weight')}bias")
    if weight.ndim != 2 or bias is None or weight.shape[1] != inputs.mean.size or len(weight) < rows:
        return None
    units = np.argsort(-np.abs(bias))[:rows]
    if not np.all(np.abs(bias[units]) > 0):
        return None
    x = (weight[units] / np.asarray(bias, np.float64)[units, None]).reshape(rows, *inputs.mean.shape)
    return np.asarray(np.clip(x, inputs.low, inputs.high))


def pairing(claimed: Array, true: Array) -> NDArray[np.int64]:
    """Return the claimed row for each true one, by the least squared error in all (Hungarian)."""
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist

    a, b = (np.asarray(rows, np.float64).reshape(len(rows), -1) for rows in (claimed, true))
    return np.asarray(linear_sum_assignment(cdist(b, a, "sqeuclidean"))[1])


def matched(claimed: Array, true: Array) -> Floats:
    """Return the claimed rows in the order of their true ones."""
    return np.asarray(claimed, np.float64)[pairing(claimed, true)]


def squares(claimed: Array, true: Array, mean: Array) -> Floats:
    """Return the mean squared errors of rows paired by `matched`, and of the mean row, [rows, 2]."""
    rows = np.asarray(true, np.float64)
    misses = (np.asarray(array, np.float64) - rows for array in (claimed, mean))
    return np.stack([np.square(miss).reshape(len(rows), -1).mean(axis=1) for miss in misses], axis=1)
