"""The Python arguments of a federation, checked before anything is built: silos, settings and the model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from moretta.contract.settings import Section
from moretta.contract.wording import kind_of, nearest, path_of, shown
from moretta.data import python_rows
from moretta.data.references import OWN_CODE
from moretta.data.rows import class_of
from moretta.data.silo import Silo, layout_of, row_shape
from moretta.data.tables.rows import expansion_of
from moretta.data.tables.schema import Schema
from moretta.engines.settings import Engine
from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.models.checks import check_weights
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.training import Training
from moretta.secure_aggregation.settings import SecureAggregation

OF_TRAIN = ("rounds", "seed", "resume", "progress", "on_round", "trackers")
OF_PROTOCOL = "a setting of the protocol, such as FedSGD({}=..)"


@dataclass(frozen=True)
class Made:
    """The construction of a model. source, arguments, base: as of `models.catalogue.build`; empty if unknown."""

    source: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    base: str = "."

    @classmethod
    def of(cls, spec: Specification) -> "Made":
        """Return how the model of a run file is built; unknown for a model from Python."""
        section = dict(spec.settings.get("model", {})) if spec.text else {}
        return cls(str(section.pop("source", "")), section, str(spec.settings.get("run", {}).get("base", ".")))

    @property
    def digest(self) -> str:
        """The digest to which noise is bound; empty for an unknown construction."""
        return catalogue.source_digest(self.source, self.arguments, agreed=OWN_CODE) if self.source else ""


def elsewhere() -> dict[str, str]:
    """Return keywords that belong to the protocol or to `train`, each with its place."""
    of_train = {name: f"an argument of train: Federation(..).train({name}=..)" for name in OF_TRAIN}
    return {name: OF_PROTOCOL.format(name) for name in Training.model_fields} | of_train


AnySection = TypeVar("AnySection", bound=Section)


def section(kind: type[AnySection], **keys: Any) -> AnySection:
    """Return a section of the keywords of `Federation`. Raises `moretta.errors.ParameterError`, naming the keyword."""
    try:
        return kind(**keys)
    except ParameterError as error:
        raise ParameterError(f"Federation: {str(error).removeprefix(f'{kind.__name__}: ')}") from None


def standardised(value: bool | str | Sequence[str]) -> bool | tuple[str, ...]:
    """Return names of arrays to standardise as a tuple, also of a single name."""
    if isinstance(value, bool):
        return value
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence):
        raise ParameterError(f"standardise: expected True, False or names of arrays; got {kind_of(value)}")
    return tuple(names)


def whole(name: str, value: object, least: int | None = None) -> int:
    """Return a whole number. Raises `moretta.errors.ParameterError` for anything else, or less than `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ParameterError(f"{name} = {shown(value)}: expected a whole number")
    if least is not None and value < least:
        raise ParameterError(f"{name} = {value}: expected at least {least}")
    return int(value)


def check_kinds(
    protocol: object,
    aggregation: object,
    engine: object,
    metrics: object,
    out: object,
    record_views: object,
    table: object,
    settings: object,
) -> None:
    """Raise ParameterError, naming the argument, for one of the wrong kind, and for recorded views without a folder."""
    if isinstance(protocol, type):
        name = protocol.__name__
        raise ParameterError(f"protocol: expected settings, got the class {name}; call it: {name}()")
    for name, value, kind in (("aggregation", aggregation, SecureAggregation), ("engine", engine, Engine)):
        if value is not None and not isinstance(value, kind):
            raise ParameterError(f"{name}: expected settings, {kind.__name__}(..), or None; got {kind_of(value)}")
    if table is not None and not isinstance(table, Schema):
        raise ParameterError(f"table: expected a schema, such as Schema.load(FILE), or None; got {kind_of(table)}")
    if settings is not None and not isinstance(settings, Mapping):
        raise ParameterError(f"settings: expected a mapping of a run file's sections, or None; got {kind_of(settings)}")
    if isinstance(metrics, str) or not hasattr(metrics, "__iter__"):
        raise ParameterError(f"metrics: expected a list of functions, [my_metric, ..]; got {kind_of(metrics)}")
    if out is not None:
        path_of(out, "out: expected the path of a folder, or None")
    elif record_views:
        raise ParameterError(
            "record_views: views are recorded in the run's folder; name one, "
            "Federation(.., out=FOLDER, record_views=True)"
        )


def check_watchers(progress: object, on_round: object) -> None:
    """Raise `moretta.errors.ParameterError` for a callback of rounds that cannot be called."""
    if progress is not None and not isinstance(progress, bool):
        _check_called("progress", progress, "true, false or a function", ("round", "rounds", "line"))
    if on_round is not None:
        _check_called("on_round", on_round, "a function that takes a finished round, or None", ("finished_round",))


def _check_called(name: str, function: object, expected: str, arguments: Sequence[str]) -> None:
    """Check that an argument of `train` takes these arguments."""
    if isinstance(function, type):
        raise ParameterError(f"{name}: expected {expected}; got the class {function.__name__}")
    if not callable(function):
        raise ParameterError(f"{name} = {shown(function)}: expected {expected}")
    try:
        taken = signature(function, follow_wrapped=False)  # the function that is called, not the one that it wraps
    except (TypeError, ValueError):  # a C function may have no signature
        return
    try:
        taken.bind(*arguments)
    except TypeError:
        raise ParameterError(
            f"{name}: expected {expected}, called as {name}({', '.join(arguments)}); got one that takes {taken!s:.120}"
        ) from None


def listed(silos: object) -> list[Silo]:
    """Return silos as a list. Raises `moretta.errors.ParameterError` for anything else."""
    if isinstance(silos, Silo | str | Mapping) or not hasattr(silos, "__iter__"):
        raise ParameterError(f'silos: expected a list such as [Silo("north", x, y), ..]; got {kind_of(silos)}')
    rows = list(silos)
    if not rows:
        raise ParameterError("a federation needs at least one silo; got none")
    for silo in rows:
        if not isinstance(silo, Silo):
            raise ParameterError(f"silos: expected each to be a Silo(name, x, y); got {kind_of(silo)}")
        if not isinstance(silo.name, str):
            raise ParameterError(f"silo name {shown(silo.name)}: expected text, 1 to 64 letters and digits")
        if silo.x.ndim < 2:
            raise ParameterError(
                f"silo `{silo.name}`: x: expected [rows, columns or more], got {list(silo.x.shape)}; for one column "
                "pass x[:, None]"
            )
    return rows


def names_in(keyword: str, value: object, table: Sequence[str] = ()) -> tuple[str, ...]:
    """Return names of columns or classes, from a list, an array or a frame's columns.

    Args:
        table: The names that a schema sets, if any.

    Raises:
        ParameterError: The value is anything but a list of words, or has other names or another order than the table's.
            The sentence names the keyword.
    """
    names = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ParameterError(f"{keyword}: expected a list of words, such as ['no', 'yes']; got {kind_of(value)}")
    if names and table and tuple(names) != tuple(table):
        raise ParameterError(
            f"{keyword}: expected the table's own, in its order ({', '.join(table):.200}); got "
            f"{', '.join(names):.200}: leave {keyword} out"
        )
    return tuple(names)


def task_of(silos: Sequence[Silo], loss: str) -> str:
    """Return "classification" or "regression", by the targets of all silos.

    Whole numbers and one-hot rows are classes, as in files (`moretta.data.rows.as_targets`), and so are soft labels
    under cross-entropy.

    Raises:
        ParameterError: Only some silos have classes; the sentence names two silos.
    """
    labelled = [silo for silo in silos if silo.y.size]
    if any(silo.y.ndim == 3 for silo in labelled):  # rows of masks have no class
        return "regression"
    if loss == "cross-entropy":
        return "classification"
    classes = [silo.name for silo in labelled if silo.y.dtype.kind == "b" or class_of(silo.y) is not None]
    numbers = [silo.name for silo in labelled if silo.name not in classes]
    if classes and numbers:
        raise ParameterError(
            f"the targets of silo `{classes[0]}` are classes and those of `{numbers[0]}` are numbers; expected the "
            'same of all: fix them, or set task = "classification" or "regression"'
        )
    return "regression" if numbers else "classification"


def columns_agreed(silos: Sequence[Silo], value: object, table: Schema | None) -> tuple[list[Silo], Sequence[str]]:
    """Return silos with the columns of their frames in one order, and the names in that order.

    The names are the table's, else the user's, else the first silo's. Arrays have no names, and stay unchanged.

    Args:
        value: The user's names, if any.

    Raises:
        ParameterError: Silos have other columns, or only some have names. The sentence names silo and column.
    """
    of_table = () if table is None else expansion_of(table).names
    names = names_in("feature_names", value, of_table)
    framed = [silo for silo in silos if silo.names]
    if not framed:
        _check_count(names, silos[0])
        return list(silos), of_table or names
    bare = next((silo for silo in silos if not silo.names and not silo.remote), None)
    if bare is not None:
        raise ParameterError(
            f"silo `{bare.name}` has rows without names of columns, but `{framed[0].name}` has a frame; pass all as "
            "frames, or all as arrays in one order"
        )
    columns, owner = (names, "feature_names") if names else (framed[0].names, f"`{framed[0].name}`")
    if of_table:
        columns, owner = of_table, "the table"
    return [_ordered(silo, columns, owner) for silo in silos], columns


def _check_count(names: Sequence[str], silo: Silo) -> None:
    """Check that there is one distinct name for each column of unnamed arrays."""
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise ParameterError(f"feature_names: {twice!r} appears twice; expected each name once: rename one")
    whole = silo.x.ndim == 2 and silo.layout is None and not silo.columns
    if names and whole and len(names) != silo.x.shape[1]:
        raise ParameterError(
            f"feature_names: expected {silo.x.shape[1]} names, one a column of silo `{silo.name}`; got {len(names)}"
        )


def _ordered(silo: Silo, columns: Sequence[str], owner: str) -> Silo:
    for name in sorted(set(silo.names) ^ set(columns)):
        lack = f"lacks the column {name!r}" if name in columns else f"has the column {name!r}"
        close = nearest(name, [column for column in (silo.names if name in columns else columns) if column != name])
        hint = f" (its {close!r}?)" if close and name in columns else ""
        other = "has" if name in columns else "has not"
        remedy = "give its read_table(frame, table).x" if owner == "the table" else "give all silos the same columns"
        raise ParameterError(f"silo `{silo.name}` {lack}{hint}, which {owner} {other}; {remedy}")
    if silo.names == tuple(columns):
        return silo
    order = [silo.names.index(name) for name in columns]
    held = None if silo.held_out is None else (silo.held_out[0][:, order], silo.held_out[1])
    return replace(silo, x=silo.x[:, order], names=tuple(columns), held_out=held)


def rows_of(part: str, rows: Any, names: Sequence[str], task: str, floats: bool) -> Any:
    """Return test or validation rows as arrays, from a pair (x, y) or a Dataset; None stays None.

    Args:
        part: The argument's name, for errors.
        names: The names of the silos' columns.
        task: As in `alike`.
        floats: Whether a silo's inputs are floats.
    """
    if rows is None:
        return None
    return _fitting(*python_rows.pair(rows, part, names, "the silos'"), task, floats)


def alike(silos: Sequence[Silo], task: str) -> list[Silo]:
    """Return silos with inputs and targets of one kind.

    Inputs that are floats at one silo are floats at all, because floats without a fraction are no tokens. Whole numbers
    are targets, not classes, if the task is regression.
    """
    floats, fitting = of_floats(silos), list[Silo]()
    for silo in silos:
        own = [(silo.x, silo.y), *([] if silo.held_out is None else [silo.held_out])]
        (x, y), *held = made = [_fitting(*rows, task, floats) for rows in own]
        # Unchanged silos are kept, because a new one would read all its rows and ids again.
        same = all(a is b for pair in zip(own, made, strict=True) for a, b in zip(*pair, strict=True))
        fitting.append(silo if silo.remote or same else replace(silo, x=x, y=y, held_out=held[0] if held else None))
    return fitting


def of_floats(silos: Sequence[Silo]) -> bool:
    """Return whether a local silo's inputs are floats."""
    return any(silo.x.dtype.kind == "f" for silo in silos if not silo.remote)


def _fitting(x: Any, y: NDArray[Any], task: str, floats: bool) -> tuple[Any, NDArray[Any]]:
    if floats and isinstance(x, np.ndarray) and x.dtype.kind in "iub":
        x = x.astype(np.float32)
    return x, y.astype(np.float64) if task == "regression" and y.dtype.kind in "iub" else y


def built(
    model: object, silos: Sequence[Silo], protocol: object, task: str, class_names: Sequence[str], table: Schema | None
) -> tuple[nn.Module, Made]:
    """Return a model, and how it is built if that is known.

    Args:
        model: A module; or a built-in name or "module:function"; or a mapping with that as "source" and further
            arguments, as [model] in a run file.

    Raises:
        ParameterError: The model is anything else, or has no trainable parameters.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ParameterError(f"model: expected a module, got the class {model.__name__}; call it: {model.__name__}(..)")
    if not isinstance(model, str | Mapping | nn.Module):
        raise ParameterError(
            f"model: expected a torch.nn.Module, a built-in name ({', '.join(catalogue.BUILT_IN)}) or "
            f'"module:function"; got {kind_of(model)}'
        )
    made = Made()
    if not isinstance(model, nn.Module):
        arguments: dict[str, Any] = {"source": model} if isinstance(model, str) else dict(model)
        source = str(arguments.pop("source", ""))
        arguments = catalogue.of_schema(source, arguments, table)
        made = Made(source, arguments)
        _check_plain(arguments)
        model = catalogue.build(
            made.source,
            inputs=row_shape(silos),
            outputs=_outputs(silos, getattr(protocol, "loss", ""), task, class_names),
            base=Path(),
            layout=layout_of(silos, False),
            agreed=OWN_CODE,
            **arguments,
        )
    else:
        check_weights(model)
    return model, made


def _check_plain(arguments: Mapping[str, Any]) -> None:
    """Check that a model's arguments can be saved, because the model is built from them again."""
    for name, value in arguments.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ParameterError(
                f"model: {name} = {shown(value)}: expected what a run file may have, text, numbers and lists of them; "
                "give another kind as a module that is built already"
            ) from None


def _outputs(silos: Sequence[Silo], loss: str, task: str, class_names: Sequence[str]) -> int:
    """Return the number of outputs of a built-in model, as for a run file."""
    targets: list[NDArray[np.generic]] = [silo.y for silo in silos if len(silo.y)]
    first = targets[0] if targets else np.empty(0)
    if first.ndim > 1:
        return int(first.shape[1])
    if task != "classification":
        return 1
    classes = max(len(class_names), 2, *(int(y.max()) + 1 for y in targets if y.dtype.kind in "iub"))
    return 1 if loss == "mse" and classes == 2 else classes
