"""Who learns what under PBPFL (`moretta.protocols.common.claims`)."""

from __future__ import annotations

from moretta.protocols.common.claims import (
    Claim,
    Record,
    fact,
    has_few_in_a_round,
    is_cross_entropy,
    is_over_machines,
    setting,
    under,
)
from moretta.protocols.common.shared_claims import (
    ABSENT_VALUES,
    COLUMNS_OF_THE_OTHER,
    COUNTED_FIRST,
    DIFFERENCES_OF_TOTALS,
    FROM_THE_SUM,
    LABELS_OF_OTHERS,
    LISTENERS,
    NOTES,
    ROWS_OF_A_ROUND,
    SCORES,
    SILO_STATISTICS,
    TABLES,
    TEST_ROWS,
    around_sums,
    by_whom,
    if_any,
    in_the_clear,
    of_two,
    rounds_of_few,
    sum_only,
    with_all_but_one,
)

SYMMETRY = "the network’s own scaling and permutation symmetry"

OF_A_NOISY_MODEL = ("update-direction", "lemma-6-distinguisher")
OF_THE_OFFSET = ("gamma-least-squares", "silos-together", "lemma-7-hit-rate")
OF_A_SOFTMAX = ("softmax-from-sum", "offset-from-softmax")


# -- conditions --------------------------------------------------------------------------------------------------------


def has_powers_of_two(record: Record) -> bool:
    """Whether `scales = "powers-of-two"`."""
    return bool(setting(record, "protocol", "scales") == "powers-of-two")


def is_unscaled(record: Record) -> bool:
    """Whether the model has no free scale (`moretta check` says so)."""
    return fact(record, "free_scales") == 0


def is_scaled_by_powers(record: Record) -> bool:
    """Whether scales are powers of two."""
    return not is_unscaled(record) and has_powers_of_two(record)


def is_scaled(record: Record) -> bool:
    """Whether scales are continuous (the default) and some are free."""
    return not is_unscaled(record) and not has_powers_of_two(record)


def has_forced_scales(record: Record) -> bool:
    """Whether some tensors have no free scale."""
    return bool(fact(record, "forced_to_one"))


def returns_the_softmax(record: Record) -> bool:
    """Whether the server answers with the softmax itself."""
    return bool(setting(record, "protocol", "variant") != "paper")


def returns_the_paper_s_form(record: Record) -> bool:
    """Whether `variant = "paper"`."""
    return not returns_the_softmax(record)


def hides_softmax_from_server(record: Record) -> bool:
    """Whether `exchange = "ratios"` and there are two classes."""
    return has_ratios(record) and fact(record, "outputs") == 2


def shows_softmax_to_server(record: Record) -> bool:
    """Whether silos send outputs (the default), or ratios of three classes or more."""
    return not hides_softmax_from_server(record)


def has_ratios(record: Record) -> bool:
    """Whether `exchange = "ratios"`."""
    return bool(setting(record, "protocol", "exchange") == "ratios")


def sends_outputs(record: Record) -> bool:
    """Whether silos send their outputs up to a constant a row (the default)."""
    return not has_ratios(record)


def starts_from_the_seed(record: Record) -> bool:
    """Whether the first weights follow from the run file's seed: on one machine, without a warm start."""
    follow = setting(record, "run", "seed") is not None and setting(record, "protocol", "warm-start") is None
    return follow and not is_over_machines(record)  # there they are drawn from the operating system


# -- words -------------------------------------------------------------------------------------------------------------


def perhaps_reordered(record: Record) -> str:
    """Return that channels are in another order, where they may be."""
    return "" if has_powers_of_two(record) else ", at most in another order,"


def how_many(record: Record) -> str:
    """Return how many scales of powers of two are secret, if the run says it."""
    free = fact(record, "free_scales")
    return "scales" if free is None else f"{free} secret scales"


def by_scales(record: Record) -> str:
    """Return by how many scales values are obfuscated."""
    free = fact(record, "free_scales")
    return "where a scale is free, and the run does not say where" if free is None else f"by {free} secret scales"


def forced(record: Record) -> str:
    """Return how many tensors have no free scale."""
    count = fact(record, "forced_to_one")
    return "1 weight or bias tensor has" if count == 1 else f"{count} weight and bias tensors have"


def up_to_what(record: Record) -> str:
    """Return up to what hidden layers are known."""
    if is_unscaled(record):
        return "as they are" if has_powers_of_two(record) else "up to the order of their channels"
    return "up to powers of two" if has_powers_of_two(record) else f"up to {SYMMETRY}"


def here(record: Record) -> str:
    """Return the m of this run, if it is a number."""
    parts = setting(record, "protocol", "partitions")
    return f" (here m = {parts})" if isinstance(parts, int) else ""


# -- claims ------------------------------------------------------------------------------------------------------------


