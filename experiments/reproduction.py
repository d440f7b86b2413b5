"""The papers' tables from one command each: a run file, a grid of overrides, and what the paper printed.

An experiment stands in ``experiments/PROTOCOL/tables.toml``: the run file beside it, axes whose levels override keys
of that file, the figures read from each run, and the paper's own. A cell is one level of every axis; it is trained once
for each seed, and a finished one is kept in ``OUT/NAME.json``, so that an interrupted table goes on where it stopped:
also in the middle of a cell, at the last checkpoint of its run, whose folder is in ``OUT/unfinished`` until then. A
cell whose settings have changed since is trained again.

Rows and columns: with one figure the last axis makes the columns; with several, each figure is a column.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationError, model_validator
from rich.table import Table

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.contract.settings import Section, Seed
from moretta.contract.wording import did_you_mean
from moretta.engines.checkpoint import rounds_kept
from moretta.engines.files import write_atomically
from moretta.engines.folder_lock import held
from moretta.errors import MorettaError, ParameterError

if TYPE_CHECKING:
    from moretta.run.federation import Federation
    from moretta.run.record import FinishedRound
    from moretta.run.result import Result

FORMAT = 1
TABLES = "tables.toml"
CURVE_COLOURS = ("#e69f00", "#0072b2", "#009e73", "#cc79a7")
LENGTH = "run.rounds is not what a cell's length is taken from; give the experiment or a level rounds, or --epochs"
DATA = "MORETTA_DATA"
"""The environment variable that names the folder of data sets."""
SECRET = "run.insecure-secret-seed"
NOT_REPLAYED = ("wall_seconds", "core_seconds", "commit", "machine")
"""Keys of a record that a replay of its cell need not repeat."""

Number = int | float
Say = Callable[[str], None]
"""Called with one line about each cell that is done."""
Watch = Callable[[str, int, int], None]
"""Called after each round with the cell in words, the round's number and how many there are."""


class Level(Section):
    """One level of an axis: its name in the table, the keys that it sets, and its own run file, rounds and seeds."""

    name: str
    set: tuple[str, ...] = ()
    run: str | None = None
    rounds: PositiveInt | None = None
    seeds: tuple[Seed, ...] = ()


class Axis(Section):
    """Rows or columns of a table."""

    levels: Annotated[tuple[Level, ...], Field(min_length=1)]


class Figure(Section):
    """What is read from a run's record: `path` in result.json, such as "test.mse", times `times`, to so many digits."""

    name: str
    path: str
    times: float = 1.0
    digits: int = 3


class Quick(Section):
    """What the quick form changes. keep: the levels that stay of an axis; an axis without any of them stays whole."""

    epochs: PositiveInt | None = None
    rounds: PositiveInt | None = None
    seeds: tuple[Seed, ...] = ()
    set: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


