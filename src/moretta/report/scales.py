"""What the ends of a score's scale mean, in words: no number that is a score stands on a page without them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moretta.report.folder import Attacked
from moretta.report.table import MISSING

METRICS: Mapping[str, str] = {
    "Accuracy": "part of the rows whose class is named rightly: 0 is none and 1 is all; to name the commonest class "
    "always gets that class’s part, and guessing evenly gets 1 in as many as there are classes",
    "Top-5 accuracy": "part of the rows whose class is among the five likeliest: 0 is none and 1 is all; guessing "
    "evenly gets 5 in as many as there are classes",
    "Balanced accuracy": "mean over classes of the part of their rows that are named rightly: 0 is none and 1 is all; "
    "guessing gets 1 in as many as there are classes, 0.5 of two",
    "AUC": "how often a row of a class is ranked above one of another: 0.5 is guessing, 1 perfect, 0 always wrong",
    "F1": "how well a class is found and nothing else taken for it: 0 is nothing right and 1 is perfect; guessing gets "
    "about the part of the rows that the class has",
    "F1, mean of classes": "mean of F1 over classes, how well each is found and nothing else taken for it: 0 is "
    "nothing right and 1 is perfect; guessing evenly gets about 1 in as many as there are classes",
    "Brier score": "squared distance of probabilities from the truth: 0 is perfect and 2 the worst; guessing evenly "
    "gets 0.5 of two classes and nears 1 of many",
    "Calibration error": "how far stated probabilities are from how often they are right: 0 is perfect and 1 the "
    "worst; it does not say how often they are right, and guessing that says so has 0",
    "Mean squared error": "0 is perfect, and there is no upper end; to guess the mean always gets the variance of the "
    "targets",
    "Loss": "what training lowers: 0 is perfect, and there is no upper end; under cross-entropy guessing evenly gets "
    "0.69 of two classes and 2.3 of ten",
}
"""By the beginning of a measure's name in a comparison: what it is, and what its ends and guessing are."""

UNKNOWN = "what its ends are, the run does not say"

ZEROS: Mapping[str, str] = {
    "area under the ROC curve": "wrong every time",
    "1 - relative error": "an error as large as the thing itself",
    "1 - mean squared error of rows": "no nearer than the mean row",
    "1 - squared error of rows": "no nearer than the mean row",
    "1 - error of": "wrong by all there is",
    "cosine": "a direction that tells nothing",
    "rate of": "none right",
    "rows ": "none right",
    "accuracy": "none right",
    "part of": "none",
    "R^2": "no nearer than the mean",
    "adjusted Rand index": "groups at random",
}
"""By the beginning of an attack's measure: what a score of 0 is. In all of them 1 is the most to be learnt."""


def meanings(measures: Iterable[str]) -> Mapping[str, str]:
    """Return what the scales of these measures of a comparison mean, once each."""
    return {name: METRICS.get(name, UNKNOWN) for name in dict.fromkeys(map(_name, measures))}


def _name(measure: str) -> str:
    """Return which of `METRICS` a measure is: the longest that its name begins with; its own name for another."""
    known = (name for name in METRICS if f"{measure},".startswith((f"{name},", f"{name} ")))
    return max(known, key=len, default=measure)


def figure(value: float | None) -> str:
    """A score in a few digits: 0.999, and 1 only where it is no less."""
    if value is None:
        return MISSING
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 0.9995 or abs(value) >= 1.0 else f"{value:.6g}"


def ends(one: Attacked) -> str:
    """Return what guessing, the best and 0 are on the scale of an attack's score."""
    guessing = "guessing is not known" if one.chance is None else f"{figure(one.chance)} is guessing"
    zero = next((words for start, words in ZEROS.items() if one.measure.startswith(start)), "")
    worst = f", 0 {zero}" if zero and one.chance != 0 else ""
    return f"{guessing}, 1 perfect{worst}"


def way(one: Attacked) -> str:
    """Return how far an attack that succeeded got, of the way from guessing to the most to be learnt."""
    reached = min(100.0, 100 * one.advantage)
    return f"{reached:{'.3g' if reached < 99.95 else '.6g'}} % of the way from guessing to perfect"
