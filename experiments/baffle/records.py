"""What the scripts beside this file share: what they measured, as a table to read and one file of JSON to keep."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.data.images.sets import load_images, scaled
from moretta.errors import MorettaError, ParameterError

sys.path.append(str(Path(__file__).resolve().parents[1]))
from provenance import provenance
from reproduction import as_json

FORMAT = 1
SEED = 1


@dataclass(frozen=True)
class Row:
    """One line of a table: ours, a figure a column, and the paper's, where it printed some."""

    row: str
    ours: Sequence[float | None]
    paper: Sequence[float | None] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Record:
    """A table that grows: `add` keeps it in OUT/NAME.json after every row."""

    path: Path
    title: str
    columns: Sequence[str]
    settings: dict[str, Any]
    notes: Sequence[str] = ()
    rows: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def add(self, row: Row) -> None:
        """Add a row, keep all, and say so on stderr."""
        self.rows.append(row)
        told = {"format": FORMAT, "name": self.path.stem, "title": self.title, "columns": list(self.columns)}
        told |= {"rows": [asdict(one) for one in self.rows], "why_they_differ": list(self.notes)}
        told |= {"settings": self.settings, "wall_seconds": round(time.perf_counter() - self.began, 1)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(as_json(told | provenance()), encoding="utf-8")
        print(f"{row.row}: {_cells(row)}", file=sys.stderr, flush=True)

    def printed(self) -> str:
        """Return the table as text; in brackets the paper's figures."""
        heads = "  ".join(self.columns)
        return "\n".join([f"{self.title}", f"  ({heads})", *(f"  {row.row}: {_cells(row)}" for row in self.rows)])


def _cells(row: Row) -> str:
    cells = []
    for number, value in enumerate(row.ours):
        text = "-" if value is None else f"{value:.4g}"
        paper = row.paper[number] if row.paper else None
        cells.append(text if paper is None else f"{text} ({paper:g})")
    return "  ".join(cells)


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all scripts have."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--data", type=Path, default=os.environ.get("MORETTA_DATA"), metavar="DIR", help="the data sets")
    found.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="runs/reproduce by default")
    found.add_argument("--quick", action="store_true", help="in a minute or two, at smaller sizes")
    return found


def run(measure: Callable[[argparse.Namespace], Record], given: argparse.Namespace) -> int:
    """Measure and print; an error is a sentence."""
    try:
        print(measure(given).printed())
    except MorettaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def name_of(given: argparse.Namespace, name: str) -> Path:
    """Return where a script keeps its results."""
    return Path(given.out) / f"{name}{'-quick' if given.quick else ''}.json"


def images(given: argparse.Namespace, source: str, rows: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return so many training images of a data set, from 0 to 1, drawn from the seed, and their classes."""
    if given.data is None or not (given.data / source).exists():
        raise ParameterError(f"expected --data DIR, or the variable MORETTA_DATA, with {source} in that folder")
    found = load_images(source, given.data / source)
    chosen = np.sort(np.random.default_rng(SEED).permutation(len(found.x))[:rows])
    return scaled(found.x[chosen]), found.y[chosen].astype(np.int64)
