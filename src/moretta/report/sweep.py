"""A sweep: variants from the same seeds, of which the scores on validation rows choose one.

Test rows choose nothing. Only the chosen variant's test scores are shown; the best of many would be a lucky draw.
Variants are compared seed by seed, because runs of one seed share rows and first weights. The 95 % interval is
Student's, of the mean of such differences. It ignores that the lowest of several was chosen.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moretta.contract.wording import enumerated
from moretta.errors import RunFailed
from moretta.report.folder import RoundRecord, RunRecord, is_finite
from moretta.report.table import (
    MISSING,
    OverSeeds,
    Row,
    Table,
    mean_to_digits,
    scored_keys,
    spread_of,
    summary_of,
    to_digits,
)

NAMES = {"loss": "loss", "accuracy": "accuracy", "mse": "mean squared error"}


@dataclass(frozen=True)
class Sweep:
    """Runs that differ in their settings, each from the same seeds. runs: by their names, labelled for tables."""

    runs: Mapping[str, OverSeeds]

    @cached_property
    def key(self) -> str:
        """The score that chooses: the loss on validation rows, or another where runs minimise several losses."""
        records = [record for runs in self.runs.values() for record in runs.records]
        several = len({str(record.setting("protocol", "loss")) for record in records}) > 1
        return ("accuracy" if records[0].task == "classification" else "mse") if several else "loss"

    def scores(self, name: str, key: str) -> tuple[float | None, ...]:
        """Return a score on validation rows of the released models, one a seed; None if it or the loss is no number.

        A diverged model has an accuracy, as if it predicted the first class of each row.
        """
        lines = (_released(record) for record in self.runs[name].records)
        known = (None if line is None or not is_finite(line.validation_loss) else line for line in lines)
        return tuple(None if line is None else getattr(line, f"validation_{key}") for line in known)

    def is_evaluated(self, name: str, key: str) -> bool:
        """Return whether the released model of each seed has the score, finite or not."""
        lines = map(_released, self.runs[name].records)
        return all(line is not None and f"validation_{key}" in line.model_fields_set for line in lines)

    @cached_property
    def chosen(self) -> str:
        """The name of the variant with the best mean. Raises RunFailed if no variant has a score from each seed."""
        means = {name: spread_of(self.scores(name, self.key))[0] for name in self.runs}
        known = {name: mean for name, mean in means.items() if mean is not None}
        if not known:
            evaluated = all(self.is_evaluated(name, self.key) for name in self.runs)
            why = "training diverged; lower learning-rate"
            raise RunFailed(
                f"no variant has a finite {NAMES[self.key]} on validation rows from each seed, because "
                f"{why if evaluated else 'some last rounds were not evaluated; set evaluate-every = 1'}"
            )
        return (max if self.key == "accuracy" else min)(known, key=lambda name: known[name])

    def difference(self, name: str) -> tuple[float | None, float | None]:
        """Return a variant's distance from the chosen one's score, the mean over seeds, and half of its interval."""
        from scipy.special import stdtrit  # part of the extra for training

        pairs = zip(self.scores(name, self.key), self.scores(self.chosen, self.key), strict=True)
        mean, deviation = spread_of([None if a is None or b is None else a - b for a, b in pairs])
        seeds = len(self.runs[name].seeds)
        half = None if deviation is None else float(stdtrit(seeds - 1, 0.975)) * deviation / math.sqrt(seeds)
        return mean, half

    def table(self) -> Table:
        """Return a row a variant: its score, its distance from the chosen one's, and the accuracy of classes."""
        accuracy = self.key == "loss" and any(self.scores(self.chosen, "accuracy"))
        rows = []
        for name, run in self.runs.items():
            mean, half = self.difference(name)
            difference = MISSING
            if name != self.chosen and mean is not None:
                sides = [] if half is None else [to_digits(mean + side, half, "+") for side in (-half, half)]
                difference = to_digits(mean, half, "+") + (f" [{', '.join(sides)}]" if sides else "")
            further = [self._mean(name, "accuracy").partition(" ± ")[0]] if accuracy else []
            cells = (self._mean(name, self.key), difference, *further)
            rows.append(Row("", f"{'* ' * (name == self.chosen)}{run.label}", "", cells))
        heads = ("Run", f"Validation {NAMES[self.key]}", "From the chosen [95 %]")
        return Table((*heads, "Accuracy") if accuracy else heads, tuple(rows))

    def _mean(self, name: str, key: str) -> str:
        mean, deviation = spread_of(self.scores(name, key))
        if mean is not None:
            return mean_to_digits(mean, deviation)
        return "diverged" if self.is_evaluated(name, key) else "not evaluated"

    def sentences(self) -> list[str]:
        """Return notes for readers of the table."""
        best, seeds = "highest" if self.key == "accuracy" else "lowest", self.runs[self.chosen].seeds
        differences = {name: self.difference(name) for name in self.runs if name != self.chosen}
        known = [
            (name, mean, half) for name, (mean, half) in differences.items() if mean is not None and half is not None
        ]
        near = [self.runs[name].label for name, mean, half in known if abs(mean) <= half]
        notes = [f"* is chosen: the {best} mean {NAMES[self.key]} on validation rows; test rows had no part in it."]
        if len(seeds) == 1:
            notes.append("One seed does not show whether a difference is more than chance; give --seeds 5.")
        return [*notes, f"These seeds do not separate it from: {enumerated(near)}."] if near else notes

    def as_json(self) -> dict[str, Any]:
        """Return the choice and each variant's figures, for JSON; test scores only for the chosen one."""
        figures = dict[str, Any]()
        for name, run in self.runs.items():
            hidden = set() if name == self.chosen else scored_keys(run.records)
            figures[name] = {key: value for key, value in run.as_json().items() if key not in hidden}
            for key in NAMES:
                values = self.scores(name, key)
                if any(value is not None for value in values):
                    figures[name][f"validation_{key}"] = summary_of(values)
            figures[name]["from_chosen"] = dict(zip(("mean", "half_interval"), self.difference(name), strict=True))
        return {"chosen": self.chosen, "judged_by": f"validation_{self.key}", "spread": figures}


def _released(record: RunRecord) -> RoundRecord | None:
    """Return the round whose model a run released: the best one under early stopping, else the last."""
    number = record.facts.get("best_round", record.rounds)
    return next((line for line in record.history if line.round == number), None)
