"""What the contract suite has to know of a protocol beside its entry in the registry.

A folder under protocols/ has its cases in a module ``cases_of_<folder>``, a tuple ``CASES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from moretta import Silo
from moretta.protocols.common.training import Training


@dataclass(frozen=True)
class Case:
    """Settings of a protocol to try it by.

    name: in the names of tests; by default that of the protocol, whose first case this is then. silos: deals out silos
    of whole rows. only_with_sums: one more way of summing, which changes nothing else.
    blind: the server knows neither loss nor rows of a round. tells_loss: whether anybody knows the loss.
    all_rows: a round uses all of a silo's rows.
    secrets_move: whether the final weights follow from secrets; "in rounding" where only their last bits do.
    last_bits_matter: weights that differ in the last bits lead elsewhere. sets_up_again: after a sum that silos missed.
    least_up: the fewest bytes of an upload; None for those of the parameters. root, own_root: names of the secret root
    in the state of the server and of a silo, which hold what nobody else has; empty for none.
    set_up: tags of what silos are asked in the set-up that is its own.
    """

    protocol: Training
    name: str = ""
    silos: Callable[[Iterable[Silo]], list[Silo]] = list
    only_with_sums: bool = False
    blind: bool = False
    tells_loss: bool = True
    all_rows: bool = False
    secrets_move: Literal["no", "in rounding", "yes"] = "no"
    last_bits_matter: bool = False
    sets_up_again: bool = False
    least_up: int | None = None
    root: str = ""
    own_root: str = ""
    set_up: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """What it is called in the names of tests."""
        return self.name or self.protocol.name
