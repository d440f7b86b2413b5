"""What is said of a run first, a sentence each: how good its model is, what was hidden from whom, what attacks got."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from moretta.contract.wording import enumerated
from moretta.protocols.common.claims import MASKED, Claim, is_summed, scheme
from moretta.protocols.common.severity import SEVERITIES, TRIES
from moretta.protocols.registry import ENTRIES, claims_of
from moretta.report.audit import rounds_recorded, who_does
from moretta.report.folder import Attacked, PlainScores, RunRecord, TestScores
from moretta.report.scales import way
from moretta.report.summary import scored
from moretta.report.table import label_of, labels, plain

HEADINGS = ("How good", "What was hidden", "What attacks got")

FAILED = "that an attack failed does not show that none can succeed"

WHO = {
    "server": "the server",
    "silo": "a silo",
    "server and silos": "the server with silos",
    "silos together": "silos together",
}
"""Roles whose claims stand in the sentence on what was hidden, in its order."""


@dataclass(frozen=True)
class Phrase:
    """A piece of a sentence, and the attack's own name to be set small behind it, if it is about one."""

    text: str
    attack: str = ""


@dataclass(frozen=True)
class Verdict:
    """Three sentences about a run, under `HEADINGS`. label: of the run among those that it stands with."""

    label: str
    good: str
    hidden: str
    attacks: tuple[Phrase, ...]

    @property
    def parts(self) -> tuple[tuple[str, tuple[Phrase, ...]], ...]:
        """Each heading with the pieces of its sentence."""
        return tuple(zip(HEADINGS, ((Phrase(self.good),), (Phrase(self.hidden),), self.attacks), strict=True))

    @property
    def sentences(self) -> tuple[str, ...]:
        """The three sentences as plain text, attacks' own names in brackets."""
        named = (((part.text, f" ({part.attack})" * bool(part.attack)) for part in some) for _, some in self.parts)
        return tuple("".join(text for pair in pairs for text in pair) for pairs in named)


def verdicts(records: Sequence[RunRecord], *, brief: bool = False) -> tuple[Verdict, ...]:
    """Return the verdict on each run. Its model is set beside those of `records` that train alone or on pooled rows.

    brief: without what `remarks` says of all runs.
    """
    opening = "" if brief and _opening_of_all(records) else None
    return tuple(
        Verdict(label, _good(record, records, brief), _hidden(record, opening), _attacks(record, brief))
        for label, record in zip(labels(records), records, strict=True)
    )


