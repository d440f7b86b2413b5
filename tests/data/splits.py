"""Rows for the tests of this folder: a source as a run file has it, or a split of given arrays."""

from pathlib import Path
from typing import Any

from moretta.data import datasets, partition
from moretta.data.partition import Distributed
from moretta.data.rows import Rows, Split
from moretta.data.settings import Data
from moretta.data.tables.schema import Schema


def load(
    source: str, *, base: Path = Path(), seed: int = 0, schema: Schema | None = None, path: Any = None, **keys: Any
) -> Split:
    """Return a source's rows. keys: of [data], as a run file has them but for dashes."""
    place = {} if path is None else {"path": str(path)}
    return datasets.load(Data(source=source, **place, **keys), schema, seed=seed, base=base)


def distribute(source: Split, silos: int, how: Any = "iid", seed: int = 0, **keys: Any) -> Distributed:
    """Return a split over its silos. keys: as of `load`."""
    return partition.distribute(source, Data(source="rows.npz", silos=silos, partition=how, **keys), seed)


def split_of(
    name: str, task: Any, x_train: Any, y_train: Any, x_test: Any, y_test: Any, *,
    ids: Any = None, groups: Any = None, domain: Any = None,
    domain_test: Any = None, x_validation: Any = None, y_validation: Any = None, **about: Any
) -> Split:  # fmt: skip
    """Return a split of arrays. about: its further fields."""
    x, y = (x_train[:0], y_train[:0]) if x_validation is None else (x_validation, y_validation)
    train, test = Rows(x_train, y_train, ids, groups, domain), Rows(x_test, y_test, domain=domain_test)
    return Split(train, test, Rows(x, y), name, task, **about)
