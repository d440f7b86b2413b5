"""Play the rows of the papers' tables in the order of `rows.toml`, unattended, a piece of under ten minutes at a time.

    while python experiments/play.py --data DIR; [ $? = 3 ]; do :; done   # until nothing is left, a piece a call
    python experiments/play.py --data DIR --set run.device=cuda           # on a GPU
    python experiments/play.py "PBPFL V, 224 x 224" --data DIR            # these rows alone
    python experiments/play.py --plan                                     # per row: cells, done, core-hours, command
    python experiments/play.py --time --data DIR                          # times a few rounds of what was never timed
    python experiments/play.py --replay 'RECORD[LEVELS; seed 1]' --data DIR   # trains a cell again; compares its record

A piece of training ends after a round, with a checkpoint of it, when its seconds are over or the next round would end
50 seconds past them; a script is stopped then. The next piece goes on there, as it does after a kill; a round that is
longer than a piece makes the piece as long. It ends with 0 if nothing is left, with 3 if another piece is to follow,
with 2 where no row that is left can be played (no data, a wrong name).

Core-hours are processor time. What was played has it in its records, older ones the clock's. What is left is estimated:
one round of such a cell, timed by --time in one process and kept in `seconds.json`, times its rounds, without tests
along the way; or a round of a record, where one has the same work. Directions of all parameters at once are timed
with TIMED of them, and cost as many times as there are more; edge clients as the others. Scripts' are in `rows.toml`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median_low
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from records_of_pages import Records  # noqa: E402
from reproduction import (  # noqa: E402
    DATA,
    NOT_REPLAYED,
    Cell,
    Reproduction,
    as_json,
    choose,
    find,
    replayed,
    seconds_of,
)

from moretta.contract.settings import Section  # noqa: E402
from moretta.contract.wording import did_you_mean  # noqa: E402
from moretta.data.datasets import ORIGINS  # noqa: E402
from moretta.engines.files import write_atomically  # noqa: E402
from moretta.errors import MorettaError, ParameterError  # noqa: E402

sys.path.remove(str(HERE))
clock = time.monotonic
LEFT, FAILED, GRACE, TIMED = 3, 2, 50, 8
SAME_COST = {  # keys that a round takes as long with, whatever they are
    *("length", "seed", "on", "curve", "figures", "run.evaluate-every", "run.device", "run.insecure-secret-seed"),
    *(
        f"protocol.{key}"
        for key in ("k", "ema", "ema-each", "epoch-rounds", "delta", "learning-rate", "mu", "dp-noise")
    ),
    *("protocol.schedule", "protocol.decay-from", "protocol.hidden-bias", "protocol.weight-decay", "protocol.batches"),
    *("model.activation", "model.output-bias", "data.partition", "data.alpha", "engine.edge"),
}


class TimeIsUp(BaseException):
    """Raised where a piece ends, past everything that keeps a run going."""


class Row(Section):
    """A row of `rows.toml`: an experiment, or a command that leaves a record with so many rows."""

    table: str
    reproduce: str = ""
    only: tuple[str, ...] = ()
    run: str = ""
    record: str = ""
    cells: int = 1
    hours: float | None = None

    def chosen(self, data: Path | None = None, overrides: Sequence[str] = ()) -> Reproduction:
        """Return the row's experiment."""
        return choose(self.reproduce, HERE, data, overrides=overrides, only=self.only)

    @property
    def command(self) -> str:
        """The command that plays the row alone."""
        only = "".join(f" --only {shlex.quote(level)}" for level in self.only)
        return self.run.format(data="DIR", out="OUT") or f"moretta reproduce {self.reproduce}{only} --data DIR"

    def counted(self, out: Path) -> tuple[int, int, float, list[float | None]]:
        """Return cells, cells done, their processor's seconds, and those of each that is left, None if not known."""
        if self.run:
            found = [out / self.record, *HERE.glob(f"*/{self.record}"), *_results(self.record)]
            rows = max((_rows(path) for path in found if path.is_file()), default=0)
            each = None if self.hours is None else self.hours * 3600 / self.cells
            return self.cells, min(rows, self.cells), 0.0, [each] * (self.cells - min(rows, self.cells))
        chosen = self.chosen()
        wanted, left = [cell for cell in chosen.cells() if chosen.is_wanted(cell)], self.left(chosen, out)
        records = [record for cell, record in self.done(chosen, out).items() if cell in wanted]
        spent = sum(map(seconds_of, records))
        return len(wanted), len(records), spent, [estimated(chosen, cell) for cell in left]

    def done(self, chosen: Reproduction, out: Path) -> dict[Cell, dict[str, Any]]:
        """Return the records of cells of the row's experiment, of OUT, of `results/` or of a folder in it."""
        return chosen.done(out, *_folders(chosen))

    def left(self, chosen: Reproduction, out: Path) -> list[Cell]:
        """Return the cells of the row that are to be played."""
        done = self.done(chosen, out)
        return [cell for cell in chosen.cells() if chosen.is_wanted(cell) and cell not in done]


