"""Who learns what under CGD: the aggregator is the server of these claims, participants are silos."""

from __future__ import annotations

from dataclasses import replace

from moretta.protocols.common.claims import (
    Claim,
    Record,
    has_few_in_a_round,
    is_in_the_clear,
    is_summed,
    records_sums,
    setting,
    under,
)
from moretta.protocols.common.shared_claims import (
    ABSENT_VALUES,
    COLUMNS_ALONE,
    COUNTED_FIRST,
    DIFFERENCES_OF_TOTALS,
    FROM_THE_SUM,
    LABELS_OF_OTHERS,
    LISTENERS,
    NOTES,
    ROWS_OF_A_ROUND,
    SCORES,
    SILO_STATISTICS,
    TEST_ROWS,
    around_sums,
    if_any,
    in_the_clear,
    sum_only,
    with_all_but_one,
)

OF_OTHERS = ("confined-inversion", "two-party-exposure")
OF_D = ("displacement-alone", "outsider-displacement")


# -- conditions --------------------------------------------------------------------------------------------------------


def is_simulated(record: Record) -> bool:
    """Whether the engine is a simulation (`fused`, `exact-ring`)."""
    return setting(record, "engine", "name") in ("fused", "exact-ring")


def is_blind(record: Record) -> bool:
    """Whether the aggregator is blind (the default)."""
    return is_summed(record) and setting(record, "protocol", "blind") is not False


def is_seeing(record: Record) -> bool:
    """Whether `blind = false`."""
    return is_summed(record) and not is_blind(record)


def reads_sums(record: Record) -> bool:
    """Whether the aggregator is not blind."""
    return not is_blind(record)


def splits_rows(record: Record) -> bool:
    """Whether no columns are split."""
    return not splits_columns(record)


def splits_columns(record: Record) -> bool:
    """Whether columns are split."""
    return bool(setting(record, "data", "grid") or setting(record, "data", "columns"))


def is_joint(record: Record) -> bool:
    """Whether columns are split in the joint form."""
    return splits_columns(record) and not is_independent(record)


def is_independent(record: Record) -> bool:
    """Whether columns are split in the independent form."""
    return splits_columns(record) and setting(record, "protocol", "vertical") == "independent"


def is_aligned(record: Record) -> bool:
    """Whether the run aligns partners' rows (`align = true`)."""
    return bool(setting(record, "protocol", "align"))


def has_groups_of_two(record: Record) -> bool:
    """Whether some sum is of two participants."""
    return has_few_in_a_round(record) or (not records_sums(record) and has_pairs(record))


def has_pairs(record: Record) -> bool:
    """Return whether two participants alone share layers, by the warnings of a run."""
    return any("nobody else" in warning for warning in record.get("warnings", ()))


def shares_hidden_biases(record: Record) -> bool:
    """Whether `hidden-bias = "shared"`."""
    return bool(setting(record, "protocol", "hidden-bias") == "shared")


def is_regularised(record: Record) -> bool:
    """Whether `weight-decay` is above 0."""
    return bool(setting(record, "protocol", "weight-decay"))


# -- words -------------------------------------------------------------------------------------------------------------


def alone(record: Record) -> str:
    """Return how well D alone predicts, and the worst confined model, if the run says it."""
    test = record["test"]
    figures = test.get("displacement") or {}
    if figures.get("accuracy") is not None and test.get("accuracy") is not None:
        return (
            f" (on this run’s test rows {100 * figures['accuracy']:.1f} %, the worst confined model "
            f"{100 * test['accuracy']:.1f} %)"
        )
    if figures.get("mse") is not None and test.get("mse") is not None:
        return f" (on this run’s test rows an mse of {figures['mse']:.3g}, the worst confined model {test['mse']:.3g})"
    return ""


def in_pairs(record: Record) -> str:
    """Return that sums are of two, or may be."""
    return "" if has_pairs(record) else if_any(record)


# -- claims ------------------------------------------------------------------------------------------------------------


