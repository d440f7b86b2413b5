"""Write the tables of the pages from the records of experiments, and hold figures of their sentences to the same.

    python experiments/tables.py            rewrites what stands between <!-- table NAME --> and <!-- end of NAME -->
    python experiments/tables.py --check    writes nothing; exits 1, and says where, if a page and the records differ

Tables are declared in experiments/printed/. In a sentence, a figure is a number with a point, or one before a word such
as "points" or "MiB". Each must stand in a table or a command of its section, or in a comment of that section:

    <!-- figures
    3.6: baffle-table-1-mnist-quick[K = 100, LeNet] - baffle-table-1-mnist-quick[w/o EMA, LeNet]
    2.2: paper
    0.03: set
    -->

Before the colon stands the figure as the sentences have it, after it how it follows from records, rounded to the digits
that it has; `< X` and `> X` where the sentence says "less than" or "more than" it. `paper` is a figure of a paper or of
its authors' code, which stands in `printed/papers.toml`; so does each number with a point in an expression. `set` is a
figure that was chosen, or that a test or a formula holds; it is not checked.

The check also compares each record with `records.sha256`, the rows of each record with its cells, and the papers'
figures of experiments, records and tables with `printed/papers.toml`. Without --check the digests are written anew.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import play
from printed import Table, baffle, cgd, is_printed, models, paired, pbpfl
from records_of_pages import HERE, Record, Records, UnknownPlace, alike
from reproduction import find

REPRODUCED = (
    "reproduction-pbpfl.md",
    "reproduction-cgd.md",
    "reproduction-cgd-baselines.md",
    "reproduction-baffle.md",
    "reproduction-baffle-blocks.md",
    "reproduction-baffle-theory.md",
    "reproduction-baffle-choices.md",
)
PROTOCOLS = ("pbpfl.md", "cgd.md", "cgd-settings.md", "baffle.md", "baffle-settings.md", "threats-baffle.md")
PAGES = ("reproduction.md", *REPRODUCED, *PROTOCOLS, "cgd-leaks.md", "models-measured.md")
TABLES: dict[str, Table] = pbpfl.TABLES | cgd.TABLES | baffle.TABLES | paired.TABLES | models.TABLES
PLAN = "plan"
DIGESTS = "records.sha256"
MARK, ONE_PLAY = " †", " (one run)"
UNPLAYED, FAILED = "not run", "failed"

REFERENCE = re.compile(r"([a-z][\w-]*)\[([^\[\]{}]+)\]")
BLOCK = re.compile(r"^( *)<!-- table (\S+) -->\n.*?<!-- end of \2 -->", re.DOTALL | re.MULTILINE)
CONSTANT = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")
NOTES = re.compile(r"<!-- figures\n(.*?)-->", re.DOTALL)
UNITS = "points?|per cent|%|MiB|MB|kB|times|seconds|minutes|hours"
BEFORE_UNIT = rf"(?=(?: to \d[\d,.]*)? (?:{UNITS})(?!\w))"
FIGURE = re.compile(rf"(?<![\w.,/^-])\d[\d,]*(?:\.\d+(?:e-?\d+)?|e-?\d+|{BEFORE_UNIT})(?![\w.]*\d)")
PLACES = re.compile(
    r"(?:Theorem|[Ss]ection|Table|Eq\.|PyTorch|Runtime|Appendix|App\.) [\dA-Z][\d.]*(?:(?:,| and| to) \d[\d.]*)*"
    "|95 % interval"
)
NOT_SENTENCES = re.compile(r"`[^`]*`|\]\([^)]*\)|^ *\|.*$|^    .*$|<!--(?:.|\n)*?-->", re.MULTILINE)


def evaluated(text: str, records: Records) -> float | None:
    """Return what an expression of references comes to, None where one of them was not run."""
    values = {match[0]: records.value(match[1], match[2]) for match in REFERENCE.finditer(text)}
    if None in values.values():
        return None
    names = {f"_{number}": value for number, value in enumerate(values.values())}
    for name, reference in zip(names, values, strict=True):
        text = text.replace(reference, name)
    if not re.fullmatch(r"(?:_?\d+(?:\.\d+)?(?:e-?\d+)?|max|min|abs|[-+*/(), ])+", text):
        raise UnknownPlace(f"{text}: expected RECORD[PLACE], numbers, + - * / and max, min, abs")
    return float(eval(text, {"__builtins__": {}, "max": max, "min": min, "abs": abs}, names))  # our own


def cells(row: str, records: Records, mark: str = "") -> str:
    """Return a declared row with the figures of records in the place of braces.

    mark: what stands behind a figure of one run.
    """

    def figure(match: re.Match[str]) -> str:
        expression, _, form = match[1].rpartition(":")
        value = evaluated(expression, records)
        if value is None:
            return UNPLAYED
        alone = 1 in plays(expression, records)
        return FAILED if math.isnan(value) else formatted(value, form) + mark * (alone and math.isfinite(value))

    filled = re.sub(r"\{([^{}]+)\}", figure, row)
    filled = re.sub(f"{UNPLAYED}((?:, | ± | to ){UNPLAYED})+", UNPLAYED, filled)
    return re.sub(rf"(?:{mark})? ± inf", mark or ONE_PLAY, filled)


def plays(text: str, records: Records) -> set[int]:
    """Return of how many runs each figure of an expression is the mean, of those that a seed changes."""
    counts = {records.plays(name, place) for name, place in REFERENCE.findall(text)}
    return {count for count in counts if count is not None}


def formatted(value: float, form: str) -> str:
    """Return a figure as pages have it: 3e-5 and not 3e-05."""
    return re.sub(r"e([-+])0", lambda sign: "e" + sign[1].strip("+"), f"{value:{form}}")


def table(name: str, records: Records) -> str:
    """Return a table with the line below it: its records, what differs in them, what was not run."""
    if name == PLAN:
        return play.plan(play.rows(), Path(os.devnull))  # of what is kept here
    declared = TABLES[name]
    columns, counts = declared.head.count("|") + 1, plays(" ".join(declared.rows), records)
    mark, head = MARK * (1 in counts and len(counts) > 1), declared.head
    if counts == {1}:
        first, bar, rest = head.partition("|")
        head = f"{first.strip()}{', ' if first.strip() else ''}one run each {bar}{rest}"
    lines = [f"| {head} |".replace("|  |", "| |"), "|" + "---|" * columns]
    lines += [re.sub(r"\|(  )(?=\|)", "| ", f"| {cells(row, records, mark)} |") for row in declared.rows]
    for line in lines:
        if line.count("|") != columns + 1:
            raise UnknownPlace(f"{name}: expected {columns} columns in {line}")
    said = source(declared, records)
    if any(MARK in line for line in lines):
        said = textwrap.fill(
            f"{MARK.strip()} one run. {' '.join(said.split())}", 118, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join([*lines, "", said])


def source(declared: Table, records: Records) -> str:
    """Return where a table's figures are from, what stands in brackets, and the commands of what was not run."""
    used: dict[str, bool] = {}  # by record, whether all places were run
    for name, place in REFERENCE.findall(" ".join(declared.rows)):
        used[name] = used.get(name, True) and records.value(name, place) is not None
    said = [f"In brackets: {declared.paper.rstrip('.')}."] if declared.paper else []
    found = {name: records.found[name] for name in used if name in records.found}
    links = [
        f"[{name}](../experiments/{one.path.relative_to(records.folder)}) ({one.told})" for name, one in found.items()
    ]
    said += [f"From {', '.join(links)}."] if links else []
    said += [
        f"Of {name}, {'; '.join(told)}." for name in used if name in records.found and (told := records.apart(name))
    ]
    left = [f"`{records.command(name)}`" for name, whole in used.items() if not whole]
    said += [f"{UNPLAYED.capitalize()} ([hours](reproduction.md#the-plan)): {'; '.join(left)}."] if left else []
    return textwrap.fill(" ".join(said), 118, break_long_words=False, break_on_hyphens=False)


