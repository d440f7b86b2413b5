"""Who learns what under CGD: the aggregator is the server of these claims, participants are silos."""

from functools import partial

from moretta.protocols.common import claims as shared
from moretta.protocols.common.claims import Claim, Condition, Record, Word, is_on, server, setting, silo, under

DERIVED = "the derivation in `docs/alignment.md`"


# -- conditions and words ----------------------------------------------------------------------------------------------


def has_pairs(record: Record) -> bool:
    """Return whether only two participants share some layers, by the warnings of a run."""
    return any("nobody else" in warning for warning in record.get("warnings", ()))


is_simulated = Condition(
    "the engine is a simulation (`fused`, `exact-ring`)",
    lambda run: setting(run, "engine", "name") in ("fused", "exact-ring"),
)
is_blind = Condition(
    "the aggregator is blind (the default)",
    lambda run: shared.is_summed(run) and setting(run, "protocol", "blind") is not False,
)
is_seeing = Condition("`blind = false`", lambda run: shared.is_summed(run) and not is_blind(run))
reads_sums = Condition("the aggregator is not blind", lambda run: not is_blind(run))
splits_columns = Condition(
    "columns are split", lambda run: bool(setting(run, "data", "grid") or setting(run, "data", "columns"))
)
splits_rows = Condition("no columns are split", lambda run: not splits_columns(run))
is_independent = Condition(
    "columns are split in the independent form",
    lambda run: splits_columns(run) and setting(run, "protocol", "vertical") == "independent",
)
is_joint = Condition("columns are split in the joint form", lambda run: splits_columns(run) and not is_independent(run))
is_aligned = is_on("protocol", "align", "the run aligns partners' rows (`align = true`)")
has_groups_of_two = Condition(
    "some sum is of two participants",
    lambda run: shared.has_few_in_a_round(run) or (not shared.records_sums(run) and has_pairs(run)),
)
shares_hidden_biases = shared.equals("protocol", "hidden-bias", "shared")
is_regularised = is_on("protocol", "weight-decay", "`weight-decay` is above 0")


def _d_alone(record: Record) -> str:
    """Return how well D alone predicts, and the worst confined model, if the run reports it."""
    test = record["test"]
    figures = test.get("displacement") or {}
    if figures.get("accuracy") is not None and test.get("accuracy") is not None:
        of_d, of_the_worst = f"{100 * figures['accuracy']:.1f} %", f"{100 * test['accuracy']:.1f} %"
    elif figures.get("mse") is not None and test.get("mse") is not None:
        of_d, of_the_worst = f"an mse of {figures['mse']:.3g}", f"{test['mse']:.3g}"
    else:
        return ""
    return f" (on this run’s test rows {of_d}, the worst confined model {of_the_worst})"


d_alone = Word("d_alone", "", _d_alone)
in_pairs = Word("in_pairs", "", lambda run: "" if has_pairs(run) else shared.if_any(run))


# -- claims ------------------------------------------------------------------------------------------------------------


SIMULATED = tuple(
    Claim(role, "rows", (is_simulated,), alone=True).says(
        "sees everything, as one process ran all participants|: these figures are a simulation’s"
    )
    for role in ("server", "silo")
)

AGGREGATOR = (
    shared.in_the_clear("gradient"),
    server("model", (shared.is_in_the_clear,), kind="not given").says("holds no model|"),
    *under((shared.sum_only("gradient"),), is_seeing, place="full"),
    server("model", (is_seeing,), place="brief").says(
        "sees D, the sum of all steps, which by itself is a model|, by adding up the sums, but holds no participant’s "
        "start"
    ),
    server("sum", (is_blind,), kind="not given", place="front").says(
        "relays sums that it cannot read|: it adds up the participants’ parts, each blinded under a key of its group. "
        "It holds no model",
        rests_on="views that hold only ring words (`tests/protocols/cgd/test_cgd_privacy.py`), and the tests of "
        "secure aggregation (`tests/secure_aggregation`)",
    ),
    server("traffic", (is_blind,), place="front").says(
        "sees who takes part in what and when, how many rows an upload is about, and how many a group has"
    ),
    *under((shared.FROM_THE_SUM,), is_seeing),
    shared.with_all_but_one("gradient"),
    *shared.AROUND_SUMS,
    *under((shared.ROWS_OF_A_ROUND, shared.DIFFERENCES_OF_TOTALS), reads_sums),
    *under((shared.COLUMNS_ALONE,), is_blind),
    Claim("server and silos", "rows", kind="not given", silent=True).says(
        "is given no key of a group or row to which the colluding participant does not belong, and no difference of "
        "two z of one take, which would be raw features. This holds for one participant, with an aggregator that does "
        "not follow the protocol",
        assumes="a roster; the grid that all received",
        rests_on="attacks in `tests/protocols/cgd/test_cgd_attacks.py`",
    ),
    server("statistics", (*shared.SCORES.where, is_blind), kind="not given").says(
        "relays the scores of the participants’ models on rows that they hold back, and cannot read them; they can"
    ),
    *under((shared.SCORES,), reads_sums),
)

