"""What a claim of privacy is, the conditions on a run under which claims hold, and the claims that protocols share.

A claim says what one role learns, or is not given, under some conditions, and names the attacks that test it. It is
worded once: a run's report, its verdict and the pages docs/threats-*.md and docs/privacy.md have this text (`python
docs/claims.py`). `protocols/<name>/claims.py` lists the claims of a protocol.

A condition is about a run's record, its `result.json`; older records may lack values. What depends on who took part
follows from the opened sums (`opened_sums`), as a missing silo may be in the sum of the repeated round. Where a record
does not show its sums, a condition holds if it can, and the claim says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from moretta.protocols.common.accountant import WITH_NOISE_OF

Record = Mapping[str, Any]
"""A run's record: the contents of its `result.json`."""

Role = Literal["server", "silo", "silos together", "server and silos", "outsider", "eavesdropper", "reader"]
"""Who learns. "reader" has no claims, but notes on how to read the others."""

Kind = Literal["learns", "not given", "obfuscated", "bounded", "unclaimed"]
"""`learns`: has it, or can compute it. `not given`: no message to the role holds it. `obfuscated`: has it changed by
secret numbers, which is no encryption. `bounded`: an accountant bounds what the role can learn of it. `unclaimed`: no
statement.
"""

About = Literal["rows", "ids", "update", "sum", "statistics", "model", "traffic"]
"""The subject of a claim. `rows`: the values, labels or predictions of others' single rows. `ids`: which ids a silo's
rows have. `update`: what one silo computed from its rows. `sum`: the same over several silos. `statistics`: figures
over many rows. `model`: a model, or what hides it. `traffic`: who takes part when, numbers of rows, message lengths.
"""

Place = Literal["front", "brief", "full"]
"""Where docs/privacy.md shows a claim: front: in its first table; brief: in its list; full: in neither."""

PAST: Mapping[str, str] = {
    "can": "could", "gets": "got", "hands": "handed", "has": "had", "holds": "held", "is": "was", "knows": "knew",
    "learns": "learned", "receives": "received", "relays": "relayed", "sees": "saw",
}  # fmt: skip
"""The verbs that begin a claim with a headline, and their form in the headline."""

NAMES: Mapping[str, str] = {
    "server": "the server", "silo": "a silo", "silos together": "silos together",
    "server and silos": "the server with silos", "outsider": "an outsider",
    "eavesdropper": "a listener on the network",
}  # fmt: skip
"""Roles in the order of a page, with their names there."""

TOGETHER = ("silos together", "server and silos", "outsider")
"""Roles whose name begins a sentence under another role's heading."""


@dataclass(frozen=True)
class Condition:
    """A condition on a run. says: the end of a sentence for lists: "the loss is cross-entropy"."""

    says: str
    of: Callable[[Record], bool]

    def __call__(self, record: Record) -> bool:
        """Whether it holds of a run."""
        return self.of(record)


@dataclass(frozen=True)
class Word:
    """The text for `name` in braces. general: in lists, which are about all runs."""

    name: str
    general: str
    of: Callable[[Record], str]

    def __call__(self, record: Record) -> str:
        """Return the text for a run."""
        return self.of(record)


# -- what a record says ------------------------------------------------------------------------------------------------


def setting(record: Record, section: str, key: str) -> Any:
    """Return the value of one key of the run file, None if the run did not record it."""
    return record.get("settings", {}).get(section, {}).get(key)


def fact(record: Record, name: str) -> int | None:
    """Return a count that the run states, None if it does not."""
    value = record.get("facts", {}).get(name)
    return int(value) if isinstance(value, int | float) and 0 <= value < 2**53 else None


def scheme(record: Record) -> str:
    """Return the scheme of the secure sums, "none" without one."""
    return str((record.get("secure_aggregation") or {"scheme": "none"})["scheme"])


def participation(record: Record) -> float:
    """Return the fraction of the silos in each round."""
    part = setting(record, "run", "participation")
    return float(part) if isinstance(part, int | float) and 0 < part <= 1 else 1.0


def opened_sums(record: Record, *of: str, aborted: bool = False) -> Sequence[Mapping[str, Any]] | None:
    """Return the opened sums of a set-up, of rounds or of the release, by silos, take and group.

    Args:
        of: "set-up", "round", "release".
        aborted: Also those of aborted attempts, which the server may know.

    Returns:
        None if the run's version did not record the silos of a sum.
    """
    sums = record.get("sums")
    if sums is None:
        return None
    return [opened for opened in sums if opened["of"] in of and (aborted or opened.get("used", True))]


