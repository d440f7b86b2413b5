"""Tables of runs: side by side, over seeds, by class and by silo, and the meaning of their scores' scales.

A table is made once, as text, and shown twice: as a `rich` table for a terminal and as HTML by a macro of
templates/tables.html.j2. A measure of a run is listed once, in `_measures`: side by side it has a cell a run, over
seeds its mean and deviation. A row's header has the unit, chosen for the whole row, so that the digits are comparable.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rich import box
from rich import table as rich_table
from rich.text import Text

from moretta.protocols.registry import ENTRIES, REFERENCE
from moretta.report.folder import Attacked, ClassTables, RunRecord, SiloScore

PHASES = {
    "perturbation": "Perturbation",
    "preparation": "Preparation at silos",
    "local_forward": "Local forward",
    "local_backward": "Local backward",
    "aggregation": "Aggregation",
    "update": "Update",
    "delivery": "Delivery",
}
"""The phases of a round, in the order in which they happen."""

METRICS = {
    "auc": "AUC",
    "balanced_accuracy": "Balanced accuracy",
    "average_precision": "Average precision",
    "f1": "F1 of the second class",
    "f1_macro": "F1, mean of classes",
    "brier": "Brier score",
    "calibration_error": "Calibration error",
}

MISSING = "–"

SCORED = ("On the test rows", "On rows that silos hold back")
"""The groups of a comparison that hold scores."""


@dataclass(frozen=True)
class Row:
    """One line of a table. group: its heading, if any. unit: of its cells."""

    group: str
    measure: str
    unit: str
    cells: tuple[str, ...]

    @property
    def header(self) -> str:
        """The measure with its unit."""
        return f"{self.measure} ({self.unit})" if self.unit else self.measure


@dataclass(frozen=True)
class Table:
    """A table of numbers as text.

    Attributes:
        heads: The heads of the columns; the first is that of the rows' names.
        over: Names above the heads.
    """

    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    over: tuple[str, ...] = ()

    @property
    def groups(self) -> list[tuple[str, list[Row]]]:
        """The rows below their headings."""
        return [(name, list(members)) for name, members in groupby(self.rows, key=lambda row: row.group)]

    def rich(self, most: int | None = None) -> rich_table.Table:
        """Return the table for a terminal. most: rows; a page has all."""
        shown = rich_table.Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
        for place, head in enumerate(self.heads):
            shown.add_column(Text(head), justify="right" if place else "left", overflow="fold")
        for group, rows in self.groups:
            if group:
                shown.add_row(Text(group, style="bold"))
            for row in rows[:most]:
                shown.add_row(Text(f"{'  ' * bool(group)}{row.header}"), *(Text(cell) for cell in row.cells))
        if most is not None and len(self.rows) > most:
            shown.add_row(f"and {len(self.rows) - most} more in result.json")
        return shown


def label_of(record: RunRecord) -> str:
    """Return the field's name of the run's protocol, or its bare name if this version does not know it."""
    entry = ENTRIES.get(record.protocol)
    return record.protocol if entry is None else entry.label


def labels(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """Return a short, distinct name for each run: its protocol, and its folder or number if needed."""
    names = [label_of(record) for record in records]
    # For a folder named by its protocol and more, such as pbpfl-partitions-all, only the rest is shown.
    names = _distinct(names, [_further(record) for record in records])
    return tuple(_distinct(names, [str(number) for number in range(1, len(records) + 1)]))


def _distinct(names: Sequence[str], further: Sequence[str]) -> list[str]:
    count = Counter(names)
    return [f"{name} ({more})" if count[name] > 1 and more else name for name, more in zip(names, further, strict=True)]


def _further(record: RunRecord) -> str:
    folder = record.folder
    if re.fullmatch(r"seed-\d+", folder.name):  # of a sweep, where one folder has all runs of a protocol or variant
        folder = folder.parent
    name = folder.name or record.name
    return name.removeprefix(record.protocol).lstrip("-") if f"{name}-".startswith(f"{record.protocol}-") else name


# -- measures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measure:
    """A number of a run. key: in the JSON of a sweep, empty if absent. unit: "bytes", "s" or empty.

    digits: significant ones, for a fact. of: returns its value in a run, or `None`. It has an interval if the run has
    one under its key.
    """

    group: str
    name: str
    key: str
    of: Callable[[RunRecord], Any]
    unit: str = ""
    digits: int = 0

    def row(self, records: Sequence[RunRecord]) -> Row:
        """Return the measure's row, a cell a run."""
        values = [self.of(record) for record in records]
        unit, size = self.scale(values)
        return Row(self.group, self.name, unit, tuple(self._cell(value, size) for value in values))

    def sure(self, run: RunRecord) -> str:
        """Return the measure's interval in a run, empty without one."""
        low, high = run.test.intervals.get(self.key, (None, None))
        return "" if low is None or high is None else f"{plain(low)} to {plain(high)}"

    def guessed(self, run: RunRecord) -> str:
        """Return the score of always naming the commonest class, or the mean, in a run; empty if unknown."""
        return "" if (value := run.test.guessed(self.key)) is None else plain(value)

    def scale(self, values: Iterable[float | None]) -> tuple[str, float]:
        """Return the unit that suits all values, and its size."""
        return byte_unit(max(value or 0.0 for value in values)) if self.unit == "bytes" else (self.unit, 1.0)

    def _cell(self, value: Any, size: float) -> str:
        if value is None or isinstance(value, str):
            return value or MISSING
        if self.digits:
            return f"{value:.{self.digits}g}" if isinstance(value, float) else MISSING
        return _three_digits(value / size) if self.unit else plain(value)


