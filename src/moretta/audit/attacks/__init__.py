"""The attacks, one a file, each with the paper or the derivation it comes from."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

from moretta.audit.attack import Attack

ORDER = ("server", "silo", "silos together", "server and silos", "outsider")


def all_attacks() -> Sequence[Attack]:
    """Return all attacks: by role, and then by name."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    found = [getattr(importlib.import_module(f"{__name__}.{name}"), "ATTACK", None) for name in names]
    kept = [attack for attack in found if attack is not None]
    return sorted(kept, key=lambda attack: (ORDER.index(attack.role), attack.name))
