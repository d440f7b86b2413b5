"""Who learns what under FedSGD, FedAvg, FedProx and the two baselines (`moretta.protocols.common.claims`)."""

from __future__ import annotations

from moretta.protocols.common import claims as shared
from moretta.protocols.common.claims import Word, chooses_silos, is_standardised, of, server, silo

FEDSGD, AVERAGED, LOCAL, CENTRALISED = ("fedsgd",), ("fedavg", "fedprox"), ("local",), ("centralised",)
FEDERATED = FEDSGD + AVERAGED

of_others = Word(
    "of_others",
    ", and of any other silo at most its name and public key, beside common statistics",
    lambda run: (
        "" if is_standardised(run) or chooses_silos(run) else ", and of any other silo at most its name and public key"
    ),
)

ALONE = (
    server("update", attacks=("membership-of-local-models",), place="front").says(
        "receives each silo’s loss and number of rows in every round and, at the end, its whole model|, for the "
        "comparison; neither its rows nor its gradients"
    ),
    shared.COLUMNS_ALONE,
    silo("model", words=(of_others,), place="front").says(
        "sees no other silo’s rows or model|, but its own{of_others}"
    ),
    shared.COLUMNS_OF_ALL,
    shared.WHO_TAKES_PART,
    shared.COLUMNS_OF_THE_OTHER,
)
POOLED = (
    server("rows", place="front").says("holds every row of every silo, with nothing hidden from it|, and the model"),
    silo(None, place="front").says("hands its rows over|: nothing of them is hidden from who trains on them"),
)

CLAIMS = (
    *of(FEDSGD, shared.sums("gradient")),
    *of(AVERAGED, shared.sums("weight change")),
    *of(FEDERATED, (shared.HOLDS_THE_MODEL,)),
    *of(FEDSGD, (shared.NOISE,)),
    *of(FEDERATED, (shared.ROWS_OF_A_ROUND, shared.DIFFERENCES_OF_TOTALS, shared.RECEIVES_THE_MODEL)),
    *of(FEDSGD, (shared.LABELS_OF_OTHERS, shared.COLUMNS_OF_ALL, shared.ROWS_OF_ALL_IN_A_ROUND)),
    *of(AVERAGED, (shared.COLUMNS_OF_ALL, shared.ROWS_OF_ALL)),
    *of(FEDERATED, (shared.WHO_TAKES_PART,)),
    *of(FEDSGD, (shared.of_two("gradient"),)),
    *of(AVERAGED, (shared.of_two("weight change"),)),
    *of(FEDERATED, (shared.COLUMNS_OF_THE_OTHER,)),
    *of(LOCAL, ALONE),
    *of(CENTRALISED, POOLED),
    shared.SCORES,
    shared.VALIDATION,
    *of(FEDERATED, shared.TABLES),
    *shared.OF_ALL_RUNS,
)
