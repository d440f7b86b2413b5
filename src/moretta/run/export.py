"""Export what a run came to: the model as safetensors or ONNX, the history to TensorBoard."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moretta.data.tables.preparation import Preparation
from moretta.engines.files import write_atomically
from moretta.engines.run_folder import read_model
from moretta.errors import MissingExtra, ParameterError
from moretta.run import finished


class Prepared(nn.Module):
    """A model that takes inputs as the data has them, NaN where a value is absent, and prepares them itself."""

    def __init__(self, model: nn.Module, preparation: Preparation) -> None:
        super().__init__()
        self.model = model
        dtype = next(model.parameters()).dtype
        self.fill: Tensor
        self.mean: Tensor
        self.deviation: Tensor
        for name in ("fill", "mean", "deviation"):
            self.register_buffer(name, torch.tensor(getattr(preparation, name), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, [rows, outputs]."""
        if x.is_floating_point():
            x = (torch.where(torch.isnan(x), self.fill, x) - self.mean) / self.deviation
        outputs: Tensor = self.model(x)
        return outputs


def export(
    folder: Path, out: Path, *, true_model: bool = False, silo: str | None = None, allow_code: bool = False
) -> None:
    """Write the released model of a run, or the true one, as a .safetensors state_dict or an .onnx graph.

    The graph's input is `x`, rows as the data has them, standardisation included, any number of rows; its output is
    `outputs`. allow_code: as of `moretta.run.finished.load`; a state_dict needs no code. Raises
    `moretta.errors.ParameterError` for another file name or a model that ONNX cannot express.
    """
    if out.suffix not in (".safetensors", ".onnx"):
        raise ParameterError(f"{out}: expected a file that ends in .safetensors or .onnx")
    if not out.parent.is_dir():
        raise ParameterError(f"{out}: expected a file in a folder that is there; make {out.parent}")
    if out.suffix == ".safetensors":
        found = finished.model_file(folder, true_model=true_model, silo=silo)
        read_model(found)  # says what is wrong, if anything is
        write_atomically(out, found.read_bytes())
        return
    write_atomically(out, _onnx(finished.load(folder, true_model=true_model, silo=silo, allow_code=allow_code)))


def export_history(folder: Path, out: Path) -> int:
    """Write the history of a run, finished or not, as TensorBoard's events into a new folder; return its rounds.

    Each figure of a round is a scalar by its name, seconds and bytes by phase and kind, who was missing as a count.
    Raises `moretta.errors.ParameterError` for a folder without a history, or an `out` that exists.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtra("TensorBoard's events need tensorboard; run: pip install 'moretta[tensorboard]'") from None
    history = folder / "history.jsonl"
    if not history.is_file():
        raise ParameterError(f"{folder}: expected a run folder with its history.jsonl")
    if out.exists():
        raise ParameterError(f"{out} exists already; TensorBoard would show both together, so name another folder")
    lines = [json.loads(text) for text in history.read_text().splitlines()]
    with SummaryWriter(str(out)) as writer:
        for line in lines:
            for name, value in _scalars(line):
                writer.add_scalar(name, value, line["round"])
    return len(lines)


def _scalars(line: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{within}{key}/")
        elif isinstance(value, list):
            yield f"{within}{key}", float(len(value))
        elif isinstance(value, int | float) and key != "round":
            yield f"{within}{key}", float(value)


def _onnx(model: finished.FinishedModel) -> bytes:
    try:
        import onnx  # noqa: F401  # what torch.onnx needs
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtra(f"exporting to ONNX needs {error.name}; run: pip install 'moretta[onnx]'") from None
    rows = torch.zeros(2, *model.shape, dtype=model.dtype)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is not there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own deprecations
        try:
            program = torch.onnx.export(
                Prepared(model.module, model.preparation),
                (rows,),
                input_names=["x"],
                output_names=["outputs"],
                dynamic_shapes=({0: torch.export.Dim("rows")},),
                dynamo=True,
                verbose=False,
            )
        except Exception as error:
            raise ParameterError(f"this model cannot be expressed in ONNX: {str(error).splitlines()[0]}") from error
    if program is None:
        raise ParameterError("this model cannot be expressed in ONNX: torch.onnx gave no program")
    graph: bytes = program.model_proto.SerializeToString()
    return graph
