"""What a run hid from whom: plain sentences by role, and whether an attack has tested each.

The sentences are those of the design's sections "What it hides, honestly", and of the protocols' own "Who learns
what", put plainly. Which of them hold depends on the settings of the run and on what it recorded. A protocol or a
scheme without such a section gets a sentence saying so. A value is called obfuscated where the design calls it
obfuscated; stronger words are for what a proof or an accountant supports.

A sentence that attacks of `moretta.audit` test stands with their names; where the run was audited, what they came to is
its evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moretta.protocols.common.accountant import WITH_NOISE_OF
from moretta.report.folder import Attacked, RunRecord
from moretta.report.table import MISSING

Role = Literal["Server", "A silo", "An eavesdropper"]

_OF_AN_UPLOAD = ("gradient-inversion", "labels-from-head")
_OF_A_MASK = ("gradient-inversion",)
_OF_A_SUM = ("gradient-inversion-of-sum", "labels-from-head")
_OF_A_NOISY_MODEL = ("update-direction", "lemma-6-distinguisher", "lemma-7-hit-rate")
_OF_LOW_BITS = ("scales-from-low-bits",)
_OF_LOSS_DIFFERENCES = ("loss-differences", "k-rank-projection", "seed-choosing-server")

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

UNTESTED = "not yet tested by an attack on this run"


@dataclass(frozen=True)
class Statement:
    """What one role sees or can work out. tested: a phrase for each attack that tested it on this run."""

    role: Role
    text: str
    tested: tuple[str, ...] = ()

    @property
    def evidence(self) -> str:
        """How well the sentence is supported, in words."""
        if not self.tested:
            return UNTESTED
        return f"tested on this run by {'; by '.join(self.tested)}"


def _came_to(one: Attacked) -> str:
    score, chance = (MISSING if value is None else f"{value:.3g}" for value in (one.score, one.chance))
    return f"{one.attack}: score {score}, chance {chance}, {'it succeeded' if one.succeeded else 'this attack failed'}"


@dataclass(frozen=True)
class _Tested:
    """A sentence that attacks test. attacks: by the names that they have in an audit."""

    text: str
    attacks: tuple[str, ...]


_Sentence = str | _Tested
"""A sentence, where it is a plain one, is tested by no attack that there is."""


def _tested(text: str, *attacks: str) -> _Tested:
    return _Tested(text, attacks)


def privacy_statements(record: RunRecord) -> tuple[Statement, ...]:
    """The sentences that hold for the protocol, loss, model and aggregation of this run, the server's first."""
    server: Sequence[_Sentence]
    silo: Sequence[_Sentence]
    match record.protocol:
        case "pbpfl":
            server, silo = _pbpfl_server(record), _pbpfl_silo(record)
        case "fedsgd" | "fedavg":
            upload = "gradient" if record.protocol == "fedsgd" else "weight change"
            server = [*_sum(record, upload), "Holds the model.", *_noise(record), *_server_statistics(record)]
            silo = [
                _tested("Receives the model itself, every round.", "membership-inference"),
                *(_others_labels(record) if record.protocol == "fedsgd" else []),
                *_silo_statistics(record),
                *_two_silos(record, upload),
            ]
        case "local":
            server = [
                "Receives each silo’s loss and number of rows in every round, and its whole model at the end, for the "
                "comparison; neither its rows nor its gradients.",
                *_server_statistics(record),
            ]
            statistics = _silo_statistics(record)
            others = "." if statistics else ", and of any other silo at most its name and public key."
            silo = [f"Sees its own rows and its own model{others}", *statistics, *_two_silos(record, "")]
        case "centralised":
            server = ["Holds every row of every silo, and the model: nothing is hidden from it."]
            silo = ["Hands over its rows; nothing of them is hidden from whoever trains on them."]
        case "cgd" if record.setting("engine", "name") in ("fused", "exact-ring"):
            server = silo = [
                "One process played all participants, so nothing was hidden from it: these figures are a simulation’s."
            ]
        case "cgd":
            server, silo = _cgd_aggregator(record), _cgd_participant(record)
        case "baffle":
            server, silo = _baffle_server(record), _baffle_silo(record)
        case other:
            server = silo = [f"This version of the report has no sentence about the protocol {other}."]
    return (
        *(_statement(record, "Server", said) for said in (*server, *_server_scores(record))),
        *(_statement(record, "A silo", said) for said in silo),
        _statement(record, "An eavesdropper", _eavesdropper(record)),
    )


