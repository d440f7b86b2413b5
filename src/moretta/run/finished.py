"""A finished run's model, ready to use: its architecture from the run file, its weights, what its inputs mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.data.tables.preparation import Preparation
from moretta.engines.run_folder import read_json, read_model
from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.protocols.common import modules
from moretta.run import consent


@dataclass(frozen=True)
class FinishedModel:
    """A model in eval mode, and how inputs are prepared for it.

    shape: of one row of inputs; columns: their names, for tables.
    """

    module: nn.Module
    run_file: RunFile
    shape: tuple[int, ...]
    columns: Sequence[str]
    preparation: Preparation
    dtype: torch.dtype


def load(folder: Path, *, true_model: bool = False, silo: str | None = None, allow_code: bool = False) -> FinishedModel:
    """Load the released model of a run, the server's true one, or a silo's own.

    allow_code: import the code of the model that the folder names (`moretta.run.consent`). Raises
    `moretta.errors.ParameterError` for a folder without such a model, one of a run made from Python, or one that names
    code which is not allowed.
    """
    inputs, tensors = (
        read_json(folder / "inputs.json"),
        read_model(model_file(folder, true_model=true_model, silo=silo)),
    )
    if not (folder / "run.toml").exists():
        raise ParameterError(f"{folder}: expected a run of `moretta train`; one made from Python has its model there")
    run_file = run_files.load(folder / "run.toml")
    consent.check(folder, run_file, allow_code)
    shape, dtype = tuple(inputs["shape"]), {"float32": torch.float32, "float64": torch.float64}[inputs["dtype"]]
    module = catalogue.build(
        run_file.model.source,
        inputs=shape,
        outputs=int(inputs["outputs"]),
        base=run_file.base,
        seed=run_file.run.seed,
        **run_file.model.arguments,
    ).to(dtype)
    modules.load(module, tensors)
    return FinishedModel(module.eval(), run_file, shape, list(inputs["columns"]), Preparation.loads(inputs), dtype)


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
        further = "; model.safetensors is D, which they have all moved by" if confined else ""
        raise ParameterError(
            f"{folder}: expected a run with one model; here each silo has its own, name one by --silo{further}"
        )
    return folder / ("model.safetensors" if true_model else "released.safetensors")
