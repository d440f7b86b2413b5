"""The settings of an edge client, as plain data that travels as JSON; nothing in it is secret."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moretta.engines.journal import HelpedFile
from moretta.protocols.baffle.silo.blocks import Rule
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.common.accountant import Privacy
from moretta.protocols.common.statistics import NOTHING, Statistics
from moretta.protocols.common.targets import RowLosses
from moretta.secure_aggregation.cohort import Credentials, Participation, Rules
from moretta.secure_aggregation.identity import Identity, Roster


@dataclass(frozen=True)
class Settings:
    """Everything about a silo but its rows and its secrets.

    scheme, ring_bits, rules, session: of its half of the secure sum; the rules lack their roster. roster, identity:
    absolute paths ("": none). schema: of the model. table: of the schema of tables. statistics: those that it gives.
    batch_size, seed, run: of its
    batches; run: of its sums too. privacy, sharers, bound: of the noise on its scalars, if any; bound in hex.
    precision: of the graph it runs. memory_limit_mib: the most memory it may take. micro_batch: rows that run at a
    time; None: as many as fit, or without a limit 4. held_out: how many of its last rows it holds back, to score models
    on after `rounds` rounds (`moretta.protocols.common.scoring.HeldOut`). helped: the file of the sums it has helped to
    open, if any.
    """

    name: str
    recipe: Recipe
    scheme: str
    ring_bits: int
    rules: Rules
    session: int
    schema: str
    table: str
    batch_size: int
    seed: int
    precision: str
    memory_limit_mib: float | None = None
    micro_batch: int | None = None
    privacy: Privacy | None = None
    sharers: int = 1
    bound: str = ""
    roster: str = ""
    identity: str = ""
    held_out: int = 0
    figures: tuple[str, ...] = ()
    rounds: int = 0
    statistics: Statistics = NOTHING
    run: str = ""
    helped: HelpedFile | None = None

    def dump(self) -> str:
        """Return the settings as JSON."""
        return json.dumps(asdict(replace(self, rules=replace(self.rules, roster=None))), sort_keys=True)

    @classmethod
    def load(cls, text: str) -> Settings:
        """Return the settings that `dump` wrote, with the roster read from its file.

        Raises `moretta.errors.ParameterError` for a roster that cannot be read.
        """
        values: dict[str, Any] = json.loads(text)
        recipe = _frozen(values["recipe"]) | {
            "loss": RowLosses(**_frozen(values["recipe"]["loss"])),
            "rule": values["recipe"]["rule"] and Rule(**_rule(values["recipe"]["rule"])),
        }
        roster = Roster.load(values["roster"]) if values["roster"] else None
        playing = values["rules"]["participation"]
        built = {
            "recipe": Recipe(**recipe),
            "rules": Rules(
                **values["rules"] | {"roster": roster, "participation": playing and Participation(**_frozen(playing))}
            ),
            "statistics": Statistics.read(values["statistics"]),
            "helped": values["helped"] and HelpedFile(**values["helped"]),
            "privacy": None if values["privacy"] is None else Privacy(**values["privacy"]),
        }
        return cls(**_frozen(values) | built)

    def credentials(self) -> Credentials | None:
        """Return how the silo proves who it is, where it has an identity."""
        if not self.identity or self.rules.roster is None:
            return None
        return Credentials(Identity.load(Path(self.identity)), self.rules.roster)


def _rule(values: dict[str, Any]) -> dict[str, Any]:
    return values | {"k": tuple((str(pattern), int(count)) for pattern, count in values["k"])}


def _frozen(values: dict[str, Any]) -> dict[str, Any]:
    """Return the same with tuples for lists, which JSON made of them."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
