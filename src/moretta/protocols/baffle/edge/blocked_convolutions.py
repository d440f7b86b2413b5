"""Convolutions at ONNX Runtime's speed for fixed weights, with weights that change from run to run.

Its fast kernels need a convolution's weights in blocks of as many channels as the processor's registers hold. It makes
such blocks of constants when it loads a graph. So its first weights are indices, a different number for each place. The
optimised graph shows where each weight goes, for every processor and version. That graph is loaded with our arrays in
these places, which are written before each run. A graph of another form, or with other results than the original, is
not used.
"""

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.protocols.baffle.edge.strict import TEXT, fields, head, written
from moretta.protocols.baffle.silo.forward import Layout

# Field numbers of onnx.proto.
GRAPH, NODE, INITIALIZER, INPUT, VALUE_NAME = 7, 1, 5, 11, 1
READS, OPERATION = 1, 4
DIMS, DATA_TYPE, NAME, RAW_DATA = 1, 2, 8, 9
FLOAT = 1
FIRST, MOST = 1 << 23, 1 << 23  # from there on float32 has as many whole numbers
BLOCKS = (8, 16)  # channels
# Optimizations that compute with weights or join them to an operation, after which they would be other numbers.
LEFT_OUT = ("ConstantFolding", "ConvBNFusion", "ConvMulFusion", "ConvAddFusion")
EXACT = 1e-4  # relative to the largest output; rounding is far below, a misplaced weight far above


class Place(NamedTuple):
    """One convolution's weights: `array`, [k, m], is `weights[part].reshape(k, -1)` at `order`, zeros if `padded`."""

    array: NDArray[np.float32]
    part: slice
    order: NDArray[np.intp]
    padded: bool

    def fill(self, weights: NDArray[np.float32]) -> None:
        """Copy a convolution's weights from all weights, [size]."""
        rows = weights[self.part].reshape(len(self.array), -1)
        if self.padded:
            rows = np.append(rows, np.zeros((len(rows), 1), rows.dtype), axis=1)
        # "clip": in the default mode numpy would copy the output array
        np.take(rows, self.order, axis=1, out=self.array, mode="clip")


class InBlocks(NamedTuple):
    """A session, the weights that are no inputs of it, their places, and the arrays there, by name."""

    session: Any
    filled: set[str]
    places: list[Place]
    arrays: dict[str, Any]


def in_blocks(
    graph: bytes, layout: Layout, load: Callable[..., Any], value_of: Callable[[Array], Any]
) -> InBlocks | None:
    """Return a session that is faster than the graph's own, else None.

    Args:
        load: `moretta.protocols.baffle.edge.onnx_forward.session_of`.
        value_of: Makes of an array a value that ONNX Runtime reads in place; keep it as long as the session.
    """
    weights = _numbered(graph, layout)
    if not weights or layout.dtype != "float32":
        return None
    with _unnamed() as numbered, _unnamed() as saved:
        with numbered.open("wb") as file:  # one tensor at a time: memory for all would dominate
            file.writelines(_with_constants(graph, weights))
        load(str(numbered), saved=str(saved))
        made = saved.read_bytes()
    arrays, places, moved = {}, list[Place](), False
    for name, dims, values in _constants(made):
        place = _place(dims, values, layout, weights)
        if place is not None:
            arrays[name] = value_of(place.array.reshape(dims))
            places.append(place)
            moved |= name not in weights
    seen = sum(place.part.stop - place.part.start for place in places)
    if not moved or seen != sum(value.size for value in weights.values()):
        return None
    return InBlocks(load(made, arrays=arrays), set(weights), places, arrays)


@contextlib.contextmanager
def _unnamed() -> Iterator[Path]:
    """Yield the path of an empty file: on Linux in memory, because a confined process can make no other."""
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile() as named:
            yield Path(named.name)
        return
    descriptor = os.memfd_create("graph")
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _numbered(graph: bytes, layout: Layout) -> dict[str, NDArray[np.float32]]:
    """Return the trained weights and biases of convolutions, with each one's place in the flat array."""
    if layout.size >= MOST:
        return {}
    read = set[str]()
    for number, _, _, part, _ in fields(memoryview(graph)):
        for kind, _, _, node, _ in fields(part) if number == GRAPH else ():
            if kind == NODE and _texts(node, OPERATION) == ["Conv"]:
                read.update(_texts(node, READS)[1:])
    numbers = layout.split(np.arange(FIRST, FIRST + layout.size, dtype=np.float32))
    return {name: value for name, value in numbers.items() if name in read}


