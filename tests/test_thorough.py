"""The lists of what only `make test-all` runs."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from measured import CASES, LIST, ONE, kept, main, seconds

HERE = Path(__file__).parent
FAMILIES = tomllib.loads((HERE / "thorough.toml").read_text())["family"]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_left_to_make_test_all_is_there_and_says_why(name: str) -> None:
    file, _, function = name.partition("::")
    assert function in functions(file)
    assert set(FAMILIES[name]) == {"keep", "seconds", "why"}
    assert FAMILIES[name]["keep"] >= 0
    assert FAMILIES[name]["why"]


def functions(file: str) -> set[str]:
    return {
        node.name for node in ast.walk(ast.parse((HERE.parent / file).read_text())) if isinstance(node, ast.FunctionDef)
    }


def test_each_measured_function_exists() -> None:
    names = [line.partition(" ")[2] for line in LIST.read_text().splitlines()[1:]]
    gone = [name for name in names if name.partition("::")[2] not in functions(name.partition("::")[0])]
    assert not gone, f"Run python tests/measured.py, these are gone: {gone}"
    assert not set(names) & set(FAMILIES)


def test_long_functions_keep_few_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [kept([time]) for time in (ONE - 0.1, ONE + 0.1)]
    of_seven = [kept([time] * 7) for time in (0.0, CASES / 2, CASES * 1.5)]
    assert (alone, of_seven) == ([1, 0], [7, 2, 1])
    report = tmp_path / "seconds.xml"
    cases = "".join(f'<testcase classname="tests.a.test_b" name="test_c[{n}]" time="{CASES / 2}"/>' for n in range(5))
    report.write_text(f'<testsuite>{cases}<testcase classname="tests.test_d" name="test_e" time="0.1"/></testsuite>')
    assert seconds(report) == {"tests/a/test_b.py::test_c": [CASES / 2] * 5, "tests/test_d.py::test_e": [0.1]}
    monkeypatch.setattr("measured.LIST", tmp_path / "measured.txt")
    main(report)
    assert (tmp_path / "measured.txt").read_text().splitlines()[1:] == ["2 tests/a/test_b.py::test_c"]
