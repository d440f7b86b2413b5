"""Every block of TOML on a page is what it stands for: a run file, a silo.toml, a schema, a roster or answers.

A part of a file is laid over a whole one, so that a wrong key or value fails wherever it stands.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from beside_pages import NAMES, blocks_of

from moretta.config import run_files, silo_file
from moretta.data.tables import schema
from moretta.errors import ParameterError
from moretta.report.dossier.questions import read_answers
from moretta.secure_aggregation.identity import Identity, Roster, public_line

Tables = Mapping[str, Any]

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


def read(text: str, folder: Path) -> object:
    """Read a block as what it stands for. Raises `moretta.errors.ParameterError` for whatever is wrong with it."""
    tables: Tables = tomllib.loads(PLACEHOLDER.sub(lambda _: public_line(Identity.fresh().public_key), text))
    (folder / "schema.toml").write_text(SCHEMA)
    data = tables.get("data", {})
    if "columns" in tables and not data:
        return schema.of(tables)
    if not re.search(r"^\[", text, re.MULTILINE):
        return read_answers(written(tables, folder))
    if isinstance(tables.get("silo"), list):
        return Roster.load(written(tables, folder))
    if tables.keys() & {"silo", "limits", "privacy"} or "alignment" in data:
        return silo_file.load(written(over(SILO, tables), folder))
    base = over(RUN, SITES) if data.get("source") == "sites" else RUN
    return run_files.load(written(over(base, tables), folder))


def written(tables: Tables, folder: Path) -> Path:
    path = folder / "page.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_every_block_of_toml_is_valid(name: str, tmp_path: Path) -> None:
    for block in blocks_of(name):
        if block.word == "toml":
            try:
                assert read(block.text, tmp_path)
            except ParameterError as error:
                raise AssertionError(f"{name}:{block.first + 1}: {error}") from error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[protocol]\nname = "cgd"\ndelt = 0.1', "delta"),
        ('[protocol]\nname = "cgd"\ndelta = -1', "delta"),
        ("[secure-aggregation]\nring-bits = 33", "ring-bits"),
        ('[data]\nsource = "sites"\ninputs = [3]\nclasses = 0', "classes"),
        ("[engine.faults]\ndrop = [{round = 3}]", "silo"),
        ("[privacy]\nfewest-silo = 3", "fewest-silos"),
        ('[silo]\nname = "north"\nserver-key = "moretta-public-1"', "server-key"),
        ('[[silo]]\nname = "north"\nkeys = "moretta-public-1 ..."', "keys"),
        ('[columns.age]\nkind = "numbr"', "kind"),
        ('purposes = "none"', "purpose"),
    ],
)
def test_a_wrong_key_or_value_of_a_part_is_found(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=said):
        read(text, tmp_path)
