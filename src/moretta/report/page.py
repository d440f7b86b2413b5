"""One HTML page for one run or several: self-contained, without scripts, for a screen or for paper.

The page loads nothing, and its content security policy forbids loading. Names, silos and settings in a run folder are
not trusted: the templates beside this file escape all text.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moretta.contract.wording import enumerated
from moretta.data.look import WITHHELD, few
from moretta.engines.files import check_ending, write_atomically
from moretta.errors import MissingExtra, ParameterError
from moretta.report import audit, plots
from moretta.report.folder import TEST_ROWS, RunRecord, read_run
from moretta.report.statements import (
    Statement,
    epsilon_note,
    insecure_runs,
    privacy_statements,
    reading_notes,
    remarks,
    summary,
    title,
    verdicts,
)
from moretta.report.sweep import Sweep
from moretta.report.table import (
    COSTS,
    MISSING,
    OverSeeds,
    by_silo,
    calibration,
    classes,
    comparison,
    labels,
    meanings,
    separate,
    spread,
    unlike_rows,
    versions,
)

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup
    from matplotlib.figure import Figure


SIGNATURES = ".signatures.json"  # replaces the ending of a signed dossier's file


def write_report(
    folders: Sequence[Path],
    out: Path,
    differences: Mapping[str, float] | None = None,
    spreads: Sequence[OverSeeds] = (),
    sweep: Sweep | None = None,
) -> Path:
    """Write the page about these run folders to `out`, whole or not at all, and return `out`.

    Args:
        folders: Of the runs.
        out: The page, .html or .htm.
        differences: As in `moretta.report.table.comparison`.
        spreads: For runs from several seeds; the folders are those of the first seed.
        sweep: The runs among which one was chosen.

    Raises:
        ParameterError: A folder is unreadable, or `out` has another ending or cannot be written; then it is unchanged.
        MissingExtra: matplotlib or Jinja2 is not installed.
    """
    check_page(out)
    if not folders:
        raise ParameterError("A report needs at least one run folder.")
    written = page([read_run(folder) for folder in folders], differences, spreads, sweep)
    write_page(out, written, 0o600 if "<img " in written else 0o644)  # pictures may show silos' own rows
    return out


def check_page(out: Path) -> None:
    """Raise `moretta.errors.ParameterError` for a name that is not a page's, or is a signed dossier's."""
    check_ending(out, ".html", ".htm")  # prevents overwriting a table or a run file
    signatures = out.with_suffix(SIGNATURES)
    if signatures.exists():
        raise ParameterError(f"{out}: {signatures.name} beside it signs a dossier of that name; name another file")


def write_page(out: Path, written: str, mode: int = 0o644) -> None:
    """Write a page to `out`, whole or not at all. Raises ParameterError if the file cannot be written."""
    write_files({out: written.encode("utf-8", "replace")}, out, "report", mode)  # a folder's name may not be UTF-8


def write_files(files: Mapping[Path, bytes], page: Path, what: str, mode: int = 0o644) -> None:
    """Write a page and the files beside it, each whole or not at all.

    Args:
        what: The kind of the page, for errors.

    Raises:
        ParameterError: A file cannot be written.
    """
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        for file, data in files.items():
            write_atomically(file, data, mode)
    except OSError as error:
        sentence = f"the {what} cannot be written to {page}: {error.strerror}; name another file by --out"
        raise ParameterError(sentence) from error


def page(
    records: Sequence[RunRecord],
    differences: Mapping[str, float] | None = None,
    spreads: Sequence[OverSeeds] = (),
    sweep: Sweep | None = None,
) -> str:
    """Return the page as text; the same records give the same text. Other arguments: as in `write_report`."""
    names = labels(records)
    pictures = [list(audit.pictures(record)) for record in records]
    runs = list(zip(names, records, pictures, strict=True))
    return template("page.html.j2").render(
        audit=audit,
        labels=list(names),
        records=records,
        runs=runs,
        pictured=any(images for group in pictures for *_, images in group),
        title=title(records),
        insecure=insecure_runs(records),
        summary=summary(records),
        verdicts=verdicts(records, brief=len(records) > 1, spreads=spreads),
        remarks=remarks(records) if len(records) > 1 else (),
        epsilons=[(name, note) for name, record in zip(names, records, strict=True) if (note := epsilon_note(record))],
        classified=[
            (label, tables, classes(tables), calibration(tables))
            for label, record, _ in runs
            if (tables := record.test.classes) is not None
        ],
        warnings=[
            *filter(None, [unlike_rows(records)]),
            *(w if len(runs) == 1 else f"{name}: {w}" for name, record, _ in runs for w in record.warnings),
        ],
        dropped=sum(len(record.dropped) for record in records),
        audited=any(record.audit is not None for record in records),
        test_rows=TEST_ROWS,
        spreads=spreads,
        sweep=sweep,
        spread=spread(spreads) if spreads else None,
        **_results(records, differences),
        **_figures(records),
        **_privacy(records),
        **_settings(records),
    )


def template(name: str) -> Template:
    """Return a template beside this file. Raises MissingExtra without Jinja2."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise MissingExtra('The page of a report needs Jinja2: pip install "moretta[torch]".') from None
    templates = Environment(
        loader=PackageLoader("moretta.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "plain_json": partial(json.dumps, ensure_ascii=False),
        "power": _power,
        "thousands": "{:,}".format,
        "unbroken": lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%"),
    }
    templates.globals["zip"] = zip
    return templates.get_template(name)


def _power(value: str) -> tuple[str, str]:
    """Return a number's digits and power of 10, with true minus signs: 3.2 and −7 for 3.2e-07. Other text stays."""
    match = re.fullmatch(r"(-?[\d.]+)(?:e([+-]\d+))?", value)
    if match is None:
        return value, ""
    power = str(int(match[2])) if match[2] else ""
    return match[1].replace("-", "−"), power.replace("-", "−")


def _results(records: Sequence[RunRecord], differences: Mapping[str, float] | None) -> dict[str, Any]:
    """Return scores and costs of runs: a comparison in groups of rows, silos, and attacks side by side if any."""
    table, costs = separate(comparison(records, differences), COSTS, len(records))
    audited = [(record.audit, audit.costs(record)) for record in records]
    side_by_side = len(records) > 1 and any(leaks is not None for leaks, _ in audited)
    return {
        "comparison": table,
        "costs": costs,
        "scales": meanings(table.rows),
        "missing": MISSING if any(MISSING in row.cells for row in (*table.rows, *costs.rows)) else "",
        "silos": by_silo(records),
        "defences": [
            (label, costs, [audit.leak(leaks, roles) for roles in audit.GROUPS.values()])
            for label, (leaks, costs) in zip(labels(records), audited, strict=True)
            if side_by_side
        ],
    }


def _figures(records: Sequence[RunRecord]) -> dict[str, Any]:
    return {
        **plots.figures(records),
        "window": plots.smoothing(records),
        "several_losses": len({(str(record.setting("protocol", "loss")), record.scales_targets) for record in records})
        > 1,
        "score_title": plots.score_of(records)[1],
    }


def _privacy(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return a table for each set of sentences; runs of one protocol usually share theirs."""
    shared: dict[tuple[tuple[Statement, ...], tuple[str, ...]], list[str]] = {}
    for label, record in zip(labels(records), records, strict=True):
        shared.setdefault((privacy_statements(record), reading_notes(record)), []).append(label)
    return {
        "privacy": [
            (
                enumerated(names),
                [(role, list(group)) for role, group in groupby(statements, key=lambda statement: statement.role)],
            )
            for (statements, _), names in shared.items()
        ],
        "notes": dict.fromkeys(note for _, notes in shared for note in notes),
    }


def _settings(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the facts and settings of runs, their programs, and the commands that run them again."""
    stated = []
    for label, record in zip(labels(records), records, strict=True):
        groups: dict[str, Mapping[str, object]] = {"facts the run states": record.facts} if record.facts else {}
        groups |= {f"[{section}]": values for section, values in record.settings.items() if values}
        if groups:
            stated.append((label, record, groups))
    return {"settings": stated, "versions": versions(records), "commands": list(_commands(records))}


def _commands(records: Sequence[RunRecord]) -> Iterable[str]:
    folders = [shlex.quote(record.folder.name or ".") for record in records]
    for folder, record in zip(folders, records, strict=True):
        command = "serve" if record.setting("engine", "name") == "flare" else "train"
        yield f"moretta {command} {folder}/run.toml --out {folder}-again"
    yield f"moretta report {' '.join(folders)} --out report.html"


MOST_PICTURES = 120  # a page with more opens slowly
_BAR, _EDGE = 0.21, 0.75  # inches of a bar and of the margins
_LABEL = 28  # characters of a cell's name


def write_look(look: Mapping[str, Any], name: str, out: Path) -> Path:
    """Write the page of a look to `out`, whole or not at all, and return `out`.

    Args:
        look: The result of `Look.plain`.

    Raises:
        ParameterError: The file cannot be written, or its name ends in neither .html nor .htm.
        MissingExtra: matplotlib or Jinja2 is not installed.
    """
    check_page(out)
    write_page(out, look_page(look, name))
    return out


def look_page(look: Mapping[str, Any], name: str) -> str:
    """Return the page as text; the same counts give the same text."""
    columns: list[Mapping[str, Any]] = list(look["columns"])
    pictured = [spread for spread in (look["target"], *columns) if len(spread["cells"]) > 1][:MOST_PICTURES]
    return template("look.html.j2").render(
        title=f"{name}: a look before training",
        look=look,
        columns=columns,
        by_silo=look["rows"].get("by_silo"),
        few=few(look["withhold"]),
        withheld=WITHHELD,
        figures=[(spread, _figure(spread, f"look-{place}")) for place, spread in enumerate(pictured)],
        more=max(0, len(columns) + 1 - MOST_PICTURES),
        cells_of=cells_of,
    )


def cells_of(spread: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the cells of a column or of the targets with their names, absent values last."""
    cells = [(str(cell["label"]), cell) for cell in spread["cells"]]
    return cells if spread["absent"] is None else [*cells, ("absent", spread["absent"])]


def _figure(spread: Mapping[str, Any], key: str) -> Markup:
    cells = [(label, cell["rows"]) for label, cell in cells_of(spread)]
    name = _cut(str(spread["name"]), 60) + (f" ({spread['unit']})" if spread.get("unit") else "")
    caption = f"{name}. {', '.join(f'{label}: {rows}' for label, rows in cells)}."
    return plots.drawn(key, name, caption, lambda figure: _draw(figure, name, cells), _EDGE + _BAR * len(cells))


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
