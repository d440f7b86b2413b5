"""Settings of the plain baselines."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from moretta.protocols.common.training import PrivateTraining, Training


class FedSGD(PrivateTraining):
    """One gradient per silo and round, averaged by rows: McMahan et al. 2017, FederatedSGD.

    With dp_noise and dp_clip it is DP-FL, differentially private SGD (`moretta.protocols.fedsgd.private`): what is
    clipped to dp_clip is the norm of one example's gradient over all parameters.
    """

    name: Literal["fedsgd"] = "fedsgd"


class FedAvg(Training):
    """`local_epochs` epochs of SGD at each silo, differences averaged by rows: McMahan et al. 2017, Algorithm 1.

    learning_rate, momentum and weight_decay are those of the silos' own SGD.
    local_epochs: how many epochs a silo steps in a round.
    """

    name: Literal["fedavg"] = "fedavg"
    optimizer: Literal["sgd"] = "sgd"
    local_epochs: PositiveInt = 1

    @property
    def steps_at_silos(self) -> bool:
        """Yes."""
        return True


class Local(Training):
    """Each silo trains alone on its own batches; federation has to beat this."""

    name: Literal["local"] = "local"


class Centralised(Training):
    """One party holds all rows and steps on the union of the silos' batches; federation is measured against this."""

    name: Literal["centralised"] = "centralised"
