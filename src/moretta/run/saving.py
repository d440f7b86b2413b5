"""Keep a model with what its inputs and outputs mean, so that it can be loaded without the run that trained it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moretta.contract.messages import Tensors
from moretta.data.references import is_reference
from moretta.engines.files import make_folder, write_atomically
from moretta.engines.run_folder import RunFolder
from moretta.errors import ParameterError
from moretta.models import graph
from moretta.run.python_arguments import Made

MADE = "model.json"
GRAPH = "graph.safetensors"


def keep_made(folder: RunFolder, made: Made, rounds: int, seed: int) -> None:
    """Write how a run from Python was made: what builds its model, and what `train` was given."""
    folder.write_json(MADE, {**told(made, folder.path), "rounds": rounds, "seed": seed})


def told(made: Made, folder: Path) -> dict[str, Any]:
    """Return how a model is built as plain data. Its base is written from the folder on, where there is code in it."""
    base = os.path.relpath(made.base, folder) if is_reference(made.source) else "."
    return {"source": made.source, "arguments": dict(made.arguments), "base": base}


def save(
    folder: Path,
    architecture: nn.Module,
    models: Mapping[str, Tensors],
    inputs: Mapping[str, Any],
    made: Made,
    row_dtype: torch.dtype,
) -> None:
    """Write models into a folder that `moretta.load` and the shell's commands read.

    models: tensors by the name of the file without its ending. inputs: what inputs.json has. made: how the model is
    built; where that is not known, its graph is written (`moretta.models.graph`). row_dtype: of what the model reads.
    Raises `moretta.errors.ParameterError`, and writes nothing, for a folder that another model is in, or a model that
    has neither code to import nor a graph.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ParameterError(f"{folder} exists and is not empty; name another folder to save to")
    drawn = None if made.source else graph.written(architecture, inputs["shape"], row_dtype)
    make_folder(folder)
    kept = RunFolder(folder)
    if drawn is not None:
        write_atomically(folder / GRAPH, drawn)
    for name, tensors in models.items():
        kept.write_model(f"{name}.safetensors", tensors, mode=0o644 if name == "released" else 0o600)
    kept.write_json(MADE, told(made, folder))
    kept.write_json("inputs.json", inputs)


def keep_graph(folder: Path, architecture: nn.Module, inputs: Mapping[str, Any], row_dtype: torch.dtype) -> None:
    """Write a model's graph into the folder of the run that trained it."""
    write_atomically(folder / GRAPH, graph.written(architecture, inputs["shape"], row_dtype))