def _at(*path: str) -> Callable[[RunRecord], Any]:
    """Return a function that finds a value in a run, or None if its path ends before."""

    def value(run: RunRecord) -> Any:
        value: Any = run
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        return value

    return value


def _epsilon_of(unit: str) -> Callable[[RunRecord], Any]:
    """Return a function that finds the epsilon of runs whose noise hides this unit."""
    return lambda run: run.facts.get("epsilon") if run.facts.get("unit", "row") == unit else None


def _measures(records: Sequence[RunRecord]) -> Iterator[_Measure]:
    """Yield the measures of runs, in the order of tables."""
    leading = next((record.test.headline for record in records if len(record.test.headline) > 1), ())
    yield from sorted(_scores(records), key=lambda measure: [*leading, measure.key].index(measure.key))
    privacy, up, down = "Differential privacy", "up_per_silo_per_round", "down_per_silo_per_round"
    yield _Measure("Early stopping", "Best round", "", _at("facts", "best_round"), digits=9)
    yield _Measure(privacy, "Epsilon, of one example at one silo", "epsilon", _epsilon_of("row"), digits=3)
    yield _Measure(privacy, "Epsilon, of one group of rows at one silo", "", _epsilon_of("group"), digits=3)
    yield _Measure(privacy, "Epsilon, of one silo’s updates", "epsilon", _epsilon_of("silo"), digits=3)
    yield _Measure(privacy, "Epsilon towards another silo", "", _at("facts", "epsilon_to_silos"), digits=3)
    yield _Measure(privacy, "Delta", "", _at("facts", "delta"), digits=3)
    yield _Measure("Traffic", "Up, per silo and round", up, _at("traffic", up), "bytes")
    yield _Measure("Traffic", "Down, per silo and round", down, _at("traffic", down), "bytes")
    yield _Measure("Traffic", "Keys and shares, whole run", "", _at("traffic", "secure_aggregation"), "bytes")
    yield _Measure("Time", "Total", "seconds", _at("seconds", "total"), "s")
    for phase, name in phases(records).items():
        yield _Measure("Time", name, "", _at("seconds", phase), "s")
    yield _Measure("Time", "In no phase", "", lambda run: other_seconds(run.seconds), "s")


