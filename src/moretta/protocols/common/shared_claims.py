"""Claims that protocols share: on sums, noise, the set-up's statistics, few silos, and eavesdroppers.

A tuple or a single claim here reads the same under every protocol. Functions make claims about what a protocol's silos
upload, such as a gradient.
"""

from __future__ import annotations

from dataclasses import replace

from moretta.protocols.common.accountant import WITH_NOISE_OF
from moretta.protocols.common.claims import (
    Claim,
    Record,
    chooses_silos,
    fills_absent,
    fills_medians,
    has_different_sums,
    has_few_in_a_round,
    has_few_in_statistics,
    has_no_roster,
    has_public_weights,
    has_roster,
    has_test_rows,
    has_two_sets,
    has_two_silos,
    is_carried_otherwise,
    is_in_process,
    is_in_the_clear,
    is_masked,
    is_noised,
    is_over_machines,
    is_standardised,
    is_summed,
    looks_first,
    records_sums,
    round_size,
    scores_at_silos,
    setting,
    steps_plainly,
    tabulates_at_silos,
    takes_all_rows,
)

OF_LOSS_DIFFERENCES = ("loss-differences", "k-rank-projection", "seed-choosing-server")
OF_AN_UPLOAD = ("gradient-inversion", "labels-from-head", *OF_LOSS_DIFFERENCES)
OF_A_MASK = ("gradient-inversion",)
OF_A_SUM = ("gradient-inversion-of-sum", "labels-from-head")

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


# -- words -------------------------------------------------------------------------------------------------------------


def ring(record: Record) -> str:
    """Return the size of the ring of sums, in brackets, if the run says it."""
    bits = (record.get("secure_aggregation") or {}).get("ring_bits")
    return f" (modulo 2{str(bits).translate(_RAISED)})" if bits else ""


def two_sets(record: Record) -> str:
    """Return that a round was opened over two sets of silos, or may have been."""
    if records_sums(record):
        return "Was helped to open sums of one round over two sets of silos"
    return (
        "Received answers of silos that it had given up as late, and may have opened sums of one round with and "
        "without them, which this run’s record does not show"
    )


def the_difference(record: Record) -> str:
    """Return what the difference of two sums of a round is."""
    if takes_all_rows(record):
        return "of the silos that one set lacks"
    return "of the silos that one set lacks, beside what other rows change in the updates of the rest"


def as_sums_differ(record: Record) -> str:
    """Return that sums are over different silos, or may be."""
    if records_sums(record) or chooses_silos(record):
        return "As not all sums were over the same silos"
    return "If not all sums were over the same silos, which this run’s record does not show"


def by_whom(record: Record) -> str:
    """Return whether the server has statistics of all silos together."""
    return "over all silos" if is_summed(record) else "of each silo by itself"


def if_standardised(record: Record) -> str:
    """Return when inputs are standardised, where the run does not say whether they were."""
    if setting(record, "data", "standardise"):
        return ""
    return " (if inputs are standardised, as tables are unless the run file says otherwise)"


def and_columns(record: Record) -> str:
    """Return what the server learns of columns beside a number of rows, if anything."""
    if not is_standardised(record):
        return ""
    columns = f"the mean and standard deviation of each input column, {by_whom(record)}{if_standardised(record)}"
    return f", and {columns}"


def and_histograms(record: Record) -> str:
    """Return what else the server learns of columns whose median is filled in."""
    if not fills_medians(record):
        return ""
    return ", and of a column whose median is filled in how many are in each of 64 equal parts of its range"


def whose_scores(record: Record) -> str:
    """Return in words whose scores the server knows."""
    return "all silos together" if is_summed(record) else "each silo by itself"


def rounds_of_few(record: Record) -> str:
    """Return when there are fewer than three silos."""
    return "With two silos" if has_two_silos(record) else f"In rounds with fewer than three silos{if_any(record)}"


