"""What a run hid from whom: plain sentences by role, and whether an attack has tested each.

The sentences are the claims of the run's protocol (`moretta.protocols.registry.claims_of`) whose conditions hold of its
record. A protocol or a scheme without claims gets a sentence saying so. A value is called obfuscated where the claims
call it obfuscated; stronger words are for what a proof or an accountant supports.

A sentence names the attacks of `moretta.audit` that test it. If the run was audited, their results are its evidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moretta.protocols.common.claims import MASKED, Claim, Record, is_noised, is_summed, scheme
from moretta.protocols.common.shared_claims import LISTENERS, NOTES, SCORES, epsilons, what_epsilon_leaves_out
from moretta.protocols.registry import claims_of
from moretta.report.audit import who_does
from moretta.report.folder import Attacked, RunRecord
from moretta.report.scales import way

Role = Literal["Server", "A silo", "An eavesdropper"]

ROLES: dict[Role, tuple[str, ...]] = {
    "Server": ("server", "server and silos"),
    "A silo": ("silo", "silos together"),
    "An eavesdropper": ("eavesdropper", "outsider"),
}
"""Whose claims stand under each heading, in the order of the page."""

UNTESTED = "not yet tested by an attack on this run"


@dataclass(frozen=True)
class Tested:
    """An attack that tested a sentence on this run: who does what, its own name, and what it came to."""

    who: str
    attack: str
    came_to: str


@dataclass(frozen=True)
class Statement:
    """What one role sees or can work out. tested: by which attacks on this run."""

    role: Role
    text: str
    tested: tuple[Tested, ...] = ()

    @property
    def evidence(self) -> str:
        """How well the sentence is supported, in words."""
        if not self.tested:
            return UNTESTED
        return f"tested on this run: {'; '.join(f'{one.who} ({one.attack}): {one.came_to}' for one in self.tested)}"


def privacy_statements(record: RunRecord) -> tuple[Statement, ...]:
    """Return the sentences that hold of this run, the server's first."""
    run, attacked = record.model_dump(by_alias=True), () if record.audit is None else record.audit.attacks
    found = [Statement("Server", said) for said in _of_an_unknown_scheme(run)]
    for role in ROLES:
        for claim in _said(run, role):
            tested = tuple(_tested(one) for one in attacked if one.attack in claim.attacks)
            found.append(Statement(role, claim.text(run), tested))
    return tuple(found)


def reading_notes(record: RunRecord) -> tuple[str, ...]:
    """Return notes for a reader of the sentences; they are no claims and need no test."""
    run = record.model_dump(by_alias=True)
    return tuple(claim.text(run) for claim in _claims(run) if claim.role == "reader" and claim.holds(run))


def epsilon_note(record: RunRecord) -> str:
    """Return the run's epsilon with what its scale means, empty where no noise was added."""
    run = record.model_dump(by_alias=True)
    if not is_noised(run):
        return ""
    epsilon = record.facts["epsilon"]
    scale = "ε = 0 would tell nothing of one example"
    if isinstance(epsilon, int | float) and epsilon < LARGEST:
        scale += (
            f", and with ε = {epsilon:.3g} whatever is seen is at most {math.exp(epsilon):.3g} times as likely with "
        )
        scale += "the example as without it, but for a chance of δ"
    return f"{epsilons(run)}. {scale}.{what_epsilon_leaves_out(run)}"


LARGEST = 50.0
"""The epsilon from which on nobody need be told how many times as likely something may be."""


def _claims(run: Record) -> Sequence[Claim]:
    """Return the claims of the run's protocol, or that there are none."""
    if claims := claims_of(run["protocol"]):
        return claims
    none = "This version of the report has no sentence about the protocol {protocol}."
    unknown = [Claim(role, "unclaimed", "", none, words=(protocol,)) for role in ("server", "silo")]
    return [*unknown, SCORES, *LISTENERS, *NOTES]


def protocol(run: Record) -> str:
    """Return the name of the run's protocol."""
    return str(run["protocol"])


def _said(run: Record, role: Role) -> list[Claim]:
    """Return a role's claims with a sentence about this run; if one of them stands alone, that one only."""
    found = [one for one in _claims(run) if one.role in ROLES[role] and one.sentence and one.holds(run)]
    return [claim for claim in found if claim.alone] or found


def _of_an_unknown_scheme(run: Record) -> Iterator[str]:
    if is_summed(run) and scheme(run) not in MASKED:
        yield f"This version of the report has no sentence about the aggregation scheme {scheme(run)}."


def _tested(one: Attacked) -> Tested:
    ended = f"it succeeded, {way(one)}" if one.succeeded else "this attack failed"
    return Tested(who_does(one), one.attack, ended)