def fewest(record: Record) -> int:
    """Return the number of silos in a round's smallest sum; the smallest possible for a record without sums."""
    sums = opened_sums(record, "round")
    if sums is not None:
        return min((len(opened["silos"]) for opened in sums), default=record["silos"])
    missed = Counter(gone["round"] for gone in record.get("dropped", ()) if gone["round"] <= record["rounds"])
    return round_size(record) - max(missed.values(), default=0)


def round_size(record: Record) -> int:
    """Return the number of silos chosen for a round."""
    size: int = max(2 if is_summed(record) else 1, round(participation(record) * record["silos"]))
    return size


def records_sums(record: Record) -> bool:
    """Return whether the run's record shows the silos of its sums."""
    return record.get("sums") is not None


# -- conditions --------------------------------------------------------------------------------------------------------


MASKED = ("pairwise", "additive-shares")
"""The schemes with claims."""


def equals(section: str, key: str, value: str, says: str = "") -> Condition:
    """Return the condition that a key of the run file has a value."""
    return Condition(says or f'`{key} = "{value}"`', lambda run: bool(setting(run, section, key) == value))


def is_on(section: str, key: str, says: str) -> Condition:
    """Return the condition that a key of the run file is set, and neither false nor zero."""
    return Condition(says, lambda run: bool(setting(run, section, key)))


def _has_two_sets(record: Record) -> bool:
    sums = opened_sums(record, "round", aborted=True)
    if sums is None:
        return any(gone["reason"].startswith("late") for gone in record.get("dropped", ()))
    sets = {(opened.get("group", ""), number, tuple(opened["silos"])) for opened in sums for number in opened["rounds"]}
    return max(Counter((group, number) for group, number, _ in sets).values(), default=0) > 1


def _is_noised(record: Record) -> bool:
    facts = record.get("facts", {})
    return facts.get("epsilon") is not None and isinstance(facts.get("delta"), float)


def _columns(record: Record) -> Collection[Mapping[str, Any]]:
    columns = record.get("settings", {}).get("columns", {})
    return columns.values() if isinstance(columns, Mapping) else ()


def _fills(record: Record, *how: str) -> bool:
    return setting(record, "data", "missing") in how or any(column.get("blanks") in how for column in _columns(record))


def _has_different_sums(record: Record) -> bool:
    sums = opened_sums(record, "set-up", "round", aborted=True)
    if sums is None:
        return bool(record.get("dropped")) or chooses_silos(record)
    sets = {(opened.get("group", ""), tuple(opened["silos"])) for opened in sums}
    return len(sets) > len({group for group, _ in sets})


def _has_few_in_statistics(record: Record) -> bool:
    sums = opened_sums(record, "set-up")
    if sums is None:
        return has_two_silos(record)
    return record["silos"] >= 2 and any(len(opened["silos"]) <= 2 for opened in sums)


def _steps_plainly(record: Record) -> bool:
    other_steps = (
        "momentum", "weight-decay", "clip-norm", "dp-noise", "local-epochs", "class-weights", "label-smoothing",
    )  # fmt: skip
    plain = setting(record, "protocol", "optimizer") in (None, "sgd")
    plain = plain and setting(record, "protocol", "schedule") in (None, "constant")
    sums = opened_sums(record, "round")
    most = record["silos"] if sums is None else max((len(opened["silos"]) for opened in sums), default=0)
    return most >= 2 and plain and not any(setting(record, "protocol", name) for name in other_steps)


