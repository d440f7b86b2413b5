"""Moves one block of layers after the other with ONNX Runtime: `moretta.protocols.baffle.silo.blocks.MovesBlocks`.

It runs a few rows at a time, and several moves together only if a layer's outputs are small. So its memory is that of
one forward pass and of the values kept for later. The checks of files are those of a graph in one piece
(`moretta.protocols.baffle.edge.onnx_forward`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.errors import ParameterError
from moretta.protocols.baffle.edge import metadata, strict
from moretta.protocols.baffle.edge.onnx_forward import cannot_run, row_of, session_of
from moretta.protocols.baffle.silo.blocks import LayerBlock, Rule, Signs, stretches

Feeds = dict[str, Array]
TOGETHER = 1 << 14  # entries of a layer's outputs that run together: less than a convolution keeps


class _Part:
    def __init__(self, graph: bytes) -> None:
        self.session = session_of(strict.admitted(graph))
        self.inputs = tuple(put.name for put in self.session.get_inputs())

    def run(self, outputs: Sequence[str], values: Mapping[str, Array]) -> list[Array]:
        try:
            results: list[Array] = self.session.run(list(outputs), {name: values[name] for name in self.inputs})
        except KeyError as error:
            raise ParameterError(
                f"this cut model reads {error}, which nothing computes; have the server export it again"
            ) from None
        except Exception as error:  # noqa: BLE001  # each has its own class, with Exception as the only common root
            raise cannot_run(error) from None
        return results


class _Layer(NamedTuple):
    """A block's layer. It has what the layer reads and makes (empty names: the block's own tensors move), what its
    successors read from before it, and its files: the successors, and for a convolution the layer alone.
    """

    reads: str
    moves: str
    kept: list[str]
    after: _Part | None
    alone: _Part | None

    def fits(self, block: LayerBlock, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether the files read the moved tensors, and only existing ones."""
        moved = {self.moves} if self.moves else set(block.tensors)
        known = {*moved, *self.kept, *shapes, "x"}
        after = self.after is None or moved <= set(self.after.inputs) <= known
        return after and (self.alone is None or set(self.alone.inputs) <= {self.reads, *shapes})


