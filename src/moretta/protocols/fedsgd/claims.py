"""Who learns what under FedSGD, FedAvg, FedProx and the two baselines (`moretta.protocols.common.claims`)."""

from moretta.protocols.common import claims as shared
from moretta.protocols.common.claims import Claim, Word, chooses_silos, is_on, is_standardised, server, silo, under

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
        "comparison, but neither its rows nor its gradients"
    ),
    shared.COLUMNS_ALONE,
    silo("model", words=(of_others,), place="front").says(
        "sees no other silo’s rows or model|, only its own{of_others}"
    ),
    shared.COLUMNS_OF_ALL,
    shared.WHO_TAKES_PART,
    shared.COLUMNS_OF_THE_OTHER,
)
POOLED = (
    server("rows", place="front").says("holds every row of every silo, with nothing hidden from it|, and the model"),
    silo(None, place="front").says(
        "hands its rows over|: nothing in them is hidden from the party that trains on them"
    ),
)
OWN_LOOP = Claim(
    "reader", None, (is_on("protocol", "fit", "silos train by a loop of their own (`fit`)"),), kind="unclaimed"
).says(
    "silos trained by a loop of their own|, which sees their rows. No claim is made about what the loop leaves or "
    "sends by itself. No attack measured what its weight changes reveal, because attacks know only the built-in steps"
)

CLAIMS = (
    *under(shared.sums("gradient"), protocols=FEDSGD),
    *under(shared.sums("weight change"), protocols=AVERAGED),
    *under((shared.HOLDS_THE_MODEL,), protocols=FEDERATED),
    *under((shared.NOISE,), protocols=FEDSGD),
    *under((shared.NOISE_OF_SILOS,), protocols=AVERAGED),
    *under((shared.ROWS_OF_A_ROUND, shared.DIFFERENCES_OF_TOTALS, shared.RECEIVES_THE_MODEL), protocols=FEDERATED),
    *under((shared.LABELS_OF_OTHERS, shared.COLUMNS_OF_ALL, shared.ROWS_OF_ALL_IN_A_ROUND), protocols=FEDSGD),
    *under((shared.COLUMNS_OF_ALL, shared.ROWS_OF_ALL), protocols=AVERAGED),
    *under((shared.WHO_TAKES_PART,), protocols=FEDERATED),
    *under((OWN_LOOP,), protocols=AVERAGED),
    *under((shared.of_two("gradient"),), protocols=FEDSGD),
    *under((shared.of_two("weight change"),), protocols=AVERAGED),
    *under((shared.COLUMNS_OF_THE_OTHER,), protocols=FEDERATED),
    *under(ALONE, protocols=LOCAL),
    *under(POOLED, protocols=CENTRALISED),
    shared.SCORES,
    shared.VALIDATION,
    *under(shared.TABLES, protocols=FEDERATED),
    *shared.OF_ALL_RUNS,
)