def filled(page: str, records: Records) -> str:
    """Return a page with its tables as the records have them."""

    def fill(match: re.Match[str]) -> str:
        text = f"<!-- table {match[2]} -->\n\n{table(match[2], records)}\n\n<!-- end of {match[2]} -->"
        return re.sub(r"^(?=.)", match[1], text, flags=re.MULTILINE)

    return BLOCK.sub(fill, page)


def sections(page: str) -> Iterator[tuple[str, str]]:
    """Yield the heading and the text of each section, the page's beginning as one."""
    for text in re.split(r"^(?=#+ )", page, flags=re.MULTILINE):
        yield text.partition("\n")[0], text


def unbacked(section: str, records: Records) -> Iterator[str]:
    """Yield a sentence about each figure of a section that does not follow from records."""
    notes = [line.partition(": ")[::2] for note in NOTES.findall(section) for line in note.splitlines()]
    sentences = PLACES.sub("", NOT_SENTENCES.sub(" ", section))
    beside = " ".join(match[0] for match in re.finditer(r"^ *\|.*$|^    .*$", section, re.MULTILINE))
    for figures, expression in notes:
        for figure in figures.split(" and "):
            if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", sentences):
                yield f"{figure} is in the comment and in no sentence"
            if expression == "paper" and not is_printed([float(figure.replace(",", ""))]):
                yield f"{figure} is said to be a paper's, and is not in printed/papers.toml"
            if expression not in ("paper", "set") and not follows(figure, expression, records):
                yield f"{figure} is not {expression}, which is {evaluated(expression.lstrip('<> '), records)}"
        for number in CONSTANT.findall(REFERENCE.sub("", expression)):
            if not is_printed([float(number)]):
                yield f"{number} in {expression} is not in printed/papers.toml"
    noted = {figure for figures, _ in notes for figure in figures.split(" and ")}
    for figure in dict.fromkeys(FIGURE.findall(sentences)):
        if figure not in noted and not re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", beside):
            yield f"{figure} is in no table of its section and not in its comment of figures"