def _statement(record: RunRecord, role: Role, said: _Sentence) -> Statement:
    if isinstance(said, str):
        return Statement(role, said)
    came_to = () if record.audit is None else record.audit.attacks
    return Statement(role, said.text, tuple(_came_to(one) for one in came_to if one.attack in said.attacks))


def reading_notes(record: RunRecord) -> tuple[str, ...]:
    """What a reader of the sentences has to know besides; neither a claim nor in need of a test."""
    notes = []
    if record.protocol == "pbpfl":
        notes.append(
            "Where silos must not hold the function of the model at all, PBPFL is not the way: inference-only silos in "
            "an enclave (BAFFLE) are."
        )
    if record.setting("engine", "name") == "in-process":
        notes.append(
            "All roles of this run were played by one process on one machine; “sees” means the messages of a role, "
            "not the memory of that machine, whose owner sees everything."
        )
    return tuple(notes)


def _noise(record: RunRecord) -> Sequence[_Sentence]:
    """What noise on the gradients bounds, where there is any (DP-SGD)."""
    epsilon, delta = record.facts.get("epsilon"), record.facts.get("delta")
    if epsilon is None or not isinstance(delta, float):
        return []
    bound = _figure(epsilon)
    said = (
        f"All models of this run together are (ε, δ)-differentially private with ε = {bound} and δ = {delta:.0e} for "
        "one example added or removed at one silo, towards the server and whoever gets the model"
    )
    if (others := record.facts.get("epsilon_to_silos")) is not None:
        said += f"; towards another silo, which can take its own noise off, with ε = {_figure(others)}"
    left_out = record.facts.get("epsilon_leaves_out")
    return [f"{said}.{_what_epsilon_assumes(record)}" + (f" Not counted: {left_out}." if left_out else "")]


def _what_epsilon_assumes(record: RunRecord) -> str:
    """Say how many noised sums epsilon is about, how many silos' noise it takes to be in each, and what fewer give."""
    releases, silos = record.facts.get("releases"), record.facts.get("noise_silos")
    if not isinstance(releases, float) or not isinstance(silos, float):
        return ""
    said = f" Counted are {releases:.0f} noised sums that may have been opened"
    if silos <= 1:
        return f"{said}; each silo adds all of the noise."
    said += f", and assumed is that the noise of {silos:.0f} silos in each is unknown to who looks"
    found = {key.removeprefix(WITH_NOISE_OF): value for key, value in record.facts.items() if WITH_NOISE_OF in key}
    fewer = [f"of {silos} with ε = {_figure(value)}" for silos, value in found.items()]
    return f"{said}{'; where it is that ' if fewer else ''}{', '.join(fewer)}."


