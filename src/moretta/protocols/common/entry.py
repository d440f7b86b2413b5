"""The entry of a protocol in the registry, so that nothing outside the protocol's folder names it.

Installed packages add protocols and attacks by entry points. The person who installed the package chose that code: no
run file, message or folder can add an entry point, or choose what is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from moretta.contract.messages import Message
    from moretta.protocols.common.roles import Roles
    from moretta.protocols.common.setting import Setting
    from moretta.protocols.common.training import Training

PROTOCOLS, ATTACKS = (f"moretta.{kind}" for kind in ("protocols", "attacks"))
"""The groups of entry points: of a package's protocols, "module:ENTRIES", and of a module with attacks."""

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One protocol of `moretta.protocols.registry`. A reference "module:name" is imported on first use.

    Args:
        name: In a run file.
        settings: Its class of settings.
        roles: Builds its roles, as `build` says.
        messages: The module of its messages, MESSAGES. Those in KEYS count as keys and shares, those in SET_UP as
            set-up, all others as uploads.
        claims: The module of its CLAIMS.
        commands: Adds its own commands to the shell.
        edge: The module of a silo that only runs the model forward, in its own process
            (`moretta.protocols.baffle.edge_client`), if any.
        leaves: Returns all that a silo's role leaves at its site alone (`moretta.protocols.common.roles.Left`).
        baseline: Other protocols are compared with it.
        pooled: One party has all rows, and nothing is summed.
        summed: Uploads go through the secure sum.
        grids: Silos may hold different columns of the same rows.
        simulations: The engines that run all its silos in one process, without messages.
        many_machines: Silos may be remote.
        takes_all: Every silo takes part in every round.
        ring_bits: The smallest ring of its sums.
        seeded_start: Silos compute their starting point from the training seed.
        forward_only: No silo takes a gradient.
        judged_by: The "mean" or the "worst" of the scores of silos' own models.
        common_model: ``model.safetensors`` is a model that predicts.
        shows_model: Silos see that model in every round, so they may score it during the run.
    """

    name: str
    label: str
    settings: str
    roles: str
    messages: str
    claims: str
    commands: str = ""
    edge: str = ""
    leaves: str = ""
    baseline: bool = False
    pooled: bool = False
    summed: bool = True
    grids: bool = False
    simulations: Sequence[str] = ()
    many_machines: bool = True
    takes_all: bool = False
    ring_bits: int = 32
    seeded_start: bool = False
    forward_only: bool = False
    judged_by: str = "mean"
    common_model: bool = True
    shows_model: bool = False

    def settings_class(self) -> type[Training]:
        """Return its class of settings."""
        kind: type[Training] = load(self.settings)
        return kind

    def build(self, setting: Setting) -> Roles:
        """Return the roles of a run. Raises `moretta.errors.ParameterError` where model, data and loss do not fit."""
        roles: Roles = load(self.roles)(setting.spec.protocol, setting)
        return roles

    def own_messages(self, name: str = "MESSAGES") -> Sequence[type[Message]]:
        """Return its messages, without those that every protocol has. name: "KEYS" or "SET_UP" for these alone."""
        messages: Sequence[type[Message]] = getattr(importlib.import_module(self.messages), name, ())
        return messages


def load(reference: str) -> Any:
    """Return the object that a reference "module:name" names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def added(group: str, named: Mapping[str, T], kind: type[T]) -> dict[str, T]:
    """Return objects by name, with those of other packages' entry points of a group.

    An entry point names one object of that kind, several, or a module with some. One whose import fails, or whose name
    is taken, is skipped with a warning.
    """
    objects = dict(named)
    for package, held in installed(group):
        values = vars(held).values() if isinstance(held, ModuleType) else held if isinstance(held, tuple) else (held,)
        for value in (value for value in values if isinstance(value, kind)):
            if objects.setdefault(value.name, value) is not value:  # type: ignore[attr-defined]
                _left_out(f"{kind.__name__} {value.name!r}", package, "that name is taken")  # type: ignore[attr-defined]
    return objects


@cache
def installed(group: str) -> Sequence[tuple[str, Any]]:
    """Return the objects of other packages' entry points of a group, each with its package's name."""
    objects = []
    for point in _points(group):
        package = point.dist.name if point.dist else point.module
        try:
            objects.append((package, point.load()))
        except Exception as error:  # noqa: BLE001  # any error of that package's import
            _left_out(point.value, package, f"{type(error).__name__}: {error}")
    return objects


def _left_out(what: str, package: str, why: str) -> None:
    warnings.warn(f"{what} of package {package} is left out: {why}", stacklevel=4)


@cache
def packages() -> Mapping[str, Path]:
    """Return the top packages of entry points, each with the folder or file that holds its code."""
    names = dict.fromkeys(point.module.partition(".")[0] for group in (PROTOCOLS, ATTACKS) for point in _points(group))
    homes = dict[str, Path]()
    for name in names:
        if (spec := importlib.util.find_spec(name)) is not None:
            homes[name] = Path(next(iter(spec.submodule_search_locations or ()), spec.origin or ""))
    return homes


@cache  # so that a confined process, which may not read it later, has it
def _points(group: str) -> Sequence[EntryPoint]:
    return sorted(entry_points(group=group), key=lambda point: (point.name, point.value))
