"""Ten silos with discrete noise and losses, beside one party that holds all rows: what distributing the noise costs.

    python experiments/dp/central.py --data DIR --out runs/reproduce

Ours is a run of `bank.toml` or `mnist.toml`: `fedsgd` under pairwise masks, 15 % of ten silos lost in each round, and
rounds with more losses than the sum bears lost, which count as the others. The central baseline is a loop of its own
in this file, of NumPy alone: Poisson lots of all rows, each row's gradient clipped, continuous Gaussian noise (Abadi
et al., CCS 2016, Algorithm 1). Both are logistic regression from the same first weights, with the same chance of a row
to be in a round, the same rounds, and the noise that dp-accounting has for epsilon.

Clip norm and rate of each method are those of `TRIES` with the highest accuracy at epsilon 2 on a tenth of the training
rows, at a seed that no figure is measured at. Test rows are scored once a run, at the end.

Written is OUT/dp-central.json after each run: it goes on where it was stopped.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.config import run_files
from moretta.engines.files import write_atomically
from moretta.errors import MorettaError, ParameterError
from moretta.protocols.common.accountant import noise_for
from moretta.run.assembly import federation_of
from moretta.run.federation import Federation
from moretta.run.inputs import RunRows

sys.path.append(str(Path(__file__).resolve().parents[1]))
from provenance import provenance
from records_of_pages import T_95
from reproduction import as_json, seeds

HERE = Path(__file__).parent
DATA, METHODS, EPSILONS = ("bank", "mnist"), ("ours", "central"), (8.0, 2.0)
TRIES = tuple(itertools.product((1.0, 2.0), (2.0, 4.0)))  # clip norms and rates
SEEDS, TRIED_AT, TRIED_WITH = (1, 2, 3, 4, 5), 100, 2.0
DELTA, VALIDATION = 1e-5, 0.1
COLUMNS = ("ours %", "central %", "difference", "half of 95 %", "seeds", "clip", "rate", "central clip",
           "central rate", "noise", "rounds", "lost rounds", "lost silos %")  # fmt: skip


@lru_cache(maxsize=2)  # the next cell is often of the same rows
def federation(name: str, data: Path, seed: int, tried: bool, *keys: str) -> Federation:
    """Return a run's silos and model. tried: whether validation rows are scored, and no test rows."""
    where = json.dumps(str((data / run_files.load(HERE / f"{name}.toml").data.path).absolute()))
    held = [f"data.validation-fraction={VALIDATION}"] if tried else []
    found = federation_of(
        run_files.load(HERE / f"{name}.toml", [*seeds(seed), f"data.path={where}", *held, *keys]), None
    )
    if not tried:
        return found
    rows = RunRows(found.silos, test=found.validation, feature_names=found.feature_names)
    return Federation.of(found.spec, found.model, rows, None)


@cache
def planned(name: str, data: Path, epsilon: float, tried: bool) -> tuple[float, float, int]:
    """Return the largest chance that a row of any silo has to be in a round, the noise, and how many rounds."""
    of, rounds = federation(name, data, SEEDS[0], tried), run_files.load(HERE / f"{name}.toml").run.rounds
    q = of.spec.data.batch_size / min(len(silo.x) for silo in of.silos)
    return q, math.ceil(1e6 * noise_for(epsilon, DELTA, q, rounds)) / 1e6, rounds


def played(name: str, data: Path, seed: int, clip: float, rate: float, epsilon: float, tried: bool) -> dict[str, Any]:
    """Train ours, and return what is measured."""
    _, noise, rounds = planned(name, data, epsilon, tried)
    keys = {"dp-noise": noise, "dp-clip": clip, "dp-delta": DELTA, "dp-epsilon": epsilon, "learning-rate": rate}
    told = [f"protocol.{key}={value}" for key, value in keys.items()]
    record = federation(name, data, seed, tried, *told, f"engine.faults.seed={seed}").train(rounds, seed).record
    lost = [one["round"] for one in record.get("lost", [])]
    if record["facts"]["epsilon"] > epsilon:
        raise ParameterError(f"expected an epsilon of at most {epsilon}, got {record['facts']['epsilon']}")
    return {
        "accuracy": record["test"]["accuracy"],
        "auc": record["test"]["metrics"].get("auc"),
        "noise": noise,
        "rounds": rounds,
        "epsilon": record["facts"]["epsilon"],
        "releases": record["facts"]["releases"],
        "lost_rounds": len(lost),
        "lost_silos": len({(one["round"], one["silo"]) for one in record["dropped"] if one["round"] <= rounds}),
    }


