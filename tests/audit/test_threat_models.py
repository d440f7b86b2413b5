"""The pages of threat models have what is claimed and what tests it, and their tables are those of the kept results."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from moretta.audit.auditor import all_attacks
from moretta.config import run_files
from moretta.run.assembly import federation_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "audit"))
    yield importlib.import_module("threat_models")
    sys.modules.pop("threat_models", None)


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield importlib.import_module("claims")
    sys.modules.pop("claims", None)


def test_tables_and_lists_of_claims_are_those_of_the_protocols(pages, capsys):
    assert pages.main(["--check"]) == 0, capsys.readouterr().out
    marks = {
        mark for page in pages.PAGES for mark in re.findall(r"<!-- claims:begin (\S+) -->", (ROOT / page).read_text())
    }
    assert marks == {"shared", *pages.TABLES, "front", "brief", "prices", "alignment"}


def test_an_edited_block_is_noticed_and_mended(pages, monkeypatch, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    for page in pages.PAGES:
        (tmp_path / page).write_text((ROOT / page).read_text())
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "docs" / "privacy.md"
    page.write_text(page.read_text().replace("a released model that predicts as the true model does", "nothing"))
    assert page.read_text() != (ROOT / "docs" / "privacy.md").read_text()
    assert pages.main(["--check"]) == 1
    assert "docs/privacy.md: its blocks differ from the claims" in capsys.readouterr().out
    assert pages.main([]) == 0
    assert page.read_text() == (ROOT / "docs" / "privacy.md").read_text()


def test_the_pages_name_every_attack(script):
    named = set(re.findall(r"`([a-z]+(?:-[a-z0-9]+)+)`", "".join(page.read_text() for page in script.PAGES)))
    assert {attack.name for attack in all_attacks()} <= named


def test_tables_are_those_of_the_results(script):
    pages = [page.read_text() for page in script.PAGES]
    marks = re.findall(r"<!-- measured: (\S+) -->", "".join(pages))
    assert sorted(script.EVERY) == sorted(marks)
    assert [script.filled(page) for page in pages] == pages


def test_every_run_can_be_played(script):
    of_sweeps = [[*one.run, f"{one.setting}={value}"] for one in script.SWEEPS.values() for value in one.values]
    for file, *settings in (*script.RUNS.values(), *of_sweeps):
        run_file = run_files.load(ROOT / file, settings)
        federation_of(run_file, None).rehearse(run_file.run.rounds, run_file.run.seed)


def test_results_are_of_the_runs_that_the_script_has(script):
    for name in script.RUNS:
        kept = json.loads((script.RESULTS / f"{name}.json").read_text())
        assert kept["commands"] == [f"moretta {shlex.join(words)}" for words in script.commands(name, Path("runs"))]
        assert kept["attacks"]
        assert not any("it ended with" in one["because"] for one in kept["not_run"])  # a crash is no result
    for name, sweep in script.SWEEPS.items():
        kept = json.loads((script.RESULTS / f"{name}.json").read_text())
        assert kept["commands"] == [f"moretta {shlex.join(words)}" for words in script.swept(name, Path("runs"))[:2]]
        assert [one["value"] for one in kept["sweep"]] == list(sweep.values)
        assert {one["attack"] for one in kept["sweep"]} == {sweep.attack}
