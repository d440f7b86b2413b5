"""Export the result of a run: the model as safetensors or ONNX, the history to TensorBoard."""

import json
import logging
import math
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor, nn

from moretta.contract.messages import Array
from moretta.engines.files import check_ending, check_replaced, read_text, write_atomically
from moretta.engines.process import ConfinedProcess, serve
from moretta.engines.run_folder import read_inputs
from moretta.errors import MissingExtra, ParameterError
from moretta.models.hooks import Packing, Unpack
from moretta.run import trained_model
from moretta.run.foreign import ForeignGraph, model_of
from moretta.run.raw_rows import Prepared
from moretta.run.trackers import TrackedRun, figures, tensorboard
from moretta.run.trained_model import ModelChoice, TrainedModel

MODULE = "moretta.run.export"  # the process that exports another's graph
INPUTS, ONNX = "inputs", "onnx"
METADATA = "moretta.inputs"  # of an ONNX file: the meaning of inputs and outputs, as JSON


def export(folder: Path, out: Path, choice: ModelChoice = ModelChoice()) -> None:  # noqa: B008  # frozen
    """Write the released or the true model of a run, as a .safetensors state_dict or an .onnx graph.

    The graph fills in and scales. Its input is `x`, any number of rows in the data's own form, NaN for an absent value.
    For a table `x` is float32[rows, features], with a category as its place in the schema's list, which inputs.json and
    the graph's metadata have. A sample's several arrays are inputs by their names. The output is `outputs`, for masks
    [rows, *mask, classes]. It is NaN for a row with an infinite value, an invalid place of a category, or a forbidden
    absence. The state_dict's metadata holds inputs.json too, and needs no code.

    Args:
        folder: The run folder.
        out: A path that ends in .safetensors or .onnx.
        choice: The model.

    Raises:
        ParameterError: The ending is another, the existing file is not an export, or ONNX cannot express the model.
    """
    check_ending(out, ".safetensors", ".onnx")
    check_replaced(out, "an earlier export", _is_export)
    if not out.parent.is_dir():
        raise ParameterError(f"{out}: expected a file in an existing folder; make {out.parent}")
    if out.suffix.lower() == ".safetensors":
        tensors = trained_model.weights(folder, choice)
        write_atomically(out, save(dict(tensors), metadata={"inputs": json.dumps(read_inputs(folder))}))
        return
    model = trained_model.read(folder, choice)
    inputs = json.dumps(read_inputs(folder))
    if isinstance(model.network, ForeignGraph):
        _check_extras()
        request = {**model.network.request(), INPUTS: np.frombuffer(inputs.encode(), np.uint8)}
        made = ConfinedProcess(MODULE).ask(request).get(ONNX, np.empty(0, np.uint8)).tobytes()
    else:
        made = _onnx(model, inputs)
    write_atomically(out, made)


def _is_export(path: Path) -> bool:
    """Return whether `export` wrote a file, by its metadata, which a run's own models lack."""
    if path.suffix.lower() == ".onnx":
        return METADATA.encode() in path.read_bytes()
    try:
        with safe_open(path, "np") as file:
            return "inputs" in (file.metadata() or {})
    except SafetensorError:
        return False


def export_history(folder: Path, out: Path) -> int:
    """Write a run's history, finished or not, as TensorBoard's events into a new folder; return the number of rounds.

    Each figure of a round is a scalar by its name: seconds and bytes by phase and kind, and the number of missing
    silos.

    Raises:
        ParameterError: The folder has no history, the history is damaged, or `out` exists.
        MissingExtra: TensorBoard is not installed.
    """
    if find_spec("tensorboard") is None:
        raise MissingExtra("TensorBoard's events need tensorboard; run: pip install 'moretta[tensorboard]'")
    history = folder / "history.jsonl"
    if not history.is_file():
        raise ParameterError(f"{folder}: expected a run folder with its history.jsonl")
    if out.exists():
        raise ParameterError(f"{out} exists already; TensorBoard would show both together, so name another folder")
    try:
        lines = [json.loads(text) for text in read_text(folder, "history.jsonl").splitlines()]
        for line in lines:
            line["round"] = int(line["round"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ParameterError(f"{history} is damaged ({type(error).__name__}); restore it from a copy") from None
    with tensorboard(TrackedRun("", "", len(lines), 0, {}, folder), out) as write:
        for line in lines:
            write(line, dict(figures(line)))
    return len(lines)


def _check_extras() -> None:
    try:
        import onnx  # noqa: F401  # torch.onnx needs it
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtra(f"exporting to ONNX needs {error.name}; run: pip install 'moretta[onnx]'") from None


def _onnx(model: TrainedModel, inputs: str) -> bytes:
    _check_extras()
    module: nn.Module = Prepared(model.network, model.preparation, model.may_lack, model.expansion)
    shape = model.shape if model.expansion is None else (len(model.expansion.features),)
    dtype = torch.int64 if model.integers else model.dtype if model.expansion is None else torch.float32
    rows = torch.zeros(2, *shape, dtype=dtype)
    if model.mask:
        module = nn.Sequential(module, nn.Unflatten(1, (*model.mask, model.count // math.prod(model.mask))))
    dimension = {0: torch.export.Dim("rows")}
    inputs_by_name: dict[str, Tensor] = {"x": rows}
    dimensions: tuple[Any, ...] = (dimension,)
    if model.layout is not None:
        module, inputs_by_name = Packing(module), Unpack(model.layout).arrays(rows.float())
        dimensions = (tuple(dimension for _ in inputs_by_name),)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is missing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own deprecations
        try:
            program = torch.onnx.export(
                module,
                tuple(inputs_by_name.values()),
                input_names=list(inputs_by_name),
                output_names=["outputs"],
                dynamic_shapes=dimensions,
                dynamo=True,
                verbose=False,
            )
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # the first cause names the model's part
                cause = cause.__cause__
            reason = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
            raise ParameterError(f"this model cannot be expressed in ONNX: {reason:.300}") from error
    if program is None:
        raise ParameterError("this model cannot be expressed in ONNX: torch.onnx gave no program")
    proto = program.model_proto
    proto.metadata_props.add(key=METADATA, value=inputs)
    graph: bytes = proto.SerializeToString()
    return graph


def main() -> None:
    """Export a graph of another's folder in a confined process (`moretta.engines.process`)."""

    def answer(request: dict[str, Array]) -> Mapping[str, Array]:
        inputs = request[INPUTS].tobytes().decode()
        model = TrainedModel(model_of(request), json.loads(inputs))
        return {ONNX: np.frombuffer(_onnx(model, inputs), np.uint8)}

    serve(answer)


if __name__ == "__main__":
    main()