def _own(claims: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """Return the claims marked as CGD's own: they read otherwise than under other protocols."""
    return tuple(replace(claim, shared=False) for claim in claims)


SIMULATED = tuple(
    Claim(
        role,
        "learns",
        "all there is, in the one process that plays all participants",
        "One process played all participants, so nothing was hidden from it: these figures are a simulation’s.",
        (is_simulated,),
        alone=True,
        about="rows",
        headline="saw everything, as one process played all participants",
    )
    for role in ("server", "silo")
)

AGGREGATOR = (
    in_the_clear("gradient"),
    Claim(
        "server", "not given", "a model", "Holds no model.", (is_in_the_clear,), about="model", headline="held no model"
    ),
    *_own(under((replace(sum_only("gradient"), place="full"),), is_seeing)),
    Claim(
        "server",
        "learns",
        "D, the sum of all steps; no participant’s start",
        "Sees D, the sum of all steps, by adding the sums up; holds no participant’s start.",
        (is_seeing,),
        place="brief",
        about="model",
        headline="saw the sum of all steps, which by itself is a model",
    ),
    Claim(
        "server",
        "not given",
        "gradients, sums of them or a model: it adds up and relays what it cannot read",
        "Adds up and relays sums that it cannot read, as each participant’s part is blinded under a key of its group; "
        "holds no model. Sees who takes part in what, when, and how many rows an upload is about.",
        (is_blind,),
        rests_on="views that hold ring words alone (`tests/protocols/cgd/test_cgd_privacy.py`), and the tests of "
        "secure aggregation (`tests/secure_aggregation`)",
        place="front",
        about="sum",
        headline="relayed sums that it could not read",
    ),
    Claim(
        "server",
        "learns",
        "who takes part in what, when, and how many rows an upload is about and a group has",
        where=(is_blind,),
        place="front",
        about="traffic",
    ),
    *_own(under((FROM_THE_SUM,), is_seeing)),
    with_all_but_one("gradient"),
    *around_sums("gradient"),
    *_own(under((ROWS_OF_A_ROUND, DIFFERENCES_OF_TOTALS), reads_sums)),
    *under((COLUMNS_ALONE,), is_blind),
    Claim(
        "server and silos",
        "not given",
        "a key of a group or row that the participant is not in, nor the difference of two z of one take, which would "
        "be raw features, if the aggregator follows no protocol and has one participant on its side",
        assumes="a roster; the grid that all were told",
        rests_on="attacks that `tests/protocols/cgd/test_cgd_attacks.py` plays",
        about="rows",
    ),
)

SCORED = (
    Claim(
        "server",
        "not given",
        "what models score on rows that participants hold back, which it relays; participants are given it",
        "Relays what the participants’ models score on rows that they hold back, and cannot read it; they can.",
        (*SCORES.where, is_blind),
        about="statistics",
    ),
    *_own(under((SCORES,), reads_sums)),
    COUNTED_FIRST,
    *ABSENT_VALUES,
    *TEST_ROWS,
)

PARTICIPANT = (
    Claim(
        "silo",
        "not given",
        "another’s confined model, but one of its own",
        "Holds its own confined model, which no other participant sees.",
        assumes="no iterate leaks",
        rests_on="messages that hold nobody else’s start (`tests/protocols/cgd/test_cgd_privacy.py`)",
        place="front",
        about="model",
        headline="held a model that no other silo saw",
    ),
    Claim(
        "silo",
        "learns",
        "the sum of the others’ gradients, for the layers that it shares; neither another’s rows, if the sum is of "
        "many, nor the gradient of one, if it is of two or more others",
        "Has the sum of the others’ gradients, for the layers that it shares; neither another’s rows, where the sum is "
        "of many, nor, where it is of two or more others, the gradient of one.",
        assumes="starts that lie far apart (delta)",
        attacks=OF_OTHERS,
        place="brief",
        about="sum",
    ),
    Claim(
        "silo",
        "learns",
        "D, the sum of all steps, of the layers that it shares: by itself a model, which can predict better than "
        "confined ones",
        "Knows D, the sum of all steps, of the layers that it shares; D alone is a model, and can predict better than "
        "confined ones{alone}: confinement keeps a participant’s start from the others, not a good model.",
        words=(alone,),
        attacks=OF_D,
        place="front",
        about="model",
        headline="knew the sum of all steps, which by itself is a model",
    ),
    Claim(
        "silo",
        "learns",
        "from sums with the regulariser in them what it would from sums without, to within weight-decay times the mean "
        "of all starts",
        "The regulariser in the sums is weight-decay times D and the mean of all starts: it hides nothing of the "
        "gradients, but to within weight-decay times that mean.",
        (is_regularised,),
        rests_on="the derivation in `docs/cgd.md`",
        about="sum",
    ),
    Claim(
        "silo",
        "learns",
        "where the biases of everybody’s hidden layers begin, as does whoever has the run file, and with D where they "
        "are",
        "Everybody’s hidden biases begin at one vector, which follows from the seed in the run file: with D they are "
        "known to every participant in every round, and only weights and output biases are confined.",
        (shares_hidden_biases,),
        rests_on="the starts that `tests/protocols/cgd/test_start.py` compares",
        about="model",
    ),
    Claim(
        "silo",
        "learns",
        "all iterates of another’s model, if one of them leaks",
        "One iterate of another’s model, if it leaks, gives all of that one’s iterates, earlier and later.",
        about="model",
    ),
    *_own(under((LABELS_OF_OTHERS,), splits_rows)),
    Claim(
        "silo",
        "learns",
        "X'X of the others’ rows in linear regression, of which the paper says that sums tell nothing",
        assumes="a linear model under squared error, full batches, enough rounds",
        attacks=("second-moments",),
        about="statistics",
    ),
    Claim(
        "silo",
        "learns",
        "the labels of its rows, whoever else holds columns of them",
        "Holds the labels of its rows, whoever else holds columns of them.",
        (is_independent,),
        about="rows",
        headline="held the labels of its rows, whoever else has columns of them",
    ),
    Claim(
        "silos together",
        "learns",
        "a row’s raw features: who holds its labels, together with one member of each column group, after as many "
        "rounds as there are columns for each unit of the first layer, and one more",
        "Whoever holds a row’s labels sees the sum of the parts of its first layer’s values in every round. With D of "
        "all columns, which one member of each column group has, that gives the row’s raw features after as many "
        "rounds as there are columns for each unit of the first layer, and one more.",
        (is_joint,),
        attacks=("raw-features",),
        place="brief",
        about="rows",
        headline="can work out raw features of the rows that they share",
    ),
    Claim(
        "silo",
        "learns",
        "the inner products X X' of the others’ rows, if it holds the labels in a grid of a single row",
        where=(is_joint,),
        rests_on="the derivation in `docs/cgd.md`",
        about="rows",
    ),
    Claim(
        "silo",
        "learns",
        "without labels, the loss’s derivative at the first layer for each of its rows, by which rows fall into "
        "clusters of like labels",
        "A participant without labels receives the loss’s derivative at the first layer for each of its rows, by which "
        "rows fall into clusters of like labels.",
        (is_joint,),
        attacks=("labels-from-delta",),
        place="brief",
        about="rows",
        headline="could group its rows by like labels without holding the labels",
    ),
    Claim(
        "silo",
        "learns",
        "the gradient of the other one, as the sum less its own",
        "Where a sum is of two participants{in_pairs}, each works out the other’s gradient from it and its own: groups "
        "of fewer than three expose each other.",
        (has_groups_of_two,),
        (in_pairs,),
        attacks=("two-party-exposure",),
        about="update",
        headline="could work out the other’s gradient where a sum is of two{in_pairs}",
    ),
    *SILO_STATISTICS,
)

ALIGNMENT = (
    Claim(
        "server",
        "not given",
        "ids by which rows are aligned, nor points that stand for them, of which a dictionary finds none",
        "Relays the lists of ids by which two participants align their rows, sealed for the two alone, and reads none.",
        (is_aligned,),
        assumes="neither of the two that align colludes with it; a roster; and where lists travel unsealed, between "
        "files, the decisional Diffie-Hellman assumption on Curve25519",
        attacks=("alignment-dictionary",),
        about="ids",
    ),
    Claim(
        "server",
        "learns",
        "how long each list of ids is, which is how many rows a participant has unless `align-pad-to` fills it up, and "
        "how many rows the holders of a row share",
        "Sees how long each participant’s list of ids is, and how many rows the holders of a row share.",
        (is_aligned,),
        rests_on="the lengths that `tests/protocols/cgd/test_cgd_alignment.py` compares",
        about="traffic",
    ),
    Claim(
        "silo",
        "learns",
        "which of its own ids the other holders of its row have, and of each the lesser number of rows",
        "Learns which of its own ids the other holders of its row have, and of each the lesser number of rows.",
        (is_aligned,),
        attacks=("alignment-membership",),
        about="ids",
        headline="learnt which of its own ids the others have",
    ),
    Claim(
        "silo",
        "learns",
        "how long the lists of those that it aligns with are: how many rows they have, unless lists are filled up",
        "Sees how long the lists of those that it aligns with are.",
        (is_aligned,),
        rests_on="the steps that an alignment keeps (`tests/data/test_alignment.py`)",
        about="traffic",
    ),
    Claim(
        "silo",
        "learns",
        "in rows of three holders and more, which ids the holder of the labels shares with it, those too that a third "
        "lacks; who holds the labels learns this of each of the others before the last, among the ids left until then",
        "In rows of three holders and more, the one with the labels aligns with each of the others in turn, and both "
        "learn which ids they share of those left until then, also where a later one lacks them.",
        (is_aligned,),
        rests_on="the derivation in `docs/alignment.md`",
        about="ids",
    ),
    Claim(
        "silo",
        "learns",
        "whether a partner has ids that it has no rows of, as many as its list is long, once a run, if it follows no "
        "protocol; how long a list may be nothing bounds but the size of a message, and another run tests others",
        "A participant that lists ids of which it has no rows learns whether its partner has them: as many as its list "
        "is long, in each run.",
        (is_aligned,),
        rests_on="the derivation in `docs/alignment.md`",
        about="ids",
    ),
    Claim(
        "silo",
        "learns",
        "by how long a partner’s answer takes, about how many places of its list only fill it up",
        "May tell from how long an answer takes about how many places of a list only fill it up.",
        (is_aligned,),
        rests_on="the derivation in `docs/alignment.md`",
        about="traffic",
    ),
    Claim(
        "silo",
        "not given",
        "ids of another’s rows that are not in its own list",
        "Is not given ids of another’s rows that it did not list itself.",
        (is_aligned,),
        assumes="the decisional Diffie-Hellman assumption on Curve25519",
        rests_on="a dictionary without the other’s secret finds none (`tests/audit/test_alignment_attacks.py`)",
        about="ids",
    ),
)

CLAIMS = (
    *AGGREGATOR,
    *SCORED,
    *PARTICIPANT,
    *ALIGNMENT,
    *SIMULATED,
    Claim(
        "outsider",
        "learns",
        "a model, from D, if it leaks, and the architecture",
        assumes="D leaks, or the relay is not blind",
        attacks=("outsider-displacement",),
        about="model",
    ),
    *LISTENERS,
    *NOTES,
)
