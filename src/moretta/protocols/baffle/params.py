"""Settings of BAFFLE."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from moretta.contract.settings import Positive, SettingRule, Spelled, Unit
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo import blocks
from moretta.protocols.baffle.silo.directions import BLOCK, MOST
from moretta.protocols.baffle.silo.estimate import Form, directions_of
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.common.augmentation import CROPS
from moretta.protocols.common.own_loss import imported, of_arrays
from moretta.protocols.common.targets import RowLosses
from moretta.protocols.common.training import Minutes, PrivateTraining

Directions = Annotated[int, Field(ge=2, le=MOST // 2)]
ALL = 100  # directions of a round that moves all parameters at once
# A lot's sum, and its noise, exceed this multiple of the clip norm with a chance below 1e-9. A refusal for size would
# reveal something.
SURE_LOT, SURE_NOISE = 12, 10
# A process with its imports has 64 MiB resident at its peak (x86-64 Linux, Python 3.11). A limit well below that has
# room for no model, on any machine or version.
FLOOR_MIB = 48.0
# At these the loss differences of the edge client correlate with exact ones to 0.95 or more (docs/baffle-edge.md).
LEAST_SIGMA = {"float32": 0.0, "float16": 1e-4, "int8-activations": 1e-3}


def _too_small(s: Any) -> Mapping[str, str] | None:
    """Return the least sigma of edge clients' precision if a run's is below it."""
    least = LEAST_SIGMA[s.engine.edge_precision]
    return {"least": f"{least:g}"} if s.engine.edge and s.protocol.sigma < least else None


def _too_large(s: Any) -> Mapping[str, str] | None:
    """Return the largest size of noised scalars if that exceeds what sums allow."""
    noise, secure = s.protocol.privacy, s.secure_aggregation
    if not s.protocol.noises_scalars or secure.scheme == "none":
        return None
    most = noise.clip * (SURE_LOT + SURE_NOISE * noise.noise)
    return {"most": f"{most:.3g}", "largest": f"{secure.largest:g}"} if most > secure.largest else None


class BAFFLE(PrivateTraining):
    """Train by forward passes alone: Feng et al. 2023.

    Args:
        perturb: "all" moves all parameters at once, along K directions; "blocks" moves one layer after the other and
            runs only the layers after it (`moretta.protocols.baffle.silo.blocks`), for LeNet at 1/26 to 1/132 of the
            work.
        linear: how blocks of linear layers move: "scalars", along K directions of rank one; "activations", each output
            unit separately: a silo then uploads its estimate of the layer, as long as the layer, as under fedsgd.
        k: K, the number of directions in a round (twice as many with form "twice-forward"); None is 100. With blocks,
            the least number for a block: one number for all, or a table by the names of layers, in which "*" is any.
            None is then 4 a channel up to 64 for convolutions, 2 up to 32 for normalisations, inputs + outputs for
            linear layers, and 16 for others.
        k_last: K of the last round, which K approaches by the same factor each round. None keeps k.
        sigma: the length by which parameters move along each direction.
        form: the finite difference (`moretta.protocols.baffle.silo.estimate`). With blocks, where the loss at w is
            known anyway, "base" (then the default) or "central". The paper's is "twice-forward", for which its code
            uses "base" at twice the K, the same.
        direction: "rademacher", entries -1 and +1, or "gaussian". Differs from the paper: its directions are Gaussian;
            form "mean" with Rademacher directions loses less to the curvature (`moretta.protocols.baffle`).
        directions: "shared": all roles use the same, and a silo uploads K scalars. "own": each silo draws its own from
            its secret and uploads its estimate, as long as the model. C silos then have C K directions a round, as in
            the authors' code, each with the error of one silo's gradient, and the server knows none of them. At the
            epoch level "own" hides each step's directions from the server.
        orthogonal: make the directions of a round orthogonal to each other.
        seed_pool: the size of a pool, fixed for the cohort, from which each round takes its directions; a multiple of
            8. None draws fresh ones.
        ema: the decay of the parameters' moving average, w <- ema w + (1 - ema) w_t, which is tested and released; 0
            disables it. In round t ema is at most t / (t + 9), so that the start is soon forgotten.
        ema_each: update the average after each "round", or after each "epoch" of `epoch_rounds` rounds. After n epochs
            ema is at most (1 + n) / (10 + n), as in the authors' code; rounds after the last whole epoch then do not
            count.
        clip_entry: the largest entry of a silo's gradient estimate. A silo knows the directions, so it scales its K
            scalars until no entry is larger; the authors' code has 0.3. None does not scale.
        trainable: names of parameters or of modules; all others are frozen. None trains all.
        local_epochs: None is the batch level: a round is one batch per silo, and scalars are summed. A number is the
            epoch level: a silo takes this many epochs of steps along its own estimates, by the optimizer at
            learning_rate. Its difference, as long as the model, is summed. Adam's moments stay at the silo. Noise then
            hides the silo.
        checkpoint_minutes: at the epoch level, the minutes after which each silo saves its progress of a round to its
            own file, from which it resumes after a restart. None saves nothing within a round; edge clients never do.
        batch_statistics: normalise in BatchNorm by the statistics of a silo's batch. They are summed beside its losses,
            so that the server keeps the running ones (`moretta.protocols.baffle.batch_statistics`).
        dp_noise: the noise multiplier sigma of the scalars, or at the epoch level of the difference.
        dp_clip: the largest norm of one row's K scalars, or at the epoch level of a silo's whole difference.
    """

    BETWEEN: ClassVar[tuple[SettingRule, ...]] = (
        SettingRule(
            lambda s: (
                s.data.augment not in ("none", *CROPS) or (s.data.augment != "none" and s.protocol.noises_scalars)
            ),
            f"{{data.augment:=}}: under baffle it is {' or '.join(CROPS)}, and beside {{protocol.dp_noise}} it needs "
            "{protocol.local_epochs}; remove it",
        ),
        SettingRule(
            lambda s: s.engine.edge and s.protocol.batch_statistics,
            "{engine.edge}: edge clients run a few rows at a time, and so have no statistics of a batch; remove it, or "
            "{protocol.batch_statistics}",
        ),
        SettingRule(
            lambda s: s.engine.micro_batch is not None and s.protocol.batch_statistics,
            "{engine.micro_batch:=} takes some rows at a time, and {protocol.batch_statistics} are of a whole "
            "batch; remove one of the two",
        ),
        SettingRule(
            lambda s: s.engine.recompute is not None,
            "{engine.recompute:=}: baffle runs forward alone and keeps no activations for a way back; remove it",
        ),
        SettingRule(
            lambda s: s.data.score_at_silos and s.protocol.batch_statistics,
            "{protocol.batch_statistics}: silos are not sent BatchNorm's running statistics, by which a model is "
            "scored; remove it, or {data.score_at_silos}",
        ),
        SettingRule(
            lambda s: s.data.silos_validate and s.protocol.batch_statistics,
            "{protocol.batch_statistics}: silos are not sent BatchNorm's running statistics, by which a model is "
            "scored; remove it, or {data.validation_fraction}",
        ),
        SettingRule(
            _too_large,
            "{protocol.dp_clip:=} with its noise may reach {most}, and {secure_aggregation.limit} is {largest}; "
            "lower dp-clip or raise the limit",
        ),
        SettingRule(
            lambda s: s.engine.edge and s.engine.memory_limit_mib is not None and s.engine.memory_limit_mib < FLOOR_MIB,
            "{engine.memory_limit_mib:=}: no edge client fits, as ONNX Runtime alone takes some 60 MiB; set 80 or "
            "more, or remove it",
        ),
        SettingRule(
            _too_small,
            "{protocol.sigma:=} is lost in what {engine.edge_precision:=} rounds to, where sigma = {least} works; "
            "raise it",
        ),
    )

    name: Literal["baffle"] = "baffle"
    optimizer: Literal["sgd", "adam"] = "adam"
    learning_rate: Positive = 0.003
    perturb: Literal["all", "blocks"] = "all"
    linear: Literal["scalars", "activations"] = "scalars"
    k: Annotated[Directions | dict[str, Any] | None, Spelled("whole number, 2 or more; or table by layer")] = None
    k_last: Directions | None = None
    sigma: Positive = 1e-3
    form: Form = "mean"
    direction: Literal["rademacher", "gaussian"] = "rademacher"
    directions: Literal["shared", "own"] = "shared"
    orthogonal: bool = False
    seed_pool: PositiveInt | None = None
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.995
    ema_each: Literal["round", "epoch"] = "round"
    clip_entry: Positive | None = None
    trainable: tuple[str, ...] = ()
    local_epochs: PositiveInt | None = None
    checkpoint_minutes: Annotated[Minutes | None, Unit("minutes")] = None
    batch_statistics: bool = False

    @property
    def steps_at_silos(self) -> bool:
        """Whether silos step, at the epoch level."""
        return self.local_epochs is not None

    @property
    def noises_scalars(self) -> bool:
        """Whether noise goes on scalars (the batch level). At the epoch level it goes on whole differences."""
        return self.privacy is not None and not self.steps_at_silos

    def k_of(self, number: int, rounds: int) -> int:
        """Return K of round `number`, from 1 to `rounds`."""
        if self.k_last is None or rounds == 1:
            return self.directions_at_once
        growth: float = (self.k_last / self.directions_at_once) ** ((number - 1) / (rounds - 1))
        return round(self.directions_at_once * growth)

    @property
    def directions_at_once(self) -> int:
        """K of the first round if all parameters move at once."""
        return self.k if isinstance(self.k, int) else ALL

    @property
    def most_at_once(self) -> int:
        """The largest K of a round if all parameters move at once."""
        return max(self.directions_at_once, self.k_last or 0)

    @property
    def rate_depends_on_rounds(self) -> bool:
        """Whether a round's rate or its K depends on how many rounds there are in all."""
        return super().rate_depends_on_rounds or self.k_last is not None

    @model_validator(mode="after")
    def _fits_blocks(self) -> Self:
        if self.autocast:
            raise ParameterError(
                "autocast: baffle divides differences of losses by sigma, and bfloat16 rounds them: an MLP's at sigma "
                "= 1e-4 correlated 0.27 with exact ones; remove it, or use fedsgd"
            )
        if self.perturb == "all" and self.k is None:
            object.__setattr__(self, "k", ALL)
        if self.perturb == "blocks" and "form" not in self.model_fields_set:
            object.__setattr__(self, "form", "base")
        if self.perturb == "all":
            if self.linear != "scalars" or isinstance(self.k, dict):
                key = "linear" if self.linear != "scalars" else "a table for k"
                raise ParameterError(f'{key} is of blocks; set perturb = "blocks", or remove it')
            return self
        if self.k == {}:
            raise ParameterError("k: expected how many moves each block has, got an empty table; remove k, or fill it")
        for block, moves in self._moves.items():
            if type(moves) is not int or not 1 <= moves <= MOST // 2:
                raise ParameterError(f"k: block `{block}`: expected 1 to {MOST // 2} moves, got {moves!r:.40}")
        if self.form not in ("base", "central"):
            raise ParameterError(
                f'form = "{self.form}": with perturb = "blocks" the loss at the parameters is known anyway; use "base" '
                'or "central"'
            )
        for key, setting in {
            'direction = "gaussian"': self.direction != "rademacher",
            "orthogonal": self.orthogonal,
            "seed-pool": self.seed_pool is not None,
            "k-last": self.k_last is not None,
            "batch-statistics": self.batch_statistics,
        }.items():
            if setting:
                raise ParameterError(
                    f'{key} is of directions of all parameters at once; remove it, or use perturb = "all"'
                )
        if self.linear == "activations" and self.noises_scalars:
            raise ParameterError(
                'dp-noise goes on scalars; with linear = "activations" a silo uploads whole estimates of layers: use '
                'linear = "scalars", set local-epochs, or remove dp-noise'
            )
        return self

    @model_validator(mode="after")
    def _fits_forms(self) -> Self:
        most = directions_of(self.form, self.most_at_once)
        if self.orthogonal and (self.direction != "rademacher" or self.seed_pool):
            raise ParameterError(
                'orthogonal directions are fresh Rademacher ones; use direction = "rademacher" and no seed-pool'
            )
        if self.seed_pool is not None and (self.seed_pool % BLOCK or self.seed_pool < most):
            raise ParameterError(
                f"seed-pool = {self.seed_pool}: expected a multiple of {BLOCK}, and at least the {most} directions of "
                "a round"
            )
        if self.ema_each == "epoch" and not self.ema:
            raise ParameterError('ema-each = "epoch" needs an average, and ema = 0 disables it; remove one')
        if self.clip_entry is not None and self.noises_scalars:
            raise ParameterError("dp-clip bounds what each row adds; remove clip-entry, or dp-noise and dp-clip")
        if self.directions == "own" and self.noises_scalars:
            raise ParameterError(
                "dp-noise goes on scalars along directions that all silos share, so that they share the noise; remove "
                'directions = "own", with which a whole estimate is uploaded, or set local-epochs'
            )
        if self.batch_statistics and (self.local_epochs is not None or self.privacy):
            raise ParameterError(
                "batch-statistics are of one batch a round, whose rows have no losses of their own; remove it, or "
                "local-epochs and dp-noise"
            )
        if self.checkpoint_minutes is not None and self.local_epochs is None:
            raise ParameterError("checkpoint-minutes keeps the work of local-epochs; remove it, or set local-epochs")
        if self.local_epochs is not None and self.momentum:
            raise ParameterError(
                "with local-epochs silos step by themselves, by Adam or by SGD without momentum; remove momentum"
            )
        return self

    def rule(self) -> blocks.Rule | None:
        """Return the rule of blocks, if blocks move."""
        return None if self.perturb == "all" else blocks.Rule(tuple(self._moves.items()), self.linear)

    @property
    def _moves(self) -> dict[str, Any]:
        return self.k if isinstance(self.k, dict) else {} if self.k is None else {"*": self.k}

    def recipe(self, rounds: int, augment: str = "") -> Recipe:
        """Return the settings of a silo in a run of `rounds` rounds. augment: how images of a batch are varied."""
        epochs = self.local_epochs or 0
        return Recipe(
            self.form,
            self.sigma,
            RowLosses(
                self.loss,
                self.label_smoothing,
                self.class_weights,
                None if self.own_loss is None else of_arrays(imported(self.own_loss)),
            ),
            self.most_at_once,
            self.direction,
            self.orthogonal,
            self.seed_pool or 0,
            self.directions == "own",
            epochs,
            tuple(self.rate(number, rounds) for number in range(1, rounds + 1)) if epochs else (),
            self.clip_norm or 0.0,
            epochs > 0 and self.optimizer == "adam",
            self.weight_decay,
            batch_statistics=self.batch_statistics,
            betas=self.betas,
            clip_entry=self.clip_entry or 0.0,
            augment=augment,
            rule=self.rule(),
            checkpoint_minutes=self.checkpoint_minutes,
        )
