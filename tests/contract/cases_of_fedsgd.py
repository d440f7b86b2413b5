"""FedSGD, federated averaging, and the baselines without sums."""

from protocol_case import Case

from moretta import Centralised, FedAvg, FedProx, FedSGD, Local

CASES = (
    Case(FedSGD(learning_rate=0.05, momentum=0.5)),
    Case(FedAvg(learning_rate=0.05, local_epochs=2), all_rows=True),
    Case(FedProx(learning_rate=0.05, local_epochs=2, mu=0.5), all_rows=True),
    Case(Local(learning_rate=0.01, optimizer="adam")),
    Case(Centralised(learning_rate=0.05, weight_decay=0.01)),
)
