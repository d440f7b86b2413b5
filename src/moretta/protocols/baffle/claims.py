"""Who learns what under BAFFLE (`moretta.protocols.common.claims`)."""

from __future__ import annotations

from dataclasses import replace

from moretta.protocols.common.claims import Claim, Record, is_in_the_clear, setting, under
from moretta.protocols.common.shared_claims import (
    ABSENT_VALUES,
    COLUMNS_OF_THE_OTHER,
    COUNTED_FIRST,
    DIFFERENCES_OF_TOTALS,
    FROM_THE_SUM,
    HOLDS_THE_MODEL,
    LABELS_OF_OTHERS,
    LISTENERS,
    NOISE,
    NOTES,
    OF_LOSS_DIFFERENCES,
    ROWS_OF_A_ROUND,
    SCORES,
    SILO_STATISTICS,
    TABLES,
    TEST_ROWS,
    around_sums,
    in_the_clear,
    of_two,
    sum_only,
    with_all_but_one,
)

BATCH, OWN, EPOCH, LAYERS = "loss-difference vector", "gradient estimate", "weight change", "linear-layer gradient"
OF_LAYERS = ("own-estimate", "labels-from-head", "gradient-inversion")


def sums_loss_differences(record: Record) -> bool:
    """Whether a round is one batch of each silo along shared directions (the default)."""
    return not sums_weight_changes(record) and not draws_own(record)


def sums_estimates(record: Record) -> bool:
    """Whether a round is one batch of each silo along its own directions (`directions = "own"`)."""
    return not sums_weight_changes(record) and draws_own(record)


def sums_weight_changes(record: Record) -> bool:
    """Whether `local-epochs` is set."""
    return bool(setting(record, "protocol", "local-epochs"))


def draws_own(record: Record) -> bool:
    """Whether `directions = "own"`."""
    return bool(setting(record, "protocol", "directions") == "own")


def moves_all(record: Record) -> bool:
    """Whether all parameters move at once (the default)."""
    return not moves_blocks(record)


def moves_blocks(record: Record) -> bool:
    """Whether `perturb = "blocks"`."""
    return bool(setting(record, "protocol", "perturb") == "blocks")


def sums_layers(record: Record) -> bool:
    """Whether a round is one batch of each silo, whose linear layers move unit by unit (`linear = "activations"`)."""
    by_unit = moves_blocks(record) and setting(record, "protocol", "linear") == "activations"
    return by_unit and not sums_weight_changes(record)


def sums_statistics(record: Record) -> bool:
    """Whether BatchNorm's statistics are summed (`batch-statistics`)."""
    return bool(setting(record, "protocol", "batch-statistics"))


def shares_directions(record: Record) -> bool:
    """Whether directions follow from a seed that all roles share (the default)."""
    return not draws_own(record)


def _sums(upload: str, masked: str = "server-and-silos") -> tuple[Claim, ...]:
    """Return what silos show of an upload. masked: the attack on masked words; by default one that BAFFLE has not."""
    clear = replace(in_the_clear(upload), attacks=OF_LOSS_DIFFERENCES, shared=False)
    return (
        clear,
        replace(sum_only(upload), attacks=(masked,), shared=False),
        with_all_but_one(upload),
        *around_sums(upload),
    )


def _of_layers() -> tuple[Claim, ...]:
    """Return what silos show of linear layers beside all that they show of others."""
    clear = replace(in_the_clear(LAYERS), attacks=OF_LAYERS, shared=False)
    masked = replace(sum_only(LAYERS), place="full")
    return under((clear, masked, with_all_but_one(LAYERS), FROM_THE_SUM), sums_layers)


