"""The sections of a dossier, numbered as the EDPB's template has them, and what of a run stands in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from moretta.protocols.common.claims import is_noised
from moretta.protocols.common.severity import SEVERITIES, TRIES
from moretta.report.dossier import description
from moretta.report.dossier.description import measures, personal, received
from moretta.report.dossier.document import (
    Chapter,
    Sentence,
    of_audited,
    of_result,
    pointer,
    sentence,
    sentences,
    under,
)
from moretta.report.dossier.evidence import Evidence, hashes
from moretta.report.dossier.questions import CLAUSES, DOCUMENTS, QUESTIONS, TEMPLATE
from moretta.report.dossier.risks import attacks, epsilon, method, remaining, unaudited, unit
from moretta.report.statements import came_to
from moretta.report.table import figure

Says = Callable[[Evidence], Iterable[Sentence]]


def brief(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the sentences that a reader in a hurry needs."""
    record = evidence.record
    if record is not None:
        if record.insecure_secret_seed:
            text = "Nothing was hidden in this run, as insecure-secret-seed was set"
            yield sentence(text, of_result("insecure_secret_seed"))
        text = f"{record.silos} silos took part in a training under the protocol {evidence.label}"
        yield sentence(text, of_result("silos"), of_result("protocol"))
    yield from _attacks(evidence)
    if record is not None:
        noised = is_noised(record.model_dump(by_alias=True))
        key = ("facts", "epsilon") if noised else ("facts",)
        if noised:
            text = f"Epsilon is {figure(float(str(record.facts['epsilon'])))} for {unit(record.facts)}"
        else:
            text = "No noise was added for differential privacy, so there is no epsilon"
        yield sentence(text, of_result(*key))
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
        yield sentence(came_to(TRIES[severity], some), of_audited("attacks"))


def sections(evidence: Evidence) -> Sequence[Chapter]:
    """Return all sections, each with what the run says, what people answered, and what is open."""
    return [
        Chapter(
            number=number,
            title=title,
            clauses=_clauses(number, clauses),
            sentences=(*says(evidence), *_asked(number, evidence)),
        )
        for number, title, clauses, says in SECTIONS
    ]


def _asked(number: str, evidence: Evidence) -> Iterator[Sentence]:
    for question in QUESTIONS:
        if question.section != number:
            continue
        source = pointer(evidence.answers_file, question.key)
        if texts := evidence.answers.get(question.key):
            group = f"Answered by {question.by}: {question.asks}"
            for text in texts:
                yield from sentences(text, source, origin="answered", group=group, by=question.by)
        else:
            text = f"Open, for {question.by} to answer: {question.asks}?"
            sources = (source, f"clause:template-{number}")
            yield Sentence(text=text, sources=sources, origin="open", by=question.by)


def _clauses(number: str, others: str) -> tuple[str, ...]:
    own = f"template-{number}"
    return (*([own] if own in CLAUSES else []), *others.split())


def _nothing(evidence: Evidence) -> Iterator[Sentence]:
    yield from ()


def _recipients(evidence: Evidence) -> Iterator[Sentence]:
    yield from received(evidence)
    yield from under("Which of it is personal data, and why", personal(evidence))


def _design(evidence: Evidence) -> Iterator[Sentence]:
    yield from measures(evidence)
    yield from epsilon(evidence)


def _clause_texts(evidence: Evidence) -> Iterator[Sentence]:
    """Yield what the clauses are, and what they ask for."""
    for name, clause in CLAUSES.items():
        if clause.document != TEMPLATE:
            text = f"{DOCUMENTS[clause.document]}, {clause.clause}: {clause.asks}"
            yield sentence(text, f"clause:{name}", group=clause.document)
    text = f"{DOCUMENTS[TEMPLATE]}: sections 0.1 to 6 of this dossier have its numbers"
    yield sentence(text, "clause:template-0.1", group=TEMPLATE)


SECTIONS: Sequence[tuple[str, str, str, Says]] = (
    ("0", "In brief", "", brief),
    ("0.1", "Controllers", "", description.parties),
    ("0.2", "Processors and sub-processors", "", _nothing),
    ("0.3", "Name of the processing", "", description.name),
    ("0.4", "Planning of the processing", "", _nothing),
    ("0.5", "Technical sheet of the assessment", "", lambda run: (*description.sheet(run), *description.words())),
    ("1.1.a", "Processed personal data", "gdpr-35-7-a wp248-description", description.data),
    ("1.1.b", "Purposes of the processing", "gdpr-35-7-a", _nothing),
    ("1.1.c", "Secondary or compatible uses", "gdpr-35-7-a", _nothing),
    ("1.1.d", "Nature, scope and context", "gdpr-35-7-a wp248-description", description.scope),
    ("1.2", "Functional description", "gdpr-35-7-a wp248-description", description.functions),
    ("1.3", "Means of processing and supporting assets", "gdpr-35-7-a wp248-description", description.means),
    ("1.4", "Codes of conduct", "", _nothing),
    ("2.1.a", "Legal basis", "", _nothing),
    ("2.1.b", "Reasons that lift the prohibition", "", _nothing),
    ("2.2.a", "Minimisation, recipients and retention", "gdpr-35-7-b wp248-description", _recipients),
    ("2.2.b", "Data quality", "", _nothing),
    ("2.3.a", "Measures for the principles of Article 5(1)", "gdpr-35-7-d wp248-necessity", _nothing),
    ("2.3.b", "Measures for the rights of data subjects", "gdpr-35-7-d", _nothing),
    ("2.3.c", "Measures for other requirements", "gdpr-35-7-d", _nothing),
    ("2.3.d", "Measures by design and by default", "gdpr-35-7-d", _design),
    ("2.3.e", "Measures for the security of processing", "gdpr-35-7-d", description.security),
    ("3.1", "Impacts of the processing as designed", "gdpr-35-7-c", description.impacts),
    ("3.2", "Necessity", "gdpr-35-7-b wp248-necessity", description.works),
    ("3.3", "Proportionality", "gdpr-35-7-b wp248-necessity", _nothing),
    ("4.1.a", "Impacts of accidental, unlawful or abnormal events", "gdpr-35-7-c wp248-risks", _nothing),
    ("4.1.b", "Method", "opinion-attacks", method),
    ("4.1.c", "Risks: measured attacks, by severity", "gdpr-35-7-c wp248-risks opinion-attacks", attacks),
    ("4.2.a", "Additional measures", "gdpr-35-7-d", _nothing),
    ("4.2.b", "Residual risks", "gdpr-35-7-c wp248-risks", remaining),
    ("4.2.c", "Plan", "gdpr-35-7-d", _nothing),
    ("5.1", "Advice of the data-protection officer", "gdpr-35-2", _nothing),
    ("5.2", "Views of data subjects or their representatives", "gdpr-35-9", _nothing),
    ("6", "Conclusion and decision", "", _nothing),
    ("A", "Digests", "", hashes),
    ("B", "Clauses", "", _clause_texts),
)
"""Number, title, clauses beside the template's, and what the run says. 0, A and B are ours."""
