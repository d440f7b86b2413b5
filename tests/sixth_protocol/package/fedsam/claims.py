"""Who learns what under FedSAM (`moretta.protocols.common.claims`): what federated averaging tells, it tells."""

from __future__ import annotations

from moretta.protocols.common import claims as shared
from moretta.protocols.common.claims import server, silo

UPLOAD = "weight change"

CLAIMS = (
    *shared.sums(UPLOAD),
    server("model").says("holds the model"),
    shared.ROWS_OF_A_ROUND,
    shared.DIFFERENCES_OF_TOTALS,
    silo("model", attacks=("model-in-the-clear",)).says("receives the model itself, every round"),
    shared.COLUMNS_OF_ALL,
    shared.ROWS_OF_ALL,
    shared.WHO_TAKES_PART,
    shared.of_two(UPLOAD),
    shared.COLUMNS_OF_THE_OTHER,
    shared.SCORES,
    *shared.OF_ALL_RUNS,
)
