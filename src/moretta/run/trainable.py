"""What the loop of rounds reads of a federation; `moretta.run.federation.Federation` offers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from moretta.data.silo import Silo
from moretta.engines.settings import Engine
from moretta.protocols.common.training import Training
from moretta.run.evaluation import LabelledRows
from moretta.secure_aggregation.cohort import Participation
from moretta.secure_aggregation.settings import SecureAggregation


class Trainable(Protocol):
    """A model, the silos that train it, and the settings by which they do."""

    @property
    def name(self) -> str:
        """Of the run."""

    @property
    def model(self) -> nn.Module:
        """The architecture, with the weights to begin with."""

    @property
    def outputs(self) -> int:
        """How many outputs the model has."""

    @property
    def silos(self) -> Sequence[Silo]:
        """Everybody who trains, here or elsewhere."""

    @property
    def protocol(self) -> Training:
        """The protocol's settings."""

    @property
    def aggregation(self) -> SecureAggregation:
        """How sums are made."""

    @property
    def engine(self) -> Engine:
        """Where the silos live."""

    @property
    def test(self) -> LabelledRows | None:
        """Rows on which the server measures."""

    @property
    def validation(self) -> LabelledRows | None:
        """Rows on which early stopping judges."""

    @property
    def early_stopping(self) -> int | None:
        """The rounds without a lower validation loss after which the run stops."""

    @property
    def participation(self) -> float:
        """The part of the silos that takes part in a round."""

    @property
    def checkpoint_every(self) -> int:
        """The rounds from one checkpoint to the next."""

    @property
    def evaluate_every(self) -> int | None:
        """The rounds from one evaluation to the next, None for about 50 in a run."""

    @property
    def record_views(self) -> bool | tuple[int, ...]:
        """The rounds whose views are recorded, True for all."""

    @property
    def score_at_silos(self) -> bool:
        """Whether silos score the outcome on the rows that they hold back."""

    @property
    def task(self) -> str | None:
        """ "classification" or "regression"."""

    @property
    def dtype(self) -> str:
        """Of the model: "float32" or "float64"."""

    @property
    def feature_names(self) -> Sequence[str]:
        """Of the input columns, where they have names."""

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """The run file's sections."""

    @property
    def insecure_secret_seed(self) -> int | None:
        """For tests only: all secrets follow from it."""

    def playing(self, silos: Sequence[str], seed: int) -> Participation:
        """Return who of these silos plays which round."""
