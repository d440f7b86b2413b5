"""A silo: the owner of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moretta.errors import ParameterError


@dataclass(frozen=True, eq=False)
class Subjects:
    """Whom rows are about: str[rows], each row's id and group, None where there are none. Never shown or printed."""

    ids: NDArray[np.str_] | None = field(default=None, repr=False)
    groups: NDArray[np.str_] | None = field(default=None, repr=False)

    def named(self) -> Mapping[str, NDArray[np.str_] | None]:
        """Return both by what sentences call them."""
        return {"ids": self.ids, "groups": self.groups}


@dataclass(frozen=True)
class Silo:
    """A data owner: its name, inputs x [rows, ...], and targets y, classes int[rows] or numbers [rows, outputs].

    row, columns, ids: where data is split by column too (`CGD`). Silos of one row of the grid hold different columns of
    the same rows in the same order. columns: the indices of x's columns among all. ids: the person or thing that each
    row is about. y may be empty where another silo of the row holds the labels.
    remote: its rows are on another machine; x and y have no rows here and only show shapes and dtypes, and `labelled`
    says whether it has labels.
    held_out: inputs and targets, as x and y, that are not trained on; it scores models on them at the end.
    groups: str[rows], whom a row is about where one may have several rows, such as a patient's visits; rows of a group
    are never split between training and test. aligned: where columns are split, its owner knows that its rows are in
    the order of the other holders' of its row of the grid, without ids to compare.
    """

    name: str
    x: NDArray[np.generic]
    y: NDArray[np.generic]
    row: str = ""
    columns: tuple[int, ...] = ()
    ids: NDArray[np.str_] | None = None
    remote: bool = False
    labelled: bool = True
    held_out: tuple[NDArray[np.generic], NDArray[np.generic]] | None = None
    groups: NDArray[np.str_] | None = None
    aligned: bool = False

    @property
    def subjects(self) -> Subjects:
        """Whom its training rows are about."""
        return Subjects(self.ids, self.groups)

    @property
    def subject_ids(self) -> NDArray[np.str_] | None:
        """Whom its rows are about, one id a row: their ids, or where there are none their groups."""
        return self.groups if self.ids is None else self.ids

    @property
    def holds_labels(self) -> bool:
        """Whether it has the targets of its rows."""
        return self.labelled if self.remote else bool(len(self.y))


def in_order(silo: Silo, order: NDArray[np.int64] | None) -> Silo:
    """Return a silo with these of its rows in this order; None for all as they stand."""
    if order is None:
        return silo
    ids, groups = (None if one is None else one[order] for one in (silo.ids, silo.groups))
    y = silo.y[order] if len(silo.y) else silo.y
    return replace(silo, x=silo.x[order], y=y, ids=ids, groups=groups)


def rows_digest(silos: Sequence[Silo]) -> str:
    """Return a digest of all silos' rows and targets, by which an audit checks that it scores against the run's own."""
    found = hashlib.sha256()
    for silo in silos:
        for array in (silo.x, silo.y):
            found.update(f"{silo.name}:{array.dtype}{array.shape}:".encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def digests_by_silo(silos: Sequence[Silo]) -> dict[str, str]:
    """Return `rows_digest` of each silo that is here, by its name."""
    return {silo.name: rows_digest([silo]) for silo in silos if not silo.remote}


def check_least(silo: Silo, least: int | None) -> None:
    """Raise `moretta.errors.ParameterError` where a silo has fewer rows than agreed beforehand."""
    if least is not None and len(silo.x) < least:
        raise ParameterError(
            f"silo `{silo.name}`: expected {least} rows or more ([data] least-rows), as the privacy that the run "
            f"states rests on it; got {len(silo.x)}"
        )


def row_shape(silos: Sequence[Silo]) -> tuple[int, ...]:
    """Return the shape of a whole sample: a silo's own, or that of all columns of its row of the grid."""
    first = silos[0]
    if not first.columns:
        return first.x.shape[1:]
    return (sum(len(silo.columns) for silo in silos if silo.row == first.row),)
