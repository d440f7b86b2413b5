"""Settings of Confined Gradient Descent."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from moretta.contract.settings import NonNegative, Positive, SettingRule, Spelled
from moretta.data.alignment.partner import IdRules
from moretta.errors import ParameterError
from moretta.protocols.common.training import Training

IDS = ("strip", "unicode", "fold-case")  # the default rules of ids
Delta = Positive | tuple[Positive, Positive] | Mapping[str, Positive]


class CGD(Training):
    """Descend from starts that each participant keeps to itself (`cgd.txt`), Algorithms 1 and 2:
    w_l(k+1) = w_l(k) - alpha_k sum n_l g_l / sum n_l.

    Args:
        delta: the size of each participant's confined start, w_l(1) = delta_l * Rand_l (Eq. 11), Rand_l standard
            normal. One number holds for all. Two are a range from which each participant draws its own in secret,
            uniformly (Table 7's last column). A mapping has each participant's.
        around: the centre of the starts: "zero", as in the paper, or "model", the model's own weights (or those of
            `warm_start`), for architectures and fine-tuning that need a common start.
        vertical: how participants that hold different columns of the same rows cooperate. "joint": a row of the grid
            has one model, its first layer split by column. "independent", Algorithm 2 as printed: each participant has
            one.
        hidden_bias: where biases of hidden layers start: "confined" like weights, or "shared", the same for everybody
            and without delta: standard normal numbers, or the model's own with around = "model". A shared start is no
            secret: it follows from the run's seed. (The authors' code has it so, and no output bias: the "mlp" has
            output-bias.)
        batches: the order of rows: "shuffled" anew each epoch, or "in-order", each epoch from the first row on, as in
            the authors' code, which needs a [data] batch-size above 0.
        weight_decay: lambda of the regulariser lambda |w|^2 / 2 (Eq. 4) of each participant's own model: its gradient
            contains lambda w_l(k), and the sum contains their mean by rows, so that D stays the same for all. The
            authors' code has 1e-6.
        schedule: alpha_k: "constant", or "inverse-square", alpha ((1 + mu T) / (k + mu T))^2, where k counts from the
            round after `decay_from` and T is the number of rounds left then.
        mu: how slowly "inverse-square" lowers the rate, from 0 to below 1 (Theorem 1).
        decay_from: the last round at the full rate.
        blind: make the aggregator relay sums that it cannot read; None is true, unless the scheme is "none".
        align: put the rows that all holders of a row of the grid have in one order by their ids, before the first round
            (`moretta.data.alignment`).
        align_ids: the rules that make ids comparable, by names of `moretta.data.alignment.partner.IdRules`.
        align_pad_to: the length to which each list of ids is filled.
    """

    BETWEEN: ClassVar[tuple[SettingRule, ...]] = (
        SettingRule(
            lambda s: s.protocol.blind and s.secure_aggregation.scheme == "none" and not s.engine.simulates,
            "{protocol.blind:=} has nothing to hide sums in under {secure_aggregation.scheme:=}; remove one of them",
        ),
        SettingRule(
            lambda s: s.protocol.batches == "in-order" and not s.data.batch_size,
            "{protocol.batches:=} is for {data.batch_size} above 0: with 0 each round has all rows; remove one of them",
        ),
        SettingRule(
            lambda s: s.engine.simulates and s.protocol.autocast,
            "{protocol.autocast}: {engine.name:=} computes in the run's own dtype; remove it",
        ),
        SettingRule(
            lambda s: s.engine.simulates and s.data.augment != "none",
            '{data.augment:=}: a simulation does not vary images; remove it, or use {engine.name:="in-process"}',
        ),
    )

    name: Literal["cgd"] = "cgd"
    loss: Literal["mse", "cross-entropy"] = "cross-entropy"
    learning_rate: Positive = 0.5
    delta: Annotated[Delta, Spelled("number above 0, list of two, or table of one for each participant")] = 0.01
    around: Literal["zero", "model"] = "zero"
    vertical: Literal["joint", "independent"] = "joint"
    hidden_bias: Literal["confined", "shared"] = "confined"
    batches: Literal["shuffled", "in-order"] = "shuffled"
    schedule: Literal["constant", "inverse-square"] = "constant"
    mu: Annotated[NonNegative, Field(lt=1)] = 0.0
    decay_from: Annotated[int, Field(ge=0)] = 0
    blind: bool | None = None
    align: bool = False
    align_ids: tuple[str, ...] = IDS
    align_pad_to: PositiveInt | None = None

    def rate(self, number: int, rounds: int) -> float:
        """Return alpha_k of round `number`, from 1 to `rounds`.

        Differs from the paper: as printed, alpha / (k + mu T)^2 is alpha / k^2 at mu = 0, where section 7 has a fixed
        rate. Here the first decaying step is alpha, whatever mu.

        Source: `cgd.txt`, Theorem 1.
        """
        step, left = number - self.decay_from, rounds - self.decay_from
        if self.schedule == "constant" or step < 1:
            return self.learning_rate
        return self.learning_rate * ((1.0 + self.mu * left) / (step + self.mu * left)) ** 2

    @property
    def rate_depends_on_rounds(self) -> bool:
        """Whether the rate of a round depends, through T, on the number of rounds."""
        return self.schedule != "constant" and self.mu > 0

    @property
    def id_rules(self) -> IdRules:
        """The rules that make ids comparable."""
        return IdRules.of(self.align_ids)

    @field_validator("delta", mode="before")
    @classmethod
    def _are_deltas(cls, value: object) -> object:
        """Refuse a wrong value in one sentence, not in one for each of the three kinds."""
        entries: list[Any] = [value]
        if isinstance(value, Mapping | list | tuple):
            entries = list(value.values() if isinstance(value, Mapping) else value)
        numbers = all(type(number) in (int, float) and number > 0 for number in entries)
        if not numbers or (isinstance(value, list | tuple) and len(value) != 2) or not entries:
            raise ValueError("a number above 0, two of them for a range, or a table of one for each participant")
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _is_plain_descent(self) -> Self:
        if self.optimizer != "sgd" or self.momentum or self.clip_norm is not None:
            raise ParameterError(
                "cgd takes plain gradient steps, the same for every participant; remove optimizer, momentum and "
                "clip-norm"
            )
        if self.lr_schedule != "constant" or self.first_rate is not None:
            raise ParameterError(
                'cgd has a schedule of its own; remove lr-schedule and first-rate, use schedule = "inverse-square"'
            )
        if self.epoch_rounds != 1:
            raise ParameterError("epoch-rounds is for settings by epochs, which cgd lacks; remove it")
        if self.class_weights:
            raise ParameterError("cgd weighs participants by their rows; remove class-weights")
        if self.schedule == "constant" and (self.mu or self.decay_from):
            raise ParameterError('mu and decay-from belong to schedule = "inverse-square"; add it or remove them')
        if self.align and self.vertical != "joint":
            raise ParameterError('align is for rows that run one model together; remove it, or use vertical = "joint"')
        if not self.align and (self.align_ids != IDS or self.align_pad_to is not None):
            raise ParameterError("align-ids and align-pad-to need align = true; set it, or remove them")
        try:
            IdRules.of(self.align_ids)
        except ParameterError as error:
            raise ParameterError(f"[protocol] align-ids: {error}") from None
        if self.warm_start is not None and self.around == "zero":
            raise ParameterError('warm-start needs around = "model", as starts confined around zero forget it')
        if isinstance(self.delta, tuple) and self.delta[0] > self.delta[1]:
            raise ParameterError(f"delta = [{self.delta[0]:g}, {self.delta[1]:g}]: expected the lower number first")
        return self