def _scores(records: Sequence[RunRecord]) -> Iterator[_Measure]:
    where = SCORED[all(record.test.by == "silos" for record in records)]
    confined = [record.test.mean is not None for record in records]
    worst = ", worst confined model" if all(confined) else ", of confined models the worst" if any(confined) else ""
    for key, name in (("accuracy", "Accuracy"), ("mse", "Mean squared error")):
        yield _Measure(where, f"{name}{worst}", key, _at("test", key))
        yield _Measure(where, f"{name}, mean of confined models", f"{key}_of_mean", _at("test", "mean", key))
        yield _Measure(where, f"{name}, D alone", "", _at("test", "displacement", key))
        yield _Measure(where, f"{name}, on rows that silos hold back", "", _at("test", "silos", key))
    yield _Measure(where, f"Loss{worst}", "loss", _at("test", "loss"))
    yield _Measure(where, "Top-5 accuracy", "top5", _at("test", "top5"))
    others = {key: _words(key) for record in records for key in record.test.metrics if key not in METRICS}
    for key, name in (METRICS | others).items():
        yield _Measure(where, name, key, _at("test", "metrics", key))


def scored_keys(records: Sequence[RunRecord]) -> set[str]:
    """Return the keys of scores on test rows in the JSON of a sweep."""
    return {measure.key for measure in _scores(records)}


# -- tables ------------------------------------------------------------------------------------------------------------


def comparison(records: Sequence[RunRecord], differences: Mapping[str, float] | None = None) -> Table:
    """Return the measures that at least one of the runs has, a column a run.

    Args:
        differences: The largest relative difference of the final weights from the reference's, by run folder (its path
            or its name) or by protocol.
    """
    rows, several = list[Row](), len(records) > 1
    heads, sure = ("Measure", *labels(records)), any(record.test.intervals for record in records)
    leading = {key for record in records for key in record.test.headline}
    for measure in _measures(records):
        rows.append(row := measure.row(records))
        if sure and not several:
            more = measure.sure(records[0]), measure.guessed(records[0])
            rows[-1] = row if set(row.cells) == {MISSING} else replace(row, cells=(*row.cells, *more))
        elif sure and measure.key in leading:
            intervals = tuple(measure.sure(record) or MISSING for record in records)
            rows.append(Row(row.group, f"{measure.name}, 95 % interval", "", intervals))
    if unlike_rows(records):
        rows.insert(0, _Measure(next(_scores(records)).group, "Rows", "", _at("test", "rows")).row(records))
    if differences:
        keys = [(str(record.folder), record.folder.name, record.protocol) for record in records]
        distances = [next((differences[key] for key in aliases if key in differences), None) for aliases in keys]
        words = {0.0: "0", math.inf: "diverged"}
        cells = tuple(MISSING if value is None else words.get(value, f"{value:.1e}") for value in distances)
        rows.append(Row("Final weights", f"Largest relative difference from {ENTRIES[REFERENCE].label}", "", cells))
    heads = heads if several or not sure else (*heads, "95 % interval", "Guessing")
    return Table(heads, tuple(row for row in rows if set(row.cells) != {MISSING}))


def unlike_rows(records: Sequence[RunRecord]) -> str:
    """Return a warning if runs were scored on different rows, or nothing."""
    scored = [record for record in records if record.test.available]
    if all(scored[0].scored_as(record) for record in scored):
        return ""
    counts = [MISSING if record.test.rows is None else f"{record.test.rows:,.0f}" for record in scored]
    listed = ", ".join(f"{label} on {count}" for label, count in zip(labels(scored), counts, strict=True))
    return f"These runs were scored on different rows ({listed}), so their scores do not compare."


COSTS = ("Traffic", "Time")
"""The groups of a comparison with the costs of runs."""


