"""The table of what protocols show: each protocol's own, found in its folder."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from functools import cache

from moretta.audit import attacks
from moretta.audit.evidence.exposure import Exposure
from moretta.audit.evidence.public_run import PublicRun


@cache
def _exposures() -> Mapping[str, Exposure]:
    folders = [found.name for found in pkgutil.iter_modules(attacks.__path__, f"{attacks.__name__}.") if found.ispkg]
    names = [f"{folder}.exposure" for folder in folders if importlib.util.find_spec(f"{folder}.exposure")]
    return {key: one for name in names for key, one in importlib.import_module(name).EXPOSED.items()}


def exposure(run: PublicRun) -> Exposure:
    """Return what the protocol of a run shows."""
    return _exposures()[run.protocol]


def fitting(attack: str) -> frozenset[str]:
    """Return the protocols that an attack fits."""
    return frozenset(name for name, one in _exposures().items() if attack in one.attacks)