PARTICIPANT = (
    silo("model", kind="not given", place="front").says(
        "holds a confined model that no other participant sees|",
        assumes="no iterate leaks",
        rests_on="messages that hold nobody else’s start (`tests/protocols/cgd/test_cgd_privacy.py`)",
    ),
    silo("sum", attacks=("confined-inversion", "two-party-exposure"), place="brief").says(
        "has the sum of the others’ gradients, for the layers that it shares, but not another’s rows where the sum is "
        "of many rows. It does not have the gradient of one other where the sum is of two or more",
        assumes="starts that lie far apart (delta)",
    ),
    silo("model", attacks=("displacement-alone", "outsider-displacement"), words=(d_alone,), place="front").says(
        "knows D, the sum of all steps, which by itself is a model|, of the layers that it shares: D can predict "
        "better than confined models{d_alone}. Confinement hides a participant’s start from the others, not a good "
        "model"
    ),
    silo("sum", (is_regularised,)).says(
        "learns as much of the gradients as without the regulariser, to within weight-decay times the mean of all "
        "starts. The regulariser adds to a sum weight-decay times D, which the silo knows, and times that mean",
        rests_on="the derivation in `docs/cgd.md`",
    ),
    silo("model", (shares_hidden_biases,)).says(
        "knows everybody’s hidden biases in every round by D, as does anyone with the run file and D. They begin at "
        "one vector, which follows from the seed in the run file. Only weights and output biases are confined",
        rests_on="the starts that `tests/protocols/cgd/test_start.py` compares",
    ),
    silo("model").says("learns all iterates of another’s model, earlier and later, if one of them leaks"),
    *under((shared.LABELS_OF_OTHERS,), splits_rows),
    silo("statistics", attacks=("second-moments",), silent=True).says(
        "can work out X'X of the others’ rows in linear regression, where the paper says that sums reveal nothing",
        assumes="a linear model under squared error, full batches, enough rounds",
    ),
    silo("rows", (is_independent,)).says("holds the labels of its rows, whichever others hold columns of them|"),
    Claim("silos together", "rows", (is_joint,), ("raw-features",), place="brief").says(
        "can work out raw features of the rows that they share|: the holder of a row’s labels sees the sum of the "
        "parts of its first layer’s values in every round. With D of all columns, which one member of each group has, "
        "these sums give the row’s raw features after as many rounds as there are columns for each unit of the first "
        "layer, and one more"
    ),
    silo("rows", (is_joint,), silent=True).says(
        "can work out the inner products X X' of the others’ rows, if it holds the labels in a grid of a single row",
        rests_on="the derivation in `docs/cgd.md`",
    ),
    silo("rows", (is_joint,), ("labels-from-delta",), place="brief").says(
        "can group its rows by label without holding the labels|: it receives the loss’s derivative at the first layer "
        "for each of its rows, and these derivatives fall into clusters"
    ),
    silo("update", (has_groups_of_two,), ("two-party-exposure",), words=(in_pairs,)).says(
        "can work out the other’s gradient where a sum is of two participants{in_pairs}|, as the sum minus its own: "
        "groups of fewer than three expose each other"
    ),
    *shared.SILO_STATISTICS,
)

aligned = partial(silo, where=(is_aligned,))
ALIGNMENT = (
    server("ids", (is_aligned,), ("alignment-dictionary",), kind="not given").says(
        "relays the lists of ids by which two participants align their rows, sealed for these two. It reads neither "
        "ids nor the points that represent them: a dictionary finds none",
        assumes="neither of the two that align colludes with it; a roster; and where lists travel unsealed, between "
        "files, the decisional Diffie-Hellman assumption on Curve25519",
    ),
    server("traffic", (is_aligned,)).says(
        "sees the length of each participant’s list of ids, which is its number of rows unless `align-pad-to` pads "
        "it. It also sees the number of rows that the holders of a row share",
        rests_on="the lengths that `tests/protocols/cgd/test_cgd_alignment.py` compares",
    ),
    aligned("ids", attacks=("alignment-membership",)).says(
        "learns which of its own ids the others have|, where those others hold parts of the same row, and for each id "
        "the smaller number of rows"
    ),
    aligned("traffic").says(
        "sees the lengths of the lists of those that it aligns with: their numbers of rows, unless lists are padded",
        rests_on="the steps that an alignment keeps (`tests/data/test_alignment.py`)",
    ),
    aligned("ids").says(
        "learns, in rows of three holders and more, which ids the holder of the labels shares with it, even ids that a "
        "third lacks. The holder of the labels aligns with each of the others in turn, and learns this of each before "
        "the last, among the ids left until then",
        rests_on=DERIVED,
    ),
    aligned("ids").says(
        "can learn whether a partner has ids for which it has no rows itself, if it lists them against the protocol. "
        "It tests as many as its list is long, once a run, bounded by a message’s size alone; another run tests others",
        rests_on=DERIVED,
    ),
    aligned("traffic").says(
        "may learn roughly how many places of a partner’s list are padding, from the time that its answer takes",
        rests_on=DERIVED,
    ),
    aligned("ids", kind="not given").says(
        "is not given ids of another’s rows that are not in its own list",
        assumes="the decisional Diffie-Hellman assumption on Curve25519",
        rests_on="a dictionary without the other’s secret finds none (`tests/audit/test_alignment_attacks.py`)",
    ),
)

CLAIMS = (
    *AGGREGATOR,
    *PARTICIPANT,
    *ALIGNMENT,
    *SIMULATED,
    Claim("outsider", "model", attacks=("outsider-displacement",), silent=True).says(
        "can have a model, from D and the architecture, if D leaks", assumes="D leaks, or the relay is not blind"
    ),
    *shared.OF_ALL_RUNS,
)
