"""The pages of tables name every key and say what is so."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from moretta.config.silo_file import RowsSection
from moretta.contract.settings import kebab
from moretta.data.settings import FileOfRows
from moretta.data.tables import schema as schemas
from moretta.data.tables.doubts import MOST_CATEGORIES
from moretta.data.tables.files import ABSENT, ENDINGS
from moretta.run.persistence import inputs_of


@pytest.fixture
def docs(request: pytest.FixtureRequest) -> Path:
    return request.config.rootpath / "docs"


def block(text: str, beginning: str) -> dict[str, Any]:
    """The indented TOML that begins with a line."""
    rest = text[text.index(f"    {beginning}\n") :]
    lines = re.match(r"(?:    .*\n|\n)+", rest)
    assert lines is not None
    return tomllib.loads(re.sub(r"^    ", "", lines[0], flags=re.MULTILINE))


def section(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_schema_on_the_page_has_every_key_of_every_kind(docs: Path) -> None:
    page = (docs / "schema.md").read_text()
    told = block(page, "[columns.visit]")
    found = schemas.of(told, "docs/schema.md")
    assert {column.kind for column in found.columns.values()} == set(schemas.KINDS) - {"file"}  # of images
    rows = section(page, "Columns")
    for kind in {type(column): column for column in found.columns.values()}:
        for key in kind.model_fields:
            assert f"`{kebab(key)}`" in rows, key
            if key not in ("range", "blanks", "mask_values", "mask_ignored"):  # the last two are of images
                assert any(key in column for column in told["columns"].values()), key
    assert f"more than {MOST_CATEGORIES} words" in page


def test_every_key_of_a_file_is_on_the_page(docs: Path) -> None:
    page = (docs / "data.md").read_text()
    rows = section(page, "The files of a run")
    for kind in (FileOfRows, RowsSection):
        for name in kind.model_fields:
            assert f"`{kebab(name)}`" in rows, kebab(name)
    for word in (*ENDINGS, *filter(None, ABSENT)):
        assert f"`{word}`" in rows, word
    data = block(page, '[data]\n    source = "files"')["data"]
    for file in data["files"].values():
        assert isinstance(file, str) or FileOfRows.model_validate_json(json.dumps(file), strict=True)


def test_the_fields_of_inputs_json_are_on_the_page(docs: Path) -> None:
    page = (docs / "run-folder.md").read_text()
    fields = set(
        re.findall(r'"(\w+)":', Path(inputs_of.__code__.co_filename).read_text().partition("def inputs_of")[2])
    )
    assert len(fields) >= 10
    assert all(f"`{name}`" in section(page, "inputs.json") for name in fields)