CLAIMS = (
    *under(_sums(BATCH, "loss-differences"), sums_loss_differences),
    replace(in_the_clear(OWN), where=(is_in_the_clear, sums_estimates), attacks=("own-estimate",), shared=False),
    *(replace(claim, place="full") for claim in under(_sums(OWN)[1:], sums_estimates)),
    *(replace(claim, place="full") for claim in under(_sums(EPOCH), sums_weight_changes)),
    *_of_layers(),
    Claim(
        "server",
        "learns",
        "the silos’ gradient of each linear layer, as under FedSGD: it has no noise of directions, only the finite "
        "differences’ error",
        "The sum has the silos’ gradient of each linear layer, as under FedSGD, without noise of directions.",
        (sums_layers,),
        attacks=("own-estimate", "labels-from-head", "gradient-inversion-of-sum"),
        place="brief",
        about="sum",
    ),
    Claim(
        "server",
        "learns",
        "an estimate of the silos’ gradient, as long as the model, whose error is at most that of all silos’ "
        "directions together",
        "The sum is an estimate of the silos’ gradient, as long as the model, with at most the error of all silos’ "
        "directions together.",
        (sums_estimates,),
        attacks=("own-estimate",),
        about="sum",
    ),
    Claim(
        "server",
        "not given",
        "the directions, which each silo draws from its own secret",
        "Is not given the directions, which each silo draws from its own secret; over rounds that hides nothing of the "
        "gradient.",
        (draws_own,),
        rests_on="the tests of runs (`tests/protocols/baffle/test_baffle_trains.py`)",
        about="model",
    ),
    Claim(
        "server",
        "learns",
        "the silos’ gradient as far as it lies in the span of the directions, K numbers of it a round",
        "With the directions, which it knows, the sum gives the silos’ gradient as far as it lies in their span: K "
        "numbers of it a round.",
        (sums_loss_differences, moves_all),
        attacks=OF_LOSS_DIFFERENCES,
        place="front",
        about="sum",
    ),
    Claim(
        "server",
        "learns",
        "of each block of layers that has directions the silos’ gradient as far as it lies in their span, a number of "
        "it a move",
        "With the moves of a block of layers, which it knows, the sum gives the silos’ gradient of the block as far as "
        "it lies in their span: a number of it a move.",
        (sums_loss_differences, moves_blocks),
        attacks=OF_LOSS_DIFFERENCES,
        about="sum",
    ),
    Claim(
        "server",
        "learns",
        "loss differences that can be told from those of noise: that they look alike protects nothing",
        where=(sums_loss_differences,),
        attacks=("loss-differences",),
        place="brief",
        about="sum",
    ),
    Claim(
        "server",
        "not given",
        "the choice of the directions, as each role commits itself before it sees another’s part",
        where=(shares_directions,),
        attacks=("seed-choosing-server",),
        about="model",
    ),
    Claim(
        "server",
        "learns",
        "the mean and variance of each BatchNorm’s inputs over the silos’ batches",
        "Has the mean and variance of each BatchNorm’s inputs, of all silos’ batches together.",
        (sums_statistics,),
        about="statistics",
    ),
    Claim(
        "server",
        "learns",
        "the mean and variance of each BatchNorm’s inputs of each silo’s batch by itself",
        "Has those of each silo’s batch by itself, as uploads are in the clear.",
        (is_in_the_clear, sums_statistics),
        about="statistics",
    ),
    Claim("server", "learns", "the silos’ mean loss", about="statistics"),
    HOLDS_THE_MODEL,
    NOISE,
    ROWS_OF_A_ROUND,
    DIFFERENCES_OF_TOTALS,
    SCORES,
    *TABLES,
    COUNTED_FIRST,
    *ABSENT_VALUES,
    *TEST_ROWS,
    Claim(
        "silo",
        "learns",
        "the true model, every round, which it runs forward only, and all directions",
        "Receives the model itself, every round; runs it forward only, and knows all directions.",
        (shares_directions,),
        attacks=("membership-inference",),
        place="front",
        about="model",
        headline="received the model itself in every round",
    ),
    Claim(
        "silo",
        "learns",
        "the true model, every round, which it runs forward only, and its own directions alone",
        "Receives the model itself, every round; runs it forward only, and knows its own directions alone.",
        (draws_own,),
        attacks=("membership-inference",),
        about="model",
        headline="received the model itself in every round",
    ),
    LABELS_OF_OTHERS,
    *SILO_STATISTICS,
    *under((of_two(BATCH),), sums_loss_differences),
    *under((of_two(OWN),), sums_estimates),
    *under((of_two(LAYERS),), sums_layers),
    *under((of_two(EPOCH),), sums_weight_changes),
    COLUMNS_OF_THE_OTHER,
    *LISTENERS,
    *NOTES,
)
