"""The two files of a dossier: the JSON, and the page, in which each sentence is one of the JSON by its id."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from moretta.engines.files import check_ending, read_file, write_atomically
from moretta.errors import ParameterError
from moretta.report.dossier.document import content, dumps, loads
from moretta.report.dossier.evidence import read_evidence
from moretta.report.dossier.sections import sections
from moretta.report.page import SIGNATURES, template


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
        every = [one for section in self.told["sections"] for one in section["sentences"]]
        return sum(not origin or one["origin"] == origin for one in every)


def write_dossier(folder: Path, out: Path | None = None, answers: Path | None = None) -> Written:
    """Write the dossier of a run: a page to `out`, by default ``dossier.html`` in the folder, and its JSON beside it.

    answers: as in `moretta.report.dossier.evidence.read_evidence`.
    Raises `moretta.errors.ParameterError` for a folder that cannot be read, a file that cannot be written or is no
    dossier, and a signed dossier that would become another one; then nothing is written.
    """
    files = Files.at(out or folder / "dossier.html")
    evidence = read_evidence(folder, answers)
    title = f"Dossier for a data-protection impact assessment: {evidence.name}"
    told = content(title, evidence.record.run if evidence.record else "", sections(evidence))
    data, page = dumps(told), render(told)
    _check_place(files, data, page)
    try:
        files.page.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(files.data, data)
        write_atomically(files.page, page)
    except OSError as error:
        raise ParameterError(f"The dossier cannot be written to {files.page}: {error.strerror}.") from error
    return Written(files, told)


def render(told: dict[str, Any]) -> bytes:
    """Return the page of a JSON's content; the same content gives the same bytes.

    Raises `moretta.errors.MissingExtra` without Jinja2.
    """
    shown = [
        {**section, "groups": [(name, list(some)) for name, some in groupby(section["sentences"], _group)]}
        for section in told["sections"]
    ]
    text = template("dossier.html.j2").render(told=told, sections=shown)
    return text.encode("utf-8", "replace")


def _group(one: dict[str, Any]) -> str:
    return str(one.get("group", ""))


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
