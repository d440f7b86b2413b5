"""What the loop of rounds reads of a federation; `moretta.run.federation.Federation` offers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from moretta.config.specification import Specification
from moretta.data.layout import SampleLayout
from moretta.data.silo import Silo
from moretta.data.tables.preparation import ColumnRules
from moretta.data.tables.schema import Schema
from moretta.run.evaluation import LabelledRows


class Trainable(Protocol):
    """The settings of a run, and the model and rows that stand beside them."""

    @property
    def spec(self) -> Specification:
        """The settings."""

    @property
    def model(self) -> nn.Module:
        """The architecture, with the weights to begin with."""

    @property
    def outputs(self) -> int:
        """How many outputs the model has."""

    @property
    def silos(self) -> Sequence[Silo]:
        """Everybody who trains, here or remote."""

    @property
    def layout(self) -> SampleLayout | None:
        """How a sample of several arrays is packed; None where it is one array."""

    @property
    def test(self) -> LabelledRows | None:
        """Rows on which the server measures."""

    @property
    def validation(self) -> LabelledRows | None:
        """Rows on which early stopping judges."""

    @property
    def table(self) -> Schema | None:
        """What the columns of its tables mean; None for arrays."""

    @property
    def column_rules(self) -> ColumnRules:
        """How input columns are prepared."""

    @property
    def class_names(self) -> Sequence[str]:
        """Of the classes, where they have names."""

    @property
    def feature_names(self) -> Sequence[str]:
        """Of the input columns, where they have names."""