def _figure(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _cgd_aggregator(record: RunRecord) -> Sequence[_Sentence]:
    first, *keys = _sum(record, "gradient")
    if not _is_summed(record):
        return [first, "Holds no model.", *_server_statistics(record)]
    if record.setting("protocol", "blind") is False:
        said = [first, "Sees D, the sum of all steps, by adding the sums up; holds no participant’s start.", *keys]
        return [*said, *_server_statistics(record)]
    said = [
        "Adds up and relays sums that it cannot read, as each participant’s part is blinded under a key of its group; "
        "holds no model. Sees who takes part in what, when, and how many rows an upload is about.",
    ]
    statistics = [f"Learns {which}."] if (which := _standardised_columns(record)) else []
    return [*said, *keys, *statistics]


def _cgd_participant(record: RunRecord) -> Sequence[_Sentence]:
    said = [
        "Holds its own confined model, which no other participant sees.",
        _tested(
            "Has the sum of the others’ gradients, for the layers that it shares; neither another’s rows, where the "
            "sum is of many, nor, where it is of two or more others, the gradient of one.",
            "confined-inversion",
            "two-party-exposure",
        ),
        *_displacement(record),
    ]
    said.append("One iterate of another’s model, if it leaks, gives all of that one’s iterates, earlier and later.")
    if not (record.setting("data", "grid") or record.setting("data", "columns")):
        said += _others_labels(record)
    else:
        if record.setting("protocol", "vertical") == "independent":
            said.append("Holds the labels of its rows, whoever else holds columns of them.")
        else:
            said += [
                _tested(
                    "Whoever holds a row’s labels sees the sum of the parts of its first layer’s values in every "
                    "round. With D of all columns, which one member of each column group has, that gives the row’s raw "
                    "features after as many rounds as there are columns for each unit of the first layer, and one "
                    "more.",
                    "raw-features",
                ),
                _tested(
                    "A participant without labels receives the loss’s derivative at the first layer for each of its "
                    "rows, by which rows fall into clusters of like labels.",
                    "labels-from-delta",
                ),
            ]
    if record.silos == 2 or any("nobody else" in warning for warning in record.warnings):
        said.append(
            _tested(
                "Where two participants share layers, each works out the other’s gradient from the sum and its own: "
                "groups of fewer than three expose each other.",
                "two-party-exposure",
            )
        )
    return [*said, *_silo_statistics(record)]


def _displacement(record: RunRecord) -> Sequence[_Sentence]:
    """What a participant can do with D, with this run's own figure where it has one."""
    test = record.test
    alone = ""
    if test.displacement is not None and test.displacement.accuracy is not None and test.accuracy is not None:
        alone = (
            f" (on this run’s test rows {100 * test.displacement.accuracy:.1f} %, the worst confined model "
            f"{100 * test.accuracy:.1f} %)"
        )
    elif test.displacement is not None and test.displacement.mse is not None and test.mse is not None:
        alone = (
            f" (on this run’s test rows an mse of {test.displacement.mse:.3g}, the worst confined model {test.mse:.3g})"
        )
    return [
        _tested(
            "Knows D, the sum of all steps, of the layers that it shares; D alone is a model, and can predict better "
            f"than confined ones{alone}: confinement keeps a participant’s start from the others, not a good model.",
            "displacement-alone",
            "outsider-displacement",
        )
    ]


def _pbpfl_server(record: RunRecord) -> Sequence[_Sentence]:
    said = [*_sum(record, "upload"), "Holds the true model.", *_server_statistics(record)]
    if _cross_entropy(record):
        said.append(
            _tested(
                "In the cross-entropy exchange, sees each sample of each silo’s batch by itself: its softmax, and "
                "alpha, the sum of the last layer’s inputs.",
                "server-softmax",
            )
        )
    return said


def _pbpfl_silo(record: RunRecord) -> Sequence[_Sentence]:
    parts = record.setting("protocol", "partitions")
    here = f" (here m = {parts})" if isinstance(parts, int) else ""
    said = [
        *_received_model(record),
        _tested(
            f"The offset of the last layer has m unknowns{here}, and a silo that has labels fits them by least squares "
            "(to a relative error of 10⁻⁴ after 20 rounds on the digits data).",
            "gamma-least-squares",
            "silos-together",
        ),
    ]
    if _cross_entropy(record):
        if record.setting("protocol", "variant") == "paper":
            softmax = (
                "Because probabilities sum to one, works out the true softmax exactly once its batch has at least m "
                "samples"
            )
        else:
            softmax = "Is handed the true softmax of each sample of its batch, whatever the size of the batch"
        said.append(
            _tested(
                f"{softmax}, and then the differences between the last layer’s offsets from a single sample: with the "
                "public direction they give the whole offset where m is below the number of outputs.",
                "softmax-from-sum",
                "offset-from-softmax",
            )
        )
    said.append(_tested("The released model is the true function.", "canonical-form", "membership-inference"))
    said += _others_labels(record)
    follow = record.setting("run", "seed") is not None and record.setting("protocol", "warm-start") is None
    if follow and record.setting("engine", "name") != "flare":  # there they are drawn from the operating system
        said.append(
            _tested(
                "The initial weights follow from the training seed in the run file, so whoever has the file knows the "
                "true model of round 1.",
                "training-seed",
            )
        )
    return [*said, *_silo_statistics(record), *_two_silos(record, "")]


def _received_model(record: RunRecord) -> Sequence[_Sentence]:
    free, forced, powers = _fact(record, "free_scales"), _fact(record, "forced_to_one"), _powers_of_two(record)
    said: list[_Sentence]
    if free == 0:
        order = "" if powers else ", at most in another order,"
        said = [
            _tested(
                f"Receives a model of which nothing is scaled: its true parameter values{order} but for the offset of "
                "the last layer.",
                *_OF_A_NOISY_MODEL,
            )
        ]
        seen = None if powers else "the order of their channels"
    elif powers:
        how = "scales" if free is None else f"{free} secret scales"
        said = [
            _tested(
                "Receives a noisy model whose scales are powers of two: below the last layer the sign and the mantissa "
                f"of each parameter value are plain to it, in their place, and only exponents are obfuscated, by {how} "
                "of three values each.",
                *_OF_A_NOISY_MODEL,
            ),
            "As exponents are drawn anew in every round, their averages over rounds give the true ones; how much of "
            "itself a step adds to a weight is plain from two consecutive rounds.",
        ]
        # From how each input's scale changed: one that does not, as nothing below it is scaled, says nothing.
        said.append(
            "Two consecutive rounds also give the offset of the last layer, without labels, where its inputs are "
            "scaled: with it that layer’s weights are known to a fraction of a percent, and its step approximately."
        )
        seen = "powers of two"
    else:
        how = "where a scale is free, and the run does not say where" if free is None else f"by {free} secret scales"
        said = [
            _tested(f"Receives a noisy model: its parameter values are obfuscated {how}.", *_OF_A_NOISY_MODEL),
            _tested(
                "The low bits of those values are not to tell the scales: the server holds weights in float64, sends "
                "fewer bits of them, and moved each tensor of the start by about 2⁻²³ of its largest entry. A start "
                "of less than 24 bits, such as ones or weights of eight bits, is not hidden by that.",
                *_OF_LOW_BITS,
            ),
            "Rows of two rounds are matched by their direction, which gives the ratio of their scales. At best one "
            "factor a hidden channel and the order of channels stay hidden for the whole run, to within the spread of "
            "the start, and nothing of them from whoever knows the start.",
        ]
        seen = "the network’s own scaling and permutation symmetry"
    if forced:
        which = "1 weight or bias tensor has" if forced == 1 else f"{forced} weight and bias tensors have"
        said.append(
            f"{which} no free scale, on one side or on both (forced_to_one in result.json says which tensors, and why)."
        )
    exactly = "as they are" if seen is None else f"up to {seen}"
    plain = f"Sees the hidden layers {exactly}, so the function that they compute is plain to it."
    return [*said, _tested(plain, "update-direction")]


def _powers_of_two(record: RunRecord) -> bool:
    return record.setting("protocol", "scales") == "powers-of-two"


def _fact(record: RunRecord, name: str) -> int | None:
    """A count that the run states, None where it does not."""
    value = record.facts.get(name)
    return int(value) if isinstance(value, int | float) else None


def _server_statistics(record: RunRecord) -> Sequence[_Sentence]:
    """What the server learns of the silos' rows beside the updates."""
    by_whom = "over all silos" if _is_summed(record) else "of each silo by itself"
    columns = _standardised_columns(record, by_whom)
    if record.protocol == "local":  # of rows it knows more
        return [f"Learns {columns}."] if columns else []
    said = [f"Learns the number of rows that a round uses, {by_whom}{f', and {columns}' if columns else ''}."]
    if record.protocol == "pbpfl":
        said.append(f"Learns the mean and standard deviation of all inputs together and of the targets, {by_whom}.")
    if _is_summed(record) and (record.dropped or _participation(record) < 1):
        said.append("As not every silo was there in every round, differences of totals can give one silo’s rows.")
    return said


def _server_scores(record: RunRecord) -> Sequence[_Sentence]:
    """What the server learns of rows that silos hold back."""
    if not record.setting("data", "score-at-silos"):
        return []
    if record.protocol == "cgd" and _is_summed(record) and record.setting("protocol", "blind") is not False:
        return ["Relays what the participants’ models score on rows that they hold back, and cannot read it; they can."]
    whose = "all silos together" if _is_summed(record) else "each silo by itself"
    return [f"Learns, at the end, how many rows are held back to score models on, and the scores on them, of {whose}."]


def _silo_statistics(record: RunRecord) -> Sequence[_Sentence]:
    """What a silo learns of the others' rows."""
    said = [f"Receives {which}."] if (which := _standardised_columns(record)) else []
    whole_epochs = record.protocol == "fedavg" or bool(record.setting("protocol", "local-epochs"))
    all_rows = record.setting("data", "batch-size") == 0 or whole_epochs
    if all_rows and _is_summed(record) and record.protocol != "local":
        said.append("Is told the number of rows of all silos together.")
    if _participation(record) < 1:
        said.append("Knows which silos take part in each round: they are drawn from the training seed.")
    return said


def _others_labels(record: RunRecord) -> Sequence[_Sentence]:
    """What plain gradient steps of the last layer's bias tell a silo of the others' labels."""
    other_steps = (
        "momentum", "weight-decay", "clip-norm", "dp-noise", "local-epochs", "class-weights", "label-smoothing",
    )  # fmt: skip
    plain = record.setting("protocol", "optimizer") in (None, "sgd")
    plain = plain and record.setting("protocol", "schedule") in (None, "constant")
    if record.silos < 2 or not plain or any(record.setting("protocol", name) for name in other_steps):
        return []
    what = "mean of the other silos’ targets" if record.task == "regression" else "balance of the other silos’ labels"
    told = f"Where the last layer has a bias, its plain gradient steps tell of the {what}."
    return [_tested(told, "silo-property")]


def _standardised_columns(record: RunRecord, by_whom: str = "over all silos") -> str:
    """The statistics with which inputs are standardised, as the object of a sentence; empty where there are none."""
    used = record.setting("data", "standardise")
    if used is False:
        return ""
    where = "" if used else " (if inputs are standardised, as tables are unless the run file says otherwise)"
    return f"the mean and standard deviation of each input column, {by_whom}{where}"


def _baffle_server(record: RunRecord) -> Sequence[_Sentence]:
    upload = _baffle_upload(record)
    said = [*_sum(record, upload)]
    if not record.setting("protocol", "local-epochs"):
        said.append(
            _tested(
                "With the directions, which it knows, the sum gives the silos’ gradient as far as it lies in their "
                "span: K numbers of it a round.",
                *_OF_LOSS_DIFFERENCES,
            )
        )
    return [*said, "Holds the model.", *_noise(record), *_server_statistics(record)]


def _baffle_silo(record: RunRecord) -> Sequence[_Sentence]:
    return [
        _tested(
            "Receives the model itself, every round; runs it forward only, and knows all directions.",
            "membership-inference",
        ),
        *_others_labels(record),
        *_silo_statistics(record),
        *_two_silos(record, _baffle_upload(record)),
    ]


def _baffle_upload(record: RunRecord) -> str:
    return "weight change" if record.setting("protocol", "local-epochs") else "loss-difference vector"


def _two_silos(record: RunRecord, update: str) -> Sequence[_Sentence]:
    """What a silo works out by subtracting its own part. update: what a pair works out of each other, if anything."""
    if record.silos < 2:
        return []
    said: list[_Sentence] = []
    when = "With two silos" if record.silos == 2 else "In rounds with fewer than three silos"
    if record.protocol == "pbpfl" and _fact(record, "free_scales") == 0:
        update = "gradient below the last layer"  # nothing there differs from the true model but the channels' order
    elif record.protocol == "pbpfl" and _powers_of_two(record):
        update = "gradient (at the last layer approximately)"  # exponents average out
    if _fewest(record) <= 2 and record.protocol == "pbpfl" and not update:
        said.append(
            _tested(
                f"{when}, the model changes by its own part and the other’s, so that only the perturbation keeps the "
                "other’s gradient from it: groups of fewer than three expose each other.",
                "two-party-exposure",
            )
        )
    elif _fewest(record) <= 2 and update:
        said.append(
            _tested(
                f"{when}, works out the other’s {update} from consecutive models and its own: groups of fewer than "
                "three expose each other.",
                "two-party-exposure",
            )
        )
    if record.silos == 2 and _standardised_columns(record):
        said.append(
            "With two silos, the common means and deviations of input columns, less its own part, are those of the "
            "other, up to the ratio of their rows."
        )
    return said


def _fewest(record: RunRecord) -> int:
    """The number of silos in the smallest round."""
    missed = Counter(one.round for one in record.dropped if one.round <= record.rounds)
    least = 2 if _is_summed(record) else 1
    chosen = max(least, round(_participation(record) * record.silos))
    return chosen - max(missed.values(), default=0)


def _participation(record: RunRecord) -> float:
    part = record.setting("run", "participation")
    return float(part) if isinstance(part, int | float) else 1.0


def _cross_entropy(record: RunRecord) -> bool:
    return record.setting("protocol", "loss") == "cross-entropy"


def _is_summed(record: RunRecord) -> bool:
    """Whether the server was kept from each silo's own numbers by some scheme."""
    return record.secure_aggregation is not None and record.secure_aggregation.scheme != "none"


def _sum(record: RunRecord, upload: str) -> Sequence[_Sentence]:
    used = record.secure_aggregation
    if used is None or used.scheme == "none":
        alone = f"Sees the {upload} of each silo by itself: no secure aggregation was used."
        return [_tested(alone, *_OF_AN_UPLOAD, *_OF_LOSS_DIFFERENCES)]
    if used.scheme not in ("pairwise", "additive-shares"):
        return [f"This version of the report has no sentence about the aggregation scheme {used.scheme}."]
    ring = f" (modulo 2{str(used.ring_bits).translate(_RAISED)})" if used.ring_bits else ""
    only = f"Sees only the ring sum{ring} of the silos’ {upload}s, not the {upload} of any one of them."
    said: list[_Sentence] = [_tested(only, *_OF_A_MASK)]
    if record.protocol != "baffle":  # which has a sentence of its own about what its sums say
        follows = "What follows from the sum is not hidden, such as the balance of its rows’ labels, and few rows"
        said.append(_tested(f"{follows} themselves.", *_OF_A_SUM))
    together = f"Together with all silos but one it has that one’s {upload}, as the sum less theirs."
    said.append(_tested(together, "server-and-silos"))
    if any(one.reason.startswith("late") for one in record.dropped):
        what = "a sum of shares" if used.scheme == "additive-shares" else "shares for which a round was repeated"
        said.append(
            f"Received answers of silos that it had given up as late: where such an answer was {what}, it can work out "
            f"that silo’s {upload} from the sum with it and the repeated one without it."
        )
    if record.setting("secure-aggregation", "weights") == "public":
        said.append("Sees how much each silo’s part weighs: weights were public.")
    if record.setting("secure-aggregation", "roster") is None:
        said.append(
            "Relayed the keys between silos, which took them on trust, as no roster was set: a server that put keys of "
            f"its own in their place could read each {upload}."
        )
    else:
        said.append(
            "Relayed keys that each silo had signed with its identity in the roster: silos refuse one put in its place."
        )
    return said


def _eavesdropper(record: RunRecord) -> str:
    if record.setting("engine", "name") == "in-process":
        return "Nothing travelled over a network in this run; the report says nothing about one."
    if record.setting("engine", "name") == "flare":
        return (
            "The messages of this run travelled by NVIDIA FLARE over TLS with a certificate on either side; the report "
            "says nothing about what someone who listens to the network learns from their lengths and times."
        )
    return "The report says nothing about what someone who listens to the network learns."