def central(name: str, data: Path, seed: int, clip: float, rate: float, epsilon: float, tried: bool) -> dict[str, Any]:
    """Train one party that holds all rows, with continuous noise, and return what is measured."""
    of, (q, noise, rounds) = federation(name, data, seed, tried), planned(name, data, epsilon, tried)
    x, y = _flat([silo.x for silo in of.silos]), np.concatenate([np.asarray(silo.y) for silo in of.silos])
    x_test, y_test = _flat([of.test[0]]), np.asarray(of.test[1])
    if name == "bank":  # as the silos standardise, by the means and deviations of all of them
        mean, deviation = x.mean(axis=0), x.std(axis=0)
        x, x_test = ((part - mean) / np.where(deviation > 0, deviation, 1.0) for part in (x, x_test))
    x, x_test = (np.hstack([part, np.ones((len(part), 1))]) for part in (x, x_test))
    weight, bias = (each.detach().double().numpy() for each in of.model.parameters())
    w, drawn = np.hstack([weight, bias[:, None]]), np.random.default_rng([seed, 1])
    for _ in range(rounds):
        lot = np.flatnonzero(drawn.random(len(x)) < q)
        delta = _softmax(x[lot] @ w.T) - np.eye(len(w))[y[lot]]
        norms = np.linalg.norm(delta, axis=1) * np.linalg.norm(x[lot], axis=1)  # of outer products
        total = (delta / np.maximum(1.0, norms / clip)[:, None]).T @ x[lot]
        w = w - rate * (total + drawn.normal(0.0, noise * clip, w.shape)) / (q * len(x))
    found = _softmax(x_test @ w.T)
    told = {"accuracy": float((found.argmax(axis=1) == y_test).mean()), "noise": noise, "rounds": rounds}
    return told | {"auc": _auc(found[:, 1], y_test) if len(w) == 2 else None}


def _flat(parts: Sequence[NDArray[np.generic]]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(part).reshape(len(part), -1) for part in parts]).astype(np.float64)


def _softmax(outputs: NDArray[np.float64]) -> NDArray[np.float64]:
    found = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return np.asarray(found / found.sum(axis=1, keepdims=True))


def _auc(scores: NDArray[np.float64], y: NDArray[np.generic]) -> float:
    positive, negative = scores[y == 1], np.sort(scores[y == 0])
    below, to = (np.searchsorted(negative, positive, side=side) for side in ("left", "right"))
    return float((below + to).mean() / 2 / len(negative))


def rows(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the means of all cells that are measured, and their differences paired over seeds."""
    found = []
    for name, epsilon, figure in itertools.product(DATA, EPSILONS, ("accuracy", "auc")):
        both = [{one["seed"]: one for one in cells if not one["tried"]
                 and (one["data"], one["epsilon_wanted"], one["method"]) == (name, epsilon, method)}
                for method in METHODS]  # fmt: skip
        common = [seed for seed in SEEDS if all(seed in of and of[seed][figure] is not None for of in both)]
        if len(common) < 2:
            continue
        ours, alone = ([100 * of[seed][figure] for seed in common] for of in both)
        apart = [one - other for one, other in zip(ours, alone, strict=True)]
        half = T_95[len(common)] * statistics.stdev(apart) / math.sqrt(len(common))
        first, other = both[0][common[0]], both[1][common[0]]
        mine = [both[0][seed] for seed in common]
        asked = 10 * sum(one["rounds"] for one in mine)
        told = [statistics.fmean(ours), statistics.fmean(alone), statistics.fmean(apart), half, len(common),
                first["clip"], first["rate"], other["clip"], other["rate"], first["noise"],
                first["rounds"], statistics.fmean(one["lost_rounds"] for one in mine),
                100 * sum(one["lost_silos"] for one in mine) / asked]  # fmt: skip
        found.append({"row": f"{name}, epsilon {epsilon:g}, {figure}", "ours": told})
    return found


def run(data: Path, path: Path) -> None:
    """Train what is not in the record yet, and keep it after each run."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells_played"] if path.is_file() else []

    def keep() -> None:
        told = {"format": 1, "name": "dp-central", "columns": COLUMNS, "rows": rows(cells), "cells_played": cells}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, as_json(told | provenance()).encode())

    def cell(name: str, method: str, seed: int, clip: float, rate: float, epsilon: float, tried: bool) -> float:
        key = {"data": name, "method": method, "seed": seed, "clip": clip, "rate": rate, "epsilon_wanted": epsilon,
               "tried": tried}  # fmt: skip
        for one in cells:
            if {place: one[place] for place in key} == key:
                return float(one["accuracy"])
        began = time.process_time()
        found = (played if method == "ours" else central)(name, data, seed, clip, rate, epsilon, tried)
        cells.append(key | found | {"core_seconds": round(time.process_time() - began, 2)})
        keep()
        print(f"{key}: {found}", file=sys.stderr, flush=True)
        return float(found["accuracy"])

    for name in DATA:
        best = {method: max(TRIES, key=lambda one: cell(name, method, TRIED_AT, *one, TRIED_WITH, True))
                for method in METHODS}  # fmt: skip
        for seed, epsilon, method in itertools.product(SEEDS, EPSILONS, METHODS):
            cell(name, method, seed, *best[method], epsilon, False)
    keep()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Distributed noise beside the central model.")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folder of data sets")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="runs/reproduce by default")
    given = parser.parse_args()
    try:
        run(given.data, given.out / "dp-central.json")
    except MorettaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
