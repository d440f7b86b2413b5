"""Attacks by severity, differential privacy, and the risks that remain."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moretta.protocols.common.claims import Record, has_no_roster, is_masked, is_noised, is_over_machines, is_summed
from moretta.protocols.common.severity import EFFECTS, MEANING, SEVERITIES, Severity
from moretta.report.audit import CONFINED, ROLES, interval, who_does
from moretta.report.dossier.description import held
from moretta.report.dossier.document import (
    Sentence,
    Verdict,
    of_audited,
    of_inputs,
    of_planned,
    of_result,
    sentence,
    sentences,
    under,
)
from moretta.report.dossier.evidence import Evidence
from moretta.report.folder import TEST_ROWS, Attacked, AuditRecord
from moretta.report.statements import how_to_audit
from moretta.report.table import figure


def method(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the method by which risks were measured."""
    audit = evidence.record.audit if evidence.record else None
    if audit is None:
        yield from unaudited(evidence)
        return
    views, tried = of_audited("views"), of_audited("attacks")
    yield sentence(
        f"In an audit, attacks ran on what single roles, or several together, had received in "
        f"{len(audit.views)} recorded {'round' if len(audit.views) == 1 else 'rounds'}",
        views,
        "clause:opinion-attacks",
    )
    rows = "half of the run’s test rows" if audit.background == TEST_ROWS else audit.background
    yield sentence(f"Attackers that use background knowledge had {rows}", of_audited("background"))
    yield sentence("An attack succeeded if the 95 % interval of its score lies above the score of guessing", tried)
    yield sentence("A failed attack proves nothing, because a stronger one may exist", tried)
    slow = "Slow attacks ran too" if audit.thorough else "Slow attacks were left out"
    yield sentence(slow, of_audited("thorough"))
    if audit.confined_by != "kernel":
        yield sentence(CONFINED, of_audited("confined_by"))


def unaudited(evidence: Evidence) -> list[Sentence]:
    """Return that nothing was measured, and how to measure it."""
    if evidence.record is None:
        return [sentence("The run has not finished, so no attack on it was measured", of_planned("run"))]
    text = f"No attack on this run was measured, as its folder has no audit; {how_to_audit(evidence.record)}"
    return [sentence(text, of_result("views"))]


