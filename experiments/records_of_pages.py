"""Records of experiments as pages read them: one number by record and place.

A record of `moretta reproduce` has these places, LEVELS being a cell's levels joined by ", ":

    LEVELS; FIGURE          mean over seeds; "; FIGURE" may be left out where there is but one
    LEVELS; FIGURE; ±       deviation over seeds, infinite of one; "; FIGURE" may be left out where there is but one
    LEVELS; seed 1          the only figure of one seed
    LEVELS; round 50        the curve there, mean over seeds; "; seed 1; round 50" of one seed
    LEVELS less LEVELS      difference paired over the seeds that both have; "; FIGURE" may follow, then "; 95 %" for
                            the half width of its interval, infinite of one seed, or "; seeds" for their number
    LEVELS; rounds          also parameters, seconds (a cell's mean), rows (trained on in all), row-forwards

A script's record has "ROW; COLUMN"; any other has its keys, joined by "; ", and items of lists by their number.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from printed.commands import SCRIPTS
from reproduction import choose, seconds_of, without_device

HERE = Path(__file__).parent
FORWARDS = {"mean": (1, 0), "base": (1, 1), "central": (2, 0), "twice-forward": (2, 0)}
"""Forward passes of a row and round, by form: so many times K, and so many more."""


T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t of a 95 % interval, by how many seeds there are."""
COUNTED = ("rounds", "epochs", "parameters", "rows", "row-forwards", "±")
"""Places of a cell that no seed changes, or that say how seeds differ."""


class UnknownPlace(Exception):
    """A page asks for what no record can have."""