SERVER = (
    in_the_clear("upload"),
    sum_only("upload"),
    FROM_THE_SUM,
    with_all_but_one("upload"),
    *around_sums(),
    Claim(
        "server",
        "learns",
        "the true model",
        "Holds the true model.",
        place="front",
        about="model",
        headline="held the true model",
    ),
    ROWS_OF_A_ROUND,
    Claim(
        "server",
        "learns",
        "mean and standard deviation of all inputs together and of the targets, over all silos (without secure "
        "aggregation of each)",
        "Learns the mean and standard deviation of all inputs together and of the targets, {by_whom}.",
        words=(by_whom,),
        place="brief",
        about="statistics",
    ),
    DIFFERENCES_OF_TOTALS,
    Claim(
        "server",
        "learns",
        "of each sample of each silo by itself the softmax and alpha, the sum of the last layer’s inputs",
        "In the cross-entropy exchange, sees each sample of each silo’s batch by itself: its softmax, and alpha, the "
        "sum of the last layer’s inputs.",
        (is_cross_entropy, shows_softmax_to_server),
        attacks=("server-softmax",),
        place="front",
        about="rows",
        headline="saw the softmax of each training row by itself",
    ),
    Claim(
        "server",
        "not given",
        "a sample’s softmax of two classes, by its blinded ratios, but alpha, the sum of the last layer’s inputs",
        "In the cross-entropy exchange, sees of each sample of each silo’s batch alpha, the sum of the last layer’s "
        "inputs, and two ratios that blind its softmax of two classes; three classes would show it.",
        (is_cross_entropy, hides_softmax_from_server),
        assumes="the server follows the protocol: one that does not learns from each refusal a little",
        attacks=("server-softmax",),
        about="rows",
        headline="saw of each training row blinded ratios and the sum of the last layer’s inputs",
    ),
)

RECEIVED = (
    Claim(
        "silo",
        "learns",
        "the true parameter values, at most in another order, but for the offset of the last layer",
        "Receives a model of which nothing is scaled: its true parameter values{perhaps_reordered} but for the offset "
        "of the last layer.",
        (is_unscaled,),
        (perhaps_reordered,),
        attacks=OF_A_NOISY_MODEL,
        place="brief",
        about="model",
        headline="received the true parameter values but for the offset of the last layer",
    ),
    Claim(
        "silo",
        "obfuscated",
        "the model with the exponents below the last layer obfuscated; signs and mantissas are plain, in their place",
        "Receives a noisy model whose scales are powers of two: below the last layer the sign and the mantissa of each "
        "parameter value are plain to it, in their place, and only exponents are obfuscated, by {how_many} of three "
        "values each.",
        (is_scaled_by_powers,),
        (how_many,),
        attacks=OF_A_NOISY_MODEL,
        place="brief",
        about="model",
        headline="received a model of which the exponents alone are obfuscated",
    ),
    Claim(
        "silo",
        "learns",
        "the true exponents as averages over rounds, and from two consecutive rounds how much of itself a step adds to "
        "a weight",
        "As exponents are drawn anew in every round, their averages over rounds give the true ones; how much of itself "
        "a step adds to a weight is plain from two consecutive rounds.",
        (is_scaled_by_powers,),
        about="model",
    ),
    Claim(  # from how each input's scale changed: one that does not, as nothing below it is scaled, says nothing
        "silo",
        "learns",
        "the offset of the last layer from two consecutive rounds, without labels, and with it that layer’s weights to "
        "a fraction of a percent, and its step approximately",
        "Two consecutive rounds also give the offset of the last layer, without labels, where its inputs are scaled: "
        "with it that layer’s weights are known to a fraction of a percent, and its step approximately.",
        (is_scaled_by_powers,),
        place="brief",
        about="model",
    ),
    Claim(
        "silo",
        "obfuscated",
        "the model with its parameter values obfuscated",
        "Receives a noisy model: its parameter values are obfuscated {by_scales}.",
        (is_scaled,),
        (by_scales,),
        attacks=OF_A_NOISY_MODEL,
        place="front",
        about="model",
        headline="received a model whose parameter values are obfuscated",
    ),
    Claim(
        "silo",
        "not given",
        "the scales by the low bits of one noisy model",
        "The low bits of those values are not to tell the scales: the server holds weights in float64, sends fewer "
        "bits of them, and moved each tensor of the start by about 2⁻²³ of its largest entry. A start of less than 24 "
        "bits, such as ones or weights of eight bits, is not hidden by that.",
        (is_scaled,),
        assumes="a start of 24 random bits or more that the silo does not know",
        attacks=("scales-from-low-bits",),
        about="model",
    ),
    Claim(
        "silo",
        "learns",
        "the ratio of the scales of two rounds, as rows of weights are matched by direction: at best one factor a "
        "hidden channel and the order of channels stay hidden for a whole run, to within the spread of the start, and "
        "nothing of them from whoever knows the start",
        "Rows of weights of two rounds are matched by their direction, which gives the ratio of their scales. At best "
        "one factor a hidden channel and the order of channels stay hidden for the whole run, to within the "
        "spread of the start, and nothing of them from whoever knows the start.",
        (is_scaled,),
        place="brief",
        about="model",
    ),
    Claim(
        "silo",
        "learns",
        "tensors that have no free scale, as they are on one side or on both",
        "{forced} no free scale, on one side or on both (forced_to_one in result.json says which tensors, and why).",
        (has_forced_scales,),
        (forced,),
        about="model",
    ),
    Claim(
        "silo",
        "learns",
        f"the function of the hidden layers, which are plain up to {SYMMETRY}",
        "Sees the hidden layers {up_to_what}, so the function that they compute is plain to it.",
        words=(up_to_what,),
        attacks=("update-direction",),
        place="brief",
        about="model",
    ),
)