def _folders(chosen: Reproduction) -> list[Path]:
    """Return where an experiment's records are: `results/`, or a folder in it for another length."""
    results = chosen.home / "results"
    return [results, *filter(Path.is_dir, sorted(results.glob("*")))]


def rows(names: Sequence[str] = ()) -> list[Row]:
    """Return the rows of those names, or all in the file's order. Raises `ParameterError` for a wrong name."""
    tables = tomllib.loads((HERE / "rows.toml").read_text(encoding="utf-8"))["row"]
    every = [Row.model_validate_json(json.dumps(table)) for table in tables]
    found = {row.table: row for row in every}
    for name in names:
        if name not in found:
            raise ParameterError(f'no row is called "{name}"; {did_you_mean(name, found)}')
    return [found[name] for name in names] or every


def play(chosen: Sequence[Row], out: Path, data: Path | None, overrides: Sequence[str], seconds: float) -> int:
    """Play what is left of these rows for so many seconds (0: until all is played); return how the piece ended.

    overrides: keys of all cells, such as run.device, which makes no other cells of them.
    """
    piece, failed = Piece(seconds), 0
    try:
        for row in chosen:
            cells, done, *_ = row.counted(out)
            if done < cells:
                failed += not _played(row, out, data, overrides, piece)
    except TimeIsUp:
        say(f"stopped after {clock() - piece.began:.0f} s; the same command goes on")
        return LEFT
    return FAILED if failed else 0


class Piece:
    """So many seconds of playing; 0 has no end."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began = seconds, clock()
        self._last = ("", 0.0)

    @property
    def left(self) -> float | None:
        """The seconds that a command may take, None for any number."""
        return max(0.0, self.seconds + GRACE - (clock() - self.began)) if self.seconds else None

    def watch(self, cell: str, number: int, of: int) -> None:
        """Raise `TimeIsUp` after a round when time is up, or would be well before the end of another round."""
        now, (before, ended) = clock() - self.began, self._last
        self._last = cell, now
        each = now - ended if before == cell else 0.0
        if self.seconds and (now > self.seconds or now + each > self.seconds + GRACE):
            raise TimeIsUp


def _played(row: Row, out: Path, data: Path | None, overrides: Sequence[str], piece: Piece) -> bool:
    try:
        if row.run:
            return _ran(row, out, data, piece.left)
        reproduction = row.chosen(data, overrides)
        reproduction.run(out, say, piece.watch, _folders(reproduction))
    except MorettaError as error:
        say(f"{row.table}: {error}")
        return False
    return True


def _ran(row: Row, out: Path, data: Path | None, seconds: float | None) -> bool:
    """Run a row's command until it ends or these seconds are over."""
    words = shlex.split(row.run.format(data=data or f"${DATA}", out=out.absolute()))
    words[:1] = [sys.executable, "-m", "moretta"] if words[0] == "moretta" else [sys.executable]
    if ((out / row.record).parent / "checkpoint").is_dir():
        words.append("--resume")
    say(f"{row.table}: {row.command}")
    child = subprocess.Popen(words, cwd=HERE.parent)
    try:
        return child.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        raise TimeIsUp from None
    finally:
        child.terminate()
        child.wait()


