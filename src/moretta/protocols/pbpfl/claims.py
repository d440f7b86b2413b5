"""Who learns what under PBPFL (`moretta.protocols.common.claims`)."""

from moretta.protocols.common import claims as shared
from moretta.protocols.common.claims import Claim, Condition, Record, Word, equals, fact, server, setting, silo, under

SYMMETRY = "the network’s own scaling and permutation symmetry"
OF_A_NOISY_MODEL = ("update-direction", "lemma-6-distinguisher")
OF_A_SERVER = ("server-softmax", "server-segmentation")
OF_A_SOFTMAX = ("softmax-from-sum", "offset-from-softmax")


# -- conditions and words ----------------------------------------------------------------------------------------------


has_powers_of_two = equals("protocol", "scales", "powers-of-two")
is_unscaled = Condition(
    "the model has no free scale (`moretta check` says so)", lambda run: fact(run, "free_scales") == 0
)
is_scaled_by_powers = Condition("scales are powers of two", lambda run: not is_unscaled(run) and has_powers_of_two(run))
is_scaled = Condition(
    "scales are continuous (the default) and some are free",
    lambda run: not is_unscaled(run) and not has_powers_of_two(run),
)
has_frozen_parts = Condition("some parameters are frozen", lambda run: bool(fact(run, "frozen")))
has_forced_scales = Condition("some tensors have no free scale", lambda run: bool(fact(run, "forced_to_one")))
returns_the_paper_s_form = equals("protocol", "variant", "paper")
returns_the_softmax = Condition(
    "the server answers with the softmax itself", lambda run: not returns_the_paper_s_form(run)
)
has_ratios = equals("protocol", "exchange", "ratios")
sends_outputs = Condition(
    "silos send their outputs up to a constant a row (the default)", lambda run: not has_ratios(run)
)
hides_softmax_from_server = Condition(
    '`exchange = "ratios"` and there are two classes', lambda run: has_ratios(run) and fact(run, "outputs") == 2
)
shows_softmax_to_server = Condition(
    "silos send outputs (the default), or ratios of three classes or more",
    lambda run: not hides_softmax_from_server(run),
)
starts_from_the_seed = Condition(
    "the first weights follow from the run file's seed: on one machine, without a warm start",
    lambda run: (
        (setting(run, "run", "seed") is not None and setting(run, "protocol", "warm-start") is None)
        and not shared.is_over_machines(run)  # there they are drawn from the operating system
    ),
)


def _by_scales(record: Record) -> str:
    free = fact(record, "free_scales")
    return " where a scale is free, and the run does not say where" if free is None else f" by {free} secret scales"


def _forced(record: Record) -> str:
    count = fact(record, "forced_to_one")
    return "1 weight or bias tensor that has" if count == 1 else f"{count} weight and bias tensors that have"


def _reordered(record: Record) -> str:
    signs = " and with other signs" if fact(record, "free_signs") else ""
    return "" if has_powers_of_two(record) else f", at most in another order{signs},"


def _up_to_what(record: Record) -> str:
    if is_unscaled(record):
        moved = "order and signs" if fact(record, "free_signs") else "order"
        return "as they are" if has_powers_of_two(record) else f"up to the {moved} of their channels"
    return "up to powers of two" if has_powers_of_two(record) else f"up to {SYMMETRY}"


reordered = Word("reordered", _reordered({"facts": {"free_signs": 1}}), _reordered)
by_scales = Word("by_scales", "", _by_scales)
forced = Word("forced", "tensors that have", _forced)
up_to_what = Word("up_to_what", f"up to {SYMMETRY}", _up_to_what)
partitions = Word(
    "partitions",
    "",
    lambda run: f" (here m = {m})" if isinstance(m := setting(run, "protocol", "partitions"), int) else "",
)


# -- claims ------------------------------------------------------------------------------------------------------------


SERVER = (
    *shared.sums("upload"),
    shared.HOLDS_THE_MODEL,
    shared.ROWS_OF_A_ROUND,
    server("statistics", place="brief").says(
        "learns the mean and standard deviation of all inputs together and of the targets, {by_whom}"
    ),
    shared.DIFFERENCES_OF_TOTALS,
    server("rows", (shared.is_cross_entropy, shows_softmax_to_server), OF_A_SERVER, place="front").says(
        "sees the model’s prediction (softmax) for each single training row|, and alpha, the sum of the last layer’s "
        "inputs, in the cross-entropy exchange"
    ),
    server("rows", (shared.is_cross_entropy, hides_softmax_from_server), ("server-softmax",), kind="not given").says(
        "sees two blinded ratios of each training row and alpha, the sum of the last layer’s inputs|, in the "
        "cross-entropy exchange. The ratios blind the row’s softmax over two classes; three classes would show it",
        assumes="the server follows the protocol: one that does not learns a little from each refusal",
    ),
)

