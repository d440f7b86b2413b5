"""A silo's own side of the exchange under cross-entropy: its noisy outputs, and what it was answered, in either form.

Behind blinded ratios (`moretta.protocols.pbpfl.ratios`) a silo's view has neither its outputs nor its lambdas. It knows
both, as it made them: outputs follow from its rows and the model that it was sent, and lambda_i from mu_ij less the
ratio of two outputs. So an attack of a silo is given its outputs there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moretta.audit.evidence.case import Case
from moretta.contract.messages import Array, Tensors
from moretta.errors import ParameterError
from moretta.protocols.pbpfl import ratios
from moretta.protocols.pbpfl.messages import BlindedSoftmax, Predictions, Ratios, TrainOn

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth

Floats = NDArray[np.float64]

OWN = "outputs/"  # of a silo's batch, by round


def outputs_of(truth: Truth, silo: str, number: int, parameters: Tensors) -> Floats:
    """Return the outputs for a silo's batch of a round at these weights, [rows, outputs]."""
    import torch

    from moretta.audit.evidence.network import outputs_at, tensors

    rows = truth.rows(silo).part(truth.batch(silo, number))
    with torch.no_grad():
        found = outputs_at(copy.deepcopy(truth.federation.model).train(), tensors(parameters), torch.tensor(rows.x))
    return np.asarray(found.double().numpy())


def known(truth: Truth, silo: str, rounds: tuple[int, ...]) -> dict[str, Array]:
    """Return a silo's noisy outputs of these rounds, where its view does not have them."""
    if truth.run.setting("exchange") != "ratios":
        return {}
    found = {}
    for number in rounds:
        asks = [one.message for one in truth.heard(silo, number) if isinstance(one.message, TrainOn)]
        if asks:
            found[f"{OWN}{number}"] = outputs_of(truth, silo, number, asks[-1].parameters)
    return found


def sent_by(case: Case, silo: str) -> dict[int, tuple[Floats, Floats]]:
    """Return z, y^ up to a constant a row, and alpha of a silo's batch, by round."""
    if case.run.setting("exchange") != "ratios":
        sent: Mapping[int, Predictions] = case.last_of_each_round(silo, Predictions)
        return {number: (_floats(one.z), _floats(one.alpha)) for number, one in sent.items()}
    blinded: Mapping[int, Ratios] = case.last_of_each_round(silo, Ratios)
    if any(f"{OWN}{number}" not in case.arrays for number in blinded):
        raise ParameterError('with exchange = "ratios" a silo\'s view has no outputs, and this attack is given none')
    return {number: (_centred(case.arrays[f"{OWN}{number}"]), _floats(one.alpha)) for number, one in blinded.items()}


def opened(sent: Ratios, told: BlindedSoftmax, z: Floats) -> Floats:
    """Return y* of an answer to ratios of these outputs, [rows, outputs].

    lambda_i is taken from the smallest ratio of i, as outputs that were rounded otherwise put it off by that much.
    """
    rows, least = np.arange(len(z)), np.argsort(z, axis=1)[:, :2]
    lambdas = np.empty(z.shape, dtype=object)
    for i in range(z.shape[1]):
        other = np.where(least[:, 0] == i, least[:, 1], least[:, 0])
        mu = ratios.from_words(sent.words[rows, i, other - (other > i)])
        lambdas[:, i] = mu - ratios.whole(np.exp(z[rows, other] - z[:, i]))
    return ratios.unblinded(told, ratios.Blinds(lambdas))


def _centred(outputs: Array) -> Floats:
    wide = np.asarray(outputs, dtype=np.float64)
    return np.asarray(wide - wide.max(axis=1, keepdims=True))


def _floats(array: Array) -> Floats:
    return np.asarray(array, dtype=np.float64)
