"""All attacks that there are: Moretta's own, and those of packages that are installed on this machine."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

from moretta.audit import attacks
from moretta.audit.evidence.attack import Attack
from moretta.protocols.common.entry import ATTACKS, added

ORDER = ("server", "silo", "silos together", "server and silos", "outsider")


def all_attacks() -> Sequence[Attack]:
    """Return all attacks by role and then by name.

    They are those that modules below `moretta.audit.attacks` define, and those in modules that entry points of the
    group ``moretta.attacks`` name.
    """
    names = [found.name for found in pkgutil.walk_packages(attacks.__path__, f"{attacks.__name__}.") if not found.ispkg]
    defined = [one for name in names for one in vars(importlib.import_module(name)).values() if isinstance(one, Attack)]
    by_name = added(ATTACKS, {attack.name: attack for attack in defined}, Attack)
    return sorted(by_name.values(), key=lambda attack: (ORDER.index(attack.role), attack.name))
