"""Runs from several seeds: their mean, and how far they lie apart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moretta.report.folder import read_run
from moretta.report.table import spread_of, spread_rows


def test_mean_and_deviation_by_hand(make_run: Any) -> None:
    records = []
    for number, accuracy in enumerate((0.9, 0.8, 0.85)):
        folder = make_run("fedsgd", folder=f"seed-{number}")
        record = json.loads((folder / "result.json").read_text())
        record["test"] |= {"accuracy": accuracy, "metrics": {"auc": 0.5} if number else {}}
        (folder / "result.json").write_text(json.dumps(record))
        records.append(read_run(folder))
    found = spread_of("FedSGD", (0, 1, 2), records)
    assert found.mean("accuracy") == pytest.approx(0.85)
    assert found.deviation("accuracy") == pytest.approx(0.05)  # sqrt((0.05^2 + 0.05^2 + 0) / 2)
    assert found.told()["accuracy"]["values"] == [0.9, 0.8, 0.85]
    assert (found.mean("auc"), found.told()["auc"]["values"]) == (None, [None, 0.5, 0.5])  # one run has none
    rows = {row.measure: row.cells for row in spread_rows([found])}
    assert rows["Accuracy"] == ("0.8500 ± 0.0500",)
    assert rows["AUC"] == ("–",)
    one = spread_of("FedSGD", (0,), records[:1])
    assert one.deviation("accuracy") is None
    assert {row.measure: row.cells for row in spread_rows([one])}["Accuracy"] == ("0.9000",)
