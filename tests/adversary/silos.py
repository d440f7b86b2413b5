"""The honest silos of the adversary's lists, as they are in a run: the only file that knows how they are made.

A silo is the protocol's own client with its own half of the secure sum, tiny rows and a tiny model. It survives a kill
as it does in a run: by a state that it saved, and by what it keeps on disk.
"""

from __future__ import annotations

import atexit
import shutil
import string
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from moretta.data.settings import Data
from moretta.data.silo import Silo
from moretta.data.tables.preparation import ColumnRules
from moretta.engines.journal import HelpedFile
from moretta.engines.settings import Run
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.cgd.params import CGD
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.params import FedAvg, FedSGD
from moretta.protocols.pbpfl.params import PBPFL
from moretta.protocols.registry import build
from moretta.secure_aggregation.agreement import RUN_DIGEST
from moretta.secure_aggregation.identity import Identity, Roster
from moretta.secure_aggregation.settings import SecureAggregation

ROWS, COLUMNS, CLASSES, MOST_SILOS = 7, 3, 2, 6

PROTOCOLS: dict[str, Training] = {
    "fedsgd": FedSGD(loss="mse"),
    "fedavg": FedAvg(loss="mse"),
    "pbpfl": PBPFL(loss="mse"),
    "pbpfl-ce": PBPFL(loss="cross-entropy"),
    "cgd": CGD(loss="mse"),
    "cgd-open": CGD(loss="mse", blind=False),
    "baffle": BAFFLE(loss="mse", k=4),
}
SCHEMES = ("pairwise", "additive-shares")


@dataclass(frozen=True)
class World:
    """What a list is played against. The last `corrupted` of the `silos` work with the server.

    batch: rows in a round's batch, 0 for all. apart: by how many silos two sets that a silo helps differ, if they do.
    """

    protocol: str = "fedsgd"
    scheme: str = "pairwise"
    silos: int = 5
    corrupted: int = 0
    batch: int = 3
    roster: bool = False
    apart: int = 1

    @property
    def names(self) -> str:
        return string.ascii_lowercase[: self.silos]

    @property
    def honest(self) -> str:
        return self.names[: self.silos - self.corrupted]

    @property
    def allies(self) -> str:
        return self.names[self.silos - self.corrupted :]

    @property
    def floor(self) -> int:
        """With fewer than two honest silos in it a sum is one silo's, whoever asks."""
        return self.corrupted + 2

    def run(self, job: int) -> str:
        ending = f".{roster().digest[:RUN_DIGEST]}" if self.roster else ""
        return f"job-{job}{ending}"


def play_roles(world: World, folder: Path, run: str, session: int) -> Roles:
    """Return a server and silos as processes make them at their start. folder: of what silos keep on disk."""
    return build(_setting(world, folder, run, session))


def _setting(world: World, folder: Path, run: str, session: int) -> Setting:
    generator = np.random.default_rng(7)
    regression = not world.protocol.endswith("-ce")
    silos = []
    for name in world.names:
        x = generator.normal(size=(ROWS, COLUMNS))
        y = generator.normal(size=(ROWS, CLASSES)) if regression else generator.integers(0, CLASSES, ROWS)
        silos.append(Silo(name, x, y))
    secure: dict[str, Any] = {"scheme": world.scheme, "min_survivors": world.floor}
    if world.roster:
        secure |= {"roster": "roster.toml", "identity": f"{_identities()}/{{silo}}"}
    return Setting(
        Specification(
            Run(rounds=100, seed=3, dtype="float64", insecure_secret_seed=5),  # a list that fails must fail again
            Data(source="python", batch_size=world.batch),
            PROTOCOLS[world.protocol],
            SecureAggregation(**secure),
        ),
        built=_model(),
        outputs=CLASSES,
        silos=silos,
        columns=ColumnRules.alike(COLUMNS, scaled=True),
        session=session,
        run_id=run,
        helped=cache(lambda name: _helped(world, folder / name)),
        roster=roster() if world.roster else None,
    )


@cache
def roster() -> Roster:
    """Return the public keys of all silos that any list has."""
    names = string.ascii_lowercase[:MOST_SILOS]
    return Roster({name: Identity.load(f"{_identities()}/{name}").public_key for name in names})


@cache
def _identities() -> str:
    folder = tempfile.mkdtemp(prefix="moretta-adversary-")
    atexit.register(shutil.rmtree, folder)
    for place, name in enumerate(string.ascii_lowercase[:MOST_SILOS], 1):
        Identity(bytes([place]) * 32).save(f"{folder}/{name}")
    return folder


def _helped(world: World, folder: Path) -> HelpedFile:
    """Return where a silo keeps what it has helped to open, with the floors that stand in its silo.toml."""
    return HelpedFile(str(folder / "helped.jsonl"), over_runs=True, apart=world.apart, fewest=world.floor)


@cache
def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(COLUMNS, 4), nn.LeakyReLU(0.2), nn.Linear(4, CLASSES)).double()
