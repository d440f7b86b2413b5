"""Say what became of the run, and compare its model with scikit-learn's on all rows in one place.

    python examples/consortium/compare.py FOLDER

Both are judged on west's visits, which nobody trained on and by which nothing was chosen. Ends with exit code 1 where
their areas under the ROC curve are more than 0.01 apart, or east did not come back.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from moretta import read_table
from moretta.config import run_files, silo_file
from moretta.deployment.shared_settings import silos_at

SITES, ALLOWED = ("north", "south", "east"), 0.01


def main(folder: Path) -> bool:
    """Print both comparisons; return whether all is as it should be."""
    history = [json.loads(line) for line in (folder / "server/run/history.jsonl").read_text().splitlines()]
    without = [line["round"] for line in history if not any("east" in one["silos"] for one in line["sums"])]
    best = json.loads((folder / "server/run/result.json").read_text())["facts"]["best_round"]
    is_back = bool(without) and without[-1] < len(history)
    print(f"{len(history)} rounds, of which round {best:g} is released; {len(without)} of them without east")

    run_file = run_files.load(folder / "server/run.toml")
    assert run_file.table is not None
    silos = [silo for name in SITES for silo in silos_at(run_file, silo_file.load(folder / name / "silo.toml"))[0]]
    rows = [silo for silo in silos if not silo.remote]  # as each site reads its own
    pooled = make_pipeline(SimpleImputer(), StandardScaler(), LogisticRegression(max_iter=1000))
    pooled.fit(np.concatenate([one.x for one in rows]), np.concatenate([one.y for one in rows]))
    west = read_table(folder / "west/visits.csv", run_file.table)
    with (folder / "west/predictions.csv").open(newline="") as file:
        ours = [float(row["probability_yes"]) for row in csv.DictReader(file)]
    aucs = [float(roc_auc_score(west.y, chances)) for chances in (ours, pooled.predict_proba(west.x)[:, 1])]
    apart = abs(aucs[0] - aucs[1])
    print(
        f"AUC on {len(west.y)} visits of west: {aucs[0]:.4f} by the consortium, {aucs[1]:.4f} by scikit-learn on "
        f"pooled rows; {apart:.4f} apart, and at most {ALLOWED} is allowed"
    )
    return is_back and apart <= ALLOWED


if __name__ == "__main__":
    sys.exit(0 if main(Path(sys.argv[1])) else 1)