RECEIVED = (
    silo("model", (is_unscaled,), OF_A_NOISY_MODEL, words=(reordered,), place="brief").says(
        "receives the true parameter values{reordered} except for the offset of the last layer|: nothing else is scaled"
    ),
    silo("model", (is_scaled_by_powers,), OF_A_NOISY_MODEL, kind="obfuscated", words=(by_scales,), place="brief").says(
        "receives a model in which only the exponents are obfuscated{by_scales}|: below the last layer it sees the "
        "sign and the mantissa of each parameter value in its place, and a scale is a power of two, one of three values"
    ),
    silo("model", (is_scaled_by_powers,)).says(
        "learns the true exponents as averages over rounds, because scales are drawn anew in every round. From two "
        "consecutive rounds it learns a weight’s relative change in a step"
    ),
    silo("model", (is_scaled_by_powers,), place="brief").says(
        "learns from two consecutive rounds, without labels, the offset of the last layer if that layer’s inputs are "
        "scaled; the offset then gives the layer’s weights to a fraction of a percent, and its step approximately"
    ),
    silo("model", (is_scaled,), OF_A_NOISY_MODEL, kind="obfuscated", words=(by_scales,), place="front").says(
        "receives a model whose parameter values are obfuscated{by_scales}|"
    ),
    silo("model", (is_scaled,), ("scales-from-low-bits",), kind="not given").says(
        "cannot read the scales from the low bits of one obfuscated model. The server holds weights in float64, sends "
        "fewer bits of them, and moved each tensor of the start by about 2⁻²³ of its largest entry. That does not hide "
        "a start of fewer than 24 bits, such as ones or weights of eight bits",
        assumes="a start of 24 random bits or more that the silo does not know",
    ),
    silo("model", (is_scaled,), place="brief").says(
        "learns the ratio of the scales of two rounds by matching rows of weights by their direction. At best one "
        "factor per hidden channel and the channels’ order stay hidden. Neither stays hidden from anyone who knows the "
        "first weights"
    ),
    silo("model", (has_forced_scales,), words=(forced,)).says(
        "receives {forced} no free scale, on one side or on both (forced_to_one in result.json says which, and why)"
    ),
    silo("model", (has_frozen_parts,), ("adapter-product", *OF_A_NOISY_MODEL), words=(), place="brief").says(
        "receives frozen parameters as they are, and what no scale can hide of the parameters that train between "
        "them|: for an adapter, the product of its two matrices"
    ),
    silo("model", attacks=("update-direction",), words=(up_to_what,), place="brief").says(
        "sees the hidden layers {up_to_what}, and so knows the function that they compute"
    ),
)

OFFSETS = (
    "from a single sample, the differences between the last layer’s offsets; with the public direction these give the "
    "whole offset where m is below the number of outputs"
)
SOFTMAX = (
    silo("model", (shared.is_cross_entropy, returns_the_paper_s_form, sends_outputs), OF_A_SOFTMAX).says(
        "can work out the true softmax of its own rows|, exactly once its batch has at least m samples, because "
        f"probabilities sum to one; then, {OFFSETS}"
    ),
    silo("model", (shared.is_cross_entropy, has_ratios), OF_A_SOFTMAX).says(
        "can work out the true softmax of its own rows|, each from its own row of the answer to blinded ratios, "
        f"whatever the size of the batch; then, {OFFSETS}"
    ),
    silo("model", (shared.is_cross_entropy, returns_the_softmax), OF_A_SOFTMAX, place="brief").says(
        f"receives the true softmax of its own rows|, whatever the size of the batch; then, {OFFSETS}"
    ),
)

SILO = (
    *RECEIVED,
    silo(
        "model",
        attacks=("gamma-least-squares", "silos-together", "lemma-7-hit-rate"),
        words=(partitions,),
        place="brief",
    ).says(
        "can work out from its labels the m unknowns{partitions} of the last layer’s offset, by least squares, and so "
        "most true predictions of its own rows. In 20 rounds on the digits data the median error was 0.02 % for m = 1 "
        "and 2 % for m = 10",
        assumes="labels, and a few rounds",
    ),
    *SOFTMAX,
    silo("model", attacks=("canonical-form", "membership-inference"), place="front").says(
        "gets a released model that predicts as the true model does|, because it computes the same function"
    ),
    shared.LABELS_OF_OTHERS,
    silo("model", (starts_from_the_seed,), ("training-seed",)).says(
        "knows the true model of round 1, as does anyone who has the run file, whose training seed determines the "
        "initial weights"
    ),
    *shared.SILO_STATISTICS,
    *under((shared.of_two("gradient below the last layer"),), is_unscaled),
    *under((shared.of_two("gradient (at the last layer approximately)"),), is_scaled_by_powers),
    silo("update", (shared.has_few_in_a_round, is_scaled), ("two-party-exposure",), kind="obfuscated", warns=True).says(
        "has the other’s gradient in rounds of fewer than three silos{if_any}, obfuscated only by the perturbation of "
        "the model|: the model changes by its own part and the other’s, and groups of fewer than three expose each "
        "other"
    ),
    shared.COLUMNS_OF_THE_OTHER,
)

CLAIMS = (
    *SERVER,
    *SILO,
    shared.SCORES,
    *shared.TABLES,
    Claim("reader", None, kind="unclaimed").says(
        "PBPFL does not hide the function of the model from silos; no protocol of Moretta does"
    ),
    *shared.OF_ALL_RUNS,
)
