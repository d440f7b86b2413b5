"""Who learns what under BAFFLE (`moretta.protocols.common.claims`)."""

from __future__ import annotations

from dataclasses import replace

from moretta.protocols.common.claims import Claim, Record, is_in_the_clear, setting, under
from moretta.protocols.common.shared_claims import (
    ABSENT_VALUES,
    COLUMNS_OF_THE_OTHER,
    COUNTED_FIRST,
    DIFFERENCES_OF_TOTALS,
    LABELS_OF_OTHERS,
    LISTENERS,
    NOISE,
    NOTES,
    OF_LOSS_DIFFERENCES,
    ROWS_OF_A_ROUND,
    SCORES,
    SILO_STATISTICS,
    TEST_ROWS,
    around_sums,
    in_the_clear,
    of_two,
    sum_only,
    with_all_but_one,
)

BATCH, OWN, EPOCH = "loss-difference vector", "gradient estimate", "weight change"


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


def sums_statistics(record: Record) -> bool:
    """Whether BatchNorm's statistics are summed (`batch-statistics`)."""
    return bool(setting(record, "protocol", "batch-statistics"))


def shares_directions(record: Record) -> bool:
    """Whether directions follow from a seed that all roles share (the default)."""
    return not draws_own(record)


def _sums(upload: str) -> tuple[Claim, ...]:
    return in_the_clear(upload), sum_only(upload), with_all_but_one(upload), *around_sums(upload)


CLAIMS = (
    *under(_sums(BATCH), sums_loss_differences),
    replace(in_the_clear(OWN), where=(is_in_the_clear, sums_estimates), attacks=("own-estimate",), shared=False),
    *(replace(claim, place="full") for claim in under(_sums(OWN)[1:], sums_estimates)),
    *(replace(claim, place="full") for claim in under(_sums(EPOCH), sums_weight_changes)),
    Claim(
        "server",
        "learns",
        "an estimate of the silos’ gradient, as long as the model, whose error is that of all silos’ directions "
        "together",
        "The sum is an estimate of the silos’ gradient, as long as the model, with the error of all silos’ directions "
        "together.",
        (sums_estimates,),
        attacks=("own-estimate",),
    ),
    Claim(
        "server",
        "not given",
        "the directions, which each silo draws from its own secret",
        "Is not given the directions, which each silo draws from its own secret; over rounds that hides nothing of the "
        "gradient.",
        (draws_own,),
        rests_on="the tests of runs (`tests/protocols/baffle/test_baffle_trains.py`)",
    ),
    Claim(
        "server",
        "learns",
        "the silos’ gradient as far as it lies in the span of the directions, K numbers of it a round",
        "With the directions, which it knows, the sum gives the silos’ gradient as far as it lies in their span: K "
        "numbers of it a round.",
        (sums_loss_differences,),
        attacks=OF_LOSS_DIFFERENCES,
        place="front",
    ),
    Claim(
        "server",
        "learns",
        "loss differences that can be told from those of noise: that they look alike protects nothing",
        where=(sums_loss_differences,),
        attacks=("loss-differences",),
        place="brief",
    ),
    Claim(
        "server",
        "not given",
        "the choice of the directions, as each role commits itself before it sees another’s part",
        where=(shares_directions,),
        attacks=("seed-choosing-server",),
    ),
    Claim(
        "server",
        "learns",
        "the mean and variance of each BatchNorm’s inputs over the silos’ batches",
        "Has the mean and variance of each BatchNorm’s inputs, of all silos’ batches together.",
        (sums_statistics,),
    ),
    Claim(
        "server",
        "learns",
        "the mean and variance of each BatchNorm’s inputs of each silo’s batch by itself",
        "Has those of each silo’s batch by itself, as uploads are in the clear.",
        (is_in_the_clear, sums_statistics),
    ),
    Claim("server", "learns", "the silos’ mean loss"),
    Claim("server", "learns", "the true model", "Holds the model.", place="front"),
    NOISE,
    ROWS_OF_A_ROUND,
    DIFFERENCES_OF_TOTALS,
    SCORES,
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
    ),
    Claim(
        "silo",
        "learns",
        "the true model, every round, which it runs forward only, and its own directions alone",
        "Receives the model itself, every round; runs it forward only, and knows its own directions alone.",
        (draws_own,),
        attacks=("membership-inference",),
    ),
    LABELS_OF_OTHERS,
    *SILO_STATISTICS,
    *under((of_two(BATCH),), sums_loss_differences),
    *under((of_two(OWN),), sums_estimates),
    *under((of_two(EPOCH),), sums_weight_changes),
    COLUMNS_OF_THE_OTHER,
    *LISTENERS,
    *NOTES,
)
