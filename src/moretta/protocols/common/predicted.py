"""What a classifier's outputs say: which class, how sure, and how sure it may be; without torch, at any client."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BINS = 10  # of a reliability table
CONFUSION_UP_TO = 50  # classes; with more, a matrix is no reading, and classes have their own figures only


def predicted(outputs: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return each row's class, of outputs [rows, outputs]: the highest output's, or of one output 1 above a half."""
    return (outputs[:, 0] > 0.5).astype(np.int64) if outputs.shape[1] == 1 else outputs.argmax(axis=1)


def classes_of(y: NDArray[np.generic]) -> NDArray[np.int64]:
    """Return each row's true class, of whole numbers [rows] or, of soft labels, the likeliest.

    Soft labels are [rows, classes], or [rows] or [rows, 1] with the probability of class 1.
    """
    if y.size == len(y):
        flat = y.reshape(len(y))
        return np.asarray(flat.astype(np.float64) > 0.5, np.int64) if flat.dtype.kind == "f" else flat.astype(np.int64)
    return np.asarray(np.argmax(y, axis=1))


def probabilities(outputs: NDArray[np.floating], loss: str) -> NDArray[np.float64]:
    """Return what outputs of a classifier say of each class, float64[rows, classes], each row with the sum 1.

    Under cross-entropy the softmax. Under the squared error an output estimates its class's probability, but may leave
    [0, 1]: it is cut to that, and rows of several are divided by their sum.
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


def confusion(chosen: NDArray[np.int64], classes: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return a confusion matrix, int64[count, count]: rows of a true class by the class that is predicted."""
    return np.bincount(classes * count + chosen, minlength=count**2).reshape(count, count)


def reliability(
    chances: NDArray[np.float64], classes: NDArray[np.int64], *, digits: int | None = None
) -> NDArray[np.float64]:
    """Return a reliability table, float64[3, bins]: a bin's rows, the sum of their probabilities, how many are right.

    Rows are put into ten equal bins by the probability of the class that is likeliest. chances: [rows, classes].
    digits: to how many behind the point that probability is rounded; None leaves it.
    """
    sure, right = chances.max(axis=1), chances.argmax(axis=1) == classes
    sure = sure if digits is None else np.round(sure, digits)
    bins = np.minimum((sure * BINS).astype(np.int64), BINS - 1)
    return np.stack([np.bincount(bins, of, BINS) for of in (np.ones(len(bins)), sure, right)])
