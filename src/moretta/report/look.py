"""The page of a look at rows before training (`moretta.data.look`): tables, and a bar for each count shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moretta.data.withholding import WITHHELD, few
from moretta.report import plots
from moretta.report.page import check_page, template, write_page

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

MOST_PICTURES = 120  # a page of more takes long to open
_BAR, _EDGE = 0.21, 0.75  # inches of a bar and of what is around them
_LABEL = 28  # characters of a cell's name


def write_look(told: Mapping[str, Any], name: str, out: Path) -> Path:
    """Write the page to `out`, whole or not at all, and return `out`. told: of `moretta.data.look.Look.told`.

    Raises ParameterError for a file that cannot be written or a name that ends in neither .html nor .htm, and
    MissingExtra without matplotlib or Jinja2.
    """
    check_page(out)
    write_page(out, look_page(told, name))
    return out


def look_page(told: Mapping[str, Any], name: str) -> str:
    """The page as text; the same counts give the same text."""
    columns: list[Mapping[str, Any]] = list(told["columns"])
    pictured = [one for one in (told["target"], *columns) if len(one["cells"]) > 1][:MOST_PICTURES]
    return template("look.html.j2").render(
        title=f"{name}: a look before training",
        told=told,
        columns=columns,
        by_silo=told["rows"].get("by_silo"),
        few=few(told["withhold"]),
        withheld=WITHHELD,
        figures=[(one, _figure(one, f"look-{place}")) for place, one in enumerate(pictured)],
        more=max(0, len(columns) + 1 - MOST_PICTURES),
        cells_of=cells_of,
    )


def cells_of(spread: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The cells of a column or of the targets with their names, that of absent values last."""
    found = [(str(cell["label"]), cell) for cell in spread["cells"]]
    return found if spread["absent"] is None else [*found, ("absent", spread["absent"])]


def _figure(spread: Mapping[str, Any], key: str) -> Markup:
    cells = [(label, cell["rows"]) for label, cell in cells_of(spread)]
    said = ", ".join(f"{label}: {rows}" for label, rows in cells)
    name = _title(spread)
    return plots.drawn(
        key, name, f"{name}. {said}.", lambda figure: _draw(figure, name, cells), _EDGE + _BAR * len(cells)
    )


def _title(spread: Mapping[str, Any]) -> str:
    unit = f" ({spread['unit']})" if spread.get("unit") else ""
    return f"{_cut(str(spread['name']), 60)}{unit}"


def _draw(figure: Figure, name: str, cells: Sequence[tuple[str, int | str]]) -> None:
    axes = figure.add_subplot()
    longest = max([rows for _, rows in cells if isinstance(rows, int)], default=1) or 1
    for place, (label, rows) in enumerate(cells):
        known = isinstance(rows, int)
        colour = plots.OTHER if label == "absent" else plots.COLOURS[5]
        axes.barh(place, rows if known else 0, height=0.72, color=colour)
        axes.annotate(
            f"{rows:,}" if known else str(rows),
            (rows if known else 0, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            style="normal" if known else "italic",
            color=plots.INK if known else plots.FAINT,
        )
    axes.set_title(name)
    axes.set_yticks(range(len(cells)), [_cut(label, _LABEL) for label, _ in cells])
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.2)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
