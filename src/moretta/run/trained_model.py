"""The trained model: a network, its preparation of rows, the meaning of inputs and outputs; loading and saving."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.contract.lazy_rows import LazyRows
from moretta.contract.messages import Array, Tensors
from moretta.contract.wording import either, kind_of, names_keywords, path_of, says_keywords, shown
from moretta.data import python_rows
from moretta.data.images.pixels import ImageForm
from moretta.data.images.sets import scaled
from moretta.data.layout import SampleLayout
from moretta.data.references import OWN_CODE, is_reference
from moretta.data.rows import as_features, as_positions, as_targets, check_finite
from moretta.data.tables import schema
from moretta.data.tables.files import NUMBER, Format, as_columns, check_dense, check_order, is_frame
from moretta.data.tables.preparation import ONE_OF, Expansion, Preparation
from moretta.data.tables.rows import encode, expansion_of
from moretta.data.tables.schema import Schema
from moretta.engines.files import check_unused, make_folder, read_file, write_atomically
from moretta.engines.run_folder import RunFolder, read_inputs, read_json, read_model
from moretta.errors import MorettaError, ParameterError, RowsError
from moretta.models import catalogue, graph
from moretta.models.checks import build_within, dtype_of
from moretta.models.graph import Graph
from moretta.models.hooks import gives_all, gives_one_tensor
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import inputs_of
from moretta.protocols.common.modules import outputs_of
from moretta.protocols.common.targets import estimates_of, predicted, probabilities
from moretta.run import consent
from moretta.run.foreign import ForeignGraph
from moretta.run.metrics import judged
from moretta.run.python_arguments import Made
from moretta.run.raw_rows import Expanded, Prepared

MADE = consent.MADE
GRAPH = "graph.safetensors"
HARMLESS = 1_000_000  # the most numbers of a model that another's folder may request


class TrainedModel(nn.Module):
    """A network behind its run's preparation: filling in, scales, and the encoders of a table.

    As a module it takes a tensor of rows in the silos' form, nothing scaled or filled in, NaN for an absent value. It
    returns outputs, [rows, outputs], in the targets' own units; an impossible row has NaN. For a table it takes coded
    rows too (`read_table(..).coded`); several arrays a sample are passed by keyword. It is in eval mode.

    `predict` and `predict_proba` take the inputs of a `Silo`, and for a table a frame or a mapping of its columns with
    their words. `task`: "classification" or "regression". `classes`: their names, if known. `columns`: of the inputs.
    `mask`: the shape of masks, such as [height, width].

    Args:
        network: The trained model.
        inputs: The content of inputs.json: the meaning of inputs and outputs.
        run_file: Of its run, if any: the form of its files, and the preparation of images.
        where: The name of inputs.json in errors.
    """

    def __init__(
        self, network: nn.Module, inputs: Mapping[str, Any], run_file: RunFile | None = None, where: str = ""
    ) -> None:
        super().__init__()
        self.shape, self.count, self.mask = tuple(inputs["shape"]), int(inputs["outputs"]), _mask(inputs)
        self.layout = SampleLayout.load(inputs["arrays"]) if "arrays" in inputs else None
        self.table: Schema | None = schema.of(inputs["table"], where) if inputs["table"] else None
        self.preparation = Preparation.loads(inputs)
        self.fills_absent, self.may_lack = bool(inputs["fills_absent"]), np.array(inputs["may_lack"], np.bool_)
        self.task, self.loss = str(inputs["task"]), str(inputs["loss"])
        self.classes, self.columns = tuple(inputs["classes"]), tuple(inputs["columns"])
        self.integers = bool(inputs.get("integers", False))  # whether rows are token ids
        self.threshold: float | None = inputs.get("threshold")  # chosen on validation rows
        self.form = run_file.data.form if run_file else Format(absent=tuple(map(str, inputs.get("absent", ()))))
        pictures = run_file is not None and run_file.data.has_images(self.table)
        image = run_file.data.image.plain() if run_file is not None and pictures else inputs.get("image")
        self.image = None if image is None else ImageForm.of(image, self.shape)
        if self.image is not None and self.image.channel_mean is not None:  # prepared in the model from here on
            self.preparation = self.preparation.behind(*self.image.scales(self.shape))
            self.image = replace(self.image, channel_mean=None, channel_deviation=None)
        self.tables = [] if run_file is None else _tables(run_file)
        self.model = Prepared(network, self.preparation, self.may_lack)
        self.expand = None if self.expansion is None else Expanded(self.expansion)
        self.eval()

    def __repr__(self) -> str:
        return f"TrainedModel({self.task}, rows {list(self.shape)})"

    @property
    def network(self) -> nn.Module:
        """The trained model."""
        return self.model.model

    @property
    def dtype(self) -> torch.dtype:
        """The network's present dtype, which `.double()` changes."""
        return dtype_of(self.network)

    @property
    def expansion(self) -> Expansion | None:
        """The function from a table's coded rows to inputs; None for arrays."""
        return None if self.table is None or not self.table.features else expansion_of(self.table)

    def forward(self, x: Tensor | None = None, **arrays: Tensor) -> Tensor:
        """Return the outputs, [rows, outputs]."""
        names = set() if self.layout is None else set(self.layout.names)
        if set(arrays) != names or (x is None) == (self.layout is None):
            raise ParameterError(f"expected {self.layout or f'one tensor of rows {list(self.shape)}'}, and no others")
        for array in arrays.values() if x is None else [x]:
            if not isinstance(array, Tensor):
                raise ParameterError(f"expected a tensor; got {kind_of(array)}: pass it to predict or predict_proba")
        if self.layout is not None or x is None:  # packed as at the silos
            x = torch.cat([array.reshape(len(array), -1).float() for _, array in sorted(arrays.items())], dim=1)
        if self.expand is not None and self._is_coded(x):
            x = self.expand(x.double())
        if x.shape[1:] != self.shape:
            raise ParameterError(f"expected rows of shape {list(self.shape)}, got {list(x.shape[1:])}")
        outputs: Tensor = self.model(x)
        return outputs

    @names_keywords()
    def predict(self, x: Any) -> NDArray[np.generic]:
        """Predict each row alone, as `moretta predict` does, so that no prediction depends on other rows.

        Args:
            x: Rows in a silo's form; for a table also a frame or a mapping of its columns.

        Returns:
            The class's name, or its number if the run knew no names, as from `predict_proba(x).argmax(1)`. For a
            regression
            numbers in the targets' units, under cross-entropy probabilities. For masks int64[rows, *mask] of classes'
            numbers.

        Raises:
            ParameterError: The rows differ from the run's in form, or the model's outputs are not finite.
        """
        outputs = finite(self.outputs(self._rows(x), "x"), "x")
        if self.mask:
            return np.asarray(self.at_positions(outputs).argmax(axis=-1))
        if self.task == "classification":
            return np.array(self.classes)[predicted(outputs)] if self.classes else predicted(outputs)
        outputs = estimates_of(outputs, self.loss)
        return outputs[:, 0] if outputs.shape[1] == 1 else outputs

    @names_keywords()
    def predict_proba(self, x: Any) -> NDArray[np.float64]:
        """Return each class's probability, float64[rows, classes] or [rows, *mask, classes]. Raises as `predict`."""
        if self.task != "classification" and not self.mask:
            raise ParameterError("predict_proba is for classes, and this model predicts numbers; use predict")
        outputs = self.at_positions(finite(self.outputs(self._rows(x), "x"), "x"))
        return probabilities(outputs.reshape(-1, outputs.shape[-1]), self.loss).reshape(*outputs.shape[:-1], -1)

    @names_keywords()
    def evaluate(self, x: Any, y: Any, groups: Any = None) -> dict[str, Any]:
        """Return the model's quality on labelled rows: `moretta.run.metrics.judged`.

        Args:
            x: As for `predict`.
            y: The classes' names or numbers, or numbers or masks in the targets' form.
            groups: The subject of each row, if several rows are about one.

        Raises:
            ParameterError: As `predict` does, for targets that do not fit, and for numbers that may be other classes'
                names.
        """
        check_order({"x": x, "y": y, "groups": groups}, "evaluate")
        check_dense(y, "y", "y")
        outputs, truths = finite(self.outputs(self._rows(x), "x"), "x"), self.class_numbers(np.asarray(y), "y")
        kind: Any = self.task
        targets = self.fitting(truths, "y") if self.mask else as_targets(truths, "y", kind)[0]
        if len(targets) != len(outputs):
            raise ParameterError(f"y: expected one target a row, {len(outputs)}; got {len(targets)}")
        subjects = None if groups is None else python_rows.subjects(groups, len(outputs), "groups")
        return judged(outputs, targets, self.task, self.loss, self.classes, subjects, threshold=self.threshold)

    def class_numbers(self, y: NDArray[Any], where: str) -> NDArray[Any]:
        """Return labels as the numbers of classes if they are names; others unchanged.

        Args:
            where: The labels' name in errors.

        Raises:
            ParameterError: Words name no class, or numbers may be names, such as 1 if the first class is called "1".
        """
        if not self.classes or self.task != "classification" or math.prod(y.shape[1:]) != 1:
            return y
        y = y.reshape(-1)
        if y.dtype.kind == "O" and not any(isinstance(label, str) for label in y):
            y = np.array(y.tolist())  # gives the labels' own kind
        if y.dtype.kind in "OU":
            places = {name: place for place, name in enumerate(self.classes)}
            numbers = np.array([places.get(str(word), -1) for word in y])
            if wrong := int((numbers < 0).sum()):
                raise ParameterError(
                    f"{where}: {wrong} of {len(y)} words are not a class; expected {either(map(shown, self.classes))}"
                )
            return numbers
        if y.dtype.kind not in "biuf":
            raise ParameterError(f"{where}: expected names or numbers of classes; got values of {y.dtype}")
        labels, inverse = np.unique(y, return_inverse=True)
        named = {_value(name): place for place, name in enumerate(self.classes)}
        numbers = np.array([named.get(float(label), -1) for label in labels])
        if (numbers < 0).any() or (numbers == labels).all():
            return y
        if np.isin(labels, range(len(self.classes))).all():
            raise ParameterError(
                f"{where}: its numbers may be names of classes or count them from 0, and the classes are called "
                f"{either(map(shown, self.classes))}; pass the names as text"
            )
        return numbers[inverse]

    def outputs(self, x: Array, where: str) -> NDArray[np.floating[Any]]:
        """Return the outputs, [rows, outputs], of a silo's rows, which may be lazy.

        Args:
            where: The rows' name in errors.

        Raises:
            ParameterError: Rows have another shape, infinite values, NaN for a required value, or pixels outside [0,
                1]. Or the network fails on them.
        """
        x = self._checked(x, where)
        if self.image is not None and not isinstance(x, LazyRows) and ((x < 0) | (x > 1)).any():
            raise ParameterError(
                f"{where}: expected pixels from 0 to 1, or bytes (uint8); divide by the most of a pixel"
            )
        device = str(next(self.network.parameters()).device)
        try:
            inputs = inputs_of(x, self.preparation, self.dtype, device)
            # A table's rows are computed one by one, because rounding depends on their number. No prediction may
            # depend on the other rows of the file, even in its last digit.
            run = self.network.outputs if isinstance(self.network, ForeignGraph) else partial(outputs_of, self.network)
            outputs = run(inputs, 1) if x.ndim == 2 else run(inputs)
            return self.preparation.unscaled(np.asarray(outputs.cpu().numpy()))
        except MorettaError:
            raise
        except Exception as error:  # a user's model may raise anything for rows that it refuses
            reason = str(error).strip().partition("\n")[0]
            raise ParameterError(
                f"{where}: the model cannot take these rows of {x.dtype} ({reason}); save numbers as floats, and "
                "tokens as the integers that it was trained on"
            ) from error

    def at_positions(self, outputs: Array) -> Array:
        """Return outputs [rows, outputs] of masks as [rows, *mask, classes], and others unchanged."""
        return outputs.reshape(len(outputs), *self.mask, -1)

    def fitting(self, y: Array, where: str) -> Array:
        """Return masks as `as_positions` does, for scoring. Raises ParameterError for other positions or classes."""
        masks, classes = as_positions(y, where), self.count // math.prod(self.mask)
        positions, highest = masks.shape[1], int(masks[..., 0].max(initial=0))
        if positions != math.prod(self.mask) or highest >= classes:
            raise ParameterError(
                f"{where}: expected masks of {' x '.join(map(str, self.mask))} positions with classes 0 to "
                f"{classes - 1}, as the run's; got {positions} positions and class {highest}"
            )
        return masks

    def _checked(self, x: Array, where: str) -> Array:
        """Return rows in the network's shape; samples are flat if columns were distributed."""
        if len(self.shape) == 1 and len(x) and x[0].size == self.shape[0]:
            x = x.reshape(len(x), -1)
        if x.shape[1:] != self.shape or not len(x):
            raise ParameterError(
                f"{where}: expected rows of shape {list(self.shape)}, got {len(x)} of {list(x.shape[1:])}"
            )
        names = self.columns if len(self.columns) == x.shape[-1] else ()
        by_column = self.fills_absent and len(self.may_lack) == x.shape[-1]
        check_finite(x, names, where, may_lack=self.may_lack if by_column else self.fills_absent)
        return x

    def pixels(self, x: Array) -> Array:
        """Return bytes of images as fractions of 255, and anything else unchanged."""
        return scaled(x) if self.image is not None and x.dtype == np.uint8 else x

    def _is_coded(self, x: Tensor | Array) -> bool:
        """Return whether rows are a table's coded ones, not yet expanded."""
        if self.expansion is None or tuple(x.shape[1:]) != (len(self.expansion.features),):
            return False
        words = np.flatnonzero(self.expansion.kinds == ONE_OF)  # with one word each: 0 if coded, 1 if expanded
        return tuple(x.shape[1:]) != self.shape or (len(words) > 0 and bool((x[:, words] != 1).any()))

    def _rows(self, x: Any) -> Array:
        """Return rows in a silo's form: numbers, NaN for an absent value."""
        if python_rows.is_dataset(x):
            raise ParameterError("x: got a Dataset; pass its samples alone, as an array")
        check_order({"x": x}, "x")
        if self.layout is not None:
            if not isinstance(x, Mapping):
                raise ParameterError(f"x: expected {self.layout}, as a mapping of arrays")
            arrays = {name: python_rows.samples({name: array}, "x")[name] for name, array in x.items()}
            return self.layout.pack(arrays, "x")
        framed = is_frame(x)
        if self.table is not None and self.table.features and (framed or isinstance(x, Mapping)):
            unread = [name for name, column in self.table.columns.items() if column.kind in ("drop", "target")]
            columns = as_columns(x, "x", self.form, unread)
            return encode(columns, self.table, "x", self.form, labelled=False, training=False).x
        if isinstance(x, Mapping):
            x = python_rows.of_columns({name: x[name] for name in self._own_columns(tuple(x))}, "x")
        elif framed:
            self._own_columns(python_rows.names_of(x))
            x = python_rows.in_order(x, self.columns, "x", "the run")
        plain: Any = python_rows.samples(x, "x")
        plain = self.pixels(plain)
        if plain.dtype.kind in "iu" and not self.integers:  # floats that happen to have no fraction, of either sign
            plain = plain.astype(np.float32)
        rows = as_features(plain, "x")
        if self.expansion is None or not self._is_coded(rows):
            return rows
        expanded: Array = Expanded(self.expansion)(torch.from_numpy(rows).double()).float().numpy()
        return expanded

    def _own_columns(self, names: Sequence[str]) -> Sequence[str]:
        """Return the run's columns. Raises ParameterError if it had no names of columns, or one is missing."""
        if not self.columns:
            raise ParameterError(
                "x: the run's rows had no names of columns; pass an array with its columns in the same order"
            )
        for name in self.columns:
            if name not in names:
                raise ParameterError(f"x: expected a column {name!r}, as the run has; it has {', '.join(names):.200}")
        return self.columns


