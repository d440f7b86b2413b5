"""Who learns what under BAFFLE (`moretta.protocols.common.claims`)."""

from __future__ import annotations

from dataclasses import replace

from moretta.protocols.common.claims import Claim, Record, setting, under
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

BATCH, EPOCH = "loss-difference vector", "weight change"


def sums_loss_differences(record: Record) -> bool:
    """Whether a round is one batch of each silo (the default)."""
    return not setting(record, "protocol", "local-epochs")


def sums_weight_changes(record: Record) -> bool:
    """Whether `local-epochs` is set."""
    return not sums_loss_differences(record)


def _sums(upload: str) -> tuple[Claim, ...]:
    return in_the_clear(upload), sum_only(upload), with_all_but_one(upload), *around_sums(upload)


CLAIMS = (
    *under(_sums(BATCH), sums_loss_differences),
    *(replace(claim, place="full") for claim in under(_sums(EPOCH), sums_weight_changes)),
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
        attacks=("seed-choosing-server",),
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
        attacks=("membership-inference",),
        place="front",
    ),
    LABELS_OF_OTHERS,
    *SILO_STATISTICS,
    *under((of_two(BATCH),), sums_loss_differences),
    *under((of_two(EPOCH),), sums_weight_changes),
    COLUMNS_OF_THE_OTHER,
    *LISTENERS,
    *NOTES,
)
