"""docs/errata-*.md: every entry says five things and names tests that are there; each test made for it is named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
INDEX = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
PAGES = {
    name: (ROOT / "docs" / f"errata-{name.lower()}.md").read_text(encoding="utf-8")
    for name in ("PBPFL", "CGD", "BAFFLE", "Ours")
}
PARTS = ("Printed", "Correct", "Why", "Tests", "In Moretta")
ENTRIES = {
    name: entry
    for page in PAGES.values()
    for name, entry in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", page, flags=re.MULTILINE)
}


def parts(entry: str) -> dict[str, str]:
    """The parts of an entry by their names."""
    found = re.split(r"^- \*\*([\w ]+):\*\*", ENTRIES[entry], flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


@cache
def functions_of(file: str) -> frozenset[str]:
    """The tests of a file below tests/."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(one.name for one in tree.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_"))


def named(entry: str) -> Iterator[tuple[str, str]]:
    """File and name of each test that an entry names."""
    return (tuple(one.split("::")) for one in re.findall(r"`([^`]+)`", parts(entry)["Tests"]))  # type: ignore[misc]


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_has_its_five_parts_and_names_tests_that_are_there(entry: str) -> None:
    assert tuple(parts(entry)) == PARTS
    found = list(named(entry))
    assert found
    assert not [f"{file}::{name}" for file, name in found if name not in functions_of(file)]


def test_every_test_that_was_made_for_an_entry_is_named() -> None:
    made = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*_errata.py")]
    assert len(made) == 4
    shown = {one for entry in ENTRIES for one in named(entry)}
    assert {(file, name) for file in made for name in functions_of(file)} <= shown


def test_the_page_covers_all_papers_and_us_and_is_linked() -> None:
    assert re.findall(r"^## (.*)", INDEX, flags=re.MULTILINE) == list(PAGES)
    assert re.findall(r"^- \[(.*)\]\(errata-\w+\.md#", INDEX, flags=re.MULTILINE) == list(ENTRIES)
    assert len(ENTRIES) == sum(page.count("\n## ") for page in PAGES.values())
    for name in ("README.md", "docs/index.md"):
        assert re.search(r"\]\((docs/)?errata\.md\)", (ROOT / name).read_text(encoding="utf-8")), name


def test_papers_are_cited_by_their_titles() -> None:
    places = ("README.md", "experiments/pbpfl/tables.toml", "src/moretta/protocols/pbpfl/__init__.py")
    for place in places:
        text = " ".join((ROOT / place).read_text(encoding="utf-8").split()).replace(" # ", " ")
        assert "Practical and Bilateral Privacy-preserving Federated Learning" in text, place
        assert "An Efficient and Privacy-Preserving" not in text, place
