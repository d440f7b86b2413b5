"""A silo: the owner of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.lazy_rows import blocks, taken
from moretta.contract.wording import kind_of, names_keywords
from moretta.data import python_rows
from moretta.data.layout import SampleLayout, is_mask, pack, packed_as
from moretta.data.rows import Subjects
from moretta.data.split import split
from moretta.data.tables.preparation import ColumnRules
from moretta.data.tables.rows import rules_of
from moretta.data.tables.schema import Schema
from moretta.errors import ParameterError, RowsError

if TYPE_CHECKING:  # alignments need cryptography
    from moretta.data.alignment.partner import Alignment


@names_keywords()
@dataclass(frozen=True)
class Silo:
    """Hold one data owner's rows: inputs x [rows, ...] and targets y.

    Args:
        name: 1 to 64 letters, digits, dots, dashes and underscores.
        x: Inputs [rows, ...]: an array, list, tensor, frame of columns, or Dataset of samples with their targets (then
            without y). A mapping holds arrays, [rows, ...] each, that a model takes by keyword (`moretta.data.layout`).
        y: Targets: classes int[rows], or numbers [rows, outputs]. Masks are int[rows, ...], a class at each position,
            negative where it does not count; or float[rows, ..., 2], a class and its weight. Empty where another silo
            of the row holds the labels.
        row: The row of the grid, where data is split by column too (`CGD`). Silos of one row hold different columns of
            the same rows, in the same order.
        columns: The indices of x's columns among all.
        ids: str[rows], the person or thing that each row is about.
        remote: Rows are on another machine: x and y have no rows and only show shapes and dtypes.
        labelled: Whether a remote silo has labels.
        held_out: Inputs and targets, as x and y, that are not trained on; the silo scores the final model on them.
        groups: str[rows], whom a row is about where one may have several, such as a patient's visits. Rows of a group
            never split between training and test.
        aligned: Where columns are split, the owner knows that rows are in the order of the other holders, without ids
            to compare.
        layout: How x packs the arrays of a mapping; a mapping sets it.
        raw_ids: Ids as the owner writes them, where `ids` are normalised for all holders of the row.
        names: The names of x's columns; a frame brings its own.
        validation: Rows from `holding_back`, on which the silo scores each round's model.
        fit: A function that trains at this silo instead of the protocol's epochs and `fit`
            (`moretta.protocols.fedsgd.own_loop`).

    Arrays of every kind are kept as NumPy arrays (`moretta.data.python_rows`).

    Raises:
        ParameterError: The arrays do not fit.
    """

    name: str
    x: NDArray[np.generic] = field(repr=False)
    y: NDArray[np.generic] = field(default=None, repr=False)  # type: ignore[arg-type]  # a Dataset has its own
    row: str = ""
    columns: tuple[int, ...] = ()
    ids: NDArray[np.str_] | None = field(default=None, repr=False)
    remote: bool = False
    labelled: bool = True
    held_out: tuple[NDArray[np.generic], NDArray[np.generic]] | None = field(default=None, repr=False)
    groups: NDArray[np.str_] | None = field(default=None, repr=False)
    aligned: bool = False
    layout: SampleLayout | None = None
    raw_ids: NDArray[np.str_] | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()
    validation: tuple[NDArray[np.generic], NDArray[np.generic]] | None = field(default=None, repr=False)
    fit: Callable[..., Any] | None = field(default=None, repr=False)

    if TYPE_CHECKING:  # the generated one's arguments: x may be a mapping too, and is an array ever after

        def __init__(
            self,
            name: str,
            x: Any,
            y: Any = None,
            row: str = "",
            columns: tuple[int, ...] = (),
            ids: NDArray[np.str_] | None = None,
            remote: bool = False,
            labelled: bool = True,
            held_out: Any = None,
            groups: NDArray[np.str_] | None = None,
            aligned: bool = False,
            layout: SampleLayout | None = None,
            raw_ids: NDArray[np.str_] | None = None,
            names: tuple[str, ...] = (),
            validation: Any = None,
            fit: Callable[..., Any] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        where = f"silo `{self.name}`"
        if self.fit is not None and not callable(self.fit):
            raise ParameterError(f"{where}: fit: expected a function of model, x, y and round; got {kind_of(self.fit)}")
        held = dict[str, Any](names=python_rows.names_of(self.x) or self.names, layout=self.layout)
        held["x"], held["y"] = python_rows.rows_and_targets(self.x, self.y, where, ids=self.ids, groups=self.groups)
        if isinstance(held["x"], Mapping):
            held["x"], held["layout"] = pack(held["x"], where)
        for name in ("ids", "groups"):
            if (whom := getattr(self, name)) is not None:
                held[name] = python_rows.subjects(whom, len(held["x"]), f"{where}: {name}")
        if self.held_out is not None:
            x, y = python_rows.pair(self.held_out, f"{where}: held_out", held["names"], "the silo")
            held["held_out"] = packed_as(x, held["layout"], f"{where}: held_out"), y
        for name, value in held.items():
            object.__setattr__(self, name, value)

    @property
    def subjects(self) -> Subjects:
        """Return the persons or things of the training rows, as the owner writes them."""
        return Subjects(self.ids if self.raw_ids is None else self.raw_ids, self.groups)

    @property
    def subject_ids(self) -> NDArray[np.str_] | None:
        """Return one id per row: the rows' ids, else their groups."""
        return self.groups if self.ids is None else self.ids

    @property
    def holds_labels(self) -> bool:
        """Return whether the silo has the targets of its rows."""
        return self.labelled if self.remote else bool(len(self.y))


