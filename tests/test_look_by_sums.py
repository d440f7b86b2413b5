"""A look before training through the set-up's sums: what the result keeps, what the server hears, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from moretta import BAFFLE, CGD, PBPFL, Centralised, Engine, Federation, FedSGD, SecureAggregation, Silo
from moretta.data.tables import schema as schemas
from moretta.data.tables.rows import encode
from moretta.errors import ParameterError
from moretta.protocols.common.statistics import class_columns
from moretta.protocols.common.training import Training
from moretta.secure_aggregation.statistics import ALL, AskMoments


def silos(rows: tuple[int, ...] = (30, 41, 25), **more: Any) -> list[Silo]:
    """Three classes: of the last there are three rows."""
    made = []
    for number, count in enumerate(rows):
        x = np.random.default_rng(number).normal(10, 2, (count, 3)).astype(np.float32)
        y = np.arange(count) % 2
        y[0] = 2
        made.append(Silo(f"silo-{number + 1}", x, y, **more))
    return made


def federation(protocol: Training, given: list[Silo] | None = None, outputs: int = 3, **settings: Any) -> Federation:
    settings = {"batch_size": 8, "look": True} | settings
    return Federation(nn.Linear(3, outputs), given or silos(), protocol, **settings)


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [
        (FedSGD(), {}),
        (FedSGD(loss="cross-entropy"), {"aggregation": SecureAggregation(scheme="none")}),
        (PBPFL(), {"standardise": True}),
        (CGD(), {"aggregation": SecureAggregation(scheme="additive-shares")}),
        (BAFFLE(k=2), {}),
        (BAFFLE(k=2), {"engine": Engine(edge=("silo-2",))}),
    ],
    ids=["fedsgd", "in the clear", "pbpfl", "cgd", "baffle", "edge"],
)
def test_every_protocol_counts_rows_and_classes(protocol: Training, settings: dict[str, Any], tmp_path: Path) -> None:
    federation(protocol, out=tmp_path / "run", **settings).train(1)
    told = json.loads((tmp_path / "run" / "result.json").read_text())["data"]
    assert told["rows"] == {"training": 96}
    assert told["silos"] == 3
    # Of 96 rows, 15 + 20 + 12 less the first ones are even: the sum of the two large classes is not told beside 3.
    assert [cell["rows"] for cell in told["target"]["cells"]] == ["withheld", 47, "fewer than 5"]
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    (line,) = [line for line in lines if "at all silos together" in line]
    assert line.endswith("96 rows to train on at all silos together, by class withheld, 47, fewer than 5")
    names = [one["name"] for one in told["columns"]]
    assert names == (["x0", "x1", "x2"] if "standardise" in settings else [])
    if names:
        assert all(abs(float(one["range"][0]) - 6) < 1 for one in told["columns"])  # two deviations below the mean


def test_without_it_nothing_is_asked_and_nothing_kept(tmp_path: Path) -> None:
    made = federation(FedSGD(), look=False, out=tmp_path / "run", record_views=True)
    made.train(1)
    assert "data" not in json.loads((tmp_path / "run" / "result.json").read_text())


def test_a_silo_counts_only_in_a_run_that_says_so() -> None:
    made = federation(FedSGD(), look=False).players(1, 0)
    ask = AskMoments(stamp=_stamp(), what="classes", order=1, center=np.zeros(3), columns=ALL, encoding={})
    with pytest.raises(Exception, match="a statistic of the run's settings"):
        made.clients["silo-1"].answer(ask)


def _stamp() -> Any:
    from moretta.contract.messages import Stamp

    return Stamp("run", 1, 0)


def test_a_schema_names_what_is_counted(tmp_path: Path) -> None:
    schema = schemas.of(
        {
            "columns": {
                "age": {"kind": "number", "unit": "years", "range": [0, 120], "blanks": "mean"},
                "ward": {"kind": "category", "categories": ["A", "B"], "blanks": "category"},
                "ill": {"kind": "target", "classes": ["no", "yes"]},
            }
        }
    )
    given = []
    for number in range(3):
        ages = [str(40 + row) if row % 4 else "" for row in range(40)]
        wards = [["A", "B", "B", ""][row % 4] for row in range(40)]
        columns = {"age": ages, "ward": wards, "ill": [["no", "yes"][row % 2] for row in range(40)]}
        rows = encode({name: np.array(words, object) for name, words in columns.items()}, schema, "t.csv")
        given.append(Silo(f"silo-{number}", rows.x, rows.y))
    made = Federation(
        nn.Linear(4, 2), given, FedSGD(loss="cross-entropy"), table=schema, look=True, out=tmp_path / "run",
        batch_size=8, standardise=True,
    )  # fmt: skip
    made.train(1)
    told = json.loads((tmp_path / "run" / "result.json").read_text())["data"]
    age, ward = told["columns"]
    assert (age["range"], age["range_from"], age["unit"]) == (["0.0", "120.0"], "schema", "years")
    assert age["absent"]["rows"] == 30
    assert [cell["rows"] for cell in ward["cells"]] == [30, 60]
    assert ward["absent"]["rows"] == 30
    assert told["target"]["name"] == "ill"
    assert [cell["label"] for cell in told["target"]["cells"]] == ["no", "yes"]


def test_it_is_kept_over_a_resumed_run(tmp_path: Path) -> None:
    made = federation(FedSGD(), out=tmp_path / "run", checkpoint_every=1, standardise=True)

    def stop(number: int, *_: object) -> None:
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.train(2, progress=stop)
    made.train(2, resume=True)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["data"]["rows"] == {"training": 96}


def test_targets_that_are_numbers_are_only_counted(tmp_path: Path) -> None:
    given = [Silo(one.name, one.x, one.x[:, 0]) for one in silos()]
    federation(FedSGD(), given, 1, out=tmp_path / "run").train(1)
    told = json.loads((tmp_path / "run" / "result.json").read_text())["data"]
    assert told["target"] == {
        "name": "target", "kind": "number", "absent": None, "cells": [{"label": "any value", "rows": 96}]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("protocol", "settings", "message"),
    [
        (FedSGD(dp_noise=1.0, dp_clip=1.0), {}, "counts would be a release without noise"),
        (CGD(), {"given": "split"}, "here columns are split"),
        (Centralised(), {}, "nobody sums under"),
        (CGD(), {"engine": Engine(name="fused")}, "nobody sums under"),
    ],
    ids=["noise", "columns", "pool", "simulation"],
)
def test_where_it_cannot_be_had_it_is_refused(protocol: Training, settings: dict[str, Any], message: str) -> None:
    given = None
    if settings.pop("given", None):
        x, y = np.ones((9, 3), np.float32), np.arange(9) % 3
        given = [Silo("a", x[:, :2], y, "row-1", (0, 1)), Silo("b", x[:, 2:], y[:0], "row-1", (2,))]
    with pytest.raises(ParameterError, match=message):
        federation(protocol, given, **settings)


def test_classes_of_every_form_of_targets() -> None:
    labels = np.array([0, 2, 1, 2])
    wanted = np.eye(3)[labels]
    assert (class_columns(labels, 3) == wanted).all()
    assert (class_columns(wanted.astype(np.float32), 3) == wanted).all()
    assert (class_columns(np.array([[0.0], [1.0]]), 2) == np.eye(2)).all()
    assert (class_columns(np.array([[0.3], [9.0]]), 1) == 1).all()
