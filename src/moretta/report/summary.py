"""A page's title, and what its runs were in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence

from moretta.contract.wording import enumerated
from moretta.report.folder import PlainScores, RunRecord, TestScores
from moretta.report.table import human_bytes, human_seconds, label_of, labels, plain

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def title(records: Sequence[RunRecord]) -> str:
    """The names of the runs, and the protocol of one or the number of several."""
    names = ", ".join(dict.fromkeys(record.name for record in records))
    return f"{names}: " + (label_of(records[0]) if len(records) == 1 else f"{len(records)} runs compared")


def insecure_runs(records: Sequence[RunRecord]) -> str:
    """The runs whose secrets came from the run file, as the subject of a sentence; empty where there are none."""
    runs = [label for label, record in zip(labels(records), records, strict=True) if record.insecure_secret_seed]
    if not runs or len(records) == 1:
        return "This run" if runs else ""
    return f"The run{'' if len(runs) == 1 else 's'} {enumerated(runs)}"


def summary(records: Sequence[RunRecord]) -> str:
    """What was trained, what was sent, and who missed a round."""
    return _summary_of_one(records[0]) if len(records) == 1 else _summary_of_many(records)


def _summary_of_one(record: RunRecord) -> str:
    sent, received = record.traffic.up_per_silo_per_round, record.traffic.down_per_silo_per_round
    traffic = (
        f"In each round a silo sent {human_bytes(sent)} and received {human_bytes(received)}."
        if sent or received
        else "The silos sent and received nothing during training."
    )
    return f"{_cohort(record)} with {label_of(record)}, in {human_seconds(record.seconds['total'])}. " + (
        f"{traffic} {_missed(record)}"
    )


def _summary_of_many(records: Sequence[RunRecord]) -> str:
    names = labels(records)
    how_many = _number_word(len(records))
    if len({(record.name, record.parameters, record.silos, record.rounds) for record in records}) == 1:
        opening = f"{_cohort(records[0])}, in {how_many} ways: {enumerated(names)}."
    else:
        opening = (
            f"{how_many.capitalize()} runs: {enumerated(names)}. They differ in name, model size, silos or rounds."
        )
    missed = " ".join(dict.fromkeys(map(_missed, records)))
    return f"{opening} {missed}".strip()


def _cohort(record: RunRecord) -> str:
    silos = _count(record.silos, "silo")
    return (
        f"{silos[0].upper()}{silos[1:]} trained a model of {_count(record.parameters, 'parameter')} "
        f"for {_count(record.rounds, 'round')}"
    )


def _count(number: int, thing: str) -> str:
    return f"{_number_word(number)} {thing}{'' if number == 1 else 's'}"


def _number_word(number: int) -> str:
    return _WORDS[number] if 0 <= number < len(_WORDS) else f"{number:,}"


def scored(scores: TestScores | PlainScores) -> str:
    """Return an accuracy or a mean squared error in words."""
    if scores.accuracy is not None:
        return f"an accuracy of {100 * scores.accuracy:.1f} %"
    return f"a mean squared error of {plain(scores.mse)}"


def _missed(record: RunRecord) -> str:
    if not record.missed:
        return ""
    silos = len({missed.silo for missed in record.missed})
    rounds = len({missed.round for missed in record.missed})
    answers = "answers in " if record.sums is None else ""
    return f"With {label_of(record)}, {_count(silos, 'silo')} missed {answers}{_count(rounds, 'round')}."
