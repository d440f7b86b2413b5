"""The description of a run by its folder: the participants, the data, the training, and the quality of the model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moretta.contract.wording import enumerated
from moretta.protocols.common.claims import About, Claim, Record, has_roster
from moretta.protocols.registry import claims_of
from moretta.report.audit import ROLES
from moretta.report.dossier.document import Sentence, of_inputs, of_planned, of_result, sentence, sentences, under
from moretta.report.dossier.evidence import FILES, Evidence
from moretta.report.statements import missed, reached
from moretta.report.table import human_bytes

MOST_NAMES = 30  # the most silos or inputs that are listed by name


def _of_run(evidence: Evidence, *keys: str) -> str:
    """Return the source of a setting: the record, or the run file of an unfinished run."""
    return of_result("settings", *keys) if evidence.record else of_planned(*keys)


# -- who takes part ----------------------------------------------------------------------------------------------------


def parties(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the participants."""
    record = evidence.record
    if record is None:
        silos = evidence.run_file.get("data", {}).get("silos")
        if silos is not None:
            yield sentence(f"The run file asks for {silos} silos", of_planned("data", "silos"))
        return
    text = f"{record.silos} {'silo' if record.silos == 1 else 'silos'}, which hold rows, took part"
    if 0 < len(record.silo_names) <= MOST_NAMES:
        text += f": {enumerated(record.silo_names)}"
    yield sentence(text, of_result("silo_names" if record.silo_names else "silos"))
    if not evidence.entry or not evidence.entry.pooled:
        yield sentence("A server, which holds no training rows, took part as well", of_result("protocol"))
    if record.setting("engine", "name") != "flare" and evidence.entry and evidence.entry.summed:
        yield sentence(
            "All roles ran on one machine, so this run is a simulation of separate parties, and shows what the roles "
            "receive",
            _of_run(evidence, "engine", "name"),
        )


