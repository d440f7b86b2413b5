"""What a claim of privacy is, and the conditions on a run under which claims hold.

A claim says what one role learns, or is not given, under some conditions, and names the attacks that test it. Claims
are data: `protocols/<name>/claims.py` lists those of a protocol, `moretta.protocols.common.shared_claims` those that
protocols share. A run's report and the lists in docs/threat-models.md and README.md are written from them
(`python docs/claims.py`).

A condition is a function of a run's record, the contents of its `result.json`. What its docstring says after "Whether"
stands in the lists. It answers for a record that lacks what older or other runs do not state.

What depends on who took part follows from the opened sums (`moretta.engines.driver.OpenedSum`). Settings and the list
of missed answers do not say it: a silo that was missing may be in the sum after all, once the round is played again.
Where a record does not show its sums, a condition holds if it can, and the words of the claim say that the record does
not show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


def opened_sums(record: Record, *of: str, aborted: bool = False) -> Sequence[Mapping[str, Any]] | None:
    """Return the sums that were opened of a set-up, of rounds or of the release, by silos, take and group.

    of: "set-up", "round", "release". aborted: also those whose attempt was aborted, which the server may know.
    None where the run's version did not record who was in a sum.
    """
    sums = record.get("sums")
    if sums is None:
        return None
    return [one for one in sums if one["of"] in of and (aborted or one.get("used", True))]


def fewest(record: Record) -> int:
    """Return the number of silos in the smallest sum of a round; of a record without sums, the smallest possible."""
    sums = opened_sums(record, "round")
    if sums is not None:
        return min((len(one["silos"]) for one in sums), default=record["silos"])
    missed = Counter(one["round"] for one in record.get("dropped", ()) if one["round"] <= record["rounds"])
    return round_size(record) - max(missed.values(), default=0)


def round_size(record: Record) -> int:
    """Return how many silos are chosen for a round."""
    least = 2 if is_summed(record) else 1
    size: int = max(least, round(participation(record) * record["silos"]))
    return size


def records_sums(record: Record) -> bool:
    """Return whether the run's record shows who was in its sums."""
    return record.get("sums") is not None


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


def has_two_sets(record: Record) -> bool:
    """Whether sums of one round were opened over two sets of silos."""
    sums = opened_sums(record, "round", aborted=True)
    if sums is None:
        return any(one["reason"].startswith("late") for one in record.get("dropped", ()))
    sets = Counter(
        (group, number)
        for group, number, _ in {
            (one.get("group", ""), number, tuple(one["silos"])) for one in sums for number in one["rounds"]
        }
    )
    return max(sets.values(), default=0) > 1


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


def has_different_sums(record: Record) -> bool:
    """Whether not all sums are over the same silos."""
    sums = opened_sums(record, "set-up", "round", aborted=True)
    if sums is None:
        return bool(record.get("dropped")) or chooses_silos(record)
    sets = {(one.get("group", ""), tuple(one["silos"])) for one in sums}
    return len(sets) > len({group for group, _ in sets})


def has_two_silos(record: Record) -> bool:
    """Whether there are two silos."""
    return bool(record["silos"] == 2)


def has_few_in_statistics(record: Record) -> bool:
    """Whether statistics are of fewer than three silos."""
    sums = opened_sums(record, "set-up")
    if sums is None:
        return has_two_silos(record)
    return record["silos"] >= 2 and any(len(one["silos"]) <= 2 for one in sums)


def has_few_in_a_round(record: Record) -> bool:
    """Whether some round has fewer than three silos."""
    return record["silos"] >= 2 and fewest(record) <= 2


def is_cross_entropy(record: Record) -> bool:
    """Whether the loss is cross-entropy."""
    return bool(setting(record, "protocol", "loss") == "cross-entropy")


def scores_at_silos(record: Record) -> bool:
    """Whether models are scored on rows that silos hold back (`score-at-silos`)."""
    return bool(setting(record, "data", "score-at-silos")) and opened_sums(record, "release") != []


def tabulates_at_silos(record: Record) -> bool:
    """Whether classes are counted on rows that silos hold back (`score-at-silos = "classes"`)."""
    return setting(record, "data", "score-at-silos") == "classes" and scores_at_silos(record)


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
    sums = opened_sums(record, "round")
    most = record["silos"] if sums is None else max((len(one["silos"]) for one in sums), default=0)
    return most >= 2 and plain and not any(setting(record, "protocol", name) for name in other_steps)


def is_in_process(record: Record) -> bool:
    """Whether one process plays all roles."""
    return bool(setting(record, "engine", "name") == "in-process")


def is_over_machines(record: Record) -> bool:
    """Whether NVIDIA FLARE carries messages between machines."""
    return bool(setting(record, "engine", "name") == "flare")


def is_carried_otherwise(record: Record) -> bool:
    """Whether the run does not say that one process played all roles, nor that NVIDIA FLARE carried messages."""
    return not is_in_process(record) and not is_over_machines(record)
