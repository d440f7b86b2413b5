"""Targets and outputs without torch, equal at every client: encoded targets, each row's loss, classes.

Losses are in float64. Those of perturbed models differ in their last digits, so nothing is rounded on the way.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from moretta.contract.messages import Array
from moretta.errors import ParameterError, RowsError


def encode(y: NDArray[np.generic], outputs: int, loss: str, silo: str, dtype: DTypeLike) -> Array:
    """Return a silo's targets encoded for the loss.

    Args:
        y: Whole numbers are classes: one-hot under "mse" with several outputs, 0/1 with one output, int64[rows] under
            "cross-entropy". Floats are targets [rows] or [rows, outputs], one-hot or probability rows under
            "cross-entropy". Masks, [rows, positions, 2] (`moretta.data.rows.as_positions`), become [rows, positions,
            classes]: a position's weight at its class, 0 at others.

    Raises:
        RowsError: Targets do not fit the loss or the outputs.
        ParameterError: The model has one output for classes under "cross-entropy".
    """
    fits = _classes if y.dtype.kind in "iub" else _positions if y.ndim == 3 else _floats
    return fits(y, outputs, loss, silo, dtype)


def _classes(y: NDArray[np.generic], outputs: int, loss: str, silo: str, dtype: DTypeLike) -> Array:
    classes = y.astype(np.int64)
    if classes.ndim != 1:
        raise RowsError(f"silo `{silo}`: expected one class a row, got targets of shape {list(y.shape)}")
    low, high, most = int(classes.min()), int(classes.max()), max(outputs, 2)
    if low < 0 or high >= most:
        raise RowsError(
            f"silo `{silo}`: expected classes 0 to {most - 1} for a model with {outputs} outputs, got {low} to {high}"
            + ('; if they are numbers, set task = "regression"' if outputs == 1 else "")
        )
    if loss == "cross-entropy":
        if outputs < 2:
            raise ParameterError('loss = "cross-entropy" needs an output a class; the model has one: use loss = "mse"')
        return classes
    if outputs == 1:
        return classes[:, None].astype(dtype)
    hot = np.zeros((len(classes), outputs), dtype)
    hot[np.arange(len(classes)), classes] = 1
    return hot


def _positions(y: NDArray[np.generic], outputs: int, loss: str, silo: str, dtype: DTypeLike) -> Array:
    positions, classes = y.shape[1], y[..., 0].astype(np.int64)
    each, rest = divmod(outputs, positions)
    if rest or each < 2:
        raise RowsError(
            f"silo `{silo}`: masks have {positions} positions, and the model has {outputs} outputs a row; expected "
            "two or more at each position, one a class"
        )
    if (high := int(classes.max())) >= each:
        raise RowsError(
            f"silo `{silo}`: masks have class {high}; expected 0 to {each - 1}, as the model has {each} outputs at "
            "each position; set -1 where a position does not count"
        )
    hot = np.zeros((*classes.shape, each), dtype)
    np.put_along_axis(hot, classes[..., None], y[..., 1:].astype(dtype), axis=2)
    return hot


def _floats(y: NDArray[np.generic], outputs: int, loss: str, silo: str, dtype: DTypeLike) -> Array:
    values = y.astype(np.float64).reshape(len(y), -1)
    if not np.isfinite(values).all():
        raise RowsError(f"silo `{silo}`: expected finite targets, got NaN or infinity")
    if loss == "cross-entropy" and y.ndim == 1:
        raise RowsError(
            f'silo `{silo}`: loss = "cross-entropy" needs classes as whole numbers from 0, or probability rows; got '
            'one float a row: pass y.astype(int) if they are classes, or set loss = "mse" if they are numbers'
        )
    if values.shape[1] != outputs:
        raise RowsError(f"silo `{silo}`: expected {outputs} targets a row, the model's outputs, got {values.shape[1]}")
    if loss == "cross-entropy" and not ((values >= 0).all() and (np.abs(values.sum(axis=1) - 1) < 1e-6).all()):
        raise RowsError(
            f'silo `{silo}`: loss = "cross-entropy" needs classes or probability rows, got other numbers: use "mse"'
        )
    with np.errstate(over="ignore"):  # an infinite loss is reported later
        return values.astype(dtype)


BINS = 10  # of a reliability table
CONFUSION_UP_TO = 50  # classes; a larger matrix is unreadable, and only figures of single classes are shown


def predicted(outputs: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return each row's class, from outputs [rows, outputs]: the highest output, or 1 for one output above a half."""
    return (outputs[:, 0] > 0.5).astype(np.int64) if outputs.shape[1] == 1 else outputs.argmax(axis=1)


