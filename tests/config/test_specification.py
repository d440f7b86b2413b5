"""The one specification of a run, and what of it sites are told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pydantic import BaseModel

from moretta.config import run_files
from moretta.config.run_files import PROTOCOLS, shared, specification_of
from moretta.contract.settings import SERVER, SITE, kebab, mark_of
from moretta.data.settings import Data
from moretta.engines.settings import Engine, Run
from moretta.models.catalogue import Model
from moretta.secure_aggregation.settings import SecureAggregation

TEXT = """
[run]
rounds = 5
seed = 3
out = "somewhere"
record-views = true
evaluate-every = 2
insecure-secret-seed = 9
[data]
source = "sites"
silos = 3
inputs = [4]
classes = 2
test = "test.npz"
[model]
source = "mlp"
[protocol]
name = "fedsgd"
warm-start = "start.safetensors"
[secure-aggregation]
roster = "roster.toml"
[engine]
name = "flare"
sites = ["north", "south", "west"]
"""


def keys(kind: type[BaseModel], owner: object) -> set[str]:
    return {kebab(name) for name, known in kind.model_fields.items() if mark_of(known) is owner}


def test_whose_each_key_is() -> None:
    assert keys(Run, SERVER) == {
        *("out", "record-views", "evaluate-every", "metrics", "trackers", "insecure-secret-seed")
    }
    assert keys(Data, SERVER) == {"test", "files", "separator", "decimal", "file-encoding", "absent"}
    assert keys(SecureAggregation, SITE) == {"roster", "identity"}
    for protocol in PROTOCOLS.values():
        assert keys(protocol, SERVER) == {"warm-start"}
    for kind in (Model, Engine):
        assert not keys(kind, SERVER)
    sections: tuple[type[BaseModel], ...] = (Run, Data, Model, Engine, *PROTOCOLS.values())
    for section in sections:
        assert not keys(section, SITE)


def test_sites_are_told_all_but_what_is_marked(tmp_path: Path) -> None:
    run_file = run_files.loads(TEXT, tmp_path / "run.toml")
    told = run_files.dumps(shared(run_file))
    for secret in ("somewhere", "record-views = true", "evaluate-every", "insecure", "test.npz", "start", "roster"):
        assert secret not in told
    for public in ("seed = 3", 'source = "mlp"', "classes = 2", '"north"', 'name = "fedsgd"'):
        assert public in told
    assert run_files.dumps(shared(run_files.loads(told, tmp_path / "told.toml"))) == told


def test_a_specification_is_made_once(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TEXT)
    run_file = run_files.load(tmp_path / "run.toml")
    spec = specification_of(run_file, run_file.run, task="classification", standardise=True)
    assert spec.protocol.warm_start == tmp_path / "start.safetensors"
    assert spec.secure_aggregation.roster == tmp_path / "roster.toml"
    assert (spec.data.standardise, spec.digest) == (True, run_files.digest(run_file))
    assert (spec.run, spec.engine) == (run_file.run, run_file.engine)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.task = "regression"  # type: ignore[misc]