def name(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the name of the run."""
    source = of_result("name") if evidence.record else of_planned("run")
    yield sentence(f"The run is called {evidence.name}", source)
    if evidence.record and evidence.record.run:
        yield sentence(f"Its id is {evidence.record.run}", of_result("run"))


def sheet(evidence: Evidence) -> Iterator[Sentence]:
    """Yield whether the run has finished, and what a dossier is."""
    if evidence.record is None:
        planned = evidence.run_file.get("run", {}).get("rounds", "?")
        yield sentence(
            f"The run has not finished: {evidence.rounds_done} of {planned} rounds are in its history, so this dossier "
            "states what was planned; make it again at the end",
            "history.jsonl" if (evidence.folder / "history.jsonl").exists() else "run.toml",
            of_planned("run", "rounds"),
        )
    elif evidence.record.insecure_secret_seed:
        yield sentence(
            "The run used insecure-secret-seed, so nothing was hidden in it, and none of this dossier’s statements on "
            "what is hidden holds",
            of_result("insecure_secret_seed"),
        )
    yield sentence(
        "This dossier was written from the folder of the run, and states what was recorded and measured there",
        "clause:gdpr-35-7-a",
    )
    yield sentence(
        "Each sentence names its sources: a key of a file in the run folder, a clause, or a claim of this version of "
        "Moretta on who learns what",
        of_result("versions", "moretta") if evidence.record else "run.toml",
    )
    yield sentence(
        "It judges nothing: people decide whether a risk is acceptable and what the law requires", "clause:gdpr-35-7-c"
    )


def impacts(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the places where the dossier states impacts by design."""
    yield sentence(
        "Section 2.2.a states what each role learns by design, and section 4.1.c the results of attacks",
        "clause:template-3.1",
    )


def words(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the meanings of the words in claims and attacks."""
    for number, text in enumerate(WORDS):
        yield sentence(text, f"word:{number}", group="Words")


WORDS = (
    "A silo, also called a participant, is a party that holds rows, such as a hospital",
    "The server is the party that leads the training; under some protocols it only passes messages on",
    "A row is one record, often about one person; its label, or target, is what the model learns to predict",
    "A round is one step of the training: silos compute, and something is added up",
    "An update is what a silo computes from its rows in a round: a gradient, a change of weights or a few numbers",
    "A secure sum adds up updates under masks, which are random numbers that cancel in the sum",
    "The model is the trained numbers, also called parameters or weights; obfuscated ones are changed by secret "
    "numbers, which is not encryption",
    "Chance, or guessing, is the score of an attack that has seen nothing of the run",
)


# -- what data ---------------------------------------------------------------------------------------------------------

_KINDS = {
    "number": "a number",
    "category": "one of some words without an order",
    "ordered": "one of some words with an order",
    "date": "a date",
    "id": "an identifier of the row, which is not an input of the model",
    "group": "an identifier of the person or thing that the row is about, which is not an input of the model",
    "file": "the path of an image, which is the input of the model",
    "target": "what the model learns to predict",
    "drop": "not read",
}


def data(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the properties of the rows, by the schema if there is one."""
    if evidence.columns:
        yield sentence(
            f"The rows are of tables with {len(evidence.columns)} columns, which the schema describes",
            of_inputs("table", "columns"),
        )
        for name, column in evidence.columns.items():
            yield sentence(_column(name, column), of_inputs("table", "columns", name))
        return
    yield from _arrays(evidence)


def _column(name: str, column: Mapping[str, Any]) -> str:
    kind = str(column.get("kind"))
    text = f"Column {name}: {_KINDS.get(kind, kind)}"
    if unit := column.get("unit"):
        text += f", in {unit}"
    words = column.get("categories") or column.get("classes")
    if isinstance(words, list | tuple) and words:
        text += f", of {len(words)} words"
    blanks = column.get("blanks", "refuse")
    return text + (", which may be absent" if blanks != "refuse" else "")


def _arrays(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the known properties of inputs without a schema."""
    source = _of_run(evidence, "data")
    yield sentence("No schema says what the columns mean, so people must describe the categories of data", source)
    inputs = evidence.inputs or {}
    if shape := inputs.get("shape"):
        size = " × ".join(map(str, shape)) if isinstance(shape, list) else str(shape)
        yield sentence(f"A sample has {size} numbers", of_inputs("shape"))
    names = inputs.get("columns")
    if isinstance(names, list) and 0 < len(names) <= MOST_NAMES:
        yield sentence(f"The inputs are called {enumerated([str(name) for name in names])}", of_inputs("columns"))


# -- what was done -----------------------------------------------------------------------------------------------------


def scope(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the model, the number of rounds, and the silos that missed rounds."""
    record = evidence.record
    if record is None:
        yield sentence(f"The run file asks for the protocol {evidence.label}", of_planned("protocol", "name"))
        return
    task = "classes" if record.task == "classification" else "numbers"
    yield sentence(
        f"A model of {record.parameters:,} numbers was trained under the protocol {evidence.label} for "
        f"{record.rounds:,} rounds, to predict {task}",
        *(of_result(key) for key in ("parameters", "protocol", "rounds", "task")),
    )
    if absences := missed(record):
        keys = ("dropped",) if record.sums is None else ("dropped", "sums")
        yield sentence(absences, *(of_result(key) for key in keys))


def functions(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the work of silos and server, and the amount of data that they sent."""
    record, entry = evidence.record, evidence.entry
    if record is None:
        return
    if entry is not None and entry.pooled:
        yield sentence(
            "The rows of all silos were handed over to one party, which trained on them together", of_result("protocol")
        )
        return
    scheme = record.secure_aggregation.scheme if record.secure_aggregation else "none"
    source = of_result("secure_aggregation")
    if entry is None or entry.summed:
        yield sentence(
            "In each round the silos computed an update of the model from their own rows, which stayed where they were",
            of_result("protocol"),
        )
        summed = (
            "The updates were sent in the clear, without a secure sum"
            if scheme == "none"
            else f"The secure sum called {scheme} added up the updates; section 2.2.a says who sees which part of it"
        )
        yield sentence(summed, source)
    else:
        yield sentence(
            "Each silo trained a model of its own from its own rows, and nothing was added up", of_result("protocol")
        )
    sent, got = record.traffic.up_per_silo_per_round, record.traffic.down_per_silo_per_round
    yield sentence(
        f"On average a silo received {human_bytes(got)} a round and sent {human_bytes(sent)}",
        of_result("bytes", "down_per_silo_per_round"),
        of_result("bytes", "up_per_silo_per_round"),
    )
    if record.traffic.secure_aggregation:
        yield sentence(
            f"Keys and shares of the secure sum took {human_bytes(record.traffic.secure_aggregation)} in all",
            of_result("bytes", "secure_aggregation"),
        )


def means(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the software, and the content of the run folder."""
    record = evidence.record
    if record is not None:
        for name, version in record.versions.items():
            yield sentence(f"The version of {name} was {version}", of_result("versions", name))
        engine = record.setting("engine", "name")
        where = "between machines by NVIDIA FLARE" if engine == "flare" else f"by the engine {engine}"
        yield sentence(f"Messages were carried {where}", _of_run(evidence, "engine", "name"))
    kept = {
        **{name: FILES[name] for name in ("model.safetensors", "released.safetensors")},
        "models": "each silo’s own model",
        "views": "recorded messages, on which attacks can run",
        "truth": "the data that audits compare with, including secrets of the roles",
        "checkpoint": "the roles’ states, with their secrets",
        "participants": "the participants’ own models side by side, as a simulation keeps them",
    }
    for name, what in kept.items():
        if (evidence.folder / name).exists():
            yield sentence(f"The run folder keeps {name}: {what}", name)


def security(evidence: Evidence) -> Iterator[Sentence]:
    """Yield whether silos knew each other by a roster."""
    record = evidence.record
    if record is None:
        return
    if evidence.entry is None or evidence.entry.summed:
        roster = has_roster(record.content)
        text = (
            "Each silo signed its keys with a long-lived identity, which the roster of all parties names"
            if roster
            else "No roster of identities was set, so the silos took each other’s keys from the server on trust"
        )
        keys = ("roster",) if roster else ()
        yield sentence(text, _of_run(evidence, "secure-aggregation", *keys))


def works(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the quality of the model's predictions, as evidence of necessity."""
    record = evidence.record
    if record is not None:
        text = reached(record) if record.test.available else "No test rows say how well the model predicts"
        yield sentence(text, of_result("test"))


MEASURES = ("not given", "obfuscated", "bounded")
"""The kinds of claims that are measures by design; other claims concern what a role received."""


@dataclass(frozen=True)
class Held:
    """A claim that holds for the run. place: its number among those of the protocol."""

    claim: Claim
    place: int
    protocol: str

    def statements(self, run: Record) -> list[Sentence]:
        """Return the claim's sentence on this run, and its assumptions."""
        source = f"claim:{self.protocol}:{self.place}"
        text = self.claim.sentence(run).replace("`", "")
        text += f" This assumes: {self.claim.assumes}" * bool(self.claim.assumes)
        return sentences(text, source, of_result("protocol"), group=ROLES[self.claim.role])


def held(evidence: Evidence) -> Sequence[Held]:
    """Return the claims that hold for a finished run; if one claim stands alone for its role, only that one."""
    if evidence.record is None:
        return ()
    run, every = evidence.record.content, enumerate(claims_of(evidence.protocol))
    claims = [
        Held(claim, place, evidence.protocol) for place, claim in every if claim.role in ROLES and claim.holds(run)
    ]
    alone = {claim.claim.role for claim in claims if claim.claim.alone}
    return [claim for claim in claims if claim.claim.alone or claim.claim.role not in alone]


def received(evidence: Evidence) -> Iterator[Sentence]:
    """Yield what each role received, and how much of it was recorded."""
    if evidence.record is None:
        yield sentence(
            "What each role received is not stated, because the run has not finished; its record is written at the end",
            of_planned("run", "rounds"),
        )
        return
    for role, name in ROLES.items():
        for claim in held(evidence):
            if claim.claim.role == role and claim.claim.kind not in MEASURES:
                yield from claim.statements(evidence.record.content)
        yield from under(name, _recorded(evidence, role))
    if not claims_of(evidence.protocol):
        yield sentence(
            f"This version states nothing about what roles receive under {evidence.protocol}", of_result("protocol")
        )


def _recorded(evidence: Evidence, role: str) -> list[Sentence]:
    roles = [name for name in evidence.receipts if (name == "server") == (role == "server")]
    if role not in ("server", "silo") or not roles or evidence.record is None:
        return []
    most = max(evidence.receipts[name].bytes for name in roles)
    messages = max(evidence.receipts[name].messages for name in roles)
    receiver = "it received" if role == "server" else "one silo received at most"
    text = f"In the recorded rounds {receiver} {messages:,} messages of {human_bytes(most)} in all"
    return [sentence(text, "views/index.jsonl", of_result("views"))]


def measures(evidence: Evidence) -> Iterator[Sentence]:
    """Yield the data that the protocol hides by design, and from whom."""
    run = evidence.record.content if evidence.record else {}
    for role in ROLES:
        for claim in held(evidence):
            if claim.claim.role == role and claim.claim.kind in MEASURES:
                yield from claim.statements(run)


PERSONAL: Mapping[About, tuple[str, tuple[str, ...]]] = {
    "rows": (
        "Values, labels and predictions of single rows are personal data wherever a row is about a person, because "
        "they relate to that person",
        ("gdpr-4-1",),
    ),
    "ids": (
        "Whether somebody is among the rows of a silo is personal data, because it shows that the silo has to do "
        "with that person",
        ("gdpr-4-1",),
    ),
    "update": (
        "What one silo computed from its rows is personal data unless an assessment shows otherwise, because "
        "it may reveal rows",
        ("gdpr-4-1", "opinion-43"),
    ),
    "sum": (
        "A sum over silos must be assessed like what one silo computed; the more rows are in it, the less it "
        "reveals of each, and attacks measure how much",
        ("gdpr-4-1", "opinion-43"),
    ),
    "statistics": (
        "Figures over many rows describe a group; a figure is personal data where it covers so few rows that it "
        "reveals something about a person",
        ("gdpr-4-1",),
    ),
    "model": (
        "A model that was trained on personal data cannot in all cases be considered anonymous, so people must assess "
        "for this case whether this one is personal data, with the attacks as evidence",
        ("opinion-34", "opinion-43"),
    ),
    "traffic": (
        "Who takes part when, with how many rows and how long messages, is about silos; it is personal data "
        "where a number of rows reveals something about one person",
        ("gdpr-4-1",),
    ),
}
"""By the subject of a claim: whether it is personal data, why, and the clauses that decide it."""


def personal(evidence: Evidence) -> Iterator[Sentence]:
    """Yield which received content is personal data, and why."""
    personal_claims = [claim for claim in held(evidence) if claim.claim.kind not in ("not given", "unclaimed")]
    for about, (text, clauses) in PERSONAL.items():
        having = [claim for claim in personal_claims if claim.claim.about == about]
        if having:
            roles = [name for role, name in ROLES.items() if any(claim.claim.role == role for claim in having)]
            cited = [f"clause:{name}" for name in clauses]
            claims = [f"claim:{claim.protocol}:{claim.place}" for claim in having]
            names = ", ".join(name[0].lower() + name[1:] for name in roles)
            group = "Which of this is personal data, and why"
            yield sentence(f"{text} (received here by: {names})", *cited, *claims, group=group)
