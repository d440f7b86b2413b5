"""The two files of a dossier: the JSON, and the page, in which each sentence is one of the JSON by its id."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from moretta.engines.files import check_ending, read_file, write_atomically
from moretta.errors import ParameterError
from moretta.report.dossier.document import content, digest, dumps, loads
from moretta.report.dossier.evidence import read_evidence
from moretta.report.dossier.sections import sections
from moretta.report.page import SIGNATURES, template, write_files
from moretta.secure_aggregation.identity import Identity, Roster, fingerprint, parse_public_line, public_line, verify


@dataclass(frozen=True)
class Files:
    """Where a dossier lies: the JSON, its page, and the signatures below both."""

    data: Path
    page: Path
    signatures: Path

    @classmethod
    def at(cls, path: Path) -> Files:
        """Return the files of a dossier by the path of its JSON or its page.

        Raises `moretta.errors.ParameterError` for a path of neither.
        """
        check_ending(path, ".html", ".json")
        return cls(path.with_suffix(".json"), path.with_suffix(".html"), path.with_suffix(SIGNATURES))


@dataclass(frozen=True)
class Written:
    """A dossier that was written. told: the content of its JSON."""

    files: Files
    told: dict[str, Any]

    def count(self, origin: str = "") -> int:
        """Return how many sentences there are, or how many of one origin."""
        every = [sentence for section in self.told["sections"] for sentence in section["sentences"]]
        return sum(not origin or sentence["origin"] == origin for sentence in every)


def write_dossier(folder: Path, out: Path | None = None, answers: Path | None = None) -> Written:
    """Write the dossier of a run: a page to `out`, by default ``dossier.html`` in the folder, and its JSON beside it.

    answers: as in `moretta.report.dossier.evidence.read_evidence`.
    Raises `moretta.errors.ParameterError` for a folder that cannot be read, a file that cannot be written or is no
    dossier, and a signed dossier that would become another one; then nothing is written.
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
    """Return the page of a JSON's content; the same content gives the same bytes.

    Raises `moretta.errors.MissingExtra` without Jinja2.
    """
    groups = [
        groupby(section["sentences"], lambda sentence: str(sentence.get("group", "")))
        for section in document["sections"]
    ]
    shown = [
        {**section, "groups": [(name, list(some)) for name, some in its]}
        for section, its in zip(document["sections"], groups, strict=True)
    ]
    text = template("dossier.html.j2").render(told=document, sections=shown)
    return text.encode("utf-8", "replace")


def _check_place(files: Files, data: bytes, page: bytes) -> None:
    """Refuse to overwrite what is no dossier, and a signed one by another."""
    if files.data.exists() and files.data.stat().st_size:
        loads(read_file(files.data.parent, files.data.name), f"{files.data} is there already")
    if not files.signatures.exists():
        return
    kept = [read_file(file.parent, file.name) if file.exists() else b"" for file in (files.data, files.page)]
    if kept != [data, page]:
        raise ParameterError(
            f"{files.signatures} signs the dossier that is there, and this one is another; name another file by --out"
        )


FORMAT = 1
MOST = 10_000  # signatures, more than any cohort has


@dataclass(frozen=True)
class Checked:
    """The result of signatures. signers: who signed, by the roster's names; missing: who of the roster did not.

    unknown: fingerprints of keys that the roster does not list; broken: of those whose signature does not fit.
    """

    signers: Sequence[str]
    missing: Sequence[str]
    unknown: Sequence[str]
    broken: Sequence[str]

    @property
    def fault(self) -> str:
        """What is wrong, as the end of a sentence; empty where all signatures fit and there is one."""
        if self.broken:
            return f"it is not what {', '.join(self.broken)} signed: a file was changed since"
        if self.unknown:
            return f"it is signed by {', '.join(self.unknown)}, which the roster does not list"
        return "" if self.signers else "nobody has signed it"


def sign(path: Path, identity: Identity) -> Files:
    """Sign a dossier, and return where it lies. A second signature of the same identity takes the first one's place.

    Raises `moretta.errors.ParameterError` where the JSON or its page is not as it was written, or where others signed
    another dossier under this name.
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
    """Check the signatures below a dossier against a roster, whose server may have signed too.

    Raises `moretta.errors.ParameterError` for files that cannot be read, or a JSON that is not as it was written.
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
    """Return the signatures that are there, of keys that rosters take."""
    if not files.signatures.exists():
        return []
    try:
        document = json.loads(read_file(files.signatures.parent, files.signatures.name))
        some = document["signatures"] if document["format"] == FORMAT else None
        if not isinstance(some, list) or len(some) > MOST:
            raise ValueError
        for signature in some:
            if set(signature) != {"key", "signature"} or not all(isinstance(text, str) for text in signature.values()):
                raise ValueError
            parse_public_line(signature["key"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ParameterError):
        raise ParameterError(
            f"{files.signatures}: expected signatures of format {FORMAT}; the file is damaged"
        ) from None
    return some