def in_order(silo: Silo, order: NDArray[np.int64] | None) -> Silo:
    """Return a silo with these rows in this order; None for all, unchanged."""
    if order is None:
        return silo
    ids, groups, raw = (None if values is None else values[order] for values in (silo.ids, silo.groups, silo.raw_ids))
    y = silo.y[order] if len(silo.y) else silo.y
    return replace(silo, x=taken(silo.x, order), y=y, ids=ids, groups=groups, raw_ids=raw)


def aligned(silo: Silo, alignment: Alignment) -> Silo:
    """Return the rows that a silo shares with its partners, in their order, with normalised ids.

    Raises:
        ParameterError: The rows are not those that were aligned.
    """
    own = silo.subject_ids
    shared = alignment.normalised(own, f"silo `{silo.name}`")
    raw = None if own is None else own[alignment.order]
    return replace(in_order(silo, alignment.order), ids=shared, raw_ids=raw)


def rows_digest(silos: Sequence[Silo]) -> str:
    """Return a digest of all silos' rows and targets, by which an audit compares its rows with the run's."""
    return _digest((silo.name, (silo.x, silo.y)) for silo in silos)


def _digest(parts: Iterable[tuple[str, tuple[NDArray[np.generic], NDArray[np.generic]]]]) -> str:
    digest = hashlib.sha256()
    for name, arrays in parts:
        for array in arrays:
            digest.update(f"{name}:{array.dtype}{array.shape}:".encode())
            for block in blocks(array):
                digest.update(np.ascontiguousarray(block).data)
    return digest.hexdigest()


TEST, HELD_OUT = "the test part", "the silos' parts for scores"  # a silo's name has no blank


def digests_of(silos: Sequence[Silo], test: Any = None, validation: Any = None) -> dict[str, str]:
    """Return digests of each local silo's rows, by its name, and of the parts outside training, (x, y) or None."""
    local = [silo for silo in silos if not silo.remote]
    parts = {
        TEST: [("", test)],
        "the validation part": [("", validation), *((silo.name, silo.validation) for silo in local)],
        HELD_OUT: [(silo.name, silo.held_out) for silo in local],
    }
    known = {part: [(name, rows) for name, rows in some if rows is not None] for part, some in parts.items()}
    own = {silo.name: rows_digest([silo]) for silo in local}
    return own | {part: _digest(some) for part, some in known.items() if some}


def check_least(silo: Silo, least: int | None, *, grouped: bool = False) -> None:
    """Raise RowsError if a silo has fewer rows, or groups of rows, than agreed beforehand.

    Args:
        least: None checks nothing.
        grouped: Whether groups count; a silo without groups is refused.
    """
    count, what = (len(np.unique(groups_of(silo))), "groups") if grouped else (len(silo.x), "rows")
    if least is not None and count < least:
        raise RowsError(
            f"silo `{silo.name}`: expected {least} {what} or more ([data] least-rows), on which the run's stated "
            f"privacy depends; got {count}"
        )


def groups_of(silo: Silo) -> NDArray[np.str_]:
    """Return the groups of a silo's rows. Raises `moretta.errors.RowsError` for a silo without groups."""
    if silo.groups is None:
        raise RowsError(
            f'silo `{silo.name}`: its rows have no groups, which dp-unit = "group" needs; add them (kind = "group" in '
            'the schema, group-column, or Silo(groups=..)), or set dp-unit = "row"'
        )
    return silo.groups


