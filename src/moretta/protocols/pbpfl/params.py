"""Settings of PBPFL."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from moretta.protocols.training import Positive, Training


class PBPFL(Training):
    """The server perturbs the model, silos train on it exactly (`practical.md`).

    partitions: m, the number of parts of the outputs with a gamma of their own; 1 to the number of outputs.
    rho: |alpha r| / |y|, how large the offset of the noisy predictions is against the true ones.
    """

    name: Literal["pbpfl"] = "pbpfl"
    loss: Literal["mse"] = "mse"
    partitions: PositiveInt = 1
    rho: Positive = 3.0