def if_any(record: Record) -> str:
    """Return that there may be no such round, where the record does not show who was in its sums."""
    known = records_sums(record) or has_two_silos(record) or round_size(record) <= 2
    return "" if known else ", if there were any, which this run’s record does not show"


def statistics_of_few(record: Record) -> str:
    """Return why common statistics show those of another silo."""
    return "With two silos" if has_two_silos(record) else "As statistics are of fewer than three silos"


def targets_of_others(record: Record) -> str:
    """Return what steps of the last layer's bias tell of."""
    if record["task"] == "regression":
        return "mean of the other silos’ targets"
    return "balance of the other silos’ labels"


def epsilons(record: Record) -> str:
    """Return epsilon, delta and towards whom they hold."""
    facts = record["facts"]
    said = (
        f"ε = {_figure(facts['epsilon'])} and δ = {facts['delta']:.0e} for one example added or removed at one silo, "
        "towards the server and whoever gets the model"
    )
    if (others := facts.get("epsilon_to_silos")) is not None:
        said += f"; towards another silo, which can take its own noise off, with ε = {_figure(others)}"
    return said


def epsilon_alone(record: Record) -> str:
    """Return epsilon and delta towards the server."""
    facts = record["facts"]
    return f"ε = {_figure(facts['epsilon'])} at δ = {facts['delta']:.0e}"


def what_epsilon_assumes(record: Record) -> str:
    """Return how many noised sums epsilon is about, whose noise it assumes in each, and the epsilon with less noise."""
    facts = record["facts"]
    releases, silos = facts.get("releases"), facts.get("noise_silos")
    if not isinstance(releases, float) or not isinstance(silos, float):
        return ""
    said = f" Counted are {releases:.0f} noised sums that may have been opened"
    if silos <= 1:
        return f"{said}; each silo adds all of the noise."
    said += f", and assumed is that the noise of {silos:.0f} silos in each is unknown to who looks"
    found = {key.removeprefix(WITH_NOISE_OF): value for key, value in facts.items() if WITH_NOISE_OF in key}
    fewer = [f"of {silos} with ε = {_figure(value)}" for silos, value in found.items()]
    return f"{said}{'; where it is that ' if fewer else ''}{', '.join(fewer)}."


def what_epsilon_leaves_out(record: Record) -> str:
    """Return what epsilon does not count, if anything."""
    left_out = record["facts"].get("epsilon_leaves_out")
    return f" Not counted: {left_out}." if left_out else ""