def finite(outputs: NDArray[Any], where: str, numbers: NDArray[np.int64] | None = None) -> NDArray[Any]:
    """Return outputs if all are finite. Raises RowsError, naming the rows. numbers: theirs; None counts from 1."""
    bad = np.flatnonzero(~np.isfinite(outputs).all(axis=1))
    if not len(bad):
        return outputs
    first = bad[0] + 1 if numbers is None else numbers[bad[0]]
    raise RowsError(
        f"{where}: the model's outputs are not finite in {len(bad)} of {len(outputs)} rows, first in row {first} "
        "(counted from 1); leave out those rows, or if all are such, train again with a lower learning-rate"
    )


@dataclass(frozen=True)
class ModelChoice:
    """The choice of a model in a run's folder, and whether its code may run. Fields: the arguments of `load`."""

    true_model: bool = False
    silo: str | None = None
    model: str | None = None
    allow_code: bool = False


@names_keywords()
@says_keywords()
def load(
    folder: str | Path,
    *,
    silo: str | None = None,
    true_model: bool = False,
    model: str | None = None,
    allow_code: bool = False,
) -> TrainedModel:
    """Load the model of a run's folder, or of one that `Result.save` wrote, for rows in the data's own form.

    Without `allow_code` no code of the folder runs, and a graph runs in a confined process, on the CPU and without
    gradients. Nothing is ever unpickled.

    Args:
        folder: The folder.
        silo: The owner of the model, if each silo has its own.
        true_model: Choose the server's model instead of the released one.
        model: The model's source, a built-in name or "module:function", if the folder does not name it.
        allow_code: Import the code that the folder names (`moretta.run.consent`), and run its graph in this process.

    Returns:
        TrainedModel: A module that also predicts and evaluates.

    Raises:
        ParameterError: The folder holds no such model; one sentence gives the reason.
    """
    folder = path_of(folder, "load: expected the path of a run folder")
    if model is not None and not isinstance(model, str):
        raise ParameterError(f'model: expected a name or "module:function"; got {kind_of(model)}')
    if not folder.is_dir():
        raise ParameterError(f"{folder}: expected a run folder, or one of Result.save; there is no such directory")
    return read(folder, ModelChoice(true_model, silo, model, allow_code))


