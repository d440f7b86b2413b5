"""The evidence of a run folder, read once: its record, run file, meaning of inputs, views, and people's answers."""

import hashlib
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moretta.data.tables import schema
from moretta.engines import views
from moretta.engines.files import read_file, read_text
from moretta.engines.run_folder import read_inputs
from moretta.errors import ParameterError
from moretta.protocols.common.entry import Entry
from moretta.protocols.registry import ENTRIES
from moretta.report.dossier.document import Sentence, of_inputs, pointer, sentence
from moretta.report.dossier.questions import NAME, read_answers
from moretta.report.folder import RunRecord, read_run
from moretta.secure_aggregation.identity import Roster


@dataclass(frozen=True)
class Receipts:
    """A role's received data in the recorded rounds."""

    messages: int
    bytes: int


@dataclass(frozen=True)
class Evidence:
    """The evidence about a run.

    Args:
        record: of a finished run, None for another.
        run_file: the content of `run.toml`, empty for a run from Python.
        inputs: the content of `inputs.json`, None where it is missing.
        receipts: the recorded views by role.
        rounds_done: the rounds in the history.
        answers: by key of `dossier.toml`.
        answers_file: its name.
    """

    folder: Path
    record: RunRecord | None
    run_file: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] | None = None
    receipts: Mapping[str, Receipts] = field(default_factory=dict)
    rounds_done: int = 0
    answers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    answers_file: str = NAME

    @property
    def name(self) -> str:
        """The run's name."""
        return self.record.name if self.record else str(self.run_file.get("run", {}).get("name", self.folder.name))

    @property
    def protocol(self) -> str:
        """The name of the run's protocol."""
        return self.record.protocol if self.record else str(self.run_file.get("protocol", {}).get("name", ""))

    @property
    def entry(self) -> Entry | None:
        """The protocol's entry in the registry, None where this version does not know it."""
        return ENTRIES.get(self.protocol)

    @property
    def label(self) -> str:
        """The protocol's name in the field."""
        return self.entry.label if self.entry else self.protocol

    @property
    def columns(self) -> Mapping[str, Mapping[str, Any]]:
        """The columns of the schema, in order; empty without a schema."""
        table = (self.inputs or {}).get("table")
        columns = table.get("columns", {}) if isinstance(table, Mapping) else {}
        return columns if isinstance(columns, Mapping) else {}


def read_evidence(folder: Path, answers: Path | None = None) -> Evidence:
    """Read a run folder.

    Args:
        answers: A file of `questions.read_answers`; None takes `dossier.toml` in the folder, if any.

    Raises:
        ParameterError: The folder has no run, or a damaged file.
    """
    if not folder.is_dir():
        raise ParameterError(f"{folder}: expected a run folder; there is no such directory")
    finished = (folder / "result.json").exists()
    if not finished and not (folder / "run.toml").exists():
        raise ParameterError(f"{folder}: expected a run folder; it has neither result.json nor run.toml")
    record = read_run(folder) if finished else None
    path = answers or (folder / NAME if (folder / NAME).exists() else None)
    return Evidence(
        folder,
        record,
        run_file=_toml(folder / "run.toml"),
        inputs=read_inputs(folder) if (folder / "inputs.json").exists() else None,
        receipts={} if record is None or not record.views else _receipts_of(folder / "views", record),
        rounds_done=_rounds(folder / "history.jsonl"),
        answers={} if path is None else read_answers(path if answers is None else path.resolve()),
        answers_file=NAME if path is None else path.name,
    )


def _toml(file: Path) -> Mapping[str, Any]:
    if not file.exists():
        return {}
    try:
        return tomllib.loads(read_text(file.parent, file.name))
    except (OSError, ValueError, RecursionError):
        raise ParameterError(f"{file}: expected the run file of this run; it cannot be read as TOML") from None


def _rounds(file: Path) -> int:
    return sum(1 for line in read_file(file.parent, file.name).splitlines() if line.strip()) if file.exists() else 0


def _receipts_of(folder: Path, record: RunRecord) -> Mapping[str, Receipts]:
    """Count roles' received data in unchanged views; return an empty mapping if views have been removed."""
    if not (folder / views.INDEX).exists():
        return {}
    seen = views.Views.open(folder, record.run, record.views)
    messages, sizes = Counter[str](), Counter[str]()
    for role, files in seen.files.items():
        for number in files:
            for message in views.parse(seen.data(role, number), files[number]):
                if message.direction == "received":
                    messages[role] += 1
                    sizes[role] += len(message.data)
    return {role: Receipts(messages[role], sizes[role]) for role in seen.files}


FILES = {
    "run.toml": "the specification, as resolved",
    "result.json": "the run’s result",
    "history.jsonl": "a line a round",
    "inputs.json": "the meaning of inputs and outputs",
    "audit.json": "the result of attacks",
    "views/index.jsonl": "the index of recorded views, with the digest of each",
    "model.safetensors": "the trained model, or the server’s part of it",
    "released.safetensors": "the model that silos may receive",
}
"""The files that have a digest; none of them holds a secret root or a row."""


def hashes(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the digests of existing files, the schema and the roster."""
    for name, what in FILES.items():
        if (evidence.folder / name).exists():
            yield sentence(f"{name}, {what}, has the SHA-256 {sha256(evidence.folder, name)}", name, group="Files")
    for path in sorted((evidence.folder / "models").glob("*.safetensors")):
        name = f"models/{path.name}"
        yield sentence(
            f"{name}, a silo’s own model, has the SHA-256 {sha256(evidence.folder, name)}", name, group="Files"
        )
    if evidence.columns:
        digest = schema.of({"columns": dict(evidence.columns)}, "inputs.json").digest
        text = f"The schema of the tables has the SHA-256 {digest}, the same at all sites"
        yield sentence(text, of_inputs("table"), group="Schema and roster")
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
        if not path.is_file():  # reading a pipe may never end
            raise ParameterError(f"{path}: expected a roster, which is a file")
        digest = Roster.load(path).digest
    except ParameterError:
        text = "The run had a roster of identities, which could not be read here, so its digest is not stated"
    else:
        text = f"The roster of identities has the SHA-256 {digest}, by which parties see that all hold the same"
    yield sentence(text, pointer(source, *keys), group="Schema and roster")
