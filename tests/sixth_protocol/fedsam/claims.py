"""Who learns what under FedSAM (`moretta.protocols.common.claims`): what federated averaging tells, it tells."""

from __future__ import annotations

from moretta.protocols.common.claims import Claim
from moretta.protocols.common.shared_claims import (
    COLUMNS_OF_ALL,
    COLUMNS_OF_THE_OTHER,
    COUNTED_FIRST,
    DIFFERENCES_OF_TOTALS,
    FROM_THE_SUM,
    LISTENERS,
    NOTES,
    ROWS_OF_A_ROUND,
    ROWS_OF_ALL,
    SCORES,
    TEST_ROWS,
    WHO_TAKES_PART,
    around_sums,
    in_the_clear,
    of_two,
    sum_only,
    with_all_but_one,
)

UPLOAD = "weight change"

CLAIMS = (
    in_the_clear(UPLOAD),
    sum_only(UPLOAD),
    FROM_THE_SUM,
    with_all_but_one(UPLOAD),
    *around_sums(UPLOAD),
    Claim("server", "learns", "the true model", "Holds the model."),
    ROWS_OF_A_ROUND,
    DIFFERENCES_OF_TOTALS,
    Claim("silo", "learns", "the true model, every round", "Receives the model itself, every round."),
    COLUMNS_OF_ALL,
    ROWS_OF_ALL,
    WHO_TAKES_PART,
    of_two(UPLOAD),
    COLUMNS_OF_THE_OTHER,
    SCORES,
    COUNTED_FIRST,
    *TEST_ROWS,
    *LISTENERS,
    *NOTES,
)