def _figure(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# -- sums --------------------------------------------------------------------------------------------------------------


def in_the_clear(upload: str) -> Claim:
    """Return what the server has without secure aggregation. upload: "gradient" or the like, as below."""
    return Claim(
        "server",
        "learns",
        f"the {upload} of each silo by itself",
        f"Sees the {upload} of each silo by itself: no secure aggregation was used.",
        (is_in_the_clear,),
        attacks=OF_AN_UPLOAD,
        shared=True,
        about="update",
        headline=f"saw the {upload} of each silo by itself",
    )


def sum_only(upload: str) -> Claim:
    """Return that the server has only the sum."""
    return Claim(
        "server",
        "learns",
        f"of the silos’ {upload}s only their sum",
        f"Sees only the ring sum{{ring}} of the silos’ {upload}s, not the {upload} of any one of them.",
        (is_masked,),
        (ring,),
        assumes="at least two silos do not collude with it; a roster, or an honest relay of keys",
        attacks=OF_A_MASK,
        rests_on="the tests of secure aggregation (`tests/secure_aggregation`)",
        shared=True,
        place="front",
        about="sum",
        headline=f"saw only sums of the silos’ {upload}s (and what follows from sums)",
    )


FROM_THE_SUM = Claim(
    "server",
    "learns",
    "what follows from the sum, such as the balance of its rows’ labels, and, of few rows, the rows themselves",
    "What follows from the sum is not hidden, such as the balance of its rows’ labels, and, of few rows, the rows "
    "themselves.",
    (is_masked,),
    attacks=OF_A_SUM,
    shared=True,
    about="sum",
)


def with_all_but_one(upload: str) -> Claim:
    """Return what the server has with the help of silos."""
    return Claim(
        "server and silos",
        "learns",
        f"the {upload} of the one silo that is not among them, as the sum less theirs",
        f"Together with all silos but one it has that one’s {upload}, as the sum less theirs.",
        (is_masked,),
        attacks=("server-and-silos",),
        shared=True,
        about="update",
    )


def around_sums(upload: str = "upload") -> tuple[Claim, ...]:
    """Return what the server has of late answers, of weights and by relaying keys."""
    return (
        Claim(
            "server",
            "learns",
            "which silos took part, their total weight, and the lengths of messages",
            where=(is_masked,),
            shared=True,
            about="traffic",
        ),
        Claim(
            "server",
            "learns",
            f"from the difference of the two sums, the {upload} of the silos that one of them lacks: exactly where a "
            "round uses all rows of a silo, and else beside what other rows change in those of the rest",
            f"{{two_sets}}: their difference is the {upload} {{the_difference}}.",
            (is_masked, has_two_sets),
            (two_sets, the_difference),
            shared=True,
            about="update",
            headline=f"may have worked out the {upload} of a silo that one of two sums lacks",
        ),
        Claim(
            "server",
            "learns",
            "how much each silo’s part weighs",
            "Sees how much each silo’s part weighs: weights were public.",
            (is_masked, has_public_weights),
            shared=True,
            about="traffic",
        ),
        Claim(
            "server",
            "learns",
            f"each {upload}, if it puts keys of its own in the place of those that it relays",
            "Relayed the keys between silos, which took them on trust, as no roster was set: a server that put keys of "
            f"its own in their place could read each {upload}.",
            (is_masked, has_no_roster),
            shared=True,
            about="update",
            headline="was trusted to relay the silos’ keys unchanged",
        ),
        Claim(
            "server",
            "not given",
            "uploads by keys that it puts in the place of those that it relays: silos refuse them",
            "Relayed keys that each silo had signed with its identity in the roster: silos refuse one put in its "
            "place.",
            (is_masked, has_roster),
            rests_on="`tests/secure_aggregation`",
            shared=True,
            about="update",
        ),
    )


HOLDS_THE_MODEL = Claim(
    "server", "learns", "the true model", "Holds the model.", place="front", about="model", headline="held the model"
)
NOISE = Claim(
    "server",
    "bounded",
    "no more of one example at one silo, from all models of the run, than the accountant’s epsilon says",
    "All models of this run together are (ε, δ)-differentially private with {epsilons}."
    "{what_epsilon_assumes}{what_epsilon_leaves_out}",
    (is_noised,),
    (epsilons, epsilon_alone, what_epsilon_assumes, what_epsilon_leaves_out),
    assumes="the noise of as many silos as the report names is in each sum and unknown to who looks; silos help to "
    "open one sum of a take",
    attacks=("membership-inference",),
    shared=True,
    about="model",
    headline="could learn of one row, from all models, no more than {epsilon_alone} allows",
)


# -- statistics --------------------------------------------------------------------------------------------------------


ROWS_OF_A_ROUND = Claim(
    "server",
    "learns",
    "the number of rows that a round uses and, where inputs are standardised, mean and standard deviation of each "
    "input column, over all silos (without secure aggregation of each)",
    "Learns the number of rows that a round uses, {by_whom}{and_columns}.",
    words=(by_whom, and_columns),
    shared=True,
    about="statistics",
)

COLUMNS_ALONE = Claim(
    "server",
    "learns",
    "mean and standard deviation of each input column",
    "Learns the mean and standard deviation of each input column, {by_whom}{if_standardised}.",
    (is_standardised,),
    (by_whom, if_standardised),
    about="statistics",
)

DIFFERENCES_OF_TOTALS = Claim(
    "server",
    "learns",
    "the number of rows of one silo, by differences of totals",
    "{as_sums_differ}, differences of their totals can give one silo’s rows.",
    (is_summed, has_different_sums),
    (as_sums_differ,),
    shared=True,
    about="traffic",
)

SCORES = Claim(
    "server",
    "learns",
    "how many rows are held back, and the scores on them, of all silos together (without secure aggregation of each)",
    "Learns, at the end, how many rows are held back to score models on, and the scores on them, of {whose_scores}.",
    (scores_at_silos,),
    (whose_scores,),
    shared=True,
    about="statistics",
)

TABLES = (
    Claim(
        "server",
        "learns",
        "of the rows held back at all silos together, exactly and however few, how many of each class are predicted as "
        "which, and of each tenth of probabilities how many there are, how many are right, and the mean",
        "Learns, at the end, how many of the rows held back at all silos together have which class and are predicted "
        "as which, and by how probable they are said to be how many there are and how many are right, however few.",
        (tabulates_at_silos,),
        shared=True,
        about="statistics",
    ),
    Claim(
        "server",
        "not given",
        "how many rows of a class one silo holds back: such counts are summed of one set of three silos or more",
        "Is given no silo’s own counts of classes: they are summed of one set of silos alone, three or more.",
        (tabulates_at_silos,),
        assumes="the server does not know the counts of all other silos, from them or otherwise; no silo’s rows change "
        "from run to run, and none allows sums over other sets (`[privacy]` of its silo.toml)",
        rests_on="attacks that `tests/test_tables_at_silos.py` plays",
        shared=True,
        about="statistics",
    ),
)

ABSENT_VALUES = (
    Claim(
        "server",
        "learns",
        "where values are absent, how many of each input column are there; of a column whose median is filled in, how "
        "many rows have a value in each of 64 equal parts of its range (without secure aggregation of each silo)",
        "Learns how many values of each input column are there, {by_whom}{and_histograms}.",
        (fills_absent,),
        (by_whom, and_histograms),
        shared=True,
        about="statistics",
    ),
    Claim(
        "silo",
        "learns",
        "where values are absent, what is filled in: each column’s mean or median, over all silos",
        "Receives what is filled in where a value is absent: each such column’s mean or median, over all silos.",
        (fills_absent,),
        shared=True,
        about="statistics",
    ),
)

TEST_ROWS = (
    Claim(
        "server",
        "learns",
        "of one list of ids and groups, whether any of a silo’s training rows is about one of them: those "
        "of its test rows, or, actively, a list that it makes up, of one person perhaps",
        "Where its test rows have ids or groups, learns of each silo whether any training row is about the same, "
        "and an active server the same of one list in a session that it makes up, of one person perhaps.",
        (has_test_rows,),
        shared=True,
        about="ids",
    ),
    Claim(
        "silo",
        "learns",
        "if the server’s test rows have ids or groups, which of its own rows’ are among them and how many they are, "
        "and, as it holds the key of their digests, of any id that it guesses whether it is there",
        "Where the server’s test rows have ids or groups, holds their digests and the key: learns which of its own "
        "rows’ are among them and how many they are, and of any id that it guesses whether it is there.",
        (has_test_rows,),
        shared=True,
        about="ids",
    ),
)

COUNTED_FIRST = Claim(
    "server",
    "learns",
    "the number of rows, and of rows of each class, of all silos together (without secure aggregation of each)",
    "Learns, before round one, the number of rows and of rows of each class, {by_whom}.",
    (looks_first,),
    (by_whom,),
    shared=True,
    about="statistics",
)

COLUMNS_OF_ALL = Claim(
    "silo",
    "learns",
    "mean and standard deviation of each input column, over all silos",
    "Receives the mean and standard deviation of each input column, over all silos{if_standardised}.",
    (is_standardised,),
    (if_standardised,),
    shared=True,
    about="statistics",
)

ROWS_OF_ALL = Claim(
    "silo",
    "learns",
    "the number of rows of all silos together",
    "Is told the number of rows of all silos together.",
    (is_summed,),
    shared=True,
    about="traffic",
)

ROWS_OF_ALL_IN_A_ROUND = replace(ROWS_OF_ALL, where=(is_summed, takes_all_rows))

WHO_TAKES_PART = Claim(
    "silo",
    "learns",
    "which silos take part in each round, drawn from the training seed",
    "Knows which silos take part in each round: they are drawn from the training seed.",
    (chooses_silos,),
    shared=True,
    about="traffic",
)

SILO_STATISTICS = (COLUMNS_OF_ALL, ROWS_OF_ALL_IN_A_ROUND, WHO_TAKES_PART)


# -- other silos -------------------------------------------------------------------------------------------------------


LABELS_OF_OTHERS = Claim(
    "silo",
    "learns",
    "the balance of the other silos’ labels, or the mean of their targets, if the last layer has a bias",
    "Where the last layer has a bias, its plain gradient steps tell of the {targets_of_others}.",
    (steps_plainly,),
    (targets_of_others,),
    attacks=("silo-property",),
    shared=True,
    about="statistics",
)


def of_two(upload: str) -> Claim:
    """Return what a silo works out by subtracting its own part of a step."""
    return Claim(
        "silo",
        "learns",
        f"the other’s {upload}, from consecutive models and its own",
        f"{{rounds_of_few}}, works out the other’s {upload} from consecutive models and its own: groups of fewer than "
        "three expose each other.",
        (has_few_in_a_round,),
        (rounds_of_few, if_any),
        attacks=("two-party-exposure",),
        warns=True,
        about="update",
        headline=f"could work out the other’s {upload} in rounds of two{{if_any}}",
    )


COLUMNS_OF_THE_OTHER = Claim(
    "silo",
    "learns",
    "the other’s means and deviations of input columns, up to the ratio of their rows",
    "{statistics_of_few}, the common means and deviations of input columns, less its own part, are those of the other, "
    "up to the ratio of their rows.",
    (has_few_in_statistics, is_standardised),
    (statistics_of_few,),
    shared=True,
    about="statistics",
)


# -- who listens, and who reads ----------------------------------------------------------------------------------------


LISTENERS = (
    Claim(
        "eavesdropper",
        "unclaimed",
        "messages, as none leave the machine",
        "Nothing travelled over a network in this run; the report says nothing about one.",
        (is_in_process,),
        shared=True,
        about="traffic",
    ),
    Claim(
        "eavesdropper",
        "unclaimed",
        "lengths and times of messages, which TLS with a certificate on either side does not hide",
        "The messages of this run travelled by NVIDIA FLARE over TLS with a certificate on either side; the report "
        "says nothing about what someone who listens to the network learns from their lengths and times.",
        (is_over_machines,),
        shared=True,
        about="traffic",
    ),
    Claim(
        "eavesdropper",
        "unclaimed",
        "what someone who listens to the network learns",
        "The report says nothing about what someone who listens to the network learns.",
        (is_carried_otherwise,),
        shared=True,
        about="traffic",
    ),
)

NOTES = (
    Claim(
        "reader",
        "unclaimed",
        "the memory of the machine",
        "All roles of this run were played by one process on one machine; “sees” means the messages of a role, not the "
        "memory of that machine, whose owner sees everything.",
        (is_in_process,),
        shared=True,
        headline="one process played all roles, so the owner of its machine saw everything",
    ),
)


SHARED = (
    in_the_clear("update"),
    sum_only("update"),
    FROM_THE_SUM,
    with_all_but_one("update"),
    *around_sums("update"),
    NOISE,
    ROWS_OF_A_ROUND,
    DIFFERENCES_OF_TOTALS,
    COUNTED_FIRST,
    SCORES,
    *TABLES,
    *ABSENT_VALUES,
    *TEST_ROWS,
    LABELS_OF_OTHERS,
    *SILO_STATISTICS,
    replace(
        of_two("update"),
        what="the other’s update as far as models show it: groups of fewer than three expose each other",
        place="brief",
    ),
    COLUMNS_OF_THE_OTHER,
    *LISTENERS,
)
"""What lists that tell of all protocols have once."""
