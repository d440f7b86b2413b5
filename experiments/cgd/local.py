"""Local training: each participant of a grid by itself, on its own rows and columns (`cgd.txt`, Tables 3, 5 and 8).

    python experiments/cgd/local.py mnist.toml 10x7 100x49 1000x112 --data DIR --out runs/reproduce

A run file says how: CGD's, with its model, start w(1) = delta * Rand, rate and rows, so that all that differs is that
nobody adds anything up. `moretta reproduce` cannot say this, as a run is one federation. Of many participants a sample
is trained, drawn from the seed; every one is measured on its own columns of all test rows. Every participant has the
labels of its rows, as the paper's must have. Only whole batches, as all of the paper's.

Written is OUT/cgd-local-NAME.json, where NAME is the run file's; a grid that is in it already, with the same settings,
is kept.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.data.silo import Silo
from moretta.data.tables.preparation import ColumnRules
from moretta.errors import MorettaError, ParameterError
from moretta.protocols.cgd.layers import Layers
from moretta.protocols.cgd.local import centers, confined, narrowed, shared_biases
from moretta.protocols.cgd.params import CGD
from moretta.protocols.common import enrolment, modules
from moretta.run.assembly import federation_of
from moretta.run.evaluation import evaluate
from moretta.run.federation import Federation
from moretta.secure_aggregation.keystream import SecretRoot

sys.path.append(str(Path(__file__).resolve().parents[1]))
from printed.cgd import LOCAL
from provenance import provenance
from reproduction import as_json

HERE = Path(__file__).parent
COLUMNS = ("Mean %", "Standard error", "Worst %", "Mean loss", "Trained", "Of")
# Local training's accuracy and loss in the paper, which does not say whether mean or worst, by run file and grid.
PAPER = {file: {grid: tuple(map(float, told)) for grid, told in rows.items()} for file, _, rows in LOCAL}


def train_alone(silo: Silo, federation: Federation, rounds: int, seed: int) -> dict[str, Any]:
    """Train one participant for so many rounds; return its figures on its own columns of the test rows."""
    params, dtype = federation.spec.protocol, getattr(torch, federation.spec.run.dtype)
    if not isinstance(params, CGD) or federation.test is None:
        raise ParameterError("expected a run file with protocol cgd and test rows")
    columns, (x_test, y_test) = list(silo.columns), federation.test
    model = narrowed(federation.model, Layers.of(federation.model), len(columns)).to(dtype).train()
    root = SecretRoot.insecure(seed, silo.name)
    own = [name for name in modules.trainable(model) if name not in shared_biases(params, model)]
    start = confined(params, centers(params, model, seed), own, silo.name, root)
    modules.load(model, start)
    (x, x_test), loss = _inputs(federation, silo.x, x_test[:, columns], dtype), params.loss_function
    began = time.perf_counter()
    y = enrolment.targets(silo.y, federation.outputs, params.loss, silo.name, dtype)
    weights = list(modules.trainable(model).values())
    for number in range(1, rounds + 1):
        gradients = torch.autograd.grad(loss(model(x), y), weights)
        with torch.no_grad():
            if params.weight_decay:
                gradients = torch._foreach_add(gradients, weights, alpha=params.weight_decay)
            torch._foreach_add_(weights, gradients, alpha=-params.rate(number, rounds))
    figures = evaluate(model, x_test, y_test, params.loss, "classification", metrics=False)
    told = {"accuracy": figures["accuracy"], "loss": figures["loss"]}
    return {
        "participant": silo.name,
        "rows": len(x),
        "columns": len(columns),
        **(told if np.isfinite(told["loss"]) else {"failed": "diverged"}),
        "wall_seconds": round(time.perf_counter() - began, 2),
    }


def _inputs(
    federation: Federation, x: NDArray[np.generic], x_test: NDArray[np.generic], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return training and test inputs, standardised by the participant's own rows where the run file says so."""
    found = enrolment.fitted_alone(x, ColumnRules.alike(x.shape[-1], scaled=federation.spec.data.standardise or False))
    return [enrolment.prepared(part, found, dtype) for part in (x, x_test)]


