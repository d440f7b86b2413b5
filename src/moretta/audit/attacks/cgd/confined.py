"""What attacks on CGD read of the truth: D, confined models and their gradients, and the rows of a joint grid.

With w_l(k) = w_l(1) + D(k), every member of a group holds D of the group's layers in its own state (`displacement`).
Everything else here is for a participant's own part, or for scoring.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from moretta.audit.evidence.case import PublicRun
from moretta.audit.evidence.intervals import Floats, Interval, bootstrapped, kept, recovered, relative_error
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Tensors
from moretta.contract.roles import no_phase, under
from moretta.data.holders import Grid, grid_of
from moretta.data.rows import Rows
from moretta.data.silo import in_order
from moretta.errors import ParameterError
from moretta.protocols.cgd.client import Client
from moretta.protocols.cgd.layers import Layers
from moretta.protocols.cgd.local import Local, head_pass, whole_gradient
from moretta.protocols.cgd.local import part_of_z as part_of
from moretta.protocols.cgd.messages import ROW_RING, Descend, Join
from moretta.protocols.cgd.row_order import ALIGNED_ORDER
from moretta.protocols.common.targets import classes_of


def check_whole(truth: Truth) -> None:
    """Raise `moretta.errors.ParameterError` where columns are split, so that no participant has a whole model."""
    if any(silo.columns for silo in truth.federation.silos):
        raise ParameterError("columns are split, so no participant alone holds D of all layers")


def participant(truth: Truth, name: str, number: int) -> Client:
    """Return a participant in its state before a round, valid until a call for another round."""
    return cast(Client, truth.roles(number).clients[name])


def displacement(truth: Truth, name: str, number: int) -> Tensors:
    """Return D before a round, as a participant holds it, float64 by tensor."""
    return under("displacement/", truth.states(number)[f"silo-{name}"])


def after_last(truth: Truth) -> int:
    """Return the number of the round after the last recorded one: `displacement` before it is the latest known."""
    if not truth.recorded:
        raise ParameterError("no round of training was recorded, so no D is known")
    return truth.recorded[-1] + 1


def center(truth: Truth, name: str, number: int) -> dict[str, Array]:
    """Return the public centre of the starts, with the buffers of a participant."""
    state = truth.states(number)[f"silo-{name}"]
    client = participant(truth, name, number)
    client.restore(
        {key: np.zeros_like(value) if key.startswith("displacement/") else value for key, value in state.items()}
    )
    return client.displaced()


def deviation(run: PublicRun) -> float:
    """Return the deviation of starts, the mean over participants where each has its own."""
    delta = run.setting("delta")
    return float(np.mean(list(delta.values()) if isinstance(delta, dict) else delta))


def is_readable(truth: Truth) -> bool:
    """Whether the relay of the sums reads them."""
    blind = truth.run.setting("blind")
    return not (truth.run.masked if blind is None else blind)


def rate(truth: Truth, number: int) -> float:
    """Return the public alpha_k of a round."""
    return float(truth.federation.spec.protocol.rate(number, truth.run.rounds))


def stepped(truth: Truth, name: str, number: int) -> dict[str, Array]:
    """Return sum n_l g_l / N of a round by tensor, as a participant computes it from its own D."""
    before, after = displacement(truth, name, number), displacement(truth, name, number + 1)
    return {tensor: (before[tensor] - after[tensor]) / rate(truth, number) for tensor in before}


def summed_silos(truth: Truth, name: str, number: int) -> tuple[str, ...]:
    """Return the silos in the sum that a participant received and stepped by in a round; empty if it did not step."""
    messages = truth.messages(name, number, Descend)
    return messages[-1].silos if messages else ()


def whole_sums(truth: Truth, least: int = 1) -> list[int]:
    """Return the recorded rounds whose sum is of all participants. Raises ParameterError for fewer than `least`."""
    silos = truth.run.silos
    rounds = [k for k in truth.recorded if set(summed_silos(truth, silos[0], k)) == set(silos)]
    if len(rounds) < least:
        few = f"fewer than {least} recorded rounds have a sum over all participants"
        raise ParameterError(few if least > 1 else "in no recorded round were all participants in the sum")
    return rounds


def rows_of_sum(truth: Truth, number: int) -> int:
    """Return the number of rows in a round's sum, if all participants are in it."""
    return sum(len(truth.batch(name, number)) for name in truth.run.silos)


def local(truth: Truth, name: str, number: int) -> Local:
    """Return the gradient of a round's batch at the participant's confined model, its loss and its number of rows.

    It needs a run without split columns. Dropout and augmentation draw as in the run.
    """
    weights = participant(truth, name, number).model()
    return whole_gradient(truth.network(), weights, truth.silo_rows(name), truth.loss, truth.drawn(number), no_phase)


# How good a model is


def merits(truth: Truth, weights: Tensors, rows: Rows) -> Floats:
    """Return each row's contribution to a model's score: 1 if correct, for numbers 1 - its share of R^2's loss.

    Returns:
        float64[rows], whose mean is the accuracy, or R^2: 1 - mean squared error / variance.
    """
    outputs = truth.predicted(weights, rows.x)
    if truth.run.task == "classification":
        return np.asarray(classes_of(outputs) == classes_of(rows.y), dtype=np.float64)
    true = np.asarray(rows.y, dtype=np.float64)
    scale = float(np.square(true - true.mean(axis=0)).sum(axis=1).mean())
    return np.asarray(1.0 - np.square(outputs - true).sum(axis=1) / max(scale, 1e-300))


