"""Settings of the plain baselines."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from moretta.contract.settings import NonNegative, Positive, Unit, kebab
from moretta.errors import ParameterError
from moretta.protocols.common.lattice import Privacy
from moretta.protocols.common.own_loss import OwnFunction
from moretta.protocols.common.training import Minutes, PrivateTraining, Training, privacy_of


class FedSGD(PrivateTraining):
    """One gradient per silo and round, averaged by rows: McMahan et al. 2017, FederatedSGD.

    With dp_noise and dp_clip it is DP-FL, differentially private SGD (`moretta.protocols.fedsgd.private`): what is
    clipped to dp_clip is the norm of one example's gradient over all parameters.
    """

    name: Literal["fedsgd"] = "fedsgd"


NOISE = ("dp_noise", "dp_clip", "dp_delta")
WITH_FIT = ("name", "fit", "mu", "loss", "label_smoothing", "class_weights", "warm_start", *NOISE)
"""What federated averaging has use for where silos train by a loop of their own: the rest is of the built-in steps."""


class Epochs(Training):
    """`local_epochs` epochs of SGD at each silo, differences averaged by rows.

    learning_rate, momentum, weight_decay and clip_norm are those of the silos' own SGD.
    local_epochs: how many epochs a silo steps in a round.
    checkpoint_minutes: after so many minutes each silo keeps what it has done of a round in a file of its own, and
        after a restart goes on from there; None keeps nothing within a round. Silos then step one by one.
    fit: a function, in a run file "module:function", that trains at a silo in the place of its epochs
        (`moretta.protocols.fedsgd.own_loop`).
    dp_noise: the noise multiplier sigma, of a silo's whole update: silos then count alike, whatever rows they have.
    dp_clip: the largest norm of one silo's update; a longer one is shortened to it.
    dp_delta: the delta at which epsilon is stated; None is 1e-5.
    """

    OWN: ClassVar[tuple[str, ...]] = (*Training.OWN, "fit")

    optimizer: Literal["sgd"] = "sgd"
    local_epochs: PositiveInt = 1
    checkpoint_minutes: Annotated[Minutes | None, Unit("minutes")] = None
    fit: OwnFunction = None
    dp_noise: NonNegative | None = None
    dp_clip: Positive | None = None
    dp_delta: Annotated[float, Field(gt=0, lt=1)] | None = None

    @property
    def privacy(self) -> Privacy | None:
        """The settings of the noise on a silo's whole update; None for none."""
        return privacy_of(self.dp_noise, self.dp_clip, 1e-5 if self.dp_delta is None else self.dp_delta, "silo")

    def lot(self, batch_size: int) -> int:
        """Return 0 for all rows of a silo; under noise 1, as its update counts once."""
        return super().lot(batch_size) if self.privacy is None else 1

    @property
    def steps_at_silos(self) -> bool:
        """Yes."""
        return True

    @property
    def pull(self) -> float:
        """How strongly a silo is held near the model that it was sent: mu, 0 for not at all."""
        return 0.0

    @model_validator(mode="after")
    def _leaves_steps_to_fit(self) -> Self:
        given = self.changed(*(name for name in type(self).model_fields if name not in WITH_FIT))
        if self.fit is not None and given:
            raise ParameterError(
                f"fit trains by a loop of its own, and {kebab(given[0])} is for the built-in epochs; set it in that "
                "loop, and remove it here"
            )
        if self.privacy is None and self.dp_delta is not None:
            raise ParameterError("dp-delta belongs to dp-noise and dp-clip; give all three, or remove it")
        return self


class FedAvg(Epochs):
    """Federated averaging: McMahan et al. 2017, Algorithm 1."""

    name: Literal["fedavg"] = "fedavg"


class FedProx(Epochs):
    """Federated averaging whose silos are held near the model that they were sent: Li et al. 2020, Algorithm 2.

    Differs from the paper: every silo takes the same number of epochs, and differences are averaged by rows, as in
    federated averaging, where the paper draws devices by their rows and averages evenly, and bounds how inexactly each
    solves its problem.

    mu: how strongly a silo is held near what it was sent, W: its loss has the term mu / 2 |w - W|^2; 0 is federated
    averaging. A loop of your own (`fit`) has the term's gradient, mu (w - W), added to those that it computes.
    """

    name: Literal["fedprox"] = "fedprox"
    mu: NonNegative = 0.01

    @property
    def pull(self) -> float:
        """That is mu."""
        return self.mu


class Local(Training):
    """Each silo trains alone on its own batches; federation has to beat this."""

    name: Literal["local"] = "local"


class Centralised(Training):
    """One party holds all rows and steps on the union of the silos' batches; federation is measured against this."""

    name: Literal["centralised"] = "centralised"