is_summed = Condition("sums are secure", lambda run: scheme(run) != "none")
is_masked = Condition("sums are secure (the default)", lambda run: scheme(run) in MASKED)
is_in_the_clear = Condition('`scheme = "none"`', lambda run: not is_summed(run))
has_two_sets = Condition("sums of one round were opened over two sets of silos", _has_two_sets)
has_different_sums = Condition("not all sums are over the same silos", _has_different_sums)
has_public_weights = equals("secure-aggregation", "weights", "public")
has_roster = Condition(
    "a roster of identities is set", lambda run: setting(run, "secure-aggregation", "roster") is not None
)
has_no_roster = Condition("no roster of identities is set", lambda run: not has_roster(run))
is_noised = Condition("noise is added (`dp-noise`)", _is_noised)
is_without_noise = Condition("no noise is added", lambda record: not _is_noised(record))
is_standardised = Condition(
    "inputs are standardised (the default of tables)", lambda run: setting(run, "data", "standardise") is not False
)
scales_targets = is_on("data", "standardise-targets", "targets are standardised (`standardise-targets`)")
fills_absent = Condition(
    "values may be absent, which all silos' statistics fill in",
    lambda run: setting(run, "data", "missing") not in (None, "error") or _fills(run, "mean", "median", "indicator"),
)
takes_all_rows = Condition(
    "a round uses all rows of a silo",
    lambda run: setting(run, "data", "batch-size") == 0 or bool(setting(run, "protocol", "local-epochs")),
)
chooses_silos = Condition("`participation` is below 1", lambda run: participation(run) < 1)
has_two_silos = Condition("there are two silos", lambda run: bool(run["silos"] == 2))
has_few_in_statistics = Condition("statistics are of fewer than three silos", _has_few_in_statistics)
has_few_in_a_round = Condition(
    "some round has fewer than three silos", lambda run: run["silos"] >= 2 and fewest(run) <= 2
)
is_cross_entropy = equals("protocol", "loss", "cross-entropy", "the loss is cross-entropy")
scores_at_silos = Condition(
    "models are scored on rows that silos hold back (`score-at-silos`)",
    lambda run: bool(setting(run, "data", "score-at-silos")) and opened_sums(run, "release") != [],
)
validates_at_silos = Condition(
    "models are validated on rows that silos hold back (`validation-fraction` at sites)",
    lambda run: bool(setting(run, "data", "validation-fraction")) and setting(run, "data", "source") in (None, "sites"),
)
tabulates_at_silos = Condition(
    'classes are counted on rows that silos hold back (`score-at-silos = "classes"`)',
    lambda run: setting(run, "data", "score-at-silos") == "classes" and scores_at_silos(run),
)
looks_first = is_on("data", "look", "rows and classes are counted before training (`[data] look`)")
has_test_rows = Condition(
    "the server has test rows of its own (`[data] test`)", lambda run: setting(run, "data", "test") is not None
)
steps_plainly = Condition(
    "two or more silos take plain gradient steps, without momentum, decay, clipping, noise or own epochs",
    _steps_plainly,
)
is_in_process = equals("engine", "name", "in-process", "one process runs all roles")
is_over_machines = equals("engine", "name", "flare", "NVIDIA FLARE carries messages between machines")
is_carried_otherwise = Condition(
    "the run does not record that one process ran all roles, nor that NVIDIA FLARE carried messages",
    lambda run: not is_in_process(run) and not is_over_machines(run),
)


# -- words -------------------------------------------------------------------------------------------------------------


NOT_SHOWN = "which this run’s record does not show"
TWO_SETS = "two takes of a round were opened, over different silos"
HISTOGRAMS = ", and for a column whose median is filled in, the number in each of 64 equal parts of its range"
UP_TO_ROWS = "up to the change that new rows make in the other silos’ updates"
_DIFFERENT = "not all sums are over the same silos"
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def _ring(record: Record) -> str:
    bits = (record.get("secure_aggregation") or {}).get("ring_bits")
    return f"; sums wrap at 2{str(bits).translate(_RAISED)}" if bits else ""


def _if_standardised(record: Record) -> str:
    stated = setting(record, "data", "standardise")
    return "" if stated else " (if inputs are standardised, as tables are unless the run file says otherwise)"


def _if_any(record: Record) -> str:
    known = records_sums(record) or has_two_silos(record) or round_size(record) <= 2
    return "" if known else f", if there were any, {NOT_SHOWN}"


def _as_sums_differ(record: Record) -> str:
    known = records_sums(record) or chooses_silos(record)
    return f"as {_DIFFERENT}" if known else f"if {_DIFFERENT}, {NOT_SHOWN}"


def unit_of(facts: Mapping[str, Any]) -> tuple[str, str]:
    """Return the unit that a run's noise hides, and its place."""
    units = {"silo": ("silo’s updates", ""), "group": ("group of rows", " at one silo")}
    return units.get(facts.get("unit", "row"), ("example", " at one silo"))


