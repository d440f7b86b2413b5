"""Layer by layer: what the edge client's memory is when a model runs as one graph for each layer (Table 4's method).

    python experiments/baffle/slices.py

A slice begins at each convolution or linear layer: it is a layer with what follows it. Each figure is of a process of
its own that does nothing else: peak resident memory (VmHWM of Linux) in MiB, and processor time of a round over that of
the whole graph; one thread, 4 rows at a time, K = 8. `edge`: the client as it is. `whole`: the same graph without
weights in blocks. `slices`: all slices loaded, what lies between two of them kept as long as it is needed. `one at a
time`: a slice is loaded when its turn comes, and let go. All four must give the same losses.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from memory import peak
from records import Record, Row, name_of, parser, run

from moretta.errors import ParameterError
from moretta.protocols.baffle.edge import metadata

CHILD = Path(__file__).with_name("slices_child.py")
COLUMNS = ("edge", "whole", "slices", "one at a time", "slices / whole, time", "one at a time / whole, time", "slices")
QUICK = (("lenet", 32, 8),)
CASES = tuple((model, side, 8) for side in (32, 224) for model in ("lenet", "wrn", "mobilenet"))


def cut(graph: Path, folder: Path) -> int:
    """Write a graph's slices as FOLDER/0.onnx and so on, and plan.json; return how many there are."""
    import onnx

    model = onnx.shape_inference.infer_shapes(onnx.load(str(graph)))
    whole = model.graph
    kinds = {one.name: one.type.tensor_type.elem_type for one in (*whole.input, *whole.value_info, *whole.output)}
    fixed = {one.name: one for one in whole.initializer}
    outer = {one.name for one in whole.input}
    slices: list[list[onnx.NodeProto]] = [[]]
    for node in whole.node:
        if slices[-1] and any(name in outer - {"x"} for name in node.input) and _weighs(node):
            slices.append([])
        slices[-1].append(node)
    plan = []
    for number, nodes in enumerate(slices):
        made = {name for node in nodes for name in node.output}
        used = {name for node in nodes for name in node.input if name and name not in made and name not in fixed}
        later = {name for rest in slices[number + 1 :] for node in rest for name in node.input}
        given = sorted(made & (later | {one.name for one in whole.output}))
        weights = [fixed[name] for node in nodes for name in node.input if name in fixed]
        part = onnx.helper.make_graph(
            nodes,
            str(number),
            [_typed(name, kinds) for name in sorted(used)],
            [_typed(name, kinds) for name in given],
            list({one.name: one for one in weights}.values()),
        )
        built = onnx.helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)
        onnx.save(built, str(folder / f"{number}.onnx"))
        plan.append({"uses": sorted(used), "gives": given})
    shapes = metadata.read({one.key: one.value for one in model.metadata_props})[0].shapes
    told = {"slices": plan, "shapes": {name: list(shape) for name, shape in shapes.items()}}
    (folder / "plan.json").write_text(json.dumps(told), encoding="utf-8")
    return len(slices)


def _weighs(node: "object") -> bool:
    return node.op_type in ("Conv", "Gemm", "MatMul")  # type: ignore[attr-defined]


def _typed(name: str, kinds: "dict[str, int]") -> "object":
    import onnx

    return onnx.helper.make_tensor_value_info(name, kinds.get(name) or onnx.TensorProto.FLOAT, None)


def child(mode: str, graph: Path, folder: Path, batch: int, side: int) -> dict[str, float]:
    """Return peak in MiB, seconds of processor time of a round, and a loss, of a process that does one thing."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    words = [sys.executable, str(CHILD), mode, str(graph), str(folder), str(batch), str(side)]
    done = subprocess.run(words, env=os.environ | threads, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ParameterError(f"{mode} of {graph.name}: {(done.stderr.strip().splitlines() or ['killed'])[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def row_of(model: str, side: int, batch: int) -> Row:
    """Measure one network."""
    with tempfile.TemporaryDirectory() as name:
        graph, folder = Path(name) / "graph.onnx", Path(name)
        peak("export", f"{model}:{graph}", batch, side)
        count = cut(graph, folder)
        found = {mode: child(mode, graph, folder, batch, side) for mode in ("edge", "whole", "slices", "one")}
    losses = [one["loss"] for one in found.values()]
    if max(losses) - min(losses) > 1e-4 * abs(losses[0]):
        raise ParameterError(f"{model}: expected the same loss of all ways to run it, got {losses}")
    peaks = [one["peak_mib"] for one in found.values()]
    ratios = [found[mode]["seconds"] / found["whole"]["seconds"] for mode in ("slices", "one")]
    return Row(f"{model}, {side} x {side}, batch {batch}", (*peaks, *ratios, float(count)))


def measure(given: argparse.Namespace) -> Record:
    """Measure all cases."""
    notes: Sequence[str] = (
        "The paper's Table 4 slices the graph and executes it per layer, with 5 to 10 per cent of backpropagation's "
        "memory of a GPU; it counts what networks take alone.",
        "ONNX Runtime lets go of an activation after its last use, so that a whole graph holds what the widest layer "
        "and its shortcuts take, as slices do.",
    )
    title = "Peak memory in MiB of the edge client: whole graphs, and layer by layer"
    settings = {"k": 8, "dtype": "float32", "micro_batch": 4}
    record = Record(name_of(given, "baffle-slices"), title, COLUMNS, settings, notes)
    for model, side, batch in QUICK if given.quick else CASES:
        record.add(row_of(model, side, batch))
    return record


if __name__ == "__main__":
    sys.exit(run(measure, parser("Measure what running layer by layer gives.").parse_args()))
