"""The server's key: draw it, perturb the model with it, recover the true gradient.

Notation of `practical.md`: scales R (`moretta.protocols.pbpfl.scales`), the public direction r_a, one secret gamma per
part, and the offset r = gamma o r_a that is added to every entry of a row of the head (and to its bias). In the paper's
form of cross-entropy each part also has a secret xi.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from moretta.contract.messages import Array, Tensors
from moretta.contract.roles import under
from moretta.errors import ParameterError
from moretta.protocols.pbpfl.params import Scales
from moretta.protocols.pbpfl.scales import ScaleKey, ScalePlan
from moretta.secure_aggregation.keystream import Keystream

DROPPED = 12  # bits of float64's 53 that are not sent, so that 2^12 true values have the same sent one
LARGEST_FACTOR = 4.0  # scales lie in [1/2, 2], so an entry of R = s_out / s_in is at most 4


@dataclass(frozen=True, repr=False)
class Key:
    """One round's key. Secret: `scales`, `gamma` and `xi`; public: `parts` and `direction`.

    Attributes:
        gamma, xi: float64[m].
        parts: int64[outputs], from 0 to m - 1.
        direction: float64[outputs], r_a, of rms 1.
    """

    scales: ScaleKey
    gamma: NDArray[np.float64]
    xi: NDArray[np.float64]
    parts: NDArray[np.int64]
    direction: NDArray[np.float64]

    @property
    def offset(self) -> NDArray[np.float64]:
        """Return r = gamma o r_a, float64[outputs]."""
        return self.gamma[self.parts] * self.direction

    def __repr__(self) -> str:
        return f"Key(m={len(self.gamma)}, <redacted>)"


class Perturbation:
    """Perturbs one model and recovers its gradients.

    Args:
        partitions: m, from 1 to the number of outputs; outputs are split into m parts of neighbours.
        form: The identity of the silos' terms (`moretta.protocols.pbpfl.terms`): "squared-error", or under
            cross-entropy "probabilities" or "paper".
        scales: "continuous" or "powers-of-two" (`moretta.protocols.pbpfl.params.PBPFL`).

    Raises:
        ParameterError: `partitions` or `scales` has another value, or the head is tied under form "paper".
    """

    def __init__(self, plan: ScalePlan, partitions: int, form: str, scales: Scales = "continuous") -> None:
        outputs = plan.head.outputs
        if not 1 <= partitions <= outputs:
            raise ParameterError(f"partitions = {partitions}: expected 1 to {outputs}, the outputs of the model")
        if plan.head.tied and form == "paper":
            raise ParameterError('variant = "paper" needs a head of its own; this one is tied: use "probabilities"')
        self.plan, self.partitions, self.form = plan, partitions, form
        draws = {"continuous": plan.draw, "powers-of-two": plan.draw_powers_of_two}
        self.powers_of_two = scales == "powers-of-two"
        if scales not in draws:
            raise ParameterError(f'scales = "{scales}": expected {" or ".join(draws)}')
        self._draw_scales = draws[scales]
        self.parts = np.arange(outputs) * partitions // outputs

    def draw_key(self, stream: Keystream, offset_size: float) -> Key:
        """Draw a key: the plan's scales, and an offset of a given size.

        gamma_s = +-u_s offset_size with log u_s uniform in [log 0.7, log 1.4]; r_a has random signs and sizes uniform
        in [1, 3], divided by their rms; xi_s = +-1/2 to +-2, log-uniform.

        Args:
            offset_size: |gamma r_a|, approximately; 0 for no offset. A tied head never has an offset.
        """
        m, outputs = self.partitions, len(self.parts)
        if self.plan.head.tied:
            offset_size = 0.0  # another layer uses the weight too; an offset would change the function there
        size = np.exp(np.log(0.7) + stream.uniform(m) * np.log(2.0))
        gamma = _signs(stream, m) * size * offset_size
        direction = _signs(stream, outputs) * (1.0 + 2.0 * stream.uniform(outputs))
        direction /= np.sqrt(np.mean(direction**2))
        xi = _signs(stream, m) * 2.0 ** (2.0 * stream.uniform(m) - 1.0)
        return Key(self._draw_scales(stream), gamma, xi, self.parts, direction)

    def perturb(
        self, parameters: Mapping[str, torch.Tensor], key: Key, dtype: torch.dtype | None = None
    ) -> dict[str, Array]:
        """Return W^: R o W, and r on the head's rows.

        Differs from the paper: with a bias in the head, r is added to the bias too, and alpha has one term more.

        W^ is rounded to fewer bits than W has: 24 under float32, 41 under float64. If W had as few bits as W^, or lay
        on the lattice of an initialiser, R would follow from W^ alone (`scales-from-low-bits` of the audit). Scales of
        powers of two show mantissas in any case. With them W is in the run's dtype, and below the head W^ is R o W to
        the last bit.

        Args:
            dtype: Of the run, to which W^ is rounded; None keeps the dtype of W.

        Source:
            `practical.md`, Eq. 6 to 8.
        """
        true, below = dict[str, Array](), dict[str, Array]()
        above = self.plan.head.above if key.offset.any() else ()
        for name, value in self.plan.head.joined(parameters).items():
            true[name] = value.numpy(force=True)
            if name not in above:
                below[name] = true[name]
        rounded = partial(_rounded, dtype=None if self.powers_of_two else dtype)
        noisy = self.plan.perturb(below, key.scales, rounded)
        for name in true.keys() - below.keys():
            offset = key.offset
            if name == self.plan.head.weight:
                ends = [1] * true[name].ndim
                ends[self.plan.head.axis] = -1
                offset = offset.reshape(ends)
            # In float64 until the offset is added, so that the head too is rounded once.
            head = self.plan.perturb({name: true[name].astype(np.float64)}, key.scales)[name] + offset
            noisy[name] = rounded(head.astype(true[name].dtype))
        noisy = self.plan.head.split(noisy)
        return {name: noisy[name] for name in parameters}

    def coefficients(self, key: Key) -> dict[str, float]:
        """Return the factor of each uploaded gradient in the true gradient, by its prefix."""
        factors = {"noisy": 1.0} | {f"sigma/{s}": -gamma for s, gamma in enumerate(key.gamma)}
        if self.form == "squared-error":
            return factors | {"beta": float(key.offset @ key.offset)}  # `practical.md`, Eq. 29
        if self.form == "probabilities":
            return factors
        both = zip(key.gamma, key.xi, strict=True)
        factors |= {f"beta/{s}": gamma * xi for s, (gamma, xi) in enumerate(both)}
        return factors | {f"psi/{s}": -xi for s, xi in enumerate(key.xi)}

    def recover(self, means: Tensors, key: Key, *, in_place: bool = False) -> dict[str, NDArray[np.float64]]:
        """Return the gradient of the true loss from the silos' means at W^, float64 by name.

        For a head with weight normalisation it is the gradient of W (`moretta.protocols.pbpfl.head.Head.chained`).

        Args:
            means: The silos' mean uploads by name, such as "noisy/NAME".
            in_place: Whether the result overwrites the noisy loss's gradients, which are then float64.

        Source:
            `practical.md`, Eq. 29, for the squared error (`pbpfl.txt`, Eq. 19, with one part), and the end of section
            III-C for cross-entropy.
        """
        coefficients, names = self.coefficients(key), self.trained(means)

        # One by one: each sum is freed before the next is made, because new memory costs more than arithmetic.
        def corrected() -> Iterator[tuple[str, Array]]:
            for name in names:
                if name in self.plan.head.above:
                    yield name, self._recover_head(name, means, key)
                else:
                    yield name, _combine(name, means, coefficients)

        into = {name: means[f"noisy/{name}"] for name in names} if in_place else None
        return self.plan.recover(corrected(), key.scales, into)

    def _recover_head(self, name: str, means: Tensors, key: Key) -> Array:
        head, noisy = self.plan.head, means[f"noisy/{name}"]
        if self.form == "probabilities":
            return noisy
        correction: Array
        if self.form == "paper":
            xi = key.xi[key.parts]
            correction = (xi[:, None] if name == head.weight else xi) * means[f"psi/{name}"]
        elif name == head.weight:
            correction = head.like(np.outer(key.offset, means["alpha_h"][: head.inputs]), noisy.shape)
        else:
            correction = key.offset * means["alpha_h"][head.inputs]
        return np.asarray(noisy - correction)

    def recover_buffers(self, means: Tensors, key: Key) -> dict[str, NDArray[np.float64]]:
        """Return the running statistics of the true model from the silos' means, float64 by name."""
        return self.plan.recover_buffers(under("buffer/", means), key.scales)

    def true_loss(self, means: Tensors, key: Key, log_normaliser: float = 0.0) -> float:
        """Return the true model's loss. log_normaliser: paper's form, mean over rows of log sum_i exp(y_i - max y^)."""
        scalars = means["scalars"]
        if self.form == "squared-error":
            return float(scalars[0] - key.gamma @ scalars[1:-1] + key.offset @ key.offset * scalars[-1])
        if self.form == "probabilities":
            return float(scalars[0])
        return float(scalars[0] + key.gamma @ scalars[1:] + log_normaliser)

    def largest_step(self, steps: Mapping[str, float], key: Key) -> float:
        """Return a bound of the error that the ring's steps add to any entry of the recovered gradient."""
        coefficients = self.coefficients(key)
        largest = 0.0
        for name in self.trained(steps):
            if name in self.plan.head.above:
                step = steps[f"noisy/{name}"]
                if self.form == "squared-error":
                    step += float(np.abs(key.offset).max()) * steps["alpha_h"]
                elif self.form == "paper":
                    step += float(np.abs(key.xi).max()) * steps[f"psi/{name}"]
            else:
                step = sum(abs(factor) * steps[f"{prefix}/{name}"] for prefix, factor in coefficients.items())
            largest = max(largest, step)
        return LARGEST_FACTOR * largest

    @staticmethod
    def trained(uploads: Mapping[str, object]) -> list[str]:
        """Return the names of the trained parameters, read from the names of uploads."""
        return [name.removeprefix("noisy/") for name in uploads if name.startswith("noisy/")]


def _rounded(value: Array, dtype: torch.dtype | None) -> Array:
    """Return floats rounded to float32, or under float64 to 12 bits less. Integers stay, and with dtype None all."""
    if value.dtype.kind != "f" or dtype is None:
        return value
    if dtype == torch.float32:
        return value.astype(np.float32)
    high = value * (2.0**DROPPED + 1.0)  # Veltkamp's splitting (Dekker, Numerische Mathematik 18, 1971, section 5)
    return np.asarray(high - (high - value))


def _combine(name: str, means: Tensors, coefficients: Mapping[str, float]) -> Array:
    """Return the sum of one parameter's uploads times their coefficients, float64; the noisy gradient's is 1."""
    total: Array = np.asarray(means[f"noisy/{name}"], dtype=np.float64)
    for prefix, factor in coefficients.items():
        if prefix != "noisy":
            term = np.multiply(means[f"{prefix}/{name}"], factor, dtype=np.float64)
            term += total  # in place: the uploads themselves are never written to
            total = term
    return total


def _signs(stream: Keystream, count: int) -> NDArray[np.float64]:
    return np.where(stream.uniform(count) < 0.5, -1.0, 1.0)
