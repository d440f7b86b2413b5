"""A `Forward` that runs an ONNX graph of `moretta.protocols.baffle.onnx_export`, with ONNX Runtime on the processor.

A graph's trained inputs must have the names, shapes and dtype of the layout in its metadata, and a silo refuses a round
whose parameters have another layout. But the layout's digest of fixed tensors is the graph's own claim, because ONNX
Runtime shows no constants. The silo trusts the server for operations and their order, as for any model. So a graph can
make a silo's losses reveal other things about its rows than the model's would. It cannot read files, run foreign code
or exceed the silo's memory limit: `moretta.protocols.baffle.edge.strict` and `moretta.engines.usage.cap`.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.engines.usage import give_back_code
from moretta.errors import MissingExtra, ParameterError, RowsError
from moretta.protocols.baffle.edge import metadata, strict
from moretta.protocols.baffle.edge.blocked_convolutions import LEFT_OUT, InBlocks, in_blocks, same

try:
    import onnxruntime as ort
except ImportError:
    raise MissingExtra("the edge client needs ONNX Runtime; run: pip install 'moretta[edge]'") from None

log = logging.getLogger("moretta")

DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
}


class OnnxForward:
    """One graph, of which only the trained weights change; they are read in place, never copied.

    Those of convolutions are copied if that is faster: `moretta.protocols.baffle.edge.blocked_convolutions`.

    Attributes:
        layout: Of the flat array of weights.
        precision: Of the export.
        row_shape: Of one row of inputs.
        micro_batch: Rows that run at once, None for all, changeable between calls. A few rows take less memory, and
            less time if their activations stay in the processor's cache.
    """

    def __init__(self, graph: bytes, micro_batch: int | None = 4) -> None:
        """Load a graph.

        Raises:
            ParameterError: The bytes are no ONNX file or not one of ours, or ONNX Runtime has no kernel for the model
                (such as a convolution in float64) or no memory.
        """
        graph = strict.admitted(graph)
        session = session_of(graph)
        self.layout, self.precision = metadata.read(session.get_modelmeta().custom_metadata_map)
        inputs = {put.name: put for put in session.get_inputs()}
        rows, outputs = inputs.pop("x", None), session.get_outputs()
        shapes = {name: tuple(put.shape) for name, put in inputs.items()}
        if rows is None or shapes != self.layout.shapes or [put.name for put in outputs] != ["outputs"]:
            raise ParameterError(
                "this ONNX file's inputs and outputs differ from those of its metadata; expected the same"
            )
        self.row_shape, self._x_dtype = row_of(rows)
        self._output_shape, _ = row_of(outputs[0])
        self._use(InBlocks(session, set(), [], {}))
        self.micro_batch = micro_batch
        self._speed_up(graph)

    def _speed_up(self, graph: bytes) -> None:
        """Use the session with convolutions' weights in blocks, if one exists with the same results."""
        if self._x_dtype != "float32":
            return
        plain = self._blocks
        try:
            session = in_blocks(graph, self.layout, session_of, ort.OrtValue.ortvalue_from_numpy)
            if session is None:
                return
            # Any weights and rows that differ from each other; two of them, to test that refilled arrays count.
            tried = np.sin(np.arange(2 * self.layout.size, dtype=np.float32)).reshape(2, -1) / 8
            x = np.cos(np.arange(math.prod(self.row_shape), dtype=np.float32)).reshape(1, *self.row_shape)
            expected = self.outputs(tried, x)
            self._use(session)
            as_wanted = same(self.outputs(tried, x), expected)
        except Exception as error:  # noqa: BLE001  # of a runtime without such kernels
            log.info("convolutions' weights are not kept in blocks: %s", type(error).__name__)
            self._use(plain)
            return
        if not as_wanted:
            log.info("convolutions' weights are not kept in blocks, which would change the outputs here")
            self._use(plain)

    def _use(self, blocks: InBlocks) -> None:
        self._blocks, self._binding = blocks, blocks.session.io_binding()
        self._bound: int | None = None  # the address of the bound weights

    def at_once(self, rows: int) -> int:
        """Return 1: vectors of weights run one after the other, for any number of rows."""
        return 1

    def outputs(self, parameters: NDArray[np.floating], x: Array) -> Array:
        """Return the outputs of the model at each of m parameter vectors, float[m, rows, outputs] of `layout.dtype`.

        Args:
            parameters: As of `Forward`.
            x: As of `Forward`, but of any dtype that converts to the graph's, and not always contiguous.

        Raises:
            ParameterError: An array has another shape or dtype than the graph's; an operation fails or requests too
                much memory.
        """
        if x.shape[1:] != self.row_shape:
            raise RowsError(f"this model takes rows of shape {self.row_shape}, not {x.shape[1:]}")
        if (x.dtype.kind == "f") != (self._x_dtype.kind == "f"):
            raise RowsError(f"this model takes rows of {self._x_dtype}, not {x.dtype}")
        x = np.ascontiguousarray(x, self._x_dtype)
        out = np.empty((len(parameters), len(x), *self._output_shape), self.layout.dtype)
        step = self.micro_batch or max(1, len(x))
        for flat, results in zip(parameters, out, strict=True):
            self._bind(flat)
            for start in range(0, len(x), step):
                self._run(x[start : start + step], results[start : start + step])
        return out

    def _bind(self, flat: NDArray[np.floating]) -> None:
        """Bind each trained input to its part of a flat array, [size]."""
        layout = self.layout
        if flat.shape != (layout.size,) or flat.dtype != layout.dtype or not flat.flags.c_contiguous:
            raise ParameterError(
                f"expected weights as one contiguous {layout.dtype}[{layout.size}], got {flat.dtype}{list(flat.shape)}"
            )
        for place in self._blocks.places:
            place.fill(flat)
        address = flat.ctypes.data
        if address == self._bound:
            return  # the bindings are addresses: the array at the address is read
        at, item = address, flat.itemsize
        for name, shape in layout.shapes.items():
            if name not in self._blocks.filled:
                self._binding.bind_input(name, "cpu", 0, flat.dtype.type, shape, at)
            at += math.prod(shape) * item
        self._bound = address

    def _run(self, x: Array, out: Array) -> None:
        self._binding.bind_input("x", "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
        self._binding.bind_output("outputs", "cpu", 0, out.dtype.type, out.shape, out.ctypes.data)
        try:
            self._blocks.session.run_with_iobinding(self._binding)
        except Exception as error:  # noqa: BLE001  # as above
            raise RowsError(str(cannot_run(error))) from None  # such as a token id beyond the vocabulary


def row_of(put: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of a row of a graph's input or output. Raises ParameterError for unsupported ones."""
    shape = tuple(put.shape[1:])
    if put.type not in DTYPES or not all(type(size) is int for size in shape):
        raise ParameterError(
            f"this ONNX file's `{put.name:.80}` is {put.type:.40} of {list(shape)!s:.80}; expected a shape in numbers "
            f"and one of {', '.join(DTYPES)}"
        )
    return shape, np.dtype(DTYPES[put.type])


def session_of(graph: bytes | str, *, saved: str = "", arrays: Mapping[str, Any] | None = None) -> Any:
    """Return a session of a graph, or of the file at a path.

    Args:
        saved: A path for the optimised graph, without `LEFT_OUT`.
        arrays: Constants, by name, for a graph used unchanged.

    Raises:
        ParameterError: ONNX Runtime cannot load the graph.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 4  # errors are raised
    options.enable_mem_pattern = False  # it holds a second copy of all activations, and is no faster
    options.optimized_model_filepath = saved
    if arrays is not None:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")  # it would copy the arrays
        for name, array in arrays.items():
            options.add_initializer(name, array)
    left_out = LEFT_OUT if saved else None
    try:
        options_of_session = {
            "providers": ["CPUExecutionProvider"],
            "disabled_optimizers": left_out,
            "enable_fallback": 0,
        }
        session = ort.InferenceSession(graph, options, **options_of_session)  # a fallback would print the failure
        puts = (*session.get_inputs(), *session.get_outputs())
        _ = session.get_modelmeta().custom_metadata_map, [(put.name, put.shape) for put in puts]  # raises unless UTF-8
        return session
    except Exception as error:  # noqa: BLE001  # each has its own class, with Exception as the only common root
        raise cannot_run(error) from None
    finally:
        give_back_code()


def cannot_run(error: Exception) -> ParameterError:
    """Return ONNX Runtime's error in one sentence."""
    reason = str(error) or type(error).__name__
    if "bad_alloc" in reason or "bad allocation" in reason or "Failed to allocate memory" in reason:
        return ParameterError(
            "ONNX Runtime cannot run this model: it asks for more memory than this process may take; set a larger "
            "memory-limit-mib, or a smaller model or micro-batch"
        )
    return ParameterError(f"ONNX Runtime cannot run this model: {reason.splitlines()[0]:.300}")
