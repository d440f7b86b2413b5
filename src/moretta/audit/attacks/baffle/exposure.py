"""BAFFLE's silos are sent the true model each round, flat, and upload loss differences in the place of gradients."""

from __future__ import annotations

import numpy as np

from moretta.audit.evidence.case import Case
from moretta.audit.evidence.exposure import Exposure, Models
from moretta.contract.messages import Tensors
from moretta.protocols.baffle.silo.messages import Estimate


def sent(case: Case, silo: str, base: Tensors) -> Models:
    """Return the models that a silo is sent."""
    from moretta.audit.attacks.baffle.estimates import partly_trained
    from moretta.protocols.baffle.torch_forward import layout_of
    from moretta.protocols.common import modules

    model = case.model()
    layout, ties, found = layout_of(partly_trained(model, case.run)), modules.ties(model), Models()
    for number, ask in case.last_of_each_round(silo, Estimate).items():
        at = {**base, **layout.split(np.array(ask.parameters))}
        found[number] = at | {tied: at[name] for tied, name in ties.items()}
    return found


EXPOSED = {"baffle": Exposure(frozenset({"membership-inference", "silo-property"}), sent=sent)}