def separate(table: Table, groups: Sequence[str], columns: int) -> tuple[Table, Table]:
    """Return a table without some groups of rows, and a table of those groups with this many columns."""
    left = tuple(row for row in table.rows if row.group not in groups)
    taken = tuple(replace(row, cells=row.cells[:columns]) for row in table.rows if row.group in groups)
    return Table(table.heads, left), Table(table.heads[: columns + 1], taken)


@dataclass(frozen=True)
class OverSeeds:
    """Runs that differ in their seed alone, one a seed. label: for a table's head."""

    label: str
    seeds: tuple[int, ...]
    records: tuple[RunRecord, ...]

    def values(self, measure: _Measure) -> tuple[float | None, ...]:
        """Return a measure's values, one a seed; None if it is no finite number, or the score of a diverged model."""
        scored = measure.group in SCORED  # such a model has an accuracy, as if it predicted the first class
        values = (None if scored and record.test.diverged else measure.of(record) for record in self.records)
        numbers = (float(value) if isinstance(value, int | float) else math.nan for value in values)
        return tuple(value if math.isfinite(value) else None for value in numbers)

    def as_json(self) -> dict[str, Any]:
        """Return mean, deviation and values of each measure, as JSON has them."""
        summaries = {}
        for measure in (*_measures(self.records), ROUNDS):
            values = self.values(measure) if measure.key else ()
            if any(value is not None for value in values):
                summaries[measure.key] = summary_of(values)
        return summaries


ROUNDS = _Measure("", "Rounds", "rounds", _at("rounds"))


def summary_of(values: Sequence[float | None]) -> dict[str, Any]:
    """Return the mean, the deviation and the values, as JSON has them."""
    mean, deviation = spread_of(values)
    return {"mean": mean, "deviation": deviation, "values": list(values)}


