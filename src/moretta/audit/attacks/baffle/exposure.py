"""BAFFLE's silos receive the true model each round, flat, and upload loss differences instead of gradients.

With `linear = "activations"` they also upload gradients of linear layers, as long as these.
"""

import numpy as np

from moretta.audit.attacks.baffle import estimates
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.exposure import Estimated, Exposure, Models
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Stamp, Tensors
from moretta.contract.roles import under
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.estimate import ESTIMATE, directions_of
from moretta.protocols.baffle.silo.messages import Estimate
from moretta.protocols.baffle.torch_forward import layout_of
from moretta.protocols.common import modules

PLACES = "places/"  # of layers in an upload's estimate
GRADIENTS = frozenset({"gradient-inversion", "gradient-inversion-of-sum", "labels-from-head"})


def sent(case: Case, silo: str, base: Tensors) -> Models:
    """Return the models that a silo receives."""
    asks = case.last_of_each_round(silo, Estimate).items()
    return Models({number: _whole(case, ask, base) for number, ask in asks})


def _whole(case: Case, ask: Estimate, base: Tensors) -> dict[str, Array]:
    model = case.model()
    at = {**base, **layout_of(estimates.partly_trained(model, case.run)).split(np.array(ask.parameters))}
    return at | {tied: at[name] for tied, name in modules.ties(model).items()}


def why_not(run: PublicRun) -> str:
    """Return why uploads have no readable gradient; empty if they have one."""
    if run.setting("local-epochs"):
        return "an upload is the difference of several steps along estimates, and not a gradient"
    if not estimates.uploads_layers(run):
        return "silos upload loss differences or estimates along directions, and no layer's gradient"
    if run.scheme == "additive-shares":
        return "the sums that the server opened are not put together from shares again here"
    return ""


def public(truth: Truth) -> dict[str, Array]:
    """Return the untrained tensors, and the places of each linear layer's in an estimate."""
    forward = estimates.forward_at(truth)
    names, start = estimates.recipe_of(truth.run, forward).units, 0
    if not names:
        raise ParameterError("no linear layer of this model moves unit by unit, and no layer's gradient was uploaded")
    arrays = estimates.fixed_of(truth)
    for name, shape in forward.layout.shapes.items():
        size = int(np.prod(shape, dtype=int))
        if name in names:
            arrays[f"{PLACES}{name}"] = np.array([start, *shape])
        if name in names or estimates.draws_own(truth.run):
            start += size
    return arrays


def shown(case: Case, stamp: Stamp, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return the sent model, and the gradients of linear layers in an upload or a sum."""
    asks = (entry.message for entry in case.heard("server", Estimate))
    ask = next(message for message in asks if isinstance(message, Estimate) and message.stamp == stamp)
    estimate, gradients = np.asarray(tensors[ESTIMATE], np.float64), dict[str, Array]()
    for name, place in under(PLACES, case.arrays).items():
        start, *shape = place.tolist()
        gradients[name] = estimate[start : start + int(np.prod(shape, dtype=int))].reshape(shape)
    return _whole(case, ask, under(estimates.FIXED, case.arrays)), gradients


def moves(case: Case) -> dict[str, int]:
    """Return how many of a row's scalars move each tensor: all K, or the repeats of its block."""
    run, model = case.run, case.model()
    if not estimates.by_blocks(run):
        settings = estimates.settings_of(run)
        return dict.fromkeys(modules.trainable(model), directions_of(settings.form, settings.directions_at_once))
    forward = estimates.forward_of(model, run, {}, tokens=case.arrays["x"].dtype.kind in "iu")
    return {name: block.repeats for block in estimates.recipe_of(run, forward).blocks for name in block.tensors}


EXPOSED = {
    "baffle": Exposure(
        GRADIENTS | {"membership-inference", "silo-property"},
        sent=sent,
        estimated=Estimated(why_not, public, shown),
        moves=moves,
    )
}
