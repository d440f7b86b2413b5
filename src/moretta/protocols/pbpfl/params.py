"""Settings of PBPFL."""

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from moretta.contract.settings import Positive
from moretta.errors import ParameterError
from moretta.protocols.common.training import Training

Scales = Literal["continuous", "powers-of-two"]


class PBPFL(Training):
    """Perturb the model at the server, and train on it exactly at the silos (`practical.md`).

    Args:
        partitions: m, the number of parts of the outputs with a gamma of their own; 1 to the number of outputs.
        rho: |alpha r| / |y|, the size of the offset of predictions relative to the targets, or under cross-entropy to
            the true outputs.
        variant: under cross-entropy, the form in which the server returns the softmax: "probabilities" themselves,
            which cost m + 1 gradients, or the "paper" form, which costs 3 m + 1 and hides no more from a silo.
        exchange: under cross-entropy, what a silo sends for its softmax: "outputs" up to a constant per row, or with
            the paper's form "ratios" of their exponentials, blinded by a random number per row and class. Ratios hide
            the softmax from the server only with two classes; with more, it follows from the differences of a row's
            ratios (`moretta.protocols.pbpfl.ratios`). With ratios the server has no training loss, and receives 88
            bytes per row for each ordered pair of classes.
        scales: "continuous", or "powers-of-two", which is exact in float32: below the head all values round as in the
            true model, bit by bit, and only the head's offset adds rounding. The price is most of what scales hide.
            Differs from the paper: a scale is 1/2, 1 or 2 and channels stay in their places. So a silo sees the sign
            and the mantissa of every weight below the head, and each step's change relative to the weight. The exponent
            is off by at most 2 up or down, drawn afresh every round, so an average over rounds shows it. Two
            consecutive rounds also give the head's offset, without labels, and with it the head's weights to a fraction
            of a percent and their step approximately. In float64, continuous scales give a round's gradient to 1e-8
            and hide more.
    """

    name: Literal["pbpfl"] = "pbpfl"
    partitions: PositiveInt = 1
    rho: Positive = 3.0
    variant: Literal["probabilities", "paper"] = "probabilities"
    exchange: Literal["outputs", "ratios"] = "outputs"
    scales: Scales = "continuous"

    @model_validator(mode="after")
    def _exchanges(self) -> Self:
        if self.autocast:
            raise ParameterError(
                "autocast: pbpfl takes the offset's gradients off again, and what bfloat16 rounds of them stays: an "
                "MLP's gradient was off by 7e-2, where fedsgd's was by 6e-3; remove it, or use fedsgd"
            )
        if self.own_loss is not None:
            raise ParameterError(
                "own-loss: pbpfl trains exactly by identities of the squared error and of cross-entropy, which another "
                "loss does not have; remove it, or choose another protocol"
            )
        if self.exchange == "ratios" and (self.loss != "cross-entropy" or self.variant != "paper"):
            raise ParameterError(
                'exchange = "ratios" needs loss = "cross-entropy" and variant = "paper"; set both, or remove it'
            )
        return self

    @property
    def form(self) -> str:
        """The identity that the silos' terms obey (`moretta.protocols.pbpfl.terms`)."""
        return "squared-error" if self.loss == "mse" else self.variant
