"""The worked example, played as `make hospitals` plays it, and what it is made of."""

from __future__ import annotations

import csv
import importlib.util
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from test_cli import call

from moretta.config import run_files
from moretta.data.tables import schema as schemas
from moretta.data.tables.files import Format
from moretta.data.tables.rows import read_table
from moretta.engines.run_folder import read_json

SOUTH = Format(";", ",", "latin-1", ("n/a",))


@pytest.fixture(scope="module")
def example(request: pytest.FixtureRequest) -> Path:
    return request.config.rootpath / "examples" / "hospitals"


@pytest.fixture(scope="module")
def made(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables, as the script writes them."""
    folder = tmp_path_factory.mktemp("hospitals")
    script(example).make(folder)
    return folder


def script(example: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_hospitals", example / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_same_seed_makes_the_same_tables(example: Path, made: Path, tmp_path: Path) -> None:
    script(example).make(tmp_path)
    names = sorted(path.name for path in made.glob("*.[cpt]*"))
    assert len(names) == 11
    for name in names:
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes()


def test_the_tables_are_as_raw_as_hospitals_have_them(made: Path) -> None:
    schema = schemas.load(made / "schema.toml")
    files = {"north.csv": Format(), "south.csv": SOUTH, "east.parquet": Format()}
    rows = {name: read_table(made / name, schema, form) for name, form in files.items()}
    assert [len(one.x) for one in rows.values()] == [320, 280, 200]
    groups = [set(one.groups.tolist()) for one in rows.values() if one.groups is not None]
    assert all(len(own) < len(one.x) for own, one in zip(groups, rows.values(), strict=True))  # repeat visits
    assert groups[0] & groups[1]  # and to another hospital
    ward = list(schema.features).index("ward")
    assert [len(set(one.coded[:, ward])) for one in rows.values()] == [4, 4, 3]
    assert b"<5" in (made / "north.csv").read_bytes()
    assert "Gynäkologie".encode("latin-1") in (made / "south.csv").read_bytes()
    refused = call("schema", "check", made / "south.csv", "--schema", made / "schema.toml")
    assert 'file-encoding = "latin-1"' in refused.sentence


def test_it_plays_from_raw_tables_to_predictions(example: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    lines = [line for line in (example / "play.sh").read_text().splitlines() if line.startswith("moretta ")]
    assert {line.split()[1] for line in lines} == {"schema", "look", "align", "train", "predict", "report"}
    for line in lines:
        done = call(*shlex.split(line)[1:])
        assert done.code == 0, f"{line}: {done.err}"
        assert "P-0" not in done.out + done.err
    results = {name: read_json(Path(name) / "result.json")["test"] for name in ("pbpfl", "cgd")}
    assert results["pbpfl"]["accuracy"] > 0.7
    assert min(results["cgd"]["metrics"]["auc"], results["pbpfl"]["metrics"]["auc"]) > 0.8
    assert run_files.load(made / "pbpfl" / "run.toml").table == schemas.load(made / "schema.toml")
    with Path("predictions.csv").open() as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == ["visit_id", "prediction", "probability_no", "probability_yes"]
    with Path("new.csv").open() as file:
        assert [row["visit_id"] for row in csv.DictReader(file)] == [row["visit_id"] for row in found]
    assert Path("pbpfl", "report.html").exists()
