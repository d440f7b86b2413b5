"""The sections of a dossier, numbered as the EDPB's template has them, and what of a run stands in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

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
    if record is None or record.audit is None:
        yield from unaudited(evidence)
    else:
        for severity in SEVERITIES:
            some = [attack for attack in record.audit.attacks if attack.severity == severity]
            yield sentence(came_to(TRIES[severity], some), of_audited("attacks"))
    if record is not None and is_noised(record.content):
        text = f"Epsilon is {figure(float(str(record.facts['epsilon'])))} for {unit(record.facts)}"
        yield sentence(text, of_result("facts", "epsilon"))
    elif record is not None:
        yield sentence("No noise was added for differential privacy, so there is no epsilon", of_result("facts"))
    answered = [question.key for question in QUESTIONS if question.key in evidence.answers]
    text = f"Of {len(QUESTIONS)} questions that only people can answer, {len(QUESTIONS) - len(answered)} are open"
    yield sentence(text, *(pointer(evidence.answers_file, key) for key in answered), "clause:gdpr-35-7-a")


def sections(evidence: Evidence) -> Sequence[Chapter]:
    """Return all sections, each with what the run says, what people answered, and what is open."""
    return [
        Chapter(
            number=number,
            title=title,
            clauses=(*(name for name in (f"template-{number}",) if name in CLAUSES), *clauses.split()),
            sentences=(*chain.from_iterable(writer(evidence) for writer in says), *_asked(number, evidence)),
        )
        for number, title, clauses, *says in SECTIONS
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


def _clause_texts(evidence: Evidence) -> Iterator[Sentence]:
    """Yield what the clauses are, and what they ask for."""
    for name, clause in CLAUSES.items():
        if clause.document != TEMPLATE:
            text = f"{DOCUMENTS[clause.document]}, {clause.clause}: {clause.asks}"
            yield sentence(text, f"clause:{name}", group=clause.document)
    text = f"{DOCUMENTS[TEMPLATE]}: sections 0.1 to 6 of this dossier have its numbers"
    yield sentence(text, "clause:template-0.1", group=TEMPLATE)


SECTIONS: Sequence[tuple[str, str, str, *tuple[Says, ...]]] = (
    ("0", "In brief", "", brief),
    ("0.1", "Controllers", "", description.parties),
    ("0.2", "Processors and sub-processors", ""),
    ("0.3", "Name of the processing", "", description.name),
    ("0.4", "Planning of the processing", ""),
    ("0.5", "Technical sheet of the assessment", "", description.sheet, description.words),
    ("1.1.a", "Processed personal data", "gdpr-35-7-a wp248-description", description.data),
    ("1.1.b", "Purposes of the processing", "gdpr-35-7-a"),
    ("1.1.c", "Secondary or compatible uses", "gdpr-35-7-a"),
    ("1.1.d", "Nature, scope and context", "gdpr-35-7-a wp248-description", description.scope),
    ("1.2", "Functional description", "gdpr-35-7-a wp248-description", description.functions),
    ("1.3", "Means of processing and supporting assets", "gdpr-35-7-a wp248-description", description.means),
    ("1.4", "Codes of conduct", ""),
    ("2.1.a", "Legal basis", ""),
    ("2.1.b", "Reasons that lift the prohibition", ""),
    ("2.2.a", "Minimisation, recipients and retention", "gdpr-35-7-b wp248-description", received, personal),
    ("2.2.b", "Data quality", ""),
    ("2.3.a", "Measures for the principles of Article 5(1)", "gdpr-35-7-d wp248-necessity"),
    ("2.3.b", "Measures for the rights of data subjects", "gdpr-35-7-d"),
    ("2.3.c", "Measures for other requirements", "gdpr-35-7-d"),
    ("2.3.d", "Measures by design and by default", "gdpr-35-7-d", measures, epsilon),
    ("2.3.e", "Measures for the security of processing", "gdpr-35-7-d", description.security),
    ("3.1", "Impacts of the processing as designed", "gdpr-35-7-c", description.impacts),
    ("3.2", "Necessity", "gdpr-35-7-b wp248-necessity", description.works),
    ("3.3", "Proportionality", "gdpr-35-7-b wp248-necessity"),
    ("4.1.a", "Impacts of accidental, unlawful or abnormal events", "gdpr-35-7-c wp248-risks"),
    ("4.1.b", "Method", "opinion-attacks", method),
    ("4.1.c", "Risks: measured attacks, by severity", "gdpr-35-7-c wp248-risks opinion-attacks", attacks),
    ("4.2.a", "Additional measures", "gdpr-35-7-d"),
    ("4.2.b", "Residual risks", "gdpr-35-7-c wp248-risks", remaining),
    ("4.2.c", "Plan", "gdpr-35-7-d"),
    ("5.1", "Advice of the data-protection officer", "gdpr-35-2"),
    ("5.2", "Views of data subjects or their representatives", "gdpr-35-9"),
    ("6", "Conclusion and decision", ""),
    ("A", "Digests", "", hashes),
    ("B", "Clauses", "", _clause_texts),
)
"""Number, title, clauses beside the template's, and what of a run says something there. 0, A and B are ours."""
