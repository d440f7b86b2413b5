"""Sentences, each with its sources, in sections: the JSON of a dossier, from which the page is made."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from moretta.errors import ParameterError
from moretta.report.dossier.questions import CLAUSES, Clause

KIND, FORMAT = "moretta dossier", 1

Origin = Literal["stated", "answered", "open"]
"""stated: by the run folder or a clause. answered: by people, in `dossier.toml`. open: not yet answered."""

Verdict = Literal["", "succeeded", "failed"]

_END = re.compile(r"(?<=[.!?]) (?=[A-Z“])")


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Sentence(_Part):
    """One sentence with its sources.

    A source has one of four forms. ``FILE#/KEY/..`` is a JSON pointer into a file of the run folder, also a TOML file;
    without ``#`` it is the whole file. ``claim:PROTOCOL:NUMBER`` is one of this version's `claims_of`, from 0.
    ``clause:NAME`` is one of `CLAUSES`. ``word:NUMBER`` is one of this version's `description.WORDS`, from 0.

    Args:
        text: with its full stop.
        sources: at least one.
        id: of its element on the page, set when it is written.
        group: its heading, if any.
        name: an attack's own name.
        by: who must answer, if it is open.
        verdict: of the attack that it is about.
    """

    id: str = ""
    text: str
    sources: tuple[str, ...]
    origin: Origin = "stated"
    group: str = ""
    name: str = ""
    by: str = ""
    verdict: Verdict = ""


class Chapter(_Part):
    """One section of a dossier.

    Attributes:
        number: The section's number in the EDPB's template.
        clauses: The clauses that it follows.
    """

    number: str
    title: str
    clauses: tuple[str, ...]
    sentences: tuple[Sentence, ...]


class _Content(_Part):
    """The content of the JSON, which is checked before it is used."""

    format: int
    kind: str
    title: str
    run: str
    sections: tuple[Chapter, ...]
    clauses: dict[str, Clause]
    digest: str

    @model_validator(mode="after")
    def _names_what_is_there(self) -> Self:
        if any(name not in self.clauses for section in self.sections for name in section.clauses):
            raise ValueError("a section names an unknown clause")
        if not all(sentence.id for section in self.sections for sentence in section.sentences):
            raise ValueError("a sentence has no id")
        return self


def sentence(text: str, *sources: str, group: str = "", name: str = "") -> Sentence:
    """Return a sentence that the run folder or a clause states, with a capital letter and a full stop."""
    return Sentence(text=_ended(text), sources=sources, group=group, name=name)


def sentences(text: str, *sources: str, origin: Origin = "stated", group: str = "", by: str = "") -> list[Sentence]:
    """Return the sentences of another author's text, each with these sources."""
    parts = [_ended(part) for part in _END.split(text.strip()) if part]
    return [Sentence(text=part, sources=sources, origin=origin, group=group, by=by) for part in parts]


def under(group: str, members: Iterable[Sentence]) -> list[Sentence]:
    """Return sentences below a heading."""
    return [sentence.model_copy(update={"group": group}) for sentence in members]


def pointer(file: str, *keys: str | int) -> str:
    """Return the source of a key in a file of the run folder.

    >>> pointer("inputs.json", "table", "columns", "a/b")
    'inputs.json#/table/columns/a~1b'
    """
    return file + "#" + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


of_result, of_audited = partial(pointer, "result.json"), partial(pointer, "audit.json")
of_planned, of_inputs = partial(pointer, "run.toml"), partial(pointer, "inputs.json")


def content(title: str, run: str, sections: Sequence[Chapter]) -> dict[str, Any]:
    """Return the content of the JSON, with its digest."""
    used = {name for section in sections for name in section.clauses}
    used |= {
        source.removeprefix("clause:")
        for section in sections
        for sentence in section.sentences
        for source in sentence.sources
        if source.startswith("clause:")
    }
    parts = {
        "format": FORMAT,
        "kind": KIND,
        "title": title,
        "run": run,
        "sections": [_as_json(section) for section in sections],
        "clauses": {name: asdict(clause) for name, clause in CLAUSES.items() if name in used},
    }
    return {**parts, "digest": digest(parts)}


def digest(document: dict[str, Any]) -> str:
    """Return the SHA-256, in hex, of a dossier's content without its own digest."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def dumps(document: dict[str, Any]) -> bytes:
    """Return the JSON as the bytes of its file."""
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def loads(data: bytes, where: str) -> dict[str, Any]:
    """Return a dossier's JSON, as parsed. Raises `moretta.errors.ParameterError` unless it is a dossier's."""
    wrong = f"{where}: expected the JSON of a dossier; make one by: moretta dossier RUN"
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise ParameterError(wrong) from None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ParameterError(wrong)
    if document.get("format") != FORMAT:
        raise ParameterError(f"{where}: expected a dossier of format {FORMAT}; was it made by another version?")
    try:
        _Content.model_validate_json(data)
    except (ValidationError, RecursionError):
        raise ParameterError(f"{where}: this dossier is damaged; write it again") from None
    return document


def _as_json(section: Chapter) -> dict[str, Any]:
    """Return a section as JSON content: each sentence with its id, without empty fields."""
    chapter = section.model_dump(mode="json")
    for place, line in enumerate(chapter["sentences"], start=1):
        line["id"] = f"{section.number}-{place}"
    return {
        **chapter,
        "sentences": [{key: value for key, value in line.items() if value} for line in chapter["sentences"]],
    }


def _ended(text: str) -> str:
    text = text.strip()
    begun = text if "." in text.split()[0] else text[0].upper() + text[1:]  # a file's name stays unchanged
    return begun + ("" if text[-1] in ".!?" else ".")
