"""What one protocol shows to attacks that fit several: the facts in which protocols differ.

Each protocol has its own in a table ``EXPOSED``, by the protocol's name: in `moretta.audit.attacks.<folder>.exposure`,
or for a protocol of another package in the module of its entry point ``moretta.attacks``.
"""

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from moretta.audit import attacks
from moretta.audit.evidence.attack import Given
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.truth import Truth
from moretta.audit.evidence.uploads import PREFIX, gradient_of, of_round, rows_of
from moretta.contract.messages import Array, Stamp, Tensors
from moretta.contract.roles import under
from moretta.protocols.common.entry import ATTACKS, installed

Models = dict[int, dict[str, Array]]
"""Models by round, whole: by tensor."""


@dataclass(frozen=True)
class Holding:
    """A model that a silo holds in its own state, and along which all others move.

    Attributes:
        name: In words, with its article.
        model: Returns a silo's model before a round, in the run's dtype.
        counted: Returns the silos in a silo's step of a round.
        start: Returns the first weights of shadow models, from drawn weights and the held model.
    """

    name: str
    model: Callable[[Truth, str, int], dict[str, Array]]
    counted: Callable[[Truth, str, int], Sequence[str]]
    start: Callable[[Tensors, Tensors, PublicRun], dict[str, Array]]


@dataclass(frozen=True)
class Estimated:
    """Gradients of some layers in uploads that are not by name.

    Attributes:
        why_not: Returns why a run has no such gradients, empty if it has.
        public: Returns the public places of these gradients, for an attacker.
        shown: Returns, for a case, a round's ask and the tensors of an upload or sum, the whole sent model and the
            gradients by name.
    """

    why_not: Callable[[PublicRun], str]
    public: Callable[[Truth], dict[str, Array]]
    shown: Callable[[Case, Stamp, Tensors], tuple[Tensors, Tensors]]


@dataclass(frozen=True)
class Exposure:
    """What a protocol shows.

    Attributes:
        attacks: The names of the attacks that fit it, among those that fit several protocols.
        prefix: The beginning of gradients' names in an upload.
        uploaded: Returns the gradient that a silo uploads in a round, at the received parameters.
        used: Returns the numbers of the rows behind that gradient.
        recovered: Returns, for rounds and the silos that counted in them, the true gradients and models that the
            server's secret recovers. None if the server has only what it receives.
        sent: Returns the true models that a case's silo receives, by round; its last argument has the tensors that do
            not travel. None if models are not true or not sent.
        worked_out: Returns models that a silo computes from received ones, with the true outputs.
        holding: A model in silos' own states, instead of one that travels.
        estimated: Gradients of some layers, if uploads have those instead of whole ones by name.
        moves: Returns, for a case, how many of a row's numbers move each tensor, if these are clipped instead of
            gradients.
    """

    attacks: frozenset[str]
    prefix: str = PREFIX
    uploaded: Callable[[Truth, str, int], Tensors] = Truth.gradient
    used: Callable[[Truth, str, int], NDArray[np.int64]] = Truth.batch
    recovered: Callable[[Truth, Mapping[int, Sequence[str]]], dict[str, Array]] | None = None
    sent: Callable[[Case, str, Tensors], Models] | None = None
    worked_out: Callable[[Case, str], Models] | None = None
    holding: Holding | None = None
    estimated: Estimated | None = None
    moves: Callable[[Case], Mapping[str, int]] | None = None


@cache
def _exposures() -> Mapping[str, Exposure]:
    folders = [info.name for info in pkgutil.iter_modules(attacks.__path__, f"{attacks.__name__}.") if info.ispkg]
    own = [importlib.import_module(f"{at}.exposure") for at in folders if importlib.util.find_spec(f"{at}.exposure")]
    others = [module for _, module in installed(ATTACKS) if hasattr(module, "EXPOSED")]
    return {key: exposed for module in (*others, *own) for key, exposed in module.EXPOSED.items()}


def exposure(run: PublicRun) -> Exposure:
    """Return what the protocol of a run shows."""
    return _exposures()[run.protocol]


def why_not(run: PublicRun) -> str:
    """Return why the uploads of a run have no readable gradient; empty if they have one."""
    estimated = exposure(run).estimated
    return estimated.why_not(run) if estimated else ""


def gather_rounds(truth: Truth, rounds: Mapping[int, Sequence[str]], arrays: Mapping[str, Array], view: str) -> Given:
    """Return the server's input for `read`, and background rows: its view, or the gradients by its own secret.

    Args:
        rounds: The silos whose uploads counted, by round.
        arrays: The server's further input.
        view: The server's view, in words.
    """
    run, known, shown = truth.run, truth.background, exposure(truth.run)
    inputs = {**arrays, "x": known.x, "y": known.y, **(shown.estimated.public(truth) if shown.estimated else {})}
    knowledge = f"{len(known.x)} labelled background rows"
    if shown.recovered:
        knowledge = f"its key, with which it recovers true gradients and model, and {knowledge}"
        return Given({"server": ()}, inputs | shown.recovered(truth, rounds), view, knowledge)
    # An earlier round may have agreed on the keys of a sum.
    return Given({"server": tuple(number for number in run.recorded if number <= max(rounds))}, inputs, view, knowledge)


def counted(case: Case, number: int) -> list[str]:
    """Return the silos whose uploads counted in a round, in the run's order."""
    if exposure(case.run).recovered:
        return [silo for silo, there in zip(case.run.silos, case.arrays[f"present/{number}"], strict=True) if there]
    held = of_round(case, number).counted
    return [silo for silo in case.run.silos if silo in held]


def read(case: Case, number: int, silo: str = "") -> tuple[Tensors, Tensors, int]:
    """Return the sent model of a round, the gradient in a silo's upload, by parameter, and its number of rows.

    Args:
        silo: The silo; empty for the sum of all. A masked upload's words are read as if they were unmasked.
    """
    run, shown = case.run, exposure(case.run)
    if shown.recovered:
        rows = sum(rows_of(run, name, number) for name in ([silo] if silo else counted(case, number)))
        gradient = under(f"gradient/{number}/{silo or 'sum'}/", case.arrays)
        return under(f"model/{number}/", case.arrays), gradient, rows
    held = of_round(case, number)
    total = None if silo else held.total()
    rows = total.weight if total else rows_of(run, silo, number)
    tensors = total.means if total else held.bare(silo, rows)
    if shown.estimated:
        return *shown.estimated.shown(case, held.stamp, tensors), rows
    return held.parameters, gradient_of(tensors), rows


def fitting(attack: str) -> frozenset[str]:
    """Return the protocols that an attack fits."""
    return frozenset(name for name, exposed in _exposures().items() if attack in exposed.attacks)
