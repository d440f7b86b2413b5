"""Settings of the plain baselines."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import PositiveInt, model_validator

from moretta.contract.settings import NonNegative, SettingRule, Unit, kebab
from moretta.errors import ParameterError
from moretta.protocols.common.own_loss import OwnFunction
from moretta.protocols.common.training import Minutes, PrivateTraining, Training


class FedSGD(PrivateTraining):
    """Average one gradient per silo and round by rows: McMahan et al. 2017, FederatedSGD.

    With dp_noise and dp_clip it is DP-FL, differentially private SGD (`moretta.protocols.fedsgd.private`): dp_clip
    bounds the norm of one example's gradient over all parameters.
    """

    BETWEEN: ClassVar[tuple[SettingRule, ...]] = (
        SettingRule(
            lambda s: s.engine.recompute is not None and s.protocol.privacy is not None,
            "{engine.recompute:=}: {protocol.dp_noise} takes each row's gradient by itself, a few rows at a time; "
            "remove it, and lower {engine.micro_batch}",
        ),
    )

    name: Literal["fedsgd"] = "fedsgd"


NOISE = ("dp_noise", "dp_clip", "dp_unit", "dp_group_rows", "dp_colluding", "dp_delta", "dp_epsilon")
WITH_FIT = ("name", "fit", "mu", "loss", "label_smoothing", "class_weights", "warm_start", *NOISE)
"""The settings that federated averaging uses with silos' own loops; the others are of the built-in steps."""


class Epochs(PrivateTraining):
    """Take `local_epochs` epochs of SGD at each silo, and average the differences by rows.

    learning_rate, momentum, weight_decay and clip_norm are those of the silos' own SGD.

    Args:
        local_epochs: how many epochs a silo steps in a round.
        checkpoint_minutes: the minutes after which each silo saves its progress of a round to its own file, from which
            it resumes after a restart. None saves nothing within a round. With a number, silos step one by one.
        fit: a function, in a run file "module:function", that trains at a silo instead of its epochs
            (`moretta.protocols.fedsgd.own_loop`).
    """

    OWN: ClassVar[tuple[str, ...]] = (*PrivateTraining.OWN, "fit")
    BETWEEN: ClassVar[tuple[SettingRule, ...]] = (
        SettingRule(
            lambda s: s.protocol.fit is not None and (s.engine.micro_batch or s.engine.recompute) is not None,
            "{protocol.fit} trains by a loop of its own, and {engine.micro_batch} and {engine.recompute} are for the "
            "built-in epochs; remove them",
        ),
    )

    optimizer: Literal["sgd"] = "sgd"
    local_epochs: PositiveInt = 1
    checkpoint_minutes: Annotated[Minutes | None, Unit("minutes")] = None
    fit: OwnFunction = None

    @property
    def steps_at_silos(self) -> bool:
        """Return True: silos take their own optimizer steps."""
        return True

    @property
    def pull(self) -> float:
        """The strength mu that holds a silo near the received model; 0 without it."""
        return 0.0

    def _idle(self) -> tuple[str, ...]:
        return (*super()._idle(), *(("dp_delta",) if self.privacy is None else ()))

    @model_validator(mode="after")
    def _leaves_steps_to_fit(self) -> Self:
        changed = self.changed(*(name for name in type(self).model_fields if name not in WITH_FIT))
        if self.fit is not None and changed:
            raise ParameterError(
                f"fit trains by a loop of its own, and {kebab(changed[0])} is for the built-in epochs; set it in that "
                "loop, and remove it here"
            )
        return self


class FedAvg(Epochs):
    """Average the models of silos that train for epochs: McMahan et al. 2017, Algorithm 1."""

    name: Literal["fedavg"] = "fedavg"


class FedProx(Epochs):
    """Average models of silos that are held near the model that they received: Li et al. 2020, Algorithm 2.

    Differs from the paper: every silo takes the same number of epochs, and differences are averaged by rows, as in
    federated averaging. The paper draws devices by their rows, averages evenly, and bounds how inexactly each solves
    its problem.

    Args:
        mu: how strongly a silo is held near the received model W: its loss has the term mu / 2 |w - W|^2; 0 is
            federated averaging. A loop of your own (`fit`) has the term's gradient, mu (w - W), added to those that it
            computes.
    """

    name: Literal["fedprox"] = "fedprox"
    mu: NonNegative = 0.01

    @property
    def pull(self) -> float:
        """Return mu."""
        return self.mu


class Local(Training):
    """Train each silo alone on its own batches; federation has to beat this baseline."""

    name: Literal["local"] = "local"


class Centralised(Training):
    """Train at one party that holds all rows, on the union of the silos' batches; the baseline for federation."""

    name: Literal["centralised"] = "centralised"