class Experiment(Section):
    """One table or figure of a paper.

    run: the run file, beside the file that names it. epochs: of the silo with most rows; a round is one batch a silo,
    or one epoch where silos take epochs of steps. rounds: instead of epochs. set: overrides of every cell. on: the rows
    that figures are measured on. curve: a figure of the history, such as "test_accuracy", kept along the way.
    printed: the paper's figures of a row, by its levels' names joined by ", ". notes: why ours differ.
    """

    title: str
    paper: str
    run: str
    axes: Annotated[tuple[Axis, ...], Field(min_length=1)]
    figures: Annotated[tuple[Figure, ...], Field(min_length=1)]
    epochs: PositiveInt | None = None
    rounds: PositiveInt | None = None
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (1,)
    set: tuple[str, ...] = ()
    on: Literal["test", "validation"] = "test"
    curve: str | None = None
    printed: Mapping[str, tuple[Number, ...]] = {}
    notes: tuple[str, ...] = ()
    quick: Quick = Quick()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.epochs is None) == (self.rounds is None):
            raise ValueError("give either epochs or rounds")
        levels = [level for axis in self.axes for level in axis.levels]
        if _has_length((*self.set, *self.quick.set, *(text for level in levels for text in level.set))):
            raise ValueError(LENGTH)
        columns, rows = len(self.columns), [", ".join(row) for row in self.rows]
        for row, printed in self.printed.items():
            if row not in rows:
                raise ValueError(f"printed: no row is called {row}")
            if len(printed) != columns:
                raise ValueError(f"printed: {row} has {len(printed)} figures, and the table {columns} columns")
        return self

    @property
    def length(self) -> dict[str, int]:
        """How long a cell is trained, and in what that is counted."""
        return {"rounds": self.rounds} if self.rounds else {"epochs": self.epochs or 1}

    @property
    def columns(self) -> tuple[str, ...]:
        """The heads of the table's columns."""
        if len(self.figures) > 1:
            return tuple(figure.name for figure in self.figures)
        return tuple(level.name for level in self.axes[-1].levels)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The levels of each row."""
        axes = self.axes if len(self.figures) > 1 else self.axes[:-1]
        return list(itertools.product(*([level.name for level in axis.levels] for axis in axes)))

    def shortened(self) -> Experiment:
        """Return the quick form."""
        quick, axes = self.quick, []
        for axis in self.axes:
            kept = tuple(level for level in axis.levels if level.name in quick.keep)
            shorter = {"seeds": ()} | ({"rounds": None} if quick.epochs or quick.rounds else {})
            levels = tuple(level.model_copy(update=shorter) for level in kept or axis.levels)
            axes.append(axis.model_copy(update={"levels": levels}))
        length = {"epochs": quick.epochs, "rounds": quick.rounds} if quick.epochs or quick.rounds else {}
        form = {"axes": tuple(axes), "seeds": quick.seeds or self.seeds, "set": (*self.set, *quick.set)}
        return self.model_copy(update={**form, **length})


@dataclass(frozen=True)
class Cell:
    """One training run of an experiment: the levels that make it, their overrides, its seed, its run file.

    rounds: how many it is trained for, None for the experiment's length.
    """

    levels: tuple[str, ...]
    overrides: tuple[str, ...]
    seed: int
    run: str
    rounds: int | None = None

    @property
    def label(self) -> str:
        """The cell in words."""
        return f"{', '.join(self.levels)}, seed {self.seed}"


@dataclass(frozen=True)
class Reproduction:
    """An experiment in the form that is to be run.

    whole: the experiment as written; quick: whether its quick form is meant. home: the folder of its run file.
    data: the folder of data sets, if one was named. overrides: of every cell, after its own. only: the levels of which
    cells are trained, of an axis without any of them all; what is kept of other cells stays.
    """

    name: str
    whole: Experiment
    home: Path
    data: Path | None = None
    quick: bool = False
    overrides: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    @property
    def experiment(self) -> Experiment:
        """The experiment in the form that is meant."""
        return self.whole.shortened() if self.quick else self.whole

    def cells(self) -> list[Cell]:
        """Return every cell, the seeds of one beside each other.

        Raises `moretta.errors.ParameterError` for an override of what the experiment says itself.
        """
        of, found = self.experiment, list[Cell]()
        if _has_length(self.overrides):
            raise ParameterError(LENGTH)
        for levels in itertools.product(*(axis.levels for axis in of.axes)):
            overrides = (*of.set, *(text for level in levels for text in level.set), *self.overrides)
            (run,) = {level.run for level in levels if level.run} or {of.run}
            rounds = next((level.rounds for level in levels if level.rounds), None)
            seeds = next((level.seeds for level in levels if level.seeds), of.seeds)
            names = tuple(level.name for level in levels)
            found += [Cell(names, overrides, seed, run, rounds) for seed in seeds]
        return found

    def is_wanted(self, cell: Cell) -> bool:
        """Return whether a cell is one of those that are to be trained."""
        axes = [{level.name for level in axis.levels} for axis in self.experiment.axes]
        return all(
            name in self.only or axis.isdisjoint(self.only) for name, axis in zip(cell.levels, axes, strict=True)
        )

    def done(self, *folders: Path) -> dict[Cell, dict[str, Any]]:
        """Return the records of cells that have been trained, of the first of these folders that has one."""
        records = [record for folder in folders for record in _kept(self.path(folder))]
        kept = list(map(_key_of, records))
        found = ((cell, self._key(cell)) for cell in self.cells())
        return {cell: records[kept.index(key)] for cell, key in found if key in kept}

    def settings(self, cell: Cell) -> dict[str, Any]:
        """Return what a cell's figures depend on, as far as the experiment and its run file say it."""
        of = self.experiment
        tables = tomllib.loads((self.home / cell.run).read_text(encoding="utf-8"))
        keys = {f"{name}.{key}": _text(value) for name, table in tables.items() for key, value in table.items()}
        for override in cell.overrides:
            place, _, value = override.partition("=")
            keys[place.strip()] = value.strip()
        for idle in ("run.rounds", "run.seed", "run.name", "run.checkpoint-every", "engine.workers"):
            keys.pop(idle, None)
        figures = {figure.name: f"{figure.times:g} {figure.path}" for figure in of.figures}
        return {
            **keys,
            "length": {"rounds": cell.rounds} if cell.rounds else of.length,
            "seed": cell.seed,
            "on": of.on,
            "curve": of.curve,
            "figures": figures,
        }

    def run_file(self, cell: Cell) -> RunFile:
        """Return a cell's run file, its data found in the folder of data sets.

        Raises `moretta.errors.ParameterError` where they are not there.
        """
        run_file = run_files.load(self.home / cell.run, [*seeds(cell.seed), *cell.overrides])
        wanted = run_file.data.path
        if wanted is None:
            return run_file
        what = f'{self.name} needs the folder {wanted} (source = "{run_file.data.source}")'
        if self.data is None:
            raise ParameterError(f"{what}; name the folder that holds it by --data, or by the variable {DATA}")
        path = (self.data / wanted).absolute()
        if not path.exists():
            raise ParameterError(f"{what}; {path} does not exist; name the folder that holds it by --data")
        return run_file.model_copy(update={"data": run_file.data.model_copy(update={"path": path})})

    def train(self, cell: Cell, watch: Watch | None = None, folder: Path | None = None) -> dict[str, Any]:
        """Train one cell and return its record: figures, settings, seconds, versions.

        folder: of its run, None for none. A cell that was stopped goes on there from its last checkpoint.
        """
        from moretta.run.assembly import federation_of
        from moretta.run.federation import Federation
        from moretta.run.inputs import RunRows
        from moretta.run.record import versions

        run_file, of = self.run_file(cell), self.experiment
        federation = federation_of(run_file, folder)
        if of.on == "validation":
            if federation.validation is None:
                raise ParameterError(f"{self.name} is measured on validation rows; give [data] validation-fraction")
            federation = Federation.of(
                federation.spec,
                federation.model,
                RunRows(
                    federation.silos,
                    test=federation.validation,
                    validation=federation.validation,
                    feature_names=federation.feature_names,
                ),
                federation.out,
            )
        epoch = 1 if run_file.protocol.steps_at_silos else _batches(federation)
        rounds = cell.rounds or of.rounds or epoch * (of.epochs or 1)
        record: dict[str, Any] = {
            "levels": list(cell.levels),
            "seed": cell.seed,
            "settings": self.settings(cell),
            "rounds": rounds,
            "epochs": round(rounds / epoch, 3),
            "parameters": sum(parameter.numel() for parameter in federation.model.parameters()),
            "public_secret_seed": run_file.run.insecure_secret_seed,
            "versions": versions(),
            "machine": machine(),
            "commit": commit_of(self.home),
        }
        began, done, played = time.perf_counter(), 0, 0.0

        def progress(number: int, rounds: int, line: Mapping[str, Any]) -> None:
            nonlocal done, played
            done, played = number, played + line["seconds_total"]

        def finished(told: FinishedRound) -> None:
            if watch is not None:
                watch(cell.label, told.number, told.rounds)  # what it raises leaves a checkpoint of that round

        stopped = folder is not None and bool(rounds_kept(folder / "checkpoint"))
        if folder is not None and not stopped:
            shutil.rmtree(folder, ignore_errors=True)  # stopped before it had begun
        try:
            result = federation.train(rounds, cell.seed, resume=stopped, progress=progress, on_round=finished)
        except MorettaError as error:
            if not done:
                raise
            return record | {"failed": str(error), "figures": {}, "curve": [], "wall_seconds": _since(began)}
        if of.curve is not None:
            points = [(line["round"] / epoch, line[of.curve]) for line in result.history if of.curve in line]
            record["curve"] = [[round(at, 3), round(float(value), 5)] for at, value in points]
        figures = {figure.name: figure.times * _read(result.record, figure.path) for figure in of.figures}
        before = result.record["seconds"]["total"] - played  # of rounds before it was stopped
        ended = {"figures": figures, "result_sha256": digest_of(result)}
        return record | ended | {"wall_seconds": round(_since(began) + before, 3)}

    def run(self, out: Path, say: Say, watch: Watch | None = None, kept: Sequence[Path] = ()) -> dict[str, Any]:
        """Train the cells that neither `out` nor a folder of `kept` holds yet; keep all in `out`, and return them.

        Raises `moretta.errors.ParameterError`, before anything is trained, where a cell cannot be (no data, a bad key),
        where `out` has cells of other settings, which would be lost, and where another process is at it.
        """
        for cell in self._left(self.done(out, *kept)):
            self.run_file(cell)
        with held(out / "unfinished" / self.path(out).stem):
            return self._run(out, say, watch, kept)

    def _left(self, done: Mapping[Cell, object]) -> list[Cell]:
        return [cell for cell in self.cells() if cell not in done and self.is_wanted(cell)]

    def _run(self, out: Path, say: Say, watch: Watch | None, kept: Sequence[Path]) -> dict[str, Any]:
        path, cells, done = self.path(out), self.cells(), self.done(out, *kept)
        left, known = self._left(done), [self._key(cell) for cell in cells]
        before = _kept(path)
        if others := sum(_key_of(record) not in known for record in before):
            raise ParameterError(
                f"{path} has cells of other settings, seeds or length than now ({others} of {len(before)}), which "
                "would be lost; name another folder by --out, or move the file"
            )
        say(f"{self.name}: {len(cells)} cells, {len(left)} to train; results in {path}")
        for cell in left:
            folder = self._folder(out, cell)
            done[cell] = record = self._timed(cell, watch, folder)
            _write(path, self.results([done[cell] for cell in cells if cell in done]))
            shutil.rmtree(folder, ignore_errors=True)
            figures = "  ".join(f"{name} {value:.4g}" for name, value in record["figures"].items())
            told = figures or f"failed: {record['failed']}"
            say(f"{cells.index(cell) + 1}/{len(cells)} {cell.label}: {told}  ({record['wall_seconds']:.0f} s)")
        results = self.results([done[cell] for cell in cells if cell in done])
        _write(path, results)
        if any(record.get("curve") for record in results["cells"]):
            path.with_suffix(".svg").write_text(drawn(results), encoding="utf-8")
            say(f"curves: {path.with_suffix('.svg')}")
        return results

    def _timed(self, cell: Cell, watch: Watch | None, folder: Path) -> dict[str, Any]:
        """Train one cell; its record has the processor's seconds too, those before it was stopped included."""
        kept, began = folder / "processor-seconds.txt", sum(os.times()[:4])
        before = float(kept.read_text()) if kept.exists() else 0.0
        try:
            record = self.train(cell, watch, folder)
        except BaseException:
            if folder.is_dir():
                kept.write_text(str(before + sum(os.times()[:4]) - began))
            raise
        return record | {"core_seconds": round(before + sum(os.times()[:4]) - began, 2)}

    def _key(self, cell: Cell) -> tuple[list[str], dict[str, Any]]:
        return list(cell.levels), without_device(self.settings(cell))

    def _folder(self, out: Path, cell: Cell) -> Path:
        """Return where a cell trains until its record is kept: of its settings, so that others do not go on there."""
        settings = json.dumps((list(cell.levels), self.settings(cell)), sort_keys=True).encode()
        return out / "unfinished" / f"{self.path(out).stem}-{hashlib.sha256(settings).hexdigest()[:16]}"

    def path(self, out: Path) -> Path:
        """Return where this form's results are kept."""
        return out / f"{self.name}{'-quick' if self.quick else ''}.json"

    def results(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what is kept and printed: ours beside the paper's, and why they differ."""
        of = self.experiment
        return {
            "format": FORMAT,
            "name": self.name,
            "quick": self.quick,
            "title": of.title,
            "paper": of.paper,
            "columns": list(of.columns),
            "digits": [
                (of.figures[at] if len(of.figures) > 1 else of.figures[0]).digits for at in range(len(of.columns))
            ],
            "rows": [self._row(row, records) for row in of.rows],
            "why_they_differ": list(of.notes),
            "curve": of.curve,
            "length": of.length,
            "cells": list(records),
        }

    def _row(self, row: tuple[str, ...], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one row: means over seeds, their deviations where there are several, and the paper's figures."""
        of, several = self.experiment, len(self.experiment.figures) > 1
        ours: list[float | None] = []
        deviations: list[float | None] = []
        for column in of.columns:
            levels, figure = (row, column) if several else ((*row, column), of.figures[0].name)
            of_row = [record["figures"] for record in records if tuple(record["levels"]) == levels]
            values = [figures[figure] for figures in of_row if figures]
            ours.append(statistics.fmean(values) if values else None)
            deviations.append(statistics.stdev(values) if len(values) > 1 else None)
        printed = self.whole.printed.get(", ".join(row))
        paper = [printed[self.whole.columns.index(column)] for column in of.columns] if printed else None
        return {"row": ", ".join(row), "ours": ours, "deviations": deviations, "paper": paper}


def seeds(seed: int) -> tuple[str, str]:
    """Return the overrides by which a run replays to the byte: one public seed for training and for every secret.

    All methods of an experiment begin with the same secrets at the same seed, so their differences are paired.
    """
    return f"run.seed={seed}", f"{SECRET}={seed}"


def digest_of(result: Result) -> str:
    """Return the SHA-256, in hex, of each round's training loss, all scores, and the final weights that are kept.

    A simulation with more than 20 models keeps no weights; there the losses and scores stand for them.
    """
    losses = [line.get("loss") for line in result.history]
    digest = hashlib.sha256(json.dumps([losses, result.record["test"]], sort_keys=True).encode())
    for silo, model in {"": result.model, **result.models}.items():
        for name, tensor in ({} if model is None else model.state_dict()).items():
            digest.update(f"{silo}/{name}".encode() + tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def machine() -> dict[str, Any]:
    """Return what the order of a processor's additions depends on: PyTorch's threads and the instructions it uses."""
    import torch

    return {"threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability()}


def replayed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a replay of a cell repeats to the byte: all of its record but seconds, the commit and the machine."""
    timed = {name for name, path in record["settings"]["figures"].items() if " seconds." in path}
    figures = {name: value for name, value in record["figures"].items() if name not in timed}
    return {key: value for key, value in record.items() if key not in NOT_REPLAYED} | {"figures": figures}


def _has_length(overrides: Iterable[str]) -> bool:
    return any(override.partition("=")[0].strip() == "run.rounds" for override in overrides)


def find(folder: Path) -> dict[str, tuple[Path, Experiment]]:
    """Return the experiments below a folder, each with the folder that its run file is in.

    Raises `moretta.errors.ParameterError` where there is none, or one is not well formed.
    """
    found: dict[str, tuple[Path, Experiment]] = {}
    for path in sorted(folder.glob(f"*/{TABLES}")):
        for name, experiment in _experiments(path, path.stat().st_mtime_ns).items():
            if name in found:
                raise ParameterError(f"{path}: {name} is already in {found[name][0]}; give it another name")
            found[name] = (path.parent, experiment)
    if not found:
        raise ParameterError(
            f"no experiments in {folder}: expected {folder}/PROTOCOL/{TABLES}; stand in a checkout of Moretta, or name "
            "its experiments folder by --experiments"
        )
    return found


@cache
def _experiments(path: Path, changed: int) -> dict[str, Experiment]:
    """Return the experiments of a file. changed: when, so that a file that has changed is read again."""
    found = {}
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ParameterError(f"{path} is not TOML: {error}") from None
    for name, table in tables.items():
        try:  # by way of JSON, which takes lists for tuples
            found[name] = Experiment.model_validate_json(json.dumps(table))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ParameterError(f"{path}: [{name}] {place}: {first['msg']}") from None
    return found


def choose(
    name: str,
    folder: Path,
    data: Path | None = None,
    quick: bool = False,
    epochs: int | None = None,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
) -> Reproduction:
    """Return the experiment of that name, with other epochs if given, and overrides for all its cells.

    only: the levels of which cells are trained; without any, all.
    Raises `moretta.errors.ParameterError`, naming the nearest, for a name that is not there.
    """
    found = find(folder)
    if name not in found:
        raise ParameterError(f'no experiment is called "{name}"; {did_you_mean(name, found)}')
    home, experiment = found[name]
    if epochs is not None:
        if epochs < 1 or experiment.epochs is None:
            why = "expected 1 or more" if epochs < 1 else f"the length of {name} is in rounds"
            raise ParameterError(f"--epochs {epochs}: {why}")
        shorter = experiment.quick.model_copy(update={"epochs": epochs})
        experiment = experiment.model_copy(update={"epochs": epochs, "quick": shorter})
    chosen = Reproduction(name, experiment, home, data, quick, tuple(overrides), tuple(only))
    levels = [level.name for axis in chosen.experiment.axes for level in axis.levels]
    for level in only:
        if level not in levels:
            raise ParameterError(f'no level of {name} is called "{level}"; {did_you_mean(level, levels)}')
    return chosen


def table(results: Mapping[str, Any]) -> Table:
    """Return results as a table for a terminal: ours, the deviation over seeds, and the paper's in brackets."""
    (kind, length), *_ = results["length"].items()
    form = f"{results['title']} ({results['paper']}), {length} {kind}{', quick form' if results['quick'] else ''}"
    drawn = Table(title=f"{form}; in brackets the paper's", title_justify="left")
    drawn.add_column("")
    for column in results["columns"]:
        drawn.add_column(column, justify="right")
    for row in results["rows"]:
        drawn.add_row(row["row"], *(_shown(results, row, number) for number in range(len(results["columns"]))))
    return drawn


def _shown(results: Mapping[str, Any], row: Mapping[str, Any], number: int) -> str:
    digits = results["digits"][number]
    ours, deviation = row["ours"][number], row["deviations"][number]
    text = "-" if ours is None else f"{ours:.{digits}f}"
    if deviation is not None:
        text += f" ± {deviation:.{digits}f}"
    return text if row["paper"] is None else f"{text} ({row['paper'][number]:.{digits}f})"


def drawn(results: Mapping[str, Any]) -> str:
    """Return the curves as SVG: the first axis in one panel, a panel for the rest, error bars over the seeds."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    curves: dict[tuple[str, ...], dict[str, list[list[list[float]]]]] = {}
    for record in results["cells"]:
        first, *rest = record["levels"]
        if record["curve"]:
            curves.setdefault(tuple(rest), {}).setdefault(first, []).append(record["curve"])
    across = min(3, len(curves))
    down = math.ceil(len(curves) / across)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": results["name"], "font.size": 9}):
        canvas = Canvas(figsize=(3.4 * across, 2.8 * down), layout="constrained")
        panels = canvas.subplots(down, across, squeeze=False, sharey=True).flat
        for panel, (levels, series) in zip(panels, curves.items(), strict=False):
            for number, (name, runs) in enumerate(series.items()):
                points = list(zip(*runs, strict=True))  # the same rounds were tested for every seed
                values = [[run[1] for run in point] for point in points]
                spread = [statistics.stdev(value) if len(value) > 1 else 0.0 for value in values]
                panel.errorbar(
                    [point[0][0] for point in points],
                    [statistics.fmean(value) for value in values],
                    spread,
                    label=name,
                    color=CURVE_COLOURS[number % len(CURVE_COLOURS)],
                    linestyle=("-", (0, (5, 2)))[(number + number // len(CURVE_COLOURS)) % 2],
                    linewidth=1.2,
                    errorevery=(0, max(1, len(points) // 10)),
                    capsize=2,
                )
            panel.set(title=", ".join(levels), xlabel="epochs", ylabel=results["curve"].replace("_", " "))
            panel.legend(frameon=False)
        text = StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def commit_of(folder: Path) -> str | None:
    """Return the commit that a folder is checked out from, with "-dirty" where files differ; None without one."""
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 3)


def _text(value: object) -> str:
    """Return a value as an override would write it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _batches(federation: Federation) -> int:
    """Return the rounds of an epoch of the silo with most rows."""
    rows = max(len(silo.x) for silo in federation.silos)
    return math.ceil(rows / federation.spec.data.batch_size) if federation.spec.data.batch_size else 1


def without_device(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the device, on which no figures depend but seconds."""
    timed = any(" seconds." in figure for figure in settings["figures"].values())
    return {key: value for key, value in settings.items() if timed or key != "run.device"}


def _read(record: Mapping[str, Any], path: str) -> float:
    value: Any = record
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ParameterError(f"a run's record has no {path}; fix the figure's path")
        value = value[part]
    return float(value)


def seconds_of(record: Mapping[str, Any]) -> float:
    """Return a cell's seconds: of the processor, in older records the clock's."""
    return float(record.get("core_seconds", record["wall_seconds"]))


def _key_of(record: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return which cell a record is of."""
    return record["levels"], without_device(record["settings"])


def _kept(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["format"] != FORMAT:
            raise ParameterError(f"{path} is of format {kept['format']}, not {FORMAT}; name another folder by --out")
        return list(kept["cells"])
    except (ValueError, KeyError, TypeError):
        raise ParameterError(f"{path} holds no results; name another folder by --out") from None


def as_json(record: Mapping[str, Any]) -> str:
    """Return a record as JSON with one line a key, and one an entry where entries have keys of their own."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_entries(value)}" for key, value in record.items()) + "\n}\n"


def _entries(value: Any) -> str:
    if isinstance(value, Mapping) and any(isinstance(entry, Mapping | list) for entry in value.values()):
        return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()) + "\n}"
    if isinstance(value, list) and any(isinstance(entry, Mapping | list) for entry in value):
        return "[\n" + ",\n".join(f" {json.dumps(entry)}" for entry in value) + "\n]"
    return json.dumps(value)


def _write(path: Path, results: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, as_json(results).encode())
