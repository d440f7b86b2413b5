"""FedProx, for the contract suite."""

from moretta.protocols.fedprox.params import FedProx
from protocol_case import Case

CASES = (Case(FedProx(learning_rate=0.05, local_epochs=2, mu=0.5), all_rows=True),)
