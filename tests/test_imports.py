import statistics
import sys
from pathlib import Path

import pytest

from moretta.contract.wording import did_you_mean
from moretta.data.references import OWN_CODE, is_reference, resolve
from moretta.errors import ParameterError


def test_each_folder_has_its_own_module(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_source.py").write_text(f"def make():\n    return {name!r}\n")
    before = list(sys.path)
    assert resolve("my_source:make", tmp_path / "one", OWN_CODE)() == "one"
    assert resolve("my_source:make", tmp_path / "two", OWN_CODE)() == "two"
    assert resolve("my_source:make", tmp_path / "one", OWN_CODE)() == "one"
    assert sys.path == before


def test_a_module_named_like_a_library_leaves_the_library_alone(tmp_path: Path) -> None:
    (tmp_path / "statistics.py").write_text("def make():\n    return 'mine'\n")
    assert resolve("statistics:make", tmp_path, OWN_CODE)() == "mine"
    assert sys.modules["statistics"] is statistics


def test_packages_and_installed_modules(tmp_path: Path) -> None:
    (tmp_path / "my_pack").mkdir()
    (tmp_path / "my_pack" / "__init__.py").write_text("")
    (tmp_path / "my_pack" / "nets.py").write_text("from . import __name__ as pack\ndef make():\n    return pack\n")
    assert resolve("my_pack.nets:make", tmp_path, OWN_CODE)() == "my_pack"
    assert resolve("math:sqrt", tmp_path, OWN_CODE)(4) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no_such_module_here:make", r'importing "no_such_module_here" .* ModuleNotFoundError: No module named'),
        ("broken_source:make", r'importing "broken_source" .* failed with SyntaxError: .*fix the error in it'),
        ("leaving_source:make", "failed with SystemExit: 3"),
        ("good_source:mak", 'module "good_source" has no function "mak"; did you mean "make"'),
        ("good_source:value", 'has no function "value"'),
        ("good_source", 'expected "module:function", got "good_source"'),
    ],
)
def test_failures_are_one_sentence(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "broken_source.py").write_text("def make(:\n")
    (tmp_path / "leaving_source.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "good_source.py").write_text("value = 1\ndef make():\n    return 1\n")
    with pytest.raises(ParameterError, match=message) as caught:
        resolve(source, tmp_path, OWN_CODE)
    assert "\n" not in str(caught.value)


def test_names() -> None:
    assert is_reference("a.b:c")
    assert not any(map(is_reference, ["a", "a:b:c", "C:\\table", "a:b.c", ":a", "a:"]))
    assert did_you_mean("zzz", ["iid"]) == "Known: iid"


def test_nothing_is_imported_that_nobody_agreed_to(tmp_path: Path) -> None:
    (tmp_path / "foreign_source.py").write_text("from pathlib import Path\nPath(__file__).with_name('here').touch()\n")
    for agreed in ((), ("foreign_source:other",), {"foreign_source"}):
        with pytest.raises(
            ParameterError, match='"foreign_source:make" is code that this machine has not agreed to run'
        ):
            resolve("foreign_source:make", tmp_path, agreed)
    assert not (tmp_path / "here").exists()
