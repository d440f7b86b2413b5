"""Small recorded runs to attack, and one attack on one of them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from moretta.audit.evidence.attack import Attack, Claim, Finding
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.truth import Truth
from moretta.config import run_files
from moretta.contract.messages import Array
from moretta.run.assembly import federation_of

RUN = """
[run]
name = "audited"
rounds = 6
seed = 5
record-views = true
[data]
source = "digits"
silos = 3
batch-size = 32
[model]
source = "mlp"
hidden = [16]
[protocol]
name = "fedsgd"
learning-rate = 0.1
"""


def recorded(folder: Path, background: tuple[Array, Array] | None = None, **sections: Mapping[str, Any]) -> Truth:
    """Train `RUN` with some keys changed, `protocol={"name": "pbpfl"}`, and return its truth.

    An underscore in a section's or key's name stands for a dash; None takes a key away.
    """
    tables = tomllib.loads(RUN)
    for name, keys in sections.items():
        section = tables.setdefault(name.replace("_", "-"), {})
        section.update({key.replace("_", "-"): value for key, value in keys.items()})
        tables[name.replace("_", "-")] = {key: value for key, value in section.items() if value is not None}
    file = folder / "run.toml"
    file.write_text(tomli_w.dumps(tables))
    run_file = run_files.load(file)
    federation = federation_of(run_file, folder / "out")
    federation.train(run_file.run.rounds, run_file.run.seed)
    return Truth(folder / "out", federation, run_file.run.rounds, run_file.run.seed, background)


def claimed(attack: Attack, truth: Truth, *, thorough: bool = False) -> Claim:
    """Return what an attack claims, given what its process would be given and nothing else."""
    given = attack.given(truth)
    packed = truth.case(given.views, given.arrays, thorough=thorough).pack()
    return attack.attack(Case.unpack(packed))


def attacked(attack: Attack, truth: Truth, *, thorough: bool = False) -> Finding:
    """Return what an attack comes to on a run that it fits."""
    assert attack.fits(truth.run) == ""
    return attack.score(claimed(attack, truth, thorough=thorough), truth)
