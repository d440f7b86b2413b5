"""A `Forward` that runs an ONNX graph of `moretta.protocols.baffle.onnx_export`, with ONNX Runtime on the processor.

What is checked, and what is not. A graph's trained inputs must have the names, shapes and dtype of the layout in its
metadata, and a silo refuses a round whose parameters do not have that layout. But the layout's digest of what is fixed
is the graph's own claim, since ONNX Runtime shows no constants. The operations and their order are the server's word
alone, as for whoever is sent a model to run. So a graph can make a silo's losses say other things about its rows than
the model's would. It cannot read files, run foreign code or take more memory than the silo was given:
`moretta.protocols.baffle.edge.strict` and `moretta.engines.memory.cap`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.errors import MissingExtra, ParameterError
from moretta.protocols.baffle.edge import metadata, strict

try:
    import onnxruntime as ort
except ImportError:
    raise MissingExtra("the edge client needs ONNX Runtime; run: pip install 'moretta[edge]'") from None

DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
}


class OnnxForward:
    """One graph, of which only the trained weights change; they are read in place, never copied.

    layout: of the flat array of weights. precision: that of the export. row_shape: of one row of inputs.
    micro_batch: how many rows run at once, None for all; it may be changed between calls. A few rows take less memory,
    and less time where their activations stay in the processor's cache.
    """

    def __init__(self, graph: bytes, micro_batch: int | None = 4) -> None:
        """Load a graph.

        Raises ParameterError, in one sentence, for bytes that are no ONNX file or not one of ours, or a model that ONNX
        Runtime has no kernel for (a convolution in float64, for one) or no memory.
        """
        strict.check(graph)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 4  # what is wrong is raised
        try:
            self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001  # each has its own class, with Exception as the only common root
            raise _cannot_run(error) from None
        self.layout, self.precision = metadata.read(self._session.get_modelmeta().custom_metadata_map)
        inputs = {put.name: put for put in self._session.get_inputs()}
        rows, outputs = inputs.pop("x", None), self._session.get_outputs()
        shapes = {name: tuple(put.shape) for name, put in inputs.items()}
        if rows is None or shapes != self.layout.shapes or [put.name for put in outputs] != ["outputs"]:
            raise ParameterError("this ONNX file's inputs and outputs are not those its metadata tells of")
        self.row_shape = tuple(rows.shape[1:])
        self._x_dtype = np.dtype(DTYPES[rows.type])
        self._output_shape = tuple(outputs[0].shape[1:])
        self._binding = self._session.io_binding()
        self._bound: int | None = None  # the address that the weights are bound to
        self.micro_batch = micro_batch

    def at_once(self, rows: int) -> int:
        """Return 1: vectors of weights run one after the other, however many rows there are."""
        return 1

    def outputs(self, parameters: NDArray[np.floating], x: Array) -> Array:
        """Return the outputs of the model at each of m parameter vectors, float[m, rows, outputs] of `layout.dtype`.

        parameters and x: as `Forward` says; x is converted to the graph's dtype and need not be contiguous.
        Raises ParameterError for arrays of another shape or dtype than the graph has, and where an operation fails: one
        that the graph has wrong, or that asks for more memory than there is.
        """
        if x.shape[1:] != self.row_shape:
            raise ParameterError(f"this model takes rows of shape {self.row_shape}, not {x.shape[1:]}")
        if (x.dtype.kind == "f") != (self._x_dtype.kind == "f"):
            raise ParameterError(f"this model takes rows of {self._x_dtype}, not {x.dtype}")
        x = np.ascontiguousarray(x, self._x_dtype)
        out = np.empty((len(parameters), len(x), *self._output_shape), self.layout.dtype)
        step = self.micro_batch or max(1, len(x))
        for flat, found in zip(parameters, out, strict=True):
            self._bind(flat)
            for start in range(0, len(x), step):
                self._run(x[start : start + step], found[start : start + step])
        return out

    def _bind(self, flat: NDArray[np.floating]) -> None:
        """Let each trained input be its part of a flat array, [size]."""
        layout = self.layout
        if flat.shape != (layout.size,) or flat.dtype != layout.dtype or not flat.flags.c_contiguous:
            raise ParameterError(
                f"expected weights as one contiguous {layout.dtype}[{layout.size}], got {flat.dtype}{list(flat.shape)}"
            )
        address = flat.ctypes.data
        if address == self._bound:
            return  # the bindings are addresses: whatever array lies there now is read
        at, item = address, flat.itemsize
        for name, shape in layout.shapes.items():
            self._binding.bind_input(name, "cpu", 0, flat.dtype.type, shape, at)
            at += math.prod(shape) * item
        self._bound = address

    def _run(self, x: Array, out: Array) -> None:
        self._binding.bind_input("x", "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
        self._binding.bind_output("outputs", "cpu", 0, out.dtype.type, out.shape, out.ctypes.data)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # noqa: BLE001  # as above
            raise _cannot_run(error) from None


def _cannot_run(error: Exception) -> ParameterError:
    said = str(error) or type(error).__name__
    if "bad_alloc" in said or "bad allocation" in said or "Failed to allocate memory" in said:
        return ParameterError(
            "ONNX Runtime cannot run this model: it asks for more memory than this process may take; give a larger "
            "memory-limit-mib, or a smaller model or micro-batch"
        )
    return ParameterError(f"ONNX Runtime cannot run this model: {said.splitlines()[0]:.300}")