class OnnxBlocks:
    """A cut model, of which only the trained weights change.

    Attributes:
        layout, precision, row_shape, micro_batch: As of `moretta.protocols.baffle.edge.onnx_forward.OnnxForward`.
        blocks: Those of a round, from the server's cut.
    """

    def __init__(self, files: bytes, rule: Rule, micro_batch: int | None = 4) -> None:
        """Load the files. Raises ParameterError for files that are no cut model, or blocks that break the rule."""
        first, *others = (_Part(file) for file in metadata.unpacked(files))
        described = first.session.get_modelmeta().custom_metadata_map
        self.layout, self.precision = metadata.read(described)
        rows = next((put for put in first.session.get_inputs() if put.name == "x"), None)
        if rows is None or not set(first.inputs) <= {"x", *self.layout.shapes}:
            raise _other_files()
        try:
            entries = metadata.described(described[metadata.BLOCKS])
            left = iter(others)
            self._layers = {
                block.name: _Layer(
                    reads,
                    moves,
                    kept,
                    next(left) if moves != "outputs" else None,  # the last layer has no successors
                    next(left) if block.kind == "channels" and moves else None,
                )
                for block, reads, moves, kept in entries
            }
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError, StopIteration):
            raise _other_files() from None
        fits = all(
            layer.fits(block, self.layout.shapes)
            for (block, *_), layer in zip(entries, self._layers.values(), strict=False)
        )
        if not fits or next(left, None) is not None or len(self._layers) != len(entries):
            raise _other_files()
        self.blocks = tuple(block for block, *_ in entries)
        rule.check(self.blocks, self.layout.shapes)
        self._whole, (self.row_shape, self._x_dtype) = first, row_of(rows)
        self.micro_batch = micro_batch
        needed = {name for layer in self._layers.values() for name in (layer.reads, layer.moves, *layer.kept)}
        self._kept_names = sorted((needed | {"outputs"}) - {"", "x"})
        self._kept: Feeds = {}

    @property
    def rows_at_once(self) -> int | None:
        """The most rows to start with."""
        return self.micro_batch

    def at_once(self, rows: int) -> int:
        """Return 1: vectors of weights run one after the other."""
        return 1

    def outputs(self, parameters: NDArray[np.floating], x: Array) -> Array:
        """Return the outputs of the model at each of m parameter vectors, as `OnnxForward.outputs`."""
        step = self.micro_batch or max(1, len(x))
        outputs = [
            np.concatenate(
                [self._whole.run(["outputs"], self._feeds(flat, x[at : at + step]))[0] for at in range(0, len(x), step)]
            )
            for flat in parameters
        ]
        return np.stack(outputs)

    def start(self, at: Array, x: Array) -> Array:
        """Run a batch forward at flat parameters and keep what moves need; return the outputs, [rows, outputs]."""
        feeds = self._feeds(at, x)
        self._kept = feeds | dict(zip(self._kept_names, self._whole.run(self._kept_names, feeds), strict=True))
        return self._kept["outputs"]

    def inputs(self, block: LayerBlock) -> Array:
        """Return a linear layer's inputs, float[rows, n]."""
        return self._kept[self._layers[block.name].reads]

    def moved(self, block: LayerBlock, signs: Signs, distance: float) -> Iterator[Array]:
        """Yield the outputs at w + distance d, some moves at a time, [moves, rows, outputs], in the scalars' order."""
        layer = self._layers[block.name]
        if not layer.moves and layer.after is not None:
            for tensors in self._moved_tensors(block, signs, distance):
                yield layer.after.run(["outputs"], self._kept | tensors)[0][None]
            return
        rows, together = len(self._kept["outputs"]), max(1, TOGETHER // self._kept[layer.moves].size)
        for moved in self._moves(block, signs, distance, 1 if layer.kept else together):
            if layer.after is None:
                outputs = moved
            else:  # a move's rows are further rows
                values = self._kept | {layer.moves: moved.reshape(-1, *moved.shape[2:])}
                (outputs,) = layer.after.run(["outputs"], values)
            yield outputs.reshape(-1, rows, outputs.shape[-1])

    def _moves(self, block: LayerBlock, signs: Signs, distance: float, together: int) -> Iterator[Array]:
        """Yield a layer's moved outputs, [moves, rows, ...], at most `together` at a time."""
        layer, shapes = self._layers[block.name], self.layout.shapes
        kept = self._kept[layer.moves]
        if layer.alone is not None:
            step, pieces = kept.dtype.type(distance), block.channels_of(kept.shape[1])
            for own in self._tensors(block, signs):
                (effect,) = layer.alone.run([layer.moves], self._kept | own)
                for some in stretches(len(pieces), together):
                    moved = np.stack([kept] * len(pieces[some]))
                    for moved_outputs, channels in zip(moved, pieces[some], strict=True):
                        moved_outputs[:, channels] += step * effect[:, channels]
                    yield moved
        elif block.kind == "units":
            for some in stretches(kept.shape[1], together):
                units = np.arange(some.start, some.stop)
                moved = np.stack([kept] * len(units))
                moved[units - some.start, :, units] += kept.dtype.type(distance)
                yield moved
        else:
            u, v = (side.astype(kept.dtype) for side in block.sides(shapes, signs))
            inputs = self._kept[layer.reads]
            count = inputs.shape[-1]
            slopes = inputs @ v[:, :count].T
            if v.shape[1] > count:
                slopes += v[:, count]
            slopes *= kept.dtype.type(distance)
            for some in stretches(len(u), together):
                sides = u[some].reshape(-1, *[1] * (kept.ndim - 1), u.shape[1])
                yield kept + np.moveaxis(slopes[..., some], -1, 0)[..., None] * sides

    def _tensors(self, block: LayerBlock, signs: Signs) -> Iterator[Feeds]:
        moved = block.by_tensor(self.layout.shapes, signs)
        for repeat in range(block.repeats):
            yield {name: each[repeat].astype(self.layout.dtype) for name, each in moved.items()}

    def _moved_tensors(self, block: LayerBlock, signs: Signs, distance: float) -> Iterator[Feeds]:
        step = np.dtype(self.layout.dtype).type(distance)
        if block.kind == "rank-one":
            u, v = (side.astype(self.layout.dtype) for side in block.sides(self.layout.shapes, signs))
            for column, other in zip(u, v, strict=True):
                product = np.outer(column, other) * step
                columns = self.layout.shapes[block.tensors[0]][1]
                sides = product[:, :columns], product[:, columns:].reshape(-1)
                yield {name: self._kept[name] + side for name, side in zip(block.tensors, sides, strict=False)}
            return
        for own in self._tensors(block, signs):
            for channels in (
                block.channels_of(len(own[block.tensors[0]])) if block.kind == "channels" else [slice(None)]
            ):
                moved = {name: self._kept[name].copy() for name in own}
                for name, tensor in moved.items():
                    tensor[channels] += own[name][channels] * step
                yield moved

    def _feeds(self, flat: NDArray[np.floating], x: Array) -> Feeds:
        layout = self.layout
        if flat.shape != (layout.size,) or flat.dtype != layout.dtype:
            raise ParameterError(
                f"expected weights as {layout.dtype}[{layout.size}], got {flat.dtype}{list(flat.shape)}"
            )
        if x.shape[1:] != self.row_shape or (x.dtype.kind == "f") != (self._x_dtype.kind == "f"):
            raise ParameterError(
                f"this model takes {self._x_dtype} rows of shape {self.row_shape}, not {x.dtype} {x.shape[1:]}"
            )
        return {**layout.split(np.ascontiguousarray(flat)), "x": np.ascontiguousarray(x, self._x_dtype)}


def _other_files() -> ParameterError:
    return ParameterError("this cut model's files do not fit each other; have the server export it again")