def participants_scores(truth: Truth, number: int, rows: Rows) -> Floats:
    """Return the score of each participant's own model before a round, on rows."""
    models = [participant(truth, name, number).model() for name in truth.run.silos]
    return np.array([float(merits(truth, model, rows).mean()) for model in models])


def guessing(truth: Truth, rows: Rows) -> float:
    """Return the score of the best constant answer: the majority's share, or for numbers 0."""
    if truth.run.task != "classification":
        return 0.0
    return float(np.bincount(classes_of(rows.y)).max()) / len(rows.x)


def in_words(truth: Truth, score: float) -> str:
    """Return a score in words."""
    return f"an accuracy of {100 * score:.1f} %" if truth.run.task == "classification" else f"an R^2 of {score:.3f}"


def compared(claimed: Array, true: Array, guess: Array) -> tuple[tuple[float, float, Interval], float, float]:
    """Return score, chance and interval of 1 - error over lines drawn again, the relative error, and the guess's."""
    both = np.stack([np.square(claimed - true).sum(axis=1), np.square(true).sum(axis=1)], axis=1)  # [lines, 2]

    def error(some: Floats) -> float:
        miss, size = np.sqrt(some.sum(axis=0))
        return float(miss / size) if size else float(miss > 0)

    off, usual = error(both), relative_error(guess, true)
    interval = kept(bootstrapped(both, error, high=np.inf))
    return (float(recovered(off)), float(recovered(usual)), interval), off, usual


# A row of a joint grid


def aligned_order(truth: Truth, name: str) -> NDArray[np.int64] | None:
    """Return which of its rows a holder trained on, in which order; None where the run did not align them."""
    order: NDArray[np.int64] | None = truth.states(after_last(truth))[f"silo-{name}"].get(ALIGNED_ORDER)
    return order


@dataclass(frozen=True)
class JointRow:
    """A row of a grid in the form "joint", by its name: its holders' columns, z and Delta."""

    truth: Truth
    grid: Grid
    name: str

    @classmethod
    def first(cls, truth: Truth) -> JointRow:
        """Return the first row. Raises `moretta.errors.ParameterError` where no columns are split."""
        grid = grid_of(truth.federation.silos)
        if not grid.is_split:
            raise ParameterError("no columns are split, so no values of a first layer travel")
        return cls(truth, grid, next(iter(grid.rows)))

    @property
    def head(self) -> str:
        """The holder of the labels."""
        return self.grid.heads[self.name]

    @property
    def others(self) -> tuple[str, ...]:
        """The holders but the head."""
        return tuple(name for name in self.grid.rows[self.name] if name != self.head)

    def holders_in_other_rows(self) -> list[str]:
        """Return for each of the others' columns a participant of another row that holds them, and so their D."""
        holders = []
        for name in self.others:
            same = [part for part in self.grid.parts.values() if part.columns == self.grid.parts[name].columns]
            beside = [part.name for part in same if part.row != self.name]
            if not beside:
                raise ParameterError("the grid has one row, so only the attacked participants hold D of their columns")
            holders.append(beside[0])
        return holders

    def columns(self, name: str) -> list[int]:
        """Return the indices of a holder's columns."""
        return list(self.grid.parts[name].columns)

    @cached_property
    def rows(self) -> Rows:
        """The row's samples with all columns, and their targets."""
        silos = self.truth.federation.silos
        held = {silo.name: in_order(silo, aligned_order(self.truth, silo.name)) for silo in silos}
        head = held[self.head]
        x = np.zeros((len(head.x), *self.truth.run.shape), head.x.dtype)
        for name in self.grid.rows[self.name]:
            x[:, self.columns(name)] = held[name].x
        return self.truth.prepared(x, head.y, self.name)

    @cached_property
    def layers(self) -> Layers:
        """The architecture, cut behind its first layer."""
        return Layers.of(self.truth.network())

    def batch(self, number: int) -> NDArray[np.int64]:
        """Return the numbers of the rows of a round, which all holders know."""
        return self.truth.batches(self.name, len(self.rows.x)).of_round(*self.truth.drawn(number))

    def part_of_z(self, name: str, number: int) -> Array:
        """Return X_ij W1_ij of a round's batch, [rows, H1]."""
        x = torch.tensor(self.rows.x[self.batch(number)][:, self.columns(name)])
        return part_of(x, participant(self.truth, name, number).model()[self.layers.weight])

    def fraction_bits(self, number: int) -> int:
        """Return the fraction bits of z's sum in a round, as the head received them."""
        joins = self.truth.messages(self.head, number, Join)
        if not joins:
            raise ParameterError(f"row `{self.name}` sat out a recorded round, so there is no z of it")
        return joins[-1].fraction_bits

    def others_z(self, number: int) -> Floats:
        """Return the sum of the others' parts in a round's `Join`, as the head has it, in the ring's precision."""
        bits, total = self.fraction_bits(number), len(self.grid.rows[self.name])
        words = [ROW_RING.encode("z", self.part_of_z(name, number), 1, bits, total, total) for name in self.others]
        return np.asarray(ROW_RING.decode(np.sum(words, axis=0, dtype=np.uint64), bits), dtype=np.float64)

    def delta(self, number: int) -> Array:
        """Return Delta of a round's batch, [rows, H1], as the head seals it for the others."""
        z = torch.tensor(self.part_of_z(self.head, number).astype(np.float64) + self.others_z(number))
        targets = torch.tensor(self.rows.y[self.batch(number)])
        weights = participant(self.truth, self.head, number).model()
        with torch.random.fork_rng():  # layers with dropout draw it anew
            delta, _ = head_pass(self.layers, weights, z.to(self.truth.dtype), targets, self.truth.loss, no_phase)
        return delta.numpy()