def classes_of(y: NDArray[np.generic]) -> NDArray[np.int64]:
    """Return each row's true class, int64[rows].

    Args:
        y: Whole numbers, [rows]; or soft labels [rows, classes], whose likeliest counts; or the probability of class 1,
            [rows] or [rows, 1].
    """
    if y.size == len(y):
        flat = y.reshape(len(y))
        return np.asarray(flat.astype(np.float64) > 0.5, np.int64) if flat.dtype.kind == "f" else flat.astype(np.int64)
    return np.asarray(np.argmax(y, axis=1))


def figures_at_positions(outputs: Array, targets: Array) -> dict[str, float]:
    """Return the figures of `overlaps` of predicted masks, over all positions that count.

    Args:
        outputs: [rows, positions * classes].
        targets: [rows, positions, classes], as of `encode`.
    """
    figures = overlaps(counts_at_positions(outputs, targets).sum(axis=0))
    return {name: float(value) for name, value in figures.items() if not np.isnan(value)}


def counts_at_positions(outputs: Array, targets: Array) -> NDArray[np.int64]:
    """Return each row's confusion matrix over its positions that count, int64[rows, classes, classes]."""
    rows, _, count = targets.shape
    cells = np.arange(rows)[:, None] * count + targets.argmax(axis=2)
    cells = cells * count + outputs.reshape(targets.shape).argmax(axis=2)
    counts = np.bincount(cells[targets.sum(axis=2) > 0], minlength=rows * count**2)
    return counts.reshape(rows, count, count)


def overlaps(counts: Array) -> dict[str, NDArray[np.float64]]:
    """Return the overlaps of predicted and true classes, from confusion matrices [..., classes, classes].

    Returns:
        `position_accuracy`, and for each class N `dice_N`, 2 |A n B| / (|A| + |B|), and `iou_N`, |A n B| / |A u B|.
        NaN if a class is neither present nor predicted.
    """
    hits = np.diagonal(counts, axis1=-2, axis2=-1).astype(np.float64)
    sizes = counts.sum(axis=-1) + counts.sum(axis=-2)
    with np.errstate(invalid="ignore"):
        figures = {"position_accuracy": hits.sum(axis=-1) / counts.sum(axis=(-2, -1))}
        for number in range(counts.shape[-1]):
            figures[f"dice_{number}"] = 2 * hits[..., number] / sizes[..., number]
            figures[f"iou_{number}"] = hits[..., number] / (sizes - hits)[..., number]
    return figures


def probabilities(outputs: NDArray[np.floating], loss: str) -> NDArray[np.float64]:
    """Return each class's probability by a classifier's outputs, float64[rows, classes], with sum 1 in each row.

    Under cross-entropy it is the softmax. Under the squared error an output estimates its class's probability, but may
    leave [0, 1]: it is clipped to that, and rows of several are divided by their sum.
    """
    wide = outputs.astype(np.float64)
    if loss == "cross-entropy":
        shifted = np.exp(wide - wide.max(axis=1, keepdims=True))
        return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))
    cut = np.clip(wide, 0.0, 1.0)
    if cut.shape[1] == 1:
        return np.concatenate([1.0 - cut, cut], axis=1)
    total = cut.sum(axis=1, keepdims=True)
    return np.where(total > 0, cut / np.where(total > 0, total, 1.0), 1.0 / cut.shape[1])


def estimates_of(outputs: NDArray[np.floating], loss: str) -> NDArray[np.floating]:
    """Return the estimates of numeric targets or soft labels: under cross-entropy the softmax."""
    return probabilities(outputs, loss) if loss == "cross-entropy" else outputs


