"""`moretta look`, and what `moretta train` says first: what goes to stdout, what to stderr, and the exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moretta.commands import main as cli
from moretta.data.look import look_at
from moretta.data.silo import Silo
from moretta.errors import ParameterError
from moretta.report.page import look_page, write_look

RUN = """[run]
name = "clinic"
rounds = 2
[data]
source = "clinic.csv"
target = "outcome"
silos = 3
{data}
[model]
source = "mlp"
hidden = [4]
[protocol]
name = "fedsgd"
learning-rate = 0.1
"""
SCHEMA = """[columns.age]
kind = "number"
unit = "years"
range = [0, 120]
[columns.ward]
kind = "category"
categories = ["A", "B", "C"]
blanks = "category"
[columns.outcome]
kind = "target"
classes = ["no", "yes"]
"""


@pytest.fixture
def clinic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 240 rows: of 3 the ward is C, of 30 there is none."""
    generator = np.random.default_rng(0)
    ages, yes = generator.integers(20, 91, 240), generator.random(240) < 0.3
    wards = ["C"] * 3 + [""] * 30 + ["A"] * 107 + ["B"] * 100
    lines = [f"{age},{ward},{'yes' if one else 'no'}" for age, ward, one in zip(ages, wards, yes, strict=True)]
    (tmp_path / "clinic.csv").write_text("age,ward,outcome\n" + "\n".join(lines) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "run.toml").write_text(RUN.format(data=""))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["moretta", *words])
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_table_by_its_schema(
    clinic: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call(capsys, monkeypatch, "look", "clinic.csv", "--schema", "schema.toml", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["rows"] == {"training": 240}
    ward = told["columns"][1]
    assert [cell["rows"] for cell in ward["cells"]] == [107, 100, "fewer than 5"]
    assert ward["absent"]["rows"] == "withheld"  # the sum less the others would be 3
    code, out, _ = call(
        capsys, monkeypatch, "look", "clinic.csv", "--schema", "schema.toml", "--withhold", "2", "--json"
    )
    ward = json.loads(out)["columns"][1]
    assert [cell["rows"] for cell in ward["cells"]] == [107, 100, 3]
    assert ward["absent"]["rows"] == 30


def test_a_run_file_and_its_page(
    clinic: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = call(capsys, monkeypatch, "look", "run.toml", "--out", "page.html")
    assert code == 0
    assert out.startswith("rows: 192 to train on at 3 silos, 48 for testing\n")
    assert "classes: no " in out
    assert out.endswith("page: page.html\n")
    text = (clinic / "page.html").read_text()
    assert "By silo" not in text
    assert "fewer than 5" in text
    code, out, _ = call(capsys, monkeypatch, "look", "run.toml", "--by-silo", "--out", "page.html", "--json")
    assert json.loads(out)["page"] == "page.html"
    assert json.loads(out)["rows"]["by_silo"] == {"silo-1": 64, "silo-2": 64, "silo-3": 64}
    assert "By silo" in (clinic / "page.html").read_text()


def test_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "rows.npz", x=np.random.default_rng(0).normal(size=(50, 2)), y=np.arange(50) % 2)
    code, out, _ = call(capsys, monkeypatch, "look", str(tmp_path / "rows.npz"), "--json")
    assert code == 0
    assert [one["name"] for one in json.loads(out)["columns"]] == ["x0", "x1"]
    assert [cell["rows"] for cell in json.loads(out)["target"]["cells"]] == [25, 25]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.csv"], "there is no file nothing.csv"),
        (["nothing.npz"], "nothing.npz"),
        (["run.toml", "--schema", "schema.toml"], "--schema and --target need a table"),
        (["clinic.csv", "--set", "run.rounds=1"], "--set needs a run file"),
        (["clinic.csv", "--schema", "schema.toml", "--target", "outcome"], "--schema names one; remove either"),
        (["clinic.csv", "--withhold", "-1"], "--withhold -1: expected 0 to"),
        (["rows.npz", "--schema", "schema.toml"], "a schema is for tables"),
        (["rows.npz"], "expected arrays x and y"),
        (["run.toml", "--out", "clinic.csv/page.html"], "cannot be written"),
        (["sites.toml"], "the rows of this run are at its sites"),
        (["run.toml", "--set", "data.source=gone.csv"], "there is no file"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], said: str, clinic: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(clinic / "rows.npz", z=np.zeros(3))
    sites = RUN.format(data="").replace(
        'source = "clinic.csv"\ntarget = "outcome"\nsilos = 3', 'source = "sites"\ninputs = [2]\nclasses = 2'
    )
    (clinic / "sites.toml").write_text(sites + '[engine]\nname = "flare"\nsites = ["a", "b", "c"]\n')
    before = sorted(path.name for path in clinic.iterdir())
    code, out, err = call(capsys, monkeypatch, "look", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in clinic.iterdir()) == before
    if words == ["sites.toml"]:
        code, out, err = call(capsys, monkeypatch, "train", "sites.toml", "--out", "run")
        assert (code, out) == (2, "")
        assert "the rows of this run are at its sites, and none are here; train over many machines by moretta" in err
        assert not (clinic / "run").exists()


def test_training_says_first_what_it_trains_on(
    clinic: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (clinic / "run.toml").write_text(RUN.format(data='missing = "mean"'))
    code, out, err = call(capsys, monkeypatch, "train", "run.toml", "--out", "run", "--json")
    assert code == 0
    assert json.loads(out)["rounds"] == 2  # one object, and nothing beside it
    lines = err.splitlines()
    assert lines[0] == "rows: 192 to train on at 3 silos (silo-1 64, silo-2 64, silo-3 64), 48 for testing"
    assert any(line.startswith("values absent: ") for line in lines)
    assert any(line.startswith("classes: no ") for line in lines)
    assert any(line.startswith("categories: ward (A, B, C)") for line in lines)
    assert len(lines) < 20  # one screen


@pytest.mark.slow
def test_a_comparison_says_it_once(
    clinic: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (clinic / "run.toml").write_text(RUN.format(data='missing = "mean"'))
    code, _, err = call(
        capsys, monkeypatch, "compare", "run.toml", "--protocols", "fedsgd,local", "--out", "two", "--json"
    )
    assert code == 0
    assert err.count("rows: 192 to train on") == 1


class Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def told_of(name: str = "age", **settings: Any) -> dict[str, Any]:
    x = np.random.default_rng(1).normal(50, 10, (90, 1)).astype(np.float32)
    owners = [Silo(f"{name}-{part}", x[part::2], np.arange(len(x[part::2])) % 3 % 2) for part in range(2)]
    return look_at(owners, [name], classes=2, class_names=(name, "no")).plain(**settings)


def test_the_page_fetches_nothing_and_escapes_all() -> None:
    evil = "<script>alert(1)</script>"
    text = look_page(told_of(evil, by_silo=True), evil)
    found = Reader(text)
    assert not any(tag in ("script", "link", "img", "iframe", "b") for tag, _ in found.tags)
    assert not any(key.startswith("on") or key == "src" for _, attrs in found.tags for key in attrs)
    assert "&lt;script&gt;" in text
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text
    assert sum(tag == "svg" for tag, _ in found.tags) == 2
    assert not re.search(r'href="(?!#)', text)


def test_the_page_shows_what_is_told_and_no_more(tmp_path: Path) -> None:
    told = told_of()
    assert look_page(told, "clinic") == look_page(told, "clinic")
    page = write_look(told, "clinic", tmp_path / "page.html").read_text()
    for cell in told["columns"][0]["cells"]:
        assert f"{cell['label']}: {cell['rows']}" in page  # for screen readers, beside the bar
    assert "The smallest and the largest value are not shown" in page
    everything = look_page(told_of(least=0), "clinic")
    assert "fewer than" not in everything
    with pytest.raises(ParameterError, match="cannot be written"):
        write_look(told, "clinic", tmp_path / "page.html" / "no.html")


def test_a_look_needs_no_torch(clinic: Path) -> None:
    script = (
        "import sys\nsys.modules['torch'] = None\nsys.argv = ['moretta', 'look', 'run.toml', '--json']\n"
        "from moretta.commands.main import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=clinic, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]["training"] == 192
