"""The registry of protocols: each folder's ``protocol.py`` declares its entries, which are looked up here by name.

Moretta's own are listed in `MODULES`. A protocol of another package registers by an entry point of the group
``moretta.protocols`` (CONTRIBUTING.md): nothing in Moretta has to know it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moretta.errors import ParameterError
from moretta.protocols.common.entry import PROTOCOLS, Entry, added, load

if TYPE_CHECKING:
    from moretta.protocols.common.claims import Claim
    from moretta.protocols.common.roles import Roles
    from moretta.protocols.common.setting import Setting
    from moretta.protocols.common.training import Training

MODULES = (
    "moretta.protocols.fedsgd.protocol",
    "moretta.protocols.pbpfl.protocol",
    "moretta.protocols.cgd.protocol",
    "moretta.protocols.baffle.protocol",
)
OWN: Mapping[str, Entry] = {entry.name: entry for module in MODULES for entry in load(f"{module}:ENTRIES")}
ENTRIES: Mapping[str, Entry] = added(PROTOCOLS, OWN, Entry)
REFERENCE = "fedsgd"  # other protocols' final weights are compared with its


def entry_of(protocol: Training) -> Entry:
    """Return the entry of a protocol's settings. Raises `moretta.errors.ParameterError` for unlisted ones."""
    name: str = getattr(protocol, "name", "")
    if name not in ENTRIES:
        raise ParameterError(
            f"protocol: expected the settings of a protocol ({', '.join(ENTRIES)}), such as FedAvg(); got a "
            f"{type(protocol).__name__}"
        )
    return ENTRIES[name]


def build(setting: Setting) -> Roles:
    """Build the roles of a protocol. Raises `moretta.errors.ParameterError` if model, data and loss do not fit."""
    return entry_of(setting.spec.protocol).build(setting)


def edge_of(protocol: Training) -> Any:
    """Return the module that runs a silo of this protocol without PyTorch, or None."""
    entry = entry_of(protocol)
    return importlib.import_module(entry.edge) if entry.edge else None


def check_edge_packages() -> None:
    """Raise `moretta.errors.MissingExtra` if the packages of silos without PyTorch are missing."""
    for entry in ENTRIES.values():
        if entry.edge:
            edge = importlib.import_module(entry.edge)
            edge.check_packages(edge.RUNS)


def claims_of(protocol: str) -> Sequence[Claim]:
    """Return the claims of a protocol, in the order of a report; empty for an unlisted one."""
    if protocol not in ENTRIES:
        return ()
    claims = importlib.import_module(ENTRIES[protocol].claims).CLAIMS
    return [claim for claim in claims if not claim.protocols or protocol in claim.protocols]