def follows(figure: str, expression: str, records: Records) -> bool:
    """Return whether an expression comes to a figure, to the digits that it is written with."""
    value, bound = evaluated(expression.lstrip("<> "), records), float(figure.replace(",", ""))
    if value is None:
        return False
    if expression[0] in "<>":
        return value < bound if expression[0] == "<" else value > bound
    mantissa, _, power = figure.replace(",", "").partition("e")
    form = f".{len(mantissa.partition('.')[2])}{'e' if power else 'f'}"
    return float(f"{value:{form}}") == bound


def mistaken_papers(records: Records) -> Iterator[str]:
    """Yield a sentence about each figure of a paper that `printed/papers.toml` does not have."""
    for name, (_, experiment) in find(records.folder).items():
        for row, figures in experiment.printed.items():
            if not is_printed(figures, experiment.paper):
                yield f"{name}: printed, {row}: {list(figures)} is no row of printed/papers.toml"
    for name, declared in TABLES.items():
        text = re.sub(r"\{[^{}]*\}", "", " ".join(declared.rows)) if declared.paper else ""
        for figure in dict.fromkeys(re.findall(r"\((\d[\d.]*)", text)):
            if not is_printed([float(figure)]):
                yield f"table {name}: {figure} is not in printed/papers.toml"


def mistaken_rows(name: str, record: Record) -> Iterator[str]:
    """Yield a sentence about each row of a record that its cells, or the papers, do not have."""
    if "cells" not in record.content or "columns" not in record.content:
        return
    several = len(record.content["cells"][0]["settings"]["figures"]) > 1
    for row in record.content["rows"]:
        if row.get("paper") and "ours" in row and not is_printed(row["paper"]):
            yield f"{name}: rows, {row['row']}: {row['paper']} is no row of printed/papers.toml"
        for number, column in enumerate(record.content["columns"] if "deviations" in row else ()):
            place = f"{row['row']}{'; ' if several else ', '}{column}"
            for kind, at in (("ours", place), ("deviations", f"{place}; ±")):
                kept, value = row[kind][number], record.figures.get(at)
                if not alike(kept, value):
                    yield f"{name}: rows, {place}: {kind} is {kept}, its cells have {value}"


def digests(records: Records) -> dict[str, str]:
    """Return the SHA-256 of each record by its path."""
    paths = sorted(one.path for one in records.found.values())
    return {str(path.relative_to(records.folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def changed_records(records: Records) -> Iterator[str]:
    """Yield a sentence about each record that is not the one whose digest is kept."""
    text = (records.folder / DIGESTS).read_text(encoding="utf-8")
    kept = {path: digest for digest, path in (line.split("  ") for line in text.splitlines())}
    for path, digest in digests(records).items():
        if kept.pop(path, None) != digest:
            yield f"{path} is not the record of {DIGESTS}; run python experiments/tables.py if it is a new one"
    yield from (f"{path} is in {DIGESTS} and not there" for path in kept)


def differences(page: str, records: Records) -> Iterator[str]:
    """Yield a sentence about each figure of a page, and each table, that is not as the records have it."""
    names = [match[2] for match in BLOCK.finditer(page)]
    for mark in ("table", "end of"):
        if re.findall(rf"<!-- {mark} (\S+) -->", page) != names:
            yield f"a line <!-- {mark} NAME --> has no partner, so its table is neither written nor checked"
    for heading, text in sections(page):
        for match in BLOCK.finditer(text):
            if filled(match[0], records) != match[0]:
                yield f"{heading}: table {match[2]} differs from its records; run python experiments/tables.py"
        yield from (f"{heading}: {problem}" for problem in unbacked(text, records))


def main(
    words: Sequence[str] | None = None, docs: Path = HERE.parent / "docs", say: Callable[[str], None] = print
) -> int:
    """Write the tables, or check the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where a page and the records differ"
    )
    parser.add_argument("--records", type=Path, default=HERE, help="the folder with */results/; that of this script")
    given = parser.parse_args(words)
    records, wrong = Records(given.records), 0
    for name in PAGES:
        page = (docs / name).read_text(encoding="utf-8")
        if not given.check:
            page = filled(page, records)
            (docs / name).write_text(page, encoding="utf-8")
        for problem in differences(page, records):
            wrong += 1
            say(f"docs/{name}: {problem}")
    if not given.check:
        lines = [f"{digest}  {path}\n" for path, digest in digests(records).items()]
        (records.folder / DIGESTS).write_text("".join(lines), encoding="utf-8")
    rows = (mistaken_rows(name, record) for name, record in records.found.items())
    for problem in itertools.chain(changed_records(records), mistaken_papers(records), *rows):
        wrong += 1
        say(problem)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
