"""Table 4: the memory of backpropagation beside that of BAFFLE's forward passes, each in a fresh process.

    python experiments/baffle/memory.py

Peak resident memory of a process (VmHWM of Linux) that does nothing else, in MiB, on one thread of a CPU; PyTorch's own
220 MiB are in it, as they are on a device. `edge` is the client without PyTorch (`moretta.edge`), rows four at a time.
The paper's figures are of a GPU, and count what the networks take alone; only ratios compare.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from records import Record, Row, name_of, parser, run

from moretta.errors import ParameterError

CHILD = Path(__file__).with_name("memory_child.py")
COLUMNS = ("PyTorch alone", "backprop", "forward", "edge", "forward / backprop %", "edge / backprop %")
PAPER = {  # backprop, BAFFLE's most, ratio in per cent
    ("lenet", 32): (1680, 174, 10.35),
    ("wrn", 32): (1878, 196, 10.43),
    ("mobilenet", 32): (2041, 217, 10.63),
    ("lenet", 224): (2527, 201, 7.95),
    ("wrn", 224): (3425, 251, 7.32),
    ("mobilenet", 224): (5271, 289, 5.48),
}
QUICK = (("lenet", 32, 64), ("wrn", 32, 8))
CASES = (*((model, 32, batch) for model in ("lenet", "wrn", "mobilenet") for batch in (8, 64)), ("lenet", 224, 8),
         ("wrn", 224, 8), ("mobilenet", 224, 8))  # fmt: skip


def peak(mode: str, model: str, batch: int, side: int) -> float:
    """Return the peak in MiB of a process that does one thing."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    words = [sys.executable, str(CHILD), mode, json.dumps({"model": model, "batch": batch, "side": side})]
    done = subprocess.run(words, env=os.environ | threads, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ParameterError(
            f"{mode} of {model} at batch {batch}: {(done.stderr.strip().splitlines() or ['killed'])[-1]}"
        )
    return float(json.loads(done.stdout.splitlines()[-1])["peak_mib"])


def has_edge() -> bool:
    """Whether there is an edge client, and all that exports for it."""
    names = ("moretta.edge", "onnxruntime", "onnx", "onnxscript")
    return all(importlib.util.find_spec(name) is not None for name in names)


def row_of(model: str, side: int, batch: int) -> Row:
    """Measure one network and batch."""
    alone, trained, forward = (peak(mode, model, batch, side) for mode in ("torch", "backprop", "forward"))
    edge = None
    if has_edge():
        with tempfile.TemporaryDirectory() as folder:
            graph = f"{folder}/graph.onnx"
            peak("export", f"{model}:{graph}", batch, side)
            edge = peak("edge", graph, batch, side)
    ratios = (100 * forward / trained, None if edge is None else 100 * edge / trained)
    bp, baffle, ratio = PAPER[model, side]
    paper = (None, bp, baffle, None, ratio, None)
    return Row(f"{model}, {side} x {side}, batch {batch}", (alone, trained, forward, edge, *ratios), paper)


def measure(given: argparse.Namespace) -> Record:
    """Measure all cases."""
    notes = [
        "MiB of a whole process on a CPU, PyTorch's libraries included; the paper's MB are of a GPU, and its BAFFLE "
        "runs layer by layer.",
        "The paper's batch size is lost in the text that we have; its figures stand beside each of ours.",
        "forward: all rows and a whole layer at once, several perturbed LeNets together. edge: ONNX Runtime, 4 rows "
        "at a time.",
    ]
    title = "Table 4: peak memory in MiB, backpropagation beside BAFFLE's forward passes"
    record = Record(name_of(given, "baffle-table-4"), title, COLUMNS, {"k": 8, "dtype": "float32"}, notes)
    for model, side, batch in QUICK if given.quick else CASES:
        record.add(row_of(model, side, batch))
    return record


if __name__ == "__main__":
    sys.exit(run(measure, parser("Measure Table 4.").parse_args()))
