"""What a claim of privacy is, and the conditions on a run under which claims hold.

A claim says what one role learns, or is not given, under some conditions, and names the attacks that test it. Claims
are data: `protocols/<name>/claims.py` lists those of a protocol, `moretta.protocols.common.shared_claims` those that
protocols share. A run's report and the lists in docs/threat-models.md, README.md and SECURITY.md are written from them
(`python docs/claims.py`).

A condition is a function of a run's record, the contents of its `result.json`. What its docstring says after "Whether"
stands in the lists. It answers for a record that lacks what older or other runs do not state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Record = Mapping[str, Any]
"""What a run says of itself: the contents of its `result.json`."""

Condition = Callable[[Record], bool]
Word = Callable[[Record], str]
"""What a sentence has in the place of the function's name in braces."""

Role = Literal["server", "silo", "silos together", "server and silos", "outsider", "eavesdropper", "reader"]
"""Who learns. "reader" has no claims, but notes on how to read the others."""

Kind = Literal["learns", "not given", "obfuscated", "bounded", "unclaimed"]
"""learns: has it, or can work it out. not given: no message to the role holds it. obfuscated: has it changed by secret
numbers, which is no encryption. bounded: an accountant says how much of it the role can learn. unclaimed: nothing is
said of it."""

About = Literal["rows", "ids", "update", "sum", "statistics", "model", "traffic"]
"""What a claim is about. rows: the values, labels or predictions of others' single rows. ids: who is among a silo's
rows. update: what one silo computed of its rows. sum: the same of several silos. statistics: figures over many rows.
model: a model, or what hides it. traffic: who takes part when, with how many rows and how long messages."""

Place = Literal["front", "brief", "full"]
"""Where README shows a claim, beside the full lists: front: in its first table; brief: in its list; full: nowhere."""


@dataclass(frozen=True)
class Claim:
    """One thing that a role learns, or does not.

    what: the object of the claim, for lists. sentence: for a run's report, with words in braces; empty where a report
    says nothing, as no record shows the conditions. where: the conditions on the run, all of which hold. words: the
    functions that fill the braces. assumes: what else must hold, which no record shows.
    attacks: names of the attacks that test it. rests_on: its other grounds, such as tests.
    protocols: the names in a package that it is about; empty for all. shared: it is much the same under every protocol,
    so lists about all protocols have it once. alone: where it holds, a report says nothing else of the role.
    warns: a run of which it holds says so in its warnings, and so in the terminal and the log.
    about: what it is about; None for notes to readers, and where a role learns nothing.
    headline: what the head of a report says of it after the role, with words in braces as `sentence`: "held the model".
    Empty where the head says nothing; of a reader, what it says first.
    """

    role: Role
    kind: Kind
    what: str
    sentence: str = ""
    where: tuple[Condition, ...] = ()
    words: tuple[Word, ...] = ()
    assumes: str = ""
    attacks: tuple[str, ...] = ()
    rests_on: str = ""
    protocols: tuple[str, ...] = ()
    shared: bool = False
    alone: bool = False
    warns: bool = False
    place: Place = "full"
    about: About | None = None
    headline: str = ""

    def holds(self, record: Record) -> bool:
        """Whether all conditions hold of the run."""
        return all(condition(record) for condition in self.where)

    def text(self, record: Record) -> str:
        """Return the sentence about this run."""
        return self.sentence.format(**{word.__name__: word(record) for word in self.words})

    def head(self, record: Record) -> str:
        """Return the headline about this run."""
        return self.headline.format(**{word.__name__: word(record) for word in self.words})


def under(claims: Iterable[Claim], *conditions: Condition) -> tuple[Claim, ...]:
    """Return the claims with further conditions."""
    return tuple(replace(claim, where=(*claim.where, *conditions)) for claim in claims)


