"""What a dossier says first: the run, what attacks came to by severity, epsilon, and how much is open."""

from __future__ import annotations

from collections.abc import Iterator

from moretta.protocols.common.claims import is_noised
from moretta.protocols.common.severity import SEVERITIES, TRIES
from moretta.report.dossier.document import Sentence, pointer, sentence
from moretta.report.dossier.evidence import Evidence
from moretta.report.dossier.questions import QUESTIONS
from moretta.report.dossier.risks import unaudited
from moretta.report.scales import figure


def brief(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the sentences that a reader in a hurry needs."""
    record = evidence.record
    if record is not None:
        if record.insecure_secret_seed:
            text = "Nothing was hidden in this run, as insecure-secret-seed was set"
            yield sentence(text, pointer("result.json", "insecure_secret_seed"))
        text = f"{record.silos} silos took part in a training under the protocol {evidence.label}"
        yield sentence(text, pointer("result.json", "silos"), pointer("result.json", "protocol"))
    yield from _attacks(evidence)
    if record is not None:
        noised = is_noised(record.model_dump(by_alias=True))
        key = ("facts", "epsilon") if noised else ("facts",)
        if noised:
            text = f"Epsilon is {figure(float(str(record.facts['epsilon'])))} for one row of one silo"
        else:
            text = "No noise was added for differential privacy, so there is no epsilon"
        yield sentence(text, pointer("result.json", *key))
    answered = [question.key for question in QUESTIONS if question.key in evidence.answers]
    text = f"Of {len(QUESTIONS)} questions that only people can answer, {len(QUESTIONS) - len(answered)} are open"
    yield sentence(text, *(pointer(evidence.answers_file, key) for key in answered), "clause:gdpr-35-7-a")


def _attacks(evidence: Evidence) -> Iterator[Sentence]:
    audit = evidence.record.audit if evidence.record else None
    if audit is None:
        yield from unaudited(evidence)
        return
    for severity in SEVERITIES:
        some = [one for one in audit.attacks if one.severity == severity]
        won = sum(one.succeeded for one in some)
        aim = TRIES[severity]
        if not some:
            text = f"no attack tried {aim}"
        elif len(some) == 1:
            text = f"the one attempt {aim} {'succeeded' if won else 'failed'}"
        else:
            text = f"{won or 'none'} of {len(some)} attempts {aim} succeeded"
        yield sentence(text, pointer("audit.json", "attacks"))
