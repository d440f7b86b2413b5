"""A classifier's classes for a terminal: a row a class, with where its rows went."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from moretta.report.folder import ClassTables
from moretta.report.table import plain

SHOWN = 20  # classes; the page has all
COUNTED_UP_TO = 8  # classes whose confusion fits beside them


def class_table(tables: ClassTables) -> Table:
    """Return the classes of one model, the first `SHOWN`: rows, precision, recall, F1, and the confusion of few."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    confusion = tables.confusion if len(tables.by_class) <= COUNTED_UP_TO else ()
    named = [f"as {one.name}" for one in tables.by_class] if confusion else []
    for name in ("Class", "Rows", "Precision", "Recall", "F1", *named):
        table.add_column(Text(name), justify="left" if name == "Class" else "right")
    for place, one in enumerate(tables.by_class[:SHOWN]):
        cells = [f"{one.rows:,}", plain(one.precision), plain(one.recall), plain(one.f1)]
        cells += [f"{count:,}" for count in confusion[place]] if confusion else []
        table.add_row(Text(one.name), *cells)
    if len(tables.by_class) > SHOWN:
        table.add_row(f"and {len(tables.by_class) - SHOWN} more in result.json")
    return table
