"""A finished run's model, ready to use: its architecture from the run file, its weights, what its inputs mean."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.contract.messages import Tensors
from moretta.data.images.pixels import ImageForm
from moretta.data.images.sets import SETS
from moretta.data.layout import SampleLayout
from moretta.data.references import OWN_CODE
from moretta.data.tables import schema
from moretta.data.tables.files import Format
from moretta.data.tables.preparation import Expansion, Preparation
from moretta.data.tables.rows import expansion_of
from moretta.data.tables.schema import Schema
from moretta.engines.files import read_file
from moretta.engines.run_folder import read_inputs, read_json, read_model
from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.models.checks import build_within
from moretta.models.graph import Graph
from moretta.protocols.common import modules
from moretta.run import consent
from moretta.run.foreign import ForeignGraph
from moretta.run.saving import GRAPH, MADE

HARMLESS = 1_000_000  # numbers of a model that anybody may ask for
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class FinishedModel:
    """A model in eval mode, and what its inputs and outputs mean.

    shape: of one row of inputs; columns: their names, for tables. table: what a table's columns mean, None for arrays;
    form: how its .csv files are written. fills_absent: whether a value may be absent; may_lack: bool[columns], in which
    columns, or [1] for all alike. classes: their names, if known. source: of the run's data. layout: how a row of
    several arrays is packed. image: what files of images become. integers: whether rows are token ids. tables: the
    files that the run's rows are from, whether they are there or not.
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
    source: str
    layout: SampleLayout | None = None
    image: ImageForm | None = None
    integers: bool = False
    tables: Sequence[Path] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The model's present dtype: a user may have said `.double()`."""
        return next((one.dtype for one in self.module.parameters() if one.is_floating_point()), torch.float32)

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
    working directory, which is then called; None: as the folder says. allow_code: import the code of the model that the
    folder names (`moretta.run.consent`), and run its graph in this process, not in a confined one. Raises
    `moretta.errors.ParameterError` for a folder without such a model, one that does not say how its model is built,
    without `model`, or one that names code which is not allowed.
    """
    inputs = read_inputs(folder)
    tensors = weights(folder, true_model=true_model, silo=silo)
    run_file = _run_file(folder, model, allow_code)
    try:
        module = _module(folder, inputs, tensors, run_file, model, allow_code)
        return of(module, inputs, run_file, f"{folder}: inputs.json")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ParameterError(
            f"{folder}: inputs.json or {MADE} is not as a run leaves it ({type(error).__name__}); restore it"
        ) from None


def _module(
    folder: Path,
    inputs: Mapping[str, Any],
    tensors: Tensors,
    run_file: RunFile | None,
    model: str | None,
    allow_code: bool,
) -> nn.Module:
    """Return the model with its weights: of its run file, of what `model` names, or as its folder says."""
    source, arguments, base = model or "", dict[str, Any](), Path()
    if run_file is not None:
        source, arguments, base = run_file.model.source, dict(run_file.model.arguments), run_file.base
    elif model is None:
        made: dict[str, Any] = {"source": "", "arguments": {}, "base": "."}
        if (folder / MADE).exists():
            made = read_json(folder / MADE)
        source, arguments = str(made["source"]), dict(made["arguments"])
        base = Path(os.path.normpath(folder.absolute() / str(made["base"])))
        if not source and (folder / GRAPH).exists():
            return _graph(folder, tensors, allow_code)
        if not source and not (folder / MADE).exists():
            raise ParameterError(f"{folder} has neither run.toml nor {MADE}, one of which a run leaves; restore it")
        if not source:
            raise ParameterError(
                f"{folder} is of a run made from Python, which does not say how its model is built; name that by "
                "--model module:function (or a built-in name), or write the model's graph there by Result.save()"
            )
        consent.check_model(folder, source, base, allow_code)
    build = partial(
        catalogue.build,
        source,
        inputs=tuple(inputs["shape"]),
        outputs=int(inputs["outputs"]),
        base=base,
        seed=run_file.run.seed if run_file else 0,
        layout=SampleLayout.load(inputs["arrays"]) if "arrays" in inputs else None,
        agreed=OWN_CODE,  # `consent.check_model` has asked
        **arguments,
    )
    if source in catalogue.BUILT_IN:  # arguments of somebody else's folder may ask for any memory
        most = max(HARMLESS, sum(one.size for one in tensors.values()))
        module = build_within(most, build, f"{folder}: what it says of its model does not fit the weights beside it")
    else:
        module = build()
    module = module.to(DTYPES[inputs["dtype"]])
    modules.load(module, tensors)
    return module


def _graph(folder: Path, tensors: Tensors, trusted: bool) -> nn.Module:
    """Return the model of a folder's graph: run here where the folder is trusted, else in a confined process."""
    file = read_file(folder, GRAPH, "the graph of a model")
    try:
        return (Graph if trusted else ForeignGraph).read(file, tensors)
    except ParameterError as error:
        raise ParameterError(f"{folder / GRAPH}: {error}") from None


def of(module: nn.Module, inputs: Mapping[str, Any], run_file: RunFile | None = None, where: str = "") -> FinishedModel:
    """Return a model with what inputs.json says of it. run_file: of its run, if it had one. where: of the file."""
    shape = tuple(inputs["shape"])
    layout = SampleLayout.load(inputs["arrays"]) if "arrays" in inputs else None
    table = schema.of(inputs["table"], where) if inputs["table"] else None
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
        source=run_file.data.source if run_file else "",
        layout=layout,
        image=_image(run_file, table, shape),
        integers=bool(inputs.get("integers", False)),
        tables=[] if run_file is None else _tables(run_file),
    )


def _tables(run_file: RunFile) -> list[Path]:
    data = run_file.data
    files = [one if isinstance(one, str) else one.source for one in data.files.values()]
    return [run_file.resolve(one) for one in (data.source, data.test, data.labels, data.path, *files) if one]


def _image(run_file: RunFile | None, table: Schema | None, shape: tuple[int, ...]) -> ImageForm | None:
    """Return what files of images become in a run on such; None in another."""
    if run_file is None or (run_file.data.source not in ("image-folder", *SETS) and (table is None or table.features)):
        return None
    data = run_file.data
    return ImageForm(shape[1], shape[0], data.window, data.spacing, data.channel_mean, data.channel_deviation)


def _run_file(folder: Path, model: str | None, allow_code: bool) -> RunFile | None:
    """Return the run file of a folder; None of a run made from Python, whose architecture is given."""
    if not (folder / "run.toml").exists():
        return None
    if model is not None:
        raise ParameterError(f"{folder} has a run file, which names its model; leave out --model")
    run_file = run_files.of_folder(folder)
    consent.check(folder, run_file, allow_code)
    return run_file


def weights(folder: Path, *, true_model: bool = False, silo: str | None = None) -> Tensors:
    """Return the tensors of a run's model.

    Raises `moretta.errors.ParameterError` for a file that is not the one which the run wrote.
    """
    path = model_file(folder, true_model=true_model, silo=silo)
    return read_model(folder, str(path.relative_to(folder)))


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
