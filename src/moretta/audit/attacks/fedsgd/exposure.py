"""FedSGD sends the true model each round and uploads gradients; FedAvg and FedProx upload differences of several."""

import numpy as np
from numpy.typing import NDArray

from moretta.audit.evidence.case import Case
from moretta.audit.evidence.exposure import Exposure, Models
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Tensors
from moretta.errors import ParameterError
from moretta.protocols.fedsgd.client import Client
from moretta.protocols.fedsgd.messages import TrainOn

BATCHES = frozenset({"gradient-inversion", "gradient-inversion-of-sum", "membership-inference"})
GRADIENTS = BATCHES | {"labels-from-head", "server-and-silos", "silo-property"}


def sent(case: Case, silo: str, base: Tensors) -> Models:
    """Return the models that a silo receives."""
    return {n: {**base, **message.parameters} for n, message in case.last_of_each_round(silo, TrainOn).items()}


def used(truth: Truth, silo: str, number: int) -> NDArray[np.int64]:
    """Return the numbers of the rows in a silo's upload: its batch, or under dp-noise the lot that it drew."""
    if not truth.run.setting("dp-noise"):
        return truth.batch(silo, number)
    asks = [entry.message for entry in truth.heard("server", number) if isinstance(entry.message, TrainOn)]
    client = truth.role(silo, number)
    if not isinstance(client, Client):
        raise ParameterError(
            f"expected a client of fedsgd, the only protocol here that draws lots; got {type(client).__name__}"
        )
    return client.lot(asks[-1])


EXPOSED = {
    "fedsgd": Exposure(GRADIENTS, used=used, sent=sent),
    "fedavg": Exposure(BATCHES, sent=sent),
    "fedprox": Exposure(BATCHES, sent=sent),
    "centralised": Exposure(frozenset({"membership-inference"})),
    "local": Exposure(frozenset({"membership-of-local-models"})),
}
