"""Who learns what under FedSGD, FedAvg, FedProx and the two baselines (`moretta.protocols.common.claims`)."""

from __future__ import annotations

from moretta.protocols.common.claims import Claim, Record, chooses_silos, is_standardised, of
from moretta.protocols.common.shared_claims import (
    ABSENT_VALUES,
    COLUMNS_ALONE,
    COLUMNS_OF_ALL,
    COLUMNS_OF_THE_OTHER,
    COUNTED_FIRST,
    DIFFERENCES_OF_TOTALS,
    FROM_THE_SUM,
    HOLDS_THE_MODEL,
    LABELS_OF_OTHERS,
    LISTENERS,
    NOISE,
    NOTES,
    ROWS_OF_A_ROUND,
    ROWS_OF_ALL,
    ROWS_OF_ALL_IN_A_ROUND,
    SCORES,
    TABLES,
    TEST_ROWS,
    WHO_TAKES_PART,
    around_sums,
    in_the_clear,
    of_two,
    sum_only,
    with_all_but_one,
)

FEDSGD, AVERAGED, LOCAL, CENTRALISED = ("fedsgd",), ("fedavg", "fedprox"), ("local",), ("centralised",)
FEDERATED = FEDSGD + AVERAGED


def of_others(record: Record) -> str:
    """Return what a silo that trains alone knows of others, where it is not sent statistics of all."""
    if is_standardised(record) or chooses_silos(record):
        return ""
    return ", and of any other silo at most its name and public key"


def _sums(upload: str) -> tuple[Claim, ...]:
    return (
        in_the_clear(upload),
        sum_only(upload),
        FROM_THE_SUM,
        with_all_but_one(upload),
        *around_sums(upload),
    )


CLAIMS = (
    *of(FEDSGD, _sums("gradient")),
    *of(AVERAGED, _sums("weight change")),
    *of(FEDERATED, (HOLDS_THE_MODEL,)),
    *of(FEDSGD, (NOISE,)),
    *of(
        FEDERATED,
        (
            ROWS_OF_A_ROUND,
            DIFFERENCES_OF_TOTALS,
            Claim(
                "silo",
                "learns",
                "the true model, every round",
                "Receives the model itself, every round.",
                attacks=("membership-inference",),
                place="front",
                about="model",
                headline="received the model itself in every round",
            ),
        ),
    ),
    *of(FEDSGD, (LABELS_OF_OTHERS, COLUMNS_OF_ALL, ROWS_OF_ALL_IN_A_ROUND)),
    *of(AVERAGED, (COLUMNS_OF_ALL, ROWS_OF_ALL)),
    *of(FEDERATED, (WHO_TAKES_PART,)),
    *of(FEDSGD, (of_two("gradient"),)),
    *of(AVERAGED, (of_two("weight change"),)),
    *of(FEDERATED, (COLUMNS_OF_THE_OTHER,)),
    *of(
        LOCAL,
        (
            Claim(
                "server",
                "learns",
                "each silo’s loss and number of rows in every round, and its whole model at the end",
                "Receives each silo’s loss and number of rows in every round, and its whole model at the end, for the "
                "comparison; neither its rows nor its gradients.",
                attacks=("membership-of-local-models",),
                place="front",
                about="update",
                headline="received each silo’s losses and, at the end, its whole model",
            ),
            COLUMNS_ALONE,
            Claim(
                "silo",
                "learns",
                "its own model alone, and of any other silo at most its name and public key, beside common statistics",
                "Sees its own rows and its own model{of_others}.",
                words=(of_others,),
                place="front",
                about="model",
                headline="saw no other silo’s rows or model",
            ),
            COLUMNS_OF_ALL,
            WHO_TAKES_PART,
            COLUMNS_OF_THE_OTHER,
        ),
    ),
    *of(
        CENTRALISED,
        (
            Claim(
                "server",
                "learns",
                "every row of every silo, and the model",
                "Holds every row of every silo, and the model: nothing is hidden from it.",
                place="front",
                about="rows",
                headline="held every row of every silo, so nothing was hidden from it",
            ),
            Claim(
                "silo",
                "learns",
                "nothing, as it hands over its rows, of which nothing is hidden from whoever trains on them",
                "Hands over its rows; nothing of them is hidden from whoever trains on them.",
                place="front",
                headline="handed its rows over",
            ),
        ),
    ),
    SCORES,
    *of(FEDERATED, TABLES),
    COUNTED_FIRST,
    *ABSENT_VALUES,
    *TEST_ROWS,
    *LISTENERS,
    *NOTES,
)
