"""A third reading of a split by columns: trained as Algorithm 2 is printed, and judged by a row of the grid together.

    python experiments/cgd/third_reading.py --data DIR --out runs/reproduce

Participants of a grid train with ``vertical = "independent"``, each by its own columns. Then the holders of a row
answer together, in three ways: by the sum of what their first layers give, in the upper layers of the row's first
participant (as ``joint`` answers); by the sum of their outputs (as later scripts of the authors do); by the mean of
their softmax. Beside them stands what a participant answers by itself. Written is OUT/cgd-third-reading.json.
"""

import argparse
import copy
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moretta.config import run_files
from moretta.contract.messages import Array, Stamp, Tensors
from moretta.contract.roles import Exchange
from moretta.data.holders import grid_of
from moretta.errors import MorettaError, ParameterError
from moretta.protocols.cgd.layers import Layers
from moretta.protocols.common import modules
from moretta.protocols.registry import build
from moretta.run.assembly import federation_of

sys.path.append(str(Path(__file__).resolve().parents[1]))
from provenance import provenance
from reproduction import as_json, seeds

HERE = Path(__file__).parent
SEED = 1


def together(parts: Mapping[str, Tensors], first: str) -> dict[str, Array]:
    """Return one model: the holders' parts of the first layer, which are 0 elsewhere, and one holder's other layers.

    parts: the holders' whole models, by name. first: the name of the first layer's weight.
    """
    holder, *_ = parts.values()
    return {**holder, first: np.sum([part[first] for part in parts.values()], axis=0)}


def of_row(model: nn.Module, parts: Mapping[str, Tensors], x: Tensor) -> dict[str, list[Tensor]]:
    """Return the log probabilities of a row's answers, each [rows, classes], by way of answering."""
    outputs = []
    for part in parts.values():
        modules.load(model, part)
        outputs.append(modules.outputs_of(model, x).double())
    modules.load(model, together(parts, Layers.of(model).weight))
    return {
        "by itself": [one.log_softmax(1) for one in outputs],
        "first layers added": [modules.outputs_of(model, x).double().log_softmax(1)],
        "outputs added": [torch.stack(outputs).sum(0).log_softmax(1)],
        "mean of softmax": [torch.stack([one.softmax(1) for one in outputs]).mean(0).log()],
    }


def done(exchange: Exchange[Any]) -> None:
    """Play what asks nobody."""
    for _ in exchange:
        raise ParameterError("expected a simulation, which asks nobody")


def figures(answers: Tensor, y: Tensor) -> dict[str, float]:
    """Return accuracy and loss."""
    right = (answers.argmax(1) == y).double().mean()
    return {"accuracy": float(right), "loss": float(nn.functional.nll_loss(answers.float(), y))}


def measured(overrides: list[str]) -> dict[str, Any]:
    """Train, and return each way's worst and mean row of the grid, and the participants by themselves."""
    run_file = run_files.load(HERE / "mnist.toml", overrides)
    federation, began = federation_of(run_file, None), time.perf_counter()
    if federation.test is None:
        raise ParameterError("expected a run file with test rows")
    rounds, seed = run_file.run.rounds, run_file.run.seed
    played = build(federation._setting(seed, rounds))
    done(played.server.setup(Stamp("third-reading", 0, 0), ()))
    for number in range(1, rounds + 1):
        done(played.server.round(Stamp("third-reading", number, 0)))
    x, y = (torch.from_numpy(np.asarray(part)) for part in federation.test)
    models, grid, model = played.models(), grid_of(federation.silos), copy.deepcopy(federation.model).eval()
    found = dict[str, list[dict[str, float]]]()
    for names in grid.rows.values():
        for way, answers in of_row(model, {name: models[name] for name in names}, x.float()).items():
            found.setdefault(way, []).extend(figures(one, y.long()) for one in answers)
    told = {
        way: {
            "worst": min(each, key=lambda one: one["accuracy"]),
            "mean": {key: float(np.mean([one[key] for one in each])) for key in ("accuracy", "loss")},
        }
        for way, each in found.items()
    }
    return {"rounds": rounds, **told, "seconds": time.perf_counter() - began}


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets; it has mnist/")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--grid", default="[10, 7]")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as in moretta train")
    given = parser.parse_args()
    settings = [
        *seeds(SEED), f"run.rounds={given.rounds}", f"run.evaluate-every={given.rounds}", f"data.grid={given.grid}",
        "protocol.delta=0.1", "protocol.vertical=independent", *given.set, f"data.path={given.data / 'mnist'}",
    ]  # fmt: skip
    try:
        found = measured(settings)
    except MorettaError as error:
        print(error, file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    record = {"grid": given.grid, "settings": settings[:-1], "public_secret_seed": SEED, **found, **provenance()}
    (given.out / "cgd-third-reading.json").write_text(as_json(record))
    print(as_json(record), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
