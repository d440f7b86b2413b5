"""A model's forward pass at parameters that lie in one flat array; no torch is needed here.

`moretta.protocols.baffle.torch_forward` runs a PyTorch module, `moretta.protocols.baffle.edge.onnx_forward` an ONNX
graph.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array, Tensors
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.directions import Directions
from moretta.secure_aggregation.keystream import digest_of, encode_parts


@dataclass(frozen=True)
class Layout:
    """The places of trained tensors in the flat array: in the order of `shapes`, each in C order, without gaps.

    Attributes:
        shapes: Of the trained tensors, by PyTorch's names.
        dtype: "float32" or "float64".
        fixed: SHA-256 of the untrained tensors' names, shapes, dtypes and values.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: str
    fixed: bytes

    @classmethod
    def of(cls, trained: Tensors, fixed: Tensors) -> Layout:
        """Return the layout of a model's trained tensors. fixed: its frozen parameters and buffers."""
        dtypes = {array.dtype.name for array in trained.values()}
        if len(dtypes) != 1 or not dtypes <= {"float32", "float64"}:
            raise ParameterError(
                f"expected trained tensors of float32 or of float64, at least one, got {sorted(dtypes)}"
            )
        return cls({name: array.shape for name, array in trained.items()}, dtypes.pop(), digest_of(fixed))

    @property
    def places(self) -> dict[str, slice]:
        """The entries of each tensor in the flat array."""
        ends = list(accumulate(math.prod(shape) for shape in self.shapes.values()))
        return {name: slice(*place) for name, place in zip(self.shapes, pairwise([0, *ends]), strict=True)}

    @property
    def size(self) -> int:
        """The number of entries in the flat array."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def digest(self) -> str:
        """SHA-256 in hex of names, shapes, dtype and fixed tensors; two exports of one model have the same."""
        parts = [part for name, shape in self.shapes.items() for part in (name, str(tuple(shape)))]
        return hashlib.sha256(encode_parts("baffle layout", self.dtype, *parts, self.fixed)).hexdigest()

    def flat(self, tensors: Tensors) -> Array:
        """Return the trained tensors as one array, [size]."""
        return np.concatenate([np.ravel(tensors[name]) for name in self.shapes]).astype(self.dtype, copy=False)

    def split(self, flat: NDArray[np.floating]) -> dict[str, Array]:
        """Return views of a flat array [size] by name, in the tensors' shapes."""
        return {name: flat[place].reshape(self.shapes[name]) for name, place in self.places.items()}


@runtime_checkable
class Perturbs(Protocol):
    """A `Forward` that perturbs parameters itself, on its model's device."""

    def perturbed(self, directions: Directions, at: Array, distance: float, rows: int) -> Iterator[Any]:
        """Yield `at` + distance d_k as `Directions.perturbed` does, in the form of `outputs`, for a batch of `rows`."""


@runtime_checkable
class Normalises(Protocol):
    """A `Forward` whose BatchNorm layers normalise by a batch's own statistics."""

    def statistics(self, at: Array, x: Array) -> dict[str, Array]:
        """Return the mean and variance of each such layer's inputs, by the names of the running ones."""


class Forward(Protocol):
    """A model that runs forward."""

    layout: Layout

    def at_once(self, rows: int) -> int:
        """Return the number of parameter vectors to run together for a batch of `rows`, at least 1."""

    def outputs(self, parameters: NDArray[np.floating], x: Array) -> Array:
        """Return the outputs of the model at each of m parameter vectors, float[m, rows, outputs].

        Rows do not affect each other: each row's outputs are the same without the others, up to rounding.

        Args:
            parameters: [m, size] of `layout`, contiguous and in its dtype; never written to, and not kept.
            x: The inputs, [rows, ...], of `layout.dtype` or whole numbers for tokens.
        """
