"""Take a finished run's model elsewhere: its state_dict as safetensors, or the whole of it as ONNX."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta import finished
from moretta.engines.files import write_atomically
from moretta.errors import MissingExtra, ParameterError
from moretta.run_folder import read_model


class Standardised(nn.Module):
    """A model that takes inputs as the data has them, and standardises them itself."""

    def __init__(self, model: nn.Module, mean: NDArray[np.float64], deviation: NDArray[np.float64]) -> None:
        super().__init__()
        self.model = model
        dtype = next(model.parameters()).dtype
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.tensor(mean, dtype=dtype))
        self.register_buffer("deviation", torch.tensor(deviation, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, [rows, outputs]."""
        outputs: Tensor = self.model((x - self.mean) / self.deviation if x.is_floating_point() else x)
        return outputs


def export(folder: Path, out: Path, *, true_model: bool = False, silo: str | None = None) -> None:
    """Write the released model of a run, or the true one, as a .safetensors state_dict or an .onnx graph.

    The graph's input is `x`, rows as the data has them, standardisation included, any number of rows; its output is
    `outputs`. Raises `moretta.errors.ParameterError` for another file name or a model that ONNX cannot express.
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
    write_atomically(out, _onnx(finished.load(folder, true_model=true_model, silo=silo)))


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
                Standardised(model.module, model.mean, model.deviation),
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
