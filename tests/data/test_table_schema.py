"""Schemas as Table Schema (Frictionless) and back: nothing of ours is lost, and nothing of theirs in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cli import call

from moretta.data.tables import table_schema
from moretta.data.tables.doubts import plain_form
from moretta.data.tables.schema import (
    Category,
    ColumnKind,
    Date,
    Drop,
    Grouping,
    Id,
    Number,
    Ordered,
    Schema,
    Target,
    load,
    of,
)
from moretta.errors import ParameterError

TEXT = st.text(min_size=1, max_size=6).map(str.strip).filter(bool)
WORDS = st.lists(TEXT, min_size=2, max_size=4, unique=True).map(tuple)
FINITE = st.floats(-1e6, 1e6)
ENDS = st.lists(FINITE, min_size=2, max_size=2, unique=True).map(sorted).filter(lambda ends: ends[0] < ends[1])
RANGES = st.none() | ENDS.map(tuple)
DAYS = st.none() | st.lists(st.dates(), min_size=2, max_size=2, unique=True).map(sorted).map(tuple)
BLANKS = st.sampled_from(["refuse", "mean", "indicator"])


@st.composite
def worded(draw: st.DrawFn, kind: type[Category | Ordered | Target], key: str, **more: Any) -> ColumnKind:
    words = draw(WORDS)
    spelled = draw(st.none() | st.dictionaries(TEXT.filter(lambda word: word not in words), st.sampled_from(words)))
    return kind(**{key: words, "spellings": spelled or None}, **{name: draw(one) for name, one in more.items()})


NUMBERS = st.builds(
    Number,
    unit=st.sampled_from(["", "years", "%", "µg"]),
    range=RANGES,
    blanks=BLANKS,
    censored=st.sampled_from(["refuse", "limit", "half"]),
    thousands=st.sampled_from([None, ",", ".", "'", " "]),
    absent=st.none() | st.lists(FINITE | TEXT | st.sampled_from(["NA", "9", "-9.0", "inf"]), min_size=1).map(tuple),
)
COLUMNS = st.one_of(
    NUMBERS,
    worded(Category, "categories", blanks=st.sampled_from(["refuse"])),
    worded(Ordered, "categories", blanks=BLANKS),
    st.builds(Date, format=st.sampled_from(["%Y-%m-%d", "%d.%m.%Y", "%d/%m/%y %H:%M"]), range=DAYS, blanks=BLANKS),
    st.builds(Drop),
)
ONCE = st.fixed_dictionaries(
    {},
    optional={
        "id": st.builds(Id),
        "group": st.builds(Grouping),
        "target": worded(Target, "classes") | st.builds(Target, range=RANGES),
    },
)


@given(columns=st.dictionaries(TEXT, COLUMNS, max_size=5), once=ONCE, first=NUMBERS)
def test_a_schema_comes_back_as_it_was(columns: dict[str, Any], once: dict[str, Any], first: Number) -> None:
    blank = Category(categories=("a", "b"), blanks="category", unseen="blank", spellings={"A": "a"})
    named = {f"the {name}": column for name, column in once.items()}
    schema = Schema(columns={"ward": blank} | columns | {"first": first} | named)
    text = table_schema.written({name: plain_form(column) for name, column in schema.columns.items()})
    back, unkept = table_schema.read(text, "x.json")
    assert unkept == []
    again = of({"columns": back})
    assert again == schema
    assert list(again.columns) == list(schema.columns)
    assert again.digest == schema.digest


THEIRS: dict[str, Any] = {
    "name": "patients",
    "fields": [
        {"name": "who", "type": "string", "constraints": {"pattern": "P[0-9]+", "required": True}},
        {"name": "age", "type": "integer", "title": "Age", "constraints": {"minimum": 0, "maximum": "120"}},
        {"name": "cost", "type": "number", "groupChar": ",", "bareNumber": False, "decimalChar": ","},
        {"name": "sex", "type": "integer", "categories": [{"value": 1, "label": "m"}, {"value": 2, "label": "f"}]},
        {"name": "stage", "type": "string", "categories": ["I", "II"], "categoriesOrdered": True},
        {"name": "smokes", "type": "boolean", "trueValues": ["yes", "y"], "falseValues": ["no"]},
        {"name": "seen", "type": "date", "format": "%d.%m.%Y", "constraints": {"minimum": "01.02.2020"}},
        {"name": "at", "type": "datetime"},
        {"name": "note", "type": "string"},
        {"name": "weight", "type": "number", "missingValues": ["", "-9", "none"]},
        {"name": "died", "type": "string", "constraints": {"enum": ["no", "yes"]}},
    ],
    "missingValues": ["", "n/a"],
    "primaryKey": "who",
    "foreignKeys": [{"fields": ["who"], "reference": {"resource": "people", "fields": ["id"]}}],
}


def test_what_theirs_says_is_taken_and_what_is_not_kept_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(THEIRS))
    columns, unkept = table_schema.read(path.read_text(), "theirs.json", "died")
    assert columns == {
        "who": {"kind": "id"},
        "age": {"kind": "number", "range": [0.0, 120.0], "absent": ["n/a"]},
        "cost": {"kind": "number", "thousands": ",", "absent": ["n/a"]},
        "sex": {"kind": "category", "categories": ["1", "2"]},
        "stage": {"kind": "ordered", "categories": ["I", "II"]},
        "smokes": {"kind": "category", "categories": ["no", "yes"], "spellings": {"y": "yes"}},
        "seen": {"kind": "date", "format": "%d.%m.%Y"},
        "at": {"kind": "date", "format": "%Y-%m-%dT%H:%M:%S"},
        "note": {"kind": "drop"},
        "weight": {"kind": "number", "absent": [-9.0, "none"]},
        "died": {"kind": "target", "classes": ["no", "yes"]},
    }
    words = 'missingValues ([data] absent = ["n/a"] says so)'
    assert unkept == [
        "who: constraints.pattern",
        "age: title",
        "cost: bareNumber, decimalChar",
        f"sex: labels, {words}",
        f"stage: {words}",
        f"smokes: {words}",
        f"seen: constraints.minimum, {words}",
        f"at: the time of day, {words}",
        'note: all of it, as type "string" without categories is no input (kind = "drop")',
        f"died: {words}",
        "name",
        "foreignKeys",
    ]
    assert load(path).columns["died"].kind == "category"
    assert "theirs.json: of this Table Schema, not kept: who: constraints.pattern; age: title" in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "expected a Table Schema; its text is wrong: Invalid JSON"),
        ("[]", "expected a Table Schema; its text is wrong"),
        ("[" * 100_000, "expected a Table Schema"),
        ('{"resources": []}', "fields is wrong: Field required"),
        ('{"fields": []}', "fields is wrong: "),
        ('{"fields": [{"type": "number"}]}', "fields.0.name is wrong: Field required"),
        ('{"fields": [{"name": "a", "constraints": {"enum": 3}}]}', "fields.0.constraints.enum is wrong"),
        ('{"fields": [{"name": "a"}, {"name": "a"}]}', "expected the name of each field once"),
        ('{"fields": [{"name": "a"}]}', "at least one column of kind number"),
        ('{"fields": [{"name": "a", "moretta": {"kind": "numbr"}}]}', 'did you mean "number"'),
        ('{"fields": [{"name": "a", "type": "number", "moretta": {"blanks": 3}}]}', "[columns.a] blanks"),
        ('{"fields": [{"name": "a", "type": "number", "moretta": {"unseen": 3}}]}', "this key is unknown"),
    ],
)
def test_what_is_no_table_schema_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ParameterError) as error:
        load(path)
    assert said in str(error.value)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value)) < 500


SCHEMA = """
[columns.age]
kind = "number"
range = [0, 120]
[columns.ward]
kind = "category"
categories = ["north", "south"]
blanks = "category"
[columns.ill]
kind = "target"
classes = ["no", "yes"]
"""
RUN = """
[run]
rounds = 1
[data]
source = "t.csv"
schema = "{schema}"
silos = 2
[model]
source = "mlp"
hidden = [2]
[protocol]
name = "fedsgd"
"""


def test_a_run_takes_either_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.toml").write_text(SCHEMA)
    Path("t.csv").write_text("age,ward,ill\n" + "50,north,no\n61,,yes\n" * 10)
    done = call("schema", "convert", "schema.toml", "--out", "schema.json", "--json")
    assert (done.code, done.told) == (0, {"format": 1, "schema": "schema.json", "not_kept": []})
    assert json.loads(Path("schema.json").read_text())["fields"][1] == {
        "name": "ward",
        "type": "string",
        "categories": ["north", "south"],
        "constraints": {},
        "moretta": {"blanks": "category"},
    }
    assert call("schema", "convert", "schema.json", "--out", "back.toml").code == 0
    assert load(Path("back.toml")) == load(Path("schema.toml"))
    for form in ("schema.toml", "schema.json"):
        Path("run.toml").write_text(RUN.format(schema=form))
        assert call("train", "run.toml", "--out", form.replace(".", "-")).code == 0
    one, other = (Path(folder, "model.safetensors").read_bytes() for folder in ("schema-toml", "schema-json"))
    assert one == other
    assert call("schema", "check", "t.csv", "--schema", "schema.json").code == 0
    Path("theirs.json").write_text(json.dumps(THEIRS))
    done = call("schema", "convert", "theirs.json", "--target", "died", "--out", "theirs.toml")
    assert (done.code, done.out.splitlines()[0]) == (0, "not kept: who: constraints.pattern")
    assert load(Path("theirs.toml")).classes == ("no", "yes")
    assert "exists already" in call("schema", "convert", "theirs.json", "--out", "theirs.toml").sentence
    assert "--target is for" in call("schema", "convert", "back.toml", "--target", "ill", "--out", "x.json").sentence
    Path("latin.json").write_bytes("ü".encode("latin-1"))
    assert "latin.json: this is not JSON" in call("schema", "convert", "latin.json", "--out", "x.toml").sentence
    assert "--out none.toml" in call("schema", "convert", "none.json", "--out", "x.toml").sentence
    done = call("schema", "convert", "theirs.json", "--target", "dead", "--out", "other.toml")
    assert "expected the name of each field once, and the target's among them" in done.sentence
