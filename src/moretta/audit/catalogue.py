"""All attacks that there are: Moretta's own, and those of packages that are installed on this machine."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import replace

from moretta.audit import attacks
from moretta.audit.evidence.attack import Attack
from moretta.audit.evidence.case import PublicRun
from moretta.protocols.common.entry import ATTACKS, added
from moretta.protocols.registry import ENTRIES

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


def why_not(attack: Attack, run: PublicRun) -> str:
    """Say why an attack cannot be tried on a run; empty where it can."""
    if run.setting("fit"):
        return "silos trained by a loop of their own (fit), and attacks know our steps alone"
    if run.setting("own-loss"):
        return "the run minimised a loss of its own (own-loss), and attacks know the built-in ones"
    return attack.fits(run)


def switched_off(run: PublicRun) -> dict[str, list[str]]:
    """Return by key which attacks could be tried on a run without that setting, of those that are off by default."""
    fields = ENTRIES[run.protocol].settings_class().model_fields.items()
    off = {one.alias or name for name, one in fields if not one.is_required() and not one.get_default()}
    missed = [one for one in all_attacks() if run.protocol in one.protocols and why_not(one, run)]
    found = dict[str, list[str]]()
    for section in ("protocol", "data"):
        kept = run.settings.get(section, {})
        for key in (key for key, value in kept.items() if value and key in (*off, "augment")):
            without = replace(run, settings={**run.settings, section: {**kept, key: None}})
            if names := [one.name for one in missed if not why_not(one, without)]:
                found[key] = names
    return found
