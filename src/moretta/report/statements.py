"""Sentences about a run: a verdict, a summary, and what it hid from whom.

The sentences on what was hidden are those claims of the run's protocol (`moretta.protocols.registry.claims_of`) whose
conditions hold for its record. A protocol or a scheme without claims has a sentence that says so. Values are
"obfuscated" if the claims use that word; stronger words need a proof or an accountant. A sentence names the attacks of
`moretta.audit` that test it. If the run was audited, their results are its evidence.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from rich.text import Text

from moretta.contract.wording import enumerated
from moretta.protocols.common.claims import (
    LISTENERS,
    MASKED,
    NAMES,
    NOTES,
    SCORES,
    Claim,
    Record,
    Word,
    epsilons,
    is_noised,
    is_summed,
    scheme,
    unit_of,
    what_epsilon_leaves_out,
)
from moretta.protocols.common.severity import SEVERITIES, TRIES
from moretta.protocols.registry import ENTRIES, claims_of
from moretta.report.audit import rounds_recorded, who_does
from moretta.report.folder import Attacked, PlainScores, RunRecord, TestScores
from moretta.report.table import OverSeeds, figure, human_bytes, label_of, labels, plain, way

HEADINGS = ("How good", "What was hidden", "What attacks got")

FAILED = "That an attack failed does not show that none can succeed"


@dataclass(frozen=True)
class Phrase:
    """A part of a sentence, and the name of the attack that it concerns, if any, set small behind it."""

    text: str
    attack: str = ""


@dataclass(frozen=True)
class Verdict:
    """Three short texts about a run, under `HEADINGS`. label: the run's among the others."""

    label: str
    good: str
    hidden: str
    attacks: tuple[Phrase, ...]

    @property
    def parts(self) -> tuple[tuple[str, tuple[Phrase, ...]], ...]:
        """Each heading with the parts of its text."""
        return tuple(zip(HEADINGS, ((Phrase(self.good),), (Phrase(self.hidden),), self.attacks), strict=True))

    @property
    def sentences(self) -> tuple[str, ...]:
        """The three texts as plain text, attacks' own names in brackets."""
        named = (((part.text, f" ({part.attack})" * bool(part.attack)) for part in parts) for _, parts in self.parts)
        return tuple("".join(text for pair in pairs for text in pair) for pairs in named)


def verdicts(
    records: Sequence[RunRecord], *, brief: bool = False, spreads: Sequence[OverSeeds] = ()
) -> tuple[Verdict, ...]:
    """Return the verdict on each run, beside those of `records` that train alone or on pooled rows.

    Args:
        brief: Omit the sentences of `remarks`.
        spreads: Each record's runs from all seeds, whose means replace its own figures.
    """
    records = _counted(records)
    if spreads:
        records = [_averaged(record, over) for record, over in zip(records, spreads, strict=True)]
    opening = "" if brief and _opening_of_all(records) else None
    return tuple(
        Verdict(label, _good(record, records, brief), _hidden(record, opening), _attacks(record, brief))
        for label, record in zip(labels(records), records, strict=True)
    )