SOFTMAX = (
    Claim(
        "silo",
        "learns",
        "its samples’ true softmax, once its batch has m rows or more, and from one sample the differences of the last "
        "layer’s offset: all of it where m is below the number of outputs",
        "Because probabilities sum to one, works out the true softmax exactly once its batch has at least m samples, "
        "and then the differences between the last layer’s offsets from a single sample: with the public direction "
        "they give the whole offset where m is below the number of outputs.",
        (is_cross_entropy, returns_the_paper_s_form, sends_outputs),
        attacks=OF_A_SOFTMAX,
        about="model",
        headline="could work out the true softmax of its own rows",
    ),
    Claim(
        "silo",
        "learns",
        "its samples’ true softmax, each from its own row of the answer to blinded ratios, and with it the differences "
        "of the last layer’s offset: all of it where m is below the number of outputs",
        "The answer to blinded ratios holds sums by which each row gives its own true softmax, whatever the size of "
        "the batch, and then the differences between the last layer’s offsets: with the public direction they give the "
        "whole offset where m is below the number of outputs.",
        (is_cross_entropy, has_ratios),
        attacks=OF_A_SOFTMAX,
        about="model",
        headline="could work out the true softmax of its own rows",
    ),
    Claim(
        "silo",
        "learns",
        "its samples’ true softmax, and from one sample the differences of the last layer’s offset: all of it where m "
        "is below the number of outputs",
        "Is handed the true softmax of each sample of its batch, whatever the size of the batch, and then the "
        "differences between the last layer’s offsets from a single sample: with the public direction they give the "
        "whole offset where m is below the number of outputs.",
        (is_cross_entropy, returns_the_softmax),
        attacks=OF_A_SOFTMAX,
        place="brief",
        about="model",
        headline="was handed the true softmax of its own rows",
    ),
)

SILO = (
    *RECEIVED,
    Claim(
        "silo",
        "learns",
        "the last layer’s offset, whose m unknowns it fits to its labels by least squares, and so the true predictions",
        "The offset of the last layer has m unknowns{here}, and a silo that has labels fits them by least squares (to "
        "a relative error of 10⁻⁴ after 20 rounds on the digits data).",
        words=(here,),
        assumes="labels, and a few rounds",
        attacks=OF_THE_OFFSET,
        place="brief",
        about="model",
    ),
    *SOFTMAX,
    Claim(
        "silo",
        "learns",
        "the true function, by the released model",
        "The released model is the true function.",
        attacks=("canonical-form", "membership-inference"),
        place="front",
        about="model",
        headline="got the true function with the released model",
    ),
    LABELS_OF_OTHERS,
    Claim(
        "silo",
        "learns",
        "the true model of round 1, as does whoever has the run file",
        "The initial weights follow from the training seed in the run file, so whoever has the file knows the true "
        "model of round 1.",
        (starts_from_the_seed,),
        attacks=("training-seed",),
        about="model",
    ),
    *SILO_STATISTICS,
    *under((of_two("gradient below the last layer"),), is_unscaled),
    *under((of_two("gradient (at the last layer approximately)"),), is_scaled_by_powers),
    Claim(
        "silo",
        "obfuscated",
        "the other’s gradient obfuscated, by the perturbation of the model alone",
        "{rounds_of_few}, the model changes by its own part and the other’s, so that only the perturbation keeps the "
        "other’s gradient from it: groups of fewer than three expose each other.",
        (has_few_in_a_round, is_scaled),
        (rounds_of_few, if_any),
        attacks=("two-party-exposure",),
        warns=True,
        about="update",
        headline="had the other’s gradient in rounds of two{if_any}, obfuscated by the perturbation alone",
    ),
    COLUMNS_OF_THE_OTHER,
)

CLAIMS = (
    *SERVER,
    SCORES,
    *TABLES,
    COUNTED_FIRST,
    *ABSENT_VALUES,
    *TEST_ROWS,
    *SILO,
    *LISTENERS,
    Claim(
        "reader",
        "unclaimed",
        "a model whose function silos do not hold",
        "Where silos must not hold the function of the model at all, PBPFL is not the way: inference-only silos in an "
        "enclave (BAFFLE) are.",
    ),
    *NOTES,
)
