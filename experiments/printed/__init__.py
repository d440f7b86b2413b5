"""The tables of the pages, declared: what stands in each row, by the records that it is made from.

A row is Markdown with figures in braces: `{RECORD[PLACE]:FORMAT}`, as `{baffle-mnist[K = 200, LeNet]:.2f}`; `+ - * /`,
brackets, `max`, `min` and `abs` may join several. RECORD is a file in experiments/*/results/, PLACE as in
`records_of_pages.py`. A paper's figures are constants of the rows, and `paper` says where it prints them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of a page. head: its columns, joined by " | ". rows: the same. paper: what stands in brackets."""

    head: str
    rows: Sequence[str]
    paper: str = ""


def joined(*cells: object) -> str:
    """Return cells as a row."""
    return " | ".join(map(str, cells))


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
