"""Shadow models: models that an attacker trains itself, as the run did, on rows that it chooses.

Shokri et al., S&P 2017. Training is the run's own: its optimizer and rate, as many epochs of as many steps, on batches
that are the same part of the rows.

A run with dp-noise has shadow models with as much: each row's gradient g_i is clipped to C. A batch of B rows has the
mean (sum_i g_i + N(0, sigma^2 C^2 n / S)) / B, where S of n silos do not collude. BAFFLE clips a row's numbers x = D
g_i. K of them move a tensor (with blocks, its block's repeats), so that |x|^2 ~ sum K |g_i|^2 over tensors. Its
estimate D' x / K has noise of sigma C / sqrt(K) an entry, so clip and noise are those of gradients that are multiplied
by sqrt(K), tensor by tensor. Batches are of one size, where the run draws lots. Under local epochs n silos' updates are
clipped to C and have the noise together, so a shadow model's move in a round is clipped to C, and gets noise of sigma C
/ n an entry. Where it takes fewer steps than the run, rounds are fewer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moretta.audit.evidence import network
from moretta.audit.evidence.case import PublicRun
from moretta.contract.messages import Array, Tensors
from moretta.protocols.common import modules
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.clipping import clipped_sum
from moretta.protocols.common.training import Training

LEAST_STEPS = 10
MOST_ROWS = 64  # whose own gradients are in memory at once
ROW_ENTRIES = 10  # cost of clipping and adding an entry of a row's own gradient, in multiplications


@dataclass(frozen=True)
class TrainingPlan:
    """How the run trains, in steps of one party that holds all rows.

    Attributes:
        steps: The steps of the whole run.
        part: The part of the rows in a batch, 0 to 1.
        rate: Returns the learning rate of a step, 1 .. steps.
        row_clip: The largest norm of a row's gradient; 0 does not clip.
        noise: The deviation of the noise in the sum of rows' gradients; in the mean of updates if `update_clip` is set.
        update_clip: The largest norm of a whole update, if noise is on updates; 0 does not clip.
        each: The steps of an update.
        moves: K of each tensor, by name.
    """

    steps: int
    part: float
    rate: Callable[[int], float]
    optimizer: Training
    row_clip: float = 0.0
    noise: float = 0.0
    update_clip: float = 0.0
    each: int = 1
    moves: Mapping[str, int] = field(default_factory=dict)


def plan_of(run: PublicRun, silo: str = "") -> TrainingPlan:
    """Return the plan of a run's public settings, without FedProx's pull.

    A FedAvg epoch has the smallest silo's steps.

    Args:
        silo: The silo that trains alone; empty for all together.
    """
    size = int(run.setting("batch-size", "data") or 0)
    silos = [Batches(count, size, 0, name) for name, count in run.rows.items() if silo in ("", name)]
    each = int(run.setting("local-epochs") or 0) * min(batches.per_epoch for batches in silos) or 1
    optimizer = run.optimizer
    clip, noise = _private(run)
    whole = bool(run.setting("local-epochs"))
    return TrainingPlan(
        steps=run.rounds * each,
        part=sum(batches.size for batches in silos) / sum(batches.rows for batches in silos),
        rate=lambda step: optimizer.rate(math.ceil(step / each), run.rounds),
        optimizer=optimizer,
        row_clip=0.0 if whole else clip,
        noise=noise,
        update_clip=clip if whole else 0.0,
        each=each,
    )


def _private(run: PublicRun) -> tuple[float, float]:
    """Return the clip norm, and the deviation of the noise, 0 for none.

    They are of a row's gradient or numbers and a round's sum, or under local epochs of a silo's update and their mean.
    """
    if not (run.setting("dp-noise") or run.setting("dp-clip")):
        return 0.0, 0.0
    clip, epochs, silos = float(run.setting("dp-clip")), run.setting("local-epochs"), len(run.silos)
    sharers = silos - int(run.setting("dp-colluding") or 0) if run.masked else 1
    noise = float(run.setting("dp-noise")) * clip * math.sqrt(silos / sharers)
    return clip, noise / silos if epochs else noise


def start_of(model: nn.Module, seed: int) -> dict[str, Array]:
    """Return drawn initial weights, for a model without its own (`moretta.audit.evidence.case.Case.model`).

    Weights of more than one axis are uniform in +-1 / sqrt(fan in), as PyTorch's layers begin; scales are 1.
    """
    held = modules.arrays(model)
    generator = np.random.Generator(np.random.PCG64(seed))
    for name, value in held.items():
        if value.ndim > 1:
            bound = 1.0 / math.sqrt(value[0].size)
            held[name] = generator.uniform(-bound, bound, value.shape).astype(value.dtype)
        elif value.dtype.kind == "f" and name.endswith(("weight", "running_var")):
            held[name] = np.ones_like(value)
    return held


class Steps:
    """Takes optimizer steps on a model in place."""

    def __init__(
        self,
        model: nn.Module,
        plan: TrainingPlan,
        loss: Callable[[Tensor, Tensor], Tensor],
        seed: int = 0,
        *,
        program: bool,
    ) -> None:
        self._model, self._plan, self._loss, self._program = model, plan, loss, program
        self._noise = torch.Generator().manual_seed(seed)
        self._trained = list(modules.trainable(model).values())
        self._roots = [math.sqrt(plan.moves.get(name, 1)) for name in modules.trainable(model)]
        self._kept: list[dict[str, Tensor]] = [{} for _ in self._trained]  # by the optimizer
        self._sent = [at.detach().clone() for at in self._trained]  # the update's start

    def take(self, number: int, rate: float, x: Tensor, y: Tensor) -> None:
        """Take step `number`, from 1, at a rate, on a batch."""
        plan, most = self._plan, self._plan.optimizer.clip_norm
        slopes = self._clipped(x, y) if plan.row_clip else self._gradient(x, y)
        if most is not None:
            length = float(torch.stack([slope.norm() for slope in slopes]).norm())
            slopes = [slope * min(1.0, most / (length or 1.0)) for slope in slopes]
        for at, slope, kept in zip(self._trained, slopes, self._kept, strict=True):
            modules.take_step(at, slope, kept, rate, plan.optimizer)
        if plan.update_clip and number % plan.each == 0:
            self._noise_update()

    @torch.no_grad()
    def _noise_update(self) -> None:
        """Clip an update's move of the model, and add noise, as in the mean of silos' updates."""
        moved = [(at - sent).double() for at, sent in zip(self._trained, self._sent, strict=True)]
        length = float(torch.stack([part.norm() for part in moved]).norm())
        kept = min(1.0, self._plan.update_clip / (length or 1.0))
        for at, sent, part in zip(self._trained, self._sent, moved, strict=True):
            drawn = torch.randn(part.shape, generator=self._noise, dtype=torch.float64)
            at.copy_(sent + (kept * part + self._plan.noise * drawn).to(at))
            sent.copy_(at)

    def _gradient(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(self._loss(self._model(x), y), self._trained, materialize_grads=True)

    def _clipped(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Return the mean of the rows' own gradients, each clipped, and noise."""
        total = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in self._trained]
        for start in range(0, len(x), MOST_ROWS):
            part = slice(start, start + MOST_ROWS)
            each = zip(self._roots, self._by_row(x[part], y[part]), strict=True)
            gradients = {str(place): root * gradient for place, (root, gradient) in enumerate(each)}
            clipped = clipped_sum(gradients, self._plan.row_clip)
            total = [tensor + clipped[str(place)] for place, tensor in enumerate(total)]
        drawn = [torch.randn(tensor.shape, generator=self._noise, dtype=torch.float64) for tensor in total]
        noised = [tensor + self._plan.noise * noise for tensor, noise in zip(total, drawn, strict=True)]
        parts = zip(noised, self._roots, self._trained, strict=True)
        return [(tensor / root / len(x)).to(at) for tensor, root, at in parts]

    def _by_row(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Return the rows' gradients, [rows, ...] by parameter."""
        if self._program:  # its operations do not map over rows, and it may need two of them
            each = [self._gradient(x[[row, row]], y[[row, row]]) for row in range(len(x))]
            return [torch.stack(gradient) for gradient in zip(*each, strict=True)]
        trained = {name: parameter.detach() for name, parameter in modules.trainable(self._model).items()}

        def loss_of_row(at: dict[str, Tensor], inputs: Tensor, target: Tensor) -> Tensor:
            outputs = torch.func.functional_call(self._model, at, (inputs[None],))
            return self._loss(outputs, target[None])

        gradients_of = torch.func.vmap(torch.func.grad(loss_of_row), in_dims=(None, 0, 0), randomness="different")
        gradients: dict[str, Tensor] = gradients_of(trained, x, y)
        return list(gradients.values())


def train(
    model: nn.Module,
    begin: Tensors,
    plan: TrainingPlan,
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Array,
    y: Array,
    keep: Sequence[float],
    steps: int,
    seed: int,
    *,
    program: bool,
) -> list[dict[str, Array]]:
    """Train from `begin` for `steps` steps; return the models at the parts `keep` of the way, and the last.

    Args:
        loss: Returns the loss of outputs and targets.
        keep: Parts of the way, 0 to 1, ascending.
        steps: The plan's steps or fewer, over which its rates spread.
        program: Whether the model is an exported program.
    """
    modules.load(model, begin)
    generator = np.random.Generator(np.random.PCG64(seed))
    inputs, targets = torch.tensor(x), torch.tensor(y)
    taker, size = Steps(model, plan, loss, seed, program=program), max(1, round(plan.part * len(x)))
    order, places, models = np.arange(0), [round(part * steps) for part in keep], list[dict[str, Array]]()
    for number in range(1, steps + 1):
        models += [modules.arrays(model) for at in places if at == number - 1]
        if not len(order):
            order = generator.permutation(len(x))
        index, order = torch.from_numpy(order[:size]), order[size:]
        rate = plan.rate(max(1, round(number * plan.steps / steps)))
        taker.take(number, rate, inputs[index], targets[index])
    models += [modules.arrays(model) for at in places if at >= steps]  # by few steps, one of the last rounds is the end
    return [*models, modules.arrays(model)]


def steps_of(model: nn.Module, plan: TrainingPlan, x: Array, rows: int, models: int, seconds: float) -> int:
    """Return how many of the plan's steps, at least a few, each of the models takes.

    Args:
        x: Rows of the kind that the models train on.
        rows: The number of rows that one model trains on.
        seconds: The time of all models together on an idle core, approximately.
    """
    each_row = network.cost_of_row(model, x.shape[1:], tokens=x.dtype.kind in "iu")
    batch = max(1, round(plan.part * rows))
    each = network.cost_of_passes(model, each_row, batch, network.STEP)
    if plan.row_clip:  # a gradient for each row, in float64
        entries = sum(parameter.numel() for parameter in modules.trainable(model).values())
        each = 2 * each + ROW_ENTRIES * batch * entries
    return network.times(seconds / models, each, LEAST_STEPS, plan.steps)


@torch.no_grad()
def confidence(model: nn.Module, at: Tensors, x: Array, y: Array, loss: str, *, program: bool) -> Array:
    """Return a model's confidence in each row's label, approximately Gaussian over models.

    Args:
        at: The model's parameters.
        program: Whether the model is an exported program, which has no eval mode.

    Returns:
        float64[rows]: log(p / (1 - p)) of cross-entropy, with p of the label. For mse -log of the row's loss, much the
            same where a row is fitted well.

    Source:
        Carlini et al., S&P 2022, Eq. 3.
    """
    modules.load(model, at)
    if not program:
        model.eval()
    outputs: Any = torch.cat([model(chunk) for chunk in modules.chunks(torch.tensor(x))]).double()
    if not program:
        model.train()
    labels = torch.tensor(y)
    if loss == "mse":
        return np.asarray(-(((outputs - labels).square().sum(dim=1) / 2 + SURE).log()))
    soft = labels.double() if labels.is_floating_point() else nn.functional.one_hot(labels, outputs.shape[1]).double()
    right = (outputs.softmax(dim=1) * soft).sum(dim=1).clamp(SURE, 1 - SURE)
    return np.asarray((right / (1 - right)).log())


SURE = 1e-12  # the smallest difference of a loss or a probability