def layout_of(silos: Sequence[Silo], standardise: bool | Sequence[str], missing: str = "error") -> SampleLayout | None:
    """Return the layout of silos' samples, with the arrays to standardise; None for samples of one array.

    Args:
        standardise: The names of these arrays. True takes those of numbers in one axis that are not masks by the silos'
            rows.
        missing: Must be "error" for samples of several arrays.

    Raises:
        ParameterError: Silos have different arrays, or a setting needs samples of one array.
    """
    first = silos[0]
    for silo in silos:
        if (silo.layout is None) != (first.layout is None):
            plain, several = (first, silo) if first.layout is None else (silo, first)
            raise ParameterError(
                f"silo `{plain.name}` has one array a sample, but `{several.name}` has several by name; expected the "
                "same at all silos"
            )
        if silo.layout is not None and first.layout is not None:
            silo.layout.check_same(first.layout, f"silo `{silo.name}`", f"silo `{first.name}`")
            if silo.columns:
                raise ParameterError(f"silo `{silo.name}`: columns of samples of several arrays cannot be split")
    named = not isinstance(standardise, bool)
    if first.layout is None:
        if named and standardise:
            raise ParameterError("standardise names arrays, and a sample is one array; set true or false")
        return None
    if missing != "error":
        raise ParameterError("missing needs samples of one array, got several; fill in absent values beforehand")
    if standardise is True and any(silo.remote for silo in silos):
        raise ParameterError(
            "standardise: rows are on other machines, so nobody sees which arrays are masks of 0 and 1; list the "
            "arrays to standardise"
        )
    if isinstance(standardise, bool):
        places = first.layout.places
        columns = [array.name for array in first.layout.arrays if standardise and array.may_be_standardised]
        standardise = [name for name in columns if not all(is_mask(silo.x[:, places[name]]) for silo in silos)]
    return first.layout.standardising(standardise)


def rules_of_columns(
    silos: Sequence[Silo],
    layout: SampleLayout | None,
    table: Schema | None,
    column_rules: ColumnRules | None,
    *,
    standardise: bool,
    missing: str,
) -> ColumnRules:
    """Return how input columns are prepared; tokens stay unchanged.

    Args:
        column_rules: Rules from elsewhere. None takes the table's, or without a table the same for all columns.

    Raises:
        ParameterError: The table has other columns than the silos.
    """
    columns = row_shape(silos)[-1] if silos[0].x.dtype.kind == "f" else 0
    if layout is not None:
        rules = ColumnRules.alike(columns)
        rules.scaled[layout.standardised] = True
        return rules
    if column_rules is None and table is not None and table.features:
        column_rules = rules_of(table)
    if column_rules is None:
        return ColumnRules.alike(columns, scaled=standardise, fill="none" if missing == "error" else "mean")
    if column_rules.columns != columns:
        raise ParameterError(
            f"the table has {column_rules.columns} input columns, but the silos' rows have {columns}; expected the "
            "same number"
        )
    return replace(column_rules, scaled=np.full(columns, standardise))


def row_shape(silos: Sequence[Silo]) -> tuple[int, ...]:
    """Return the shape of a whole sample: a silo's own, or that of all columns of its row of the grid."""
    first = silos[0]
    if not first.columns:
        return first.x.shape[1:]
    return (sum(len(silo.columns) for silo in silos if silo.row == first.row),)


def holding_back(silo: Silo, fraction: float, key: str, seed: int = 0, part: str = "held_out") -> Silo:
    """Return a silo that holds back a part of its rows: the same in all runs, so that no run trains on them.

    Whole groups are held back; without groups, all rows of an id.

    Args:
        fraction: The part to hold back, 0 to 1; 0 returns the silo unchanged.
        key: The fraction's key in [data], for errors.
        seed: Draws the rows.
        part: The silo's field for them.

    Raises:
        ParameterError: The silo has only some columns of its rows.
    """
    if not fraction:
        return silo
    if silo.columns:
        raise ParameterError(
            f"silo `{silo.name}`: [data] {key} would hold back other rows than the other holders of its row do; remove "
            "it"
        )
    together = Subjects(silo.ids, silo.groups).whom
    held, kept = split(silo.y, (fraction,), seed, f"silo `{silo.name}`: [data] {key}", together)
    rows: dict[str, Any] = {part: (taken(silo.x, held), silo.y[held])}
    return replace(in_order(silo, kept), **rows)