def remarks(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """Return the sentences that would repeat in each verdict: scales, and statements that hold for all runs."""
    scales = dict.fromkeys(_scale(record) for record in _counted(records) if record.test.available)
    whole = [scale for scale in scales if not any(other != scale and other.startswith(scale) for other in scales)]
    notes = [f"{scale[0].upper()}{scale[1:]}." for scale in whole]
    if opening := _opening_of_all(records):
        notes.append(f"{opening[0].upper()}{opening[1:]}. The sentences on what was hidden are about separate roles.")
    if any(record.audit and not all(attack.succeeded for attack in record.audit.attacks) for record in records):
        notes.append(f"{FAILED[0].upper()}{FAILED[1:]}.")
    return tuple(notes)


def _opening_of_all(records: Sequence[RunRecord]) -> str:
    """Return the opening on what was hidden, if all runs share it."""
    openings = {"" if record.insecure_secret_seed else _opening(record) for record in records}
    return openings.pop() if len(openings) == 1 else ""


def verdict_text(verdict: Verdict) -> Text:
    """Return a verdict for a terminal, a paragraph for each text."""
    text = Text()
    for number, ((heading, _), sentence) in enumerate(zip(verdict.parts, verdict.sentences, strict=True)):
        text.append("\n" if number else "").append(f"{heading}: ", style="bold").append(sentence)
    return text


# -- how good ----------------------------------------------------------------------------------------------------------


def _good(record: RunRecord, records: Sequence[RunRecord], brief: bool) -> str:
    if not record.test.available:
        return "There were no test rows, so nothing measures how good the model is."
    sentence = reached(record) if record.test.diverged else f"{reached(record)}{_beside(record, records)}"
    return f"{sentence}." if brief or record.test.diverged else f"{sentence}. Scale: {_scale(record)}."


def reached(record: RunRecord) -> str:
    """Return the model's figures on its rows, each with its interval, without a full stop."""
    test = record.test
    rows = "rows that silos hold back" if test.by == "silos" else "test rows"
    count = "the" if test.rows is None else f"{test.rows:,.0f}"
    about = f" about {test.units:,} people or things" if test.units and test.units != test.rows else ""
    subject = "a silo’s own model, on average," if _trains(record) == "alone" else "the model"
    subject = subject if test.mean is None else "the worst of the silos’ models"
    over = f", on average over {test.seeds} seeds," if test.seeds else ""
    if test.diverged:
        return f"On {count} {rows}{about}{over} {subject} has no finite loss, because training diverged"
    figures = enumerated(f"{WORDS[key]} {_sure(test, key)}" for key in test.headline)
    return f"On {count} {rows}{about}{over} {subject} reaches {figures}"


WORDS = {
    "auc": "a ranking score (AUC) of",
    "balanced_accuracy": "a balanced accuracy (each class counts the same) of",
    "average_precision": "an average precision of",
    "accuracy": "an accuracy of",
    "mse": "a mean squared error of",
    "position_accuracy": "an accuracy at positions of",
    "loss": "a loss of",
}
"""Figures of a headline by their keys."""


def _sure(test: TestScores, key: str) -> str:
    """Return a figure, followed by its interval in square brackets."""
    written = _written(key, test.figure(key))
    low, high = test.intervals.get(key, (None, None))
    return written if low is None or high is None else f"{written} [{_written(key, low)} to {_written(key, high)}]"


def _written(key: str, value: float | None) -> str:
    return f"{100 * (value or 0.0):.1f} %" if key == "accuracy" else plain(value) if key == "mse" else figure(value)


def _averaged(record: RunRecord, over: OverSeeds) -> RunRecord:
    """Return a run with the means of its figures over seeds, each with their least and most."""
    if diverged := next((run.test for run in over.records if run.test.diverged), None):
        return record.model_copy(update={"test": diverged.model_copy(update={"seeds": len(over.seeds)})})
    figures = {key: [run.test.figure(key) for run in over.records] for key in record.test.headline}
    whole = {key: [value for value in values if value is not None] for key, values in figures.items()}
    means = {key: fmean(values) for key, values in whole.items()}
    sure = {key: (min(values), max(values)) for key, values in whole.items()}
    changed = {"metrics": {**record.test.metrics, **means}, "intervals": sure, "seeds": len(over.seeds)}
    changed |= {key: means[key] for key in ("accuracy", "mse", "loss") if key in means}
    return record.model_copy(update={"test": record.test.model_copy(update=changed)})


def _trains(record: RunRecord) -> str:
    """Return "alone" or "pooled" for such a baseline, "" for other runs."""
    entry = ENTRIES.get(record.protocol)
    if entry is None or not entry.baseline:
        return ""
    return "pooled" if entry.pooled else "alone"


def _beside(record: RunRecord, records: Sequence[RunRecord]) -> str:
    """Return the known scores of the run's baselines, and the mean over its silos' models."""
    key = record.test.headline[0]
    mean, what = record.test.mean, "an accuracy of " * (len(record.test.headline) > 1)
    neighbours = [] if mean is None else [f"{what}{_short(mean)} as the mean of the silos’ models"]
    for way_of, words in (("alone", "where silos train alone"), ("pooled", "where all rows are in one place")):
        others = [
            other for other in records if _trains(other) == way_of and other is not record and _alike(other, record)
        ]
        finite = (other.test for other in others if not other.test.diverged)
        known = [value for test in finite if (value := test.figure(key)) is not None]
        named = f"{WORDS[key]} " * (len(record.test.headline) > 1)  # after several figures
        neighbours += [f"{named}{_written(key, value)} {words}" for value in known[:1]]
    return f", beside {enumerated(neighbours)}" if neighbours else ""


def _short(scores: PlainScores) -> str:
    if scores.accuracy is None and scores.mse is None:
        return f"a loss of {figure(scores.loss)}"
    return plain(scores.mse) if scores.accuracy is None else f"{100 * scores.accuracy:.1f} %"


def _alike(other: RunRecord, record: RunRecord) -> bool:
    """Return whether both were trained and scored on the same rows, by their records."""
    first, second = ((run.name, run.task, run.silos, run.setting("run", "seed")) for run in (other, record))
    return first == second and other.test.available and record.scored_as(other)


def _counted(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs; one without tables of classes gets those of another on the same rows."""
    completed = []
    for record in records:
        tables = next(
            (other.test.classes for other in (record, *records) if other.test.classes and _alike(other, record)), None
        )
        completed.append(record.model_copy(update={"test": record.test.model_copy(update={"classes": tables})}))
    return completed


def _scale(record: RunRecord) -> str:
    """Return the scale of the scores, in words."""
    what = "the least and the most over seeds" if record.test.seeds else "95 % intervals"
    shown = any(key in record.test.intervals for key in record.test.headline)
    sure = f"; {what} are in square brackets" if shown else ""
    if record.test.by == "silos" and not sure:
        sure = "; there are no intervals, because sums over silos do not show how errors are spread over people"
    if record.test.accuracy is None and record.test.mse is None:
        return f"{'less is better' if 'loss' in record.test.headline else '1 is perfect'}{sure}"
    if record.test.accuracy is None:
        variance = f", {plain(record.test.baseline)}" if record.test.baseline is not None else ""
        return f"0 is perfect; always guessing the mean of the targets scores their variance{variance}{sure}"
    guesses = [_written(key, guess) for key in record.test.headline if (guess := record.test.guessed(key)) is not None]
    perfect = "1 is perfect" if len(record.test.headline) > 1 else "100 % is perfect"
    guessed = f"{enumerated(guesses)}{', in this order' * (len(guesses) > 1)}" if guesses else ""
    return (
        f"{perfect}; always guessing the most frequent class scores {guessed or 'that class’s part of the rows'}{sure}"
    )


# -- what was hidden from whom -----------------------------------------------------------------------------------------


def _hidden(record: RunRecord, opening: str | None) -> str:
    """Return what was hidden. opening: replaces the record's own, unless None."""
    if record.insecure_secret_seed:
        return (
            "Nothing was hidden, because insecure-secret-seed was set. Anyone who knows the run file can compute every "
            "key and mask."
        )
    run = record.content
    if is_summed(run) and scheme(run) not in MASKED:
        return (
            f"This version of the report has no sentence on what the aggregation scheme {scheme(run)} hides from whom."
        )
    held = [claim for claim in claims_of(record.protocol) if claim.holds(run)]
    first = _opening(record) if opening is None else opening
    roles = [f"{name} {enumerated(heads)}" for role, name in NAMES.items() if (heads := _of(role, held, run))]
    if not roles:
        return f"This version of the report has no sentence on what {label_of(record)} hides from whom."
    whole = f"{first}. In separate roles: {'; '.join(roles)}" if first else "; ".join(roles)
    return f"{whole[0].upper()}{whole[1:]}."


def _opening(record: RunRecord) -> str:
    """Return the opening before the roles: that one process had all of them."""
    run = record.content
    notes = (claim for claim in claims_of(record.protocol) if claim.role == "reader" and claim.holds(run))
    return next(filter(None, (claim.headline(run) for claim in notes)), "")


def _of(role: str, held: Sequence[Claim], run: dict[str, object]) -> list[str]:
    claims = [claim for claim in held if claim.role == role]
    heads = dict.fromkeys(claim.headline(run) for claim in [claim for claim in claims if claim.alone] or claims)
    return list(filter(None, heads))


# -- what attacks got --------------------------------------------------------------------------------------------------


def _attacks(record: RunRecord, brief: bool) -> tuple[Phrase, ...]:
    audit = record.audit
    if audit is None:
        return (Phrase(f"No audit ran, so what attacks would get is not known; {how_to_audit(record)}."),)
    if not audit.attacks:
        return (
            Phrase("An audit ran, but none of its attacks gave a score, so it is not known what attacks would get."),
        )
    graded = [(TRIES[name], [attack for attack in audit.attacks if attack.severity == name]) for name in SEVERITIES]
    kinds = [part for aim, attempts in graded if attempts for part in (Phrase("; "), *_kind(aim, attempts))]
    rounds = rounds_recorded(record)
    opening = f"With the messages of {rounds:,} of {record.rounds:,} rounds: " if rounds else "In the audit: "
    failed = not brief and not all(attack.succeeded for attack in audit.attacks)
    closing = f". {FAILED}." if failed else "."
    return (Phrase(opening), *kinds[1:], Phrase(closing))


def how_to_audit(record: RunRecord) -> str:
    """Return how attacks on a run can be measured, without a full stop."""
    if record.views:
        return "its messages were recorded, so moretta audit can attack them"
    return "its messages were not recorded, so only a new run with record-views can be audited"


def _kind(aim: str, attempts: Sequence[Attacked]) -> Iterator[Phrase]:
    """Yield how many attacks of one severity succeeded, and which had the highest advantage."""
    won = sorted((attack for attack in attempts if attack.succeeded), key=lambda attack: -attack.advantage)
    if not won:
        yield Phrase(successes(aim, attempts))
        return
    attacker = who_does(won[0])
    furthest = ", of which this one got furthest" * (len(won) > 1)
    yield Phrase(f"{successes(aim, attempts)}{furthest}: {attacker[0].lower()}{attacker[1:]}", won[0].attack)
    yield Phrase(f", {way(won[0])}")


def successes(aim: str, attempts: Sequence[Attacked]) -> str:
    """Return how many attacks of one severity succeeded, without a full stop. aim: the attacks' aim, as "to .."."""
    won, silent = (sum(attack.ended == ended for attack in attempts) for ended in ("succeeded", "no evidence"))
    if not attempts:
        return f"no attack tried {aim}"
    if len(attempts) == 1:
        return f"the one attempt {aim} {'gave no evidence' if silent else attempts[0].ended}"
    silence = f" and {silent} gave no evidence" if silent else ""
    return f"{won or 'none'} of {len(attempts)} attempts {aim} succeeded{silence}"


_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def title(records: Sequence[RunRecord]) -> str:
    """Return the names of the runs, and the protocol of one or the number of several."""
    names = ", ".join(dict.fromkeys(record.name for record in records))
    return f"{names}: " + (label_of(records[0]) if len(records) == 1 else f"{len(records)} runs compared")


def insecure_runs(records: Sequence[RunRecord]) -> str:
    """Return the runs whose secrets came from the run file, as the subject of a sentence; empty without any."""
    runs = [label for label, record in zip(labels(records), records, strict=True) if record.insecure_secret_seed]
    if not runs or len(records) == 1:
        return "This run" if runs else ""
    return f"The run{'' if len(runs) == 1 else 's'} {enumerated(runs)}"


def summary(records: Sequence[RunRecord]) -> str:
    """Return what was trained and sent, and which silos missed a round."""
    first, absences = (
        records[0],
        [f"With {label_of(record)}, {absence}." if (absence := missed(record)) else "" for record in records],
    )
    silos = _count(first.silos, "silo")
    cohort = f"{silos[0].upper()}{silos[1:]} trained a model of {_count(first.parameters, 'parameter')} "
    cohort += f"for {_count(first.rounds, 'round')}"
    if len(records) == 1:
        sent, received = first.traffic.up_per_silo_per_round, first.traffic.down_per_silo_per_round
        traffic = "The silos sent and received nothing during training."
        if sent or received:
            traffic = f"In each round a silo sent {human_bytes(sent)} and received {human_bytes(received)}."
        return f"{cohort} with {label_of(first)}. {traffic} {absences[0]}"
    names, how_many = enumerated(labels(records)), _number_word(len(records))
    opening = f"{how_many.capitalize()} runs: {names}. They differ in name, model size, silos or rounds."
    if len({(record.name, record.parameters, record.silos, record.rounds) for record in records}) == 1:
        opening = f"{cohort}, in {how_many} ways: {names}."
    return f"{opening} {' '.join(dict.fromkeys(absences))}".strip()


def _count(number: int, noun: str) -> str:
    return f"{_number_word(number)} {noun}{'' if number == 1 else 's'}"


def _number_word(number: int) -> str:
    return _WORDS[number] if 0 <= number < len(_WORDS) else f"{number:,}"


def missed(record: RunRecord) -> str:
    """Return how many silos missed how many rounds, without a full stop; empty if no silo did."""
    silos, rounds = (len({getattr(round_missed, key) for round_missed in record.missed}) for key in ("silo", "round"))
    answers = "answers in " if record.sums is None else ""
    return f"{_count(silos, 'silo')} missed {answers}{_count(rounds, 'round')}" if silos else ""


Role = Literal["Server", "A silo", "An eavesdropper"]

ROLES: dict[Role, tuple[str, ...]] = {
    "Server": ("server", "server and silos"),
    "A silo": ("silo", "silos together"),
    "An eavesdropper": ("eavesdropper", "outsider"),
}
"""The roles whose claims are under each heading, in the order of the page."""

UNTESTED = "not yet tested by an attack on this run"
UNTESTABLE = "no attack tests it"


@dataclass(frozen=True)
class Tested:
    """An attack that tested a sentence on this run: its action, its own name, and its result."""

    who: str
    attack: str
    outcome: str


@dataclass(frozen=True)
class Statement:
    """A sentence on what one role sees or can infer.

    Attributes:
        tested: The attacks on this run that tested it.
        testable: Whether any attack tests it.
    """

    role: Role
    text: str
    tested: tuple[Tested, ...] = ()
    testable: bool = True

    @property
    def evidence(self) -> str:
        """The support of the sentence, in words."""
        if not self.tested:
            return UNTESTED if self.testable else UNTESTABLE
        return f"tested on this run: {'; '.join(f'{test.who} ({test.attack}): {test.outcome}' for test in self.tested)}"


def privacy_statements(record: RunRecord) -> tuple[Statement, ...]:
    """Return the sentences that hold for this run, the server's first."""
    run, attacked, statements = record.content, () if record.audit is None else record.audit.attacks, list[Statement]()
    if is_summed(run) and scheme(run) not in MASKED:
        sentence = f"This version of the report has no sentence about the aggregation scheme {scheme(run)}."
        statements.append(Statement("Server", sentence))
    for role in ROLES:
        for claim in _stated(run, role):
            tested = tuple(_tested(attack) for attack in attacked if attack.attack in claim.attacks)
            statements.append(Statement(role, claim.sentence(run), tested, bool(claim.attacks)))
    return tuple(statements)


def reading_notes(record: RunRecord) -> tuple[str, ...]:
    """Return notes for readers of the sentences; these are not claims and need no test."""
    run = record.content
    return tuple(claim.sentence(run) for claim in _claims(run) if claim.role == "reader" and claim.holds(run))


def epsilon_note(record: RunRecord) -> str:
    """Return the run's epsilon with the meaning of its scale, empty if no noise was added."""
    run = record.content
    if not is_noised(run):
        return ""
    epsilon, (what, _) = record.facts["epsilon"], unit_of(run["facts"])
    scale = f"ε = 0 would reveal nothing about one {what}"
    if isinstance(epsilon, int | float) and epsilon < LARGEST:
        times = f"{math.exp(epsilon):.3g} times as likely with the {what} as without it, but for a chance of δ"
        scale += f", and with ε = {epsilon:.3g} any result is at most {times}"
    return f"{epsilons(run)}. {scale}{what_epsilon_leaves_out(run)}."


LARGEST = 50.0
"""From this epsilon on, the note omits how many times as likely a result may be."""


def _claims(run: Record) -> Sequence[Claim]:
    """Return the claims of the run's protocol, or a claim that it has none."""
    if claims := claims_of(run["protocol"]):
        return claims
    name = Word("name", "", lambda run: str(run["protocol"]))
    none = "this version of the report has no sentence about the protocol {name}"
    unknown = [Claim(role, None, kind="unclaimed", words=(name,)).says(none) for role in ("server", "silo")]
    return [*unknown, SCORES, *LISTENERS, *NOTES]


def _stated(run: Record, role: Role) -> list[Claim]:
    """Return a role's claims with a sentence about this run; if one of them stands alone, that one only."""
    claims = [claim for claim in _claims(run) if claim.role in ROLES[role] and not claim.silent and claim.holds(run)]
    return [claim for claim in claims if claim.alone] or claims


def _tested(attack: Attacked) -> Tested:
    failed = "this attack failed" if attack.ended == "failed" else "this attack gave no evidence"
    ended = f"it succeeded, {way(attack)}" if attack.succeeded else failed
    return Tested(who_does(attack), attack.attack, ended)