def _epsilons(record: Record) -> str:
    facts, (what, where) = record["facts"], unit_of(record["facts"])
    sentence = (
        f"ε = {_figure(facts['epsilon'])} and δ = {facts['delta']:.0e} for one {what} added or removed{where}, "
        "towards the server and anyone who gets the model"
    )
    if (others := facts.get("epsilon_to_silos")) is not None:
        sentence += f"; towards another silo, which can subtract its own noise, with ε = {_figure(others)}"
    return sentence


def _what_epsilon_assumes(record: Record) -> str:
    """Return the number of noised sums, the noise that epsilon assumes in each, and the epsilon with less noise."""
    facts = record["facts"]
    releases, silos = facts.get("releases"), facts.get("noise_silos")
    if not isinstance(releases, float) or not isinstance(silos, float):
        return ""
    sentence = f". That counts {releases:.0f} noised sums that may have been opened"
    if silos <= 1:
        return f"{sentence}; each silo adds all of the noise"
    sentence += f", and assumes that the observer does not know the noise of {silos:.0f} silos, less those who are lost"
    epsilons = {key.removeprefix(WITH_NOISE_OF): value for key, value in facts.items() if WITH_NOISE_OF in key}
    fewer = [f"of {silos} alone ε = {_figure(value)}" for silos, value in epsilons.items()]
    return f"{sentence}{'; with the noise ' if fewer else ''}{', '.join(fewer)}"


def _what_epsilon_rests_on(record: Record) -> str:
    """Return sampling, trust and theorem; empty for records of earlier versions."""
    facts, (what, _) = record["facts"], unit_of(record["facts"])
    if "theorem" not in facts:
        return ""
    each = f"each {what} with a chance of at most {_figure(facts['sampling_rate'])}, independently and in secret"
    sampled = "every silo that takes part" if facts["unit"] == "silo" else each
    return f". A round includes {sampled}. It is trusted that {facts['trust']}. The theorem: {facts['theorem']}"


