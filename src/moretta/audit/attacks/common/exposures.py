"""The table of what protocols show: each protocol's own, found in its folder."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from moretta.audit import attacks
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.exposure import Exposure
from moretta.audit.evidence.public_run import PublicRun
from moretta.audit.evidence.uploads import Uploads, gradient_of
from moretta.contract.messages import Array, Tensors

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth


@cache
def _exposures() -> Mapping[str, Exposure]:
    folders = [found.name for found in pkgutil.iter_modules(attacks.__path__, f"{attacks.__name__}.") if found.ispkg]
    names = [f"{folder}.exposure" for folder in folders if importlib.util.find_spec(f"{folder}.exposure")]
    return {key: one for name in names for key, one in importlib.import_module(name).EXPOSED.items()}


def exposure(run: PublicRun) -> Exposure:
    """Return what the protocol of a run shows."""
    return _exposures()[run.protocol]


def why_not(run: PublicRun) -> str:
    """Say why the uploads of a run have no gradient that can be read."""
    estimated = exposure(run).estimated
    return estimated.why_not(run) if estimated else ""


def public(truth: Truth) -> dict[str, Array]:
    """Return what everybody knows that `shown` needs."""
    estimated = exposure(truth.run).estimated
    return estimated.public(truth) if estimated else {}


def shown(case: Case, held: Uploads, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return the model that was sent in a round, and the gradient in an upload or a sum of it, by parameter."""
    estimated = exposure(case.run).estimated
    return estimated.shown(case, held.stamp, tensors) if estimated else (held.parameters, gradient_of(tensors))


def fitting(attack: str) -> frozenset[str]:
    """Return the protocols that an attack fits."""
    return frozenset(name for name, one in _exposures().items() if attack in one.attacks)