def read(folder: Path, choice: ModelChoice = ModelChoice()) -> TrainedModel:  # frozen
    """Return the same as `load`, for commands; a "module:function" is beside the working directory."""
    inputs, tensors, run_file = read_inputs(folder), weights(folder, choice), _run_file(folder, choice)
    try:
        network = _module(folder, inputs, tensors, run_file, choice)
        return TrainedModel(network, inputs, run_file, f"{folder}: inputs.json")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ParameterError(
            f"{folder}: inputs.json or {MADE} is not as a run leaves it ({type(error).__name__}); restore it"
        ) from None


def _module(
    folder: Path, inputs: Mapping[str, Any], tensors: Tensors, run_file: RunFile | None, choice: ModelChoice
) -> nn.Module:
    """Return the model with its weights, built by its run file, by the choice, or by the folder's record."""
    source, arguments, base = choice.model or "", dict[str, Any](), Path()
    if run_file is not None:
        source, arguments, base = run_file.model.source, dict(run_file.model.arguments), run_file.base
    elif choice.model is None:
        made: dict[str, Any] = {"source": "", "arguments": {}, "base": "."}
        if (folder / MADE).exists():
            made = read_json(folder / MADE)
        source, arguments = str(made["source"]), dict(made["arguments"])
        base = Path(os.path.normpath(folder.absolute() / str(made["base"])))
        if not source and (folder / GRAPH).exists():
            return _graph(folder, tensors, choice.allow_code)
        if not source and not (folder / MADE).exists():
            raise ParameterError(f"{folder} has neither run.toml nor {MADE}, one of which a run leaves; restore it")
        if not source:
            raise ParameterError(
                f"{folder} is of a run made from Python, which does not record how its model is built; name that by "
                "--model module:function (or a built-in name), or write the model's graph there by Result.save()"
            )
        consent.check_model(folder, source, base, choice.allow_code)
    build = partial(
        catalogue.build,
        source,
        inputs=tuple(inputs["shape"]),
        outputs=int(inputs["outputs"]) // math.prod(_mask(inputs)),
        base=base,
        seed=run_file.run.seed if run_file else 0,
        layout=SampleLayout.load(inputs["arrays"]) if "arrays" in inputs else None,
        agreed=OWN_CODE,  # `consent.check_model` has asked the user
        **arguments,
    )
    if source in catalogue.BUILT_IN:  # arguments of another's folder may request any memory
        most = max(HARMLESS, sum(array.size for array in tensors.values()))
        module = build_within(most, build, f"{folder}: what it says of its model does not fit the weights beside it")
    else:
        module = build()
    if "output" in inputs or "mask" in inputs:  # the part of the module's result that its run used
        module = gives_one_tensor(gives_all(module), str(inputs.get("output", "")), _mask(inputs))
    module = module.to(modules.DTYPES[inputs["dtype"]])
    modules.load(module, tensors)
    return module


