"""Small recorded runs to attack, and one attack on one of them."""

from __future__ import annotations

import shutil
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from moretta.audit.evidence.attack import Attack, AttackResult, Claim
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
evaluate-every = 1000
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


KEPT = tempfile.TemporaryDirectory()  # of finished runs, as long as the tests last
_FINISHED: dict[str, Path] = {}


def recorded(
    folder: Path, background: tuple[Array, Array] | None = None, *, anew: bool = False, **sections: Mapping[str, Any]
) -> Truth:
    """Train `RUN` with some keys changed, `protocol={"name": "pbpfl"}`, and return its truth.

    An underscore in a section's or key's name stands for a dash; None takes a key away. Runs of the same settings are
    trained once, and copied. anew: another run of these settings, with other keys.
    """
    here = {"run": {"base": str(folder), **sections.get("run", {})}} if any(folder.iterdir()) else {}
    text = run_file_of({**sections, **here})  # what lies in the folder is named relative to it
    if anew or text not in _FINISHED:
        _FINISHED[text] = _trained(text)
    kept = _FINISHED[text]
    shutil.copytree(kept / "out", folder / "out")
    run_file = run_files.load(kept / "run.toml")
    federation = federation_of(run_file, folder / "out")
    return Truth(folder / "out", federation, run_file.run.rounds, run_file.run.seed, background)


def run_file_of(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return `RUN` with some keys changed."""
    tables = tomllib.loads(RUN)
    for name, keys in sections.items():
        section = tables.setdefault(name.replace("_", "-"), {})
        section.update({key.replace("_", "-"): value for key, value in keys.items()})
        tables[name.replace("_", "-")] = {key: value for key, value in section.items() if value is not None}
    return tomli_w.dumps(tables)


def _trained(text: str) -> Path:
    """Train a run file's text, and return the folder that has it in run.toml, and the run in out/."""
    folder = Path(tempfile.mkdtemp(dir=KEPT.name))
    (folder / "run.toml").write_text(text)
    run_file = run_files.load(folder / "run.toml")
    federation_of(run_file, folder / "out").train(run_file.run.rounds, run_file.run.seed)
    return folder


def claimed(attack: Attack, truth: Truth, *, thorough: bool = False) -> Claim:
    """Return what an attack claims, given what its process would be given and nothing else."""
    given = attack.given(truth)
    packed = truth.case(given.views, given.arrays, thorough=thorough).pack()
    return attack.attack(Case.unpack(packed))


def attacked(attack: Attack, truth: Truth, *, thorough: bool = False) -> AttackResult:
    """Return what an attack comes to on a run that it fits."""
    assert attack.fits(truth.run) == ""
    return attack.score(claimed(attack, truth, thorough=thorough), truth)


def check(found: AttackResult, *, succeeds: bool = True, **bounds: tuple[float, float]) -> AttackResult:
    """Hold a finding to whether the attack succeeded, and to bounds of its figures, or of its score."""
    assert found.succeeded == succeeds, found
    for name, (low, high) in bounds.items():
        assert low <= {"score": found.score, **found.figures}[name] <= high, (name, found)
    return found


def given_other(attack: Attack, truth: Truth, change: Callable[[dict[str, Array]], dict[str, Array]]) -> AttackResult:
    """Return what an attack comes to that is given other arrays."""
    given = attack.given(truth)
    case = truth.case(given.views, change(dict(given.arrays)), thorough=False)
    return attack.score(attack.attack(Case.unpack(case.pack())), truth)
