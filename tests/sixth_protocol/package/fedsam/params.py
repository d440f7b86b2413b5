"""Settings of FedSAM."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from moretta.contract.settings import NonNegative
from moretta.protocols.common.training import Training


class FedSAM(Training):
    """`local_epochs` epochs of SGD at each silo, along gradients from a little uphill: Qu et al. 2022, Algorithm 1.

    radius: rho, how far uphill; 0 is federated averaging.
    learning_rate, momentum and weight_decay are those of the silos' own SGD.
    """

    name: Literal["fedsam"] = "fedsam"
    optimizer: Literal["sgd"] = "sgd"
    local_epochs: PositiveInt = 1
    radius: NonNegative = 0.05

    @property
    def steps_at_silos(self) -> bool:
        """Yes."""
        return True
