"""Every block of TOML on a page is read by the class of the file that it is for: a run file, a silo.toml, a schema, ...

Which file a block is for is known (`blocks.kind_of`). A part of a file is laid over a whole one, so that a wrong key or
value fails wherever it stands. Comments in a block, and `[section] key` in a sentence, name keys that are there.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from beside_pages import NAMES, blocks_of, text_of
from blocks import blocks, kind_of
from pydantic import BaseModel
from refused_rows import Row, refused
from reproduction import Experiment

from moretta.config import run_files, silo_file
from moretta.contract.settings import kebab
from moretta.data.settings import Data
from moretta.data.tables import schema
from moretta.engines.settings import Engine, Run
from moretta.errors import ParameterError
from moretta.models.catalogue import Model
from moretta.protocols.registry import ENTRIES
from moretta.report.dossier.questions import read_answers
from moretta.secure_aggregation.identity import Identity, Roster, public_line
from moretta.secure_aggregation.settings import SecureAggregation

Tables = Mapping[str, Any]
PAGES = [*NAMES, "experiments/README.md"]

RUN: Tables = {
    "run": {"rounds": 500},
    "data": {"source": "wdbc", "silos": 10, "batch-size": 8},
    "model": {"source": "mlp"},
    "protocol": {"name": "pbpfl"},
}
SITES: Tables = {"engine": {"name": "flare", "sites": ["north", "south"]}}
SILO: Tables = {"silo": {"name": "north"}, "data": {"source": "rows.npz"}}
SCHEMA = '[columns.age]\nkind = "number"\n[columns.ill]\nkind = "target"\nclasses = ["no", "yes"]\n'
PLACEHOLDER = re.compile(r"moretta-public-1 \.\.\.")


def over(base: Tables, part: Tables) -> Tables:
    """Lay a part of a file over a whole one; a section of another source or protocol takes the place of the whole's."""
    found = dict(base)
    for name, keys in part.items():
        old = base.get(name, {})
        fits = isinstance(keys, dict) and all(keys.get(key) in (None, old.get(key)) for key in ("source", "name"))
        found[name] = {**old, **keys} if fits else keys
    return found


def read(text: str, kind: str, folder: Path) -> object:
    """Read a block as what it is for. Raises `moretta.errors.ParameterError` for whatever is wrong with it."""
    tables: Tables = tomllib.loads(PLACEHOLDER.sub(lambda _: public_line(Identity.fresh().public_key), text))
    (folder / "schema.toml").write_text(SCHEMA)
    match kind:
        case "schema":
            return schema.of(tables)
        case "answers":
            return read_answers(written(tables, folder))
        case "roster":
            return Roster.load(written(tables, folder))
        case "silo.toml":
            return silo_file.load(written(over(SILO, tables), folder))
        case "experiment":
            return [Experiment.model_validate(table) for table in tables.values()]
        case _:
            base = over(RUN, SITES) if tables.get("data", {}).get("source") == "sites" else RUN
            return run_files.load(written(over(base, tables), folder))


def written(tables: Tables, folder: Path) -> Path:
    path = folder / "page.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_toml_is_valid(name: str, tmp_path: Path) -> None:
    for block in blocks_of(name):
        if block.word == "toml":
            try:
                kind = kind_of(text_of(name), block)
                assert read(block.text, kind, tmp_path)
                assert not foreign(block.text, kind)
            except (ParameterError, ValueError) as error:
                raise AssertionError(f"{name}:{block.first + 1}: {error}") from error


def keys_of(model: type[BaseModel]) -> set[str]:
    return {kebab(name) for name in model.model_fields}


SECTIONS: dict[str, type[BaseModel]] = {
    "run": Run,
    "data": Data,
    "model": Model,
    "secure-aggregation": SecureAggregation,
    "engine": Engine,
}
OF_RUN_FILE = {name: keys_of(section) for name, section in SECTIONS.items()}
OF_RUN_FILE["data"].add("schema")  # taken out before the section is read
OF_RUN_FILE["model"].add("output-bias")  # other keys go to the function that builds the model
OF_RUN_FILE["protocol"] = {"name"}.union(*(keys_of(entry.settings_class()) for entry in ENTRIES.values()))
OF_SILO_FILE = {
    name: keys_of(field.annotation)
    for name, field in silo_file.SiloFile.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}


def foreign(text: str, kind: str) -> set[str]:
    """Return the keys that comments of a silo.toml name and that only a run file has in the section."""
    found, section = set[str](), ""
    for line in text.splitlines() if kind == "silo.toml" else ():
        section = head[1] if (head := re.match(r"\[([\w-]+)\]", line)) else section
        words = set(re.findall(r"[a-z][a-z-]+", line.partition("#")[2]))
        found |= words & (OF_RUN_FILE.get(section, set()) - OF_SILO_FILE.get(section, set()))
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_key_that_a_sentence_names_by_its_section_is_there(name: str) -> None:
    for section, key in re.findall(r"`\[([a-z-]+)\] ([a-z-]+)", text_of(name)):
        known = OF_RUN_FILE.get(section, set()) | OF_SILO_FILE.get(section, set())
        assert key in known, f"{name}: [{section}] {key}"


def test_a_comment_that_names_keys_of_a_run_file_in_a_silo_file_is_found() -> None:
    said = '[data]\nsource = "patients.npz"   # or a .csv; target, id-column, missing as in a run file'
    assert foreign(said, "silo.toml") == {"target", "id-column", "missing"}
    assert not foreign(said, "run file")


def test_a_block_that_may_be_of_two_files_says_which() -> None:
    def kind(page: str) -> str:
        return kind_of(page, next(blocks(page)))

    data = '    [data]\n    source = "rows.csv"\n'
    assert kind(f"<!-- toml: silo.toml -->\n\n{data}") == "silo.toml"
    assert kind(f"{data}    [model]\n") == "run file"
    for page in (data, f"<!-- toml: silo -->\n\n{data}", f"{data}    [model]\n    [silo]\n"):
        with pytest.raises(ValueError, match=r"no file alone|not one of|run file, silo\.toml"):
            kind(page)


@refused("settings_on_pages.txt")
def test_what_cannot_be_is_refused(row: Row, request: pytest.FixtureRequest) -> None:
    row.play(globals(), request)