def spread_of(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Return mean and sample deviation (n - 1; None for one seed), both None if a run lacks the number."""
    finite = [value for value in values if value is not None]
    if not finite or len(finite) < len(values):
        return None, None
    return statistics.fmean(finite), statistics.stdev(finite) if len(finite) > 1 else None


def spread(spreads: Sequence[OverSeeds]) -> Table:
    """Return a row a measure, each cell the mean and the deviation of the runs of a protocol or variant."""
    every = [record for runs in spreads for record in runs.records]
    rows = list[Row]()
    for measure in (*_measures(every), ROUNDS):
        values = [runs.values(measure) for runs in spreads if measure.key]
        if any(value is not None for series in values for value in series):
            spreads_of = [spread_of(series) for series in values]
            unit, size = measure.scale(mean for mean, _ in spreads_of)
            sides = [
                (mean if mean is None else mean / size, deviation and deviation / size)
                for mean, deviation in spreads_of
            ]
            cells = (MISSING if mean is None else mean_to_digits(mean, deviation) for mean, deviation in sides)
            rows.append(Row("", measure.name, unit, tuple(cells)))
    return Table(("Measure", *(runs.label for runs in spreads)), tuple(rows))


SHOWN = 20  # the most classes in a terminal; the page has all
COUNTED_UP_TO = 8  # the most classes whose confusion fits beside them in a terminal


def classes(tables: ClassTables, *, narrow: bool = False) -> Table:
    """Return the classes of one model: rows, precision, recall, F1 and, if narrow only for few, the confusion."""
    confusion = () if narrow and len(tables.by_class) > COUNTED_UP_TO else tables.confusion
    named = [f"as {row.name}" for row in tables.by_class] if confusion else []
    rows = []
    for place, row in enumerate(tables.by_class):
        cells = [f"{row.rows:,}", plain(row.precision), plain(row.recall), plain(row.f1)]
        counts = confusion[place] if confusion else ()
        rows.append(Row("", row.name, "", (*cells, *(f"{count:,}" for count in counts))))
    return Table(("Class", "Rows", "Precision", "Recall", "F1", *named), tuple(rows))


def calibration(tables: ClassTables) -> Table:
    """Return rows by the probability of their predicted class."""
    rows = (
        Row(
            "",
            f"{bin_of_table.low} to {bin_of_table.high}",
            "",
            (f"{bin_of_table.rows:,}", plain(bin_of_table.probability), plain(bin_of_table.accuracy)),
        )
        for bin_of_table in tables.reliability
    )
    return Table(("Probability", "Rows", "Mean probability", "Accuracy"), tuple(rows))


def by_silo(records: Sequence[RunRecord]) -> Table:
    """Return each silo's rows and, for each run, its scores."""
    regression = all(record.task == "regression" for record in records)
    silos = dict.fromkeys(silo for record in records for silo in record.test.per_silo)
    scores_of = {silo: [record.test.per_silo.get(silo, SiloScore()) for record in records] for silo in silos}
    ones = [score for scores in scores_of.values() for score in scores]
    further = [key for key in ("f1_macro", "calibration_error") if any(key in score.metrics for score in ones)]
    rows = []
    for silo, scores in scores_of.items():
        counts = dict.fromkeys(f"{score.rows:,}" for score in scores if score.rows is not None)
        values = [
            (score.mse if regression else score.accuracy, score.loss, *(score.metrics.get(key) for key in further))
            for score in scores
        ]
        cells = (" / ".join(counts) or MISSING, *(plain(value) for series in values for value in series))
        rows.append(Row("", silo, "", cells))
    heads = ("MSE" if regression else "Accuracy", "Loss", *(METRICS[key] for key in further))
    return Table(("Silo", "Rows", *heads * len(records)), tuple(rows), labels(records))


def versions(records: Sequence[RunRecord]) -> Table:
    """Return the versions of programs that runs recorded."""
    programs = dict.fromkeys(program for record in records for program in record.versions)
    rows = (Row("", name, "", tuple(record.versions.get(name) or MISSING for record in records)) for name in programs)
    return Table(("Program", *labels(records)), tuple(rows))


# -- numbers as text ---------------------------------------------------------------------------------------------------


def byte_unit(largest: float) -> tuple[str, float]:
    """Return the decimal unit in which `largest` has one to three digits before the point, and its size in bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if largest >= size:
            return unit, size
    return "bytes", 1.0


def human_bytes(count: float) -> str:
    """Return a count of bytes to three significant digits, such as 26.2 kB."""
    unit, size = byte_unit(count)
    return f"{_three_digits(count / size)} {unit}"


def human_seconds(seconds: float) -> str:
    """Return seconds to three significant digits, such as 8.10 s."""
    return f"{_three_digits(seconds)} s"


def other_seconds(seconds: Mapping[str, float]) -> float:
    """Return the total minus all phases; 0 where phases of parallel silos exceed the total."""
    return max(0.0, seconds["total"] - sum(value for phase, value in seconds.items() if phase != "total"))


def phases(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return the phases that any run timed, with their names, the known ones first."""
    seen = {phase: None for record in records for phase in record.seconds if phase != "total"}
    known = {phase: name for phase, name in PHASES.items() if phase in seen}
    return known | {phase: _words(phase) for phase in seen if phase not in PHASES}


def plain(value: float | None, digits: int = 4) -> str:
    """Return a score with this many decimals; in scientific form if these would all be zeros."""
    if value is None:
        return MISSING
    if value != 0 and not 10 ** (1 - digits) <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.{digits}f}"


def to_digits(value: float, error: float | None, sign: str = "") -> str:
    """Write a value to two significant digits of its error. sign: "+" always writes the sign."""
    digits = max(0, 1 - math.floor(math.log10(error))) if error else 9
    if digits > 6:
        return f"{sign * (value > 0)}{plain(value)}"
    return f"{value:{sign}.{digits}f}"


def mean_to_digits(mean: float, deviation: float | None) -> str:
    """Write a mean and its deviation to two significant digits of the deviation; to four digits if it is 0."""
    if deviation == 0:
        return f"{mean:g} ± 0" if mean.is_integer() else f"{mean:.4g} ± 0"
    return to_digits(mean, deviation) + ("" if deviation is None else f" ± {to_digits(deviation, deviation)}")


