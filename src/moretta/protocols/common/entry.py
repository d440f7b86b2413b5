"""The entry of a protocol in the registry, so that nothing outside the protocol's folder names it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moretta.contract.messages import Message
    from moretta.protocols.common.roles import Roles
    from moretta.protocols.common.setting import Setting
    from moretta.protocols.common.training import Training


@dataclass(frozen=True)
class Entry:
    """One protocol of `moretta.protocols.registry`. A reference "module:name" is imported when it is first used.

    name: in a run file. label: for people. settings: its class of settings. roles: builds its roles, as `build` says.
    messages: the module of its messages, MESSAGES. Those in KEYS count as keys and shares, those in SET_UP as set-up,
    all others as uploads. claims: the module whose CLAIMS say who learns what. commands: adds its own commands to the
    shell. edge: the module that plays a silo in a process that only runs the model forward
    (`moretta.protocols.baffle.edge_client`), if any. leaves: says what a silo's role leaves at its site alone
    (`moretta.protocols.common.roles.Left`).
    baseline: other protocols are compared with it. pooled: one party has all rows, and nothing is summed.
    summed: uploads go through the secure sum. grids: silos may hold different columns of the same rows.
    simulations: the engines that play all its silos in one process, without messages.
    many_machines: silos may be remote. takes_all: every silo takes part in every round.
    ring_bits: the smallest ring that its sums allow. seeded_start: silos compute the point that they start from, so it
    follows from the training seed. forward_only: no silo takes a gradient. judged_by: where silos have models of their
    own, the "mean" of their scores or the "worst". common_model: ``model.safetensors`` is a model that predicts.
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

    def settings_class(self) -> type[Training]:
        """Return its class of settings."""
        found: type[Training] = load(self.settings)
        return found

    def build(self, protocol: Training, setting: Setting) -> Roles:
        """Return the roles of a run. Raises `moretta.errors.ParameterError` where model, data and loss do not fit."""
        found: Roles = load(self.roles)(protocol, setting)
        return found

    def own_messages(self) -> Sequence[type[Message]]:
        """Return its messages, without those that every protocol has."""
        return self._messages("MESSAGES")

    def key_messages(self) -> Sequence[type[Message]]:
        """Return those of its messages that count as keys and shares."""
        return self._messages("KEYS")

    def set_up_messages(self) -> Sequence[type[Message]]:
        """Return those of its messages that count as set-up."""
        return self._messages("SET_UP")

    def _messages(self, name: str) -> Sequence[type[Message]]:
        found: Sequence[type[Message]] = getattr(importlib.import_module(self.messages), name, ())
        return found


def load(reference: str) -> Any:
    """Return the object that a reference "module:name" names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