@dataclass(frozen=True)
class Record:
    """One file. name: without its ending. told: what it says of itself; content: as JSON has it."""

    path: Path
    content: Mapping[str, Any]

    @cached_property
    def figures(self) -> Mapping[str, float]:
        """Every number by its place."""
        if "cells" in self.content:
            return dict(_of_cells(self.content["cells"]))
        rows = self.content.get("rows", [])
        if rows and "ours" in rows[0]:
            columns = _distinct(self.content["columns"])
            told = [(f"{row['row']}; {column}", value) for row in rows
                    for column, value in zip(columns, row["ours"], strict=True)]  # fmt: skip
            return {place: value for place, value in told if value is not None}
        return dict(_flat(self.content))

    def paired(self, place: str) -> float | None:
        """Return the difference of two levels, paired over seeds, or what else the place asks of it.

        Returns:
            The mean difference; its interval's half width for "; 95 %"; the number of seeds for "; seeds"; None where
            no seed was played by both.
        """
        levels, _, rest = place.partition("; ")
        name, _, kind = rest.rpartition("; ") if rest.endswith(("95 %", "seeds")) else (rest, "", "")
        first, second = (
            {cell["seed"]: cell["figures"] for cell in self.content["cells"] if ", ".join(cell["levels"]) == one}
            for one in levels.split(" less ")
        )
        both = [seed for seed in first if first[seed] and second.get(seed)]
        found = [first[seed][at] - second[seed][at] for seed in both for at in [name or next(iter(first[seed]))]]
        if not found or kind == "seeds":
            return float(len(found)) if kind else None
        if kind:
            return T_95[len(found)] * statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.inf
        return statistics.fmean(found)

    @property
    def told(self) -> str:
        """Seeds, seconds, versions and commit, those of them that the record has, and whether it can be replayed."""
        cells = self.content.get("cells", [])
        seeds = sorted({cell["seed"] for cell in cells} | set(_all(self.content, "seed") if not cells else []))
        seconds = sum(map(seconds_of, cells)) or sum(_all(self.content, "wall_seconds", "seconds"))
        torch = sorted(set(_all(self.content, "torch")))
        commits = sorted(set(_all(self.content, "commit")))
        parts = [f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"] if seeds else []
        clocked = sum("core_seconds" not in cell for cell in cells)
        by = " by the clock" if clocked == len(cells) else ", in part by the clock" if clocked else ""
        parts += [f"{seconds:,.0f} s{by}"] if seconds else []
        parts += [f"PyTorch {', '.join(torch)}"] if torch else []
        secret = sum(cell.get("public_secret_seed") is None for cell in cells)
        some = "" if secret == len(cells) else f"{secret} of {len(cells)} cells "
        parts += [f"{some}not replayable: secret seed not recorded"] if secret else []
        parts += [f"transcribed from {self.content['transcribed']}"] if "transcribed" in self.content else []
        return "; ".join(parts + ([f"commit {', '.join(commits)}"] if commits else []))


def _name_of(path: Path) -> str:
    return path.stem if path.parent.name == "results" else f"{path.stem}-{path.parent.name}"


@dataclass(frozen=True)
class Records:
    """All records below a folder of experiments."""

    folder: Path = HERE

    @cached_property
    def found(self) -> Mapping[str, Record]:
        """Every record by its name; one in a folder of its own, of another length, with that behind it."""
        paths = sorted(self.folder.glob("*/results/**/*.json"))
        return {_name_of(path): Record(path, json.loads(path.read_text(encoding="utf-8"))) for path in paths}

    @cached_property
    def experiments(self) -> Mapping[str, set[str]]:
        """The levels of the cells that each experiment can have, by name."""
        known = {}
        for path in sorted(self.folder.glob("*/tables.toml")):
            for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
                axes = [[level["name"] for level in axis["levels"]] for axis in table["axes"]]
                known[name] = {", ".join(levels) for levels in itertools.product(*axes)}
        return known

    def experiment(self, name: str) -> set[str] | None:
        """Return the levels of the cells that a record can have, None of a record that a script makes."""
        return self.experiments.get(name) or self.experiments.get(name.removesuffix("-quick"))

    def value(self, name: str, place: str) -> float | None:
        """Return the number at a place of a record, None where that was not played, and NaN where it failed.

        Raises `UnknownPlace` where no run could put a number there.
        """
        if name in self.found and place in self.found[name].figures:
            return self.found[name].figures[place]
        if " less " in place and set(place.partition("; ")[0].split(" less ")) <= (self.experiment(name) or set()):
            return self.found[name].paired(place) if name in self.found else None
        cells = self.found[name].content.get("cells", []) if name in self.found else []
        played = {", ".join(cell["levels"]) for cell in cells}
        levels, _, rest = place.partition("; ")
        known = self.experiment(name) or set()
        if levels in known - played or (name in SCRIPTS and name not in self.found):
            return None
        seed = re.match(r"seed (\d+)", rest)  # another than those that were played so far
        seeds = {cell["seed"] for cell in cells if ", ".join(cell["levels"]) == levels}
        if levels in known and seed and int(seed[1]) not in seeds:
            return None
        raise UnknownPlace(f"{name}[{place}]: no such record, or no such place in it")

    def plays(self, name: str, place: str) -> int | None:
        """Return of how many runs a figure is the mean, None where it is not played, or no seed changes it."""
        if name not in self.found or place not in self.found[name].figures:
            return None
        content, (levels, _, rest) = self.found[name].content, place.partition("; ")
        if "cells" not in content or "columns" not in content:
            if seeds := self.found[name].figures.get(f"{levels}; seeds"):
                return round(seeds)
            return 1 if any(_all(content, "seed")) else None
        if rest in COUNTED or "seed" in rest or rest.endswith("seconds"):
            return None
        return sum(", ".join(cell["levels"]) == levels and bool(cell["figures"]) for cell in content["cells"]) or None

    def apart(self, name: str) -> list[str]:
        """Return what of a record is not as its command would play it now: keys, levels, seeds left, failures.

        Records of scripts have no settings to compare.
        """
        cells = self.found[name].content.get("cells", [])
        if not cells:
            return []
        now = choose(self.found[name].content["name"], self.folder, quick=self.found[name].content["quick"])
        wanted = {(cell.levels, cell.seed): without_device(now.settings(cell)) for cell in now.cells()}
        of_levels = {levels: settings for (levels, _), settings in wanted.items()}
        keys: dict[str, int] = {}
        for cell in (one for one in cells if tuple(one["levels"]) in of_levels):
            settings = without_device(cell["settings"]) | {"seed": cell["seed"]}
            near = of_levels[tuple(cell["levels"])] | {"seed": cell["seed"]}
            if other := sorted(key for key in settings | near if settings.get(key) != near.get(key)):
                told = ", ".join(f"{key} ({_length(settings[key])})" if key == "length" else key for key in other)
                keys[told] = keys.get(told, 0) + 1
        played = {(tuple(cell["levels"]), cell["seed"]) for cell in cells}
        left = {levels for levels, seed in wanted if (levels, seed) not in played} & {levels for levels, _ in played}
        failed = sum("failed" in cell for cell in cells)
        gone = sum(tuple(cell["levels"]) not in of_levels for cell in cells)
        of = f"of its {len(cells)} cells"
        said = [f"{number} {of} differ from the command in {told}" for told, number in keys.items()]
        said += [f"{gone} {of} have levels that the command has no more"] if gone else []
        said += [f"{len(left)} of its rows have fewer seeds than the command"] if left else []
        return said + ([f"{failed} {of} failed, without which the means are"] if failed else [])

    def command(self, name: str) -> str:
        """Return the command that plays a record."""
        if name in SCRIPTS:
            return SCRIPTS[name]
        quick = " --quick" if name not in self.experiments else ""
        return f"moretta reproduce {name.removesuffix('-quick')}{quick} --data DIR"


def alike(kept: float | None, value: float | None) -> bool:
    """Return whether a row's figure is what its cells come to: none of a failed cell, or a deviation of one seed."""
    if value is None or not math.isfinite(value):
        return kept is None
    return kept is not None and math.isclose(kept, value, rel_tol=1e-9, abs_tol=1e-12)


def _length(length: Mapping[str, int]) -> str:
    ((unit, number),) = length.items()
    return f"{number:,} {unit}"


def _of_cells(cells: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the places of a record of `moretta reproduce`."""
    for levels in dict.fromkeys(", ".join(cell["levels"]) for cell in cells):
        runs = [cell for cell in cells if ", ".join(cell["levels"]) == levels]
        names = list(dict.fromkeys(name for run in runs for name in run["settings"]["figures"]))
        for name in names:
            values = [run["figures"][name] for run in runs if run["figures"]]
            mean = statistics.fmean(values) if values else math.nan
            deviation = statistics.stdev(values) if len(values) > 1 else math.inf
            yield from ((f"{levels}; {name}", mean), (f"{levels}; {name}; ±", deviation))
            if len(names) == 1:
                yield from ((levels, mean), (f"{levels}; ±", deviation))
                yield from ((f"{levels}; seed {run['seed']}", run["figures"].get(name, math.nan)) for run in runs)
        yield from ((f"{levels}; seed {run['seed']}; seconds", seconds_of(run)) for run in runs)
        yield f"{levels}; seconds", statistics.fmean(map(seconds_of, runs))
        for key in ("rounds", "epochs", "parameters"):
            yield f"{levels}; {key}", runs[0][key]
        yield from ((f"{levels}; {key}", value) for key, value in _work(runs[0]).items())
        points: dict[int, list[float]] = {}
        for run in runs:
            every = int(run["settings"].get("run.evaluate-every", 0)) or run["rounds"]
            for at, value in run.get("curve") or []:
                number = min(every * round(at * run["rounds"] / run["epochs"] / every), run["rounds"])
                points.setdefault(number, []).append(value)
                yield f"{levels}; seed {run['seed']}; round {number}", value
        yield from ((f"{levels}; round {number}", statistics.fmean(values)) for number, values in points.items())


def _work(run: Mapping[str, Any]) -> dict[str, float]:
    """Return rows trained on and, of BAFFLE with all parameters at once, forward passes of a row, in all silos."""
    settings = run["settings"]
    batch, silos = (int(settings.get(key, 0)) for key in ("data.batch-size", "data.silos"))
    if not batch or not silos or "protocol.local-epochs" in settings:
        return {}
    rows = float(run["rounds"] * batch * silos)
    if settings["protocol.name"] != "baffle" or settings.get("protocol.perturb") == "blocks":
        return {"rows": rows}
    if "protocol.k" not in settings or settings.get("protocol.direction") == "own":
        return {"rows": rows}
    k, last = (int(settings.get(key, settings["protocol.k"])) for key in ("protocol.k", "protocol.k-last"))
    times, more = FORWARDS[settings.get("protocol.form", "mean")]
    return {"rows": rows, **({"row-forwards": rows * (times * k + more)} if k == last else {})}


def _flat(value: object, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of JSON by the keys that lead to it. A list of scores has their case and what it is of."""
    if isinstance(value, Mapping):
        inside: Iterator[tuple[object, object]] = iter(value.items())
    elif isinstance(value, list):
        inside = ((f"{one['case']}; {one['what']}" if isinstance(one, Mapping) and "case" in one else number, one)
                  for number, one in enumerate(value))  # fmt: skip
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, float(value)
        return
    else:
        return
    for key, one in inside:
        yield from _flat(one, f"{place}; {key}" if place else str(key))


def _all(value: object, *keys: str) -> Iterator[Any]:
    """Yield the values of these keys, wherever they are in JSON, the outermost alone."""
    if isinstance(value, Mapping):
        if found := [value[key] for key in keys if value.get(key) is not None]:
            yield from found
        else:
            for one in value.values():
                yield from _all(one, *keys)
    elif isinstance(value, list):
        for one in value:
            yield from _all(one, *keys)


def _distinct(columns: Sequence[str]) -> list[str]:
    """Return heads of columns, the second of a name with its number: "p", "p 2"."""
    return [
        f"{name} {columns[:at].count(name) + 1}" if name in columns[:at] else name for at, name in enumerate(columns)
    ]
