"""What each role received, from the claims that hold of the run, and which of it is personal data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moretta.protocols.common.claims import About, Claim, Record
from moretta.protocols.registry import claims_of
from moretta.report.audit import ROLES
from moretta.report.dossier.document import Sentence, pointer, sentence, sentences, under
from moretta.report.dossier.evidence import Evidence
from moretta.report.table import human_bytes

NAMES: Mapping[str, str] = {**ROLES, "eavesdropper": "Whoever listens to the network"}
MEASURES = ("not given", "obfuscated", "bounded")
"""The kinds of claims that are measures by design; the others are about what a role receives."""

_VERBS = {"learns": "learns", "obfuscated": "is given", "not given": "is not given", "unclaimed": "no claim is made of"}


@dataclass(frozen=True)
class Held:
    """A claim that holds of the run. place: its number among those of the protocol."""

    claim: Claim
    place: int
    protocol: str

    def said(self, run: Record) -> list[Sentence]:
        """Return what it says of this run, and what is assumed besides."""
        source = f"claim:{self.protocol}:{self.place}"
        text = self.claim.sentence and self.claim.text(run)
        text = text or f"{_VERBS.get(self.claim.kind, self.claim.kind)} {self.claim.what}".replace("`", "")
        text += f"{'' if text.endswith('.') else '.'} This holds where: {self.claim.assumes}" * bool(self.claim.assumes)
        return sentences(text, source, pointer("result.json", "protocol"), group=NAMES[self.claim.role])


def held(evidence: Evidence) -> Sequence[Held]:
    """Return the claims that hold of a finished run; if one stands alone for its role, that one only."""
    if evidence.record is None:
        return ()
    run = evidence.record.model_dump(by_alias=True)
    every = enumerate(claims_of(evidence.protocol))
    found = [Held(one, place, evidence.protocol) for place, one in every if one.role in NAMES and one.holds(run)]
    alone = {one.claim.role for one in found if one.claim.alone}
    return [one for one in found if one.claim.alone or one.claim.role not in alone]


def received(evidence: Evidence) -> Iterator[Sentence]:
    """Yield what each role received, in words, and how much of it was recorded."""
    if evidence.record is None:
        yield sentence(
            "What each role received is not stated, as the run has not finished and its record is written at the end",
            pointer("run.toml", "run", "rounds"),
        )
        return
    run = evidence.record.model_dump(by_alias=True)
    for role, name in NAMES.items():
        for one in held(evidence):
            if one.claim.role == role and one.claim.kind not in MEASURES:
                yield from one.said(run)
        yield from under(name, _recorded(evidence, role))
    if not claims_of(evidence.protocol):
        yield sentence(
            f"This version states nothing of what roles receive under {evidence.protocol}",
            pointer("result.json", "protocol"),
        )


def _recorded(evidence: Evidence, role: str) -> list[Sentence]:
    roles = [name for name in evidence.heard if (name == "server") == (role == "server")]
    if role not in ("server", "silo") or not roles or evidence.record is None:
        return []
    most = max(evidence.heard[name].bytes for name in roles)
    messages = max(evidence.heard[name].messages for name in roles)
    whom = "it received" if role == "server" else "one silo received at most"
    text = f"In the rounds that were recorded {whom} {messages:,} messages of {human_bytes(most)} in all"
    return [sentence(text, "views/index.jsonl", pointer("result.json", "views"))]


def measures(evidence: Evidence) -> Iterator[Sentence]:
    """Yield what the protocol keeps from whom by design."""
    if evidence.record is None:
        return
    run = evidence.record.model_dump(by_alias=True)
    for role in NAMES:
        for one in held(evidence):
            if one.claim.role == role and one.claim.kind in MEASURES:
                yield from one.said(run)


PERSONAL: Mapping[About, tuple[str, tuple[str, ...]]] = {
    "rows": (
        "Values, labels and predictions of single rows are personal data wherever a row is about a person, because "
        "they relate to that person",
        ("gdpr-4-1",),
    ),
    "ids": (
        "Whether somebody is among the rows of a silo is personal data, because it says of that person that the silo "
        "has to do with them",
        ("gdpr-4-1",),
    ),
    "update": (
        "What one silo computed of its rows is personal data unless an assessment shows otherwise, because "
        "rows may be worked out from it",
        ("gdpr-4-1", "opinion-43"),
    ),
    "sum": (
        "A sum over silos is to be assessed as what one of them computed: it tells the less of each row, the "
        "more rows are in it, and attacks measure how much",
        ("gdpr-4-1", "opinion-43"),
    ),
    "statistics": (
        "Figures over many rows describe a group, and are personal data where so few rows stand behind one that it "
        "tells of a person",
        ("gdpr-4-1",),
    ),
    "model": (
        "A model that was trained on personal data cannot in all cases be considered anonymous, so whether this one is "
        "personal data is to be assessed for this case, with the attacks as evidence",
        ("opinion-34", "opinion-43"),
    ),
    "traffic": (
        "Who takes part when, with how many rows and how long messages, is about silos, and is personal data "
        "where a number of rows tells of one person",
        ("gdpr-4-1",),
    ),
}
"""By what a claim is about: whether it is personal data and why, and the clauses that say so."""


def personal(evidence: Evidence) -> Iterator[Sentence]:
    """Yield which of what was received is personal data, and why."""
    found = [one for one in held(evidence) if one.claim.kind not in ("not given", "unclaimed")]
    for about, (text, clauses) in PERSONAL.items():
        having = [one for one in found if one.claim.about == about]
        if having:
            roles = [name for role, name in NAMES.items() if any(one.claim.role == role for one in having)]
            cited = [f"clause:{name}" for name in clauses]
            claims = [f"claim:{one.protocol}:{one.place}" for one in having]
            names = ", ".join(name[0].lower() + name[1:] for name in roles)
            yield sentence(f"{text} (received here by: {names})", *cited, *claims)