def _words(key: str) -> str:
    words = key.replace("_", " ")
    return words[:1].upper() + words[1:]


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}" if value >= 0.01 else f"{value:.1g}"


# -- scales ------------------------------------------------------------------------------------------------------------


SCALES: Mapping[str, str] = {
    "Accuracy": "fraction of rows classified correctly",
    "Top-5 accuracy": "fraction of rows whose class is among the five likeliest",
    "Balanced accuracy": "mean over classes of the fraction of their rows classified correctly",
    "AUC": "probability that a row of a class scores above any other row; 0.5 is guessing",
    "Average precision": "mean precision over all thresholds, each weighted by the recall that it adds",
    "F1": "harmonic mean of precision and recall",
    "F1, mean of classes": "mean over classes of the harmonic mean of precision and recall",
    "Brier score": "mean squared distance of probabilities from the truth; 0 is perfect, 2 the worst",
    "Calibration error": "mean gap between stated probability and accuracy; 0 is perfect",
    "Mean squared error": "mean squared distance from the targets; 0 is perfect",
    "Rows": "rows scored, which are not the same ones for these runs",
    "Loss": "training loss on these rows, without class weights and label smoothing; less is better",
}
"""By the beginning of a measure's name in a comparison: its definition, in one short phrase."""

UNKNOWN = "a metric of the run’s own"

ZEROS: Mapping[str, str] = {
    "area under the ROC curve": "wrong every time",
    "1 - relative error": "an error as large as the value itself",
    "1 - mean squared error of rows": "no nearer than the mean row",
    "1 - squared error of rows": "no nearer than the mean row",
    "1 - error of": "completely wrong",
    "cosine": "an unrelated direction",
    "rate of": "none right",
    "rows ": "none right",
    "accuracy": "none right",
    "part of": "none",
    "share of": "none",
    "R^2": "no nearer than the mean",
    "adjusted Rand index": "groups at random",
}
"""By the beginning of an attack's measure: the meaning of a score of 0. In all of them 1 is the most."""


def meanings(rows: Iterable[Row]) -> Mapping[str, str]:
    """Return the meanings of the scores' scales in a comparison, once each."""
    names = dict.fromkeys(_name(row.measure) for row in rows if row.group in SCORED)
    return {name: SCALES.get(name, UNKNOWN) for name in names}


def _name(measure: str) -> str:
    """Return the longest name of `SCALES` with which a measure's name begins; without one, its own name."""
    known = (name for name in SCALES if f"{measure},".startswith((f"{name},", f"{name} ")))
    return max(known, key=len, default=measure)


def figure(value: float | None) -> str:
    """Return a score in a few digits: 0.999, and 1 only if it is not less."""
    if value is None:
        return MISSING
    return f"{value:.6g}" if 0.9995 <= abs(value) < 1.0 else f"{value:.3g}"


def ends(attack: Attacked) -> str:
    """Return the places of guessing, the most frequent value, the best and 0 on the scale of an attack's score."""
    guessing = "guessing is not known" if attack.chance is None else f"{figure(attack.chance)} is guessing"
    if attack.constant is not None:
        share = "" if attack.constant == attack.chance else f", {figure(attack.constant)}"
        guessing += f"{share or ' or'} always naming the most frequent value"
    zero = next((words for start, words in ZEROS.items() if attack.measure.startswith(start)), "")
    worst = f", 0 {zero}" if zero and attack.chance != 0 else ""
    return f"{guessing}, 1 perfect{worst}"


def way(attack: Attacked) -> str:
    """Return a successful attack's part of the distance from guessing to perfect, in percent."""
    reached = min(100.0, 100 * attack.advantage)
    return f"{reached:{'.3g' if reached < 99.95 else '.6g'}} % of the way from guessing to perfect"
