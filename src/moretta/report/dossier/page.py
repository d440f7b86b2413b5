"""The two files of a dossier: the JSON, and the page, whose sentences refer to the JSON's by their ids.

Sections have the numbers of the EDPB's template.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from moretta.engines.files import check_ending, read_file, write_atomically
from moretta.errors import ParameterError
from moretta.protocols.common.claims import is_noised
from moretta.protocols.common.severity import SEVERITIES, TRIES
from moretta.report.dossier import description
from moretta.report.dossier.description import measures, personal, received
from moretta.report.dossier.document import (
    Chapter,
    Sentence,
    content,
    digest,
    dumps,
    loads,
    of_audited,
    of_result,
    pointer,
    sentence,
    sentences,
)
from moretta.report.dossier.evidence import Evidence, hashes, read_evidence
from moretta.report.dossier.questions import CLAUSES, DOCUMENTS, QUESTIONS, TEMPLATE
from moretta.report.dossier.risks import attacks, epsilon, method, remaining, spent, unaudited, unit
from moretta.report.page import SIGNATURES, template, write_files
from moretta.report.statements import successes
from moretta.secure_aggregation.identity import Identity, Roster, fingerprint, parse_public_line, public_line, verify

Writer = Callable[[Evidence], Iterable[Sentence]]


def brief(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the sentences for a reader in a hurry."""
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
            attempts = [attack for attack in record.audit.attacks if attack.severity == severity]
            yield sentence(successes(TRIES[severity], attempts), of_audited("attacks"))
    if record is not None and is_noised(record.content):
        text = f"Epsilon is {spent(record.facts)} for {unit(record.facts)}"
        yield sentence(text, of_result("facts", "epsilon"))
    elif record is not None:
        yield sentence("No noise was added for differential privacy, so there is no epsilon", of_result("facts"))
    answered = [question.key for question in QUESTIONS if question.key in evidence.answers]
    text = f"Of {len(QUESTIONS)} questions that only people can answer, {len(QUESTIONS) - len(answered)} are open"
    yield sentence(text, *(pointer(evidence.answers_file, key) for key in answered), "clause:gdpr-35-7-a")


def sections(evidence: Evidence) -> Sequence[Chapter]:
    """Return all sections, each with the run's facts, people's answers, and open questions."""
    return [
        Chapter(
            number=number,
            title=title,
            clauses=(*(name for name in (f"template-{number}",) if name in CLAUSES), *clauses.split()),
            sentences=(*chain.from_iterable(writer(evidence) for writer in writers), *_answers(number, evidence)),
        )
        for number, title, clauses, *writers in SECTIONS
    ]


def _answers(number: str, evidence: Evidence) -> Iterator[Sentence]:
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
    """Yield the clauses, and their demands."""
    for name, clause in CLAUSES.items():
        if clause.document != TEMPLATE:
            text = f"{DOCUMENTS[clause.document]}, {clause.clause}: {clause.asks}"
            yield sentence(text, f"clause:{name}", group=clause.document)
    text = f"{DOCUMENTS[TEMPLATE]}: sections 0.1 to 6 of this dossier have its numbers"
    yield sentence(text, "clause:template-0.1", group=TEMPLATE)


