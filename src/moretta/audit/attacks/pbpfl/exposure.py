"""PBPFL's silos upload terms of a noisy model's loss; the server's key turns them into true gradients."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moretta.audit.attacks.pbpfl import head_offset
from moretta.audit.attacks.pbpfl.softmax import differences, opened, outputs_of, sent_by, softmax_by_round
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.exposure import Exposure, Models
from moretta.audit.evidence.heads import as_outputs
from moretta.audit.evidence.network import norms_like
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Tensors
from moretta.protocols.pbpfl.messages import BlindedSoftmax, Ratios, Softmax, TrainOn

ATTACKS = frozenset({
    "gradient-inversion",
    "gradient-inversion-of-sum",
    "labels-from-head",
    "membership-inference",
    "server-and-silos",
    "silo-property",
})  # fmt: skip


def recovered(truth: Truth, rounds: Mapping[int, Sequence[str]]) -> dict[str, Array]:
    """Return what the server recovers: gradients by round and silo (of the sum: "sum"), and the true models.

    Gradients are computed from the rows: the server's recovery is exact up to rounding.

    Args:
        rounds: The silos whose uploads counted, by round; only their gradients are recovered.

    Returns:
        ``model/ROUND/TENSOR``, ``gradient/ROUND/SILO/TENSOR`` and ``present/ROUND``, bool[silos]: whether a silo
            counted.
    """
    run, arrays = truth.run, dict[str, Array]()
    for number, silos in rounds.items():
        arrays |= {f"model/{number}/{name}": value for name, value in truth.parameters(number).items()}
        arrays[f"present/{number}"] = np.array([silo in silos for silo in run.silos])
        own = {silo: truth.gradient(silo, number) for silo in silos}
        if run.masked:
            sizes = {silo: len(truth.batch(silo, number)) for silo in silos}
            total = sum(sizes.values())
            shares, names = [(sizes[silo] / total, gradient) for silo, gradient in own.items()], own[silos[0]]
            own = {"sum": {n: np.sum([s * np.asarray(g[n], np.float64) for s, g in shares], axis=0) for n in names}}
        arrays |= {f"gradient/{number}/{who}/{n}": np.asarray(g) for who, g_s in own.items() for n, g in g_s.items()}
    return arrays


def uploaded(truth: Truth, silo: str, number: int) -> Tensors:
    """Return the gradient of the noisy loss that a silo uploads in a round, at the noisy model.

    If the head has weight normalisation, v's place holds the gradient of W: the noisy model has v = W and g = |v|.
    """
    ask = truth.messages("server", number, TrainOn)[-1]
    y = [message.y for message in truth.messages("server", number, Softmax, silo)]
    if blinded := truth.messages("server", number, BlindedSoftmax, silo):
        sent = truth.messages("server", number, Ratios, silo)
        outputs = outputs_of(truth, silo, number, ask.parameters)
        y = [opened(sent[-1], blinded[-1], outputs)]
    loss = _along(truth, y[-1]) if y else None
    gradient, v = dict(truth.gradient(silo, number, ask.parameters, loss)), truth.run.head
    if truth.run.head_magnitude:
        of_g, weight = gradient.pop(truth.run.head_magnitude), ask.parameters[v]
        gradient[v] = gradient[v] + weight * (of_g / norms_like(of_g, weight))
    return gradient


def _along(truth: Truth, y: Array) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the noisy loss under cross-entropy, mean (U y - u) . y^ (`moretta.protocols.pbpfl.terms`)."""

    def value(outputs: Tensor, targets: Tensor) -> Tensor:
        u = truth.loss.weighted_targets(targets, outputs)
        error = u.sum(dim=1, keepdim=True) * torch.from_numpy(np.array(y)).to(outputs) - u
        along: Tensor = (error.detach() * outputs).sum(dim=1).mean()
        return along

    return value


def without_offset(case: Case, silo: str) -> Models:
    """Return the noisy models without the offset r on their heads, which a silo first computes.

    A noisy model without r has the true bias and the true outputs, for all scales. The offset r is that of
    `head_offset` from labels, or of `softmax` under cross-entropy. There it is known up to a number common to all
    outputs, which changes no softmax.
    """
    run, asks = case.run, case.last_of_each_round(silo, TrainOn)
    if run.loss == "mse":
        some = slice(head_offset.ROWS)
        seen = head_offset.seen(case, silo, case.arrays["x"][some])
        gamma = head_offset.fit(seen, as_outputs(case.arrays["y"][some], run.outputs))
        offsets = dict(zip(seen.rounds.tolist(), np.einsum("tm,tmc->tc", gamma, seen.spread), strict=True))
    else:
        sent = sent_by(case, silo)
        softmax = softmax_by_round(case, silo)
        offsets = {
            number: differences(*sent[number], p)
            for number, p in softmax.items()
            if len(p) > asks[number].parts.max()  # from fewer rows than parts the softmax does not follow
        }
    models = Models()
    for number, offset in offsets.items():
        held = dict(asks[number].parameters)
        for name, each in ((run.head, offset[:, None]), (run.head_bias, offset)):
            held[name] = (held[name].astype(np.float64) - each).astype(held[name].dtype)
        if run.head_magnitude:
            held[run.head_magnitude] = norms_like(held[run.head_magnitude], held[run.head])
        models[number] = held
    return models


EXPOSED = {
    "pbpfl": Exposure(ATTACKS, prefix="noisy/", uploaded=uploaded, recovered=recovered, worked_out=without_offset)
}
