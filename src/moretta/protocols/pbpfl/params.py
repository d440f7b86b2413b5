"""Settings of PBPFL."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from moretta.protocols.training import Positive, Training


class PBPFL(Training):
    """The server perturbs the model, silos train on it exactly (`practical.md`).

    partitions: m, the number of parts of the outputs with a gamma of their own; 1 to the number of outputs.
    rho: |alpha r| / |y|, how large the offset of the noisy predictions is against the true ones.
    variant: under cross-entropy, what the server returns of the softmax: "probabilities" as they are, which costs
    m + 1 gradients, or the "paper" form, which costs 3 m + 1 and keeps no more from a silo.
    """

    name: Literal["pbpfl"] = "pbpfl"
    partitions: PositiveInt = 1
    rho: Positive = 3.0
    variant: Literal["probabilities", "paper"] = "probabilities"

    @property
    def form(self) -> str:
        """The identity that the silos' terms obey (`moretta.protocols.pbpfl.terms`)."""
        return "squared-error" if self.loss == "mse" else self.variant