SECTIONS: Sequence[tuple[str, str, str, *tuple[Writer, ...]]] = (
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
"""Number, title, clauses besides the template's, and the functions that write the section. 0, A and B are ours."""


@dataclass(frozen=True)
class Files:
    """The paths of a dossier: the JSON, its page, and the signatures on both."""

    data: Path
    page: Path
    signatures: Path

    @classmethod
    def at(cls, path: Path) -> "Files":
        """Return a dossier's files by its JSON or page. Raises `moretta.errors.ParameterError` for another path."""
        check_ending(path, ".html", ".json")
        return cls(path.with_suffix(".json"), path.with_suffix(".html"), path.with_suffix(SIGNATURES))


@dataclass(frozen=True)
class Written:
    """A written dossier. content: the content of its JSON."""

    files: Files
    content: dict[str, Any]

    def count(self, origin: str = "") -> int:
        """Return the number of sentences, or of those with one origin."""
        every = [sentence for section in self.content["sections"] for sentence in section["sentences"]]
        return sum(not origin or sentence["origin"] == origin for sentence in every)


def write_dossier(folder: Path, out: Path | None = None, answers: Path | None = None) -> Written:
    """Write the dossier of a run: a page, and its JSON beside it.

    Args:
        out: The page; None takes ``dossier.html`` in the folder.
        answers: As in `moretta.report.dossier.evidence.read_evidence`.

    Raises:
        ParameterError: The folder is unreadable, or a file cannot be written, is not a dossier, or would change a
            signed one. Nothing is written.
    """
    files = Files.at(out or folder / "dossier.html")
    evidence = read_evidence(folder, answers)
    title = f"Dossier for a data-protection impact assessment: {evidence.name}"
    document = content(title, evidence.record.run if evidence.record else "", sections(evidence))
    data, page = dumps(document), render(document)
    _check_place(files, data, page)
    write_files({files.data: data, files.page: page}, files.page, "dossier")
    return Written(files, document)


def render(document: dict[str, Any]) -> bytes:
    """Return the page of a JSON's content, always in the same bytes. Raises MissingExtra without Jinja2."""
    groups = [
        groupby(section["sentences"], lambda sentence: str(sentence.get("group", "")))
        for section in document["sections"]
    ]
    shown = [
        {**section, "groups": [(name, list(members)) for name, members in pairs]}
        for section, pairs in zip(document["sections"], groups, strict=True)
    ]
    text = template("dossier.html.j2").render(dossier=document, sections=shown)
    return text.encode("utf-8", "replace")


def _check_place(files: Files, data: bytes, page: bytes) -> None:
    """Refuse to overwrite any file but a dossier, and a signed dossier with another."""
    if files.data.exists() and files.data.stat().st_size:
        loads(read_file(files.data.parent, files.data.name), f"{files.data} exists already")
    if not files.signatures.exists():
        return
    kept = [read_file(file.parent, file.name) if file.exists() else b"" for file in (files.data, files.page)]
    if kept != [data, page]:
        raise ParameterError(
            f"{files.signatures} signs the existing dossier, and this one differs; name another file by --out"
        )


FORMAT = 1
MOST = 10_000  # signatures, more than any cohort needs


@dataclass(frozen=True)
class Checked:
    """The result of signatures.

    Attributes:
        signers: By their names in the roster.
        missing: Those of the roster who did not sign.
        unknown: Fingerprints of keys that the roster does not list.
        broken: Those whose signature is wrong, by name or fingerprint.
    """

    signers: Sequence[str]
    missing: Sequence[str]
    unknown: Sequence[str]
    broken: Sequence[str]

    @property
    def fault(self) -> str:
        """The fault, as the end of a sentence; empty if there are signatures and all are right."""
        if self.broken:
            return f"it differs from the dossier that {', '.join(self.broken)} signed: a file was changed since"
        if self.unknown:
            return f"it is signed by {', '.join(self.unknown)}, which the roster does not list"
        return "" if self.signers else "nobody has signed it"


def sign(path: Path, identity: Identity) -> Files:
    """Sign a dossier, and return its paths. A second signature of the same identity replaces the first one.

    Raises:
        ParameterError: The JSON or its page has changed since it was written, or the signatures are of another dossier.
    """
    files = Files.at(path)
    document, data, page = _read(files)
    if page != render(document):
        raise ParameterError(
            f"{files.page} is not the page of {files.data}; write the dossier again before you sign it"
        )
    kept = [signature for signature in _signatures(files) if signature["key"] != public_line(identity.public_key)]
    statement = _statement(document, data, page)
    for signature in kept:
        if not _fits(signature, statement):
            raise ParameterError(f"{files.signatures} has signatures of another dossier; name this one otherwise")
    own = {"key": public_line(identity.public_key), "signature": base64.b64encode(identity.sign(*statement)).decode()}
    text = json.dumps(
        {"format": FORMAT, "signatures": sorted([*kept, own], key=lambda signature: signature["key"])}, indent=1
    )
    write_atomically(files.signatures, f"{text}\n".encode())
    return files


def check(path: Path, roster: Roster) -> Checked:
    """Check the signatures on a dossier against a roster, whose server may have signed too.

    Raises:
        ParameterError: A file is unreadable, or the JSON has changed.
    """
    files = Files.at(path)
    document, data, page = _read(files)
    statement = _statement(document, data, page)
    names = {public_line(key): name for name, key in roster.keys.items()}
    names |= {public_line(key): "server" for key in roster.server}
    signers, unknown, broken = list[str](), list[str](), list[str]()
    for signature in _signatures(files):
        name = names.get(signature["key"])
        signer = name or f"the key {fingerprint(parse_public_line(signature['key']))}"
        if not _fits(signature, statement):
            broken.append(signer)
        elif name is None:
            unknown.append(signer)
        else:
            signers.append(name)
    return Checked(signers, [name for name in roster.keys if name not in signers], unknown, broken)


def _statement(document: Mapping[str, Any], data: bytes, page: bytes) -> tuple[str | bytes, ...]:
    return ("dossier", document["run"], hashlib.sha256(data).digest(), hashlib.sha256(page).digest())


def _fits(signed: Mapping[str, str], statement: tuple[str | bytes, ...]) -> bool:
    try:
        signature = base64.b64decode(signed["signature"], validate=True)
    except ValueError:
        return False
    return len(signature) == 64 and verify(parse_public_line(signed["key"]), signature, *statement)


def _read(files: Files) -> tuple[dict[str, Any], bytes, bytes]:
    """Return the JSON's content, and both files' bytes."""
    contents = []
    for file in (files.data, files.page):
        try:
            contents.append(read_file(file.parent, file.name))
        except OSError as error:
            raise ParameterError(
                f"{file}: expected a dossier's file; it cannot be read: {error.strerror or error}"
            ) from None
    document = loads(contents[0], str(files.data))
    if document["digest"] != digest(document):
        raise ParameterError(f"{files.data} was changed since it was written: its digest does not fit its content")
    return document, contents[0], contents[1]


def _signatures(files: Files) -> Sequence[Mapping[str, str]]:
    """Return the existing signatures, with keys in a roster's form."""
    if not files.signatures.exists():
        return []
    try:
        document = json.loads(read_file(files.signatures.parent, files.signatures.name))
        signatures = document["signatures"] if document["format"] == FORMAT else None
        if not isinstance(signatures, list) or len(signatures) > MOST:
            raise ValueError
        for signature in signatures:
            if set(signature) != {"key", "signature"} or not all(isinstance(text, str) for text in signature.values()):
                raise ValueError
            parse_public_line(signature["key"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ParameterError):
        raise ParameterError(
            f"{files.signatures}: expected signatures of format {FORMAT}; the file is damaged"
        ) from None
    return signatures