def estimated(chosen: Reproduction, cell: Cell) -> float | None:
    """Return the processor's seconds that a cell takes, or None where nothing like it was timed or played."""
    of, settings = chosen.experiment, chosen.settings(cell)
    told = _timed().get(cost(settings)) or _played_before().get(cost(settings))
    if told is None:
        return None
    rounds = cell.rounds or of.rounds or told["epoch"] * (of.epochs or 1)
    return float(told["beside"] + rounds * told["round"] * _more(settings))


def cost(settings: Mapping[str, Any]) -> str:
    """Return what a round's cost depends on, as text; an epoch's where lengths are in epochs, for any number of silos.

    Cells that agree in it take as long.
    """
    keys = {key: value for key, value in settings.items() if key not in SAME_COST}
    if "epochs" in settings["length"]:
        keys.pop("data.silos", None)  # they share the rows of an epoch
    if settings.get("protocol.perturb") == "blocks":
        keys["protocol.k"] = settings.get("protocol.k", "")
    return "; ".join(f"{key} = {value}" for key, value in sorted(keys.items()))


def _more(settings: Mapping[str, Any]) -> float:
    """Return how many times more directions a cell has than it is timed with."""
    timed = settings.get("protocol.name") == "baffle" and settings.get("protocol.perturb") != "blocks"
    return max(1.0, int(settings.get("protocol.k", 100)) / TIMED) if timed else 1.0


@cache
def _played_before() -> dict[str, dict[str, Any]]:
    """Return the same of cells whose records are in `results/`, of all forms.

    Of cells that agree in their cost it is the median's by its seconds an epoch, of those with the processor's seconds
    if there are any, whatever order the files come in.
    """
    found: dict[str, list[tuple[bool, float, int, float]]] = {}
    for path in HERE.glob("*/results/**/*.json"):
        for record in json.loads(path.read_text(encoding="utf-8")).get("cells", []):
            each = seconds_of(record) / record["rounds"] / _more(record["settings"])
            epoch = round(record["rounds"] / record["epochs"])
            found.setdefault(cost(record["settings"]), []).append(
                ("core_seconds" not in record, epoch * each, epoch, each)
            )
    alike = {kind: [cell for cell in cells if cell[0] == min(cells)[0]] for kind, cells in found.items()}
    medians = {kind: median_low(cells) for kind, cells in alike.items()}
    return {kind: {"epoch": epoch, "round": each, "beside": 0} for kind, (_, _, epoch, each) in medians.items()}


def listing(folder: Path) -> list[dict[str, Any]]:
    """Return of every experiment below a folder what it is, how long its forms take, and which data sets it needs.

    minutes, quick_minutes: of one core, by records and `seconds.json`; None where nothing like a cell was timed. data:
    by the name that a set has in the folder of data sets where to get it; empty where none is needed.
    """
    told = []
    for name, (home, experiment) in find(folder).items():
        found: dict[str, Any] = {"name": name, "title": experiment.title, "paper": experiment.paper, "data": {}}
        for form, quick in (("", False), ("quick_", True)):
            chosen = Reproduction(name, experiment, home, quick=quick)
            cells = chosen.cells()
            seconds = [estimated(chosen, cell) for cell in cells]
            known = [one for one in seconds if one is not None]
            minutes = round(sum(known) / 60, 1) if len(known) == len(seconds) else None
            found |= {f"{form}cells": len(cells), f"{form}minutes": minutes}
            for settings in map(chosen.settings, cells):
                if "data.path" in settings:
                    found["data"][settings["data.path"]] = ORIGINS.get(settings["data.source"], "experiments/README.md")
        told.append(found)
    return told


