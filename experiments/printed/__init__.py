"""The tables of the pages, declared: what stands in each row, by the records that it is made from.

A row is Markdown with figures in braces: `{RECORD[PLACE]:FORMAT}`, as `{baffle-mnist[K = 200, LeNet]:.2f}`; `+ - * /`,
brackets, `max`, `min` and `abs` may join several. RECORD is a file in experiments/*/results/, PLACE as in
`records_of_pages.py`. A paper's figures are those of the experiment's tables.toml, as `paper_of` reads them, or, of what
no experiment is compared with, constants; a table's `paper` says where they are printed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table of a page. head: its columns, joined by " | ". rows: the same. paper: what stands in brackets."""

    head: str
    rows: Sequence[str]
    paper: str = ""


def joined(*cells: object) -> str:
    """Return cells as a row."""
    return " | ".join(map(str, cells))


def paper_of(experiment: str) -> dict[str, tuple[str, ...]]:
    """Return what the paper prints in each row of an experiment's table, as text with its columns' digits."""
    of = _experiments()[experiment]
    digits = [figure.get("digits", 3) for figure in of["figures"]]
    return {row: tuple(map(_text, printed, cycle(digits))) for row, printed in of["printed"].items()}


PAPERS = Path(__file__).parent / "papers.toml"


@cache
def papers(path: Path = PAPERS) -> dict[str, dict[str, list[float]]]:
    """Return what the papers print: the rows of each table or section, by its name."""
    return dict(tomllib.loads(path.read_text(encoding="utf-8")))


def is_printed(figures: Sequence[float], paper: str = "") -> bool:
    """Return whether one row of a paper's table has all of these figures; of any paper whose name is not given."""
    tables = (rows for name, rows in papers().items() if name.startswith(paper.partition(",")[0]))
    return any(set(figures) <= set(row) for rows in tables for row in rows.values())


def _text(figure: float, digits: int) -> str:
    return str(figure) if isinstance(figure, int) else f"{figure:.{digits}f}"


@cache
def _experiments() -> dict[str, Any]:
    files = Path(__file__).parents[1].glob("*/tables.toml")
    return {name: one for file in files for name, one in tomllib.loads(file.read_text(encoding="utf-8")).items()}


def grid(
    record: str,
    printed: Mapping[str, Sequence[object | None]],
    columns: Sequence[str],
    form: str,
    between: str = ", ",
) -> list[str]:
    """Return the rows of a table whose cells are RECORD[ROW, COLUMN], the paper's figure of each in brackets, if any."""
    rows = []
    for row, paper in printed.items():
        cells = [f"{{{record}[{row}{between}{column}]:{form}}}" for column in columns]
        brackets = ["" if one is None else f" ({one})" for one in paper or [None] * len(columns)]
        rows.append(joined(row, *(cell + bracket for cell, bracket in zip(cells, brackets, strict=True))))
    return rows