def _with_constants(graph: bytes, values: dict[str, NDArray[np.float32]]) -> Iterator[bytes | memoryview]:
    """Yield the parts of an ONNX file whose inputs have become constants."""
    for number, _, _, part, whole in fields(memoryview(graph)):
        if number != GRAPH:
            yield whole
            continue
        kept = [
            inner
            for kind, _, _, put, inner in fields(part)
            if kind != INPUT or _texts(put, VALUE_NAME)[0] not in values
        ]
        heads = {name: _head(name, value) for name, value in values.items()}
        length = sum(map(len, kept)) + sum(len(heads[name]) + value.nbytes for name, value in values.items())
        yield head(GRAPH, length)
        yield from kept
        for name, value in values.items():
            yield heads[name]
            yield value.tobytes()


def _head(name: str, value: NDArray[np.float32]) -> bytes:
    tensor = b"".join(written(DIMS, size) for size in value.shape) + written(DATA_TYPE, FLOAT)
    tensor += written(NAME, name.encode()) + head(RAW_DATA, value.nbytes)
    return head(INITIALIZER, len(tensor) + value.nbytes) + tensor


def _texts(message: memoryview, field: int) -> list[str]:
    return [bytes(part).decode() for number, _, _, part, _ in fields(message) if number == field]


def _constants(model: bytes) -> list[tuple[str, tuple[int, ...], NDArray[np.float32]]]:
    """Return the float32 constants of an ONNX file, flat, with their names and shapes."""
    constants = []
    for number, _, _, graph, _ in fields(memoryview(model)):
        for inner, _, _, tensor, _ in fields(graph) if number == GRAPH else ():
            if inner != INITIALIZER:
                continue
            parts = list(fields(tensor))
            raw = next((part for kind, wire, _, part, _ in parts if (kind, wire) == (RAW_DATA, TEXT)), None)
            if raw is not None and any((kind, value) == (DATA_TYPE, FLOAT) for kind, _, value, _, _ in parts):
                dims = tuple(value for kind, _, value, _, _ in parts if kind == DIMS)
                constants.append((_texts(tensor, NAME)[0], dims, np.frombuffer(raw, np.float32)))
    return constants


def _place(
    dims: tuple[int, ...], values: NDArray[np.float32], layout: Layout, weights: dict[str, NDArray[np.float32]]
) -> Place | None:
    """Return the place that the numbers fill, or None for other constants."""
    if not dims or math.prod(dims) != values.size or not (ours := values >= FIRST).any():
        return None
    if not (ours | (values == 0)).all() or not (values[ours] < FIRST + layout.size).all():
        return None
    least = values[ours].min()
    part = next((value for value in weights.values() if value.flat[0] == least), None)
    if part is None or np.count_nonzero(ours) != part.size or values[ours].max() - least != part.size - 1:
        return None
    start = int(least) - FIRST
    index = np.where(ours, values - least, part.size).astype(np.intp)
    # Blocks of output channels are alike: the order of one is that of all, which is far shorter.
    for block in BLOCKS:
        count = dims[0] // block
        rows = index.reshape(count, -1) if count and dims[0] % block == 0 else index[None]
        step = part.size // len(rows)
        if len(rows) > 1 and (rows == rows[0] + step * np.arange(len(rows))[:, None]).all():
            index = rows[0].copy()
            break
    array = np.zeros((values.size // index.size, index.size), np.float32)
    return Place(array, slice(start, start + part.size), index, not ours.all())


def same(ours: Array, theirs: Array) -> bool:
    """Whether two sessions have the same outputs."""
    return bool(np.abs(ours - theirs).max(initial=0.0) <= EXACT * np.abs(theirs).max(initial=0.0))
