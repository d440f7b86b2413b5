"""Rows of several silos on one machine, each silo's in a file of its own, all read by one schema.

Where silos have rows of the same kind, test rows are drawn from all of them, from each in proportion and by class; a
group that is in several files is on one side in all. Where silos hold different columns of the same rows nothing is
held back, as the other holders would have to hold back the same rows: test rows are then a file of whole rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moretta.data.alignment.partner import Alignment
from moretta.data.assemble import Wish, from_table
from moretta.data.partition import Distributed
from moretta.data.rows import Dataset, SiloData
from moretta.data.silo import Silo, aligned
from moretta.data.split import cut
from moretta.data.tables.files import Format, read_columns
from moretta.data.tables.rows import TableRows, encode, expansion_of
from moretta.data.tables.schema import Schema
from moretta.errors import ParameterError


class TableFile(NamedTuple):
    """Where a silo's rows are, how a .csv file is written, and the file of `moretta align` that puts them in order."""

    source: str
    form: Format
    alignment: Path | None = None


def load_rows(files: Mapping[str, TableFile], table: Schema, wish: Wish, base: Path) -> tuple[Dataset, Distributed]:
    """Return the rows of silos by name, and who holds which. table: what the columns of all files mean.

    Relative paths start at `base`. Ids tell a file's own rows apart and are not compared between files; groups are.
    Raises `moretta.errors.ParameterError`, naming the silo, the file and the column.
    """
    if table.target is None:
        raise ParameterError('[data] schema: expected a column of kind "target", which the run learns to predict')
    read = {name: read_file(file, table, f"silo `{name}`", base) for name, file in files.items()}
    x, coded, y = (np.concatenate([getattr(rows, part) for rows in read.values()]) for part in ("x", "coded", "y"))
    groups = [rows.groups for rows in read.values() if rows.groups is not None]
    owners = np.repeat(list(read), [len(rows.x) for rows in read.values()])
    whole = TableRows(coded, x, y, None, np.concatenate(groups) if groups else None)
    dataset = from_table(whole, table, wish, domain=owners)
    return dataset, _dealt(dataset, list(files))


def load_columns(
    files: Mapping[str, TableFile], table: Schema, parts: Sequence[tuple[int, ...]], holders: Sequence[int], base: Path
) -> list[Silo]:
    """Return silos that hold different columns of the same rows, in the order of the grid: row part by row part.

    parts: the indices of each column part's inputs. holders: for each row part, the number of the part, from 0, that
    holds the labels; empty where all do. Raises `moretta.errors.ParameterError` as `load_rows` does.
    """
    silos = []
    for number, (name, file) in enumerate(files.items()):
        row, part = divmod(number, len(parts))
        labelled = not holders or holders[row] == part
        own = table_of_part(table, parts[part], labelled=labelled)
        rows = read_file(file, own, f"silo `{name}`", base, labelled=labelled)
        y = rows.y if table.classes else rows.y.astype(np.float32)
        silo = Silo(name, rows.x, y, f"row-{row + 1}", parts[part], rows.ids, groups=rows.groups)
        silos.append(silo if file.alignment is None else aligned(silo, Alignment.load(base / file.alignment)))
    return silos


def read_file(file: TableFile, table: Schema, where: str, base: Path, *, labelled: bool = True) -> TableRows:
    """Return a file's rows by the schema. where: whose it is, which begins the sentence of an error."""
    path = base / file.source
    return encode(
        read_columns(path, file.form, table.dropped), table, f"{where}: {path.name}", file.form, labelled=labelled
    )


def table_parts(table: Schema, columns: Sequence[Sequence[str | int]] | None, parts: int) -> list[tuple[int, ...]]:
    """Return the indices of each column part's inputs. columns: of each part by name; None cuts them into `parts`.

    All that a column becomes goes to one part. Raises `moretta.errors.ParameterError` for other columns than the
    schema's.
    """
    features, origins = list(table.features), expansion_of(table).origins
    named: Sequence[Sequence[str | int]] = columns or ()
    if columns is None:
        named = [[features[place] for place in places] for places in cut(np.arange(len(features)), parts, None)]
    flat = [str(name) for part in named for name in part]
    if sorted(flat) != sorted(features):
        raise ParameterError(
            f"[data] columns: expected each column of the schema that is an input in one part, by its name "
            f"({', '.join(features):.200}); got {', '.join(flat):.200}"
        )
    return [tuple(column for column, origin in enumerate(origins) if origin in part) for part in named]


def table_of_part(table: Schema, part: Sequence[int], *, labelled: bool) -> Schema:
    """Return the schema of who holds one column part. labelled: whether with the labels."""
    origins = expansion_of(table).origins
    return table.only([origins[column] for column in part], labelled=labelled)


def _dealt(dataset: Dataset, names: Sequence[str]) -> Distributed:
    """Return each file's training rows as a silo's, and the test and validation rows of all."""

    def owned(name: str, x: NDArray[Any], y: NDArray[Any], groups: NDArray[np.str_] | None = None) -> SiloData:
        return SiloData(name, x, y, dataset.feature_names, may_lack=dataset.may_lack, groups=groups)

    silos = []
    for name in names:
        mine = np.flatnonzero(dataset.domain == name)
        groups = None if dataset.groups is None else dataset.groups[mine]
        silos.append(owned(name, dataset.x_train[mine], dataset.y_train[mine], groups))
    test = owned("the test part", dataset.x_test, dataset.y_test)
    held = len(dataset.x_validation) > 0
    validation = owned("the validation part", dataset.x_validation, dataset.y_validation) if held else None
    return Distributed(tuple(silos), test, validation, dataset.feature_names)
