"""What cannot be is refused in one sentence: a table of settings and sentences, played through a run file and Python.

A line of ``run_file.txt`` is what `--set` puts into a small run file ("; " between keys), and the sentence after the
file's name. Where the keys are those of classes that Python has, the same is given to these, and the sentence is the
same but for how keys are written; a third part is Python's sentence where more differs, and "-" where Python takes it.
A line of ``silo_file.txt`` is what is put into a small silo.toml. A line of ``python.txt`` is a call and a part of its
sentence. Three dots stand for anything. Lines that begin with # are comments.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import refused_calls as calls
from refused_rows import lines, same

from moretta.config import rules, run_files, silo_file
from moretta.config.run_files import override
from moretta.contract import settings as contract_settings
from moretta.contract.settings import Section, SettingRule
from moretta.data.settings import Data
from moretta.engines.settings import Engine, Run
from moretta.errors import MorettaError, ParameterError
from moretta.secure_aggregation.settings import SecureAggregation

RUN_FILE = """
[run]
rounds = 1
[data]
source = "rows.csv"
[model]
source = "mlp"
[protocol]
name = "fedsgd"
"""
SILO_FILE = '[silo]\nname = "north"\n[data]\nsource = "rows.csv"\n'
OF_FEDERATION = ("participation", "early-stopping", "look", "score-at-silos", "augment", "batch-size")


def one_sentence(error: BaseException) -> str:
    said = str(error)
    assert len(said.splitlines()) == 1
    assert "pydantic" not in said
    return said


FROM_FILES = list(lines("run_file.txt"))


@pytest.mark.parametrize("row", FROM_FILES, ids=[row[0] for row in FROM_FILES])
def test_a_run_file_is_refused(row: list[str], tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(RUN_FILE)
    with pytest.raises(ParameterError) as caught:
        run_files.load(path, row[0].split("; "))
    said = one_sentence(caught.value)
    assert said.removeprefix(f"{path}: ") == row[1]


def every_rule() -> list[SettingRule]:
    sections: list[type[Section]] = [
        Run,
        Data,
        Engine,
        SecureAggregation,
        *run_files.PROTOCOLS.values(),
    ]
    own = [rule for section in sections for rule in section.RULES]
    return [*own, *rules.RULES, *rules.OF_PLAYING, *(r for one in run_files.PROTOCOLS.values() for r in one.BETWEEN)]


def test_every_rule_is_broken_by_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[str] = []
    written = contract_settings._Written.vformat

    def seen(own: Any, sentence: str, *values: Any) -> str:
        broken.append(sentence)
        return written(own, sentence, *values)

    monkeypatch.setattr(contract_settings._Written, "vformat", seen)
    (tmp_path / "small.toml").write_text(RUN_FILE)
    for row in FROM_FILES:
        with pytest.raises(ParameterError):
            run_files.load(tmp_path / "small.toml", row[0].split("; "))
    ours = ("score_at_silos", "validation_fraction", "flare")  # a run file has them at sites alone
    for call in (call for call, _ in lines("python.txt") if any(one in call for one in ours)):
        with pytest.raises(ParameterError):
            eval(call, vars(calls).copy())
    assert not {rule.sentence for rule in every_rule()} - {*broken}


def tables_of(settings: str) -> dict[str, dict[str, Any]]:
    tables: dict[str, Any] = {}
    for one in settings.split("; "):
        override(tables, one)
    return tables


def of_python(settings: str, sentence: str) -> bool:
    """Return whether Python can be given these settings, by keys that it has."""
    sets = [one.partition("=")[0].split(".") for one in settings.split("; ")]
    if "not known" in sentence or "is a key of" in sentence:
        return False
    if any(len(one) != 2 or one[0] in ("model", "columns") for one in sets):
        return False
    classes = all(home in ("protocol", "engine", "secure-aggregation") for home, _ in sets)
    keywords = all(home not in ("run", "data") or key in OF_FEDERATION for home, key in sets)
    return (keywords and not classes) or (classes and sets != [["protocol", "name"]])


def built(settings: str) -> object:
    """Give the settings to Python's classes, and to `Federation` where those take them. Raises what they raise."""
    tables = {home: {key.replace("-", "_"): value for key, value in table.items()}
              for home, table in tables_of(settings).items()}  # fmt: skip
    protocol = run_files.PROTOCOLS[tables.get("protocol", {}).pop("name", "fedsgd")]
    given = {
        "protocol": protocol(**tables.get("protocol", {})),
        "engine": Engine(**tables.get("engine", {})),
        "aggregation": SecureAggregation(**tables.get("secure-aggregation", {})),
    }
    return calls.make(**given, **tables.get("run", {}), **tables.get("data", {})).train(1, progress=False)


def in_python(settings: str, sentence: str) -> str:
    """Return a sentence about one key's value as Python has it."""
    name = tables_of(settings).get("protocol", {}).get("name", "fedsgd")
    owners = {"protocol": run_files.PROTOCOLS[name].__name__, "engine": "Engine",
              "secure-aggregation": "SecureAggregation"}  # fmt: skip
    found = re.match(r"\[([\w-]+)\] ([\w-]+)(.*: expected .*)", sentence)
    if found is None:
        return sentence
    return f"{owners.get(found[1], 'Federation')}: {found[2].replace('-', '_')}{found[3]}"


PLAYED_TWICE = [row for row in FROM_FILES if of_python(row[0], row[1]) and row[2:] != ["-"]]


@pytest.mark.parametrize("row", PLAYED_TWICE, ids=[row[0] for row in PLAYED_TWICE])
def test_python_is_refused_the_same(row: list[str]) -> None:
    with pytest.raises(ParameterError) as caught:
        built(row[0])
    assert one_sentence(caught.value) == (row[2] if len(row) > 2 else in_python(row[0], row[1]))


FROM_SILOS = list(lines("silo_file.txt"))


@pytest.mark.parametrize(("put", "expected"), FROM_SILOS, ids=[row[0] for row in FROM_SILOS])
def test_a_silo_file_is_refused(put: str, expected: str, tmp_path: Path) -> None:
    before, _, after = put.partition(" | ")
    before, after = before.replace("\\n", "\n"), after.replace("\\n", "\n")
    assert before in SILO_FILE
    path = tmp_path / "silo.toml"
    path.write_text(SILO_FILE.replace(before, after, 1))
    with pytest.raises(ParameterError) as caught:
        silo_file.load(path)
    said = one_sentence(caught.value)
    assert str(path) in said
    assert same(expected, said, whole=False)


FROM_PYTHON = list(lines("python.txt"))


@pytest.mark.parametrize(("call", "expected"), FROM_PYTHON, ids=[row[0] for row in FROM_PYTHON])
def test_a_call_is_refused(call: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(MorettaError) as caught:
        eval(call, vars(calls).copy())
    said = one_sentence(caught.value)
    assert same(expected, said, whole=False), said
    assert len(said) < 420
    assert "benign" not in said  # no cell is shown
