"""What an alignment comes to: which own rows are shared, in which order; kept as a file beside the rows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moretta.data.alignment.ids import IdRules, ids_digest
from moretta.errors import ParameterError, RowsError

FORMAT = 1
KIND = "moretta alignment"


class Disclosed(NamedTuple):
    """What one exchange between two partners disclosed: lengths of lists, padding included, and rows in common."""

    listed: int
    listed_there: int
    common: int


class AlignedRows(NamedTuple):
    """Rows in the partners' order: inputs, targets (perhaps of no rows), normalised ids, and groups if there are."""

    x: NDArray[Any]
    y: NDArray[Any]
    ids: NDArray[np.str_]
    groups: NDArray[np.str_] | None


@dataclass(frozen=True)
class Alignment:
    """The rows that partners share, as one of them has them.

    rules: of the ids. order: int64[rows], its own row numbers from 0, in the order that all partners have. digest: of
    the exchange, the same at each partner. source: of its ids as they stood, in the file's order. steps: one for each
    partner that it aligned with. No id is in it, and no row number of anybody else.
    """

    rules: IdRules
    order: NDArray[np.int64]
    digest: bytes
    source: bytes
    steps: tuple[Disclosed, ...]

    def check(self, ids: Sequence[str] | NDArray[np.generic] | None, where: str) -> None:
        """Raise `moretta.errors.ParameterError` unless these are the ids of the rows that were aligned."""
        if ids is None:
            raise RowsError(f"{where}: an alignment is by the ids of the rows, and these have none; name the id column")
        if ids_digest(ids, where) != self.source:
            raise RowsError(
                f"{where}: the ids are not those that were aligned, so its row numbers mean other rows; align again, "
                "or restore the rows"
            )

    def normalised(self, ids: Sequence[str] | NDArray[np.generic] | None, where: str) -> NDArray[np.str_]:
        """Return the shared rows' ids in the partners' order, as all partners write them."""
        self.check(ids, where)
        written: NDArray[np.str_] = np.array(self.rules.normalised([] if ids is None else ids, where), dtype=np.str_)
        return written[self.order]

    def applied(
        self,
        x: NDArray[Any],
        y: NDArray[Any],
        ids: Sequence[str] | NDArray[np.generic] | None,
        groups: NDArray[np.str_] | None,
        where: str,
    ) -> AlignedRows:
        """Return the shared rows in the partners' order. Their ids are normalised, so that they equal the partners'.

        Raises `moretta.errors.ParameterError` for other rows than those that were aligned.
        """
        shared = self.normalised(ids, where)
        return AlignedRows(
            x[self.order],
            y[self.order] if len(y) else y,
            shared,
            None if groups is None else groups[self.order],
        )

    def save(self, path: Path) -> None:
        """Write it as JSON, for its owner alone (mode 0600). Raises `FileExistsError` where there is a file."""
        write_new(path, self.dump())

    def dump(self) -> bytes:
        """Return it as JSON."""
        told = {
            "format": FORMAT,
            "kind": KIND,
            "rules": asdict(self.rules),
            "rows": len(self.order),
            "digest": self.digest.hex(),
            "source": self.source.hex(),
            "steps": [one._asdict() for one in self.steps],
            "order": self.order.tolist(),
        }
        return json.dumps(told).encode()

    @classmethod
    def load(cls, path: Path) -> Alignment:
        """Read it. Raises `moretta.errors.ParameterError` for a file that holds none."""
        try:
            return cls._read(json.loads(path.read_text()))
        except (ParameterError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise ParameterError(f"{path}: expected an alignment as `moretta align` writes it; align again") from None

    @classmethod
    def _read(cls, told: Mapping[str, Any]) -> Alignment:
        order = np.array(told["order"], dtype=np.int64)
        if told["kind"] != KIND or told["format"] != FORMAT or order.ndim != 1 or len(order) != told["rows"]:
            raise ValueError
        if not len(order) or order.min() < 0 or len(np.unique(order)) < len(order):
            raise ValueError
        digest, source = bytes.fromhex(told["digest"]), bytes.fromhex(told["source"])
        if len(digest) != 32 or len(source) != 32:
            raise ValueError
        steps = tuple(Disclosed(**{name: int(step[name]) for name in Disclosed._fields}) for step in told["steps"])
        return cls(IdRules.read(told["rules"]), order, digest, source, steps)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that only its owner reads. Raises `FileExistsError` where there is one; nothing half-written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
    except OSError:
        path.unlink(missing_ok=True)
        raise