def remarks(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """Return what would stand in the verdict of each run, a sentence each: scales, and what holds of all."""
    scales = dict.fromkeys(_scale(record, records) for record in records if record.test.given)
    found = [f"{scale[0].upper()}{scale[1:]}." for scale in scales]
    if opening := _opening_of_all(records):
        found.append(f"{opening[0].upper()}{opening[1:]}; what was hidden is said of the roles.")
    if any(record.audit and not all(one.succeeded for one in record.audit.attacks) for record in records):
        found.append(f"{FAILED[0].upper()}{FAILED[1:]}.")
    return tuple(found)


def _opening_of_all(records: Sequence[RunRecord]) -> str:
    """Return what a report says first of what was hidden, where it is the same of all runs."""
    openings = {"" if record.insecure_secret_seed else _opening(record) for record in records}
    return openings.pop() if len(openings) == 1 else ""


def verdict_text(verdict: Verdict) -> Text:
    """Return a verdict for a terminal, a paragraph a sentence."""
    text = Text()
    for number, ((heading, _), sentence) in enumerate(zip(verdict.parts, verdict.sentences, strict=True)):
        text.append("\n" if number else "").append(f"{heading}: ", style="bold").append(sentence)
    return text


# -- how good ----------------------------------------------------------------------------------------------------------


def _good(record: RunRecord, records: Sequence[RunRecord], brief: bool) -> str:
    if not record.test.given:
        return "There were no test rows, so nothing says how good the model is."
    rows = "rows that silos hold back" if record.test.by == "silos" else "test rows"
    said = f"On the {rows} {_whose(record)} reaches {scored(record.test)}{_beside(record, records)}"
    return f"{said}." if brief else f"{said} ({_scale(record, records)})."


def _whose(record: RunRecord) -> str:
    if record.test.mean is not None:
        return "the worst of the silos’ models"
    return "a silo’s own model, on average," if _trains(record) == "alone" else "the model"


def _trains(record: RunRecord) -> str:
    """Return "alone" or "pooled" for a baseline that trains so, "" for other runs."""
    entry = ENTRIES.get(record.protocol)
    if entry is None or not entry.baseline:
        return ""
    return "pooled" if entry.pooled else "alone"


def _beside(record: RunRecord, records: Sequence[RunRecord]) -> str:
    """Return what the run's baselines reach, and what its silos' models do on average, as far as is known."""
    found = [f"{_short(record.test.mean)} as the mean of the silos’ models"] if record.test.mean is not None else []
    for way_of, words in (("alone", "where silos train alone"), ("pooled", "where all rows are in one place")):
        others = [one for one in records if _trains(one) == way_of and one is not record and _alike(one, record)]
        found += [f"{_short(one.test)} {words}" for one in others[:1]]
    return f", beside {enumerated(found)}" if found else ""


def _short(scores: TestScores | PlainScores) -> str:
    return plain(scores.mse) if scores.accuracy is None else f"{100 * scores.accuracy:.1f} %"


def _alike(one: RunRecord, record: RunRecord) -> bool:
    """Whether both were trained on the same rows and scored on the same, as far as their records say."""
    same = (one.name, one.task, one.silos, one.test.by) == (record.name, record.task, record.silos, record.test.by)
    return same and one.test.given and one.setting("run", "seed") == record.setting("run", "seed")


def _scale(record: RunRecord, records: Sequence[RunRecord]) -> str:
    """Return what scores mean. Rows of classes may be counted by another run alone, on the same rows."""
    if record.test.accuracy is None:
        return "0 is perfect; to guess the mean of the targets always gets their variance"
    tables = next((one.test.classes for one in (record, *records) if one.test.classes and _alike(one, record)), None)
    counts = [one.rows for one in tables.by_class] if tables else []
    share = f"{100 * max(counts) / sum(counts):.1f} %" if any(counts) else "that class’s part of the rows"
    return f"100 % is perfect; to name the commonest class always gets {share}"


# -- what was hidden from whom -----------------------------------------------------------------------------------------


def _hidden(record: RunRecord, opening: str | None) -> str:
    """Return what was hidden. opening: in the place of the record's own, where there is a sentence."""
    if record.insecure_secret_seed:
        return (
            "Nothing was hidden, as insecure-secret-seed was set: whoever knows the run file can compute every key and "
            "mask."
        )
    run = record.model_dump(by_alias=True)
    if is_summed(run) and scheme(run) not in MASKED:
        return (
            f"This version of the report has no sentence on what the aggregation scheme {scheme(run)} hides from whom."
        )
    held = [claim for claim in claims_of(record.protocol) if claim.headline and claim.holds(run)]
    first = _opening(record) if opening is None else opening
    roles = [f"{who} {enumerated(said)}" for role, who in WHO.items() if (said := _of(role, held, run))]
    if not roles:
        return f"This version of the report has no sentence on what {label_of(record)} hides from whom."
    whole = f"{first}; as roles, {'; '.join(roles)}" if first else "; ".join(roles)
    return f"{whole[0].upper()}{whole[1:]}."


def _opening(record: RunRecord) -> str:
    """Return what is said before the roles: that one process played all of them."""
    run = record.model_dump(by_alias=True)
    heads = (
        one.head(run) for one in claims_of(record.protocol) if one.role == "reader" and one.headline and one.holds(run)
    )
    return next(heads, "")


def _of(role: str, held: Sequence[Claim], run: dict[str, object]) -> list[str]:
    some = [claim for claim in held if claim.role == role]
    return list(dict.fromkeys(claim.head(run) for claim in [one for one in some if one.alone] or some))


# -- what attacks got --------------------------------------------------------------------------------------------------


def _attacks(record: RunRecord, brief: bool) -> tuple[Phrase, ...]:
    audit = record.audit
    if audit is None:
        return (Phrase(f"No audit ran, so what attacks would get is not known; {how_to_audit(record)}."),)
    if not audit.attacks:
        return (Phrase("An audit ran and no attack of it came to a score, so what attacks would get is not known."),)
    graded = [(TRIES[name], [one for one in audit.attacks if one.severity == name]) for name in SEVERITIES]
    graded.append(("that this audit does not grade", [one for one in audit.attacks if one.severity is None]))
    kinds = [part for aim, some in graded if some for part in (Phrase("; "), *_kind(aim, some))]
    rounds = rounds_recorded(record)
    opening = f"With the messages of {rounds:,} of {record.rounds:,} rounds, " if rounds else "In the audit, "
    failed = not brief and not all(one.succeeded for one in audit.attacks)
    closing = f"; {FAILED}." if failed else "."
    return (Phrase(opening), *kinds[1:], Phrase(closing))


def how_to_audit(record: RunRecord) -> str:
    """Return what has to be done before attacks on a run can be measured, without a full stop."""
    if record.views:
        return "its messages were recorded, so moretta audit can play attacks on them"
    return "its messages were not recorded, so only a new run with record-views can be audited"


def _kind(aim: str, some: Sequence[Attacked]) -> Iterator[Phrase]:
    """Yield how many attacks of one severity succeeded, and which got furthest."""
    won = sorted((one for one in some if one.succeeded), key=lambda one: -one.advantage)
    if not won:
        yield Phrase(
            f"none of {len(some)} attempts {aim} succeeded" if len(some) > 1 else f"the one attempt {aim} failed"
        )
        return
    tries = f"{len(won)} of {len(some)} attempts {aim}" if len(some) > 1 else f"the one attempt {aim}"
    who = who_does(won[0])
    yield Phrase(f"{tries} succeeded{', the furthest' * (len(won) > 1)}: {who[0].lower()}{who[1:]}", won[0].attack)
    yield Phrase(f", {way(won[0])}")