def of_grid(run_file: RunFile, grid: str, sample: int) -> dict[str, Any]:
    """Train a sample of a grid's participants, each alone; return them and what they come to."""
    federation, seed = federation_of(run_file, None), run_file.run.seed
    if federation.spec.data.batch_size:
        raise ParameterError(
            f"batch-size = {federation.spec.data.batch_size}: local training here takes whole batches; use 0"
        )
    total = len(federation.silos)
    drawn = np.random.Generator(np.random.PCG64(seed)).choice(total, size=min(sample, total), replace=False)
    silos = [federation.silos[index] for index in sorted(drawn)]
    cells = [train_alone(silo, federation, run_file.run.rounds, seed) for silo in silos]
    told = [cell for cell in cells if "failed" not in cell]
    accuracies = [100 * cell["accuracy"] for cell in told]
    figures = [None] * 4
    if told:
        error = statistics.stdev(accuracies) / len(told) ** 0.5 if len(told) > 1 else None
        loss = statistics.fmean(cell["loss"] for cell in told)
        figures = [statistics.fmean(accuracies), error, min(accuracies), loss]
    return {"row": grid, "ours": [*figures, len(told), total], "cells": cells}


def run(name: str, grids: Sequence[str], sample: int, path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train samples of several grids' participants; keep and return the results."""
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    rows = {row["row"]: row for row in kept}
    for grid in grids:
        if not re.fullmatch(r"[1-9][0-9]*x[1-9][0-9]*", grid):
            raise ParameterError(f"{grid}: expected a grid such as 100x49")
        cut = f"data.grid=[{grid.replace('x', ', ')}]"
        run_file = run_files.load(HERE / name, [*overrides, cut, "protocol.vertical=independent"])
        settings = {
            "rounds": run_file.run.rounds,
            "seed": run_file.run.seed,
            "protocol": run_file.protocol.model_dump(mode="json", exclude_none=True),
            "model": run_file.model.model_dump(mode="json"),
            "sample": sample,
        }
        if grid in rows and rows[grid]["settings"] == settings:
            continue
        rows[grid] = {**of_grid(run_file, grid, sample), "settings": settings, "commit": provenance()["commit"]}
        accuracy, loss = PAPER.get(Path(name).stem, {}).get(grid, (None, None))
        rows[grid]["paper"] = {"accuracy": accuracy, "loss": loss}
        told = {"format": 1, "name": path.stem, "columns": list(COLUMNS), "rows": list(rows.values())}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_json(told | provenance()), encoding="utf-8")
        print(f"{grid}: {dict(zip(COLUMNS, rows[grid]['ours'], strict=True))}", file=sys.stderr, flush=True)
    return json.loads(path.read_text(encoding="utf-8"))


def main(words: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train participants of a grid alone.")
    parser.add_argument("name", help="a run file beside this script, with protocol cgd")
    parser.add_argument("grids", nargs="+", metavar="GRID", help="such as 100x49")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder of data sets")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="runs/reproduce by default")
    parser.add_argument("--record", metavar="NAME", help="of the record; cgd-local-RUNFILE by default")
    parser.add_argument("--sample", type=int, default=30, help="how many participants of a grid; 30 by default")
    parser.add_argument("--rounds", type=int, help="iterations, instead of the run file's")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as in moretta train")
    given = parser.parse_args(words)
    overrides = list(given.set)
    path = given.out / f"{given.record or f'cgd-local-{Path(given.name).stem}'}.json"
    try:
        wanted = run_files.load(HERE / given.name).data.path
        if wanted is not None and given.data is not None:
            overrides.append(f"data.path={json.dumps(str((given.data / wanted).absolute()))}")
        if given.rounds is not None:
            overrides.append(f"run.rounds={given.rounds}")
        run(given.name, given.grids, given.sample, path, overrides)
    except MorettaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
