"""Settings of FedProx."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from moretta.contract.settings import NonNegative
from moretta.protocols.common.training import Training


class FedProx(Training):
    """`local_epochs` epochs of SGD at each silo, near the model that it was sent: Li et al. 2020, Algorithm 2.

    mu: of the proximal term; 0 is federated averaging.
    learning_rate, momentum and weight_decay are those of the silos' own SGD.
    """

    name: Literal["fedprox"] = "fedprox"
    optimizer: Literal["sgd"] = "sgd"
    local_epochs: PositiveInt = 1
    mu: NonNegative = 0.01

    @property
    def steps_at_silos(self) -> bool:
        """Yes."""
        return True
