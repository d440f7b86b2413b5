"""Settings that every protocol with gradients shares: the loss, the optimizer and its rate.

Names are those of a run file's ``[protocol]`` section, with dashes there and underscores here.
"""

from __future__ import annotations

import math
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from moretta.contract.settings import SERVER, Momentum, NonNegative, Positive, Section, SettingRule, Unit
from moretta.errors import ParameterError
from moretta.protocols.common.lattice import Privacy
from moretta.protocols.common.own_loss import Function, OwnFunction, imported

if TYPE_CHECKING:
    from moretta.protocols.common.losses import Loss

BETAS = (0.9, 0.999)  # PyTorch's defaults of Adam (Kingma and Ba, 2015)
FACTOR = 0.1  # of the rate after a milestone


class Training(Section):
    """Set what every protocol with gradients shares.

    Args:
        loss: "mse", the sum over outputs of (y - t)^2 / 2, averaged over rows (`practical.md`, section III-B): outputs
            / 2 times `torch.nn.MSELoss`. Or "cross-entropy" of the softmax, in nats.
        own_loss: a function of outputs and targets, in a run file "module:function", that returns one number per row.
            It is minimised instead of `loss`, which still encodes targets and scores test rows
            (`moretta.protocols.common.own_loss`).
        label_smoothing: how far cross-entropy targets move towards the uniform distribution, as in
            `torch.nn.functional.cross_entropy`.
        class_weights: the weight of each class's rows in cross-entropy, as in `torch.nn.functional.cross_entropy`.
        learning_rate: the rate of the optimizer's steps, at the server.
        lr_schedule: the rate over the run: "constant"; "cosine", from the full rate to 0; "step", 1/10 from half of the
            rounds on and 1/100 from 3/4 on (He et al., CVPR 2016); "milestones", times `milestone_factor` after each of
            `milestones`.
        milestones: the epochs after which "milestones" lowers the rate, ascending.
        milestone_factor: multiplies the rate after each milestone.
        first_rate: the rate of the first epoch instead of the schedule's; None keeps the schedule's.
        epoch_rounds: how many rounds count as an epoch, for `milestones`, `first_rate` and all that goes by epochs.
        clip_norm: the largest norm of a step's gradient over all parameters; None does not clip.
        warm_start: a state_dict to begin with, .safetensors or .pt (read without running code).
        optimizer: "sgd", with momentum, or "adam" with PyTorch's defaults except `betas`.
        momentum: the fraction of its last step that SGD keeps, as in `torch.optim.SGD`.
        betas: the decay rates of Adam's two moving averages, as in `torch.optim.Adam`.
        weight_decay: the L2 penalty on all parameters, as in `torch.optim`: the gradient gains this times the
            parameter.
        autocast: compute at silos in bfloat16 what `torch.autocast` lists; weights, gradients and losses keep their
            dtype. Not for pbpfl and baffle.
    """

    if TYPE_CHECKING:
        name: str  # each protocol has its own, as a literal

    OWN: ClassVar[tuple[str, ...]] = ("own_loss",)  # settings that hold the user's own code
    BETWEEN: ClassVar[tuple[SettingRule, ...]] = ()  # rules between these settings and a run's other sections

    loss: Literal["mse", "cross-entropy"] = "mse"
    own_loss: OwnFunction = None
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    class_weights: tuple[Positive, ...] = ()
    learning_rate: Positive = 0.1
    lr_schedule: Literal["constant", "cosine", "step", "milestones"] = "constant"
    milestones: tuple[PositiveInt, ...] = ()
    milestone_factor: Annotated[float, Field(gt=0, lt=1)] = FACTOR
    first_rate: Positive | None = None
    epoch_rounds: Annotated[PositiveInt, Unit("rounds")] = 1
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: Momentum = 0.0
    betas: tuple[Momentum, Momentum] = BETAS
    weight_decay: NonNegative = 0.0
    clip_norm: Positive | None = None
    warm_start: Annotated[Path | None, SERVER] = None
    autocast: bool = False

    def rate(self, number: int, rounds: int) -> float:
        """Return the learning rate of round `number`, from 1 to `rounds`."""
        done, epochs = (number - 1) / rounds, (number - 1) // self.epoch_rounds
        if self.first_rate is not None and not epochs:
            return self.first_rate
        if self.lr_schedule == "milestones":
            return float(
                self.learning_rate * self.milestone_factor ** sum(epochs >= milestone for milestone in self.milestones)
            )
        if self.lr_schedule == "cosine":
            return self.learning_rate * (1.0 + math.cos(math.pi * done)) / 2.0
        if self.lr_schedule == "step":
            return self.learning_rate * (0.01 if done >= 0.75 else 0.1 if done >= 0.5 else 1.0)
        return self.learning_rate

    @property
    def rate_depends_on_rounds(self) -> bool:
        """Whether the rate of a round depends on the number of rounds."""
        return self.lr_schedule in ("cosine", "step")

    @property
    def own_code(self) -> dict[str, Function | str]:
        """The user's own functions, or their "module:function", by the name of the setting."""
        return {name: function for name in self.OWN if (function := getattr(self, name)) is not None}

    def with_own_code(self, base: Path = Path(), agreed: Container[str] = ()) -> Self:
        """Return the same with that code imported from beside a run file in the folder `base` (`own_loss.imported`)."""
        return self.model_copy(update={name: imported(code, base, agreed) for name, code in self.own_code.items()})

    @property
    def privacy(self) -> Privacy | None:
        """The settings of the noise on uploads; None without noise."""
        return None

    @model_serializer(mode="wrap")
    def _without_idle(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit unset keys, so that a run's text and what noise is bound to stay as before those keys existed."""
        dumped: dict[str, Any] = dump(self)
        idle = {name for name in self._idle() if getattr(self, name) == type(self).model_fields[name].default}
        return {key: value for key, value in dumped.items() if key.replace("-", "_") not in idle}

    def _idle(self) -> tuple[str, ...]:
        return ("autocast",)

    @property
    def steps_at_silos(self) -> bool:
        """Whether silos step by themselves, and the server moves by the mean of their differences."""
        return False

    def lot(self, batch_size: int) -> int:
        """Return the number of a silo's rows in a round; 0 for all of them, as where silos step by themselves."""
        return 0 if self.steps_at_silos else batch_size

    @property
    def loss_function(self) -> Loss:
        """The loss with its settings; needs torch."""
        from moretta.protocols.common.losses import Loss

        own = None if self.own_loss is None else imported(self.own_loss)
        return Loss(self.loss, self.label_smoothing, self.class_weights, own)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.loss == "mse" and (self.label_smoothing or self.class_weights):
            raise ParameterError('label-smoothing and class-weights belong to loss = "cross-entropy"; remove them')
        if self.own_loss is not None and (self.label_smoothing or self.class_weights):
            raise ParameterError(
                "own-loss is minimised as it is, and label-smoothing and class-weights change the built-in one; remove "
                "them"
            )
        if self.optimizer == "adam" and self.momentum:
            raise ParameterError(
                f'momentum = {self.momentum:g} belongs to optimizer = "sgd", and optimizer is "adam", which has its '
                "own; remove one of them"
            )
        if self.optimizer == "sgd" and self.betas != BETAS:
            raise ParameterError('betas belong to optimizer = "adam"; set it or remove them')
        if (self.lr_schedule == "milestones") != bool(self.milestones):
            raise ParameterError('milestones and lr-schedule = "milestones" belong together; set both, or remove both')
        if not self.milestones and self.milestone_factor != FACTOR:
            raise ParameterError('milestone-factor belongs to lr-schedule = "milestones"; remove it, or set both')
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ParameterError("milestones: expected numbers of epochs in ascending order, such as [60, 120, 160]")
        return self


Minutes = Annotated[float, Field(ge=0.1, allow_inf_nan=False)]


class PrivateTraining(Training):
    """Add noise at silos, so that differential privacy hides their rows.

    Args:
        dp_noise: the noise multiplier sigma; the noise in a round's sum has at least the deviation sigma * dp_clip.
        dp_clip: the largest norm of one example's contribution to a round's sum. Where silos step by themselves, it
            bounds a silo's whole update, and silos count alike.
        dp_unit: the unit that noise hides: a "row" of a silo, or a "group" of its rows (a patient), which the schema
            names. Where silos step by themselves, the unit is a "silo", all that it uploads. None is a row, or there a
            silo.
        dp_group_rows: the most different rows of one group that a round uses; their mean is clipped.
        dp_colluding: how many silos may reveal their own noise to the server; epsilon then counts only the others'
            noise.
        dp_delta: the delta at which epsilon is stated.
        dp_epsilon: the largest epsilon: the run ends before a round would exceed it, and no silo uploads in that round.
    """

    dp_noise: NonNegative | None = None
    dp_clip: Positive | None = None
    dp_unit: Literal["row", "group", "silo"] | None = None
    dp_group_rows: Annotated[PositiveInt | None, Unit("rows")] = None
    dp_colluding: NonNegativeInt = 0
    dp_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    dp_epsilon: Positive | None = None

    @property
    def privacy(self) -> Privacy | None:
        """The settings of the noise; None without noise."""
        if self.dp_noise is None or self.dp_clip is None:
            return None
        unit = self.dp_unit or ("silo" if self.steps_at_silos else "row")
        return Privacy(
            self.dp_noise,
            self.dp_clip,
            self.dp_delta,
            unit=unit,
            most=self.dp_epsilon,
            group_rows=self.dp_group_rows or 0,
            colluding=self.dp_colluding,
        )

    def lot(self, batch_size: int) -> int:
        """Return as `Training.lot`; but 1 where noise hides a silo, as its update counts once."""
        return 1 if self.steps_at_silos and self.privacy is not None else super().lot(batch_size)

    def _idle(self) -> tuple[str, ...]:
        return (*super()._idle(), "dp_unit", "dp_group_rows", "dp_colluding")

    @model_validator(mode="after")
    def _fits_privacy(self) -> Self:
        if (self.dp_noise is None) != (self.dp_clip is None):
            there, missing = ("dp-clip", "dp-noise") if self.dp_noise is None else ("dp-noise", "dp-clip")
            raise ParameterError(
                f"{there} is set, but {missing} is not; they belong together (the noise has the deviation dp-noise "
                "times dp-clip): set both, or neither for no differential privacy"
            )
        if self.dp_epsilon is not None and not self.dp_noise:
            raise ParameterError("dp-epsilon needs dp-noise, which is not set; set it above 0")
        units = ("silo",) if self.steps_at_silos else ("row", "group")
        if self.dp_unit not in (None, *units):
            raise ParameterError(
                f'dp-unit = "{self.dp_unit}": noise hides {" or ".join(f"one {unit}" for unit in units)} here, where '
                f"silos {'step by themselves' if self.steps_at_silos else 'upload what follows from single rows'}; "
                "choose that, or remove it"
            )
        if (self.dp_unit == "group") != (self.dp_group_rows is not None):
            raise ParameterError(
                'dp-unit = "group" and dp-group-rows belong together: whose rows are one contribution, and how many '
                "of them at most; set both, or neither"
            )
        for key, value in {"dp-unit": self.dp_unit, "dp-colluding": self.dp_colluding}.items():
            if value and not self.privacy:
                raise ParameterError(f"{key} needs dp-noise, which is not set; set it, or remove {key}")
        if self.steps_at_silos:
            return self
        if self.privacy and self.own_loss is not None:
            raise ParameterError(
                "own-loss does not go with dp-noise, which takes each row's gradient alone and is bound to all that it "
                "follows from; remove one of them"
            )
        if self.privacy and self.class_weights:
            raise ParameterError(
                "class-weights do not go with dp-noise: a silo's weight in the mean would follow from its labels; "
                "remove one of them"
            )
        return self