def confusion(chosen: NDArray[np.int64], classes: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return a confusion matrix, int64[count, count]: true classes by predicted classes."""
    return np.bincount(classes * count + chosen, minlength=count**2).reshape(count, count)


def reliability(
    chances: NDArray[np.float64], right: NDArray[np.bool_], *, digits: int | None = None
) -> NDArray[np.float64]:
    """Return a reliability table, float64[3, bins]: a bin's rows, the sum of their probabilities, its correct rows.

    The 10 equal bins are of the predicted class's probability, which is the highest.

    Args:
        chances: [rows, classes].
        right: Whether each row is predicted correctly. Chances do not show it: under the squared error several classes
            may be clipped to one probability.
        digits: Decimals to which that probability is rounded; None leaves it.
    """
    sure = chances.max(axis=1)
    sure = sure if digits is None else np.round(sure, digits)
    bins = np.minimum((sure * BINS).astype(np.int64), BINS - 1)
    return np.stack([np.bincount(bins, of, BINS) for of in (np.ones(len(sure)), sure, right)])


@dataclass(frozen=True)
class RowLosses:
    """`moretta.protocols.common.losses.Loss` row by row, with the same name, smoothing and class_weights.

    The mean loss of a batch is the sum of these over the sum of `weights`.

    Args:
        own: Replaces all this, a function of one model's outputs, [rows, outputs], and targets
            (`moretta.protocols.common.own_loss.of_arrays`).
    """

    name: str
    smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    own: Callable[[Array, Array], Array] | None = None

    def __call__(self, outputs: Array, targets: Array) -> NDArray[np.float64]:
        """Return the rows' losses, class weights included, float64[m, rows].

        outputs: [m, rows, outputs]. targets: [rows, outputs], or int64[rows] for cross-entropy, or [rows, positions,
        classes] for masks, as in `moretta.protocols.common.losses.Loss`.
        """
        if self.own is not None:
            return np.stack([self.own(output, targets) for output in outputs]).astype(np.float64)
        if targets.ndim == 3:
            return self._at_positions(outputs.reshape(len(outputs), *targets.shape).astype(np.float64), targets)
        if self.name == "mse":
            return np.asarray(np.square(outputs.astype(np.float64) - targets).sum(axis=2) / 2)
        logits = np.moveaxis(outputs, 2, 0).astype(np.float64, order="C")  # reductions over a short last axis are slow
        logits -= logits.max(axis=0)
        totals = np.log(np.exp(logits).sum(axis=0))
        if targets.ndim == 1 and not self.smoothing:
            picked = logits[targets, :, np.arange(len(targets))].T
            return np.asarray((totals - picked) * self.weights(targets))
        count = len(logits)
        soft = np.eye(count)[targets] if targets.ndim == 1 else targets.astype(np.float64)
        soft = soft * (1.0 - self.smoothing) + self.smoothing / count
        if self.class_weights:
            soft = soft * np.asarray(self.class_weights)
        return np.asarray(np.einsum("omb,bo->mb", totals - logits, soft))

    def _at_positions(self, outputs: Array, targets: Array) -> NDArray[np.float64]:
        weights = targets.sum(axis=2, dtype=np.float64, keepdims=True)
        if self.name == "mse":
            gaps = outputs - targets / np.where(weights > 0, weights, 1.0)
            return np.asarray((weights[..., 0] * np.square(gaps).sum(axis=3)).sum(axis=2) / 2)
        soft = targets * (1.0 - self.smoothing) + weights * (self.smoothing / targets.shape[2])
        soft = soft * np.asarray(self.class_weights) if self.class_weights else soft
        outputs = outputs - outputs.max(axis=3, keepdims=True)
        totals = np.log(np.exp(outputs).sum(axis=3, keepdims=True))
        return np.asarray((soft * (totals - outputs)).sum(axis=3).mean(axis=2))

    def weights(self, targets: Array) -> NDArray[np.float64]:
        """Return each row's weight in the mean, float64[rows]: 1, or for whole-number targets the class's weight."""
        if not self.class_weights or targets.dtype.kind == "f":
            return np.ones(len(targets))
        return np.asarray(self.class_weights)[targets]
