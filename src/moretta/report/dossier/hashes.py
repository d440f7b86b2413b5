"""Digests of the files of a run folder that a dossier rests on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from moretta.data.tables import schema
from moretta.engines.files import read_file
from moretta.errors import ParameterError
from moretta.report.dossier.document import Sentence, pointer, sentence
from moretta.report.dossier.evidence import Evidence
from moretta.secure_aggregation.identity import Roster

FILES = {
    "run.toml": "the specification, as resolved",
    "result.json": "the run’s result",
    "history.jsonl": "a line a round",
    "inputs.json": "what inputs and outputs mean",
    "audit.json": "what attacks came to",
    "views/index.jsonl": "the index of recorded views, with the digest of each",
    "model.safetensors": "the trained model, or what the server has in its place",
    "released.safetensors": "the model that silos may be given",
}
"""The files of which there is a digest; none of them holds a secret root or a row."""


def hashes(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the digests of what is there: files, schema and roster."""
    for name, what in FILES.items():
        if (evidence.folder / name).exists():
            yield sentence(f"{name}, {what}, has the SHA-256 {sha256(evidence.folder, name)}", name, group="Files")
    for path in sorted((evidence.folder / "models").glob("*.safetensors")):
        name = f"models/{path.name}"
        yield sentence(
            f"{name}, a silo’s own model, has the SHA-256 {sha256(evidence.folder, name)}", name, group="Files"
        )
    if evidence.columns:
        found = schema.of({"columns": dict(evidence.columns)}, "inputs.json").digest
        text = f"The schema of the tables has the SHA-256 {found}, the same at all sites"
        yield sentence(text, pointer("inputs.json", "table"), group="Schema and roster")
    yield from _of_roster(evidence)


def sha256(folder: Path, name: str) -> str:
    """Return the SHA-256 of a file of a run folder, in hex."""
    return hashlib.sha256(read_file(folder, name)).hexdigest()


def _of_roster(evidence: Evidence) -> Iterator[Sentence]:
    named = evidence.run_file.get("secure-aggregation", {}).get("roster")
    if evidence.record is not None:
        named = evidence.record.setting("secure-aggregation", "roster")
    if not isinstance(named, str):
        return
    source = "result.json" if evidence.record else "run.toml"
    keys = ("settings", "secure-aggregation", "roster") if evidence.record else ("secure-aggregation", "roster")
    base = str(evidence.run_file.get("run", {}).get("base", ""))
    path = evidence.folder.absolute() / base / named
    try:
        if not path.is_file():  # a pipe that somebody else names would never end
            raise ParameterError(f"{path}: expected a roster, which is a file")
        digest = Roster.load(path).digest
    except ParameterError:
        text = "The run had a roster of identities, which could not be read here, so its digest is not stated"
    else:
        text = f"The roster of identities has the SHA-256 {digest}, by which parties see that all hold the same"
    yield sentence(text, pointer(source, *keys), group="Schema and roster")