def attacks(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the result of attacks, the gravest first."""
    audit = evidence.record.audit if evidence.record else None
    if audit is None:
        source = of_result("views") if evidence.record else of_planned("run")
        yield sentence("Without an audit there is no measured risk to list", source)
        return
    for severity in SEVERITIES:
        yield from _of_severity(audit, severity)


def _of_severity(audit: AuditRecord, severity: Severity) -> Iterator[Sentence]:
    attempts = [(place, attack) for place, attack in enumerate(audit.attacks) if attack.severity == severity]
    won, silent = (sum(attack.ended == ended for _, attack in attempts) for ended in ("succeeded", "no evidence"))
    group = EFFECTS[severity][0].upper() + EFFECTS[severity][1:]
    yield sentence(MEANING[severity], of_audited("attacks"), group=group)
    silence = f", and {silent} gave no evidence" if silent else ""
    text = f"{won or 'None'} of {len(attempts)} attacks of this kind succeeded{silence}"
    if len(attempts) < 2:
        ended = "gave no evidence" if silent else "succeeded" if won else "failed"
        text = f"The one attack of this kind {ended}" if attempts else "No attack of this kind was tried on this run"
    yield sentence(text, of_audited("attacks"), group=group)
    for place, attack in sorted(attempts, key=lambda pair: -pair[1].advantage):
        yield from under(group, _outcome(place, attack))


def _outcome(place: int, attack: Attacked) -> list[Sentence]:
    """Return the result of one attack: its verdict for people, the audit's own sentence, its view and knowledge."""
    verdicts: Mapping[str, Verdict] = {"succeeded": "succeeded", "failed": "failed"}
    ended = "gave no evidence" if attack.ended == "no evidence" else attack.ended
    guessed = figure(attack.chance)
    scored = f"with a score of {figure(attack.score)} (95 %: {interval(attack)}), where guessing scores {guessed}"
    if attack.constant is not None:
        scored += f" and always naming the most frequent value {figure(attack.constant)}"
    source = of_audited("attacks", place)
    verdict_sentence = sentence(f"{who_does(attack)}: this attack {ended}, {scored}", source, name=attack.attack)
    first = verdict_sentence.model_copy(update={"verdict": verdicts.get(attack.ended, "")})
    knew = "nothing else" if attack.knowledge == "nothing" else attack.knowledge
    knowledge = sentence(f"It was given {attack.view}, and knew {knew}", f"{source}/view", f"{source}/knowledge")
    return [first, *sentences(attack.sentence, f"{source}/sentence"), knowledge]


def unit(facts: Mapping[str, object]) -> str:
    """Return the unit of a run's epsilon, in words."""
    units = {"silo": "all that one silo uploads", "group": "all rows of one group, such as a patient, of one silo"}
    return units.get(str(facts.get("unit")), "one row of one silo")


def spent(facts: Mapping[str, object]) -> str:
    """Return a run's epsilon, "unbounded" where clipping adds no noise."""
    value = facts["epsilon"]
    return figure(float(value)) if isinstance(value, int | float) else str(value)


STATED = {
    "neighbours": "Neighbouring data sets differ in {}",
    "mechanism": "The mechanism is: {}",
    "sampling_rate": "The largest part of a silo's data that a round draws is {}",
    "trust": "It is trusted that {}",
    "theorem": "Epsilon follows from a theorem: {}",
    "epsilon_leaves_out": "Epsilon does not count {}",
}
"""The statements that NIST SP 800-226 requires beside epsilon, by the facts that have them."""


def epsilon(evidence: Evidence) -> Iterator[Sentence]:
    """Yield whether there is differential privacy, and its unit."""
    record = evidence.record
    if record is None:
        return
    group = "Differential privacy"
    if not is_noised(record.content):
        text = "No noise was added for differential privacy, so there is no epsilon that bounds what the model reveals"
        yield sentence(text, of_result("facts"), "clause:nist-2-1-1", group=group)
        return
    facts = record.facts
    source, several = of_result("facts", "epsilon"), facts.get("unit", "row") == "row"
    yield sentence(
        f"The epsilon of this run is {spent(facts)} at a delta of {facts['delta']}",
        source,
        of_result("facts", "delta"),
        "clause:nist-2-1-1",
        group=group,
    )
    yield sentence(
        f"Its unit of privacy is {unit(facts)}; for a person with {'several rows, or with ' if several else ''}rows at "
        "several silos, it bounds less",
        source,
        "clause:nist-2-4",
        group=group,
    )
    for key, text in STATED.items():
        if key in facts:
            yield sentence(text.format(facts[key]), of_result("facts", key), "clause:nist-2-1-1", group=group)
    grouped = next((name for name, column in evidence.columns.items() if column.get("kind") == "group"), None)
    if grouped is not None and several:
        yield sentence(
            f"The schema’s column {grouped} names whom rows are about, so a person may have several rows here",
            of_inputs("table", "columns", grouped),
            group=group,
        )


@dataclass(frozen=True)
class Assumption:
    """An assumption on roles and machines.

    Attributes:
        phrase: The words of SECURITY.md behind it.
        where: Returns whether it is for a run.
    """

    text: str
    phrase: str
    where: Callable[[Record], bool]
    keys: tuple[str, ...]


ASSUMPTIONS: Sequence[Assumption] = (
    Assumption(
        "The server and the silos are assumed to follow the protocol, and to try to learn from what they see",
        "The server and the silos are honest but curious: they follow the protocol",
        lambda record: True,
        ("protocol",),
    ),
    Assumption(
        "The links between them are assumed to be authenticated and confidential",
        "The links between them are authenticated and confidential",
        lambda record: True,
        ("settings", "engine", "name"),
    ),
    Assumption(
        "A site checks the server’s signature by a key that it was given once, and that key is assumed to be the right "
        "one",
        "takes only messages signed under the server's key that it has pinned",
        is_over_machines,
        ("settings", "engine", "name"),
    ),
    Assumption(
        "It is assumed that fewer silos collude with the server than the threshold of the secure sum",
        "Fewer silos collude with the server than the threshold",
        is_masked,
        ("secure_aggregation", "scheme"),
    ),
    Assumption(
        "There is no roster of identities, so the server is assumed to pass on the keys of the silos unchanged",
        "Without a roster of identities silos trust the server to relay their keys unchanged",
        lambda record: is_summed(record) and has_no_roster(record),
        ("settings", "secure-aggregation"),
    ),
    Assumption(
        "A silo that does not follow the protocol can spoil the model unseen",
        "A silo that does not follow the protocol can spoil the model, and masks hide that it does",
        is_summed,
        ("secure_aggregation", "scheme"),
    ),
)


def remaining(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the remaining risks: claims without an attack, attacks that did not run, assumptions, warnings."""
    record = evidence.record
    if record is None:
        yield sentence("The remaining risks cannot be stated before the run has finished", of_planned("run", "rounds"))
        return
    yield from under("Statements that no attack on this run tested", _untested(evidence))
    for place, attack in enumerate(record.audit.not_run if record.audit else ()):
        text = f"{who_does(attack)}: this attack was not run, because {attack.because}"
        source = of_audited("not_run", place)
        yield sentence(text, source, group="Attacks that were not run", name=attack.attack)
    for assumed in ASSUMPTIONS:
        if assumed.where(record.content):
            source = of_result(*assumed.keys)
            yield sentence(assumed.text, source, "clause:assumptions", group="Assumptions")
    for place, warning in enumerate(record.warnings):
        source = "audit.json" if warning.startswith("audit.json") else of_result("warnings", place)
        yield from sentences(warning, source, group="Warnings of the run")


def _untested(evidence: Evidence) -> Iterator[Sentence]:
    """Yield, by role, the number of claims that no attack of the run's audit tested."""
    audit = evidence.record.audit if evidence.record else None
    played = {attack.attack for attack in audit.attacks} if audit else set()
    for role, name in ROLES.items():
        claims = [claim for claim in held(evidence) if claim.claim.role == role and claim.claim.kind != "unclaimed"]
        rest = [claim for claim in claims if not played & set(claim.claim.attacks)]
        if rest:
            text = f"{name}: no attack on this run tested {len(rest)} of {len(claims)} statements on what it learns"
            yield sentence(text, *(f"claim:{claim.protocol}:{claim.place}" for claim in rest))
