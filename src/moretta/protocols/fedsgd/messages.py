"""The messages of the plain baselines.

The answer to `TrainOn` is an upload to the sum. `Step` and `Show` are for silos that train alone (`Local`).
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from moretta.contract.messages import Message, Tensors, message, within


@message("fedsgd/train-on")
class TrainOn(Message):
    """The true model without the frozen tensors, which the set-up sends, and the encoding of its update."""

    BESIDE_FROZEN: ClassVar[bool] = True

    parameters: Tensors
    encoding: Mapping[str, int]


@message("local/step")
class Step(Message):
    """Take this round's step alone."""


@message("local/stepped")
class Stepped(Message):
    """The step was taken: the mean loss before it, and the rows used."""

    loss: float
    rows: Annotated[int, within(1)]


@message("local/show")
class Show(Message):
    """Show your final model, for the comparison."""


@message("local/shown")
class Shown(Message):
    """A silo's own model."""

    parameters: Tensors


MESSAGES = (TrainOn, Step, Stepped, Show, Shown)
