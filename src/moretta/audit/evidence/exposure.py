"""What one protocol shows to attacks that fit several: the facts in which protocols differ.

Each protocol has its own in a table ``EXPOSED`` of `moretta.audit.attacks.<folder>.exposure`, by the protocol's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numpy.typing import NDArray

from moretta.audit.evidence.case import Case
from moretta.audit.evidence.public_run import PublicRun
from moretta.audit.evidence.uploads import PREFIX
from moretta.contract.messages import Array, Stamp, Tensors

if TYPE_CHECKING:
    import numpy as np

    from moretta.audit.evidence.truth import Truth

Models = dict[int, dict[str, Array]]
"""Models by round, whole: by tensor."""


def gradient(truth: Truth, silo: str, number: int) -> Tensors:
    """Return the gradient of a silo's batch at the true model, which is what most protocols' silos upload."""
    return truth.gradient(silo, number)


def batch(truth: Truth, silo: str, number: int) -> NDArray[np.int64]:
    """Return the numbers of the rows in a silo's batch of a round."""
    return truth.batch(silo, number)


@dataclass(frozen=True)
class Holding:
    """A model that a silo holds in its own state, and that all others move along.

    name: in words, with its article. model: of a silo before a round, in the run's dtype. counted: whose rows are in
    the step that a silo took in a round. start: where shadow models begin, of drawn weights and the model held.
    """

    name: str
    model: Callable[[Truth, str, int], dict[str, Array]]
    counted: Callable[[Truth, str, int], Sequence[str]]
    start: Callable[[Tensors, Tensors, PublicRun], dict[str, Array]]


@dataclass(frozen=True)
class Estimated:
    """Gradients of some layers in uploads that are not by name.

    why_not: says of a run why there are none. public: what everybody knows that says where they lie, for an attacker.
    shown: of a case, a round's ask and an upload's or a sum's tensors the whole model that was sent, and the gradients,
    by name.
    """

    why_not: Callable[[PublicRun], str]
    public: Callable[[Truth], dict[str, Array]]
    shown: Callable[[Case, Stamp, Tensors], tuple[Tensors, Tensors]]


@dataclass(frozen=True)
class Exposure:
    """What a protocol shows.

    attacks: the names of those that fit it, of attacks that fit several protocols.
    prefix: of the names of gradients in an upload. uploaded: the gradient that a silo uploads in a round, at the
    parameters that it was sent. used: the numbers of the rows that went into that.
    recovered: from rounds and the silos whose uploads counted in them, the true gradients and models that the server's
    own secret gives it; None where it has only what it receives.
    sent: the true models that a case's silo is sent, by round; tensors that do not travel are the given ones. None
    where models are not true, or are not sent. worked_out: models that a silo works out from those that it is sent,
    true but for what changes no output. holding: a model in silos' own states, in the place of one that travels.
    estimated: gradients of some layers, where uploads have those and not whole ones by name.
    """

    attacks: frozenset[str]
    prefix: str = PREFIX
    uploaded: Callable[[Truth, str, int], Tensors] = gradient
    used: Callable[[Truth, str, int], NDArray[np.int64]] = batch
    recovered: Callable[[Truth, Mapping[int, Sequence[str]]], dict[str, Array]] | None = None
    sent: Callable[[Case, str, Tensors], Models] | None = None
    worked_out: Callable[[Case, str], Models] | None = None
    holding: Holding | None = None
    estimated: Estimated | None = None
