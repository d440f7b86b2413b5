"""What a look counts: absent values, classes, bins with round and open ends, and no value of one person."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moretta.data.look import lines_of, look_at
from moretta.data.silo import Silo
from moretta.data.tables import schema as schemas
from moretta.data.tables.files import Format
from moretta.data.tables.preparation import ColumnRules
from moretta.data.tables.rows import encode

SCHEMA = schemas.of(
    {
        "columns": {
            "visit": {"kind": "id"},
            "age": {"kind": "number", "unit": "years", "range": [0, 120]},
            "ward": {"kind": "category", "categories": ["A", "B"], "blanks": "category"},
            "stage": {"kind": "ordered", "categories": ["I", "II", "III"], "blanks": "mean"},
            "seen": {"kind": "date"},
            "outcome": {"kind": "target", "classes": ["no", "yes"]},
        }
    }
)


def column(*words: str) -> np.ndarray:
    return np.array(words, object)


def told_of(rows: int = 60, least: int = 5, **settings: Any) -> dict[str, Any]:
    """A look at so many rows of the schema at two owners."""
    count = [rows // 3, rows - rows // 3]
    owners = []
    for number, size in enumerate(count):
        columns = {
            "visit": column(*[f"{number}/{row}" for row in range(size)]),
            "age": column(*[str(30 + row % 40) for row in range(size)]),
            "ward": column(*[["A", "B", ""][row % 3] for row in range(size)]),
            "stage": column(*[["I", "III", "II", ""][row % 4] for row in range(size)]),
            "seen": column(*[f"2024-0{1 + row % 6}-11" for row in range(size)]),
            "outcome": column(*[["no", "no", "yes"][row % 3] for row in range(size)]),
        }
        read = encode(columns, SCHEMA, "clinic.csv", Format())
        owners.append(Silo(f"silo-{number + 1}", read.x, read.y))
    return look_at(owners, (), table=SCHEMA, classes=2, class_names=("no", "yes"), least=least).plain(least, **settings)


def test_every_kind_of_column_is_counted() -> None:
    told = told_of(60)
    by_name = {one["name"]: one for one in told["columns"]}
    assert list(by_name) == ["age", "ward", "stage", "seen"]
    assert [one["kind"] for one in told["columns"]] == ["number", "category", "ordered", "date"]
    assert by_name["age"]["unit"] == "years"
    assert (by_name["age"]["range"], by_name["age"]["range_from"]) == (["0", "120"], "schema")
    assert [cell["rows"] for cell in by_name["ward"]["cells"]] == [21, 20]
    assert by_name["ward"]["absent"]["rows"] == 19
    assert [(cell["label"], cell["rows"]) for cell in by_name["stage"]["cells"]] == [("I", 15), ("II", 15), ("III", 15)]
    assert by_name["age"]["absent"] is None
    assert by_name["seen"]["range_from"] == "rows"
    assert by_name["seen"]["cells"][1]["label"].startswith("2024-")
    assert told["target"] == {
        "name": "outcome", "kind": "classes", "absent": None,
        "cells": [{"label": "no", "rows": 41}, {"label": "yes", "rows": 19}],
    }  # fmt: skip
    assert lines_of(told)[:2] == ["rows: 60 to train on at 2 silos", "values absent: ward 19, stage 15"]
    assert lines_of(told)[2] == "classes: no 41, yes 19"
    assert "0/" not in json.dumps(told)  # no id


def test_by_silo_each_silo_s_counts_are_told_too() -> None:
    told = told_of(60, by_silo=True)
    assert told["rows"] == {"training": 60, "by_silo": {"silo-1": 20, "silo-2": 40}}
    ward = next(one for one in told["columns"] if one["name"] == "ward")
    assert [list(cell["by_silo"].values()) for cell in ward["cells"]] == [[7, 14], [7, 13]]
    assert ward["absent"]["by_silo"] == {"silo-1": 6, "silo-2": 13}
    assert lines_of(told)[0] == "rows: 60 to train on at 2 silos (silo-1 20, silo-2 40)"
    assert "by_silo" not in json.dumps(told_of(60))


def counts_in(told: Any) -> list[int]:
    """All counts that are shown, wherever they stand."""
    if isinstance(told, dict):
        found = itertools.chain.from_iterable(counts_in(value) for key, value in told.items() if key in SHOWN)
        return list(found) + [value for key, value in told.items() if isinstance(value, int) and key in COUNTS]
    return list(itertools.chain.from_iterable(map(counts_in, told))) if isinstance(told, list) else []


SHOWN = ("columns", "target", "cells", "absent", "by_silo", "rows")
COUNTS = ("rows", "training", "silo-1", "silo-2")


@settings(deadline=None)
@given(st.integers(3, 70), st.integers(2, 12), st.booleans())
def test_no_small_count_is_anywhere(rows: int, least: int, by_silo: bool) -> None:
    assert all(count >= least for count in counts_in(told_of(rows, least, by_silo=by_silo)))


def test_a_small_table_shows_nothing() -> None:
    told = told_of(4)
    assert counts_in(told) == []
    assert lines_of(told)[0] == "rows: fewer than 5 to train on at 2 silos"
    assert "few or withheld in 2 columns" in lines_of(told)[1]


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32) | st.integers(-50, 50).map(float), min_size=20, max_size=80),
    st.floats(1e-30, 1e30),
)
def test_bins_are_open_and_no_end_is_one_row_s(values: list[float], factor: float) -> None:
    x = (np.array(values) * factor).astype(np.float32)[:, None]
    told = look_at([Silo("all", x, np.zeros(len(x)))], ["x"], classes=2).plain(1)
    (only,) = told["columns"]
    assert sum(cell["rows"] for cell in only["cells"]) == len(x)
    labels = [cell["label"] for cell in only["cells"]]
    assert len(labels) <= 14
    assert labels == ["any value"] or (labels[0].split()[0] in ("below", "up") and labels[-1].endswith(" or more"))


def test_an_outlier_is_in_no_range() -> None:
    x = np.concatenate([np.linspace(20, 40, 97), [1234.5, -987.5, 777.25]]).astype(np.float32)[:, None]
    told = look_at([Silo("all", x, np.zeros(100))], ["age"], classes=2).plain()
    assert told["columns"][0]["range"] == ["20", "40"]
    assert not any(part in json.dumps(told, ensure_ascii=False) for part in ("1,234", "1234", "987", "777"))


@pytest.mark.parametrize(
    ("values", "labels", "ends"),
    [
        ([0.0, 1.0] * 30, ["up to 0", "1 or more"], ["0", "1"]),
        ([3.0] * 60, ["any value"], ["3", "3"]),
        ([2.5] * 60, ["any value"], ["2.5", "3"]),
        ([1e9, 2e9] * 30, None, ["1e+09", "2e+09"]),
    ],
)
def test_plain_bins(values: list[float], labels: list[str] | None, ends: list[str]) -> None:
    x = np.array(values, np.float32)[:, None]
    only = look_at([Silo("all", x, np.zeros(60))], ["x"], classes=2).plain()["columns"][0]
    assert only["range"] == ends
    assert labels is None or [cell["label"] for cell in only["cells"]] == labels


def test_arrays_and_numbers_as_targets() -> None:
    x = np.arange(40, dtype=np.float32).reshape(-1, 2)
    x[3, 1] = np.nan
    rules = ColumnRules.alike(2, fill="mean")
    told = look_at([Silo("all", x, np.arange(20.0))], ["a", "b"], rules=rules, held={"testing": 7}).plain(1)
    assert [one["absent"] for one in told["columns"]] == [{"rows": 0}, {"rows": 1}]
    assert told["rows"] == {"training": 20, "testing": 7}
    assert told["target"]["kind"] == "number"
    assert lines_of(told)[0] == "rows: 20 to train on, 7 for testing"
    assert lines_of(told)[-1].startswith("target: about ")
    images = look_at([Silo("all", np.zeros((20, 3, 8, 8), np.float32), np.zeros(20, np.int64))], (), classes=2).plain()
    assert images["columns"] == []
    assert images["sample"] == [3, 8, 8]
