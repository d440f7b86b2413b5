"""FedSAM, for the contract suite."""

from fedsam.params import FedSAM
from protocol_case import Case

CASES = (Case(FedSAM(learning_rate=0.05, local_epochs=2, radius=0.05), all_rows=True),)
