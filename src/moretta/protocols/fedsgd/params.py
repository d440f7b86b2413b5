"""Settings of the plain baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from moretta.errors import ParameterError
from moretta.protocols.training import NonNegative, Positive, Training


@dataclass(frozen=True)
class Privacy:
    """What DP-SGD is told: the noise multiplier sigma, the clip norm C of an example's gradient, and delta."""

    noise: float
    clip: float
    delta: float


class FedSGD(Training):
    """One gradient per silo and round, averaged by rows: McMahan et al. 2017, FederatedSGD.

    With dp_noise and dp_clip it is DP-FL, differentially private SGD (`moretta.protocols.fedsgd.private`):
    dp_noise: the noise multiplier sigma; the noise in a round's sum has at least the deviation sigma * dp_clip.
    dp_clip: the largest norm of one example's gradient over all parameters.
    dp_delta: the delta at which epsilon is stated.
    """

    name: Literal["fedsgd"] = "fedsgd"
    dp_noise: NonNegative | None = None
    dp_clip: Positive | None = None
    dp_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5

    @property
    def privacy(self) -> Privacy | None:
        """The settings of DP-SGD; None for plain FedSGD."""
        if self.dp_noise is None or self.dp_clip is None:
            return None
        return Privacy(self.dp_noise, self.dp_clip, self.dp_delta)

    @model_validator(mode="after")
    def _fits_privacy(self) -> Self:
        if (self.dp_noise is None) != (self.dp_clip is None):
            there, missing = ("dp-clip", "dp-noise") if self.dp_noise is None else ("dp-noise", "dp-clip")
            raise ParameterError(
                f"{there} is given and {missing} is not; they belong together (the noise has the deviation dp-noise "
                "times dp-clip): give both, or neither for no differential privacy"
            )
        if self.privacy and self.class_weights:
            raise ParameterError(
                "class-weights do not go with dp-noise: a silo's weight in the mean would follow from its labels; "
                "remove one of them"
            )
        return self


class FedAvg(Training):
    """`local_epochs` epochs of SGD at each silo, differences averaged by rows: McMahan et al. 2017, Algorithm 1.

    learning_rate, momentum and weight_decay are those of the silos' own SGD.
    """

    name: Literal["fedavg"] = "fedavg"
    optimizer: Literal["sgd"] = "sgd"
    local_epochs: PositiveInt = 1


class Local(Training):
    """Each silo trains alone on its own batches; what federation has to beat."""

    name: Literal["local"] = "local"


class Centralised(Training):
    """One party holds all rows and steps on the union of the silos' batches; what federation is measured against."""

    name: Literal["centralised"] = "centralised"
