"""A trained model that takes rows as the data has them: what Python users predict with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.contract.keywords import names_keywords, path_of, says_keywords
from moretta.contract.messages import Array
from moretta.contract.wording import kind_of
from moretta.data import python_rows
from moretta.data.checks import as_features
from moretta.data.tables.files import as_columns
from moretta.data.tables.rows import encode
from moretta.errors import ParameterError
from moretta.protocols.common.targets import probabilities
from moretta.run import trained_model
from moretta.run.prediction import checked, classes_of, outputs_of_rows
from moretta.run.raw_rows import Expanded, Prepared
from moretta.run.trained_model import FinishedModel


@names_keywords()
@says_keywords()
def load(
    folder: str | Path,
    *,
    silo: str | None = None,
    true_model: bool = False,
    model: str | None = None,
    allow_code: bool = False,
) -> RawModel:
    """Return the model of a run's folder, or of one that `Result.save` wrote, ready for rows as the data has them.

    silo: whose model, where each silo has its own. true_model: the server's, not the released one. model: what builds
    it, a built-in name or "module:function", where the folder does not say. allow_code: import the code that the folder
    names (`moretta.run.consent`), and run its graph in this process; without it no code of the folder's is run, and a
    graph runs in a confined process, on the CPU and without gradients. Nothing is ever unpickled.
    Raises `moretta.errors.ParameterError`, in one sentence, for a folder that holds no such model.
    """
    folder = path_of(folder, "load: expected the path of a run folder")
    if model is not None and not isinstance(model, str):
        raise ParameterError(f'model: expected a name or "module:function"; got {kind_of(model)}')
    if not folder.is_dir():
        raise ParameterError(f"{folder}: expected a run folder, or one of Result.save; there is no such directory")
    return RawModel(trained_model.load(folder, true_model=true_model, silo=silo, model=model, allow_code=allow_code))


class RawModel(nn.Module):
    """A trained model behind all that the run agreed on: what is filled in, scales, and the encoders of a table.

    As a module it takes a tensor of rows as the silos have them, nothing scaled or filled in, NaN where a value is
    absent, and returns outputs, [rows, outputs]; a row that cannot be has NaN. Of a table it takes coded rows too
    (`read_table(..).coded`); where a sample has several arrays it takes them by keyword. It is in eval mode.

    `predict` and `predict_proba` take what a `Silo` takes, and of a table a frame or a mapping of its columns with
    their words. task: "classification" or "regression". classes: their names, if known. columns: of the inputs.
    """

    def __init__(self, found: FinishedModel) -> None:
        super().__init__()
        self.model = Prepared(found.module, found.preparation, found.may_lack)
        self.expand = None if found.expansion is None else Expanded(found.expansion)
        self._found = found
        self.task, self.classes, self.columns = found.task, tuple(found.classes), tuple(found.columns)
        self.eval()

    def __repr__(self) -> str:
        return f"RawModel({self.task}, rows {list(self._found.shape)})"

    def forward(self, x: Tensor | None = None, **arrays: Tensor) -> Tensor:
        """Return the outputs, [rows, outputs]."""
        layout = self._found.layout
        wanted = set() if layout is None else set(layout.names)
        if set(arrays) != wanted or (x is None) == (layout is None):
            raise ParameterError(f"expected {layout or f'one tensor of rows {list(self._found.shape)}'}, and no others")
        for one in arrays.values() if x is None else [x]:
            if not isinstance(one, Tensor):
                raise ParameterError(f"expected a tensor; got {kind_of(one)}: give it to predict or predict_proba")
        if layout is not None or x is None:  # as silos pack them
            x = torch.cat([one.flatten(1).float() for _, one in sorted(arrays.items())], dim=1)
        if self.expand is not None and x.shape[1:] == (self._features,) != self._found.shape:
            x = self.expand(x.double())
        if x.shape[1:] != self._found.shape:
            raise ParameterError(f"expected rows of shape {list(self._found.shape)}, got {list(x.shape[1:])}")
        outputs: Tensor = self.model(x)
        return outputs

    @names_keywords()
    def predict(self, x: Any) -> NDArray[np.generic]:
        """Return what is predicted of each row: int64[rows], the class's number, or numbers as the targets were.

        `classes` has the names of the numbers, where the run knew them. Each row of numbers is computed by itself, as
        by `moretta predict`, so that no prediction depends on the others.
        Raises `moretta.errors.ParameterError` for rows that are not as the run's.
        """
        outputs = self._outputs(x)
        if self.task == "classification":
            return classes_of(outputs)
        return outputs[:, 0] if outputs.shape[1] == 1 else outputs

    @names_keywords()
    def predict_proba(self, x: Any) -> NDArray[np.float64]:
        """Return what each class's probability is, float64[rows, classes]. Raises as `predict` does."""
        if self.task != "classification":
            raise ParameterError("predict_proba is for classes, and this model predicts numbers; use predict")
        return probabilities(self._outputs(x), self._found.loss)

    @property
    def _features(self) -> int:
        return 0 if self._found.expansion is None else len(self._found.expansion.features)

    def _outputs(self, x: Any) -> NDArray[np.floating[Any]]:
        return outputs_of_rows(self._found, checked(self._rows(x), self._found, "x"), "x")

    def _rows(self, x: Any) -> Array:
        """Return rows as a silo's own are: numbers, NaN where a value is absent."""
        found = self._found
        if python_rows.is_dataset(x):
            raise ParameterError("x: got a Dataset; give its samples alone, as an array")
        if found.layout is not None:
            if not isinstance(x, Mapping):
                raise ParameterError(f"x: expected {found.layout}, as a mapping of arrays")
            return found.layout.pack(
                {name: python_rows.samples({name: one}, "x")[name] for name, one in x.items()}, "x"
            )
        named = isinstance(x, Mapping) or python_rows.is_frame(x)
        if found.table is not None and found.table.features and named:
            return encode(as_columns(x, "x"), found.table, "x", labelled=False, training=False).x
        if isinstance(x, Mapping):
            x = np.stack([np.asarray(x[name]) for name in self._wanted(tuple(x))], axis=1) if x else np.empty((0, 0))
        elif python_rows.is_frame(x):
            self._wanted(python_rows.names_of(x))
            x = python_rows.in_order(x, self.columns, "x", "the run")
        plain: Any = python_rows.samples(x, "x")
        rows = as_features(plain, "x")
        if rows.dtype.kind == "i" and not found.integers:  # numbers that have no fraction, by chance
            rows = rows.astype(np.float32)
        if found.expansion is not None and rows.shape[1:] == (self._features,) != found.shape:
            return found.expansion.apply(rows)
        return rows

    def _wanted(self, names: Sequence[str]) -> Sequence[str]:
        """Return the columns that the run had. Raises ParameterError where it had none by name, or one is missing."""
        if not self.columns:
            raise ParameterError("x: the run's rows had no names of columns; give an array with them in the same order")
        for name in self.columns:
            if name not in names:
                raise ParameterError(f"x: expected a column {name!r}, as the run has; it has {', '.join(names):.200}")
        return self.columns