def _figure(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


one_unit = Word("one_unit", "one example at one silo", lambda run: f"one {''.join(unit_of(run['facts']))}")
epsilon_alone = Word(
    "epsilon_alone",
    "the accountant’s epsilon",
    lambda run: f"ε = {_figure(run['facts']['epsilon'])} at δ = {run['facts']['delta']:.0e}",
)
epsilons = Word("epsilons", "that epsilon", _epsilons)
what_epsilon_leaves_out = Word(
    "what_epsilon_leaves_out",
    "",
    lambda run: f". Not counted: {left_out}" if (left_out := run["facts"].get("epsilon_leaves_out")) else "",
)
if_any = Word("if_any", "", _if_any)


def _two_sets(record: Record) -> str:
    late = "it received answers of silos that it had given up as late, and may have opened sums of one round with and"
    return TWO_SETS if records_sums(record) else f"{late} without them, {NOT_SHOWN}"


def _and_columns(record: Record) -> str:
    columns = f"and the mean and standard deviation of each input column{_if_standardised(record)}"
    return f" {columns}" if is_standardised(record) else ""


def _targets_of_others(record: Record) -> str:
    regression = record["task"] == "regression"
    return "the mean of the other silos’ targets" if regression else "the balance of the other silos’ labels"


WORDS = (
    Word("ring", "", _ring),
    Word("two_sets", TWO_SETS, _two_sets),
    Word(
        "beside_others",
        f"exactly if a round uses all rows of a silo, and otherwise {UP_TO_ROWS}",
        lambda run: "exactly" if takes_all_rows(run) else UP_TO_ROWS,
    ),
    Word("as_sums_differ", f"as {_DIFFERENT}", _as_sums_differ),
    Word(
        "by_whom",
        "over all silos (without secure aggregation, of each silo)",
        lambda run: "over all silos" if is_summed(run) else "of each silo by itself",
    ),
    Word("if_standardised", "", _if_standardised),
    Word(
        "and_columns",
        " and, where inputs are standardised, the mean and standard deviation of each input column",
        _and_columns,
    ),
    Word("and_histograms", HISTOGRAMS, lambda run: HISTOGRAMS if _fills(run, "median") else ""),
    if_any,
    Word(
        "targets_of_others",
        "the balance of the other silos’ labels, or the mean of their targets",
        _targets_of_others,
    ),
    epsilons,
    one_unit,
    epsilon_alone,
    Word("what_epsilon_assumes", "", _what_epsilon_assumes),
    Word("what_epsilon_rests_on", "", _what_epsilon_rests_on),
    what_epsilon_leaves_out,
)
"""The words that protocols share."""


# -- what a claim is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """One thing that a role learns, or does not: `silo("model", where, attacks).says("holds the model")`.

    Args:
        about: Its subject; None for notes to readers, and for nothing learned.
        where: Conditions on the run, all of which hold.
        attacks: Names of the attacks that test it.
        words: Fill the braces of its text.
        alone: If it holds, a report has nothing else about the role.
        warns: If it holds, it is among the run's warnings, and so in the terminal and the log.
        silent: A report omits it, because no record shows all of its conditions.
        protocols: The names in a package that it is about; empty for all.
        text: Its words, a verb first, with words in braces. The part before its bar, if any, is a verdict's headline.
        assumes: Further assumptions, which no record shows.
        rests_on: Its other grounds, such as tests.
    """

    role: Role
    about: About | None
    where: tuple[Condition, ...] = ()
    attacks: tuple[str, ...] = ()
    kind: Kind = "learns"
    place: Place = "full"
    words: tuple[Word, ...] = WORDS
    alone: bool = False
    warns: bool = False
    silent: bool = False
    protocols: tuple[str, ...] = ()
    text: str = ""
    assumes: str = ""
    rests_on: str = ""

    def says(self, text: str, assumes: str = "", rests_on: str = "") -> Claim:
        """Return the claim with its text."""
        return replace(self, text=text, assumes=assumes, rests_on=rests_on)

    def holds(self, record: Record) -> bool:
        """Whether all conditions hold of the run."""
        return all(condition(record) for condition in self.where)

    def sentence(self, record: Record) -> str:
        """Return the sentence about this run."""
        text = self._filled(self.text.replace("|", ""), record)
        text = f"{NAMES[self.role]} {text}" if self.role in TOGETHER else text
        return f"{text[0].upper()}{text[1:]}."

    def headline(self, record: Record) -> str:
        """Return a verdict's words about this run after the role, such as "held the model"; empty without any."""
        head, bar, _ = self.text.partition("|")
        verb, _, rest = self._filled(head, record).partition(" ")
        return f"{PAST.get(verb, verb)} {rest}" if bar else ""

    @property
    def phrase(self) -> str:
        """The claim's words about any run, for lists."""
        return self._filled(self.text.replace("|", ""))

    def _filled(self, text: str, record: Record | None = None) -> str:
        used = [word for word in self.words if f"{{{word.name}}}" in text]
        return text.format(**{word.name: word.general if record is None else word(record) for word in used})


server, silo = partial(Claim, "server"), partial(Claim, "silo")


def under(claims: Iterable[Claim], *conditions: Condition, **others: Any) -> tuple[Claim, ...]:
    """Return the claims with further conditions. others: fields that change too."""
    return tuple(replace(claim, where=(*claim.where, *conditions), **others) for claim in claims)


# -- claims that protocols share: sums ---------------------------------------------------------------------------------


OF_LOSS_DIFFERENCES = ("loss-differences", "k-rank-projection", "seed-choosing-server")
OF_AN_UPLOAD = ("gradient-inversion", "labels-from-head", *OF_LOSS_DIFFERENCES)
OF_A_MASK = ("gradient-inversion",)
OF_A_SUM = ("gradient-inversion-of-sum", "labels-from-head")


def in_the_clear(upload: str, attacks: tuple[str, ...] = OF_AN_UPLOAD) -> Claim:
    """Return the server's claim without secure aggregation. upload: "gradient" or the like, as below."""
    text = f"sees the {upload} of each silo by itself|: no secure aggregation is used"
    return server("update", (is_in_the_clear,), attacks).says(text)


def sum_only(upload: str, attacks: tuple[str, ...] = OF_A_MASK) -> Claim:
    """Return the claim that the server has only the sum."""
    return server("sum", (is_masked,), attacks, place="front").says(
        f"sees only sums of the silos’ {upload}s and what follows from them|, not the {upload} of any one silo{{ring}}",
        assumes="at least two silos do not collude with it; a roster, or an honest relay of keys",
        rests_on="the tests of secure aggregation (`tests/secure_aggregation`)",
    )


FROM_THE_SUM = server("sum", (is_masked,), OF_A_SUM).says(
    "can work out what follows from the sum, such as the balance of its rows’ labels and, where rows are few, the rows "
    "themselves"
)


def with_all_but_one(upload: str) -> Claim:
    """Return the claim about the server with colluding silos."""
    text = f"has the {upload} of a silo if all others collude with it: the sum minus theirs"
    return Claim("server and silos", "update", (is_masked,), ("server-and-silos",)).says(text)


AROUND_SUMS = (
    server("traffic", (is_masked,), silent=True).says(
        "sees which silos took part, their total weight, and the lengths of messages"
    ),
    server("update", (is_masked, has_two_sets)).says(
        "can work out the update of silos that are in only one of two sums|, because {two_sets}. Subtraction gives it "
        "{beside_others}"
    ),
    server("traffic", (is_masked, has_public_weights)).says("sees each silo’s weight in the sum: weights are public"),
    server("update", (is_masked, has_no_roster)).says(
        "is trusted to pass on the silos’ keys unchanged|, as no roster is set: a server that substitutes keys of its "
        "own can read each silo’s update"
    ),
    server("update", (is_masked, has_roster), kind="not given").says(
        "passes on keys that each silo has signed with its identity in the roster. Silos refuse a substituted key, so "
        "it receives no update under such a key",
        rests_on="`tests/secure_aggregation`",
    ),
)
"""What the server learns from late answers, weights and relayed keys. "update" is one silo's upload."""


def sums(upload: str) -> tuple[Claim, ...]:
    """Return the claims about an upload of silos."""
    return (in_the_clear(upload), sum_only(upload), FROM_THE_SUM, with_all_but_one(upload), *AROUND_SUMS)


HOLDS_THE_MODEL = server("model", place="front").says("holds the true model|")
RECEIVES_THE_MODEL = silo("model", attacks=("membership-inference",), place="front").says(
    "receives the model itself in every round|"
)
NOISE, NOISE_OF_SILOS = (
    server("model", (is_noised,), ("membership-inference",), kind="bounded").says(
        f"can learn of {what}, from all models of the run, no more than {{epsilon_alone}} allows|: together they are "
        "(ε, δ)-differentially private with {epsilons}{what_epsilon_assumes}{what_epsilon_leaves_out}"
        "{what_epsilon_rests_on}",
        assumes="each sum has the noise of as many silos as the report names, less those who are lost, and the "
        f"observer does not know that noise; silos help open one sum of a take{tried}",
    )
    for what, tried in (
        ("{one_unit}", ""),
        ("one silo’s updates", "; the attack tries rows, each a part of a silo’s updates, and no whole silo"),
    )
)


# -- statistics --------------------------------------------------------------------------------------------------------


ROWS_OF_A_ROUND = server("statistics").says("learns the number of rows that a round uses{and_columns}, {by_whom}")
COLUMNS_ALONE = server("statistics", (is_standardised,)).says(
    "learns the mean and standard deviation of each input column{if_standardised}, {by_whom}"
)
DIFFERENCES_OF_TOTALS = server("traffic", (is_summed, has_different_sums)).says(
    "can learn the number of rows of one silo by differences of totals, {as_sums_differ}"
)
SCORES = server("statistics", (scores_at_silos,)).says(
    "learns, at the end, the number of rows held back for scoring and the scores on them, {by_whom}"
)
VALIDATION = server("statistics", (validates_at_silos,)).says(
    "learns, in each round that it evaluates, the number of rows held back for validation and the scores of the "
    "round’s model on them, {by_whom}"
)
TABLES = (
    server("statistics", (tabulates_at_silos,)).says(
        "learns, at the end and over all silos together, the exact confusion matrix of the rows held back, however "
        "small its counts. For each tenth of probabilities it learns the number of rows, the number predicted "
        "correctly and the mean"
    ),
    server("statistics", (tabulates_at_silos,), kind="not given").says(
        "is given no silo’s own counts of classes: they are summed over one set of silos only, of three or more",
        assumes="the server does not know the counts of all other silos, from them or otherwise; no silo’s rows change "
        "from run to run; no silo.toml allows sums over other sets (`[privacy]`)",
        rests_on="attacks in `tests/test_tables_at_silos.py`",
    ),
)
COUNTED_FIRST = server("statistics", (looks_first,)).says(
    "learns, before round one, the number of all rows and of the rows of each class, {by_whom}"
)
ABSENT_VALUES = (
    server("statistics", (fills_absent,)).says(
        "learns the number of values present in each input column, with their mean and standard deviation"
        "{and_histograms}, {by_whom}"
    ),
    silo("statistics", (fills_absent,)).says(
        "receives the value that replaces absent ones: each such column’s mean or median, over all silos"
    ),
)
SCALED_TARGETS = (
    server("statistics", (scales_targets,)).says("learns the mean and standard deviation of each target, {by_whom}"),
    silo("statistics", (scales_targets,)).says(
        "receives, if it has targets, the mean and standard deviation of each target, over all silos"
    ),
    silo("statistics", (has_few_in_statistics, scales_targets)).says(
        "can work out the mean and deviation of the other’s targets, up to the ratio of their numbers of rows. It "
        "subtracts its own part from statistics of fewer than three silos"
    ),
)
TEST_ROWS = (
    server("ids", (has_test_rows,)).says(
        "learns for each silo whether any training row has one of the test rows’ ids or groups, where they have any. "
        "An active server can learn the same for one list that it makes up, perhaps of one person: once in each run, "
        "or at a site once in all runs"
    ),
    silo("ids", (has_test_rows,)).says(
        "holds the digests of the ids or groups of the server’s test rows, where they have any, and the key. It learns "
        "which of its own are among them, how many they are, and for any id that it guesses whether it is among them"
    ),
)
COLUMNS_OF_ALL = silo("statistics", (is_standardised,)).says(
    "receives the mean and standard deviation of each input column, over all silos{if_standardised}"
)
ROWS_OF_ALL = silo("traffic", (is_summed,)).says("receives the number of rows of all silos together")
ROWS_OF_ALL_IN_A_ROUND = replace(ROWS_OF_ALL, where=(is_summed, takes_all_rows))
WHO_TAKES_PART = silo("traffic", (chooses_silos,)).says(
    "knows which silos take part in each round: they are drawn from the training seed"
)
SILO_STATISTICS = (COLUMNS_OF_ALL, ROWS_OF_ALL_IN_A_ROUND, WHO_TAKES_PART)


# -- other silos, who listens, and who reads ---------------------------------------------------------------------------


LABELS_OF_OTHERS = silo("statistics", (steps_plainly,), ("silo-property",)).says(
    "can estimate {targets_of_others}, where the last layer has a bias that plain gradient steps move"
)


def of_two(upload: str) -> Claim:
    """Return the claim about a silo that subtracts its own part of a step."""
    return silo("update", (has_few_in_a_round,), ("two-party-exposure",), warns=True).says(
        f"can work out the other’s {upload} in rounds of fewer than three silos{{if_any}}|, from consecutive models "
        "and its own part: groups of fewer than three expose each other"
    )


COLUMNS_OF_THE_OTHER = silo("statistics", (has_few_in_statistics, is_standardised)).says(
    "can work out the other’s means and deviations of input columns, up to the ratio of their numbers of rows. It "
    "subtracts its own part from statistics of fewer than three silos"
)

listener = partial(Claim, "eavesdropper", "traffic", kind="unclaimed")
LISTENERS = (
    listener((is_in_process,)).says("no claim is made about a network, as no message leaves the machine"),
    listener((is_over_machines,)).says(
        "no claim is made about what lengths and times of messages show to a listener on the network. NVIDIA FLARE "
        "carries messages over TLS with a certificate on either side, which does not hide these"
    ),
    listener((is_carried_otherwise,)).says("no claim is made about what a listener on the network learns"),
)
NOTES = (
    Claim("reader", None, (is_in_process,), kind="unclaimed").says(
        "one process ran all roles, so the owner of its machine saw everything|. “Sees” means the messages of a role, "
        "not the memory of that machine"
    ),
)

OF_ALL_RUNS = (COUNTED_FIRST, *ABSENT_VALUES, *SCALED_TARGETS, *TEST_ROWS, *LISTENERS, *NOTES)
"""What holds under every protocol."""

SHARED = (
    *sums("update"),
    NOISE,
    ROWS_OF_A_ROUND,
    DIFFERENCES_OF_TOTALS,
    SCORES,
    VALIDATION,
    *TABLES,
    LABELS_OF_OTHERS,
    *SILO_STATISTICS,
    ROWS_OF_ALL,
    *under((of_two("update as far as models show it"),), place="brief"),
    COLUMNS_OF_THE_OTHER,
    *OF_ALL_RUNS,
)
"""Claims that lists about all protocols show once; claims without an attack are in no other list."""