def lines(told: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a listing's lines: two an experiment, and where its data sets are from."""
    origins = dict[str, str]()
    for one in told:
        yield f"{one['name']}: {one['title']} ({one['paper']})"
        quick, whole = (_lasting(one[minutes]) for minutes in ("quick_minutes", "minutes"))
        yield f"    quick form {quick}, whole {whole} on one core; data: {', '.join(one['data']) or 'none'}"
        origins |= one["data"]
    yield "Data sets, each in DIR, and where they are from:"
    yield from (f"    {name}: {origin}" for name, origin in sorted(origins.items()))
    yield "moretta reproduce NAME --data DIR runs one, --quick its quick form"


def _lasting(minutes: float | None) -> str:
    if minutes is None:
        return "not timed"
    return f"{minutes:.2g} min" if minutes < 90 else f"{minutes / 60:,.{1 if minutes < 600 else 0}f} h"


def take_time(chosen: Reproduction, cell: Cell) -> dict[str, Any]:
    """Play a cell's first rounds, for some seconds; return the processor's seconds of one, and of what was before.

    Of rounds the quickest counts, as it has waited least for whatever else the machine was doing.
    """
    marks: list[float] = []
    began, total = time.process_time(), 0

    def watch(label: str, number: int, of: int) -> None:
        nonlocal total
        total = of
        marks.append(time.process_time())
        if number == of or (number > 1 and marks[-1] - marks[0] > 1):
            raise TimeIsUp

    fewer = [f"protocol.k={TIMED}"] if _more(chosen.settings(cell)) > 1 else []
    here = [] if chosen.settings(cell).get("engine.name") == "fused" else ["engine.workers=1", "engine.edge=[]"]
    quiet = (*cell.overrides, *fewer, *here, "run.evaluate-every=100000")
    with suppress(TimeIsUp):
        chosen.train(replace(cell, overrides=quiet), watch)
    epochs = chosen.experiment.epochs
    epoch = None if cell.rounds or epochs is None else total // epochs
    each = min((after - before for before, after in itertools.pairwise(marks)), default=marks[0] - began)
    of = f"{chosen.name}: {cell.label}"
    return {"of": of, "epoch": epoch, "round": round(each, 5), "beside": round(marks[0] - began)}


def time_all(chosen: Sequence[Row], out: Path, data: Path | None) -> None:
    """Time a few rounds of every kind of cell that is left and was never timed or played, and keep them."""
    for row in (row for row in chosen if row.reproduce):
        reproduction = row.chosen(data)
        for cell in row.left(reproduction, out):
            kind = cost(reproduction.settings(cell))
            if kind in _timed() or kind in _played_before():
                continue
            try:
                told = take_time(reproduction, cell)
            except MorettaError as error:
                say(f"{row.table}: {error}")
                break
            write_atomically(HERE / "seconds.json", as_json(_timed() | {kind: told}).encode())
            say(f"{told['of']}: {told['round']:.4g} s a round")


def plan(chosen: Sequence[Row], out: Path) -> str:
    """Return a table of the rows: cells, cells done (quick ones apart), core-hours used and left, the command."""
    lines = ["| row | cells | done | core-hours used | left | command |", "|---|---|---|---|---|---|"]
    for row in chosen:
        cells, done, spent, left = row.counted(out)
        unknown, played = left.count(None), f"{spent / 3600:.2f}" if spent else ""
        known = sum(filter(None, left)) / 3600
        hours = [f"{known:.1f}" if known >= 1 else f"{known:.2g}"] if len(left) > unknown else []
        rest = " and ".join([*hours, *([f"{unknown} not timed"] if unknown else [])])
        said = f"{done}, {_quick(row)} quick" if done < cells and _quick(row) else done
        lines.append(f"| {row.table} | {cells} | {said} | {played} | {rest} | `{row.command}` |")
    return "\n".join(lines)


def replay(place: str, data: Path | None) -> int:
    """Train the cell of a record again, and report each key of the record that differs, seconds apart.

    Args:
        place: the record's name with the cell's levels and seed, such as "baffle-own[own, K = 40, LeNet; seed 1]".
        data: the folder of data sets.

    Returns:
        0 if the two records are equal to the byte, `FAILED` if they differ.

    Raises:
        ParameterError: if there is no such cell, or if its record has no public secret seed.
    """
    name, _, cell_at = place.partition("[")
    kept = {f"{', '.join(cell['levels'])}; seed {cell['seed']}]": cell for cell in _cells_of(name)}
    if cell_at not in kept:
        raise ParameterError(f'no cell is called "{place}"; {did_you_mean(cell_at, kept)}')
    record = kept[cell_at]
    if record.get("public_secret_seed") is None:
        raise ParameterError(f"{place} is not replayable: its record has no public secret seed")
    chosen = choose(name.removesuffix("-quick"), HERE, data, quick=name.endswith("-quick"))
    cells = [cell for cell in chosen.cells() if (list(cell.levels), cell.seed) == (record["levels"], record["seed"])]
    if not cells or chosen.settings(cells[0]) != record["settings"]:
        raise ParameterError(f"{place} has other settings than its command has now; check out its commit")
    again, before = chosen.train(cells[0]), replayed(record)
    for key in NOT_REPLAYED:
        if again.get(key) != record.get(key):
            say(f"{key}: {record.get(key)} in the record, {again.get(key)} now")
    differing = [key for key, value in replayed(again).items() if json.dumps(value) != json.dumps(before.get(key))]
    say(f"{place}: differs in {', '.join(differing)}" if differing else f"{place}: equal to the byte")
    return FAILED if differing else 0


def _cells_of(name: str) -> list[dict[str, Any]]:
    found = Records(HERE).found
    if name not in found:
        raise ParameterError(f'no record is called "{name}"; {did_you_mean(name, found)}')
    return list(found[name].content.get("cells", []))


def _quick(row: Row) -> int:
    """Return how many cells of a row's experiment have a record of the quick form."""
    cells = [cell for path in _results(f"{row.reproduce}-quick.json") for cell in _cells_of(path.stem)]
    return sum(not row.only or not set(row.only).isdisjoint(cell["levels"]) for cell in cells)


def say(line: str) -> None:
    """Tell what happens, as it does."""
    print(line, file=sys.stderr, flush=True)


def _timed() -> dict[str, dict[str, Any]]:
    path = HERE / "seconds.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _results(record: str) -> list[Path]:
    return sorted(HERE.glob(f"*/results/{record}"))


def _rows(path: Path) -> int:
    """Return how many rows a script's record has; a file of another kind counts as one."""
    return len(json.loads(path.read_text(encoding="utf-8")).get("rows", [0])) if path.suffix == ".json" else 1


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Play the rows of the papers' tables, a piece at a time.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows by their names in rows.toml; left out: all")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get(DATA), metavar="DIR", help="the folder of data sets"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="runs/reproduce by default")
    parser.add_argument("--seconds", type=float, default=500, help="of a piece; 500 by default, 0 for no end")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="such as run.device=cuda"
    )
    parser.add_argument("--plan", action="store_true", help="print what there is to play, and play nothing")
    parser.add_argument("--time", action="store_true", help="time a few rounds of each cell, and play nothing")
    parser.add_argument("--replay", metavar="CELL", help="train this cell of a record again, and compare the two")
    given = parser.parse_args(words)
    data = None if given.data is None else Path(given.data)
    try:
        if given.replay:
            return replay(given.replay, data)
        chosen = rows(given.rows)
        if given.plan:
            print(plan(chosen, given.out))
        elif given.time:
            time_all(chosen, given.out, data)
        else:
            return play(chosen, given.out, data, given.set, given.seconds)
    except MorettaError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