def _value(name: str) -> float | None:
    """Return the number that a class's name writes, 1 for true and 0 for false, or None."""
    word = {"true": "1", "false": "0"}.get(name.lower(), name)
    return float(word) if re.fullmatch(NUMBER, word) else None


def _mask(inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of predicted masks. Raises ValueError for one that does not fit the outputs."""
    mask = tuple(inputs.get("mask", ()))
    if any(type(size) is not int or size < 1 for size in mask) or inputs["outputs"] % math.prod(mask):
        raise ValueError("mask")
    return mask


def _graph(folder: Path, tensors: Tensors, trusted: bool) -> nn.Module:
    """Return the model of a folder's graph, run here if the folder is trusted, else in a confined process."""
    file = read_file(folder, GRAPH, "the graph of a model")
    try:
        return (Graph if trusted else ForeignGraph).read(file, tensors)
    except ParameterError as error:
        raise ParameterError(f"{folder / GRAPH}: {error}") from None


def _tables(run_file: RunFile) -> list[Path]:
    data = run_file.data
    files = [source for file in data.of_silos.values() for source in (file.source, file.test)]
    return [run_file.resolve(source) for source in (data.source, data.test, data.labels, data.path, *files) if source]


def _run_file(folder: Path, choice: ModelChoice) -> RunFile | None:
    """Return the run file of a folder; None for a run from Python, whose architecture the caller passes."""
    if not (folder / "run.toml").exists():
        return None
    if choice.model is not None:
        raise ParameterError(f"{folder} has a run file, which names its model; leave out --model")
    run_file = run_files.of_folder(folder)
    consent.check(folder, run_file, choice.allow_code)
    return run_file


def weights(folder: Path, choice: ModelChoice) -> Tensors:
    """Return a run's tensors. Raises `moretta.errors.ParameterError` for a file that the run did not write."""
    return read_model(folder, str(model_file(folder, choice).relative_to(folder)))


def model_file(folder: Path, choice: ModelChoice) -> Path:
    """Return the file of a run's released or true model, or of a silo's own. Raises ParameterError if absent."""
    silo = choice.silo
    own = {path.stem: path for path in (folder / "models").glob("*.safetensors")}
    own |= {path.parent.name: path for path in (folder / "participants").glob("*/confined.safetensors")}
    confined = (folder / "participants").is_dir()  # CGD's
    if silo is not None and silo not in own:
        alternatives = f"it has those of {', '.join(sorted(own))!s:.200}" if own else "it has one model for all"
        if confined and not own:
            alternatives = "it keeps no confined models, being a simulation of so many"
        raise ParameterError(f"{folder}: expected a model of silo `{silo}`; {alternatives}")
    if silo is not None:
        return own[silo]
    if own or confined:
        named = f" ({', '.join(sorted(own)):.200})" if own else ""
        further = "; model.safetensors is D, which they have all moved by" if confined else ""
        raise ParameterError(
            f"{folder}: expected a run with one model; here each silo has its own, name one by --silo{named}{further}"
        )
    return folder / ("model.safetensors" if choice.true_model else "released.safetensors")


def save(
    folder: Path,
    network: nn.Module,
    models: Mapping[str, Tensors],
    inputs: Mapping[str, Any],
    made: Made,
    row_dtype: torch.dtype,
) -> None:
    """Write models into a folder that `load` and the shell's commands read.

    Args:
        folder: A new folder, or the run's own.
        network: The architecture.
        models: Tensors by the name of the file without its ending.
        inputs: The content of inputs.json.
        made: The construction of the model; if unknown, its graph is written (`moretta.models.graph`).
        row_dtype: Of the model's rows.

    Raises:
        ParameterError: The folder has another model, or the model has neither importable code nor a graph. Nothing is
            written then.
    """
    check_unused(folder, "; name another folder to save to")
    drawn = None if made.source else graph.written(network, inputs["shape"], row_dtype)
    make_folder(folder)
    kept = RunFolder(folder)
    if drawn is not None:
        write_atomically(folder / GRAPH, drawn)
    for name, tensors in models.items():
        kept.write_model(f"{name}.safetensors", tensors, mode=0o644 if name == "released" else 0o600)
    kept.write_json(MADE, as_plain(made, folder))
    kept.write_json("inputs.json", inputs)


def as_plain(made: Made, folder: Path) -> dict[str, Any]:
    """Return how a model is built as plain data, with its base relative to the folder if it has code."""
    base = os.path.relpath(made.base, folder) if is_reference(made.source) else "."
    return {"source": made.source, "arguments": dict(made.arguments), "base": base}
