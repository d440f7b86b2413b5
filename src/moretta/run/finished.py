"""A finished run's model, ready to use: its architecture from the run file, its weights, what its inputs mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.data.images.pixels import ImageForm
from moretta.data.images.sets import SETS
from moretta.data.layout import SampleLayout
from moretta.data.tables import schema
from moretta.data.tables.files import Format
from moretta.data.tables.preparation import Expansion, Preparation
from moretta.data.tables.rows import expansion_of
from moretta.data.tables.schema import Schema
from moretta.engines.run_folder import read_json, read_model
from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.protocols.common import modules
from moretta.run import consent


@dataclass(frozen=True)
class FinishedModel:
    """A model in eval mode, and what its inputs and outputs mean.

    shape: of one row of inputs; columns: their names, for tables. table: what a table's columns mean, None for arrays;
    form: how its .csv files are written. fills_absent: whether a value may be absent; may_lack: bool[columns], in which
    columns, or [1] for all alike. classes: their names, if known. source: of the run's data. layout: how a row of
    several arrays is packed. image: what files of images become.
    """

    module: nn.Module
    preparation: Preparation
    shape: tuple[int, ...]
    columns: Sequence[str]
    table: Schema | None
    form: Format
    fills_absent: bool
    may_lack: NDArray[np.bool_]
    task: str
    loss: str
    classes: Sequence[str]
    dtype: torch.dtype
    source: str
    layout: SampleLayout | None = None
    image: ImageForm | None = None

    @property
    def expansion(self) -> Expansion | None:
        """How coded rows of its table become inputs; None for arrays."""
        return None if self.table is None or not self.table.features else expansion_of(self.table)


def load(
    folder: Path,
    *,
    true_model: bool = False,
    silo: str | None = None,
    model: str | None = None,
    allow_code: bool = False,
) -> FinishedModel:
    """Load the released model of a run, the server's true one, or a silo's own.

    model: of a run made from Python, what builds its architecture: a built-in name, or a "module:function" beside the
    working directory, which is then called. allow_code: import the code of the model that the folder names
    (`moretta.run.consent`). Raises `moretta.errors.ParameterError` for a folder without such a model, one of a run made
    from Python without `model`, or one that names code which is not allowed.
    """
    inputs, tensors = (
        read_json(folder / "inputs.json"),
        read_model(model_file(folder, true_model=true_model, silo=silo)),
    )
    shape, dtype = tuple(inputs["shape"]), {"float32": torch.float32, "float64": torch.float64}[inputs["dtype"]]
    run_file = _run_file(folder, model, allow_code)
    layout = SampleLayout.load(inputs["arrays"]) if "arrays" in inputs else None
    module = catalogue.build(
        model or (run_file.model.source if run_file else ""),
        inputs=shape,
        outputs=int(inputs["outputs"]),
        base=run_file.base if run_file else Path(),
        seed=run_file.run.seed if run_file else 0,
        layout=layout,
        **(run_file.model.arguments if run_file else {}),
    ).to(dtype)
    modules.load(module, tensors)
    table = schema.of(inputs["table"], f"{folder}: inputs.json") if inputs["table"] else None
    return FinishedModel(
        module=module.eval(),
        preparation=Preparation.loads(inputs),
        shape=shape,
        columns=list(inputs["columns"]),
        table=table,
        form=run_file.data.form if run_file else Format(),
        fills_absent=bool(inputs["fills_absent"]),
        may_lack=np.array(inputs["may_lack"], np.bool_),
        task=inputs["task"],
        loss=inputs["loss"],
        classes=list(inputs["classes"]),
        dtype=dtype,
        source=run_file.data.source if run_file else "",
        layout=layout,
        image=_image(run_file, table, shape),
    )


def _image(run_file: RunFile | None, table: Schema | None, shape: tuple[int, ...]) -> ImageForm | None:
    """Return what files of images become in a run on such; None in another."""
    if run_file is None or (run_file.data.source not in ("image-folder", *SETS) and (table is None or table.features)):
        return None
    data = run_file.data
    return ImageForm(shape[1], shape[0], data.window, data.spacing, data.channel_mean, data.channel_deviation)


def _run_file(folder: Path, model: str | None, allow_code: bool) -> RunFile | None:
    """Return the run file of a folder; None of a run made from Python, whose architecture is given."""
    if not (folder / "run.toml").exists():
        if model is None:
            raise ParameterError(
                f"{folder} is of a run made from Python, which does not say how its model is built; name that by "
                "--model module:function (or a built-in name)"
            )
        return None
    if model is not None:
        raise ParameterError(f"{folder} has a run file, which names its model; leave out --model")
    run_file = run_files.load(folder / "run.toml")
    consent.check(folder, run_file, allow_code)
    return run_file


def model_file(folder: Path, *, true_model: bool = False, silo: str | None = None) -> Path:
    """Return the file of the released or the true model of a run, or of a silo's own.

    Raises `moretta.errors.ParameterError` where the run has no such model but others.
    """
    own = {path.stem: path for path in (folder / "models").glob("*.safetensors")}
    own |= {path.parent.name: path for path in (folder / "participants").glob("*/confined.safetensors")}
    confined = (folder / "participants").is_dir()  # CGD's
    if silo is not None and silo not in own:
        there = f"it has those of {', '.join(sorted(own))!s:.200}" if own else "it has one model for all"
        if confined and not own:
            there = "it keeps no confined models, being a simulation of so many"
        raise ParameterError(f"{folder}: expected a model of silo `{silo}`; {there}")
    if silo is not None:
        return own[silo]
    if own or confined:
        named = f" ({', '.join(sorted(own)):.200})" if own else ""
        further = "; model.safetensors is D, which they have all moved by" if confined else ""
        raise ParameterError(
            f"{folder}: expected a run with one model; here each silo has its own, name one by --silo{named}{further}"
        )
    return folder / ("model.safetensors" if true_model else "released.safetensors")
