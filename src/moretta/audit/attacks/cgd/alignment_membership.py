"""A partner of an alignment of rows reads off which of its own ids the other holders of its row have.

It is what aligning is for, and so it learns it exactly: its alignment lists its own rows that are shared. For a
hospital and an insurer this is who of the hospital's patients is insured there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from moretta.audit.attacks.cgd.alignment_dictionary import fits
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import of_rate
from moretta.data.alignment.ids import IdRules, numbered
from moretta.data.holders import grid_of
from moretta.errors import ParameterError
from moretta.protocols.cgd.row_order import ALIGNED_ORDER

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth


def given(truth: Truth) -> Given:
    """Give the first holder of a row of several what it keeps itself."""
    from moretta.audit.attacks.cgd.confined import after_last

    name = _holders(truth)[0]
    state = truth.states(after_last(truth))[f"silo-{name}"]
    return Given(
        views={},
        arrays={"order": np.asarray(state[ALIGNED_ORDER]), "rows": np.array(len(_elements(truth)[name]))},
        view=f"none but what {name} holds itself",
        knowledge="its own ids, and its alignment",
    )


def attack(case: Case) -> Claim:
    """Claim of each own row whether all other holders have it."""
    shared = np.zeros(int(case.arrays["rows"]), dtype=bool)
    shared[case.arrays["order"]] = True
    return {"shared": shared}


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with what all ids in the clear say, beside the better of two constant answers."""
    name, *others = _holders(truth)
    elements = _elements(truth)
    true = np.array([all(one in set(elements[other]) for other in others) for one in elements[name]])
    hits, rate = int((claim["shared"] == true).sum()), float(true.mean())
    return AttackResult(
        measure="rows of which a partner knows rightly whether the others have them",
        score=hits / len(true),
        chance=max(rate, 1 - rate),
        interval=of_rate(hits, len(true)),
        sentence=f"A partner knows of {hits} of its {len(true)} rows rightly whether the other holders have them too",
        figures={"rows": float(len(true)), "shared": float(true.sum())},
    )


def _holders(truth: Truth) -> tuple[str, ...]:
    for names in grid_of(truth.federation.silos).rows.values():
        if len(names) > 1:
            return names
    raise ParameterError("no row of the grid has several holders")


def _elements(truth: Truth) -> Mapping[str, list[tuple[str, int]]]:
    """Return each silo's (normalised id, number of the row with it)."""
    rules: IdRules = truth.federation.spec.protocol.id_rules  # type: ignore[attr-defined]  # `fits`: the run is CGD's
    found = {}
    for silo in truth.federation.silos:
        written = rules.normalised(() if silo.subject_ids is None else silo.subject_ids, f"silo `{silo.name}`")
        found[silo.name] = list(zip(written, numbered(written), strict=True))
    return found


ATTACK = Attack(
    name="alignment-membership",
    title="learns which of its own ids a partner has too",
    severity="members",
    role="silo",
    source="what private set intersection is for; docs/alignment.md",
    protocols=frozenset({"cgd"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