def of(protocols: tuple[str, ...], claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the claims, restricted to these protocols of a package."""
    return tuple(replace(claim, protocols=protocols) for claim in claims)


def in_words(condition: Condition) -> str:
    """Return what a condition says of a run, the end of a sentence: "the loss is cross-entropy"."""
    return " ".join((condition.__doc__ or "").removeprefix("Whether ").split()).removesuffix(".")


# -- what a record says ------------------------------------------------------------------------------------------------


def setting(record: Record, section: str, key: str) -> Any:
    """Return the value of one key of the run file, None where the run did not record it."""
    return record.get("settings", {}).get(section, {}).get(key)


def fact(record: Record, name: str) -> int | None:
    """Return a count that the run states, None where it does not."""
    value = record.get("facts", {}).get(name)
    return int(value) if isinstance(value, int | float) else None


def scheme(record: Record) -> str:
    """Return the scheme by which uploads were summed, "none" where there was none."""
    return str((record.get("secure_aggregation") or {"scheme": "none"})["scheme"])


def participation(record: Record) -> float:
    """Return the part of the silos that each round has."""
    part = setting(record, "run", "participation")
    return float(part) if isinstance(part, int | float) else 1.0


def fewest(record: Record) -> int:
    """Return the number of silos in the smallest round."""
    missed = Counter(one["round"] for one in record.get("dropped", ()) if one["round"] <= record["rounds"])
    least = 2 if is_summed(record) else 1
    chosen: int = max(least, round(participation(record) * record["silos"]))
    return chosen - max(missed.values(), default=0)


# -- conditions --------------------------------------------------------------------------------------------------------


MASKED = ("pairwise", "additive-shares")
"""The schemes of which there are claims."""


def is_summed(record: Record) -> bool:
    """Whether sums are secure."""
    return scheme(record) != "none"


def is_masked(record: Record) -> bool:
    """Whether sums are secure (the default)."""
    return scheme(record) in MASKED


def is_in_the_clear(record: Record) -> bool:
    """Whether `scheme = "none"`."""
    return not is_summed(record)


def has_late_answers(record: Record) -> bool:
    """Whether answers came of silos that the server had given up as late."""
    return any(one["reason"].startswith("late") for one in record.get("dropped", ()))


def has_public_weights(record: Record) -> bool:
    """Whether `weights = "public"`."""
    return bool(setting(record, "secure-aggregation", "weights") == "public")


def has_roster(record: Record) -> bool:
    """Whether a roster of identities is set."""
    return setting(record, "secure-aggregation", "roster") is not None


def has_no_roster(record: Record) -> bool:
    """Whether no roster of identities is set."""
    return not has_roster(record)


def is_noised(record: Record) -> bool:
    """Whether noise is added (`dp-noise`)."""
    facts = record.get("facts", {})
    return facts.get("epsilon") is not None and isinstance(facts.get("delta"), float)


def is_standardised(record: Record) -> bool:
    """Whether inputs are standardised (the default of tables)."""
    return setting(record, "data", "standardise") is not False


def fills_absent(record: Record) -> bool:
    """Whether values may be absent, which all silos' statistics fill in."""
    if setting(record, "data", "missing") not in (None, "error"):
        return True
    return any(column.get("blanks") in _FILLED for column in _columns(record))


def fills_medians(record: Record) -> bool:
    """Whether medians are filled in."""
    medians = any(column.get("blanks") == "median" for column in _columns(record))
    return medians or setting(record, "data", "missing") == "median"


_FILLED = ("mean", "median", "indicator")


def _columns(record: Record) -> Collection[Mapping[str, Any]]:
    found = record.get("settings", {}).get("columns", {})
    return found.values() if isinstance(found, Mapping) else ()


def takes_all_rows(record: Record) -> bool:
    """Whether a round uses all rows of a silo."""
    return setting(record, "data", "batch-size") == 0 or bool(setting(record, "protocol", "local-epochs"))


def chooses_silos(record: Record) -> bool:
    """Whether `participation` is below 1."""
    return participation(record) < 1


def has_rounds_of_some(record: Record) -> bool:
    """Whether some rounds lack a silo, which vanished or was not chosen."""
    return bool(record.get("dropped")) or chooses_silos(record)


def has_two_silos(record: Record) -> bool:
    """Whether there are two silos."""
    return bool(record["silos"] == 2)


def has_few_in_a_round(record: Record) -> bool:
    """Whether some round has fewer than three silos."""
    return record["silos"] >= 2 and fewest(record) <= 2


def is_cross_entropy(record: Record) -> bool:
    """Whether the loss is cross-entropy."""
    return bool(setting(record, "protocol", "loss") == "cross-entropy")


def scores_at_silos(record: Record) -> bool:
    """Whether models are scored on rows that silos hold back (`score-at-silos`)."""
    return bool(setting(record, "data", "score-at-silos"))


def tabulates_at_silos(record: Record) -> bool:
    """Whether classes are counted on rows that silos hold back (`score-at-silos = "classes"`)."""
    return bool(setting(record, "data", "score-at-silos") == "classes")


def looks_first(record: Record) -> bool:
    """Whether rows and classes are counted before training (`[data] look`)."""
    return bool(setting(record, "data", "look"))


def has_test_rows(record: Record) -> bool:
    """Whether the server has test rows of its own (`[data] test`)."""
    return setting(record, "data", "test") is not None


def steps_plainly(record: Record) -> bool:
    """Whether two or more silos take plain gradient steps, without momentum, decay, clipping, noise or own epochs."""
    other_steps = (
        "momentum", "weight-decay", "clip-norm", "dp-noise", "local-epochs", "class-weights", "label-smoothing",
    )  # fmt: skip
    plain = setting(record, "protocol", "optimizer") in (None, "sgd")
    plain = plain and setting(record, "protocol", "schedule") in (None, "constant")
    return record["silos"] >= 2 and plain and not any(setting(record, "protocol", name) for name in other_steps)


def is_in_process(record: Record) -> bool:
    """Whether one process plays all roles."""
    return bool(setting(record, "engine", "name") == "in-process")


def is_over_machines(record: Record) -> bool:
    """Whether NVIDIA FLARE carries messages between machines."""
    return bool(setting(record, "engine", "name") == "flare")


def is_carried_otherwise(record: Record) -> bool:
    """Whether the run does not say that one process played all roles, nor that NVIDIA FLARE carried messages."""
    return not is_in_process(record) and not is_over_machines(record)
