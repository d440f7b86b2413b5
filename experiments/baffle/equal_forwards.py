"""Few directions and many rounds, or many and few, at equal forward passes: LeNet on MNIST.

    python experiments/baffle/equal_forwards.py --data DIR

`moretta reproduce` has one number of rounds for all cells of a table, so a script makes this one.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from records import SEED, Record, Row, name_of, parser, run
from reproduction import seeds

from moretta.config import run_files
from moretta.errors import ParameterError
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.baffle.silo.estimate import forwards_of
from moretta.run.assembly import federation_of

HERE = Path(__file__).parent
COLUMNS = ("accuracy, %", "loss", "rounds", "MB down a silo")


def row_of(path: Path, k: int, forwards: int, overrides: tuple[str, ...]) -> Row:
    """Train with K directions for as many rounds as the forward passes last."""
    run_file = run_files.load(path, [*overrides, f"protocol.k={k}", *seeds(SEED)])
    if not isinstance(run_file.protocol, BAFFLE):
        raise ParameterError(f"{path}: expected protocol baffle")
    rounds = max(1, forwards // forwards_of(run_file.protocol.form, k))
    began = time.perf_counter()
    record = federation_of(run_file, None).train(rounds, SEED).record
    down = record["bytes"]["down_per_silo_per_round"] * rounds / 1e6
    figures = (100 * record["test"]["accuracy"], record["test"]["loss"], float(rounds), down)
    facts = {"k": k, "test": record["test"], "facts": record["facts"]}
    return Row(f"K = {k}", figures, None, facts | {"wall_seconds": round(time.perf_counter() - began, 1)})


def measure(given: argparse.Namespace) -> Record:
    """Train once for each K."""
    forwards, batch, rate = (4000, 4, 0.03) if given.quick else (36000, 16, 0.01)
    if given.data is None:
        raise ParameterError("expected --data DIR, or the variable MORETTA_DATA")
    path = json.dumps(str((given.data / "mnist").absolute()))
    sizes = (f"data.batch-size={batch}", f"protocol.learning-rate={rate}", "run.evaluate-every=100000")
    notes = [
        "One rate for all K, chosen at K = 100 (baffle-rate). Adam divides an estimate's size out, so that a smaller K "
        "steps as far, in a worse direction."
    ]
    title = f"K and rounds at {forwards} forward passes of each silo, LeNet on MNIST, ten silos"
    settings = {"forwards": forwards, "batch": batch, "rate": rate, "seed": SEED, "public_secret_seed": SEED}
    record = Record(name_of(given, "baffle-equal-forwards"), title, COLUMNS, settings, notes)
    for k in (20, 50, 100, 200, 500):
        record.add(row_of(HERE / "lenet.toml", k, forwards, (f"data.path={path}", *sizes)))
    return record


if __name__ == "__main__":
    sys.exit(run(measure, parser("Compare K and rounds at equal forward passes.").parse_args()))
